import pytest
import torch

from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import capturing, leaf, noting, returning


def values(gradients: tuple[torch.Tensor | None, ...]) -> list[object]:
    """Turn a tuple of gradients into plain numbers, None where there is none."""
    return [None if g is None else g.tolist() for g in gradients]


def test_pre_hooks_come_before_the_parameters_gradients_and_full_hooks_after(
    impl: Implementation,
) -> None:
    """Backward runs pre-hooks, then computes the module's gradients, then full hooks (rule 23)."""
    log: list[tuple[str, bool]] = []
    module = impl.own.Linear(2, 1)

    def note(name: str):
        return lambda module, *_: log.append((name, module.weight.grad is not None))

    module.register_full_backward_hook(note("full"))
    module.register_full_backward_pre_hook(note("pre"))
    impl.register_module_full_backward_hook(note("global full"))
    impl.register_module_full_backward_pre_hook(note("global pre"))
    module(leaf(1.0, 2.0)).sum().backward()

    assert log == [("global pre", False), ("pre", False), ("global full", True), ("full", True)]


def test_full_hooks_of_a_network_run_from_the_output_to_the_input(impl: Implementation) -> None:
    """The last layer's hooks fire first, each layer's pre-hook before its full hook (rule 23)."""
    log: list[str] = []
    network = impl.own.Sequential(impl.own.Tanh(), impl.own.Sigmoid())
    for name, module in network.named_modules():
        module.register_full_backward_pre_hook(noting(log, f"pre {name or 'network'}"))
        module.register_full_backward_hook(noting(log, f"full {name or 'network'}"))
    network(leaf()).sum().backward()

    assert log == ["pre network", "pre 1", "full 1", "pre 0", "full 0", "full network"]


def test_pre_hook_gets_the_gradients_of_the_outputs(impl: Implementation) -> None:
    """A pre-hook is called with (module, grad_output), a tuple (rule 24)."""
    received: list[tuple[object, ...]] = []
    module = function_module(impl, lambda a: (a * 2, "text", a * 3))
    module.register_full_backward_pre_hook(lambda *arguments: received.append(arguments))
    first, _, second = module(leaf())
    (first * 10 + second * 20).sum().backward()

    assert len(received) == 1
    assert received[0][0] is module
    assert type(received[0][1]) is tuple
    assert values(received[0][1]) == [[10.0], None, [20.0]]


def test_value_of_a_pre_hook_replaces_the_gradients_of_the_outputs(impl: Implementation) -> None:
    """A pre-hook's tuple is what autograd, later pre-hooks and full hooks see (rule 24)."""
    seen: list[object] = []
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_pre_hook(lambda _, grad_output: (grad_output[0] * 3,))
    module.register_full_backward_pre_hook(returning(None))
    module.register_full_backward_pre_hook(lambda _, grad_output: (grad_output[0] + 1,))
    module.register_full_backward_pre_hook(capturing(seen))
    module.register_full_backward_hook(capturing(seen))
    x = leaf()
    module(x).sum().backward()

    assert x.grad.item() == 8.0
    assert [values(arguments[-1]) for arguments in seen] == [[[4.0]], [[4.0]]]


@pytest.mark.parametrize("length", [0, 2, 3])
def test_pre_hook_that_returns_another_number_of_gradients_is_an_error(length: int) -> None:
    """A pre-hook's tuple must have one item per output (rule 24)."""

    def scenario(impl: Implementation) -> None:
        module = function_module(impl, lambda a: a * 2)
        module.register_full_backward_pre_hook(lambda _, grad_output: grad_output * length)
        module(leaf()).sum().backward()

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert text.endswith(f"invalid number of grad_output, got {length}, but expected 1")


def test_full_hook_gets_the_gradients_of_inputs_and_outputs(impl: Implementation) -> None:
    """A full hook is called with (module, grad_input, grad_output), both tuples (rule 25)."""
    received: list[tuple[object, ...]] = []
    module = function_module(impl, lambda a, b: a * b)
    module.register_full_backward_hook(lambda *arguments: received.append(arguments))
    (module(leaf(2.0), leaf(3.0)) * 10).sum().backward()
    owner, grad_input, grad_output = received[0]

    assert len(received) == 1
    assert owner is module
    assert (type(grad_input), type(grad_output)) == (tuple, tuple)
    assert (values(grad_input), values(grad_output)) == ([[30.0], [20.0]], [[10.0]])


@pytest.mark.parametrize("container", [tuple, list])
def test_value_of_a_full_hook_replaces_the_gradients_of_the_inputs(
    impl: Implementation, container: type
) -> None:
    """Full hooks chain: each sees the grad_input the ones before it left (rule 25)."""
    seen: list[object] = []
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_hook(lambda _, gi, go: container([gi[0] * 3]))
    module.register_full_backward_hook(returning(None))
    module.register_full_backward_hook(lambda _, gi, go: container([gi[0] + 1]))
    module.register_full_backward_hook(capturing(seen))
    x = leaf()
    module(x).sum().backward()

    assert x.grad.item() == 7.0
    assert [values(grad_input) for grad_input, _ in seen] == [[[7.0]]]


def test_full_hook_does_not_change_the_gradients_of_parameters(impl: Implementation) -> None:
    """Only what flows on to the inputs is replaced; parameters keep their gradients (rule 25)."""
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_hook(lambda _, gi, go: (gi[0] * 0,))
    x = leaf(3.0)
    module(x).sum().backward()

    assert x.grad.item() == 0.0
    assert module.weight.grad.item() == 3.0


def test_full_hook_may_stop_a_gradient_with_none(impl: Implementation) -> None:
    """None in the returned tuple means that no gradient flows to that input (rule 25)."""
    module = function_module(impl, lambda a, b: a * b)
    module.register_full_backward_hook(lambda _, gi, go: (None, gi[1]))
    x, y = leaf(2.0), leaf(3.0)
    module(x, y).sum().backward()

    assert x.grad is None
    assert y.grad.item() == 2.0


@pytest.mark.parametrize("length", [0, 2, 3])
def test_full_hook_that_returns_another_number_of_gradients_is_an_error(length: int) -> None:
    """A full hook's tuple must have one item per positional arg (rule 25)."""

    def scenario(impl: Implementation) -> None:
        module = function_module(impl, lambda a: a * 2)
        module.register_full_backward_hook(lambda _, gi, go: gi * length)
        module(leaf()).sum().backward()

    assert same(scenario) == (
        "raised",
        "RuntimeError",
        f"Backward hook returned an invalid number of grad_input, got {length}, but expected 1",
    )


def test_slots_of_the_gradients(impl: Implementation) -> None:
    """Non-tensors and unused outputs are None, tensors without grad get zeros (rule 26)."""
    seen: list[object] = []
    module = function_module(impl, lambda a, n, b, c: (a * b, n, a + c))
    module.register_full_backward_hook(capturing(seen))
    module(leaf(2.0), 5, torch.tensor([3.0]), leaf(4.0))[0].sum().backward()
    grad_input, grad_output = seen[0]

    assert values(grad_input) == [[3.0], None, [0.0], [0.0]]
    assert values(grad_output) == [[1.0], None, None]


def test_keyword_args_have_no_slot(impl: Implementation) -> None:
    """Tensors given by keyword do not appear in grad_input (rule 26)."""
    seen: list[object] = []
    module = function_module(impl, lambda a, *, k: a * k)
    module.register_full_backward_hook(capturing(seen))
    key = leaf(3.0)
    module(leaf(2.0), k=key).sum().backward()

    assert values(seen[0][0]) == [[3.0]]
    assert key.grad.item() == 2.0


def test_output_that_is_used_twice_has_the_summed_gradient(impl: Implementation) -> None:
    """grad_output is the whole gradient of an output that several users share (rule 26)."""
    seen: list[object] = []
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_hook(capturing(seen))
    y = module(leaf())
    (y * 3 + y * 4).sum().backward()

    assert values(seen[0][1]) == [[7.0]]


def test_backward_hooks_are_those_of_the_forward_call(impl: Implementation) -> None:
    """Hooks removed or added between forward and backward do not matter to it (rule 28)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a * 2)
    handles = [
        module.register_full_backward_hook(noting(log, "full")),
        module.register_full_backward_pre_hook(noting(log, "pre")),
        impl.register_module_full_backward_hook(noting(log, "global full")),
        impl.register_module_full_backward_pre_hook(noting(log, "global pre")),
    ]
    y = module(leaf())
    for handle in handles:
        handle.remove()
    module.register_full_backward_hook(noting(log, "late"))
    y.sum().backward()

    assert log == ["global pre", "pre", "global full", "full"]


def test_hooks_fire_once_per_backward_pass(impl: Implementation) -> None:
    """Each pass over a retained graph calls the hooks again (rule 28)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module.register_full_backward_hook(noting(log, "full"))
    loss = module(leaf()).sum()
    loss.backward(retain_graph=True)
    loss.backward()

    assert log == ["pre", "full", "pre", "full"]


def test_outputs_taken_backward_one_by_one_fire_the_hooks_each_time(impl: Implementation) -> None:
    """With several outputs each pass fires the hooks, the other outputs' slots None (rule 28)."""
    seen: list[object] = []
    module = function_module(impl, lambda a: (a * 2, a * 3))
    module.register_full_backward_hook(capturing(seen))
    first, second = module(leaf())
    first.sum().backward(retain_graph=True)
    second.sum().backward()

    assert [values(grad_output) for _, grad_output in seen] == [[[1.0], None], [None, [1.0]]]


def test_hook_is_skipped_when_gradients_bypass_the_outputs(impl: Implementation) -> None:
    """In a double backward the inputs' gradients do not come through the outputs (rule 28)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a**3)
    module.register_full_backward_hook(noting(log, "full"))
    x = leaf(2.0)
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)

    assert gradient.item() == 12.0
    assert log == ["full"]

    log.clear()
    gradient.sum().backward()

    assert x.grad.item() == 12.0
    assert log == []


def test_hooks_fire_for_autograd_grad(impl: Implementation) -> None:
    """`torch.autograd.grad` with respect to an input fires the hooks like backward (rule 28)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module.register_full_backward_hook(noting(log, "full"))
    x = leaf()
    torch.autograd.grad(module(x).sum(), x)

    assert log == ["pre", "full"]


def test_exception_in_a_backward_hook_reaches_the_caller(impl: Implementation) -> None:
    """An error raised by a backward hook comes out of `backward()` (rule 25)."""

    def fails(*_: object) -> None:
        raise KeyError("from the hook")

    module = function_module(impl, lambda a: a * 2)
    module.register_full_backward_hook(fails)
    loss = module(leaf()).sum()

    with pytest.raises(KeyError, match="from the hook"):
        loss.backward()
