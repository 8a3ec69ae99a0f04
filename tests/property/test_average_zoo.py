"""``EMA`` on models with unusual tensors, compared with a reference in float64.

``nox -s property`` takes every model, precision and schedule through each change in the middle of a run;
``nox -s tests`` takes a sample.
"""

import io
import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import modkit
from tests.cases import for_each
from tests.helpers import freeze
from tests.property.average_changes import CHANGES
from tests.property.average_references import SCHEDULES, tolerance
from tests.property.zoo import ZOO, build, has_average, move, tensors
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
# 61 has no divisor in common with a number of options, so none is left out.
SAMPLE = CASES[::61]


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
    """Return the tensors that an average with this policy of buffers has."""
    ignored = buffers not in ("copy", "average")
    kept = {
        name: buffer
        for name, buffer in model.named_buffers()
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


def test_the_combinations_are_counted() -> None:
    """There are 5,580 runs, 9 of them for each schedule of a model, precision and change."""
    assert (len(ZOO), len(PRECISIONS), len(SCHEDULES), len(CHANGES)) == (16, 5, 9, 8)
    assert len(CASES) == (16 * 8 - len(REFUSED)) * 5 * 9 == 5_580


@for_each("option", range(len(Case._fields)), ids=Case._fields)
def test_the_sample_has_every_option(option: int) -> None:
    """The default session covers every model, precision, schedule, change and other option."""
    assert {str(case[option]) for case in SAMPLE} == {str(case[option]) for case in CASES}


@for_each(("refused", "text"), list(REFUSED.items()))
def test_what_torch_refuses(refused: tuple[str, str], text: str) -> None:
    """The changes that are left out are impossible without an average too."""
    model, change = refused

    with pytest.raises(RuntimeError, match=text):
        CHANGES[change](build(model), None)
