import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, clean_global_hooks, same
from tests.parity.hooks.tools import inner_tensor, leaf, noting


BAD_HOOKS = for_each(
    "hook", [None, 5, "text", [print], torch.ones(1)], ids=["None", "int", "str", "list", "tensor"]
)


@BAD_HOOKS
@pytest.mark.parametrize(
    "registrar",
    [
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_pre_hook",
        "register_full_backward_hook",
        "register_backward_hook",
    ],
)
def test_hook_that_cannot_be_called_fails_when_it_is_due(registrar: str, hook: object) -> None:
    """Registration takes anything; the call or the backward pass raises torch's error."""

    def scenario(impl: Implementation) -> object:
        class Viewed(impl.Module):
            def forward(self, x):
                return x.view(-1)

        module = Viewed()
        getattr(module, registrar)(hook)
        module(inner_tensor()).sum().backward()

    assert same(scenario)[0] == "raised"


@BAD_HOOKS
@pytest.mark.parametrize(
    "registrar",
    [
        "register_module_forward_pre_hook",
        "register_module_forward_hook",
        "register_module_full_backward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_backward_hook",
    ],
)
def test_global_hook_that_cannot_be_called_fails_when_it_is_due(
    registrar: str, hook: object
) -> None:
    """A global hook of any type is stored; the next call or backward raises torch's error."""

    def scenario(impl: Implementation) -> object:
        class Viewed(impl.Module):
            def forward(self, x):
                return x.view(-1)

        with clean_global_hooks():
            getattr(impl, registrar)(hook)
            module = Viewed()
            module(inner_tensor()).sum().backward()

    assert same(scenario)[0] == "raised"


@BAD_HOOKS
@pytest.mark.parametrize(
    "registrar",
    [
        "register_state_dict_pre_hook",
        "_register_state_dict_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "_register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_state_hook_that_cannot_be_called_fails_alike(registrar: str, hook: object) -> None:
    """Saving or loading with such a hook, or registering it, raises torch's error."""

    def scenario(impl: Implementation) -> object:
        module = impl.own.Linear(1, 1)
        getattr(module, registrar)(hook)
        module.load_state_dict(module.state_dict())

    assert same(scenario)[0] == "raised"


@BAD_HOOKS
@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_registration_hook_that_cannot_be_called_fails_alike(kind: str, hook: object) -> None:
    """The next registration raises torch's error."""

    def scenario(impl: Implementation) -> object:
        with clean_global_hooks():
            getattr(impl, f"register_module_{kind}_registration_hook")(hook)
            return impl.own.Sequential(impl.own.BatchNorm1d(1))

    assert same(scenario)[0] == "raised"


@for_each(
    ("registrar", "options"),
    [
        ("register_forward_pre_hook", {}),
        ("register_forward_pre_hook", {"with_kwargs": True}),
        ("register_forward_hook", {}),
        ("register_forward_hook", {"with_kwargs": True}),
        ("register_full_backward_pre_hook", {}),
        ("register_full_backward_hook", {}),
        ("register_backward_hook", {}),
    ],
)
@for_each("parameters", [0, 1, 5])
def test_hook_with_a_wrong_signature_fails_alike(registrar, options, parameters) -> None:
    """A hook that takes another number of arguments raises Python's TypeError."""
    hooks = {0: lambda: None, 1: lambda a: None, 5: lambda a, b, c, d, e: None}

    def scenario(impl: Implementation) -> object:
        class Viewed(impl.Module):
            def forward(self, x):
                return x.view(-1)

        module = Viewed()
        getattr(module, registrar)(hooks[parameters], **options)
        module(inner_tensor()).sum().backward()

    assert same(scenario)[:2] == ("raised", "TypeError")


@pytest.mark.parametrize("registrar", ["register_forward_hook", "register_full_backward_hook"])
def test_hook_before_init_fails_alike(registrar: str) -> None:
    """Registering on a module whose __init__ did not run is torch's AttributeError."""

    def scenario(impl: Implementation) -> object:
        class NoInit(impl.Module):
            def __init__(self) -> None:
                pass

        getattr(NoInit(), registrar)(print)

    assert same(scenario)[:2] == ("raised", "AttributeError")


def test_failing_hook_leaves_the_module_usable(impl: Implementation) -> None:
    """After a call that a hook broke, removing it makes the module work as before."""
    log: list[str] = []
    module = impl.own.Linear(1, 1)
    module.register_forward_pre_hook(noting(log, "pre"))
    handle = module.register_forward_hook(None)
    x = leaf().reshape(1, 1)
    with pytest.raises(TypeError):
        module(x)
    handle.remove()
    result = module(x)

    assert torch.equal(result, module.forward(x))
    assert log == ["pre", "pre"]
