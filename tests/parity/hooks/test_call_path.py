import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import function_module
from tests.parity.hooks.tools import (
    MODULE_REGISTRARS,
    WRAPPED,
    inner_tensor,
    leaf,
    node_name,
    noting,
    returning,
)


def test_compiled_call_replaces_the_whole_call(impl: Implementation) -> None:
    """With `_compiled_call_impl` set, a call is that function alone: no hooks here (rule 6)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_pre_hook(noting(log, "pre"))
    module.register_forward_hook(noting(log, "after"))
    module._compiled_call_impl = lambda *args, **kwargs: ("compiled", args, kwargs)

    assert module(1, k=2) == ("compiled", (1,), {"k": 2})
    assert log == []


def test_compiled_call_set_back_to_none_restores_the_ordinary_call(impl: Implementation) -> None:
    """None in `_compiled_call_impl` means the ordinary call with its hooks (rule 6)."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_hook(noting(log, "after"))
    module._compiled_call_impl = returning("compiled")
    module._compiled_call_impl = None

    assert module(1) == 1
    assert log == ["after"]


def test_compiled_call_of_a_child_is_used_by_its_parent(impl: Implementation) -> None:
    """A parent that calls its child goes through the child's compiled call (rule 6)."""
    child = impl.own.Identity()
    child._compiled_call_impl = returning("compiled child")

    assert impl.own.Sequential(child)(0) == "compiled child"


def forwards_of_a_trace(impl: Implementation, *, hooked: bool, through: str) -> list[str]:
    """Tell which forwards are called while a trace of a module, or around it, is recorded."""
    log: list[str] = []

    class Recorded(impl.Module):
        def _slow_forward(self, *args, **kwargs):
            log.append("slow")
            return super()._slow_forward(*args, **kwargs)

        def forward(self, x):
            log.append("forward")
            return x * 2

    module = Recorded()
    if hooked:
        module.register_forward_hook(returning(None))
    module(torch.ones(1))

    assert log == ["forward"]

    log.clear()

    def function(x):
        return module(x)

    target = module if through == "module" else function
    torch.jit.trace(target, torch.ones(1), check_trace=False)
    return log


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    ("hooked", "through"), [(False, "module"), (True, "module"), (True, "function")]
)
def test_call_goes_through_slow_forward_while_tracing(
    impl: Implementation, hooked: bool, through: str
) -> None:
    """While a trace is recorded a call reaches forward through `_slow_forward` (rule 7)."""
    assert forwards_of_a_trace(impl, hooked=hooked, through=through) == ["slow", "forward"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_call_goes_through_slow_forward_while_a_function_is_traced(impl: Implementation) -> None:
    """A module without hooks that a traced function calls goes the same way (rule 7)."""
    assert forwards_of_a_trace(impl, hooked=False, through="function") == ["slow", "forward"]


@pytest.mark.parametrize("hooked", [False, True])
def test_forward_on_the_instance_wins(impl: Implementation, hooked: bool) -> None:
    """A `forward` assigned to the instance is called instead of the class's (rule 7)."""
    module = impl.own.Identity()
    module.forward = lambda x: x + 1
    if hooked:
        module.register_forward_hook(returning(None))

    assert module(1) == 2
    assert "forward" in module.__dict__

    del module.forward

    assert module(1) == 1


@pytest.mark.parametrize("hooked", [False, True])
def test_call_impl_on_the_instance_wins(impl: Implementation, hooked: bool) -> None:
    """A `_call_impl` assigned to the instance is what a call runs, as libraries do it (rule 7)."""
    module = impl.own.Identity()
    original = module._call_impl
    if hooked:
        module.register_forward_hook(lambda _, args, out: out + 1)
    module._call_impl = lambda x: ("wrapped", original(x))

    assert module(1) == ("wrapped", 2 if hooked else 1)


def test_call_without_hooks_passes_arguments_and_value_through(impl: Implementation) -> None:
    """Without hooks a call is forward with the same arguments, its value as it is (rule 8)."""
    value = object()
    received: list[object] = []

    def forward(*args: object, **kwargs: object) -> object:
        received.append((args, kwargs))
        return value

    assert function_module(impl, forward)(1, 2, k=3) is value
    assert received == [((1, 2), {"k": 3})]


def test_call_without_hooks_keeps_tensors_as_they_are(impl: Implementation) -> None:
    """Without hooks no tensor is replaced by a view (rule 8)."""
    x = leaf()

    assert impl.own.Identity()(x) is x


@for_each(
    "registrar", [name for name in MODULE_REGISTRARS if "_forward_" in name or "backward" in name]
)
def test_hook_added_inside_forward_of_an_unhooked_module_waits(
    impl: Implementation, registrar: str
) -> None:
    """Whether there are hooks is decided on entry: one added inside forward waits (rule 8)."""
    log: list[str] = []

    class AddsOne(impl.Module):
        def forward(self, x):
            if not log:
                log.append("forward")
                getattr(self, registrar)(noting(log, registrar))
            return x.view(-1)

    module = AddsOne()
    module(inner_tensor()).sum().backward()

    assert log == ["forward"]

    module(inner_tensor()).sum().backward()

    assert log == ["forward", registrar]


def test_forward_hook_added_inside_forward_of_a_hooked_module_runs_at_once(
    impl: Implementation,
) -> None:
    """If the call has other hooks, the forward hooks are listed only after forward (rule 8)."""
    log: list[str] = []

    class AddsOne(impl.Module):
        def forward(self, x):
            self.register_forward_hook(noting(log, "added"))
            return x

    module = AddsOne()
    module.register_forward_pre_hook(noting(log, "pre"))
    module(0)

    assert log == ["pre", "added"]


@pytest.mark.parametrize(
    "registrar",
    ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"],
)
def test_backward_hook_added_by_a_pre_hook_is_ignored_in_that_call(
    impl: Implementation, registrar: str
) -> None:
    """Backward hooks are listed before the forward pre-hooks run (rule 9)."""
    log: list[str] = []
    module = function_module(impl, lambda x: x.view(-1))
    handle = module.register_forward_pre_hook(
        lambda module, _: (getattr(module, registrar)(noting(log, registrar)), None)[1]
    )
    output = module(inner_tensor())
    output.sum().backward()
    handle.remove()

    assert node_name(output) == "ViewBackward0"
    assert log == []

    module(inner_tensor()).sum().backward()

    assert log == [registrar]


def test_backward_hooks_are_listed_global_first(impl: Implementation) -> None:
    """`_get_backward_hooks` lists full and non-full hooks, global before module (rule 9)."""
    hooks = [noting([], name) for name in "abcd"]
    module, other = impl.own.Identity(), impl.own.Identity()
    module.register_full_backward_hook(hooks[0])
    module.register_full_backward_hook(hooks[1])
    other.register_backward_hook(hooks[2])
    impl.register_module_full_backward_hook(hooks[3])

    assert module._get_backward_hooks() == ([hooks[3], hooks[0], hooks[1]], [])
    assert other._get_backward_hooks() == ([hooks[3]], [hooks[2]])


def test_global_non_full_backward_hooks_are_listed_as_such(impl: Implementation) -> None:
    """A global non-full hook comes first in the second list (rule 9)."""
    hooks = [noting([], name) for name in "abc"]
    module, other = impl.own.Identity(), impl.own.Identity()
    module.register_full_backward_hook(hooks[0])
    other.register_backward_hook(hooks[1])
    impl.register_module_backward_hook(hooks[2])

    assert module._get_backward_hooks() == ([hooks[0]], [hooks[2]])
    assert other._get_backward_hooks() == ([], [hooks[2], hooks[1]])


def test_backward_pre_hooks_are_listed_global_first(impl: Implementation) -> None:
    """`_get_backward_pre_hooks` lists global pre-hooks, then the module's (rule 9)."""
    log: list[str] = []
    module, other = impl.own.Identity(), impl.own.Identity()
    module.register_full_backward_pre_hook(noting(log, "a"))
    module.register_full_backward_pre_hook(noting(log, "b"), prepend=True)
    impl.register_module_full_backward_pre_hook(noting(log, "c"))
    for each in (module, other):
        for hook in each._get_backward_pre_hooks():
            hook(each, ())

    assert log == ["c", "b", "a", "c"]


def test_lists_of_backward_hooks_are_snapshots(impl: Implementation) -> None:
    """The lists are copies: registering later does not change them (rule 9)."""
    module = impl.own.Identity()
    full, non_full = module._get_backward_hooks()
    pre = module._get_backward_pre_hooks()
    module.register_full_backward_hook(noting([], "full"))
    module.register_full_backward_pre_hook(noting([], "pre"))

    assert (full, non_full, pre) == ([], [], [])
    assert {type(full), type(non_full), type(pre)} == {list}


def test_everything_in_one_call_runs_in_the_documented_order(impl: Implementation) -> None:
    """Every kind of hook, global and module, around one forward and backward (rules 9 to 16, 23)."""
    log: list[str | None] = []
    module = function_module(impl, lambda x: log.append(f"forward {node_name(x)}") or x * 2)
    impl.register_module_forward_pre_hook(noting(log, "global pre"))
    impl.register_module_forward_hook(
        lambda _, args, out: log.append(f"global after {node_name(out)}")
    )
    impl.register_module_full_backward_pre_hook(noting(log, "global backward pre"))
    impl.register_module_full_backward_hook(noting(log, "global backward"))
    for registrar, name in {
        "register_forward_pre_hook": "pre",
        "register_forward_hook": "after",
        "register_full_backward_pre_hook": "backward pre",
        "register_full_backward_hook": "backward",
    }.items():
        getattr(module, registrar)(noting(log, f"{name} 2"))
        getattr(module, registrar)(noting(log, f"{name} 1"), prepend=True)
    result = module(leaf())
    log.append(f"result {node_name(result)}")
    result.sum().backward()

    assert log == [
        "global pre",
        "pre 1",
        "pre 2",
        f"forward {WRAPPED}",
        "global after MulBackward0",
        "after 1",
        "after 2",
        f"result {WRAPPED}",
        "global backward pre",
        "backward pre 1",
        "backward pre 2",
        "global backward",
        "backward 1",
        "backward 2",
    ]
