import pytest
import torch
import torch.nn.modules.module as torch_module
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import applying, requiring, scaling


# Each method with the function that registers the same kind of hook for all modules.
GLOBAL_COUNTERPARTS = {
    "register_forward_pre_hook": "register_module_forward_pre_hook",
    "register_forward_hook": "register_module_forward_hook",
    "register_full_backward_pre_hook": "register_module_full_backward_pre_hook",
    "register_full_backward_hook": "register_module_full_backward_hook",
}
ORDERED = for_each("registrar", GLOBAL_COUNTERPARTS)
REMOVABLE = pytest.mark.parametrize(
    "registrar",
    [
        *GLOBAL_COUNTERPARTS,
        "register_backward_hook",
        "register_load_state_dict_post_hook",
        "register_state_dict_pre_hook",
    ],
)


def noting(log: list[str], note: str):
    """Make a hook of any signature that appends the note."""

    def hook(*_arguments: object) -> None:
        log.append(note)

    return hook


def exercise(module: torch.nn.Module) -> None:
    """Run a forward and a backward pass, then load the module's own state."""
    module(requiring(1.0)).sum().backward()
    module.load_state_dict(module.state_dict())


@REMOVABLE
def test_registration_returns_a_handle(impl: Implementation, registrar: str) -> None:
    """Registering a hook returns a RemovableHandle, whose `remove()` removes that hook only."""
    log: list[str] = []
    # One operation: the deprecated backward hooks warn of more.
    module = applying(impl, torch.neg)
    handle = getattr(module, registrar)(noting(log, "removed"))
    getattr(module, registrar)(noting(log, "kept"))

    assert type(handle) is RemovableHandle

    exercise(module)

    assert log == ["removed", "kept"]

    handle.remove()
    log.clear()
    exercise(module)

    assert log == ["kept"]


@ORDERED
def test_hooks_run_in_order_of_registration(impl: Implementation, registrar: str) -> None:
    """Without `prepend`, and with prepend=False, a hook fires after all existing ones."""
    log: list[str] = []
    module = scaling(impl)
    getattr(module, registrar)(noting(log, "first"))
    getattr(module, registrar)(noting(log, "second"))
    getattr(module, registrar)(noting(log, "third"), prepend=False)
    exercise(module)

    assert log == ["first", "second", "third"]


@ORDERED
def test_prepended_hook_runs_first(impl: Implementation, registrar: str) -> None:
    """With prepend=True, a hook fires before all existing hooks of its kind on the module."""
    log: list[str] = []
    module = scaling(impl)
    getattr(module, registrar)(noting(log, "first"))
    getattr(module, registrar)(noting(log, "second"), prepend=True)
    getattr(module, registrar)(noting(log, "third"), prepend=True)
    exercise(module)

    assert log == ["third", "second", "first"]


@ORDERED
@pytest.mark.parametrize("build", ["user class", "layer"])
def test_global_hook_runs_first(
    impl: Implementation, registrar: str, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A global hook fires before all hooks of the module, prepended ones included."""
    # Torch's `remove()` leaves the mark of the kind in use behind.
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", None)
    log: list[str] = []
    module = scaling(impl) if build == "user class" else impl.nn.Linear(1, 1)
    getattr(module, registrar)(noting(log, "module"))
    with getattr(impl, GLOBAL_COUNTERPARTS[registrar])(noting(log, "global")):
        getattr(module, registrar)(noting(log, "prepended"), prepend=True)
        exercise(module)

    assert log == ["global", "prepended", "module"]

    log.clear()
    exercise(module)

    assert log == ["prepended", "module"]


@ORDERED
def test_hooks_belong_to_their_module(impl: Implementation, registrar: str) -> None:
    """A hook on a child fires for the child alone, within the pass of its parent."""
    log: list[str] = []
    parent = impl.nn.Sequential(scaling(impl), impl.nn.Linear(1, 1), scaling(impl))
    getattr(parent[0], registrar)(noting(log, "user child"))
    exercise(parent)

    assert log == ["user child"]

    getattr(parent[1], registrar)(noting(log, "layer"))
    getattr(parent, registrar)(noting(log, "parent"))
    log.clear()
    exercise(parent)

    assert sorted(log) == ["layer", "parent", "user child"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("register_backward_hook", "register_full_backward_hook"),
        ("register_full_backward_hook", "register_backward_hook"),
    ],
)
def test_both_kinds_of_backward_hooks_exclude_each_other(first: str, second: str) -> None:
    """The deprecated backward hooks and the full ones cannot be mixed on one module."""

    def scenario(impl: Implementation) -> object:
        module = scaling(impl)
        getattr(module, first)(noting([], ""))
        return getattr(module, second)(noting([], ""))

    assert same(scenario)[:2] == ("raised", "RuntimeError")
