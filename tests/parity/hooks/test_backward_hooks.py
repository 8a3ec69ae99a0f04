import collections
import dataclasses
import gc
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import (
    WRAPPED,
    Pair,
    capturing,
    inner_tensor,
    leaf,
    node_name,
    noting,
    raising,
    returning,
)


FULL = "register_full_backward_hook"
PRE = "register_full_backward_pre_hook"
NON_FULL = "register_backward_hook"
FULL_KINDS = for_each("registrar", [FULL, PRE])
AT_THE_OUTPUTS = "Full backward hook is firing when gradients are computed with respect to"


def plain(value: object) -> object:
    """Turn nested gradients into plain data; they may be expanded, which `freeze` cannot view."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return value


def observed(impl: Implementation, forward) -> tuple[Any, list[object]]:
    """Make a module whose pre-hooks and full hooks note all the gradients they are given."""
    seen: list[object] = []
    module = function_module(impl, forward)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(("pre", plain(go))))
    module.register_full_backward_hook(lambda _, gi, go: seen.append((plain(gi), plain(go))))
    return module, seen


def hooked(impl: Implementation, registrar: str, forward) -> tuple[Any, list[Any]]:
    """Make a module with one hook, and the list of the args that its forward gets."""
    seen: list[Any] = []
    module = function_module(impl, lambda *args, **kw: seen.append(args) or forward(*args, **kw))
    getattr(module, registrar)(returning(None))
    return module, seen


# --- which hooks run --------------------------------------------------------------------------------


def test_hooks_are_listed_global_first(impl: Implementation) -> None:
    """The methods that a call asks return copies of the tables, by kind (rule 9)."""
    hooks = [noting([], name) for name in "abcd"]
    module, other = impl.own.Identity(), impl.own.Identity()
    empty = module._get_backward_hooks(), module._get_backward_pre_hooks()
    module.register_full_backward_hook(hooks[0])
    module.register_full_backward_hook(hooks[1])
    other.register_backward_hook(hooks[2])

    with impl.register_module_full_backward_hook(hooks[3]):
        assert module._get_backward_hooks() == ([hooks[3], hooks[0], hooks[1]], [])
        assert other._get_backward_hooks() == ([hooks[3]], [hooks[2]])

    log: list[str] = []
    module.register_full_backward_pre_hook(noting(log, "second"))
    module.register_full_backward_pre_hook(noting(log, "first"), prepend=True)
    impl.register_module_full_backward_pre_hook(noting(log, "global"))
    listed = module._get_backward_pre_hooks()
    for hook in listed:
        hook(module, ())

    assert log == ["global", "first", "second"]
    assert type(listed) is list
    assert empty == (([], []), [])


def test_global_non_full_hooks_are_listed_as_such(impl: Implementation) -> None:
    """A global non-full hook comes first in the second list, and runs first (rules 9 and 30)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a.view(-1))
    module.register_backward_hook(noting(log, "module 1"))
    module.register_backward_hook(noting(log, "module 2"))
    impl.register_module_backward_hook(noting(log, "global"))
    module(inner_tensor()).sum().backward()

    assert log == ["global", "module 1", "module 2"]
    assert [len(hooks) for hooks in module._get_backward_hooks()] == [0, 3]


@for_each("registrar", [FULL, PRE, NON_FULL])
def test_hooks_are_listed_before_the_forward_pre_hooks_run(
    impl: Implementation, registrar: str
) -> None:
    """A backward hook that a forward pre-hook adds is not in that call (rule 9)."""
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


def test_hooks_are_those_of_the_forward_call(impl: Implementation) -> None:
    """Removing and adding hooks after forward does nothing; each pass fires them (rule 28)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a * 2)
    handles = [
        module.register_full_backward_hook(noting(log, "full")),
        module.register_full_backward_pre_hook(noting(log, "pre")),
        impl.register_module_full_backward_hook(noting(log, "global full")),
        impl.register_module_full_backward_pre_hook(noting(log, "global pre")),
    ]
    x = leaf()
    loss = module(x).sum()
    for handle in handles:
        handle.remove()
    module.register_full_backward_hook(noting(log, "late"))
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)

    assert log == ["global pre", "pre", "global full", "full"] * 2


def test_a_pre_hook_comes_before_the_gradients_of_parameters(impl: Implementation) -> None:
    """A full hook comes after them, from the output to the input of a network (rule 23)."""
    log: list[Any] = []
    network = impl.own.Sequential(impl.own.Linear(1, 1), impl.own.Linear(1, 1))

    def note(name: str):
        return lambda module, *_: log.append((name, module.weight.grad is not None))

    for name, module in network.named_children():
        module.register_full_backward_pre_hook(note(f"pre {name}"))
        module.register_full_backward_hook(note(f"full {name}"))
    impl.register_module_full_backward_hook(noting(log, "global"))
    network(leaf()).sum().backward()

    assert log == [
        *(("pre 1", False), "global", ("full 1", True)),
        *(("pre 0", False), "global", ("full 0", True), "global"),
    ]


@for_each(
    "method",
    [
        "_get_backward_hooks",
        "_get_backward_pre_hooks",
        "_maybe_warn_non_full_backward_hook",
        "_slow_forward",
        "_call_impl",
    ],
)
@for_each("registrar", [FULL, NON_FULL])
def test_overridden_steps_of_a_call_are_the_ones_used(impl, method: str, registrar: str) -> None:
    """A call goes through the class's own versions of its protected steps, where it has any."""
    log: list[str] = []

    def logging(self, *args, **kwargs):
        log.append(method)
        return getattr(impl.Module, method)(self, *args, **kwargs)

    Same = type("Same", (impl.Module,), {method: logging, "forward": lambda self, x: x})
    module = Same()
    getattr(module, registrar)(noting(log, "hook"))
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module(inner_tensor()).sum().backward()
    unused = ["_slow_forward"]
    if registrar == FULL:
        unused.append("_maybe_warn_non_full_backward_hook")

    assert log.count(method) == (method not in unused)
    assert sorted(entry for entry in log if entry != method) == ["hook", "pre"]


# --- views of the inputs and outputs ----------------------------------------------------------------


@FULL_KINDS
def test_tensor_args_reach_forward_as_views(impl: Implementation, registrar: str) -> None:
    """Views of one node, if they are positional, as the pre-hooks left them (rule 12)."""
    module, seen = hooked(impl, registrar, lambda *_, **__: None)
    x, y, inner, key = leaf(1.0, 2.0), torch.ones(2), leaf(), leaf()
    module.register_forward_pre_hook(lambda _, args: (x, *args))
    module.register_forward_hook(lambda _, args, out: seen.append(args))
    module.register_forward_hook(returning(torch.ones(1)))
    module("text", y, [inner], k=key)

    for args in seen:
        assert args[0]._base is x
        assert [node_name(args[0]), node_name(args[2])] == [WRAPPED, None]
        assert args[1] == "text"
        assert args[3][0] is inner
    assert len(seen) == 2


@for_each("registrar", [f"register_module{name[8:]}" for name in (FULL, PRE)])
def test_global_hooks_wrap_the_args_of_every_module(impl: Implementation, registrar: str) -> None:
    """A module without hooks gets views too (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a, *, k: seen.extend([a, k]) or a)
    key = leaf()
    with getattr(impl, registrar)(returning(None)):
        module(leaf(), k=key)

    assert node_name(seen[0]) == WRAPPED
    assert seen[1] is key


@for_each("case", ["no tensor requires grad", "no_grad", "inference_mode", "non-full hook"])
@FULL_KINDS
def test_what_is_not_wrapped(impl: Implementation, registrar: str, case: str) -> None:
    """Without gradients, or with a non-full hook alone, tensors stay themselves (rules 12, 29)."""
    module, seen = hooked(impl, NON_FULL if case == "non-full hook" else registrar, lambda a: a)
    x = torch.ones(1) if case == "no tensor requires grad" else leaf()
    mode = getattr(torch, case, torch.enable_grad)
    with mode():
        result = module(x)

    assert seen[0][0] is x
    assert result is x
    assert x.requires_grad or result.add_(1) is x


@FULL_KINDS
def test_outputs_are_wrapped_after_the_forward_hooks(impl: Implementation, registrar: str) -> None:
    """Forward hooks see the plain output, the caller gets a view of what they made (rule 16)."""
    outputs: list[torch.Tensor] = []
    module, _ = hooked(impl, registrar, lambda a: a * 2)
    module.register_forward_hook(lambda _, args, out: outputs.append(out))
    result = module(leaf())

    assert node_name(outputs[0]) == "MulBackward0"
    assert (node_name(result), result._base is outputs[0]) == (WRAPPED, True)

    replaced = leaf(2.0) * 3
    module.register_forward_hook(returning(replaced))

    assert module(leaf())._base is replaced


@for_each(
    "pack",
    [
        lambda y: (y, "text", y * 3, None),
        lambda y: (y,),
        lambda y: Pair(first=y, second="text"),
        lambda y: torch.ones(1),
    ],
    ids=["tuple", "one", "namedtuple", "without grad"],
)
def test_items_of_a_tuple_are_wrapped(impl: Implementation, pack) -> None:
    """Its tensors share one node, other items stay, and so does the class (rule 16)."""
    y = leaf() * 2
    expected = pack(y)
    module, _ = hooked(impl, FULL, lambda a: expected)
    result = module(leaf())
    packed = isinstance(result, tuple)
    items = list(zip(result, expected, strict=True)) if packed else [(result, expected)]

    assert type(result) is type(expected)
    for item, unwrapped in items:
        wrapped = isinstance(item, torch.Tensor) and unwrapped.requires_grad
        assert node_name(item) == WRAPPED if wrapped else item is unwrapped
    assert len({item.grad_fn for item, _ in items if isinstance(item, torch.Tensor)}) == 1


@dataclasses.dataclass
class Holder:
    """An output class that torch knows nothing about."""

    y: torch.Tensor


@for_each(
    "pack",
    [lambda y: [y], Holder, lambda y: collections.OrderedDict(y=y), lambda y: 5],
    ids=["list", "dataclass", "OrderedDict", "int"],
)
@FULL_KINDS
def test_other_outputs_warn_and_are_left_alone(impl, registrar, pack) -> None:
    """They are returned unchanged, and their gradients fire no hook (rule 16)."""
    log: list[str] = []
    x = leaf()
    made = pack(x * 2)
    module = function_module(impl, lambda a: made)
    getattr(module, registrar)(noting(log, "fired"))
    with pytest.warns(UserWarning, match="module output should be a Tensor or a tuple") as caught:
        result = module(x)

    assert [str(warning.message).endswith(f"but received {type(made)}") for warning in caught] == [
        True
    ]
    assert result is made

    if isinstance(result, Holder):
        result.y.backward()
    assert log == []


@for_each("place", ["input", "output", "next layer"])
def test_wrapped_tensors_may_not_be_changed_in_place(place: str) -> None:
    """Forward, the caller and an in-place layer that write into one raise (rule 29)."""

    def scenario(impl: Implementation) -> object:
        module, _ = hooked(impl, FULL, lambda a: a.add_(1) if place == "input" else a * 2)
        if place == "next layer":
            return impl.own.Sequential(module, impl.own.ReLU(inplace=True))(leaf())
        result = module(inner_tensor())
        return result.add_(1)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "is a view and is being modified inplace" in text


# --- gradients --------------------------------------------------------------------------------------


@for_each(
    ("forward", "arguments"),
    [
        (lambda a, b: a * b, (leaf(2.0), torch.tensor([2]))),
        (lambda a: (a * 2, a.detach().long()), (leaf(2.0),)),
        (lambda a, b: (a, b, a), (leaf(2.0), leaf(3.0))),
        (lambda a: (a * 2, None, a[:0]), (leaf(2.0, 3.0),)),
        (lambda a, b: a.sum() + b.sum(), (leaf(1.0, 2.0), leaf(3.0))),
        (torch.complex, (leaf(1.0), leaf(2.0))),
        (lambda a: a, (leaf(1.0),)),
        (lambda a: a.expand(3), (leaf(1.0),)),
        (lambda a, n, b, c: (a * b, n, a + c), (leaf(2.0), 5, torch.tensor([3.0]), leaf(4.0))),
        (lambda a: a * 3 + a * 4, (leaf(1.0),)),
    ],
    ids=[
        *("int in", "int out", "same twice", "empty", "sum", "complex", "identity", "expand"),
        *("slots", "used twice"),
    ],
)
def test_gradients_that_the_hooks_are_given(forward, arguments) -> None:
    """A slot for each positional argument and each output, None for other objects (rules 24 to 26)."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, forward)
        inputs = [
            a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a
            for a in arguments
        ]
        result = module(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        sum(o.abs().sum() for o in outputs if torch.is_tensor(o) and o.requires_grad).backward()
        grads = [getattr(a, "grad", None) for a in inputs]
        return seen, plain(grads), [type(o).__name__ for o in outputs]

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][0][1]) == 2


def keyword_only(impl: Implementation) -> object:
    """Tensors given by keyword have no slot."""
    module, seen = observed(impl, lambda a, *, k: a * k)
    key = leaf(3.0)
    module(leaf(2.0), k=key).sum().backward()
    return seen, plain(key.grad)


def one_by_one(impl: Implementation) -> object:
    """Each pass fires the hooks, with None for the other outputs."""
    module, seen = observed(impl, lambda a: (a * 2, a * 3))
    first, second = module(leaf())
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return seen


def double_backward(impl: Implementation) -> object:
    """Gradients of the inputs do not come through the outputs."""
    module, seen = observed(impl, torch.tanh)
    x = leaf(0.5)
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return seen, plain([first, second])


def freed_graph(impl: Implementation) -> object:
    """A second pass over a freed graph is torch's error."""
    module, _ = observed(impl, lambda a: a.exp())
    loss = module(leaf()).sum()
    loss.backward()
    return loss.backward()


def checkpointed(impl: Implementation) -> object:
    """Checkpointing runs forward again."""
    module, seen = observed(impl, torch.tanh)
    module.register_forward_hook(noting(seen, "forward"))
    x = leaf(0.5)
    checkpoint(module, x, use_reentrant=True).sum().backward()
    return seen, plain(x.grad)


def jacobian(impl: Implementation) -> object:
    """Each row of a jacobian is a backward pass."""
    module, seen = observed(impl, torch.tanh)
    return seen, plain(torch.autograd.functional.jacobian(module, leaf(0.5, 1.0)))


def transformed(impl: Implementation) -> object:
    """`torch.func.grad` refuses a module with full backward hooks."""
    module, _ = observed(impl, torch.tanh)
    return torch.func.grad(lambda x: module(x).sum())(torch.ones(2))


def subclassed(impl: Implementation) -> object:
    """A subclass of Tensor keeps its type."""

    class Tagged(torch.Tensor):
        pass

    module, _ = observed(impl, lambda a: a)
    return type(module(torch.ones(1).as_subclass(Tagged).requires_grad_())).__name__


PASSES = {
    **dict.fromkeys([freed_graph, transformed], "raised"),
    **dict.fromkeys([keyword_only, one_by_one, double_backward], "returned"),
    **dict.fromkeys([checkpointed, jacobian, subclassed], "returned"),
}


@for_each("scenario", PASSES)
def test_hooks_in_other_kinds_of_passes(scenario) -> None:
    """Hooks fire as often, with the same gradients, in every kind of pass (rules 26 and 28)."""
    assert same(scenario)[0] == PASSES[scenario]


# By the name of what a hook returns: the value, and the kinds of hooks from which torch accepts it.
VALUES: dict[str, tuple[Any, set[str]]] = {
    "None": (None, {FULL, PRE, NON_FULL}),
    "nothing": ((), set()),
    "two": ((torch.ones(1),) * 2, set()),
    "long tensor": (torch.ones(3), set()),
    "shape": ((torch.ones(4),), set()),
    "text": (("text",), set()),
    "int": (5, set()),
    "dict": ({0: torch.ones(1)}, {FULL, PRE}),
    "list": ([torch.ones(1) * 2], {FULL, PRE}),
    "no gradient": ((None,), {FULL, PRE, NON_FULL}),
}


@for_each("name", VALUES)
@for_each("registrar", [FULL, PRE, NON_FULL])
def test_what_a_hook_may_return(registrar: str, name: str) -> None:
    """As many gradients as there are, or None; else the error and its text are torch's (rules 24, 25)."""
    value, accepted = VALUES[name]
    if registrar == PRE and name == "long tensor":
        pytest.skip("a difference, tested below")

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, lambda a: a.view(-1))
        if registrar == NON_FULL:
            module = function_module(impl, lambda a: a.view(-1))
        getattr(module, registrar)(returning(value))
        x = leaf()
        module(x * 1).sum().backward()
        return plain(x.grad), seen

    assert same(scenario)[0] == ("returned" if registrar in accepted else "raised")


@for_each("container", [tuple, list])
def test_values_of_hooks_chain(impl: Implementation, container: type) -> None:
    """Each hook sees what those before it left, global ones first (rules 24 and 25)."""
    module = impl.own.Linear(1, 1, bias=False)
    module.weight.data.fill_(2.0)
    seen: list[Any] = []
    module.register_full_backward_pre_hook(lambda _, go: container([go[0] + 1]))
    module.register_full_backward_pre_hook(returning(None))
    module.register_full_backward_hook(capturing(seen))
    module.register_full_backward_hook(lambda _, gi, go: container([gi[0] + 1]))
    impl.register_module_full_backward_hook(lambda _, gi, go: container([gi[0] * 10]))
    impl.register_module_full_backward_pre_hook(lambda _, go: container([go[0] * 3]))
    x = leaf(5.0)
    module(x.reshape(1, 1)).sum().backward()

    # The gradient of the output is (1 * 3) + 1.
    assert [gradient.item() for (gradient,) in seen[0]] == [80.0, 4.0]
    assert [type(gradients) for gradients in seen[0]] == [container, container]
    assert x.grad.item() == 81.0
    assert module.weight.grad.item() == 20.0


def test_a_hook_may_stop_a_gradient(impl: Implementation) -> None:
    """None in the returned tuple means that no gradient flows to that input (rule 25)."""
    module = function_module(impl, lambda a, b: a * b)
    module.register_full_backward_hook(lambda _, gi, go: (None, gi[1]))
    x, y = leaf(2.0), leaf(3.0)
    module(x, y).sum().backward()

    assert x.grad is None
    assert y.grad.item() == 2.0


def test_an_error_in_a_hook_reaches_the_caller(impl: Implementation) -> None:
    """An error raised by a backward hook comes out of `backward()` (rule 25)."""
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_hook(raising(KeyError("from the hook")))
    loss = module(leaf()).sum()

    with pytest.raises(KeyError, match="from the hook"):
        loss.backward()


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)], ids=repr)
@pytest.mark.parametrize("pack", [lambda y: y, lambda y: (y,)], ids=["tensor", "tuple"])
def test_pre_hook_may_return_a_bare_tensor(impl: Implementation, shape, pack) -> None:
    """One tensor is the new gradient of the one output, and goes to the next hooks in a tuple."""
    seen: list[object] = []
    module = function_module(impl, lambda x: pack(x * 2))
    module.register_full_backward_pre_hook(lambda _, go: go[0] * 3)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(go))
    module.register_full_backward_hook(lambda _, gi, go: seen.append(go))
    x = torch.ones(shape, requires_grad=True)
    result = module(x)
    (result[0] if isinstance(result, tuple) else result).sum().backward()

    assert torch.equal(x.grad, torch.full(shape, 6.0))
    assert all(isinstance(go, tuple) and len(go) == 1 for go in seen)
    assert all(torch.equal(go[0], torch.full(shape, 3.0)) for go in seen)
    assert len(seen) == 2


def test_pre_hook_that_returns_a_bare_tensor_for_two_outputs_is_an_error(
    impl: Implementation,
) -> None:
    """A tensor is never taken apart to make up for the number of outputs."""
    module = function_module(impl, lambda x: (x * 2, x * 3))
    module.register_full_backward_pre_hook(returning(torch.ones(2)))
    first, second = module(leaf(1.0, 2.0))

    with pytest.raises(RuntimeError, match="number of grad_output, got 1, but expected 2"):
        (first + second).sum().backward()


# --- when hooks fire --------------------------------------------------------------------------------


@for_each(
    ("requires_grad", "frozen", "expected"),
    [
        ((True,), False, [("pre", False), ("full", True)]),
        ((False, True), False, [("pre", False), ("full", True)]),
        ((True,), True, [("pre", False), ("full", False)]),
        ((False,), False, [("pre", False), ("full", False)]),
        ((), False, [("pre", False), ("full", False)]),
        ((False,), True, []),
    ],
    ids=["input", "second input", "frozen", "parameter", "no input", "nothing"],
)
def test_when_hooks_fire(impl: Implementation, requires_grad, frozen: bool, expected) -> None:
    """With the inputs' gradients, else with the outputs' and a warning, else never (rule 27)."""
    log: list[Any] = []
    weight = torch.nn.Parameter(torch.ones(1), requires_grad=not frozen)
    module = function_module(impl, lambda *args: sum(args, weight))
    module.register_full_backward_pre_hook(lambda *_: log.append(("pre", weight.grad is not None)))
    module.register_full_backward_hook(
        lambda _, gi, go: log.append(("full", weight.grad is not None))
    )
    loss = module(*(torch.ones(1, requires_grad=flag) for flag in requires_grad))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (loss + leaf()).sum().backward()

    assert log == expected
    early = bool(expected) and not any(requires_grad)
    assert [AT_THE_OUTPUTS in str(warning.message) for warning in caught] == [True] * early


def test_hooks_do_not_fire_without_a_gradient_of_the_outputs(impl: Implementation) -> None:
    """After a forward under no_grad, with a detached output, or if it is not used (rule 27)."""
    log: list[str] = []
    x = leaf()
    for forward in (lambda a: a * 2, lambda a: a.detach()):
        module = function_module(impl, forward)
        module.register_full_backward_pre_hook(noting(log, "pre"))
        module.register_full_backward_hook(noting(log, "full"))
        with torch.no_grad():
            without_grad = module(x)
        result = module(x)
        (without_grad + result.detach() + x).sum().backward()

        assert not without_grad.requires_grad
    assert log == []


@for_each(
    "value",
    [None, (None,), (), (None, None), (torch.ones(1, 1),), [None], torch.ones(1)],
    ids=repr,
)
def test_what_a_hook_that_fires_at_the_outputs_may_return(value: object) -> None:
    """None, or a tuple of nothing but None; grad_input has None for every input (rule 27)."""

    def scenario(impl: Implementation) -> object:
        seen: list[object] = []
        module = impl.own.Linear(1, 1, bias=False)
        module.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,))
        module.register_full_backward_hook(lambda _, gi, go: seen.append((gi, go)))
        module.register_full_backward_hook(returning(value))
        with pytest.warns(UserWarning, match=AT_THE_OUTPUTS) as caught:
            module(torch.ones(1, 1)).sum().backward()
        return plain(seen), plain(module.weight.grad), len(caught)

    accepted = value is None or (type(value) is tuple and not any(map(torch.is_tensor, value)))

    outcome = same(scenario)
    assert outcome[0] == ("returned" if accepted else "raised")
    assert accepted or outcome[2].startswith("Backward hook for Modules where no input requires")


# --- non-full hooks ---------------------------------------------------------------------------------


def test_a_non_full_hook_gets_the_gradients_of_the_last_node(impl: Implementation) -> None:
    """And may replace those of the node's inputs; the output is that of forward hooks (rules 17, 30)."""
    received: list[tuple[Any, ...]] = []
    module = function_module(impl, lambda a: a.view(-1))
    module.register_backward_hook(lambda *arguments: received.append(arguments))
    handle = module.register_backward_hook(lambda _, gi, go: (gi[0] * 5,))
    module.register_forward_hook(lambda _, args, out: args[0].square())
    x = leaf(2.0)
    output = module(x * 1).sum()
    handle.remove()
    output.backward()
    (owner, grad_input, grad_output) = received[0]

    assert owner is module
    assert [g.item() for g in (*grad_input, *grad_output)] == [4.0, 1.0]
    assert x.grad.item() == 20.0


def test_a_non_full_hook_of_a_dead_module_raises() -> None:
    """The node holds the module weakly: a hook whose module is gone raises (rule 30)."""

    def scenario(impl: Implementation) -> None:
        module = function_module(impl, lambda a: a.view(-1))
        module.register_backward_hook(returning(None))
        output = module(inner_tensor()).sum()
        del module
        gc.collect()
        output.backward()

    message = "You are trying to call the hook of a dead Module!"
    assert same(scenario) == ("raised", "RuntimeError", message)


@for_each(
    ("pack", "arguments"),
    [
        (lambda a, b: (a, b), 1),
        (lambda a, b: [[[a], b]], 1),
        (lambda a, b: {"n": 5, "x": a, "y": b}, 1),
        (lambda a, b: [a], 1),
        (lambda a, b: (a, "text"), 1),
        (lambda a, b: a + 1, 1),
        (lambda a, b: a, 2),
    ],
    ids=["tuple", "nested", "dict", "list", "mixed tuple", "two steps", "two inputs"],
)
def test_a_non_full_hook_goes_to_the_first_tensor(pack, arguments: int) -> None:
    """Structures that make the gradients incomplete warn, in torch's words (rule 17)."""

    def scenario(impl: Implementation) -> object:
        seen: list[tuple[object, ...]] = []
        x = inner_tensor()
        first, second = x * 2, x * 3
        module = function_module(impl, lambda *_: pack(first, second))
        module.register_backward_hook(capturing(seen))
        with pytest.warns(FutureWarning, match="non-full backward hook") as caught:
            module(*(x, 2)[:arguments])
        (first + second).sum().backward()
        texts = [f"{w.category.__name__}: {w.message}" for w in caught]
        return plain([list(map(list, each)) for each in seen]), texts

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][1][1]) == 1


@for_each(
    ("case", "warned"),
    [
        (lambda x, y: (x, y, y.grad_fn), 0),
        (lambda x, y: ((x,), (y,), y.grad_fn), 0),
        (lambda x, y: (x, [y], y.grad_fn), 1),
        (lambda x, y: ([x], y, y.grad_fn), 1),
        (lambda x, y: (x, (y, x * 2), y.grad_fn), 1),
        (lambda x, y: (x, y, x.grad_fn), 1),
        (lambda x, y: (x, (y.detach(),), y.grad_fn), 1),
        (lambda x, y: (y, y, y.grad_fn), 1),
    ],
    ids=[
        *("tensors", "tuples", "list out", "list in", "two nodes", "other node", "no node"),
        "longer way",
    ],
)
def test_which_non_full_hooks_are_incomplete(case, warned: int) -> None:
    """Asked directly, the method gives torch's FutureWarning for each incomplete case (rule 17)."""

    def scenario(impl: Implementation) -> list[str]:
        x = inner_tensor()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            impl.Module()._maybe_warn_non_full_backward_hook(*case(x, x.exp()))
        return [f"{warning.category.__name__}: {warning.message}" for warning in caught]

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1]) == warned
