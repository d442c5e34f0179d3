"""Use 1 of the simulator by itself: a HIP kernel of one's own, wrong at first.

    pip install ./simulator
    python simulator/examples/own_kernel.py [--html FILE]

Each workgroup sums 256 floats through LDS. The first version reads what other waves wrote without
waiting for them: on a GPU it is right most of the time. The simulator names the line.
"""

import argparse
import pathlib
import subprocess
import tempfile

import numpy as np

import simulator

SOURCE = """
#define TID __builtin_amdgcn_workitem_id_x()
#define BID __builtin_amdgcn_workgroup_id_x()
extern "C" __attribute__((global)) void sums(float* out, const float* in) {
  __attribute__((shared)) static float part[256];
  part[TID] = in[BID * 256 + TID];
  for (int step = 128; step; step /= 2) {
    BARRIER
    if (TID < step) part[TID] += part[TID + step];  // the waves above may not have come so far
  }
  if (TID == 0) out[BID] = part[0];
}
"""
BARRIER = ('__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier(); '
           '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");')  # fmt: skip
GROUPS = 64


def compiled(folder: pathlib.Path, barrier: str) -> simulator.CodeObject:
    """No HIP headers are needed for a kernel as plain as this."""
    source, output = folder / "sums.hip", folder / "sums.co"
    source.write_text(SOURCE.replace("BARRIER", barrier))
    flags = ["-x", "hip", "--offload-arch=gfx942", "-O3", "-g", "-nogpuinc", "-nogpulib"]
    bare = ["--offload-device-only", "--no-gpu-bundle-output", "-c"]
    subprocess.run(["clang++-22", *flags, *bare, str(source), "-o", str(output)], check=True)
    return simulator.load(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--html", type=pathlib.Path, help="a page about the right version")
    arguments = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(GROUPS * 256).astype(np.float32)
    machine = simulator.machine_for("gfx942", traced=1)
    with tempfile.TemporaryDirectory() as folder:
        for name, barrier in (("without barriers", ""), ("with barriers", BARRIER)):
            out, code = np.empty(GROUPS, np.float32), compiled(pathlib.Path(folder), barrier)
            args = [simulator.Out(out), values]
            result = code.launch("sums", grid=GROUPS, block=256, args=args, cycles=machine)
            right = np.allclose(out, values.reshape(GROUPS, 256).sum(1), atol=1e-4)
            print(f"{name}: sums right: {right}, {result.cycles.seconds * 1e6:.2f} us modelled")
            for finding in result.findings:
                print(" ", finding)
        if arguments.html:
            arguments.html.write_text(simulator.html_page(result))


if __name__ == "__main__":
    main()
