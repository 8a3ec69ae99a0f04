"""``EMA``, ``AveragedModel`` and schedules on models with unusual tensors, compared with references and torch.

``nox -s property`` takes every model, precision and schedule through each change in the middle of a run;
``nox -s tests`` takes a sample.
"""

import io
import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.helpers import freeze
from tests.property.average_models import (
    CHANGES,
    SCHEDULES,
    ZOO,
    build,
    has_average,
    move,
    tensors,
    tolerance,
)
from tests.unit.averaging.recipes import PRECISIONS


STEPS = 14
# Of the averages after the first one.
FURTHER_SCHEDULES = ("CountWarmup", "Equal")
BUFFERS = ("copy", "average", "ignore", {"*": "ignore"})
# Torch refuses these: a norm computed by hooks leaves a non-leaf tensor in the module, an LSTM holds weak
# references to its weights, and parametrized modules are not pickled.
REFUSED = {
    ("old_norms", "deep_copy"): "Only Tensors created explicitly by the user",
    ("old_norms", "swap_tensors"): "Expected use_count of t1 to be 1",
    ("lstm", "swap_tensors"): "has weakref associated with it",
    ("parametrized", "pickled"): "Serialization of parametrized modules is only supported",
}


class Case(NamedTuple):
    """One run: the first four fields are combined, the others drawn."""

    model: str
    precision: Any
    schedule: str
    change: str
    averages: int
    every: int
    after: int
    buffers: Any
    on_nonfinite: Any
    saved: int
    changed: int

    def ema(self, model: nn.Module) -> "modkit.EMA[nn.Module]":
        """Return a fresh average."""
        return modkit.EMA(
            model,
            schedule=[SCHEDULES[name][0] for name in self.schedules()],
            precision=self.precision,
            update_every=self.every,
            update_after_step=self.after,
            buffers=self.buffers,
            on_nonfinite=self.on_nonfinite,
        )

    def schedules(self) -> list[str]:
        """Return the names of the schedules, one for each average."""
        return [self.schedule, *FURTHER_SCHEDULES[: self.averages - 1]]

    def averages_at(self, step: int) -> bool:
        """Return True if the update after a step averages."""
        return step >= self.after and (step - self.after) % self.every == 0


def drawn(model: str, precision: str, schedule: str, change: str) -> Case:
    """Return a run, whose other options are always the same for these four."""
    draw = random.Random(f"{model} {precision} {schedule} {change}")
    return Case(
        model,
        precision,
        schedule,
        change,
        averages=draw.randint(1, 3),
        every=draw.choice([1, 3]),
        after=draw.choice([0, 2]),
        buffers=draw.choice(BUFFERS),
        on_nonfinite=draw.choice(["ignore", "skip"]),
        saved=draw.choice([1, 5, 6]),
        # An average keeps its dtype when the model is cast; one made afterwards has the new dtype.
        changed=9 if change == "cast" else draw.choice([3, 9]),
    )


CASES = [
    drawn(*combined)
    for combined in itertools.product(ZOO, PRECISIONS, SCHEDULES, CHANGES)
    if (combined[0], combined[3]) not in REFUSED
]
CASES_OF_MODELS = [list(cases) for _, cases in itertools.groupby(CASES, lambda case: case.model)]
# 131 has no divisor in common with a number of options, so none is left out.
SAMPLE = CASES[::131]


class Walk:
    """A model on a random walk, its average, and the history for the reference."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case.model)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors(self.model).items()}
        self.ema: Any = None
        self.seen: list[dict[str, Tensor]] = []

    def go(self, first: int, last: int) -> None:
        """Take the steps from ``first`` up to ``last``, with an update after each if there is an average."""
        for step in range(first, last):
            if step == self.case.changed:
                self.change()
            move(self.model, step)
            if self.ema is not None:
                self.ema.update()
                if self.case.averages_at(step):
                    self.seen.append({name: wide(t) for name, t in tensors(self.model).items()})

    def change(self) -> None:
        """Apply the change of the case, which leaves the average as it is, and that of a copy too."""
        change, before = CHANGES[self.case.change], self.ema
        if before is None:
            self.model, _ = change(self.model, None)
            return
        state = freeze(before.state_dict())
        self.model, self.ema = change(self.model, before)

        assert self.ema.model is self.model
        assert freeze(before.state_dict()) == state
        assert freeze(self.ema.state_dict()) == state

    def check(self) -> None:
        """Assert that every average is that of the reference, and that the counts are exact."""
        assert self.ema.n_averaged == len(self.seen)
        for index, schedule in enumerate(self.case.schedules()):
            self.check_average(dict(self.ema.named_averages(index)), schedule)

    def check_average(self, averages: dict[str, Tensor], schedule: str) -> None:
        """Assert that one average is that of the reference."""
        current = averaged_tensors(self.model, self.case.buffers) if self.seen else {}
        parameters = dict(self.model.named_parameters())

        assert averages.keys() == current.keys()
        for name, tensor in current.items():
            models = [seen[name] for seen in self.seen]
            copied = name not in parameters and self.case.buffers == "copy"
            if copied or not has_average(tensor):
                assert torch.equal(wide(averages[name]), models[-1]), name
                continue
            expected = SCHEDULES[schedule][1](models, self.case.every)
            size = max((float(model.abs().max()) for model in models if model.numel()), default=0.0)
            allowed = size * tolerance(self.dtypes[name], self.case.precision, len(models))
            error = (wide(averages[name]) - expected).abs()
            assert averages[name].shape == tensor.shape
            assert error.numel() == 0 or float(error.max()) <= allowed, name


def averaged_tensors(model: nn.Module, buffers: Any) -> dict[str, Tensor]:
    ignored = buffers not in ("copy", "average")
    # Others are not part of the state, and no glob asks for them.
    persistent = model.state_dict().keys()
    kept = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in persistent
        if not ignored or (buffers == "ignore" and not has_average(buffer))
    }
    return {**dict(model.named_parameters()), **kept}


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64 or complex128; integers are exact in it."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to(dtype, copy=True)


def frozen(values: dict[str, Tensor]) -> Any:
    """Return the bits of tensors by name, whatever their order and kind."""
    return dict(freeze({name: tensor.detach() for name, tensor in values.items()})[1])


def frozen_with(walk: Walk, index: int) -> Any:
    """Return the bits that the model has with an average in it, in the dtypes of the model."""
    found = tensors(walk.model)
    for name, average in walk.ema.named_averages(index):
        found[name] = average.to(found[name].dtype)
    return frozen(found)


def check_swap(walk: Walk) -> None:
    """Assert that the model holds the averages in the block, and bitwise its own weights after it."""
    index = walk.case.averages - 1
    expected, before = frozen_with(walk, index), frozen(tensors(walk.model))
    objects = [id(tensor) for tensor in tensors(walk.model).values()]
    state = freeze(walk.ema.state_dict())
    with walk.ema.applied(index=index):
        inside = frozen(tensors(walk.model))

    assert inside == expected
    assert frozen(tensors(walk.model)) == before
    assert [id(tensor) for tensor in tensors(walk.model).values()] == objects
    assert freeze(walk.ema.state_dict()) == state


def check_averaged_model(walk: Walk) -> None:
    """Assert that a model built from the averages holds them in separate memory."""
    index = walk.case.averages - 1
    before = frozen(tensors(walk.model))
    made = walk.ema.averaged_model(index)

    assert type(made) is type(walk.model)
    assert frozen(tensors(made)) == frozen_with(walk, index)
    for name, tensor in tensors(made).items():
        if tensor.numel():
            assert tensor.data_ptr() != tensors(walk.model)[name].data_ptr()
    assert frozen(tensors(walk.model)) == before


def saved(state: dict[str, object]) -> io.BytesIO:
    """Write a state as a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def resumed(case: Case, file: io.BytesIO) -> Walk:
    """Return a walk that continues in a new average of an equal model."""
    walk = Walk(case)
    walk.go(0, case.saved)
    walk.ema = case.ema(walk.model)
    walk.ema.load_state_dict(torch.load(file, weights_only=True))
    walk.go(case.saved, STEPS)
    return walk


def check(case: Case) -> None:
    """Walk with a change and a save in the middle; compare with the reference and a resumed walk."""
    walk = Walk(case)
    walk.ema = case.ema(walk.model)
    walk.go(0, case.saved)
    walk.check()
    file = saved(walk.ema.state_dict())
    walk.go(case.saved, STEPS)
    walk.check()
    check_swap(walk)
    check_averaged_model(walk)
    other = resumed(case, file)

    for index in range(case.averages):
        averages = dict(walk.ema.named_averages(index))
        assert freeze(dict(other.ema.named_averages(index))) == freeze(averages)
    assert freeze(other.ema.state_dict()) == freeze(walk.ema.state_dict())


def fault_of(case: Case) -> str:
    """Return the error of a run, or nothing."""
    try:
        check(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def name_of(case: Case) -> str:
    """Return the name of a case in the message of a failure."""
    return "-".join(map(str, case))


def ids_of_models(cases: list[Case]) -> str:
    """Return the id of a test: the model, and the number of its runs."""
    return f"{cases[0].model}-{len(cases)}-runs"


@for_each("case", SAMPLE, ids=name_of)
def test_a_sample_of_the_combinations(case: Case) -> None:
    """The average equals the reference, swaps in and out, and resumes bitwise identically."""
    check(case)


@pytest.mark.property
@pytest.mark.parametrize("cases", CASES_OF_MODELS, ids=ids_of_models)
def test_all_combinations(cases: list[Case]) -> None:
    """Every combination equals the reference; the ids of the tests count the runs."""
    wrong = [f"{name_of(case)}: {fault}" for case in cases if (fault := fault_of(case))]

    assert not wrong, f"{len(wrong)} of {len(cases)} runs are wrong\n" + "\n".join(wrong)


@for_each("option", range(len(Case._fields)), ids=Case._fields)
def test_the_sample_has_every_option(option: int) -> None:
    """The default session covers every model, precision, schedule, change and other option."""
    assert {str(case[option]) for case in SAMPLE} == {str(case[option]) for case in CASES}


SHAPES = [(), (1,), (3,), (3, 3), (2, 1, 3), (0, 2), (33, 40), (1025,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def random_model(seed: int, dtypes: list[torch.dtype], *, integers: bool) -> nn.Module:
    """Return layers with parameters of random shapes and dtypes, some tied, and buffers."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential()
    for _ in range(chosen.randint(3, 9)):
        layer = nn.Module()
        dtype, shape = chosen.choice(dtypes), chosen.choice(SHAPES)
        for number in range(chosen.randint(0, 6)):
            values = torch.randn(shape).to(dtype)
            layer.register_parameter(f"p{number}", nn.Parameter(values))
            if chosen.random() < 0.2:
                dtype, shape = chosen.choice(dtypes), chosen.choice(SHAPES)
        layer.register_buffer("floating", torch.randn(shape), persistent=chosen.random() < 0.7)
        if chosen.random() < 0.3:
            layer.register_buffer("count", torch.tensor(chosen.randint(0, 9)))
        if integers and chosen.random() < 0.3:
            layer.number = nn.Parameter(torch.arange(4), requires_grad=False)
        model.append(layer)
        if chosen.random() < 0.2:
            model.append(layer)
    model.append(nn.BatchNorm1d(3))
    return model


def randomize(model: nn.Module, step: int) -> None:
    """Give all tensors random values."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 5)


def rules(impl: Any) -> dict[str, dict[str, Any]]:
    """Return the averaging functions of a library."""
    return {
        "default": {},
        "ema": {"avg_fn": impl.get_ema_avg_fn(0.9)},
        "swa": {"avg_fn": impl.get_swa_avg_fn()},
        "multi ema": {"multi_avg_fn": impl.get_ema_multi_avg_fn(0.9)},
        "multi swa": {"multi_avg_fn": impl.get_swa_multi_avg_fn()},
    }


@for_each("seed", range(4))
@for_each("use_buffers", [False, True])
@for_each("rule", list(rules(torch.optim.swa_utils)))
def test_averaged_model_has_the_bits_of_torch(rule: str, use_buffers: bool, seed: int) -> None:
    """After each of ten updates the states are bitwise identical."""
    # Torch averages integer buffers, which multiplies by a fraction only in some rules.
    integers = rule == "default" and not use_buffers
    model = random_model(seed, DTYPES, integers=integers)
    if use_buffers:
        model.apply(without_counts)
    both = [
        impl.AveragedModel(model, **rules(impl)[rule], use_buffers=use_buffers)
        for impl in (modkit.optim.swa_utils, torch.optim.swa_utils)
    ]
    for step in range(10):
        randomize(model, step)
        for average in both:
            average.update_parameters(model)
        ours, theirs = (average.state_dict() for average in both)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert ours[name].equal(tensor), name


def without_counts(module: nn.Module) -> None:
    """Drop integer buffers, which modkit copies and torch averages."""
    for name in ("count", "num_batches_tracked"):
        if name in module._buffers:
            setattr(module, name, None)


@for_each("seed", range(2))
@for_each("precision", PRECISIONS)
@for_each("policy", ["ignore", "skip"])
def test_several_averages_have_the_bits_of_one(policy: Any, precision: Any, seed: int) -> None:
    """Four averages of a model at once are those of four EMAs, after each step."""
    model = random_model(seed, DTYPES, integers=True)
    decays = [0.9, schedules.Equal(), schedules.CountWarmup(0.999), 0.5]
    options = {"precision": precision, "on_nonfinite": policy, "buffers": "average", "seed": seed}
    together = modkit.EMA(model, schedule=decays, **options)
    alone = [modkit.EMA(model, schedule=decay, **options) for decay in decays]
    for step in range(8):
        randomize(model, step)
        together.update()
        for one in alone:
            one.update()
        for index, one in enumerate(alone):
            expected = dict(one.named_averages())
            for name, tensor in together.named_averages(index):
                assert tensor.equal(expected[name]), name


decays = st.floats(0, 1)
positive = st.floats(1e-3, 1e6)
any_schedule = st.one_of(
    st.builds(schedules.Constant, decays),
    st.builds(schedules.InverseGamma, positive, st.floats(0.01, 5), st.just(0.0), decays),
    st.builds(schedules.CountWarmup, decays, st.floats(1, 1e6)),
    st.builds(schedules.Power, st.floats(0.001, 0.288)),
)
step_numbers = st.integers(0, 10**6)
few = st.integers(1, 200)


@pytest.mark.property
@given(any_schedule, step_numbers, few, few)
def test_steps_together(schedule, start, first, second):
    """The decay of several steps is the product of the decays of two parts."""
    middle, end = start + first, start + first + second

    together = schedule.over(end, first + second)

    apart = schedule.over(middle, first) * schedule.over(end, second)
    assert together == pytest.approx(apart, rel=1e-9, abs=1e-300)


@pytest.mark.property
@given(any_schedule, step_numbers)
def test_decays_are_fractions(schedule, n):
    """Every decay is between 0 and 1, and `over(n, 1)` equals `schedule(n)`."""
    assert 0 <= schedule(n) <= 1
    assert schedule.over(n, 1) == pytest.approx(schedule(n), rel=1e-12, abs=1e-300)
