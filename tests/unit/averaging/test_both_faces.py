"""``EMA`` and ``AveragedModel`` are faces of one engine: the same options have the same meaning."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from tests.cases import for_each
from tests.unit.averaging.recipes import as_accelerator


DECAY = 0.9


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return layers, one of which is frozen, with buffers of both kinds, the same each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(5)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(3)).to(dtype)
    model[0].requires_grad_(False)
    return model


def walk(model: nn.Module, step: int, bad: bool = False) -> None:
    """Give all tensors random values, one of them not finite if asked."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = torch.randn(tensor.shape, generator=generator) * 3
            tensor.copy_(values)
        if bad:
            model[2].weight[1, 1] = float("nan")


def averages_of(one: Any) -> dict[str, Tensor]:
    """Return the averages by name, in float64."""
    pairs = one.named_averages() if isinstance(one, modkit.EMA) else one.module.state_dict().items()
    return {name: tensor.double() for name, tensor in pairs}


def is_weight(name: str) -> bool:
    """Choose the parameters that are called `weight`."""
    return name.endswith("weight")


def named(options: dict[str, Any]) -> str:
    """Return the options as text that is the same in each process."""
    return ", ".join(f"{key}={getattr(one, '__name__', one)}" for key, one in options.items())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"buffers": "average"},
    {"buffers": "ignore"},
    {"buffers": {"*.running_mean": "average", "*": "copy"}},
    {"buffers": {"*.running_var": "ignore"}},
    {"include": "1.*"},
    {"exclude": ["*.bias", "0.*"]},
    {"trainable_only": True},
    {"include": is_weight, "trainable_only": True},
]


# Each precision and dtype with both policies, on the CPU and on an accelerator.
WAYS_TO_STEP = [
    ("same", torch.float32, "ignore", False),
    ("same", torch.bfloat16, "skip", True),
    ("fp32", torch.float32, "skip", False),
    ("fp32", torch.bfloat16, "ignore", True),
    ("fp64", torch.bfloat16, "skip", False),
    ("fp64", torch.float32, "skip", True),
]


@for_each("options", OPTIONS, ids=named)
@for_each(("precision", "dtype", "policy", "accelerator"), WAYS_TO_STEP)
def test_both_faces(
    options: dict[str, Any],
    precision: Any,
    dtype: torch.dtype,
    policy: Any,
    accelerator: bool,
    monkeypatch,
) -> None:
    """The averaged model averages and copies the tensors that EMA does; the rest is copied or ignored."""
    if accelerator:
        as_accelerator(monkeypatch)
    model = network(dtype)
    ema = modkit.EMA(model, DECAY, precision=precision, on_nonfinite=policy, **options)
    average = AveragedModel(
        model,
        multi_avg_fn=get_ema_multi_avg_fn(DECAY),
        precision=precision,
        on_nonfinite=policy,
        **options,
    )
    first = {name: tensor.double() for name, tensor in average.module.state_dict().items()}
    for step in range(12):
        walk(model, step, bad=policy == "skip" and step in {0, 5})
        ema.update()
        average.update_parameters(model)
        mine, theirs = averages_of(ema), averages_of(average)
        if not mine:
            assert step == 0
            assert average.n_averaged == 0
            continue
        # The count of an EMA is on the host, which does not see what an accelerator skips.
        most = int(accelerator and policy == "skip" and step >= 5)
        assert 0 <= ema.n_averaged - int(average.n_averaged) <= most
        found, expected = (
            torch.cat([each[name].flatten() for name in mine]) for each in (theirs, mine)
        )
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    now = model.state_dict()
    parameters = dict(model.named_parameters())
    for name in theirs.keys() - mine.keys():
        expected = now[name].double() if name in parameters else first[name]
        assert theirs[name].equal(expected)


@for_each("options", OPTIONS[:3], ids=named)
@for_each("first", [False, True])
def test_both_faces_raise(options: dict[str, Any], first: bool) -> None:
    """Both refuse the step and stay unchanged."""
    model = network()
    ema = modkit.EMA(model, DECAY, on_nonfinite="raise", **options)
    average = AveragedModel(model, on_nonfinite="raise", **options)
    if not first:
        ema.update()
        average.update_parameters(model)
    before = averages_of(ema), averages_of(average)
    walk(model, 1, bad=True)
    for update in (ema.update, lambda: average.update_parameters(model)):
        with pytest.raises(RuntimeError, match=r"2\.weight is not finite"):
            update()
    for one, old in zip((ema, average), before, strict=True):
        assert all(value.equal(old[name]) for name, value in averages_of(one).items())
    assert ema.n_averaged == average.n_averaged == (not first)


# --- precision in the dtype of the model -----------------------------------------------------------


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.995)},
    "swa": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "default": dict,
}


def drift(model: nn.Module, step: int) -> None:
    """Let the parameters wander around 1."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + torch.randn(parameter.shape, generator=generator) / 4)


def saved(average: Any, model: nn.Module, arguments: dict[str, Any], folder: Path) -> Any:
    """Return an average that was made from a saved state."""
    torch.save(average.state_dict(), folder / "average.pt")
    other = AveragedModel(model, **arguments)
    other.load_state_dict(torch.load(folder / "average.pt", weights_only=True))
    return other


WAYS: dict[str, Callable[..., Any]] = {
    "state": saved,
    "deepcopy": lambda average, *_: copy.deepcopy(average),
    "pickle": lambda average, *_: pickle.loads(pickle.dumps(average)),
    "to": lambda average, *_: average.to("cpu").to(torch.bfloat16),
}


@for_each("way", WAYS)
@for_each("rule", RULES)
@for_each("precision", ["stochastic", "same"])
def test_an_average_goes_on(way: str, rule: str, precision: Any, tmp_path: Path) -> None:
    """A resumed or copied average is bitwise the one that was not interrupted."""
    model = network(torch.bfloat16)
    arguments = {"precision": precision, "seed": 5, **RULES[rule]()}
    whole, other = (AveragedModel(model, **arguments) for _ in range(2))
    for step in range(20):
        drift(model, step)
        whole.update_parameters(model)
        other.update_parameters(model)
        if step == 9:
            other = WAYS[way](other, model, arguments, tmp_path)
    ours, theirs = other.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
