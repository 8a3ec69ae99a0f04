import pytest
import torch

from tests.helpers import Implementation
from tests.models import child_leaf
from tests.parity.module.contents import contents, non_leaf


OLD = {
    "plain": lambda impl, m: setattr(m, "x", [3]),
    "buffer": lambda impl, m: m.register_buffer("x", torch.ones(2)),
    "loose buffer": lambda impl, m: m.register_buffer("x", torch.ones(2), persistent=False),
    "buffer None": lambda impl, m: m.register_buffer("x", None),
    "module": lambda impl, m: setattr(m, "x", child_leaf(impl)),
    "module None": lambda impl, m: m.add_module("x", None),
    "parameter": lambda impl, m: setattr(m, "x", torch.nn.Parameter(torch.ones(2))),
    "absent": lambda impl, m: None,
}
# Torch removes the others before it looks at the new value.
UNTOUCHED_BY_TORCH = ("parameter", "absent")


def host(impl: Implementation, old: str) -> torch.nn.Module:
    """Build a module with ``x`` between two other members of each kind."""

    class Host(impl.Module):
        pass

    module = Host()
    for position in ("before", "after"):
        setattr(module, f"{position}_plain", 1)
        module._parameters[f"{position}_p"] = torch.nn.Parameter(torch.ones(1))
        module.register_buffer(f"{position}_b", torch.ones(1), persistent=position == "after")
        setattr(module, f"{position}_c", child_leaf(impl))
        if position == "before":
            OLD[old](impl, module)
    return module


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


@pytest.mark.parametrize("old", UNTOUCHED_BY_TORCH)
def test_a_refused_parameter_leaves_parameters_and_free_names(impl, old, refuse):
    """A parameter is not lost, and a free name stays free, when the new value is refused."""
    module = host(impl, old)
    before = contents(module)
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor"):
        module.x = non_leaf()
    refuse("parameter")
    with pytest.raises(RuntimeError, match="x is refused"):
        module.x = torch.nn.Parameter(torch.zeros(1))

    assert contents(module) == before


@pytest.mark.parametrize("old", [name for name in OLD if name != "plain"])
def test_a_refused_buffer_leaves_the_old_member(impl, old, refuse):
    """When a buffer registration hook raises, or the name is taken, nothing is changed."""
    module = host(impl, old)
    before = contents(module)
    refuse("buffer")
    with pytest.raises((RuntimeError, TypeError, KeyError)):
        module.x = torch.nn.Buffer(torch.zeros(1), persistent=False)

    assert contents(module) == before


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_refused_explicit_registration_changes_nothing(impl, kind, refuse):
    """When a hook raises in ``register_*``, the module stays as it was."""
    module = host(impl, "absent")
    before = contents(module)
    refuse(kind)
    value = {
        "parameter": torch.nn.Parameter(torch.ones(1)),
        "buffer": torch.ones(1),
        "module": torch.nn.Identity(),
    }[kind]
    with pytest.raises(RuntimeError, match="x is refused"):
        getattr(module, f"register_{kind}")("x", value)

    assert contents(module) == before


def test_the_check_runs_on_the_new_value_only_once(impl):
    """An assignment that succeeds calls each registration hook exactly once."""
    seen = []
    module = host(impl, "buffer")
    handle = impl.register_module_parameter_registration_hook(
        lambda module, name, value: seen.append(name)
    )
    try:
        module.x = torch.nn.Parameter(torch.ones(1))
    finally:
        handle.remove()

    assert seen == ["x"]
    assert "x" not in module._buffers
