import itertools

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import applying, network, requiring, scaling


FULL = ["register_full_backward_pre_hook", "register_full_backward_hook"]
BOTH = for_each("registrar", FULL)


def capturing(calls: list[tuple[object, ...]]):
    """Make a hook of any signature that notes its arguments."""

    def hook(*arguments: object) -> None:
        calls.append(arguments)

    return hook


@BOTH
@pytest.mark.parametrize("build", ["user class", "layer", "container"])
def test_hook_runs_on_every_backward_pass(impl: Implementation, registrar: str, build: str) -> None:
    """A hook is called each time that the gradients of its module are computed."""
    calls: list[tuple[object, ...]] = []
    module = {
        "user class": lambda: scaling(impl),
        "layer": lambda: impl.nn.Linear(1, 1),
        "container": lambda: impl.nn.Sequential(scaling(impl), impl.nn.Linear(1, 1)),
    }[build]()
    getattr(module, registrar)(capturing(calls))
    output = module(requiring(1.0))

    assert calls == []

    output.sum().backward()

    assert len(calls) == 1

    module(requiring(1.0)).sum().backward()

    assert len(calls) == 2
    assert all(call[0] is module for call in calls)


@BOTH
def test_hook_runs_for_every_module_of_a_tree(impl: Implementation, registrar: str) -> None:
    """Hooks on user classes, containers and layers run once each in a backward pass."""
    model = network(impl)
    ran: list[object] = []
    for module in model.modules():
        getattr(module, registrar)(lambda m, *_: ran.append(m))
    model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()

    assert len(ran) == len(list(model.modules()))
    assert set(ran) == set(model.modules())


@BOTH
def test_hook_does_not_run_without_gradients_of_the_outputs(
    impl: Implementation, registrar: str
) -> None:
    """A hook does not run if the loss does not depend on the module's outputs."""
    calls: list[tuple[object, ...]] = []
    used, unused = scaling(impl), scaling(impl)
    getattr(unused, registrar)(capturing(calls))
    x = requiring(1.0)
    unused(x)
    used(x).sum().backward()

    assert calls == []


@BOTH
def test_hook_does_not_run_if_no_output_requires_grad(impl: Implementation, registrar: str) -> None:
    """A hook does not run if neither the input nor the parameters require grad."""
    calls: list[tuple[object, ...]] = []
    module = scaling(impl).requires_grad_(False)
    getattr(module, registrar)(capturing(calls))
    output = module(torch.ones(1))

    assert not output.requires_grad

    (output + requiring(1.0)).sum().backward()

    assert calls == []


def test_hook_runs_if_only_parameters_require_grad(impl: Implementation) -> None:
    """Without input gradients a hook runs for those of the outputs; torch 2.13 warns of it."""
    calls: list[tuple[object, ...]] = []
    module = scaling(impl)
    module.register_full_backward_hook(capturing(calls))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        module(torch.ones(1)).sum().backward()

    assert calls == [(module, (None,), (torch.ones(1),))]


@pytest.mark.parametrize(("registrar", "count"), [(FULL[0], 1), (FULL[1], 0)])
def test_hook_waits_for_the_gradients_of_the_inputs(
    impl: Implementation, registrar: str, count: int
) -> None:
    """The page ties a hook to the outputs' gradients alone.

    In torch 2.13 a full hook runs when those of the inputs are computed, if any input requires
    grad; a pre-hook runs when those of the outputs are.
    """
    calls: list[tuple[object, ...]] = []
    module = scaling(impl)
    getattr(module, registrar)(capturing(calls))
    torch.autograd.grad(module(requiring(1.0)).sum(), module.factor)

    assert len(calls) == count


def test_hook_gets_gradients_of_inputs_and_outputs(impl: Implementation) -> None:
    """A full hook gets (module, grad_input, grad_output), both tuples of gradients."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda a, b: (a * 2, b * 3))
    module.register_full_backward_hook(capturing(calls))
    first, second = module(requiring(1.0), requiring(1.0))
    (first * 5 + second * 7).sum().backward()

    assert calls == [
        (
            module,
            (torch.tensor([10.0]), torch.tensor([21.0])),
            (torch.tensor([5.0]), torch.tensor([7.0])),
        )
    ]
    assert [type(part) for part in calls[0][1:]] == [tuple, tuple]


def test_pre_hook_gets_gradients_of_outputs(impl: Implementation) -> None:
    """A full pre-hook gets (module, grad_output), a tuple of gradients."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda a, b: (a * 2, b * 3))
    module.register_full_backward_pre_hook(capturing(calls))
    first, second = module(requiring(1.0), requiring(1.0))
    (first * 5 + second * 7).sum().backward()

    assert calls == [(module, (torch.tensor([5.0]), torch.tensor([7.0])))]
    assert type(calls[0][1]) is tuple


def test_pre_hook_runs_before_the_hook(impl: Implementation) -> None:
    """Backward pre-hooks run before the module's gradients, backward hooks after them."""
    log: list[str] = []
    module = scaling(impl)
    module.factor.register_hook(lambda _: log.append("gradient"))
    module.register_full_backward_hook(lambda *_: log.append("hook"))
    module.register_full_backward_pre_hook(lambda *_: log.append("pre-hook"))
    module(requiring(1.0)).sum().backward()

    assert log[0] == "pre-hook"
    assert sorted(log[1:]) == ["gradient", "hook"]


def test_hook_replaces_the_gradient_of_the_input(impl: Implementation) -> None:
    """A tuple from a full hook is used in place of grad_input from there on."""
    module = scaling(impl)
    module.register_full_backward_hook(lambda _, grad_input, __: (grad_input[0] + 100,))
    x = torch.ones(1, requires_grad=True)
    module(x * 3).sum().backward()

    assert x.grad.item() == (2 + 100) * 3
    assert module.factor.grad.item() == 3.0


def test_pre_hook_replaces_the_gradient_of_the_output(impl: Implementation) -> None:
    """A tuple from a full pre-hook is used in place of grad_output from there on."""
    module = scaling(impl)
    module.register_full_backward_pre_hook(lambda _, grad_output: (grad_output[0] + 9,))
    x = torch.ones(1, requires_grad=True)
    module(x * 3).sum().backward()

    assert x.grad.item() == (1 + 9) * 2 * 3
    assert module.factor.grad.item() == (1 + 9) * 3


@BOTH
def test_hook_that_returns_none_changes_no_gradient(impl: Implementation, registrar: str) -> None:
    """None leaves the gradients as they are."""
    module = scaling(impl)
    getattr(module, registrar)(lambda *_: None)
    x = torch.ones(1, requires_grad=True)
    module(x * 3).sum().backward()

    assert (x.grad.item(), module.factor.grad.item()) == (6.0, 3.0)


@BOTH
@pytest.mark.parametrize("value", [(), (None, None, None), 5], ids=repr)
def test_hook_must_return_as_many_gradients(registrar: str, value: object) -> None:
    """Return values that do not fit the gradients have the same outcome on both."""

    def scenario(impl: Implementation) -> object:
        module = scaling(impl)
        getattr(module, registrar)(lambda *_: value)
        x = torch.ones(1, requires_grad=True)
        module(x * 3).sum().backward()
        return x.grad

    assert same(scenario)[0] == "raised"


def test_gradients_of_keyword_arguments_are_left_out(impl: Implementation) -> None:
    """grad_input has entries for positional arguments only."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda a, *, b: a * b)
    module.register_full_backward_hook(capturing(calls))
    module(requiring(3.0), b=requiring(5.0)).sum().backward()

    assert calls == [(module, (torch.tensor([5.0]),), (torch.tensor([1.0]),))]


def test_other_arguments_have_no_gradient(impl: Implementation) -> None:
    """Entries for arguments and outputs that are not tensors are None."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda a, number, text: (number, a * 2, text))
    module.register_full_backward_hook(capturing(calls))
    module.register_full_backward_pre_hook(capturing(calls))
    module(requiring(1.0), 5, "text")[1].sum().backward()
    one, two = torch.tensor([1.0]), torch.tensor([2.0])

    assert calls == [
        (module, (None, one, None)),
        (module, (two, None, None), (None, one, None)),
    ]


@BOTH
def test_forward_receives_views(impl: Implementation, registrar: str) -> None:
    """With such a hook, forward gets a view of each tensor that is passed to the module."""
    received: list[torch.Tensor] = []

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        received.extend([a, b])
        return a + b

    module = applying(impl, forward)
    first, second = requiring(1.0), requiring(2.0)
    module(first, second)

    assert received[0] is first
    assert received[1] is second

    received.clear()
    getattr(module, registrar)(lambda *_: None)
    module(first, second)

    assert all(tensor._is_view() for tensor in received)
    assert received[0] is not first
    assert received[1] is not second
    assert [t.data_ptr() for t in received] == [first.data_ptr(), second.data_ptr()]


@BOTH
def test_caller_receives_views(impl: Implementation, registrar: str) -> None:
    """With such a hook, the caller gets a view of each tensor that forward returns."""
    returned: list[torch.Tensor] = []

    def forward(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned[:] = [a * 2, a * 3]
        return tuple(returned)

    module = applying(impl, forward)
    getattr(module, registrar)(lambda *_: None)
    outputs = module(requiring(1.0))

    assert all(output._is_view() for output in outputs)
    assert all(mine is not theirs for mine, theirs in zip(outputs, returned, strict=True))
    assert [t.data_ptr() for t in outputs] == [t.data_ptr() for t in returned]


@BOTH
def test_inputs_cannot_be_modified_in_place(registrar: str) -> None:
    """Modifying an input in place inside forward is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        module = applying(impl, lambda a: a.add_(1))
        getattr(module, registrar)(lambda *_: None)
        return module(requiring(1.0))

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "modified inplace" in text


@BOTH
def test_outputs_cannot_be_modified_in_place(registrar: str) -> None:
    """Modifying an output in place after the call is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        module = scaling(impl)
        getattr(module, registrar)(lambda *_: None)
        return module(requiring(1.0)).add_(1)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "modified inplace" in text


@BOTH
def test_hooks_pass_their_gradients_on(impl: Implementation, registrar: str) -> None:
    """Each hook gets the gradient as replaced by those before it."""
    seen: list[float] = []
    module = scaling(impl)

    def doubling(_module: object, gradients: tuple[torch.Tensor], *_: object) -> object:
        seen.append(gradients[0].item())
        return (gradients[0] * 2,)

    for _ in range(3):
        getattr(module, registrar)(doubling)
    x = torch.ones(1, requires_grad=True)
    module(x * 1).sum().backward()

    assert x.grad.item() == 2 * 2**3
    assert [later / earlier for earlier, later in itertools.pairwise(seen)] == [2.0, 2.0]


def test_hooks_compute_the_same_gradients() -> None:
    """With hooks on every module of a tree, all gradients are bitwise identical on both."""

    def scenario(impl: Implementation) -> object:
        model = network(impl)
        seen: list[object] = []
        for module in model.modules():
            module.register_full_backward_hook(lambda _, *grads: seen.append(grads))
            module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,))
        x = torch.randn(4, 3, requires_grad=True)
        model(x).square().sum().backward()
        return seen, x.grad, [p.grad for p in model.parameters()]

    assert same(scenario)[0] == "returned"


def test_deprecated_hook_gets_gradients_of_the_last_node(impl: Implementation) -> None:
    """`register_backward_hook` calls the hook with the gradients of the last operation."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, torch.square)
    module.register_backward_hook(capturing(calls))
    module(requiring(1.0)).sum().backward()

    assert calls == [(module, (torch.tensor([2.0]),), (torch.tensor([1.0]),))]


def test_deprecated_hook_warns_where_its_gradients_are_wrong(impl: Implementation) -> None:
    """The deprecated hook warns if forward has several operations, and names its successor."""
    module = applying(impl, lambda a: a * 2 + 1)
    module.register_backward_hook(lambda *_: None)

    with pytest.warns(FutureWarning, match="use register_full_backward_hook"):
        module(requiring(1.0))
