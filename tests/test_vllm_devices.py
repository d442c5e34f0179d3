"""Where the vLLM plugin's parts run by themselves, and where they wait or stay off."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from project import ROOT


@pytest.fixture
def devices(monkeypatch):
    """The plugin's module of this name, with nothing asked for."""
    monkeypatch.syspath_prepend(str(ROOT / "integrations" / "vllm"))
    found = importlib.import_module("rocm_kernels_vllm.devices")
    for name in ("ROCM_KERNELS_VLLM_ON", *found.DEEP_GEMM):
        monkeypatch.delenv(name, raising=False)
    return found


def test_experts_run_by_themselves_where_they_were_not_behind(devices, monkeypatch):
    wait = devices.why_experts_wait
    amd, hopper, ada = (
        devices.Device(arch="gfx942"),
        devices.Device(capability=(9, 0)),
        devices.Device(capability=(8, 9)),
    )
    assert wait(amd, weights=None) == wait(devices.Device(), weights=None) == ""
    assert wait(hopper, weights="fp8") == ""
    in_16_bits = wait(hopper, weights=None)
    elsewhere = wait(ada, weights="fp8")
    assert "16-bit" in in_16_bits and "Hopper" in elsewhere
    assert all("ROCM_KERNELS_VLLM_ON=experts" in reason for reason in (in_16_bits, elsewhere))
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    assert "DeepGEMM" in wait(hopper, weights="fp8")
    monkeypatch.setenv("VLLM_MOE_USE_DEEP_GEMM", "0")
    assert wait(hopper, weights="fp8") == ""
    monkeypatch.setenv("ROCM_KERNELS_VLLM_ON", "norm, experts")
    assert wait(ada, weights=None) == wait(ada, weights="fp8") == ""
    ampere = devices.Device(capability=(8, 0))
    assert wait(ampere, weights=None) == ""
    assert wait(ampere, weights="fp8") == "FP8 activations need sm_89, got sm_80"


@pytest.mark.parametrize(
    "where, off",
    [
        ({}, []),
        ({"arch": "gfx942"}, []),
        ({"arch": "gfx950"}, ["skinny"]),
        *(
            (
                {"arch": arch},
                ["fp8_linear", "fp8_block_linear", "weight_only", "experts", "skinny"],
            )
            for arch in ("gfx90a", "gfx1100", "gfx1201")
        ),
        ({"capability": (8, 0)}, ["fp8_linear", "fp8_block_linear", "weight_only"]),
        ({"capability": (8, 9)}, ["fp8_block_linear", "weight_only"]),
        ({"capability": (9, 0)}, []),
        ({"capability": (10, 0)}, ["fp8_block_linear", "weight_only"]),
    ],
    ids=str,
)
def test_parts_are_off_on_devices_that_they_are_not_for(devices, where, off):
    parts, why_off = list(importlib.import_module("rocm_kernels_vllm.parts").PARTS), devices.why_off
    reasons = {part: why_off(part, devices.Device(**where)) for part in parts}
    # vLLM has skinny nowhere but on ROCm.
    assert [part for part in parts if reasons[part]] == off
    if "arch" in where and "experts" in off:
        assert reasons["experts"] == f"no matrix kernels for {where['arch']}"


def test_linears_off_hopper_may_be_asked_for(devices, monkeypatch):
    """But not FP8 activations where vLLM itself would have 16-bit ones."""
    why_off = devices.why_off
    assert "ROCM_KERNELS_VLLM_ON=weight_only takes" in why_off(
        "weight_only", devices.Device("", (10, 0))
    )
    monkeypatch.setenv("ROCM_KERNELS_VLLM_ON", "fp8_block_linear,weight_only")
    for part in ("fp8_block_linear", "weight_only"):
        assert why_off(part, devices.Device(capability=(10, 0))) == ""
    assert why_off("weight_only", devices.Device(capability=(8, 0))) == ""
    assert "need sm_89, got sm_80" in why_off("fp8_block_linear", devices.Device(capability=(8, 0)))


def test_the_device_is_what_vllm_runs_on(devices, monkeypatch):
    platform = SimpleNamespace(
        is_rocm=lambda: True, is_cuda=lambda: False, get_device_capability=lambda: (9, 4)
    )
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = platform
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    here = devices.here.__wrapped__
    assert here() == devices.Device(arch="gfx90a")
    platform.is_rocm, platform.is_cuda = platform.is_cuda, platform.is_rocm
    assert here() == devices.Device(capability=(9, 4))
    platform.is_cuda = platform.is_rocm
    assert here() == devices.Device()
