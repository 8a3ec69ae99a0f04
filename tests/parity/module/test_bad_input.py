import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import child_leaf, leaf
from tests.parity.module.contents import contents, non_leaf, raises_like_torch


def host(impl):
    """Build a module with members of all kinds, a child and an empty child slot among them."""
    module = leaf(impl)
    module.inner = child_leaf(impl)
    module.add_module("nothing", None)
    return module


OWN_NAMES = {
    "register_parameter": {"weight", "bias"},
    "add_module": {"inner", "nothing"},
    "register_module": {"inner", "nothing"},
}

BAD_NAMES = (
    *(1, None, b"bytes", ("a", "b"), 1.5),
    *("", ".", "a.b", ".a", "a.", "flag", "forward", "training", "_parameters", "state_dict"),
    *("T_destination", "__class__", "weight", "bias", "mean", "unset", "scratch", "inner"),
    "nothing",
)

VALUES = {
    "register_parameter": ("None", "Parameter(ones(1))", "ones(1)"),
    "add_module": ("None", "Identity()"),
    "register_module": ("Identity()",),
}

BAD_VALUES = {
    "register_parameter": (
        *("ones(1)", "Buffer(ones(1))", "1", "'text'", "Identity()", "Identity", "non_leaf()"),
        *("[ones(1)]", "ones(1).numpy()"),
    ),
    "add_module": (
        *("1", "'text'", "ones(1)", "Parameter(ones(1))", "Identity", "{}", "torch.ones"),
    ),
    "register_module": ("1", "Identity", "object()"),
}


@for_each(
    "call",
    [
        f"m.{method}({name!r}, {value})"
        for method, values in VALUES.items()
        for value in values
        for name in BAD_NAMES
        if name not in OWN_NAMES[method]
    ],
)
def test_registration_refuses_a_bad_name(impl: Implementation, call: str) -> None:
    """A name of another type, empty, dotted or taken is refused and nothing is changed."""
    before, after = raises_like_torch(impl, host, call)

    assert before == after


@for_each(
    "call",
    [
        f"m.{method}({name!r}, {value})"
        for method, values in BAD_VALUES.items()
        for value in values
        for name in ("fresh", *sorted(OWN_NAMES[method]))
    ],
)
def test_registration_refuses_a_bad_value(impl: Implementation, call: str) -> None:
    """A value of the wrong kind is refused for new and for known names; nothing is changed."""
    before, after = raises_like_torch(impl, host, call)

    assert before == after


@pytest.fixture
def refuse(impl: Implementation):
    """Make every registration of the given kind fail, until the test ends."""
    handles = []

    def install(kind: str) -> None:
        def hook(module, name, value):
            raise RuntimeError(f"{name} is refused")

        handles.append(getattr(impl, f"register_module_{kind}_registration_hook")(hook))

    yield install
    for handle in handles:
        handle.remove()


NEW = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(1)),
    "module": torch.nn.Identity,
}


@pytest.mark.parametrize("kind", NEW)
def test_a_registration_that_a_hook_refuses_changes_nothing(impl, kind, refuse):
    """When a hook raises in ``register_*``, the module stays as it was."""
    module = host(impl)
    before = contents(module)
    refuse(kind)
    with pytest.raises(RuntimeError, match="x is refused"):
        getattr(module, f"register_{kind}")("x", NEW[kind]())

    assert contents(module) == before


@pytest.mark.parametrize("name", ["weight", "x"])
def test_an_assignment_that_is_refused_changes_nothing(impl, name, refuse):
    """A parameter is not lost, and a free name stays free, when the new value is refused."""
    module = host(impl)
    before = contents(module)
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor"):
        setattr(module, name, non_leaf())
    refuse("parameter")
    with pytest.raises(RuntimeError, match=f"{name} is refused"):
        setattr(module, name, NEW["parameter"]())

    assert contents(module) == before
