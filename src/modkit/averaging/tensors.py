"""The tensors of a model: by canonical name, how they are written, and how writes are noticed."""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from modkit._tree import descend
from modkit._upstream import PLAIN, copy_, copy_all_
from modkit.averaging.sharding import is_sharded, local_shard, reshard, shards_of
from modkit.errors import NameMismatchError


# The parts of a name that ``torch.compile``, FSDP, activation checkpointing and Fabric add.
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)


def without_wrappers(name: str) -> str:
    """Return a name without the parts of wrappers; ``module`` may be a child's, and stays."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _stripped(names: Iterable[str]) -> dict[str, str]:
    """Map each name of one model to its name without the parts of wrappers."""
    stripped = {name: without_wrappers(name) for name in names}
    # DistributedDataParallel is in all names; where only some have it, it is a child of the user's.
    while stripped and all(name.startswith("module.") for name in stripped.values()):
        stripped = {name: each.removeprefix("module.") for name, each in stripped.items()}
    return stripped


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its name without the parts that compilers and distributed wrappers add.

    Args:
        names: Names of all tensors in one model.

    Returns:
        The canonical names, or the names themselves if two of those would be equal.

    Example:
        >>> list(canonical_names(["module._orig_mod.weight", "module._orig_mod.0.bias"]).values())
        ['weight', '0.bias']
    """
    canonical = _stripped(names)
    is_unique = len(set(canonical.values())) == len(canonical)
    return canonical if is_unique else {name: name for name in canonical}


def canonical_paths(paths: Iterable[str]) -> dict[str, str]:
    """Map the path of each module to its canonical path, which a wrapper and its module share."""
    # Each path but that of the root gets the name that a tensor of the module would have.
    names = _stripped(f"{path}._" for path in paths if path)
    return {"": "", **{name[:-2]: each.rpartition(".")[0] for name, each in names.items()}}


def _prefix_between(longer: set[str], shorter: set[str]) -> str:
    """Return the prefix, such as ``"net."``, that turns the shorter names into the longer.

    It is empty unless one prefix does that for all names.
    """
    if not longer or not shorter:
        return ""
    # A common prefix leaves the alphabetical order as it is, so the first names are a pair.
    prefix = min(longer).removesuffix(min(shorter))
    fits = prefix.endswith(".") and longer == {prefix + name for name in shorter}
    return prefix if fits else ""


def names_like(mine: set[str], names: dict[str, str], theirs: set[str]) -> dict[str, str]:
    """Return the names of a model without, or with, the prefix by which its parameters differ.

    Args:
        mine: Names of the model's parameters.
        names: The names to adapt: all names of the model, by key.
        theirs: Names of the parameters of the other model, whose prefix is taken.

    Returns:
        The adapted names by key, or ``names`` if the parameters do not differ by one prefix.

    Example:
        >>> names_like({"net.weight"}, {"net.weight": "net.weight"}, {"weight"})
        {'net.weight': 'weight'}
    """
    surplus = _prefix_between(mine, theirs)
    lacking = _prefix_between(theirs, mine)
    renamed = {key: lacking + name.removeprefix(surplus) for key, name in names.items()}
    # They collide where a wrapper has a buffer of the name of one of its network.
    return renamed if len(set(renamed.values())) == len(names) else names


def check_match(
    problem: str,
    expected: Mapping[str, tuple[int, ...] | None],
    actual: Mapping[str, tuple[int, ...] | None],
    *,
    end: str = "Nothing has been changed.",
) -> None:
    """Compare names and shapes.

    Args:
        problem: What was done or does not fit, with which the error begins.
        expected: Shapes by name; None stands for any shape.
        actual: Shapes by name; None stands for any shape.
        end: Last sentence of the error; empty where nothing could have been changed.

    Raises:
        NameMismatchError: If they differ. It lists the names that are missing, unexpected, or of
            another shape.
    """
    missing = [name for name in expected if name not in actual]
    unexpected = [name for name in actual if name not in expected]

    shapes: list[str] = []
    for name, expected_shape in expected.items():
        shape = actual.get(name)
        if expected_shape is not None and shape is not None and shape != expected_shape:
            shapes.append(f"{name} ({tuple(shape)} instead of {tuple(expected_shape)})")

    if missing or unexpected or shapes:
        raise NameMismatchError(
            problem, missing=missing, unexpected=unexpected, shapes=shapes, end=end
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of named tensors."""
    return {name: tensor.shape for name, tensor in tensors.items()}


# The table in which a module has its parameters, buffers or children.
Registry: TypeAlias = Mapping[str, Any]


class Member(NamedTuple):
    """A tensor of a model, and where it is registered.

    Attributes:
        name: Canonical name.
        tensor: What was registered when the model was walked; None in an empty slot.
        registry: ``_parameters`` or ``_buffers`` of its module.
        key: Its key there.
        is_parameter: Whether it is a parameter, and not a buffer.
        persistent: Whether ``state_dict()`` has it.
    """

    name: str
    tensor: Any
    registry: Registry
    key: str
    is_parameter: bool = True
    persistent: bool = True

    def current(self) -> Tensor:
        """Return what is registered now: forwards may replace buffers."""
        tensor: Tensor = self.registry[self.key]
        return tensor

    def required_shape(self) -> torch.Size | None:
        """Return the shape that values must have; None for a buffer, which may have had another."""
        return self.current().shape if self.is_parameter else None


class NamedTensors:
    """All parameters and buffers of a model by canonical name, at one moment.

    Tied tensors are listed once, under their first name. Of a sharded model these are the shards.

    Args:
        model: The model.
        leave_out: A module below it that is skipped, with all that it contains.
        like: Another model. If all parameters of the two differ by one prefix, because one wraps
            the other, the names are those of ``like``.

    Attributes:
        modules: All modules, in the order of the walk.
        parameters: Parameters by name.
        buffers: Buffers by name, including those that are not persistent.
        aliases: Maps each further name of a tied tensor to its first name.
        empty: Buffers that are None, by name.
        states: ``__dict__`` of each module, with its tables, which are watched.
        scripted: True if a module is scripted: C++ makes new tables at each access.
        parameter_names: All names of parameters, further names of tied ones included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        leave_out: torch.nn.Module | None = None,
        like: "NamedTensors | None" = None,
    ) -> None:
        places = _places(model, leave_out)
        self.modules: list[torch.nn.Module] = [module for _, module in places]
        # Full parameters that a forward of FSDP has left would hide the shards.
        reshard(self.modules)

        self.parameters: dict[str, Member] = {}
        self.buffers: dict[str, Member] = {}
        self.aliases: dict[str, str] = {}
        self.empty: dict[str, Member] = {}
        self.states: list[dict[str, Any]] = []
        self.scripted: bool = False

        slots = [slot for prefix, module in places for slot in self._slots_of(prefix, module)]
        names = canonical_names(slot.name for slot in slots)
        parameters = [s.name for s in slots if s.is_parameter and s.tensor is not None]
        if like is not None:
            names = names_like({names[name] for name in parameters}, names, like.parameter_names)
        self.parameter_names: set[str] = {names[name] for name in parameters}

        # The walk meets a tied tensor several times; the first name is the one that torch gives it.
        first: dict[int, str] = {}
        for name, tensor, registry, key, *flags in slots:
            member = Member(names[name], tensor, registry, key, *flags)
            if member.tensor is None:
                if not member.is_parameter:
                    self.empty[member.name] = member
            elif id(member.tensor) in first:
                self.aliases[member.name] = first[id(member.tensor)]
            else:
                first[id(member.tensor)] = member.name
                members = self.parameters if member.is_parameter else self.buffers
                members[member.name] = member

    def _slots_of(self, prefix: str, module: torch.nn.Module) -> Iterator[Member]:
        """Yield the members of a module by name in the model, and note where its tables are."""
        parameters: Registry = module._parameters
        buffers: Registry = module._buffers
        if isinstance(module, torch.jit.ScriptModule):
            # C++ owns its registries, and makes new objects of them at each access.
            self.scripted = True
            parameters = dict(module.named_parameters(recurse=False))
            buffers = dict(module.named_buffers(recurse=False))
            transient: set[str] = set()
        else:
            # Not ``vars()``, which the compiler of torch 2.8 cannot follow here.
            self.states.append(module.__dict__)
            transient = module._non_persistent_buffers_set

        for key, tensor in parameters.items():
            yield Member(prefix + key, tensor, parameters, key)
        for key, tensor in buffers.items():
            is_saved = key not in transient
            yield Member(prefix + key, tensor, buffers, key, False, is_saved)

    def all(self) -> dict[str, Member]:
        """Return parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def names(self) -> set[str]:
        """Return all names, further names of tied tensors included."""
        return {*self.parameters, *self.buffers, *self.aliases}

    def member(self, name: str) -> Member | None:
        """Return the member of a name.

        Args:
            name: A canonical name, which may be a further name of a tied tensor.

        Returns:
            The member, or None if the model has none of this name, or a buffer that is None.
        """
        name = self.aliases.get(name, name)
        return self.parameters.get(name) or self.buffers.get(name)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name, or raise NameMismatchError."""
        member = self.member(name)
        if member is None:
            raise NameMismatchError(
                "EMA: the model lacks what was averaged", missing=[name], unexpected=[], shapes=[]
            )
        tensor: Tensor = member.tensor
        return tensor

    def layout(self) -> tuple[Any, ...]:
        """Return what a copy of the model has in common with it: names, ties and shapes."""
        shapes = shapes_of({name: member.tensor for name, member in self.parameters.items()})
        return self.names(), self.aliases, shapes

    def has_lazy(self) -> bool:
        """Return True if a tensor has no shape yet, because its module has not been called."""
        return any(is_lazy(member.tensor) for member in self.all().values())


def _places(
    model: torch.nn.Module, leave_out: torch.nn.Module | None
) -> list[tuple[str, torch.nn.Module]]:
    """Return each module with the prefix of its names, on every path but those to ``leave_out``."""
    if model is leave_out:
        return []
    places = [("", model)]

    # Dynamo of torch 2.8 traces this, and does not know a union among the annotations.
    def enter(name: str, child: torch.nn.Module, parent_prefix: str) -> Any:
        if child is leave_out:
            return None
        prefix = f"{parent_prefix}{name}."
        places.append((prefix, child))
        return prefix

    descend(model, "", enter)
    return places


# --- values -----------------------------------------------------------------------------------

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

# The name of a tensor, the tensor of a model, and the value that it is to have.
Pairs: TypeAlias = list[tuple[str, Tensor, Tensor]]


def pairs_for(named: NamedTensors, values: Mapping[str, Tensor]) -> Pairs:
    """Pair values with the tensors of a model by name; only buffers may have another shape.

    Args:
        named: The tensors of the model.
        values: The values by name.

    Returns:
        Name, present tensor of the model, and value, in the order of ``values``.

    Raises:
        NameMismatchError: If the model has no tensor of a name, or a parameter of another shape.
    """
    optional = {name: named.member(name) for name in values}
    members = {name: member for name, member in optional.items() if member is not None}
    shapes = {name: member.required_shape() for name, member in members.items()}
    check_match("EMA: the averages do not fit the model", shapes_of(values), shapes)
    # The model may have been sharded after its averages were made.
    currents = {name: members[name].current() for name in values}
    return [
        (name, currents[name], shards_of(value, currents[name])) for name, value in values.items()
    ]


class _DetachedCopies(TorchFunctionMode):
    """Deep-copies results of autograd, which modules may hold as attributes, as values."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copy_of(model: ModelT) -> ModelT:
    """Return a deep copy of a model, which may hold results of autograd.

    Args:
        model: The model.

    Returns:
        The copy.

    Raises:
        AssertionError: If the model is sharded, which torch refuses to copy.
        RuntimeError: If torch refuses to copy a tensor that is not a result of autograd.
        TypeError: If the model holds an object that cannot be copied, such as a lock.
        Exception: Any other error of ``copy.deepcopy``.
    """
    try:
        return _compacted(copy.deepcopy(model))
    except RuntimeError:
        # ``weight_norm``, for one, leaves a computed tensor in its module, which torch refuses to
        # copy. If that was not the reason, the first error is the one to show.
        with _DetachedCopies(), suppress(Exception):
            return _compacted(copy.deepcopy(model))
        raise


def _compacted(model: ModelT) -> ModelT:
    """Return a copy after giving its recurrent layers on CUDA their weights in one piece.

    So cuDNN wants them. Where they are not, torch compacts them at each call, with a warning.
    """
    # ``AveragedModel`` takes any object that can be copied, as torch's does.
    for module in getattr(model, "modules", tuple)():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return model


def check_writable(names: Iterable[str], tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError, by name, for a tensor that cannot be written to, before one is."""
    for name, tensor in zip(names, tensors, strict=True):
        is_inference = tensor.is_inference() and not torch.is_inference_mode_enabled()
        # Several elements of an expanded tensor are one in memory, which torch refuses to write to.
        is_dense = tensor.layout is torch.strided and not is_sharded(tensor)
        is_expanded = is_dense and not tensor.is_contiguous() and 0 in tensor.stride()
        if tensor.is_meta or is_inference or is_expanded:
            raise RuntimeError(
                f"EMA: {name} cannot be written to: it is expanded, on the meta device, or an "
                "inference tensor. Give the model an ordinary tensor, or use applied(), which "
                "exchanges storage. Nothing has been changed."
            )


def write(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values.

    Args:
        tensor: The tensor.
        value: Its values, of any dtype and device; full ones are sharded like the tensor. A buffer
            may have had another shape: then the tensor gets new memory.
    """
    if tensor.shape == value.shape:
        copy_(tensor, shards_of(value, tensor))
    else:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)


_shape_of: Final[Callable[[Tensor], torch.Size]] = operator.attrgetter("shape")


def write_all(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Give tensors other values, in one list if all are plain and keep their shapes."""
    is_plain = PLAIN.issuperset(map(type, chain(tensors, values)))
    # The kernel does not write to lazily conjugated or negated tensors.
    is_plain = is_plain and not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
    if tensors and is_plain and list(map(_shape_of, tensors)) == list(map(_shape_of, values)):
        copy_all_(tensors, values, mixed=True)
    else:
        for tensor, value in zip(tensors, values, strict=True):
            write(tensor, value)
    forget_casts()


# Autocast keeps its casts of parameters until the outermost block ends. A model that has other
# weights now would be called with those that it had before.
forget_casts: Final[Callable[[], None]] = torch.clear_autocast_cache


def is_wrapper(tensor: Tensor) -> bool:
    """Return True for a subclass that wraps other tensors, which ``tensor.data = ...`` would keep.

    It has elements, but no memory of its own.
    """
    if type(tensor) in PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and address_of(tensor) == 0


def address_of(tensor: Tensor) -> int:
    """Return where the elements of a tensor are; 0 if it has no memory of its own."""
    try:
        return local_shard(tensor).data_ptr()
    except RuntimeError:
        # Wrappers, opaque layouts and uninitialized parameters.
        return 0
