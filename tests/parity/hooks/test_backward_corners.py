import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import leaf, noting, returning


def plain(value: object) -> object:
    """Turn nested gradients into plain data; they may be expanded, which `freeze` cannot view."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    return value


def observed(impl: Implementation, forward) -> tuple[torch.nn.Module, list[object]]:
    """Make a module whose pre-hooks and full hooks note all the gradients they are given."""
    seen: list[object] = []
    module = function_module(impl, forward)
    module.register_full_backward_pre_hook(lambda _, go: seen.append(("pre", plain(go))))
    module.register_full_backward_hook(lambda _, gi, go: seen.append((plain(gi), plain(go))))
    return module, seen


@for_each(
    "value",
    [
        torch.ones(1) * 5,
        torch.ones(3),
        {0: torch.ones(1)},
        (torch.ones(4),),
        ("text",),
        5,
        [None],
    ],
    ids=["tensor", "long tensor", "dict", "shape", "text", "int", "list"],
)
@for_each("registrar", ["register_full_backward_hook", "register_backward_hook"])
def test_odd_values_of_backward_hooks(registrar: str, value: object) -> None:
    """Whatever a backward hook returns, the gradient or the error and its text are the same."""

    def scenario(impl: Implementation) -> object:
        module = function_module(impl, lambda a: a.view(-1))
        getattr(module, registrar)(returning(value))
        x = leaf()
        module(x * 1).sum().backward()
        return plain(x.grad)

    accepted = registrar == "register_full_backward_hook" and type(value) in {dict, list}

    assert same(scenario)[0] == ("returned" if accepted else "raised")


@for_each(
    "value",
    [[torch.ones(1) * 2], (None,), (torch.ones(4),), 5, {"a": 1}],
    ids=["list", "none", "shape", "int", "dict"],
)
def test_odd_values_of_backward_pre_hooks(value: object) -> None:
    """Whatever a backward pre-hook returns, the gradient or the error are the same."""

    def scenario(impl: Implementation) -> object:
        module = function_module(impl, lambda a: a * 3)
        module.register_full_backward_pre_hook(returning(value))
        x = leaf()
        module(x).sum().backward()
        return plain(x.grad)

    accepted = value == (None,) or type(value) is list

    assert same(scenario)[0] == ("returned" if accepted else "raised")


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
    ],
    ids=["int in", "int out", "same twice", "empty", "sum", "complex", "identity", "expand"],
)
def test_gradients_that_the_hooks_are_given(forward, arguments) -> None:
    """For every kind of input and output the hooks see the same gradients, in the same order."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, forward)
        inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
        result = module(*inputs)
        outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o is not None]
        sum(o.abs().sum() for o in outputs if o.requires_grad).backward()
        return seen, plain([a.grad for a in inputs]), [type(o).__name__ for o in outputs]

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][0][1]) == 2


def test_same_tensor_in_two_places() -> None:
    """A tensor given twice has two slots, whose gradients add up."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, lambda a, b: a * b)
        x = leaf(3.0)
        module(x, x).sum().backward()
        return seen, plain(x.grad)

    assert same(scenario)[0] == "returned"


def test_module_without_inputs() -> None:
    """Without positional args the hook fires at the outputs, with a warning."""

    def scenario(impl: Implementation) -> object:
        weight = leaf(2.0)
        module, seen = observed(impl, lambda: weight * 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module().sum().backward()
        return seen, [str(warning.message) for warning in caught]

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][1][1]) == 1


def test_empty_tuple_as_output() -> None:
    """An output without tensors is left alone."""
    assert same(lambda impl: observed(impl, lambda a: ())[0](leaf())) == ("returned", ("tuple", []))


def test_second_backward_without_retained_graph() -> None:
    """A second pass over a freed graph is torch's error, hooks or not."""

    def scenario(impl: Implementation) -> None:
        module, _ = observed(impl, lambda a: a.exp())
        loss = module(leaf()).sum()
        loss.backward()
        loss.backward()

    assert same(scenario)[:2] == ("raised", "RuntimeError")


def test_double_backward() -> None:
    """Hooks fire in the first pass of a double backward and see the same gradients."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, torch.tanh)
        x = leaf(0.5)
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return seen, plain([first, second])

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_under_checkpointing(reentrant: bool) -> None:
    """Checkpointing runs forward again, or as much of it as it needs; hooks fire as in torch."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, torch.tanh)
        module.register_forward_hook(noting(seen, "forward"))
        x = leaf(0.5)
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        return seen, plain(x.grad)

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][0][1].count(("str", "'forward'")) == (2 if reentrant else 1)


def test_hooks_under_a_jacobian() -> None:
    """Each row of a jacobian is a backward pass that fires the hooks."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, torch.tanh)
        jacobian = torch.autograd.functional.jacobian(module, leaf(0.5, 1.0))
        return seen, plain(jacobian)

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][0][1]) == 4


def test_hooks_under_functional_transforms() -> None:
    """`torch.func.grad` refuses a module with full backward hooks, in torch's words."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, torch.tanh)
        gradient = torch.func.grad(lambda x: module(x).sum())(torch.ones(2))
        return len(seen), plain(gradient)

    assert same(scenario)[:2] == ("raised", "RuntimeError")


def test_hooks_under_autocast() -> None:
    """Forward hooks see the lower-precision output, backward hooks its gradient's type."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, torch.nn.functional.linear)
        module.register_forward_hook(lambda _, args, out: seen.append(str(out.dtype)))
        x, weight = leaf(1.0, 2.0).reshape(1, 2), leaf(1.0, 2.0).reshape(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x, weight).sum().backward()
        return seen

    kind, value = same(scenario)

    assert kind == "returned"
    assert ("str", "'torch.bfloat16'") in value[1]


def test_hooks_in_inference_mode() -> None:
    """In inference mode nothing is wrapped and no backward hook is due."""

    def scenario(impl: Implementation) -> object:
        module, seen = observed(impl, lambda a: a * 2)
        with torch.inference_mode():
            return plain(module(leaf())), seen

    assert same(scenario)[0] == "returned"


def test_tensor_subclasses_pass_through_the_wrapping() -> None:
    """A subclass of Tensor and a Parameter come out of a hooked identity as the same types."""

    class Tagged(torch.Tensor):
        pass

    def scenario(impl: Implementation) -> list[str]:
        module, _ = observed(impl, lambda a: a)
        tagged = torch.ones(1).as_subclass(Tagged).requires_grad_()
        return [type(module(t)).__name__ for t in (tagged, impl.own.Parameter(torch.ones(1)))]

    assert same(scenario)[0] == "returned"
