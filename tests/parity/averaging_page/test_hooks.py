import warnings

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.parity.averaging_page.nets import averaged_of, build, every_subject, inputs


def evaluated(impl: Implementation, subject: str):
    """Return an average in evaluation mode, and what it computes."""
    _, averaged = averaged_of(impl, subject)
    averaged.eval()
    return averaged, averaged(inputs()).detach()


def differentiable() -> torch.Tensor:
    """Return a batch that requires grad."""
    return inputs().requires_grad_()


# --- forward hooks ---------------------------------------------------------------------------------


@every_subject
def test_a_forward_hook_is_called_after_forward(impl: Implementation, subject: str) -> None:
    """It gets the averaged model, the positional arguments and the output, which it may modify."""
    averaged, output = evaluated(impl, subject)
    calls = []

    def hook(module, args, result):
        calls.append((module, len(args), torch.equal(result, output)))
        return result + 1

    averaged.register_forward_hook(hook)

    assert torch.equal(averaged(inputs()), output + 1)
    assert calls == [(averaged, 1, True)]


@every_subject
def test_a_forward_pre_hook_is_called_before_forward(impl: Implementation, subject: str) -> None:
    """It may return a modified input, a single value or a tuple."""
    averaged, output = evaluated(impl, subject)
    averaged.register_forward_pre_hook(lambda module, args: args[0] * 2)
    averaged.register_forward_pre_hook(lambda module, args: (args[0] / 2,))

    assert torch.equal(averaged(inputs()), output)


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hooks_get_keyword_arguments_on_request(impl: Implementation, with_kwargs: bool) -> None:
    """Only with with_kwargs=True are keyword arguments passed to the hooks; forward gets them always."""

    class Echo(impl.nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    averaged = impl.AveragedModel(Echo())
    calls = []
    averaged.register_forward_pre_hook(lambda *a: calls.append(a[1:]), with_kwargs=with_kwargs)
    averaged.register_forward_hook(lambda *a: calls.append(a[1:]), with_kwargs=with_kwargs)
    output = averaged(1, two=2)
    more = ({"two": 2},) if with_kwargs else ()

    assert output == ((1,), {"two": 2})
    assert calls == [((1,), *more), ((1,), *more, output)]


def test_a_pre_hook_with_kwargs_returns_both(impl: Implementation) -> None:
    """If it modifies the input, it returns the arguments and the keyword arguments."""

    class Echo(impl.nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    averaged = impl.AveragedModel(Echo())
    averaged.register_forward_pre_hook(lambda m, args, kwargs: ((7,), {"x": 8}), with_kwargs=True)

    assert averaged(1, two=2) == ((7,), {"x": 8})


@pytest.mark.parametrize("registrar", ["register_forward_hook", "register_forward_pre_hook"])
def test_prepended_hooks_are_fired_first(impl: Implementation, registrar: str) -> None:
    """prepend=True fires a hook before the existing ones, and after global ones."""
    averaged, _ = evaluated(impl, "layer")
    order = []

    def noting(note):
        return lambda module, *_: order.append(note) if module is averaged else None

    glob = getattr(impl, registrar.replace("register_", "register_module_"))(noting("global"))
    getattr(averaged, registrar)(noting("second"))
    getattr(averaged, registrar)(noting("first"), prepend=True)
    averaged(inputs())
    glob.remove()

    assert order == ["global", "first", "second"]


@pytest.mark.parametrize("always_call", [False, True])
def test_always_called_hooks_run_after_an_error(impl: Implementation, always_call: bool) -> None:
    """A forward hook with always_call=True runs if the call raises, others do not."""
    averaged, _ = evaluated(impl, "layer")
    calls = []
    averaged.register_forward_hook(lambda *_: calls.append(1), always_call=always_call)
    with pytest.raises(RuntimeError):
        averaged(torch.ones(2, 99))

    assert calls == [1] * always_call


@every_subject
def test_updates_call_no_hook(impl: Implementation, subject: str) -> None:
    """`update_parameters` is not a call: hooks of the average and the model do not run."""
    model, averaged = averaged_of(impl, subject)
    calls = []
    for module in model, averaged, averaged.module:
        module.register_forward_hook(lambda *_: calls.append("forward"))
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
        module.register_state_dict_pre_hook(lambda *_: calls.append("state"))
    averaged.update_parameters(model)

    assert calls == []
    assert averaged.n_averaged == 3


# --- backward hooks --------------------------------------------------------------------------------

FULL = ["register_full_backward_pre_hook", "register_full_backward_hook"]


@every_subject
def test_a_full_backward_hook_sees_the_gradients(subject: str) -> None:
    """It gets the averaged model, and the gradients with respect to inputs and outputs."""

    def scenario(impl: Implementation) -> object:
        _, averaged = averaged_of(impl, subject)
        seen = []
        averaged.register_full_backward_hook(
            lambda module, *gradients: seen.append((module is averaged, *gradients))
        )
        x = differentiable()
        averaged(x).square().sum().backward()
        return seen, x.grad

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1][0][1]) == 1


@every_subject
def test_a_full_backward_hook_replaces_the_input_gradient(
    impl: Implementation, subject: str
) -> None:
    """The returned value replaces grad_input."""
    _, averaged = averaged_of(impl, subject)
    averaged.register_full_backward_hook(lambda m, grad_in, grad_out: (torch.ones(5, 3) * 7,))
    x = differentiable()
    averaged(x).sum().backward()

    assert torch.equal(x.grad, torch.ones(5, 3) * 7)


@every_subject
def test_a_full_backward_pre_hook_replaces_the_output_gradient(
    impl: Implementation, subject: str
) -> None:
    """The returned value replaces grad_output: zeros leave all gradients zero."""
    _, averaged = averaged_of(impl, subject)
    averaged.register_full_backward_pre_hook(lambda m, grad_out: (torch.zeros_like(grad_out[0]),))
    x = differentiable()
    averaged(x).sum().backward()

    assert not x.grad.any()
    assert not any(p.grad.any() for p in averaged.parameters())


@for_each("grad", [False, True], ids=["inputs without grad", "inputs with grad"])
@for_each("frozen", [False, True], ids=["trainable", "frozen"])
def test_when_a_full_backward_hook_fires(impl: Implementation, grad: bool, frozen: bool) -> None:
    """Rules 1 to 3: with the input gradients, else with the output gradients, else not at all."""
    _, averaged = averaged_of(impl, "layer")
    averaged.requires_grad_(not frozen)
    seen = []
    averaged.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_in))
    x = inputs().requires_grad_(grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The sum with a number that requires grad can be differentiated in any case.
        (averaged(x).sum() + torch.zeros((), requires_grad=True)).backward()
    texts = [str(warning.message) for warning in caught]

    assert len(seen) == (grad or not frozen)
    assert len(texts) == (not grad and not frozen)
    assert all(text.startswith("Full backward hook is firing when") for text in texts)
    assert all((grad_in[0] is not None) is grad for grad_in in seen)


def test_modifying_the_output_in_place_is_an_error() -> None:
    """Where there are backward hooks, writing to the output raises torch's error."""

    def scenario(impl: Implementation) -> object:
        _, averaged = averaged_of(impl, "layer")
        averaged.register_full_backward_hook(lambda *_: None)
        averaged(differentiable()).add_(1)

    assert same(scenario)[:2] == ("raised", "RuntimeError")


@pytest.mark.parametrize("registrar", FULL)
def test_prepended_backward_hooks_are_fired_first(impl: Implementation, registrar: str) -> None:
    """prepend=True fires the hook before the existing ones."""
    _, averaged = averaged_of(impl, "sequential")
    order = []
    for note, prepend in ("second", False), ("third", False), ("first", True):
        getattr(averaged, registrar)(lambda *_, n=note: order.append(n), prepend=prepend)
    averaged(differentiable()).sum().backward()

    assert order == ["first", "second", "third"]


@every_subject
def test_deprecated_backward_hooks_do_what_torch_does(subject: str) -> None:
    """`register_backward_hook` gets the gradients of the last operation, with torch's warning."""

    def scenario(impl: Implementation) -> object:
        _, averaged = averaged_of(impl, subject)
        seen = []
        averaged.register_backward_hook(lambda module, *gradients: seen.append(gradients))
        with pytest.warns(FutureWarning) as caught:
            averaged(differentiable()).sum().backward()
        return seen, [str(warning.message) for warning in caught]

    assert same(scenario)[0] == "returned"


REGISTRARS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_backward_hook",
    *FULL,
]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@for_each("registrar", REGISTRARS)
def test_registration_returns_a_handle(impl: Implementation, registrar: str) -> None:
    """`handle.remove()` removes the hook."""
    _, averaged = averaged_of(impl, "layer")
    calls = []

    def hook(*arguments):
        calls.append(arguments[0])

    handle = getattr(averaged, registrar)(hook)
    averaged(differentiable()).sum().backward()
    handle.remove()
    averaged(differentiable()).sum().backward()

    assert isinstance(handle, RemovableHandle)
    assert calls == [averaged]


# --- compile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["user", "sequential", "layer"])
def test_compile_compiles_the_average(impl: Implementation, subject: str) -> None:
    """After `compile` a call runs a compiled graph, which later updates reach."""
    torch._dynamo.reset()
    graphs = []
    model, averaged = averaged_of(impl, subject, 3)
    averaged.eval()
    averaged.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    first = averaged(inputs())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    averaged.update_parameters(model)
    second = averaged(inputs())
    torch._dynamo.reset()

    assert len(graphs) == 1
    assert not torch.equal(first, second)
    assert torch.equal(second, averaged.module(inputs()))


def test_arguments_of_compile_go_to_torch_compile(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arguments are passed as they are, with the call of the averaged model."""
    received = []

    def compiler(function, *args, **kwargs):
        received.append((function.__self__, args, kwargs))
        return lambda *values: ("compiled", values)

    monkeypatch.setattr(torch, "compile", compiler)
    averaged = impl.AveragedModel(build(impl, "layer"))

    assert averaged.compile("positional", mode="default") is None
    assert received == [(averaged, ("positional",), {"mode": "default"})]
    assert averaged(1, 2) == ("compiled", (1, 2))


@every_subject
def test_calls_leave_the_average(impl: Implementation, subject: str) -> None:
    """In evaluation mode a call changes neither the averages nor the count."""
    averaged, output = evaluated(impl, subject)
    before = freeze(averaged)

    assert torch.equal(averaged(inputs()), output)
    assert freeze(averaged) == before
