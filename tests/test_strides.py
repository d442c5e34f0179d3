"""Inputs may have any strides: every public function against itself with contiguous ones."""

import pytest
import torch
from every_call import T, alike, calls, same
from every_layer import cases

# A copy for each call would cost more than the product.
WEIGHTS = {"w", "w_gate_up", "w_down", "w_o", "w_qkv", "B"}


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture(scope="module")
def every_call(best_package, device):
    torch.manual_seed(0)
    return [*calls(best_package, device)]


def spaced(tensor):
    """The same values, each second one of a last dimension."""
    wide = torch.stack([tensor.view(torch.uint8).view(*tensor.shape, -1)] * 2, -2)
    return wide.flatten(-2).flatten(-2).view(tensor.dtype)[..., ::2]


def transposed(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def far_apart(tensor):
    """Rows further apart than they are long, beginning at no multiple of 16 bytes."""
    columns = tensor.shape[-1]
    wide = tensor.new_zeros(*tensor.shape[:-1], columns + 5)
    wide[..., 3 : 3 + columns] = tensor
    return wide[..., 3 : 3 + columns]


LAYOUTS = {"spaced": spaced, "transposed": transposed, "far apart": far_apart}


def layouts_of(tensor):
    for name, layout in LAYOUTS.items():
        if tensor.dim() >= 1 + (name == "transposed") and tensor.numel() > 1:
            laid = layout(tensor)
            assert same(laid, tensor)
            if not laid.is_contiguous():
                yield name, laid


@torch.no_grad()
def test_inputs_have_any_strides(package, every_call):
    refused = set()
    for call in every_call:
        expected = call.fresh().run(package)
        for path in set(call.tensors()) - set(call.written):
            for name, laid in layouts_of(call.tensors()[path]):
                try:
                    found = call.fresh().with_tensor(path, laid).run(package)
                except RuntimeError as refusal:
                    if "config" in call.arguments and "gemm_configs tells" in str(refusal):
                        continue  # a config that is named serves some layouts
                    # MXFP4's scales are as many as a weight's bytes, nearly.
                    weight = path.partition(".")[0]
                    assert weight in WEIGHTS or laid.dtype == torch.uint8, f"{call}: {path} {name}"
                    assert "contiguous in its last dimension" in str(refusal), refusal
                    refused.add(weight)
                    continue
                assert all(map(alike, found, expected)), f"{call}: {path} {name}"
    # Not every backend has every function that takes one.
    given = {path.partition(".")[0] for call in every_call for path in call.tensors()}
    assert refused >= WEIGHTS & given


@torch.no_grad()
def test_rows_may_be_one_row_in_memory(package, every_call):
    """Expanded ones, with a stride of 0."""
    for call in every_call:
        tensors = call.tensors()
        for path in set(tensors) - set(call.written) - {"offsets"}:
            tensor = tensors[path]
            if tensor.shape[:1] in ((), (1,)):
                continue
            expanded = tensor[:1].expand(tensor.shape)
            expected = call.fresh().with_tensor(path, expanded.contiguous()).run(package)
            found = call.fresh().with_tensor(path, expanded).run(package)
            assert all(map(alike, found, expected)), f"{call}: {path}"


@torch.no_grad()
def test_leading_dimensions_have_any_strides(package, every_call):
    """A batch that is the second dimension in memory, and channels that are the last."""
    batched = {"x", "a", "input", "logits", "residual", "residual_out", "up"}
    for call in every_call:
        names = ("grouped", "matmul_b", "matmul_g", "tuning", "fused", "decode_layers")
        if call.name.startswith(names):
            continue  # these take matrices, or a row, or have a routing to match
        if any(path.startswith("out") for path in call.tensors()):
            continue
        pick = [path for path in call.tensors() if path in batched]
        both = call
        for path in pick:
            rows = torch.stack([call.tensors()[path], call.tensors()[path].flip(0)])
            both = both.with_tensor(path, rows)
        scales = [path for path in ("scale_a", "scale_x") if path in call.tensors()]
        for path in scales:
            if call.tensors()[path].numel() > 1:
                scale = call.tensors()[path]
                both = both.with_tensor(path, torch.stack([scale, scale.flip(0)]))
        expected = both.fresh().run(package)
        for path in set(pick) - {*call.written}:
            tensor = both.tensors()[path]
            for laid in (
                tensor.transpose(0, 1).contiguous().transpose(0, 1),
                tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            ):
                found = both.fresh().with_tensor(path, laid).run(package)
                assert all(map(alike, found, expected)), f"{call}: {path}"


@torch.no_grad()
def test_what_is_written_is_written_or_refused(package, every_call):
    """Never lost in a copy."""
    for call in every_call:
        expected = call.fresh().run(package)
        for path in call.written:
            for name, laid in layouts_of(call.tensors()[path].clone()):
                before = laid.clone()
                try:
                    found = call.with_tensor(path, laid).run(package)
                except (RuntimeError, ValueError) as refusal:
                    assert "contiguous" in str(refusal), refusal
                    assert same(laid, before), f"{call} wrote {path} and then refused it"
                    continue
                assert all(map(alike, found, expected)), f"{call}: {path} {name}"


@torch.no_grad()
def test_what_cannot_be_folded_is_refused(package, device):
    x, weight = torch.randn(2, 3, 64, device=device), torch.ones(64, device=device)
    apart = torch.randn(3, 2, 64, device=device).transpose(0, 1)
    for call in (
        lambda: package.rmsnorm(x, weight, residual=apart),
        lambda: package.rmsnorm(x, weight, out=apart),
        lambda: package.swiglu(torch.cat([x, x], -1), out=apart),
    ):
        with pytest.raises(ValueError, match="is written, so its leading dimensions must fold"):
            call()


@torch.no_grad()
def test_no_rows(package, every_call):
    """Of strided inputs too."""
    for call in every_call:
        for layout in (lambda t: t, transposed):
            none = call
            for path, tensor in call.tensors().items():
                if tensor.shape[0] == T:
                    rows = tensor if path in call.written or tensor.dim() < 2 else layout(tensor)
                    none = none.with_tensor(path, rows[:0])
            if none is call:  # one whose first dimension is not rows
                continue
            for result in none.run(package):
                assert result.shape[0] == 0 or result.numel() == 1, call


# ---- Layers, which are given what the modules that they replace are given


@torch.no_grad()
def test_layers(package, run_kernelized, device):
    for case in cases(package, device):
        run_kernelized(case.root)
        for name, tensor in case.inputs.items():
            views = [laid for _, laid in layouts_of(tensor)]
            if tensor.dim() == 3:
                views.append(tensor.transpose(0, 1).contiguous().transpose(0, 1))
                views.append(tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0))
            views.append(tensor[:1].expand(tensor.shape))
            for view in views:
                expected, found = case.run(**{name: view.contiguous()}), case.run(**{name: view})
                assert same(found, expected), f"{case.layer}: {name} {view.stride()}"
            # The code between an attention's projections is transformers' here, which needs rows.
            has_theirs = case.layer.startswith("Attention") or "Decoder" in case.layer
            if not has_theirs and len(case.inputs) == 1:
                assert case.run(**{name: transposed(tensor)[:0]}).shape[0] == 0
