"""Memory: of a module, and of what is done over and over; torch is the measure where it can do it."""

import copy
import functools
import gc
import io
import pickle
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from modkit import migrations
from modkit.errors import MigrationError
from tests.helpers import MODKIT, TORCH, Implementation
from tests.parity.hooks.tools import do_nothing


# Things to do over and over with a small model; torch can do them too.


def _call(impl: Implementation, model: Any, _: Path) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _walk(impl: Implementation, model: Any, _: Path) -> None:
    names = [*model.named_modules(), *model.named_buffers()]
    model.apply(do_nothing).double().float().train().eval()
    assert len(names) == 6


def _load(impl: Implementation, model: Any, _: Path) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.weight": torch.ones(1)})


def _copies(impl: Implementation, model: Any, _: Path) -> None:
    copy.deepcopy(model)
    copy.copy(model)
    pickle.loads(pickle.dumps(model))


def _averaged_model(impl: Implementation, model: Any, _: Path) -> None:
    averaged = impl.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    averaged.load_state_dict(averaged.state_dict())


def _files(impl: Implementation, model: Any, path: Path) -> None:
    if impl is TORCH:
        torch.save(model.state_dict(), path)
        torch.load(path)
    else:
        modkit.save_checkpoint(model.state_dict(), path)
        modkit.load_checkpoint(path)


# And what torch has no equivalent of.


def _scope(impl: Implementation, model: Any, _: Path) -> None:
    with modkit.fast_inference(model), torch.no_grad():
        model(torch.ones(2, 4))


def _ema(impl: Implementation, model: Any, _: Path) -> None:
    ema = modkit.EMA(model, decay=0.9, precision="fp32")
    for _ in range(2):
        ema.update()
    with ema.applied():
        model(torch.ones(2, 4))
    ema.store()
    ema.copy_to()
    ema.restore()
    ema.load_state_dict(ema.state_dict())


def _averages_in_a_model(impl: Implementation, model: Any, _: Path) -> None:
    ema = modkit.EMA(model)
    ema.update()
    ema(torch.ones(2, 4))
    ema.averaged_model()
    copy.deepcopy(ema)


def _attached(impl: Implementation, model: Any, _: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ema = modkit.EMA(model).attach(optimizer)
    optimizer.step()
    ema.detach()


# An error in a variable of a frame that it passed through is a reference cycle.


@functools.cache
def _content() -> bytes:
    """A checkpoint. Saving makes a class, which is a cycle; in torch, too."""
    file = io.BytesIO()
    torch.save({"weight": torch.ones(100)}, file)
    return file.getvalue()


def _refused_files(impl: Implementation, model: Any, path: Path) -> None:
    content = _content()
    for corrupt in (content.replace(b"\0\0\x80\x3f", b"\0\0\x80\x40", 1), content[:-100]):
        path.write_bytes(corrupt)
        with pytest.raises(modkit.errors.FileError):
            modkit.load_checkpoint(path)
    with pytest.raises(ValueError, match="state"):
        modkit.EMA(model).load_state_dict({"module": torch.ones(1)})


def _refused_entries(impl: Implementation, model: Any, _: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        modkit.load_state_dict(model, state)
    with pytest.raises(modkit.errors.NameMismatchError):
        modkit.load_matching(model, {"module.a": torch.ones(7, 7)})


@migrations.declare({2: [migrations.merge(["q", "k"], "qk")]})
class _Merged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 2))


def _refused_migrations(impl: Implementation, model: Any, _: Path) -> None:
    half = OrderedDict(q=torch.ones(2, 2))
    for versions in ({}, {_Merged: 1}):
        with pytest.raises(MigrationError):
            migrations.migrate(_Merged(), half, versions=versions or None)
    with pytest.raises(RuntimeError):
        _Merged().load_state_dict(half)


Cycle = Callable[[Implementation, Any, Path], None]
SHARED: list[Cycle] = [_call, _walk, _load, _copies, _averaged_model, _files]
OURS: list[Cycle] = [_scope, _ema, _averages_in_a_model, _attached]
OURS += [_refused_files, _refused_entries, _refused_migrations]


def name_of(cycle: object) -> str | None:
    """Return the name of what is done, for the id of a test."""
    return getattr(cycle, "__name__", "").strip("_") or None


@pytest.fixture(scope="module")
def frozen() -> None:
    """Leave what other tests have made out of all collections, which takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def repeated(cycle: Cycle, impl: Implementation, folder: Path) -> Callable[[int], None]:
    """Return what does it so many times with one model, after a few times that fill caches."""
    model = impl.own.Sequential(impl.own.Linear(4, 4), impl.own.BatchNorm1d(4)).eval()

    def repeat(count: int) -> None:
        for _ in range(count):
            cycle(impl, model, folder / "file.pt")

    repeat(3)
    gc.collect()
    return repeat


def unreachable(cycle: Cycle, impl: Implementation, folder: Path) -> tuple[int, int]:
    """Return how many objects ten times leave behind, and how many the cyclic collector frees."""
    repeat = repeated(cycle, impl, folder)
    gc.disable()
    try:
        before = len(gc.get_objects())
        repeat(10)
        freed = gc.collect()
        return len(gc.get_objects()) - before, freed
    finally:
        gc.enable()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("cycle", SHARED, ids=name_of)
def test_nothing_stays_where_torch_leaves_nothing(cycle: Cycle, tmp_path: Path) -> None:
    """No object is left, and what torch frees without the cyclic collector is free at once."""
    _, expected = unreachable(cycle, TORCH, tmp_path)
    left, freed = unreachable(cycle, MODKIT, tmp_path)

    assert left <= 2
    assert freed <= expected


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("cycle", OURS, ids=name_of)
def test_nothing_stays_of_averages_and_blocks(cycle: Cycle, tmp_path: Path) -> None:
    """Averages, and what a block keeps of a model, are free at once."""
    left, freed = unreachable(cycle, MODKIT, tmp_path)

    assert left <= 2
    assert freed == 0


def resident() -> int:
    """Return how much memory the process has, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("cycle", [*SHARED, *OURS], ids=name_of)
@pytest.mark.timeout(3600)
def test_memory_stays_flat(cycle: Cycle, tmp_path: Path) -> None:
    """10,000 repetitions leave no memory of Python or of tensors behind."""
    repeat = repeated(cycle, MODKIT, tmp_path)
    tracemalloc.start()
    try:
        repeat(30)
        gc.collect()
        memory, size = tracemalloc.get_traced_memory()[0], resident()
        repeat(10_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - memory
    finally:
        tracemalloc.stop()

    # One lost object in each would be 500 kB.
    assert grown < 100_000
    assert resident() - size < 16_000_000
