"""A backend takes configs of its own designs alone: the name of another's is refused, whatever its
fields, in the words of its own backend and in this one's."""

import re

import pytest
import torch
from project import ROOT

pytestmark = pytest.mark.not_on("reference")

CONFIG_FILES = {
    "gemm": [
        "gemm/cdna/config.h", "gemm/cuda/config.h",
        "skinny_gemm/cdna/config.h", "skinny_gemm/cuda/config.h",
    ],
    "fused_moe": ["moe/cdna/config.h", "moe/cuda/config.h"],
    "grouped_gemm": ["moe/cdna/config.h", "moe/cuda/config.h"],
    "attention": ["attention/cdna/config.h", "attention/cuda/config.h"],
}  # fmt: skip
# Of each backend; the CPU's configs have names of instruction sets.
OWN = {
    "gemm": {
        "cdna": {"tiled", "plain", "register_pipeline", "specialised_waves"},
        "cuda": {
            "plain", "mma", "warpgroup", "skinny_warpgroup", "tma_pipeline", "register_pipeline",
        },
    },
    "fused_moe": {
        "cdna": {"plain", "streamed", "tiled"},
        "cuda": {"plain", "streamed", "tiled", "warpgroup", "resident", "streamed_wgmma"},
    },
    "grouped_gemm": {
        "cdna": {"plain", "streamed", "tiled"},
        "cuda": {"plain", "tiled", "warpgroup"},
    },
    "attention": {
        "cdna": {"plain", "decode", "prefill"},
        "cuda": {"plain", "decode", "prefill", "gathered"},
    },
}  # fmt: skip
FAMILY = {"simulator": "cdna", "rocm": "cdna", "cuda": "cuda", "cpu": None}
# A config of each design as one of its backends writes it, where that is not this test's.
EXAMPLES = [
    "tiled block_m=128 block_n=128 split_k=1 workgroups=0 whole_rounds=0 group_m=8 xcds=8",
    "plain block_m=128 block_n=128 split_k=1 workgroups=0 whole_rounds=0 group_m=8 xcds=8",
    "mma block_m=128 block_n=128 swap_ab=0 cluster_m=1 cluster_n=1 num_stages=4 "
    "schedule=data_parallel split_k=1 group_m=8",
    "warpgroup block_m=128 block_n=128 swap_ab=0 cluster_m=1 cluster_n=1 num_stages=4 "
    "schedule=data_parallel split_k=1 group_m=8",
    "register_pipeline block_n=16 waves=4 split_k=1 workgroups=0 xcds=8 producers=0 sparse=0",
    "specialised_waves block_n=16 waves=8 split_k=1 workgroups=0 xcds=8 producers=4 sparse=0",
    "tma_pipeline block_m=8 block_n=32 k_chunks=4 num_stages=6 prefetch=2 m_groups=1 split_k=1 "
    "warpgroups=0 n_groups=1",
    *(
        f"{design} block_m={m} block_n={n} order={order} group_m=1 split_k=1 xcds=1"
        for design, m, n in [
            ("streamed", 8, 32),
            ("streamed", 16, 32),
            ("tiled", 128, 128),
            ("warpgroup", 128, 128),
            ("resident", 8, 16),
            ("streamed_wgmma", 16, 64),
            ("streamed_wgmma", 32, 64),
            # What another design's tile is named as: it must not be taken for that.
            *((foreign, m, n) for foreign in ("warpgroup", "resident", "streamed_wgmma")
              for m, n in ((16, 16), (16, 32), (32, 32), (64, 128), (32, 128), (128, 256))),
        ]
        for order in ("row", "expert")
    ),
]  # fmt: skip


def designs_of(files):
    found = set()
    for path in files:
        text = (ROOT / path).read_text()
        listed = re.search(r"kDesigns\[\] = \{([^}]*)\}", text)[1]
        found |= set(re.findall(r'"(\w+)"', listed))
    return found


def test_the_lists_are_whole():
    """Of the designs that the sources name; grouped_gemm has those that serve a layer alone not."""
    for op, files in CONFIG_FILES.items():
        own = set().union(*OWN["fused_moe" if op == "grouped_gemm" else op].values())
        assert designs_of(files) == own, op


@pytest.fixture(scope="module")
def calls(backend):
    """name -> (configs, run): of one product or layer in FP8 that every design could serve."""
    device, fp8 = backend.device, backend.fp8_dtype
    # The simulator's functions are the binding's, checked.
    if backend.name == "simulator":
        import simulated

        ops = simulated.ops
    else:
        ops = backend.ops.functional.ops

    def random(*size):
        return torch.randn(size, device=device).to(fp8)

    def scales(*size):
        return torch.rand(size, device=device) + 0.5

    m, n, k, experts = 32, 256, 256, 4
    a, w, out = random(m, k), random(n, k), torch.empty(m, n, device=device, dtype=torch.bfloat16)
    product = (out, a, w, scales(m, 1), scales(n, 1))
    stack = random(experts, n, k)
    offsets = torch.arange(m // experts, m + 1, m // experts, device=device, dtype=torch.int32)
    grouped = (out, a, stack, offsets, scales(m, 1), scales(experts, n, 1))
    x, y = (torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(2))
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(m)]).int().to(device)
    layer = (
        y, x, random(experts, 2 * n, k), random(experts, k, n), torch.rand(m, 2, device=device),
        ids, scales(experts, 2 * n, 1), scales(experts, k, 1), None, None, "silu", float("inf"),
        False, True, False,
    )  # fmt: skip
    q, keys, values, result = (
        torch.randn(2, rows, heads, 64, device=device).bfloat16()
        for rows, heads in ((3, 4), (9, 2), (9, 2), (3, 4))
    )
    attended = (result, None, q, keys, values, *[None] * 8, 3, 9, 0.125, -1, 0, 0.0)
    return {
        "attention": (
            lambda: ops.attention_configs(*attended),
            lambda config: ops.attention(*attended, config),
        ),
        "gemm": (
            lambda: ops.gemm_configs(*product, False),
            lambda config: ops.gemm(*product, None, config),
        ),
        "fused_moe": (
            lambda: ops.fused_moe_configs(*layer),
            lambda config: ops.fused_moe(*layer, config),
        ),
        "grouped_gemm": (
            lambda: ops.grouped_gemm_configs(*grouped),
            lambda config: ops.grouped_gemm(*grouped, config),
        ),
    }


@pytest.mark.parametrize("op", CONFIG_FILES)
def test_designs_of_another_backend_are_refused(backend, calls, op):
    configs, run = calls[op]
    family = FAMILY[backend.name]
    own = OWN[op][family] if family else set()
    listed = configs().splitlines()
    if family:
        assert {config.split()[0] for config in listed} <= own
    run(listed[0])
    foreign = designs_of(path for files in CONFIG_FILES.values() for path in files) - own
    assert foreign
    tried = [f"{design} {config.partition(' ')[2]}".strip()
             for design in sorted(foreign) for config in listed]  # fmt: skip
    tried += [config for config in EXAMPLES if config.split()[0] in foreign]
    for config in tried:
        with pytest.raises(RuntimeError, match="config: "):
            run(config)
