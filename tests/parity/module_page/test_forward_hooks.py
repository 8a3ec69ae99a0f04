import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import applying, network, scaling


def echo(*args: object, **kwargs: object) -> object:
    """Be a forward that returns what it gets."""
    return args, kwargs


def capturing(calls: list[tuple[object, ...]]):
    """Make a hook of any signature that notes its arguments."""

    def hook(*arguments: object) -> None:
        calls.append(arguments)

    return hook


def test_pre_hook_runs_before_every_forward(impl: Implementation) -> None:
    """A forward pre-hook is called each time, before forward."""
    log: list[str] = []
    module = applying(impl, lambda: log.append("forward"))
    module.register_forward_pre_hook(lambda *_: log.append("hook"))
    module()
    module()

    assert log == ["hook", "forward"] * 2


def test_forward_hook_runs_after_every_forward(impl: Implementation) -> None:
    """A forward hook is called each time, after forward."""
    log: list[str] = []
    module = applying(impl, lambda: log.append("forward"))
    module.register_forward_hook(lambda *_: log.append("hook"))
    module()
    module()

    assert log == ["forward", "hook"] * 2


def test_hooks_run_in_a_tree_of_layers(impl: Implementation) -> None:
    """Hooks on user classes, containers and layers run once each in a forward pass."""
    model = network(impl)
    entered: list[object] = []
    left: list[object] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: entered.append(m))
        module.register_forward_hook(lambda m, *_: left.append(m))
    model(torch.randn(4, 3))

    assert entered == list(model.modules())
    assert set(left) == set(entered)
    assert left[-1] is model


def test_pre_hook_gets_positional_arguments_only(impl: Implementation) -> None:
    """By default a pre-hook gets (module, args); the kwargs go to forward alone."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, echo)
    module.register_forward_pre_hook(capturing(calls))
    module.register_forward_pre_hook(capturing(calls), with_kwargs=False)

    assert module(1, 2, key=3) == ((1, 2), {"key": 3})
    assert calls == [(module, (1, 2))] * 2


def test_forward_hook_gets_positional_arguments_only(impl: Implementation) -> None:
    """By default a forward hook gets (module, args, output) without the kwargs."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, echo)
    module.register_forward_hook(capturing(calls))
    module.register_forward_hook(capturing(calls), with_kwargs=False)
    output = module(1, 2, key=3)

    assert output == ((1, 2), {"key": 3})
    assert calls == [(module, (1, 2), output)] * 2


def test_pre_hook_gets_keyword_arguments_on_request(impl: Implementation) -> None:
    """With with_kwargs=True a pre-hook gets (module, args, kwargs)."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, echo)
    module.register_forward_pre_hook(capturing(calls), with_kwargs=True)
    module(1, key=2)
    module(3)

    assert calls == [(module, (1,), {"key": 2}), (module, (3,), {})]


def test_forward_hook_gets_keyword_arguments_on_request(impl: Implementation) -> None:
    """With with_kwargs=True a forward hook gets (module, args, kwargs, output)."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, echo)
    module.register_forward_hook(capturing(calls), with_kwargs=True)
    output = module(1, key=2)

    assert calls == [(module, (1,), {"key": 2}, output)]


@for_each("value", [5, [6, 7], {"a": 1}, "text"], ids=repr)
def test_single_value_of_a_pre_hook_is_wrapped(impl: Implementation, value: object) -> None:
    """A single value that a pre-hook returns becomes the only positional argument."""
    module = applying(impl, echo)
    module.register_forward_pre_hook(lambda *_: value)

    assert module(1, 2, key=3) == ((value,), {"key": 3})


@pytest.mark.parametrize("value", [(), (5,), (5, 6, 7)], ids=repr)
def test_tuple_of_a_pre_hook_is_taken_as_it_is(impl: Implementation, value: object) -> None:
    """A tuple that a pre-hook returns replaces all positional arguments."""
    module = applying(impl, echo)
    module.register_forward_pre_hook(lambda *_: value)

    assert module(1, 2) == (value, {})


def test_pre_hook_that_returns_none_changes_nothing(impl: Implementation) -> None:
    """None from a pre-hook leaves the input, with and without kwargs."""
    module = applying(impl, echo)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)

    assert module(1, key=2) == ((1,), {"key": 2})


def test_pre_hook_modifies_args_and_kwargs(impl: Implementation) -> None:
    """A pre-hook with kwargs returns both the new args and the new kwargs."""
    module = applying(impl, echo)
    module.register_forward_pre_hook(
        lambda _, args, kwargs: ((*args, 9), {**kwargs, "extra": True}), with_kwargs=True
    )

    assert module(1, key=2) == ((1, 9), {"key": 2, "extra": True})


@for_each("value", [5, (1,), (1, 2, 3), [1, 2]], ids=repr)
def test_pre_hook_with_kwargs_must_return_both(value: object) -> None:
    """Anything but None or a pair of args and kwargs is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        module = applying(impl, echo)
        module.register_forward_pre_hook(lambda *_: value, with_kwargs=True)
        return module(1, key=2)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "must return None or a tuple of (new_args, new_kwargs)" in text


def test_pre_hooks_pass_their_changes_on(impl: Implementation) -> None:
    """Each pre-hook gets the input as modified by those before it."""
    module = applying(impl, echo)
    module.register_forward_pre_hook(lambda _, args: args[0] + 1)
    module.register_forward_pre_hook(lambda _, args: args[0] * 10)

    assert module(1) == ((20,), {})


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_forward_hook_modifies_the_output(impl: Implementation, with_kwargs: bool) -> None:
    """A forward hook's value replaces the output, for later hooks too; None leaves it."""
    module = scaling(impl)
    module.register_forward_hook(lambda *a: a[-1] + 1, with_kwargs=with_kwargs)
    module.register_forward_hook(lambda *_: None, with_kwargs=with_kwargs)
    module.register_forward_hook(lambda *a: a[-1] * 10, with_kwargs=with_kwargs)

    assert module(torch.ones(1)).item() == 30.0


def test_input_modified_after_forward_has_no_effect_on_it(impl: Implementation) -> None:
    """A forward hook may change the input in place; the output is already computed."""
    module = applying(impl, lambda x: x * 2)

    def clear(_module: object, args: tuple[torch.Tensor], _output: object) -> None:
        args[0].zero_()

    module.register_forward_hook(clear)
    x = torch.ones(1)
    output = module(x)

    assert x.item() == 0.0
    assert output.item() == 2.0


@for_each("with_kwargs", [False, True])
@for_each("source", ["pre-hook", "forward", "forward hook"])
def test_always_called_hook_runs_in_spite_of_an_exception(
    impl: Implementation, source: str, with_kwargs: bool
) -> None:
    """With always_call=True a hook runs although the call raises, and the exception goes on."""
    calls: list[tuple[object, ...]] = []

    def fails(*_: object, **__: object) -> None:
        raise ValueError(source)

    module = applying(impl, fails if source == "forward" else lambda *_, **__: "output")
    if source == "pre-hook":
        module.register_forward_pre_hook(fails)
    elif source == "forward hook":
        module.register_forward_hook(fails)
    module.register_forward_hook(capturing(calls), always_call=True, with_kwargs=with_kwargs)

    with pytest.raises(ValueError, match=source):
        module(1, key=2)
    kwargs = [{"key": 2}] if with_kwargs else []
    assert calls == [(module, (1,), *kwargs, "output" if source == "forward hook" else None)]


def test_always_called_hook_runs_once_without_an_exception(impl: Implementation) -> None:
    """With always_call=True a hook runs once in an ordinary call."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda x: x + 1)
    module.register_forward_hook(capturing(calls), always_call=True)

    assert module(1) == 2
    assert calls == [(module, (1,), 2)]


def test_hook_is_skipped_on_an_exception_by_default(impl: Implementation) -> None:
    """By default a forward hook does not run when forward, or a pre-hook, raises."""
    calls: list[tuple[object, ...]] = []
    module = applying(impl, lambda: 1 / 0)
    module.register_forward_hook(capturing(calls))
    module.register_forward_hook(capturing(calls), always_call=False)

    with pytest.raises(ZeroDivisionError):
        module()
    assert calls == []
