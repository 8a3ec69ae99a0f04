"""Operations on whole trees: modes, conversion, walks, paths, copies, calls."""

import copy
import inspect
import pickle
from typing import Any

import torch

from tests.property import choices
from tests.property.hook_objects import CALL_TABLES, GLOBAL_REGISTRARS, OPTIONS, REGISTRARS, Hook
from tests.property.node_tools import LOG
from tests.property.observation import Ordinals, positions
from tests.property.operations import Skipped, is_shared, is_tied, operation, refuse_tied_buffers
from tests.property.trees import Builder, layers


@operation(choices.sampled_from([True, False, 1, None, "train"]))
def train(side: Any, module: Any, mode: Any) -> bool:
    """Set the mode, which may be refused."""
    return module.train(mode) is module


@operation()
def evaluate(side: Any, module: Any) -> bool:
    """Set evaluation mode."""
    return module.eval() is module


@operation(choices.sampled_from(["float", "double", "half", "bfloat16", "cpu"]))
def cast(side: Any, module: Any, method: str) -> bool:
    """Convert by one of the methods without arguments."""
    refuse_tied_buffers(side)
    return getattr(module, method)() is module


@operation(
    choices.sampled_from(
        [
            ((torch.float64,), {}),
            ((torch.float16,), {"non_blocking": True}),
            (("cpu", torch.float32), {}),
            ((torch.zeros(1, dtype=torch.bfloat16),), {}),
            ((), {"device": "cpu"}),
            ((), {"memory_format": torch.channels_last}),
            ((torch.complex64,), {}),
            ((torch.int8,), {}),
            (("nowhere",), {}),
            ((), {}),
        ]
    )
)
def to(side: Any, module: Any, form: Any) -> bool:
    """Convert by one of the forms of `to`."""
    refuse_tied_buffers(side)
    args, kwargs = form
    if "memory_format" in kwargs and any(t.dim() == 5 for t in module.state_dict().values()):
        raise Skipped  # torch refuses tensors of other ranks than the format's, a listed difference
    return module.to(*args, **kwargs) is module


@operation()
def to_meta(side: Any, module: Any) -> bool:
    """Move to the meta device, where torch unties parameters."""
    refuse_tied_buffers(side)
    if is_tied(side):
        raise Skipped
    return module.to("meta") is module


@operation(choices.sampled_from([torch.float64, torch.float32, torch.int32, "torch.DoubleTensor"]))
def type_(side: Any, module: Any, dtype: Any) -> bool:
    """Cast everything."""
    refuse_tied_buffers(side)
    return module.type(dtype) is module


@operation(choices.booleans())
def requires_grad_(side: Any, module: Any, flag: bool) -> bool:
    """Freeze or unfreeze, which integer parameters refuse."""
    return module.requires_grad_(flag) is module


@operation(choices.booleans())
def zero_grad(side: Any, module: Any, set_to_none: bool) -> None:
    """Drop or zero the gradients."""
    module.zero_grad(set_to_none=set_to_none)


@operation()
def apply(side: Any, module: Any) -> list[str]:
    """Record the order in which `apply` visits modules."""
    visited: list[str] = []
    module.apply(lambda visit: visited.append(f"{type(visit).__name__} {len(visit._modules)}"))
    return visited


@operation(choices.booleans())
def map_tensors(side: Any, module: Any, recurse: bool) -> bool:
    """Change every tensor by a function that is not idempotent."""
    refuse_tied_buffers(side)
    if is_tied(side) or is_shared(side):
        raise Skipped
    return module._apply(lambda tensor: tensor + 1, recurse=recurse) is module


def walk_arguments(*flags: str) -> choices.Choice[dict[str, Any]]:
    """Draw keyword arguments of a walk."""
    optional = {flag: choices.booleans() for flag in flags if flag != "prefix"}
    if "prefix" in flags:
        optional["prefix"] = choices.sampled_from(["", "p", "p.q"])
    return choices.optional(optional)


# ``remove_duplicate`` since torch 2.11; before, a listed difference.
MODULES_FLAGS = tuple(inspect.signature(torch.nn.Module.modules).parameters)[1:]
WALKS = choices.one_of(
    choices.tuples(choices.just("parameters"), walk_arguments("recurse")),
    choices.tuples(choices.just("buffers"), walk_arguments("recurse")),
    choices.tuples(choices.just("modules"), walk_arguments(*MODULES_FLAGS)),
    choices.tuples(choices.just("children"), walk_arguments()),
    choices.tuples(choices.just("named_children"), walk_arguments()),
    choices.tuples(choices.just("named_modules"), walk_arguments("prefix", "remove_duplicate")),
    choices.tuples(
        choices.just("named_parameters"), walk_arguments("prefix", "recurse", "remove_duplicate")
    ),
    choices.tuples(
        choices.just("named_buffers"), walk_arguments("prefix", "recurse", "remove_duplicate")
    ),
)


@operation(WALKS)
def walk(side: Any, module: Any, form: Any) -> list[Any]:
    """Walk over members; names and identities compare, in order."""
    method, arguments = form
    ordinals = Ordinals()
    for _, place in positions(side.model):
        ordinals.of(place)
        for member in (*place._parameters.values(), *place._buffers.values()):
            ordinals.of(member)
    found = list(getattr(module, method)(**arguments))
    if method.startswith("named_"):
        return [(name, ordinals.of(member)) for name, member in found]
    return [ordinals.of(member) for member in found]


@operation(choices.integers(0, 3))
def walk_with_memo(side: Any, module: Any, known: int) -> list[Any]:
    """Walk over the modules that a memo does not hold yet, which fills it."""
    memo = {place for _, place in positions(side.model)[:known]}
    names = [name for name, _ in module.named_modules(memo=memo, prefix="m")]
    return [names, len(memo)]


# The star is a member of the place.
PATH_ENDS = choices.sampled_from(
    ["*", "", "*", "a", "weight", "running_mean", "a.b", "missing", "."]
)


def path_to(side: Any, number: int, end: str) -> str:
    """Make a dotted path: to a place of the tree, and perhaps on from there."""
    places = positions(side.model)
    path, place = places[number % len(places)]
    names = [*place._parameters, *place._buffers, *place._modules]
    if end == "*":
        end = names[number % len(names)] if names else ""
    return ".".join([*path, *([end] if end else [])])


@operation(
    choices.sampled_from(["get_submodule", "get_parameter", "get_buffer"]),
    choices.integers(0, 9),
    PATH_ENDS,
)
def find(side: Any, module: Any, method: str, number: int, end: str) -> Any:
    """Look something up by its path, from the root."""
    found = getattr(side.model, method)(path_to(side, number, end))
    return type(found).__name__ if isinstance(found, torch.nn.Module) else found


@operation(choices.integers(0, 9), PATH_ENDS, layers, choices.booleans())
def set_submodule(side: Any, module: Any, number: int, end: str, spec: Any, strict: bool) -> None:
    """Put a new module at a path."""
    path = path_to(side, number, end)
    side.model.set_submodule(path, Builder(side.impl).module(spec), strict)


@operation(choices.sampled_from(["deepcopy", "pickle", "copy"]))
def copied(side: Any, module: Any, route: str) -> None:
    """Continue with a copy of the tree."""
    if route == "deepcopy":
        made = copy.deepcopy(side.model)
        if not isinstance(made, torch.nn.Module):
            raise Skipped  # a class that forwards `__deepcopy__` to a parameter
        side.model = made
    elif route == "pickle":
        side.model = pickle.loads(pickle.dumps(side.model))
    elif getattr(side, "scopes", None):
        raise Skipped  # see shallow_copy
    else:
        side.originals.append(side.model)
        side.model = copy.copy(side.model)


EFFECTS = choices.sampled_from(["note", "change", "change", "change", "raise", "odd"])
# That hooks of states and loads may remove themselves is a listed difference.
CALL_EFFECTS = EFFECTS | choices.sampled_from(["remove", "clear", "note", "change"])


def several(kind: str) -> choices.Choice[tuple[str, list[tuple[dict[str, bool], str]]]]:
    """Draw a few hooks of one kind: their options and effects."""
    options = choices.optional({o: choices.booleans() for o in OPTIONS.get(kind, ())})
    effects = CALL_EFFECTS if kind in CALL_TABLES else EFFECTS
    return choices.tuples(
        choices.just(kind), choices.lists(choices.tuples(options, effects), min_size=1, max_size=3)
    )


@operation(choices.one_of(*map(several, REGISTRARS)))
def add_hooks(side: Any, module: Any, form: Any) -> None:
    """Register a few hooks of one kind on one module."""
    kind, hooks = form
    for options, effect in hooks:
        hook = Hook(len(side.handles), kind, effect)
        side.handles.append(getattr(module, REGISTRARS[kind])(hook, **options))


@operation(choices.integers(0, 9))
def remove_hook(side: Any, module: Any, number: int) -> None:
    """Remove a hook, perhaps one that was removed before or that a copy left behind."""
    if side.handles:
        side.handles[number % len(side.handles)].remove()


@operation(
    choices.sampled_from([torch.float32, torch.float32, torch.float64]),
    choices.sampled_from([{}, {}, {}, {"scale": 2.0}, {"scale": 2.0}, {"unknown": 1}]),
    choices.lists(choices.sampled_from(sorted(GLOBAL_REGISTRARS)), max_size=2, unique=True),
)
def call(side: Any, module: Any, dtype: torch.dtype, kwargs: Any, global_kinds: Any) -> Any:
    """Run the tree forward and backward, perhaps under global hooks."""
    handles = [
        getattr(side.impl, GLOBAL_REGISTRARS[kind])(Hook(-1 - number, kind, "note"))
        for number, kind in enumerate(global_kinds)
    ]
    try:
        return forward_and_backward(side, dtype, kwargs)
    finally:
        for handle in handles:
            handle.remove()


def forward_and_backward(side: Any, dtype: torch.dtype, kwargs: Any) -> Any:
    """Call the root with a tensor that requires grad; return the output and its gradient."""
    x = (torch.arange(6, dtype=dtype) / 4).reshape(2, 3).requires_grad_()
    output = side.model(x, **kwargs)
    total = sum_of(output)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    return output, x.grad, len(LOG)


def sum_of(output: Any) -> Any:
    """Return the sum of all tensors of an output, which hooks may have replaced."""
    if isinstance(output, torch.Tensor):
        return output.sum()
    found = [*output.values()] if isinstance(output, dict) else output
    if not isinstance(found, (list, tuple)):
        return 0
    return sum(tensor.sum() for tensor in found if isinstance(tensor, torch.Tensor))


@operation(several("forward"), choices.booleans(), choices.integers(0, 9), choices.booleans())
def failing_call(
    side: Any, module: Any, form: Any, everywhere: bool, number: int, late: bool
) -> Any:
    """Run the tree with always-called hooks, and a module whose forward raises."""
    places = [place for _, place in positions(side.model)] if everywhere else [module]
    breaks = Hook(-9, "forward" if late else "forward_pre", "raise")
    handles = [getattr(side.target(number), REGISTRARS[breaks.kind])(breaks)]
    for place in places:
        for ordinal, (options, effect) in enumerate(form[1]):
            hook = Hook(-1 - ordinal, "forward", effect)
            options = {"always_call": True, **options}
            handles.append(place.register_forward_hook(hook, **options))
    try:
        return forward_and_backward(side, torch.float32, {})
    finally:
        for handle in handles:
            handle.remove()
