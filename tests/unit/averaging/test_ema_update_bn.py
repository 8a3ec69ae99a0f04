"""Batch normalization statistics of averages, and of models that hold one."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import modkit
from modkit.distributed import export_average, load_averages
from modkit.optim.swa_utils import AveragedModel, update_bn
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import network, sgd, train


POLICIES: list[Any] = ["copy", "average", "ignore", {"*.running_mean": "average", "*": "ignore"}]


def batches() -> list[Tensor]:
    """Return three batches, of two sizes."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 4, generator=generator) * 3 + 1 for size in (8, 8, 4)]


def trained(face: str = "EMA", **options: Any) -> Any:
    """Return two averages of a network that was trained."""
    model = network()
    if face == "EMA":
        ema = modkit.EMA(model, [0.5, 0.9], **options)
    else:
        ema = modkit.EMACallback(model, decay=[0.5, 0.9], index=1, **options)
    for step in range(4):
        train(model, sgd(model), step, step + 1)
        (ema if face == "EMA" else ema.ema).update()
    return ema


def by_torch(ema: Any, index: int) -> nn.Module:
    """Return an averaged model whose statistics torch has computed."""
    model = ema.averaged_model(index)
    torch.optim.swa_utils.update_bn(batches(), model)
    return model.eval()


def held(model: nn.Module) -> Any:
    """Return all values and modes of a model."""
    return freeze(dict(model.state_dict())), [one.training for one in model.modules()]


@for_each("buffers", POLICIES, ids=str)
@for_each("face", ["EMA", "EMACallback"])
def test_the_statistics_are_those_of_the_averaged_weights(buffers: Any, face: str) -> None:
    """Every way to read the average has torch's statistics, and the model in training has its own."""
    callback = trained(face, buffers=buffers)
    ema, index = (callback, 0) if face == "EMA" else (callback.ema, 1)
    reference = ema.module
    expected, other = by_torch(ema, index), ema.averaged_model(1 - index)
    before = held(ema.model)
    ema.update_bn(batches(), index=index)
    target = copy.deepcopy(ema.model)
    ema.copy_to(target, index=index)
    seen = [freeze(dict(reference.state_dict()))] if index == 0 else []
    with ema.applied(index=index):
        seen.append(freeze(dict(ema.model.state_dict())))
    seen.append(freeze(dict(ema.averaged_model(index).state_dict())))
    seen.append(freeze(dict(target.state_dict())))
    if index == 0:
        seen.append(freeze(dict(ema.module.state_dict())))
        assert ema(batches()[0]).equal(expected(batches()[0]))

    assert seen == [freeze(dict(expected.state_dict()))] * len(seen)
    assert held(ema.model) == before
    assert freeze(ema.averaged_model(1 - index).state_dict()) == freeze(other.state_dict())


@for_each("buffers", POLICIES, ids=str)
def test_the_next_update_drops_them(buffers: Any) -> None:
    """The run goes on bitwise identically to one without the call."""
    ends = []
    for computes in (False, True):
        ema = trained(buffers=buffers)
        reference = ema.module
        if computes:
            ema.update_bn(batches(), index=0)
            with torch.inference_mode():
                ema.update_bn(batches(), index=1)
            assert held(ema.averaged_model(1)) == held(by_torch(ema, 1))
        train(ema.model, sgd(ema.model), 4, 5)
        ema.update()
        if buffers == "copy":
            assert reference[1].running_mean.equal(ema.model[1].running_mean)
        ends.append([freeze(ema.state_dict()), freeze(ema.module.state_dict()), held(ema.model)])

    assert ends[0] == ends[1]


class Scaled(nn.Module):
    """A network with two inputs, of which one is a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        """Run the network on the scaled input."""
        return self.net(x * scale)


@for_each("face", ["EMA", "EMACallback", "AveragedModel"])
@for_each(
    ("batch", "call"),
    [
        (lambda x: {"x": x, "scale": 2.0}, lambda model, batch: model(**batch)),
        (lambda x: (x, 2.0, "label"), lambda model, batch: model(batch[0], scale=batch[1])),
    ],
)
def test_batches_of_several_inputs(face: str, batch: Any, call: Any) -> None:
    """`call` calls the model, and the statistics are those of its inputs."""
    model = Scaled()
    loader = [batch(x) for x in batches()]
    if face == "AveragedModel":
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        update_bn(loader, averaged, call=call)
        found = averaged.module
    else:
        holder: Any = getattr(modkit, face)(model)
        ema = holder if face == "EMA" else holder.ema
        ema.update()
        ema.update_bn(loader, call=call)
        found = ema.averaged_model()
    expected = copy.deepcopy(model.net)
    torch.optim.swa_utils.update_bn([x * 2.0 for x in batches()], expected)

    assert freeze(dict(found.net.state_dict())) == freeze(dict(expected.state_dict()))


def loaded(ema: Any, load: Callable[[Any], object]) -> Any:
    """Return another EMA, which loads the state."""
    other = modkit.EMA(network(), [0.5, 0.9], buffers=ema._engine.options.buffers)
    load(other)
    return other


def by_file(ema: Any, folder: Path) -> Any:
    """Return an EMA that has loaded the state from a file."""
    modkit.save_checkpoint(ema.state_dict(), folder / "ema.pt")
    state = modkit.load_checkpoint(folder / "ema.pt")
    return loaded(ema, lambda other: other.load_state_dict(state))


def by_dcp(ema: Any, folder: Path) -> Any:
    """Return an EMA that has loaded the state from a distributed checkpoint."""
    dcp.save({"ema": ema}, checkpoint_id=folder)
    return loaded(ema, lambda other: load_averages(other, folder))


CARRIES: list[Callable[[Any, Path], Any]] = [
    by_file,
    by_dcp,
    lambda ema, folder: copy.deepcopy(ema),
    lambda ema, folder: pickle.loads(pickle.dumps(ema)),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@for_each("carry", CARRIES)
@for_each("buffers", ["copy", "ignore"])
def test_they_are_saved(carry: Callable[[Any, Path], Any], buffers: Any, tmp_path: Path) -> None:
    """A loaded or copied average has them, and gives the same outputs."""
    ema = trained(buffers=buffers)
    ema.update_bn(batches())
    other = carry(ema, tmp_path)
    other.model.load_state_dict(ema.model.state_dict())
    batch = batches()[0]

    assert freeze(other.state_dict()) == freeze(ema.state_dict())
    assert [other.averaged_model(index)(batch).tolist() for index in (0, 1)] == [
        ema.averaged_model(index)(batch).tolist() for index in (0, 1)
    ]


def test_they_are_exported(tmp_path: Path) -> None:
    """A file of the average holds them."""
    ema = trained()
    ema.update_bn(batches())
    export_average(ema, tmp_path / "average.pt")
    found = modkit.load_checkpoint(tmp_path / "average.pt")

    assert freeze(dict(found)) == freeze(dict(by_torch(ema, 0).state_dict()))


def test_rebinding_drops_them() -> None:
    """After a change of the model they may not fit."""
    ema = trained(buffers="ignore")
    ema.update_bn(batches())
    ema.model[1] = nn.Identity()
    ema.rebind()

    assert sorted(dict(ema.averaged_model().named_buffers())) == []


def test_a_model_without_batch_normalization_is_left_alone() -> None:
    """As torch's function does, it reads no data."""
    model = nn.Linear(2, 2)
    ema = modkit.EMA(model)
    ema.update()
    before = freeze(ema.state_dict())
    loader = iter([torch.ones(1, 2)])
    ema.update_bn(loader)

    assert len(list(loader)) == 1
    assert freeze(ema.state_dict()) == before


# --- refused ---------------------------------------------------------------------------------------


def fails() -> Iterator[Tensor]:
    """Yield a batch, and raise."""
    yield batches()[0]
    raise KeyError("data")


@for_each(
    ("loader", "error"),
    [(list, ValueError), (fails, KeyError), (lambda: [torch.ones(2, 3)], RuntimeError)],
)
def test_after_an_error_nothing_has_changed(loader: Any, error: type[Exception]) -> None:
    """Neither the averages nor the model."""
    ema = trained()
    before = freeze(ema.state_dict()), held(ema.model)
    with pytest.raises(error):
        ema.update_bn(loader())

    assert (freeze(ema.state_dict()), held(ema.model)) == before


BLOCKS: dict[str, Callable[[Any], Any]] = {
    "applied": lambda callback: callback.ema.applied(),
    "evaluating": lambda callback: callback.evaluating(),
    "other average": lambda callback: callback.ema.applied(index=0),
}


@for_each("block", BLOCKS)
@for_each("buffers", POLICIES, ids=str)
@for_each("part", [lambda model: model, lambda model: model[:2], nn.DataParallel])
def test_a_model_that_holds_an_average_is_refused(block: str, buffers: Any, part: Any) -> None:
    """`update_bn(loader, model)` would overwrite the average's statistics, or the model's."""
    callback = trained("EMACallback", buffers=buffers)
    model = callback.model
    before = freeze(callback.state_dict()), held(model)
    with (
        BLOCKS[block](callback),
        pytest.raises(RuntimeError, match=r"update_bn\(\).*ema\.update_bn\(loader\) outside"),
    ):
        update_bn(batches(), part(model))

    assert (freeze(callback.state_dict()), held(model)) == before
