from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import child_leaf, leaf
from tests.parity.module.contents import raises_like_torch


def host(impl):
    """Build a module with members of all kinds, a child and an empty child slot among them."""
    module = leaf(impl)
    module.inner = child_leaf(impl)
    module.add_module("nothing", None)
    return module


def with_class_members(impl):
    """Build a module whose class defines names of its own."""

    class Host(impl.Module):
        constant = 3
        placeholder = None

        @property
        def computed(self):
            return 5

        def method(self):
            return 7

    return Host()


OWN_NAMES = {
    "register_parameter": {"weight", "bias"},
    "register_buffer": {"mean", "unset", "scratch"},
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
    "register_buffer": ("None", "ones(1)"),
    "add_module": ("None", "Identity()"),
    "register_module": ("Identity()",),
}

BAD_VALUES = {
    "register_parameter": (
        *("ones(1)", "Buffer(ones(1))", "1", "'text'", "Identity()", "Identity", "non_leaf()"),
        *("[ones(1)]", "ones(1).numpy()"),
    ),
    "register_buffer": (
        *("1", "'text'", "Identity()", "Identity", "[1.0]", "ones(1).numpy()", "torch.ones"),
        *("True, False", "object(), False"),
    ),
    "add_module": (
        *("1", "'text'", "ones(1)", "Parameter(ones(1))", "Identity", "{}", "torch.ones"),
    ),
    "register_module": ("1", "Identity", "object()"),
}

BAD_ASSIGNMENTS = {
    "weight": (
        *("ones(2, 3)", "Buffer(ones(1))", "1", "True", "0.5", "'text'", "torch.ones"),
        *("object()", "[1]", "Identity"),
    ),
    "bias": ("ones(2)", "Buffer(ones(1))", "1", "False", "Identity"),
    "mean": ("1", "True", "0.5", "'text'", "torch.ones", "object()", "[1]", "Identity"),
    "unset": ("1", "'text'", "object()"),
    "scratch": ("1", "[1]", "Identity"),
    "inner": ("ones(1)", "Buffer(ones(1))", "1", "True", "'text'", "torch.ones", "object()"),
    "nothing": ("ones(1)", "1", "torch.ones", "Identity"),
    "flag": ("Buffer(ones(1))", "Buffer(ones(1), persistent=False)"),
    "training": ("Buffer(ones(1))",),
    "forward": ("Parameter(ones(1))", "Buffer(ones(1))"),
    "state_dict": ("Parameter(ones(1))", "Buffer(ones(1))"),
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


@for_each(
    "call",
    [
        f"setattr(m, {name!r}, {value})"
        for name in BAD_ASSIGNMENTS
        for value in BAD_ASSIGNMENTS[name]
    ],
)
def test_assignment_refuses_a_bad_value(impl: Implementation, call: str) -> None:
    """A value that does not fit the member it would replace is refused; nothing is changed."""
    before, after = raises_like_torch(impl, host, call)

    assert before == after


@for_each("name", ["constant", "placeholder", "computed", "method"])
@for_each(
    "call",
    [
        "setattr(m, {name}, Parameter(ones(1)))",
        "setattr(m, {name}, Buffer(ones(1)))",
        "m.register_parameter({name}, Parameter(ones(1)))",
        "m.register_buffer({name}, ones(1))",
        "m.add_module({name}, Identity())",
    ],
)
def test_names_that_the_class_defines_are_taken(impl: Implementation, name: str, call: str) -> None:
    """A parameter, a buffer or an explicitly added child cannot hide what the class defines."""
    before, after = raises_like_torch(impl, with_class_members, call.format(name=repr(name)))

    assert before == after
