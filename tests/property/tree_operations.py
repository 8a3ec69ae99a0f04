"""Operations on whole trees: modes, conversion, walks, paths, copies, calls, states, changes in between."""

import collections
import copy
import inspect
import pickle
import types
import warnings
from typing import Any

import torch

from tests.capabilities import FIRST_ELEMENTS_FIT
from tests.property import choices
from tests.property.classes import (
    CALL_TABLES,
    GLOBAL_REGISTRARS,
    LOG,
    OPTIONS,
    REGISTRARS,
    Hook,
    summary,
)
from tests.property.observation import Ordinals, positions
from tests.property.operations import (
    Skipped,
    is_shared,
    is_taken,
    is_tied,
    operation,
    refuse_tied_buffers,
)
from tests.property.trees import Builder, layers, valid_names


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
    if "memory_format" in kwargs and any(
        tensor.dim() == 5 for tensor in (*module.parameters(), *module.buffers())
    ):
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
    elif getattr(side, "scopes", None) or changes_original(side):
        raise Skipped  # see shallow_copy
    else:
        side.originals.append(side.model)
        side.model = copy.copy(side.model)


def changes_original(side: Any) -> bool:
    """Return True if a shallow copy would have an override that is bound to the original.

    In a block, what that puts into the original does not reach the copy.
    """
    values = side.model.__dict__.values()
    return hasattr(side, "scopes") and any(
        isinstance(value, types.MethodType) and value.__self__ is side.model for value in values
    )


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


@operation(
    choices.sampled_from(["", "p.", "p"]),
    choices.booleans(),
    choices.sampled_from([None, "dict", "same"]),
)
def state_dict(side: Any, module: Any, prefix: str, keep_vars: bool, kind: Any) -> Any:
    """Save the state under a prefix, perhaps into a mapping with other entries."""
    destination: Any = None
    if kind == "dict":
        destination = {"there": 1}
    elif kind == "same":
        destination = module.state_dict(prefix="first.")
    state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    return state, dict(getattr(state, "_metadata", {})), type(state).__name__, state is destination


EDITS = choices.lists(
    choices.tuples(
        choices.sampled_from(
            ["drop", "reshape", "unsqueeze", "cast", "text", "parameter", "deeper", "sibling"]
        ),
        choices.integers(0, 9),
    ),
    max_size=3,
)


def edited_state(side: Any, module: Any, edits: Any) -> dict[str, Any]:
    """Make a state of other values for the module, and edit some of its entries."""
    state = {
        key: value.detach().clone() * 2 if isinstance(value, torch.Tensor) else value
        for key, value in module.state_dict().items()
    }
    for edit, number in edits:
        keys = list(state)
        if not keys:
            break
        key = keys[number % len(keys)]
        value = state[key]
        if edit == "drop":
            del state[key]
        elif edit == "deeper":
            state[f"{key}.zz"] = torch.ones(1)
        elif edit == "sibling":
            state[".".join([*key.split(".")[:-1], "zz"])] = torch.ones(1)
        elif edit == "text":
            state[key] = "text"
        elif isinstance(value, torch.Tensor):
            state[key] = edited_tensor(side, edit, value)
    return state


def edited_tensor(side: Any, edit: str, value: torch.Tensor) -> torch.Tensor:
    """Change one tensor of a state so that it fits, or not."""
    if edit == "reshape":
        # A listed difference of older torch.
        further = (2, 2) if FIRST_ELEMENTS_FIT and value.ndim == 0 else (2,)
        return torch.zeros((*value.shape, *further), dtype=value.dtype)
    if edit == "unsqueeze":
        return value.reshape(1, *value.shape)
    if edit == "cast":
        return value.double()
    return side.impl.nn.Parameter(value, requires_grad=value.is_floating_point())


# Calls made by assigning tensors. How far a failing load came is not compared.
ASSIGNMENTS = {
    *("__setattr__", "__getattr__", "register_parameter", "register_buffer"),
    *("own register_parameter", "own register_buffer", "new parameter", "new buffer"),
    *("Node.register_parameter", "Node.register_buffer", "Node.__setattr__"),
    *("Behind.__setattr__", "weight set"),
}


def is_assignment(entry: Any) -> bool:
    """Return True if an entry of the log is about the assignment of a tensor."""
    kind = entry if isinstance(entry, str) else entry[0]
    return (entry[1] if kind in {"late", "patched"} else kind) in ASSIGNMENTS


def own_attributes(module: Any) -> set[str]:
    """Return the attributes of an instance, without members, which a block of fast_inference adds."""
    if not isinstance(module, torch.nn.Module):
        return set()
    members = {*module._parameters, *module._buffers, *module._modules}
    return {*vars(module)} - members


def refuse_keys_below_none(side: Any) -> None:
    """Skip a load with keys that may belong to a child that is None.

    Those of a child with a dot in its name may. Modkit alone reports them, a listed difference. Nor
    may a plain tensor stand among the parameters, or a child answer for the name of a tensor, which
    torch then refuses to assign: a load that is refused anyway does not come to it.
    """
    for _, place in positions(side.model):
        names = {*place._parameters, *place._buffers}
        if "__getattr__" in vars(type(place)) and any(
            names & own_attributes(child) for child in place._modules.values()
        ):
            raise Skipped
    tensors = [p for _, place in positions(side.model) for p in place._parameters.values()]
    if not all(p is None or isinstance(p, torch.nn.Parameter) for p in tensors):
        raise Skipped
    children = [item for _, place in positions(side.model) for item in place._modules.items()]
    if any("." in name for name, _ in children) and any(child is None for _, child in children):
        raise Skipped


def load_into_copy(side: Any, state: Any, **options: bool) -> Any:
    """Load into a copy of the tree, since a failing load leaves torch's tree partly loaded."""
    refuse_keys_below_none(side)
    model = copy.deepcopy(side.model)
    try:
        with warnings.catch_warnings():
            # A load in vain warns on modkit alone, a listed difference.
            warnings.filterwarnings("ignore", ".*loaded none of the")
            if isinstance(state, dict) and 1 in state:
                # Torch has written the first tensors, or warned that it does not, when it meets this key.
                warnings.filterwarnings("ignore", ".*copying from a non-meta")
            return model, model.load_state_dict(state, **options)
    except Exception:
        LOG[:] = [entry for entry in LOG if not is_assignment(entry)]
        raise


@operation(choices.booleans(), choices.booleans(), choices.booleans(), choices.booleans(), EDITS)
def load_state_dict(
    side: Any, module: Any, strict: bool, assign: bool, metadata: bool, backwards: bool, edits: Any
) -> Any:
    """Load an edited state into a copy of the tree, and continue with the copy if it succeeds."""
    state: Any = collections.OrderedDict(edited_state(side, side.model, edits))
    if backwards:
        state = collections.OrderedDict(reversed(state.items()))
    if metadata:
        state._metadata = copy.deepcopy(side.model.state_dict()._metadata)
    side.model, result = load_into_copy(side, state, strict=strict, assign=assign)
    return result.missing_keys, result.unexpected_keys, repr(result), list(state)


@operation(
    choices.sampled_from(
        [None, 5, "text", [], {"zz": 1}, {"a": torch.ones(1)}, {1: torch.ones(1)}, {"": 1}]
    ),
    choices.booleans(),
)
def load_something_else(side: Any, module: Any, value: Any, strict: bool) -> Any:
    """Load an object that is not a state of this module."""
    return list(load_into_copy(side, value, strict=strict)[1])


@operation(layers)
def load_from_another_tree(side: Any, module: Any, spec: Any) -> Any:
    """Load another module's state without strictness."""
    other = Builder(side.impl).module(spec)
    return list(load_into_copy(side, other.state_dict(), strict=False)[1])


STRUCTURE_CHANGES = choices.sampled_from(
    ["add child", "add parameter", "add buffer", "delete", "replace child"]
)
CHANGED_WALKS = choices.sampled_from(
    ["modules", "children", "named_modules", "parameters", "named_parameters", "named_buffers"]
)


def change_structure(side: Any, module: Any, change: str, name: str) -> None:
    """Add, delete or replace a member by the plainest means."""
    tables = (module._modules, module._parameters, module._buffers)
    added = {"add child": "_modules", "add parameter": "_parameters", "add buffer": "_buffers"}
    if change in added and is_taken(module, added[change], name):
        return
    if change == "add child":
        module._modules[name] = side.impl.nn.Tanh()
    elif change == "add parameter":
        module._parameters[name] = side.impl.nn.Parameter(torch.ones(1))
    elif change == "add buffer":
        module._buffers[name] = torch.ones(1)
    elif change == "delete":
        for table in tables:
            if table:
                table.popitem()
    else:
        for key in module._modules:
            module._modules[key] = side.impl.nn.Tanh()


@operation(
    CHANGED_WALKS, choices.integers(0, 6), STRUCTURE_CHANGES, valid_names, choices.integers(0, 9)
)
def walk_while_changing(
    side: Any, module: Any, method: str, steps: int, change: str, name: str, number: int
) -> Any:
    """Change a module of the tree in the middle of a walk, and continue."""
    found = []
    changed = side.target(number)
    for taken, item in enumerate(getattr(module, method)(), start=1):
        found.append(item[0] if isinstance(item, tuple) else summary(item))
        if taken == steps:
            change_structure(side, changed, change, name)
        if taken > 200:
            break
    return found


@operation(STRUCTURE_CHANGES, valid_names, choices.booleans())
def apply_while_changing(side: Any, module: Any, change: str, name: str, inner: bool) -> list[str]:
    """Change modules from inside `apply`, those of one kind or all with children."""
    visited: list[str] = []

    def change_it(visit: Any) -> None:
        visited.append(f"{type(visit).__name__} {len(visit._modules)}")
        if bool(visit._modules) is inner:
            change_structure(side, visit, change, name)

    module.apply(change_it)
    return visited


@operation(
    choices.sampled_from(
        [
            "forward",
            "train",
            "_apply",
            "apply",
            "state_dict",
            "_load_from_state_dict",
            "named_modules",
            "children",
            "named_children",
            "parameters",
            "_named_members",
            "extra_repr",
            "register_parameter",
            "register_buffer",
            "_slow_forward",
        ]
    )
)
def override_on_instance(side: Any, module: Any, method: str) -> None:
    """Override a method on one instance; copies have their own override."""

    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        keywords = [(name, summary(value)) for name, value in kwargs.items()]
        LOG.append((f"own {method}", [summary(value) for value in args], keywords))
        return getattr(type(self), method)(self, *args, **kwargs)

    setattr(module, method, types.MethodType(logging, module))


@operation(choices.sampled_from(["parameters", "modules", "named_parameters"]))
def walk_twice_at_once(side: Any, module: Any, method: str) -> list[Any]:
    """Two interleaved walks are independent."""
    ordinals = Ordinals()
    first, second = iter(getattr(module, method)()), iter(getattr(module, method)())
    turns = []
    for item in first:
        other = next(second, None)
        pair = [item[1] if isinstance(item, tuple) else item]
        pair.append(other[1] if isinstance(other, tuple) else other)
        turns.append([ordinals.of(entry) for entry in pair])
    return turns
