"""Each exception in the docstrings of ``EMA`` is raised as stated, and changes nothing."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import modkit
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import model_of, network, set_to


MEMBERS = [
    name
    for name, member in vars(modkit.EMA).items()
    if (callable(member) or isinstance(member, property))
    and (not name.startswith("_") or name == "__call__")
]


def contract(name: str) -> str:
    """Return the docstring of a member, or of the class for its constructor."""
    member = modkit.EMA if name == "__init__" else inspect.getattr_static(modkit.EMA, name)
    return inspect.getdoc(member) or ""


def section(name: str, title: str) -> str:
    """Return one section of a docstring."""
    found = re.search(rf"^{title}:\n((?:[ ]{{4}}.*\n?|\n)+)", contract(name), re.MULTILINE)
    return found[1] if found else ""


def begun(**options: Any) -> Any:
    """Return averages of a network after two updates."""
    ema = modkit.EMA(network(), 0.5, **options)
    ema.update()
    set_to(ema.model, 2.0)
    ema.update()
    return ema


def without_normalization() -> Any:
    """Return averages of a model without batch normalization."""
    ema = modkit.EMA(nn.Linear(4, 2))
    ema.update()
    return ema


def not_begun() -> Any:
    """Return averages before the first update."""
    return modkit.EMA(network())


def held(ema: Any) -> Any:
    """Return the state of averages, and all values of their model."""
    members = ema.model.state_dict().items()
    values = {name: one for name, one in members if not is_lazy(one) and not one.is_meta}
    return freeze(ema.state_dict()), freeze(values)


def lazy() -> Any:
    """Return averages of a lazy model, which has not been called."""
    return modkit.EMA(nn.LazyLinear(2))


def on_meta() -> Any:
    """Return averages of a model without values."""
    return modkit.EMA(nn.Linear(2, 2, device="meta"))


def copied() -> Any:
    """Return averages of a model into which one was copied, until `restore`."""
    ema = begun()
    ema.store()
    ema.copy_to()
    return ema


def changed(**options: Any) -> Any:
    """Return averages of a model that has lost its last layer since."""
    ema = begun(**options)
    del ema.model[3]
    return ema


def changed_after_copy() -> Any:
    """Return averages of a model that has lost its last layer between `copy_to` and `restore`."""
    ema = copied()
    del ema.model[3]
    return ema


def schedule_of_two() -> Any:
    """Return averages whose schedule returns an impossible decay."""
    ema = modkit.EMA(network(), schedule=lambda n: 2.0)
    ema.update()
    return ema


def schedule_of_two_after_a_step() -> Any:
    """Return averages that have got such a schedule after a step."""
    ema = begun()
    ema.schedules[0] = modkit.schedules.Custom(lambda n: 2.0)
    return ema


def nonfinite(policy: str) -> Any:
    """Return averages of a model that holds infinity in a new layer."""
    ema = begun(on_nonfinite=policy)
    ema.model.append(nn.Linear(2, 1))
    set_to(ema.model[4], torch.inf)
    return ema


def frozen() -> Any:
    """Return averages of trainable parameters, of which none is left."""
    ema = modkit.EMA(network(), trainable_only=True)
    ema.model.requires_grad_(False)
    return ema


def inside(use: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a call inside `applied()`."""

    def call(ema: Any) -> None:
        with ema.applied():
            use(ema)

    return call


def enter(**arguments: Any) -> Callable[[Any], None]:
    """Return a call that enters a block."""

    def call(ema: Any) -> None:
        with ema.applied(**arguments):
            pass

    return call


def sparse() -> Any:
    """Return averages of a model with a sparse parameter."""
    model = network()
    model.adjacency = nn.Parameter(torch.eye(2).to_sparse())
    return modkit.EMA(model)


def with_sparse_layer() -> Any:
    """Return averages of a model that has a sparse parameter since."""
    ema = begun()
    ema.model.adjacency = nn.Parameter(torch.eye(2).to_sparse())
    return ema


def expanded() -> Any:
    """Return averages of a model whose weight takes no values."""
    ema = modkit.EMA(model_of(torch.ones(3)))
    ema.update()
    ema.model.weight.data = torch.ones(1).expand(3)
    return ema


def load_dense(ema: Any) -> None:
    """Load plain weights in which the sparse parameter is dense."""
    ema.load_state_dict({**network().state_dict(), "adjacency": torch.eye(2)})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the model."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


UPDATE = [
    (begun, lambda ema: ema.update(ema.model.parameters()), TypeError),
    (begun, lambda ema: ema.update(nn.Linear(3, 3)), NameMismatchError),
    (changed, lambda ema: ema.update(), NameMismatchError),
    (begun, inside(lambda ema: ema.update()), RuntimeError),
    (copied, lambda ema: ema.update(), RuntimeError),
    (lazy, lambda ema: ema.update(), RuntimeError),
    (on_meta, lambda ema: ema.update(), RuntimeError),
    (sparse, lambda ema: ema.update(), RuntimeError),
    (schedule_of_two, lambda ema: ema.update(), ValueError),
    (frozen, lambda ema: ema.update(), ValueError),
]

REBIND = [
    (begun, inside(lambda ema: ema.rebind()), RuntimeError),
    (copied, lambda ema: ema.rebind(), RuntimeError),
    (lazy, lambda ema: ema.rebind(), RuntimeError),
    (on_meta, lambda ema: ema.rebind(), RuntimeError),
    (with_sparse_layer, lambda ema: ema.rebind(), RuntimeError),
    (lambda: nonfinite("skip"), lambda ema: ema.rebind(), RuntimeError),
    (lambda: nonfinite("raise"), lambda ema: ema.rebind(), RuntimeError),
    (lambda: changed(include="3.*"), lambda ema: ema.rebind(), ValueError),
]

ATTACH = [
    (begun, lambda ema: ema.attach(5), TypeError),
    (begun, lambda ema: ema.attach(), ValueError),
    (begun, lambda ema: ema.attach(sgd(nn.Linear(1, 1))), ValueError),
    (begun, lambda ema: ema.attach(*[sgd(ema.model)] * 2), ValueError),
]

READ = [
    (begun, lambda ema: ema.update_bn([torch.ones(4, 4)], index=1), IndexError, "update_bn"),
    (begun, lambda ema: ema.update_bn([torch.ones(4, 4)], index=""), TypeError, "update_bn"),
    (without_normalization, lambda ema: ema.update_bn([], index=1), IndexError, "update_bn"),
    (begun, lambda ema: ema.update_bn(5), TypeError, "update_bn"),
    (begun, lambda ema: ema.update_bn([{}], weight_by_samples=True), TypeError, "update_bn"),
    (begun, lambda ema: ema.update_bn([]), ValueError, "update_bn"),
    (changed, lambda ema: ema.update_bn([torch.ones(4, 4)]), NameMismatchError, "update_bn"),
    (copied, lambda ema: ema.update_bn([torch.ones(4, 4)]), RuntimeError, "update_bn"),
    (not_begun, lambda ema: ema.update_bn([torch.ones(4, 4)]), RuntimeError, "update_bn"),
    (begun, lambda ema: ema.named_averages(1), IndexError, "named_averages"),
    (begun, lambda ema: ema.named_averages("0"), TypeError, "named_averages"),
    (begun, enter(index=1), IndexError, "applied"),
    (begun, enter(index=True), TypeError, "applied"),
    (begun, enter(model=[torch.ones(1)]), TypeError, "applied"),
    (begun, enter(model=nn.Linear(3, 3)), NameMismatchError, "applied"),
    (begun, lambda ema: ema.averaged_model(-1), IndexError, "averaged_model"),
    (begun, lambda ema: ema.averaged_model(0.5), TypeError, "averaged_model"),
    (changed, lambda ema: ema.averaged_model(), NameMismatchError, "averaged_model"),
    (changed, lambda ema: ema.module, NameMismatchError, "module"),
]

COPY = [
    (begun, lambda ema: ema.copy_to(index=1), IndexError, "copy_to"),
    (begun, lambda ema: ema.copy_to(index=None), TypeError, "copy_to"),
    (begun, lambda ema: ema.copy_to(ema.model.parameters()), TypeError, "copy_to"),
    (begun, lambda ema: ema.copy_to(nn.Linear(3, 3)), NameMismatchError, "copy_to"),
    (expanded, lambda ema: ema.copy_to(), RuntimeError, "copy_to"),
    (begun, inside(lambda ema: ema.store()), RuntimeError, "store"),
    (copied, lambda ema: ema.store(), RuntimeError, "store"),
    (changed, lambda ema: ema.store(), NameMismatchError, "store"),
    (lazy, lambda ema: ema.store(), ValueError, "store"),
    (begun, lambda ema: ema.restore(), RuntimeError, "restore"),
    (changed_after_copy, lambda ema: ema.restore(), NameMismatchError, "restore"),
]

MOVE = [
    (begun, lambda ema: setattr(ema, "decay", 0.9), AttributeError, "decay"),
    (schedule_of_two_after_a_step, lambda ema: ema.decay, ValueError, "decay"),
    (begun, lambda ema: ema.to(dtype=torch.int32), ValueError, "to"),
    (begun, lambda ema: ema.to(dtype=torch.bfloat16), ValueError, "to"),
    (begun, lambda ema: ema.to("nowhere"), RuntimeError, "to"),
    (changed, lambda ema: ema.to(dtype=torch.float64), NameMismatchError, "to"),
]

LOAD = [
    (begun, lambda ema: ema.load_state_dict({"weight": torch.ones(1)}, step=True), TypeError),
    (begun, lambda ema: ema.load_state_dict(5), ValueError),
    (begun, lambda ema: ema.load_state_dict({}, step=1), ValueError),
    (begun, lambda ema: ema.load_state_dict(ema.state_dict(), step=1), ValueError),
    (begun, lambda ema: ema.load_state_dict(network().state_dict(), step=-1), ValueError),
    (begun, lambda ema: ema.load_state_dict({**ema.state_dict(), "version": 2}), ValueError),
    (changed, lambda ema: ema.load_state_dict(ema.state_dict()), NameMismatchError),
    (begun, inside(lambda ema: ema.load_state_dict({})), RuntimeError),
    (sparse, load_dense, RuntimeError),
    (copied, lambda ema: ema.load_state_dict({}), RuntimeError),
]


def rows() -> list[tuple[Any, Any, type[BaseException], str]]:
    """Return all cases: averages, a call, its exception, and the member that states it."""
    named: list[tuple[str, list[Any]]] = [
        ("update", UPDATE),
        ("rebind", REBIND),
        ("attach", ATTACH),
        ("load_state_dict", LOAD),
    ]
    found = [(*row, name) for name, table in named for row in table]
    return [*found, *READ, *COPY, *MOVE]


@for_each(("make", "call", "error", "member"), rows)
def test_an_exception_is_stated_and_changes_nothing(
    make: Any, call: Any, error: type[Exception], member: str
) -> None:
    """The section "Raises" names it, and averages, counters and model stay as they were."""
    ema = make()
    before = held(ema)
    with pytest.raises(error) as caught:
        call(ema)

    assert type(caught.value) is error
    assert f"{error.__name__}: " in section(member, "Raises")
    assert held(ema) == before


CONSTRUCTORS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"model": [torch.ones(1)]}, TypeError),
    ({"update_every": 2.0}, TypeError),
    ({"update_after_step": True}, TypeError),
    ({"decay": "0.9"}, TypeError),
    ({"include": 5}, TypeError),
    ({"exclude": [nn.Linear(1, 1)]}, TypeError),
    ({"buffers": 5}, TypeError),
    ({"decay": 0.9, "schedule": 0.9}, ValueError),
    ({"decay": []}, ValueError),
    ({"decay": 1.5}, ValueError),
    ({"update_every": 0}, ValueError),
    ({"update_after_step": -1}, ValueError),
    ({"precision": "bf16"}, ValueError),
    ({"buffers": "drop"}, ValueError),
    ({"on_nonfinite": "stop"}, ValueError),
    ({"exclude": "*"}, ValueError),
    ({"exclude": "9.*"}, ValueError),
    ({"device": "nowhere"}, RuntimeError),
]


@for_each(("options", "error"), CONSTRUCTORS)
def test_what_the_constructor_refuses_is_stated(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """The docstring of the class names the exception."""
    with pytest.raises(error) as caught:
        modkit.EMA(**{"model": network(), **options})

    assert type(caught.value) is error
    assert f"{error.__name__}: " in section("__init__", "Raises")
    # The option is named, except where torch itself refuses the device.
    assert "device" in options or any(name in str(caught.value) for name in options)


@for_each("name", MEMBERS)
def test_a_member_describes_its_arguments_and_its_result(name: str) -> None:
    """Each argument has an entry, and each result a section."""
    member = inspect.getattr_static(modkit.EMA, name)
    assert contract(name)
    if isinstance(member, property):
        return
    signature = inspect.signature(member)
    arguments = [one for one in signature.parameters if one != "self"]
    entries = re.findall(r"^ {4}\**(\w+): ", section(name, "Args"), re.MULTILINE)

    assert entries == arguments
    returns = signature.return_annotation not in (None, "None")
    assert bool(section(name, "Returns") or section(name, "Yields")) == returns
