import collections
import dataclasses

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import function_module
from tests.parity.hooks.tools import WRAPPED, Pair, inner_tensor, leaf, node_name, noting, returning


FULL_KINDS = for_each(
    "registrar", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)


@FULL_KINDS
def test_tensor_args_reach_forward_as_views(impl: Implementation, registrar: str) -> None:
    """A full backward hook or pre-hook wraps the positional tensors in one node (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a, n, b: seen.extend([a, b]) or a + b)
    getattr(module, registrar)(returning(None))
    x, y = leaf(1.0, 2.0), torch.ones(2)
    module(x, "text", y)

    assert [node_name(tensor) for tensor in seen] == [WRAPPED, None]
    assert seen[0] is not x
    assert seen[0]._base is x
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], y)


@pytest.mark.parametrize(
    "global_registrar",
    ["register_module_full_backward_hook", "register_module_full_backward_pre_hook"],
)
def test_global_backward_hooks_wrap_the_args_of_every_module(
    impl: Implementation, global_registrar: str
) -> None:
    """A global full backward hook wraps the args of a module without hooks too (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a: seen.append(a) or a)
    with getattr(impl, global_registrar)(returning(None)):
        module(leaf())

    assert node_name(seen[0]) == WRAPPED


@FULL_KINDS
def test_keyword_tensors_are_never_wrapped(impl: Implementation, registrar: str) -> None:
    """Tensors given by keyword reach forward as they are (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a, *, k: seen.append(k) or a * k)
    getattr(module, registrar)(returning(None))
    key = leaf(3.0)
    module(leaf(), k=key)

    assert seen[0] is key


@FULL_KINDS
def test_args_without_grad_are_not_wrapped(impl: Implementation, registrar: str) -> None:
    """If no positional tensor requires grad, forward gets the tensors themselves (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a: seen.append(a) or a)
    getattr(module, registrar)(returning(None))
    x = torch.ones(1)
    result = module(x)

    assert seen[0] is x
    assert result is x


@FULL_KINDS
def test_nothing_is_wrapped_without_grad_mode(impl: Implementation, registrar: str) -> None:
    """Under no_grad forward gets the tensors themselves, and the caller the value (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a: seen.append(a) or a)
    getattr(module, registrar)(returning(None))
    x = leaf()
    with torch.no_grad():
        result = module(x)

    assert seen[0] is x
    assert result is x


def test_tensors_inside_containers_are_not_wrapped(impl: Implementation) -> None:
    """Only tensors that are themselves positional args are wrapped, not those in lists (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a, more: seen.append(more[0]) or a)
    module.register_full_backward_hook(returning(None))
    inner = leaf()
    module(leaf(), [inner])

    assert seen[0] is inner


def test_args_are_wrapped_after_the_pre_hooks(impl: Implementation) -> None:
    """Arguments that a pre-hook returns are the ones that are wrapped (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a: seen.append(a) or a)
    module.register_full_backward_hook(returning(None))
    replaced = leaf(5.0)
    nodes: list[str | None] = []
    module.register_forward_pre_hook(lambda _, args: nodes.append(node_name(args[0])) or replaced)
    module(torch.ones(1))

    assert nodes == [None]
    assert seen[0]._base is replaced


def test_non_full_hooks_wrap_nothing(impl: Implementation) -> None:
    """With only a non-full backward hook, args and output stay unwrapped (rule 12)."""
    seen: list[torch.Tensor] = []
    module = function_module(impl, lambda a: seen.append(a) or a.view(-1))
    module.register_backward_hook(returning(None))
    x = inner_tensor()

    assert node_name(module(x)) == "ViewBackward0"
    assert seen[0] is x


@FULL_KINDS
def test_tensor_output_is_wrapped_after_the_forward_hooks(
    impl: Implementation, registrar: str
) -> None:
    """Forward hooks see the plain output, the caller gets a view of it (rule 16)."""
    outputs: list[torch.Tensor] = []
    module = function_module(impl, lambda a: a * 2)
    getattr(module, registrar)(returning(None))
    module.register_forward_hook(lambda _, args, out: outputs.append(out))
    result = module(leaf())

    assert node_name(outputs[0]) == "MulBackward0"
    assert node_name(result) == WRAPPED
    assert result._base is outputs[0]


def test_output_that_a_forward_hook_replaced_is_the_one_wrapped(impl: Implementation) -> None:
    """The value of the last forward hook is wrapped for the caller (rule 16)."""
    module = impl.own.Identity()
    module.register_full_backward_hook(returning(None))
    replaced = leaf(2.0) * 3
    module.register_forward_hook(returning(replaced))

    assert module(leaf())._base is replaced


def test_tuple_output_is_wrapped_item_by_item(impl: Implementation) -> None:
    """The tensors of a tuple output share one node; other items stay (rule 16)."""
    module = function_module(impl, lambda a: (a * 2, "text", a * 3, None))
    module.register_full_backward_hook(returning(None))
    result = module(leaf())

    assert type(result) is tuple
    assert result[1::2] == ("text", None)
    assert [node_name(result[0]), node_name(result[2])] == [WRAPPED, WRAPPED]
    assert result[0].grad_fn is result[2].grad_fn


def test_one_tuple_output_stays_a_tuple(impl: Implementation) -> None:
    """A tuple of one tensor is still a tuple for the caller (rule 16)."""
    module = function_module(impl, lambda a: (a * 2,))
    module.register_full_backward_hook(returning(None))
    result = module(leaf())

    assert type(result) is tuple
    assert node_name(result[0]) == WRAPPED


def test_namedtuple_output_is_rebuilt(impl: Implementation) -> None:
    """A namedtuple output keeps its class and its fields, with wrapped tensors (rule 16)."""
    module = function_module(impl, lambda a: Pair(first=a * 2, second="text"))
    module.register_full_backward_hook(returning(None))
    result = module(leaf(4.0))

    assert type(result) is Pair
    assert result.first.item() == 8.0
    assert result.second == "text"
    assert node_name(result.first) == WRAPPED


def test_output_without_grad_is_not_wrapped(impl: Implementation) -> None:
    """An output that does not require grad comes back itself (rule 16)."""
    constant = torch.ones(1)
    module = function_module(impl, lambda a: constant)
    module.register_full_backward_hook(returning(None))

    assert module(leaf()) is constant


@dataclasses.dataclass
class Holder:
    """An output class that torch knows nothing about."""

    y: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: {"y": y},
        lambda y: [y],
        Holder,
        lambda y: collections.OrderedDict(y=y),
        lambda y: 5,
        lambda y: None,
    ],
    ids=["dict", "list", "dataclass", "OrderedDict", "int", "None"],
)
@FULL_KINDS
def test_other_outputs_warn_and_are_left_alone(impl, registrar, pack) -> None:
    """An output that is not a tensor or tuple warns, is returned unchanged, and fires no hook (rule 16)."""
    log: list[str] = []
    outputs: list[object] = []
    module = function_module(impl, lambda a: pack(a * 2))
    getattr(module, registrar)(noting(log, "fired"))
    module.register_forward_hook(lambda _, args, out: outputs.append(out))
    with pytest.warns(UserWarning, match="module output should be a Tensor or a tuple") as caught:
        result = module(leaf())

    assert len(caught) == 1
    assert str(caught[0].message).endswith(f"but received {type(result)}")
    assert result is outputs[0]

    y = getattr(result, "y", None)
    if isinstance(result, dict):
        y = result["y"]
    if y is not None:
        y.backward()

    assert log == []


def test_inputs_may_not_be_changed_in_place() -> None:
    """Forward that writes into a wrapped input raises (rule 29)."""

    def scenario(impl: Implementation) -> object:
        module = function_module(impl, lambda a: a.add_(1))
        module.register_full_backward_hook(returning(None))
        return module(leaf() * 1)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "is a view and is being modified inplace" in text


def test_outputs_may_not_be_changed_in_place() -> None:
    """A caller that writes into a wrapped output raises (rule 29)."""

    def scenario(impl: Implementation) -> object:
        module = function_module(impl, lambda a: a * 2)
        module.register_full_backward_hook(returning(None))
        return module(leaf()).add_(1)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert "is a view and is being modified inplace" in text


def test_inplace_layer_after_a_hooked_one_raises() -> None:
    """ReLU(inplace=True) on the output of a hooked layer raises (rule 29)."""

    def scenario(impl: Implementation) -> object:
        network = impl.own.Sequential(impl.own.Linear(2, 2), impl.own.ReLU(inplace=True))
        network[0].register_full_backward_hook(returning(None))
        return network(torch.ones(1, 2))

    assert same(scenario)[:2] == ("raised", "RuntimeError")


def test_inputs_may_be_changed_in_place_without_grad(impl: Implementation) -> None:
    """Nothing is wrapped without grad, so writing in place is allowed (rule 29)."""
    module = function_module(impl, lambda a: a.add_(1))
    module.register_full_backward_hook(returning(None))
    x = torch.ones(1)

    assert module(x) is x
    assert x.item() == 2.0
