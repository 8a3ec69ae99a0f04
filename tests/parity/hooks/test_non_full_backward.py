import gc

import pytest

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import capturing, inner_tensor, leaf, noting, returning


def warnings_of(impl: Implementation, forward, *args) -> tuple[list[str], list[str]]:
    """Call a module with a non-full backward hook; tell the categories and texts of its warnings."""
    module = function_module(impl, forward)
    module.register_backward_hook(returning(None))
    with pytest.warns(FutureWarning, match="non-full backward hook") as caught:
        module(*args)
    return [w.category.__name__ for w in caught], [str(w.message) for w in caught]


def test_non_full_hook_gets_the_gradients_of_the_last_node(impl: Implementation) -> None:
    """A non-full hook is called with (module, grad_input, grad_output) of one node (rule 30)."""
    received: list[tuple[object, ...]] = []
    module = function_module(impl, lambda a: a.square())
    module.register_backward_hook(lambda *arguments: received.append(arguments))
    module(inner_tensor(2.0)).sum().backward()
    owner, grad_input, grad_output = received[0]

    assert len(received) == 1
    assert owner is module
    assert [g.item() for g in grad_input] == [4.0]
    assert [g.item() for g in grad_output] == [1.0]


def test_value_of_a_non_full_hook_replaces_the_gradients_of_the_node(impl: Implementation) -> None:
    """A non-full hook may return the new grad_input of its node (rule 30)."""
    module = function_module(impl, lambda a: a.view(-1))
    module.register_backward_hook(lambda _, grad_input, grad_output: (grad_input[0] * 5,))
    x = leaf(2.0)
    module(x * 1).sum().backward()

    assert x.grad.item() == 5.0


def test_non_full_hooks_run_in_table_order_global_first(impl: Implementation) -> None:
    """Global non-full hooks run before the module's (rules 9 and 30)."""
    log: list[str] = []
    module = function_module(impl, lambda a: a.view(-1))
    module.register_backward_hook(noting(log, "module 1"))
    module.register_backward_hook(noting(log, "module 2"))
    impl.register_module_backward_hook(noting(log, "global"))
    module(inner_tensor()).sum().backward()

    assert log == ["global", "module 1", "module 2"]


def test_non_full_hook_of_a_dead_module_raises() -> None:
    """The node holds the module weakly: a hook whose module is gone raises (rule 30)."""

    def scenario(impl: Implementation) -> None:
        module = function_module(impl, lambda a: a.view(-1))
        module.register_backward_hook(returning(None))
        output = module(inner_tensor()).sum()
        del module
        gc.collect()
        output.backward()

    assert same(scenario) == (
        "raised",
        "RuntimeError",
        "You are trying to call the hook of a dead Module!",
    )


def test_non_full_hook_of_a_module_that_is_still_held_runs(impl: Implementation) -> None:
    """Removing the handle after forward changes nothing for that graph (rules 28 and 30)."""
    seen: list[object] = []
    module = function_module(impl, lambda a: a.view(-1))
    handle = module.register_backward_hook(capturing(seen))
    output = module(inner_tensor()).sum()
    handle.remove()
    output.backward()

    assert len(seen) == 1


@pytest.mark.parametrize(
    "pack",
    [lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: [[[a], b]]],
    ids=["tuple", "list", "nested"],
)
def test_non_full_hook_goes_to_the_first_tensor_of_a_sequence(impl, pack) -> None:
    """Item 0, and item 0 of that, until a tensor is found: its node gets the hook (rule 17)."""
    seen: list[tuple[object, ...]] = []
    x = inner_tensor()
    first, second = x * 2, x * 3
    module = function_module(impl, lambda a: pack(first, second))
    module.register_backward_hook(capturing(seen))
    with pytest.warns(FutureWarning, match="missing some of the grad_output|different autograd"):
        module(x)
    (first + second).sum().backward()

    assert [grad_input[0].item() for grad_input, _ in seen] == [2.0]


def test_non_full_hook_goes_to_the_first_tensor_value_of_a_dict(impl: Implementation) -> None:
    """The first tensor among the values of a dict gets the hook (rule 17)."""
    seen: list[tuple[object, ...]] = []
    module = function_module(impl, lambda a: {"n": 5, "x": a * 2, "y": a * 3})
    module.register_backward_hook(capturing(seen))
    with pytest.warns(FutureWarning, match="missing some of the grad_output"):
        result = module(inner_tensor())
    (result["x"] + result["y"]).sum().backward()

    assert [grad_input[0].item() for grad_input, _ in seen] == [2.0]


def test_non_full_hook_is_not_attached_without_a_graph(impl: Implementation) -> None:
    """An output that has no node gets no hook, and no warning (rule 17)."""
    log: list[str] = []
    module = function_module(impl, lambda a: {"x": a})
    module.register_backward_hook(noting(log, "fired"))
    x = leaf()
    result = module(x)["x"]
    result.sum().backward()

    assert result is x
    assert log == []


def test_non_full_hooks_see_the_output_that_forward_hooks_made(impl: Implementation) -> None:
    """The node is taken from the output after the forward hooks (rule 17)."""
    seen: list[tuple[object, ...]] = []
    module = function_module(impl, lambda a: a.view(-1))
    module.register_backward_hook(capturing(seen))
    module.register_forward_hook(lambda _, args, out: args[0].square())
    module(inner_tensor(3.0)).sum().backward()

    assert [grad_input[0].item() for grad_input, _ in seen] == [6.0]


@for_each(
    ("forward", "text"),
    [
        (lambda a: [a * 2], "does not return a single Tensor or a tuple of Tensors"),
        (lambda a: (a * 2, "text"), "does not return a single Tensor or a tuple of Tensors"),
        (lambda a: (a * 2, a * 3), "outputs are generated by different autograd Nodes"),
        (lambda a: a * 2 + 1, "forward contains multiple autograd Nodes"),
    ],
    ids=["list", "mixed tuple", "two nodes", "two steps"],
)
def test_outputs_that_make_a_non_full_hook_incomplete_warn(impl, forward, text) -> None:
    """A structure whose gradients the hook cannot see gives one FutureWarning (rule 17)."""
    categories, texts = warnings_of(impl, forward, inner_tensor())

    assert categories == ["FutureWarning"]
    assert text in texts[0]


def test_inputs_that_make_a_non_full_hook_incomplete_warn(impl: Implementation) -> None:
    """An arg that is not a tensor gives a FutureWarning about grad_input (rule 17)."""
    categories, texts = warnings_of(impl, lambda a, n: a * n, inner_tensor(), 2)

    assert categories == ["FutureWarning"]
    assert "does not take as input a single Tensor or a tuple of Tensors" in texts[0]


def test_warnings_about_non_full_hooks_have_the_same_text() -> None:
    """Each of the warnings says the same on both implementations (rule 17)."""
    cases = [
        (lambda a: [a * 2], (inner_tensor(),)),
        (lambda a: (a * 2, a * 3), (inner_tensor(),)),
        (lambda a: a * 2 + 1, (inner_tensor(),)),
        (lambda a, n: a * n, (inner_tensor(), 2)),
    ]

    kind, value = same(lambda impl: [warnings_of(impl, forward, *args) for forward, args in cases])

    assert kind == "returned"
    assert len(value[1]) == len(cases)


@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "tuples"])
def test_complete_non_full_hook_does_not_warn(impl: Implementation, packed: bool) -> None:
    """One node between tensors, plain or in tuples, does not warn (rule 17)."""
    x = inner_tensor()
    y = x.exp()
    arguments = ((x,), (y,)) if packed else (x, y)

    assert impl.Module()._maybe_warn_non_full_backward_hook(*arguments, y.grad_fn) is None


@for_each(
    "case",
    [
        lambda x, y: (x, [y], y.grad_fn),
        lambda x, y: ([x], y, y.grad_fn),
        lambda x, y: (x, (y, x * 2), y.grad_fn),
        lambda x, y: (x, y, x.grad_fn),
        lambda x, y: (x, (y.detach(),), y.grad_fn),
        lambda x, y: (y, y, y.grad_fn),
    ],
    ids=["list out", "list in", "two nodes", "other node", "no node", "longer way"],
)
def test_incomplete_non_full_hook_warns(case) -> None:
    """Asked directly, the method gives torch's FutureWarning for each incomplete case (rule 17)."""

    def scenario(impl: Implementation) -> list[str]:
        x = inner_tensor()
        with pytest.warns(FutureWarning, match="non-full backward hook") as caught:
            impl.Module()._maybe_warn_non_full_backward_hook(*case(x, x.exp()))
        return [str(warning.message) for warning in caught]

    kind, value = same(scenario)

    assert kind == "returned"
    assert len(value[1]) == 1


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
@for_each("registrar", ["register_full_backward_hook", "register_backward_hook"])
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
    used = {
        "_get_backward_hooks": True,
        "_get_backward_pre_hooks": True,
        "_maybe_warn_non_full_backward_hook": registrar == "register_backward_hook",
        "_slow_forward": False,
        "_call_impl": True,
    }

    assert log.count(method) == used[method]
    assert sorted(entry for entry in log if entry != method) == ["hook", "pre"]
