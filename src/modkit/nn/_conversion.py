"""Moving and casting the tensors of a module in place, and switching its mode.

A parameter that is registered in several places is converted once, and if it is replaced by a new
one, the new one is put in all of its places; likewise a buffer. What was converted is remembered
for each thread from the outermost call of ``_apply`` to its end, across overrides of ``_apply``.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
from torch.nn import Parameter

from modkit._upstream import original_methods, parse_to
from modkit.nn._overrides import TorchModule, patchable, walk


ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class Replacements(dict[int, tuple[weakref.ref[Any], Any]]):
    """Maps tensors, by identity, to what they were replaced by.

    References to the tensors are weak: the memory of a tensor that nothing else holds must be free
    at once, as a model may fill the device.
    """

    def find(self, tensor: torch.Tensor) -> Any:
        """Return the replacement of a tensor."""
        reference, replacement = self.get(id(tensor), (None, None))
        # Another tensor may have got the identity of one that is gone.
        return replacement if reference is not None and reference() is tensor else None

    def note(self, tensor: torch.Tensor, replacement: torch.Tensor) -> None:
        """Remember what a tensor was replaced by."""
        self[id(tensor)] = (weakref.ref(tensor), replacement)


class Ties(NamedTuple):
    """The progress of a function; modules and parameters by identity."""

    finished: dict[int, torch.nn.Module]  # all of their own tensors are converted
    converted: dict[int, torch.Tensor]  # parameters that are results
    parameters: Replacements  # by this function or one around it
    buffers: Replacements


class _Running(threading.local):
    """The functions that are being applied in this thread, by identity, outermost first."""

    def __init__(self) -> None:
        self.ties: dict[int, Ties] = {}
        # Those that torch's own method applies.
        self.plain: set[int] = set()


_running: Final = _Running()
_DEEPEST: Final = 100


@patchable
def _apply(self: ModuleT, fn: TensorFunction, recurse: bool = True) -> ModuleT:
    """Replace every parameter, gradient and buffer by ``fn`` of it; return this module.

    Modules below that override ``_apply`` are called, with ``fn`` alone as in torch.

    Args:
        self: The module.
        fn: Returns a tensor for a tensor, which may be the same one.
        recurse: Whether modules below are converted too.

    Returns:
        This module.

    Raises:
        RecursionError: If a module contains itself.

    modkit: A tensor that is registered in several places is converted once, and stays one tensor.
    A module that contains itself raises a RecursionError that names it.
    """
    plain = _running.plain
    if id(fn) in plain:
        return cast("ModuleT", original_methods["_apply"](self, fn, recurse))
    # An override may call this with a function of its own, for a part of what is being converted.
    if not _running.ties and _is_simple(self):
        plain.add(id(fn))
        try:
            return cast("ModuleT", original_methods["_apply"](self, fn, recurse))
        finally:
            plain.discard(id(fn))

    running = _running.ties
    is_outermost = id(fn) not in running
    if is_outermost:
        around = next(iter(running.values()), None)
        replaced = around.parameters if around else Replacements()
        running[id(fn)] = Ties({}, {}, replaced, Replacements())
    ties = running[id(fn)]

    def convert(owner: torch.nn.Module, _: object) -> None:
        _apply_to_own(owner, fn, ties)

    try:
        if recurse:
            walk(self, _apply, fn, convert)
        _apply_to_own(self, fn, ties)
    finally:
        if is_outermost:
            del running[id(fn)]
    return self


def _is_simple(root: Any) -> bool:
    """Return True if each module and tensor of a tree is in one place: torch's method will do."""
    level, members = [root], list[Any]()
    met = {id(root)}
    number = 1
    # Torch's method recurses.
    for _ in range(_DEEPEST):
        try:
            for module in level:
                members += module._parameters.values()
                if module._buffers:
                    members += module._buffers.values()
            level = [c for module in level for c in module._modules.values() if c is not None]
        except AttributeError:
            # A table may hold what is not a module.
            return False
        if not level:
            tensors = [id(tensor) for tensor in members if tensor is not None]
            return len({*tensors}) == len(tensors)
        met.update(map(id, level))
        number += len(level)
        if len(met) < number:
            return False
    return False


def _apply_to_own(module: torch.nn.Module, fn: TensorFunction, ties: Ties) -> None:
    if id(module) in ties.finished:
        return
    if module._parameters:
        _convert_parameters(module, fn, ties)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _convert_buffer(buffer, fn, ties)
    ties.finished[id(module)] = module


def _convert_parameters(module: torch.nn.Module, fn: TensorFunction, ties: Ties) -> None:
    converted, replaced = ties.converted, ties.parameters
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue

        current = parameter
        # An override may have replaced once more what was replaced around it.
        while id(current) not in converted:
            replacement = replaced.find(current)
            if replacement is None:
                break
            current = replacement
            module._parameters[name] = replacement

        if id(current) not in converted:
            # Torch's method, on a stand-in that has this parameter alone: what happens to its data,
            # its gradient and to tensor subclasses is torch's own. The name is in its errors.
            stand_in: Any = object.__new__(TorchModule)
            parameters = {name: current}
            stand_in.__dict__.update(
                _parameters=parameters, _buffers={}, _get_name=module._get_name
            )
            try:
                original_methods["_apply"](stand_in, fn, False)
            finally:
                # Torch may have replaced the parameter and then failed to convert its gradient.
                result = parameters[name]
                if result is not current:
                    module._parameters[name] = result
                    replaced.note(current, result)
            converted[id(result)] = result


def _convert_buffer(buffer: torch.Tensor, fn: TensorFunction, ties: Ties) -> torch.Tensor:
    # A tensor-like object may not allow the weak reference that is noted. A parameter that is also
    # a buffer may be about to be swapped, which weak references forbid.
    if type(buffer) is not torch.Tensor and (
        isinstance(buffer, Parameter) or not isinstance(cast("object", buffer), torch.Tensor)
    ):
        return fn(buffer)
    replaced = ties.buffers
    result: torch.Tensor | None = replaced.find(buffer) if id(buffer) in replaced else None
    if result is None:
        result = fn(buffer)
        replaced.note(buffer, result)
    return result


# A memory format for images does not fit volumes, and vice versa.
_DIMENSIONS: Final = {torch.channels_last: 4, torch.channels_last_3d: 5}


@patchable
def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Move and cast parameters and buffers in place; return this module.

    Takes the arguments of ``torch.Tensor.to``. A dtype applies to floating point and complex
    tensors only.

    Args:
        self: The module.
        *args: A device, a dtype, a device and a dtype, or a tensor that has both.
        **kwargs: ``device``, ``dtype``, ``non_blocking``, ``memory_format``, as for a tensor.

    Returns:
        This module.

    Raises:
        TypeError: If the dtype is neither floating point nor complex.
        NotImplementedError: If a tensor on the meta device has no data to move; see ``to_empty``.
        RecursionError: If a module contains itself.

    modkit: A tensor that is registered in several places is converted once and stays one tensor,
    also if the conversion replaces it, as on the way to the meta device. A memory format applies to
    tensors with its number of dimensions: ``channels_last`` to 4, ``channels_last_3d`` to 5. A
    module that contains itself raises a RecursionError that names it.
    """
    # The stub of the parser does not say that any of the four may be None.
    device, dtype, non_blocking, memory_format = cast("tuple[Any, ...]", parse_to(*args, **kwargs))
    if memory_format not in _DIMENSIONS:
        return original_methods["to"](self, *args, **kwargs)

    if device is not None or dtype is not None:
        original_methods["to"](self, device, dtype, non_blocking)

    def converted(t: torch.Tensor) -> torch.Tensor:
        return t.to(memory_format=memory_format) if t.dim() == _DIMENSIONS[memory_format] else t

    return self._apply(converted)


@patchable
def apply(self: ModuleT, fn: Callable[[torch.nn.Module], None]) -> ModuleT:
    """Call ``fn`` on every module below this one, then on this one; return this module.

    Args:
        self: The module.
        fn: Called with each module once for each parent that has it; its result is not used.

    Returns:
        This module.

    Raises:
        RecursionError: If a module contains itself.

    modkit: A module that contains itself raises a RecursionError that names it.
    """
    walk(self, apply, fn, lambda child, _: fn(child))
    fn(self)
    return self
