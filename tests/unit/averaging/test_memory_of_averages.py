"""The memory of averages: copies have their own, files are as large as the tensors, nothing is kept alive."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modkit
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tests.cases import for_each
from tests.unit.averaging.recipes import PRECISIONS, layers, walk


# --- memory --------------------------------------------------------------------------------------


def zoo() -> nn.Module:
    """Return tensors of many shapes, layouts and dtypes, in runs that are shared and that are not."""
    torch.manual_seed(0)
    model = nn.Module()
    shapes = [
        *[(3, 3)] * 5,
        *[()] * 4,
        *[(7,)] * 2,
        *[(2, 1, 3)] * 6,
        *[(0, 3)] * 4,
        (40, 50),
        (5,),
    ]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        for number, shape in enumerate(shapes):
            name = f"{str(dtype).split('.')[1]}_{number}"
            model.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))
    for number in range(4):
        model.register_parameter(f"turned_{number}", nn.Parameter(torch.randn(3, 4).t()))
        model.register_parameter(f"strided_{number}", nn.Parameter(torch.randn(6)[::2]))
    return model


def tensors_in(state: Any) -> dict[str, Tensor]:
    """Return all tensors in a state, under a path."""
    if isinstance(state, Tensor):
        return {"": state}
    if not isinstance(state, (dict, list)):
        return {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {f"{key}/{path}": t for key, value in items for path, t in tensors_in(value).items()}


@for_each("precision", PRECISIONS)
@for_each("face", ["EMA", "AveragedModel"])
def test_a_state_has_a_storage_for_each_tensor(face: str, precision: Any, tmp_path: Path) -> None:
    """Files of torch and safetensors are as large as the tensors; what is loaded is independent."""
    model = zoo()
    ema = modkit.EMA(model, [0.5, 0.9], precision=precision)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), precision=precision)
    for seed in range(3):
        walk(model, seed)
        ema.update()
        average.update_parameters(model)
    state = ema.state_dict() if face == "EMA" else average.state_dict()
    folder = tmp_path
    found = tensors_in(state)
    storages = [t.untyped_storage() for t in found.values() if t.numel()]
    assert len({one.data_ptr() for one in storages}) == len(storages)
    size = sum(t.numel() * t.element_size() for t in found.values())
    assert sum(one.nbytes() for one in storages) == size
    torch.save(state, folder / "state.pt")
    # A record of the archive is padded to 64 bytes and has headers.
    assert (folder / "state.pt").stat().st_size <= size + 1000 * (len(found) + 20)
    loaded = tensors_in(torch.load(folder / "state.pt", weights_only=True))
    assert loaded.keys() == found.keys()
    for name, tensor in found.items():
        assert loaded[name].equal(tensor)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    for tensor in loaded.values():
        tensor.zero_()
    assert any(tensor.ne(0).any() for tensor in before.values())
    assert all(found[name].equal(tensor) for name, tensor in before.items())
    # safetensors has no complex128.
    flat = {name: t.contiguous() for name, t in found.items() if t.dtype != torch.complex128}
    save_file(flat, folder / "state.safetensors")
    assert all(t.equal(found[name]) for name, t in load_file(folder / "state.safetensors").items())


# --- life time -------------------------------------------------------------------------------------


def test_memory_is_freed() -> None:
    """Neither an EMA nor an averaged model outlives its last reference, without garbage collection."""
    model = layers()
    ema = modkit.EMA(model, 0.5)
    average = AveragedModel(model)
    for _ in range(2):
        ema.update()
        average.update_parameters(model)
    freed = [weakref.ref(ema._engine.averages[0].tensors["2.weight"])]
    freed.append(weakref.ref(next(average.module.parameters())))
    gc.disable()
    try:
        kept = dict(ema.named_averages())["0.weight"]
        before = kept.clone()
        del ema, average
        assert [reference() for reference in freed] == [None, None]
        assert kept.equal(before)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "impl", [torch.optim.swa_utils, modkit.optim.swa_utils], ids=["torch", "modkit"]
)
def test_autograd_sees_an_update_between_forward_and_backward(impl: Any) -> None:
    """The gradients would be those of other weights than the outputs."""
    model = layers()
    average = impl.AveragedModel(model, multi_avg_fn=impl.get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        average.update_parameters(model)
    outputs = average(torch.ones(1, 3, requires_grad=True))
    average.update_parameters(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
