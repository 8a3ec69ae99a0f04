import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import capturing, leaf, noting, returning


FIRES_AT_THE_OUTPUTS = "Full backward hook is firing when gradients are computed with respect to"


def test_fires_when_the_gradients_of_the_inputs_are_there(impl: Implementation) -> None:
    """If an input requires grad, the hook fires after the parameters' gradients (rule 27)."""
    seen: list[object] = []
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_hook(
        lambda module, gi, go: seen.append((gi[0] is not None, module.weight.grad is not None))
    )
    module(leaf()).sum().backward()

    assert seen == [(True, True)]


def test_one_input_that_requires_grad_is_enough(impl: Implementation) -> None:
    """The ordinary rule holds as soon as any positional tensor requires grad (rule 27)."""
    seen: list[object] = []
    module = function_module(impl, lambda a, b: a + b)
    module.register_full_backward_hook(capturing(seen))
    module(torch.ones(1), leaf()).sum().backward()

    assert [[g is None for g in grad_input] for grad_input, _ in seen] == [[False, False]]


def test_fires_at_the_outputs_if_no_input_requires_grad(impl: Implementation) -> None:
    """Then the hook fires early, warns, and has None for every input (rule 27)."""
    seen: list[object] = []
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_hook(
        lambda module, gi, go: seen.append((gi, go[0].tolist(), module.weight.grad is None))
    )
    loss = module(torch.ones(1, 1)).sum()
    with pytest.warns(UserWarning, match=FIRES_AT_THE_OUTPUTS) as caught:
        loss.backward()

    assert len(caught) == 1
    assert seen == [((None,), [[1.0]], True)]


def test_inputs_given_by_keyword_make_the_hook_fire_at_the_outputs(impl: Implementation) -> None:
    """With keyword tensors only there is no positional input: grad_input is empty (rule 27)."""
    seen: list[object] = []
    module = impl.own.Linear(1, 1)
    module.register_full_backward_hook(lambda _, gi, go: seen.append(gi))
    loss = module(input=leaf().reshape(1, 1)).sum()
    with pytest.warns(UserWarning, match=FIRES_AT_THE_OUTPUTS):
        loss.backward()

    assert seen == [()]


def test_pre_hooks_run_before_a_hook_that_fires_at_the_outputs(impl: Implementation) -> None:
    """Pre-hooks run and may replace grad_output under the second rule too (rules 24 and 27)."""
    seen: list[object] = []
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,))
    module.register_full_backward_hook(lambda _, gi, go: seen.append(go[0].item()))
    loss = module(torch.ones(1, 1)).sum()
    with pytest.warns(UserWarning, match=FIRES_AT_THE_OUTPUTS):
        loss.backward()

    assert seen == [3.0]
    assert module.weight.grad.item() == 3.0


@for_each("value", [None, (None,), (), (None, None)], ids=repr)
def test_hook_that_fires_at_the_outputs_may_return_none(
    impl: Implementation, value: object
) -> None:
    """None, or a tuple of nothing but None, is allowed under the second rule (rule 27)."""
    module = impl.own.Linear(1, 1, bias=False)
    module.register_full_backward_hook(returning(value))
    loss = module(torch.ones(1, 1)).sum()
    with pytest.warns(UserWarning, match=FIRES_AT_THE_OUTPUTS):
        loss.backward()

    assert module.weight.grad.item() == 1.0


@pytest.mark.parametrize(
    "value", [(torch.ones(1, 1),), [None], torch.ones(1)], ids=["gradient", "list", "tensor"]
)
def test_hook_that_fires_at_the_outputs_may_not_return_gradients(value: object) -> None:
    """Anything else that is returned under the second rule is an error (rule 27)."""

    def scenario(impl: Implementation) -> None:
        module = impl.own.Linear(1, 1)
        module.register_full_backward_hook(returning(value))
        with pytest.warns(UserWarning, match=FIRES_AT_THE_OUTPUTS):
            module(torch.ones(1, 1)).sum().backward()

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert text.startswith("Backward hook for Modules where no input requires gradient should")


def test_does_not_fire_if_no_output_requires_grad(impl: Implementation) -> None:
    """Without a gradient for any output neither kind of hook fires (rule 27)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a.detach() * 2)
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module.register_full_backward_hook(noting(log, "full"))
    x = leaf()
    (module(x) + x).sum().backward()

    assert log == []
    assert x.grad.item() == 1.0


def test_does_not_fire_if_forward_ran_without_grad_mode(impl: Implementation) -> None:
    """A forward under no_grad leaves nothing to fire (rule 27)."""
    log: list[str] = []
    module = impl.own.Linear(1, 1)
    module.register_full_backward_pre_hook(noting(log, "pre"))
    module.register_full_backward_hook(noting(log, "full"))
    x = leaf()
    with torch.no_grad():
        y = module(x)
    (y * x).sum().backward()

    assert not y.requires_grad
    assert log == []


def test_does_not_fire_if_the_output_is_not_used(impl: Implementation) -> None:
    """A backward that does not pass the module's output fires nothing (rule 27)."""
    log: list[str] = []
    module = impl.own.Linear(1, 1)
    module.register_full_backward_hook(noting(log, "full"))
    x = leaf()
    module(x)
    (x * 2).sum().backward()

    assert log == []


def test_frozen_module_in_the_middle_still_fires(impl: Implementation) -> None:
    """Parameters without grad do not matter: the inputs' gradients fire the hook (rule 27)."""
    log: list[str] = []
    network = impl.own.Sequential(
        impl.own.Linear(1, 1), impl.own.Linear(1, 1).requires_grad_(False)
    )
    network[1].register_full_backward_hook(noting(log, "frozen"))
    network(torch.ones(1, 1)).sum().backward()

    assert log == ["frozen"]
