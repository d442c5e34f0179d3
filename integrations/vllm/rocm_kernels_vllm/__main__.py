"""``python -m rocm_kernels_vllm`` prints which parts of vLLM run on these kernels here."""

from . import kernels, parts

if __name__ == "__main__":
    state = parts.register()
    print(f"{state} (vLLM {parts.version_of_vllm()})")
    for name in state.on:
        print(f"  {name}: {parts.PARTS[name].what}")
    print(kernels.why_not() or f"kernels: {kernels.package().__name__}")
