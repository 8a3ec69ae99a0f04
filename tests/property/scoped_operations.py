"""Operations on a tree inside `modkit.fast_inference`, and the scopes themselves."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.nn.utils.prune

import modkit
from tests.property import choices
from tests.property.classes import LOG
from tests.property.observation import distinct_modules, observe
from tests.property.operations import Skipped
from tests.property.scoped_calls import make_input, result_of, scoped
from tests.property.scoped_trees import ScopedBuilder
from tests.property.tree_operations import changes_original
from tests.property.trees import TensorSpec


# Names of the two parameters behind a weight that `weight_norm` computes, new kind and old.
OF_WEIGHT_NORM: Final = ("original0", "original1", "_g", "_v")
TABLES: Final = choices.sampled_from(["_parameters", "_buffers", "_modules", "_modules"])
# Which of the layers that fit into the tree.
LAYERS: Final = choices.integers(0, 99)
# Names of members that trees of this kind have.
NAMES: Final = choices.sampled_from(
    ["weight", "bias", "inner", "act", "scale", "shift", "0", "1", "running_mean", "new"]
)


@scoped()
def enter_scope(side: Any, module: Any) -> Any:
    scope = modkit.fast_inference(module) if side.fast else nullcontext(module)
    entered = scope.__enter__()
    side.scopes.append(scope)
    LOG.clear()
    return entered is module


@scoped(choices.integers(0, 3), choices.booleans())
def leave_scope(side: Any, module: Any, number: int, failing: bool) -> Any:
    """Leave one of the scopes, perhaps by an exception."""
    if not side.scopes:
        raise Skipped
    scope = side.scopes.pop(-1 - number % len(side.scopes))
    error = ValueError("in the block")
    swallowed = scope.__exit__(ValueError, error, None) if failing else scope.__exit__(*[None] * 3)
    LOG.clear()
    return bool(swallowed)


ATTRIBUTES: Final[dict[str, list[Any]]] = {
    "approximate": ["tanh", "none"],
    "bias": [None, 3.0],
    "dim": [0, None, -1],
    "eps": [0.1, 1e-3, -1.0, "x"],
    "forward": [None],
    "groups": [1, 2],
    "inplace": [True, False],
    "momentum": [None, 0.5],
    "negative_slope": [0.5],
    "normalized_shape": [(2,), (3,)],
    "num_features": [2],
    "num_groups": [3, 1, 2],
    "p": [0.0, 0.9, 1.0, 2.0],
    "padding": [(1, 1), (0,), 1, "same", "valid"],
    "padding_mode": ["zeros", "circular"],
    "residual": [True],
    "running_mean": [None],
    "running_var": [None],
    "scale_factor": [2.0],
    "stride": [(2, 2), (1,), 1],
    "track_running_stats": [False, True],
    "training": [False, True, 0],
    "weight": [None],
}
SETTINGS: Final = choices.sampled_from(
    [(name, value) for name, values in ATTRIBUTES.items() for value in values]
)


@scoped(SETTINGS, choices.booleans(), choices.booleans())
def set_attribute(side: Any, module: Any, setting: Any, everywhere: bool, direct: bool) -> None:
    """Set an existing attribute, by assignment or in `__dict__`."""
    name, value = setting
    for each in distinct_modules(module) if everywhere else [module]:
        if name in each._parameters or name in each._buffers or name in each._modules:
            setattr(each, name, value)
        elif direct and name in each.__dict__:
            each.__dict__[name] = value
        elif name in each.__dict__:
            setattr(each, name, value)


@scoped(choices.sampled_from(sorted(ATTRIBUTES)))
def delete_attribute(side: Any, module: Any, name: str) -> None:
    """Delete an attribute that the computation may read."""
    delattr(module, name)


@scoped(
    choices.integers(0, 9),
    choices.sampled_from(["add", "data", "data of another shape", "copy", "grad"]),
)
def write_tensor(side: Any, module: Any, number: int, way: str) -> None:
    """Change the values of a parameter or buffer in place, or exchange its data."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not tensors:
        raise Skipped
    name, tensor = tensors[number % len(tensors)]
    # Torch reads behind the end of a norm that has fewer elements than the weight has rows.
    if way == "data of another shape" and name.endswith(OF_WEIGHT_NORM):
        raise Skipped
    with torch.no_grad():
        if way == "add":
            tensor.add_(1)
        elif way == "data":
            tensor.data = tensor.detach().double() * 2
        elif way == "data of another shape":
            tensor.data = torch.ones(2, *tensor.shape, dtype=tensor.dtype)
        elif way == "copy":
            tensor.copy_(torch.full_like(tensor, 0.5))
        else:
            tensor.grad = torch.ones_like(tensor)


@scoped(NAMES, choices.sampled_from([(), (3,), (3, 3), (3, 3, 3, 3)]), choices.booleans())
def assign_member(side: Any, module: Any, name: str, shape: Any, buffer: bool) -> None:
    """Assign a parameter, or a tensor to the name of a buffer."""
    spec = TensorSpec(shape, torch.float32, 2)
    made = spec.build() if buffer else ScopedBuilder(side.impl).parameter(spec)
    setattr(module, name, made)


@scoped(NAMES, LAYERS)
def assign_layer(side: Any, module: Any, name: str, spec: int) -> None:
    setattr(module, name, side.build(spec))


def new_member(side: Any, table: str, spec: Any) -> Any:
    if table == "_modules":
        return side.build(spec)
    made = TensorSpec((3,), torch.float32, 3)
    return made.build() if table == "_buffers" else ScopedBuilder(side.impl).parameter(made)


METHODS: Final = choices.sampled_from(
    [
        "set",
        "del",
        "pop",
        "pop-default",
        "popitem",
        "update",
        "update-keywords",
        "clear",
        "setdefault",
        "|=",
        "replace",
        "replace-more",
        "read",
        "copy",
    ]
)


@scoped(TABLES, METHODS, NAMES, LAYERS)
def use_table(side: Any, module: Any, key: str, method: str, name: str, spec: Any) -> Any:
    """Use a method of a table of members, as code does that avoids `setattr`."""
    table = getattr(module, key)
    if method in {"set", "update", "update-keywords", "setdefault", "|=", "replace-more"}:
        others = {"_parameters", "_buffers", "_modules"} - {key}
        if any(name in getattr(module, other) for other in others):
            raise Skipped
        return put_into_table(side, module, key, method, name, spec)
    if method == "del":
        del table[name]
    elif method in {"pop", "pop-default"}:
        return kind_of(table.pop(name, *([None] if method == "pop-default" else [])))
    elif method == "popitem":
        found, value = table.popitem()
        return found, kind_of(value)
    elif method == "clear":
        table.clear()
    elif method == "replace":
        setattr(module, key, dict(table))
    elif method == "read":
        return list(table), len(table), name in table, kind_of(table.get(name)), bool(table)
    else:
        return type(copy.copy(table)) is type(table.copy()) or list(table), table == table.copy()
    return None


def put_into_table(side: Any, module: Any, key: str, method: str, name: str, spec: Any) -> Any:
    """Put a new member into a table by one of the dict's methods."""
    table, value = getattr(module, key), new_member(side, key, spec)
    if method == "set":
        table[name] = value
    elif method == "update":
        table.update({name: value})
    elif method == "update-keywords":
        table.update([], new=value)
    elif method == "setdefault":
        return table.setdefault(name, value) is value
    elif method == "|=":
        setattr(module, key, table.__ior__({name: value}))
    else:
        setattr(module, key, {**table, name: value})
    return None


def kind_of(value: Any) -> Any:
    """Describe a member so that it compares."""
    return type(value).__name__ if isinstance(value, torch.nn.Module) else value


@scoped(
    choices.sampled_from(
        ["append", "insert", "extend", "set", "del", "pop", "slice", "+=", "clear"]
    ),
    choices.integers(-3, 3),
    LAYERS,
)
def change_container(side: Any, module: Any, method: str, number: int, spec: Any) -> Any:
    """Change a Sequential or a ModuleList by its own methods."""
    if not isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList)):
        raise Skipped
    layer = side.build(spec)
    if method == "append":
        return module.append(layer) is module
    if method == "insert":
        module.insert(number, layer)
    elif method == "extend":
        module.extend(side.impl.nn.Sequential(layer))
    elif method == "set":
        module[number] = layer
    elif method == "del":
        del module[number]
    elif method == "pop":
        return kind_of(module.pop(number))
    elif method == "slice":
        return [type(child).__name__ for child in module[number:]]
    elif method == "+=":
        module += side.impl.nn.Sequential(layer)
    else:
        del module[:]
    return len(module)


class Scaled(torch.nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the double."""
        return x * 2


def weighted(side: Any, module: Any) -> Any:
    """Return a module of the tree that has a weight, or skip the operation."""
    found = [each for each in distinct_modules(module) if hasattr(each, "weight")]
    if not found:
        raise Skipped
    return found[0]


PARAMETRIZE: Final = torch.nn.utils.parametrize
PRUNE: Final = torch.nn.utils.prune
WEIGHT_CHANGES: Final[dict[str, Callable[[Any], Any]]] = {
    "parametrize": lambda layer: PARAMETRIZE.register_parametrization(layer, "weight", Scaled()),
    "remove parametrizations": lambda layer: PARAMETRIZE.remove_parametrizations(layer, "weight"),
    "weight norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral norm": torch.nn.utils.parametrizations.spectral_norm,
    "old weight norm": torch.nn.utils.weight_norm,
    "remove old weight norm": torch.nn.utils.remove_weight_norm,
    "old spectral norm": torch.nn.utils.spectral_norm,
    "prune": lambda layer: PRUNE.l1_unstructured(layer, "weight", amount=0.5),
    "remove pruning": lambda layer: PRUNE.remove(layer, "weight"),
}


@scoped(choices.sampled_from(sorted(WEIGHT_CHANGES)))
def change_weight(side: Any, module: Any, way: str) -> str:
    """Add or remove a parametrization, a norm or a mask of a weight."""
    layer = weighted(side, module)
    WEIGHT_CHANGES[way](layer)
    return type(layer).__name__


LOADING: Final = (
    choices.booleans(),
    choices.booleans(),
    choices.sampled_from([None, torch.float64, torch.float16]),
)


@scoped(*LOADING)
def load_in_place(side: Any, module: Any, assign: bool, own: bool, dtype: Any) -> Any:
    """Load a state into the tree itself, with torch's loader or with modkit's."""
    state = {
        key: value.detach().to(dtype) * 0.5 if value.is_floating_point() else value.clone()
        for key, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    if own:
        return repr(modkit.load_state_dict(module, state, strict=False, assign=assign))
    return repr(module.load_state_dict(state, strict=False, assign=assign))


@scoped(choices.sampled_from(["deepcopy", "pickle", "replicate", "dict"]), choices.booleans())
def copy_and_call(side: Any, module: Any, route: str, weights: bool) -> Any:
    """Copy the root; compare everything observable of the copy, and its output."""
    if route == "deepcopy":
        copied = copy.deepcopy(side.model)
    elif route == "pickle":
        copied = pickle.loads(pickle.dumps(side.model))
    elif route == "replicate":
        copied = side.model._replicate_for_data_parallel()
        copied._parameters = {name: p * 2 for name, p in side.model._parameters.items() if weights}
    else:
        copied = type(side.model).__new__(type(side.model))
        copied.__dict__.update(side.model.__dict__)
    seen = None if route in {"replicate", "dict"} else (observe(copied), keys_of(copied))
    return seen, result_of(copied, make_input(side, "own"), {})


def keys_of(model: torch.nn.Module) -> list[list[str]]:
    """List the names in each module's `__dict__`, in order."""
    return [list(module.__dict__) for module in distinct_modules(model)]


@scoped(choices.sampled_from([0.5, 0.9]))
def make_average(side: Any, module: Any, decay: float) -> None:
    """Begin to average the tree."""
    side.ema = modkit.EMA(side.model, decay)


@scoped(
    choices.sampled_from(["update", "applied", "copy_to", "averaged_model", "store", "restore"])
)
def use_average(side: Any, module: Any, method: str) -> Any:
    """Update the average, compute with it, or write it into the tree."""
    if side.ema is None:
        side.ema = modkit.EMA(side.model, 0.5)
    x = make_input(side, "own")
    if method == "update":
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.mul_(0.5)
        return side.ema.update(side.model)
    if method == "applied":
        with side.ema.applied(side.model):
            return result_of(side.model, x, {})
    if method == "averaged_model":
        return result_of(side.ema.averaged_model(), x, {})
    arguments = [side.model] if method == "copy_to" else []
    return getattr(side.ema, method)(*arguments)


@scoped()
def enter_average(side: Any, module: Any) -> None:
    """Swap the average into the tree for the operations that follow."""
    if side.applied:
        raise Skipped
    if side.ema is None:
        side.ema = modkit.EMA(side.model, 0.5)
    applied = side.ema.applied(side.model)
    applied.__enter__()
    side.applied.append(applied)


@scoped()
def leave_average(side: Any, module: Any) -> None:
    """Swap the training weights back in."""
    if not side.applied:
        raise Skipped
    already = len(LOG)
    side.applied.pop().__exit__(None, None, None)
    # A block looks for tensors that the model has lost where something has changed, as in fast_inference.
    found = [entry for entry in LOG[already:] if entry[0] not in {"own parameters", "own buffers"}]
    LOG[already:] = found


@scoped(choices.sampled_from(["forward", "_call_impl", "forward-del"]))
def override_call(side: Any, module: Any, way: str) -> Any:
    """Replace the forward of one module by an attribute of the instance."""
    if way == "forward-del":
        del module.forward
        return None
    original = getattr(module, way)

    def noting(*args: Any, **kwargs: Any) -> Any:
        LOG.append(("instance", way, len(args)))
        return original(*args, **kwargs)

    setattr(module, way, noting)
    return None


class Loud:
    """Mixed into the class of an instance."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Log the call, and pass it on."""
        LOG.append(("class", len(args)))
        return super().forward(*args, **kwargs)


@scoped()
def change_class(side: Any, module: Any) -> str:
    """Give one module another class, as parametrizations and quantization do."""
    kind = type(module)
    module.__class__ = type(f"Loud{kind.__name__}", (Loud, kind), {"__module__": kind.__module__})
    return type(module).__name__


@scoped()
def step_optimizer(side: Any, module: Any) -> Any:
    """Train the tree by one step."""
    parameters = [p for p in side.model.parameters() if p.is_leaf and p.requires_grad]
    if not parameters:
        raise Skipped
    result = result_of(side.model, make_input(side, "own"), {})
    torch.optim.SGD(parameters, lr=0.1).step()
    return result


@scoped(choices.booleans())
def shallow_copy(side: Any, module: Any, replace: bool) -> Any:
    """Copy the root without its children; in torch both share their member tables."""
    if replace and (getattr(side, "scopes", None) or changes_original(side)):
        raise Skipped  # in a block, what is put into a copy does not reach the original
    copied = copy.copy(side.model)
    keys = list(copied.__dict__)
    if replace:
        side.originals.append(side.model)
        side.model = copied
    return keys, result_of(copied, make_input(side, "own"), {})
