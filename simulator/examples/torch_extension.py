"""Use 3 of the simulator by itself: a PyTorch extension with its launcher, on CPU tensors.

    pip install ./simulator torch           # and the HIP headers: libamdhip64-dev
    python simulator/examples/torch_extension.py

The extension is compiled as for a GPU but for one thing: it is linked with the stand-in for the HIP
runtime, and registered for CPU tensors. Every launch is executed, checked and, here, timed.
"""

import pathlib
import subprocess
import sysconfig
import tempfile

import torch

import simulator

KERNEL = """
#include <hip/hip_runtime.h>

__global__ void scale(float* out, const float* in, float by, int n) {
  // blockIdx.x * 256 + threadIdx.x, without ROCm's device libraries.
  int at = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
  if (at < n) out[at] = by * in[at];
}

void launch_scale(float* out, const float* in, float by, int n, hipStream_t stream) {
  scale<<<(n + 255) / 256, 256, 0, stream>>>(out, in, by, n);
}
"""
BINDING = """
#include <torch/library.h>
#include <ATen/ATen.h>

void launch_scale(float* out, const float* in, float by, int n, struct ihipStream_t* stream);

void scale(at::Tensor out, const at::Tensor& in, double by) {
  TORCH_CHECK(in.is_contiguous() && out.is_contiguous(), "scale: required contiguous tensors");
  launch_scale(out.data_ptr<float>(), in.data_ptr<float>(), by, in.numel(), nullptr);
}
TORCH_LIBRARY(example, m) { m.def("scale(Tensor(a!) out, Tensor x, float by) -> ()"); }
TORCH_LIBRARY_IMPL(example, CPU, m) { m.impl("scale", &scale); }
"""


def build(folder: pathlib.Path) -> pathlib.Path:
    """The extension, for gfx942."""
    root = pathlib.Path(torch.__file__).parent
    kernel, binding, output = folder / "scale.hip", folder / "binding.cpp", folder / "example.so"
    kernel.write_text(KERNEL)
    binding.write_text(BINDING)
    common = ["clang++-22", "-std=c++20", "-O2", "-g", "-fPIC"]
    hip = ["--offload-arch=gfx942", "--rocm-path=/usr", "-nogpulib", "-x", "hip",
           "-D__AMDGCN_WAVEFRONT_SIZE=64"]  # fmt: skip
    torch_flags = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{root / 'include' / part}" for part in ("", "torch/csrc/api/include")),
        f"-I{sysconfig.get_paths()['include']}",
    ]
    objects = [f"{path}.o" for path in (kernel, binding)]
    subprocess.run([*common, *hip, "-c", str(kernel), "-o", objects[0]], check=True)
    subprocess.run([*common, *torch_flags, "-c", str(binding), "-o", objects[1]], check=True)
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", str(simulator.runtime())]
    link = ["clang++-22", "--hip-link", "-nogpulib", "-shared", *objects, *libraries]
    subprocess.run([*link, "-o", str(output)], check=True)
    return output


def main() -> None:
    hip = simulator.load_runtime()  # before the extension, which then finds HIP's functions in it
    with tempfile.TemporaryDirectory() as folder:
        torch.ops.load_library(str(build(pathlib.Path(folder))))
    x, out = torch.randn(10_000), torch.empty(10_000)
    hip.register(x)
    hip.register(out, output=True)
    hip.cycles(simulator.machine_for("gfx942"))
    torch.ops.example.scale(out, x, 3.0)
    result = hip.last().check()
    print(f"right: {torch.equal(out, x * 3)}, {result.cycles.seconds * 1e6:.2f} us modelled, "
          f"{result.cycles.fetch_bytes:,} bytes fetched, no findings")  # fmt: skip


if __name__ == "__main__":
    main()
