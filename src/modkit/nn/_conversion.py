"""Moving and casting the tensors of a module in place, and switching its mode.

A parameter that stands in several places is converted once, and if it has to be replaced by a new
one, the new one is put in all of its places; likewise a buffer. The memory for that lasts from the
outermost call of ``_apply`` to its end, whatever overrides of ``_apply`` lie in between, and is
kept apart for each thread.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch.nn import Parameter

from modkit._messages import (
    META_COPY_REFUSED,
    MSG_APPLY_GRADIENT_NOT_LEAF,
    MSG_APPLY_NO_GRADIENT,
    MSG_APPLY_NOT_A_PARAMETER,
    MSG_APPLY_PARAMETER_NOT_LEAF,
    MSG_COMPLEX_MODULE,
    MSG_TO_DTYPE,
    MSG_USE_TO_EMPTY,
)
from modkit._types import TensorFunction
from modkit._upstream import (
    FakeTensor,
    has_compatible_shallow_copy_type,
    is_traceable_wrapper_subclass,
    parse_to,
)
from modkit.nn._overrides import StandardClasses, TorchModule, has_no_children, methods, walk


Keeps = Callable[[torch.Tensor], bool]


class Replacements(dict[int, tuple[weakref.ref[Any], Any]]):
    """Maps tensors, by identity, to what they were replaced by.

    The references to them are weak, because the memory of a tensor that nobody else holds must be
    free at once: a model may fill the device.
    """

    def find(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor`` was replaced by; None if it was not."""
        reference, replacement = self.get(id(tensor), (None, None))
        # Another tensor may have got the identity of one that is gone.
        return replacement if reference is not None and reference() is tensor else None

    def note(self, tensor: torch.Tensor, replacement: torch.Tensor) -> None:
        """Remember what ``tensor`` was replaced by."""
        self[id(tensor)] = (weakref.ref(tensor), replacement)


class Ties:
    """What a function has been applied to so far.

    Attributes:
        finished: the modules whose own tensors are all converted, by identity.
        converted: the parameters that are results, by identity.
        parameters: the parameters that were replaced, by this function or one around it.
        buffers: the buffers that were replaced, by this function.
    """

    __slots__ = ("buffers", "converted", "finished", "parameters")

    def __init__(self, parameters: Replacements) -> None:
        self.finished: dict[int, torch.nn.Module] = {}
        self.converted: dict[int, torch.Tensor] = {}
        self.parameters = parameters
        self.buffers = Replacements()


class _Running(threading.local):
    """The functions that are being applied in this thread, by identity, outermost first."""

    def __init__(self) -> None:
        self.ties: dict[int, Ties] = {}


_running = _Running()


class Applying:
    """A context in which a function is applied; contexts of the same function share their ties."""

    __slots__ = ("_fn", "_outermost")

    def __init__(self, fn: TensorFunction) -> None:
        self._fn = fn

    def __enter__(self) -> Ties:
        """Return the ties to use."""
        running = _running.ties
        ties = running.get(id(self._fn))
        self._outermost = ties is None
        if ties is None:
            around = next(iter(running.values()), None)
            ties = running[id(self._fn)] = Ties(around.parameters if around else Replacements())
        return ties

    def __exit__(self, *_: object) -> None:
        """Forget what the function has been applied to, at the end of the outermost context."""
        if self._outermost:
            del _running.ties[id(self._fn)]


def apply_to_tensors(module: torch.nn.Module, fn: TensorFunction, *, recurse: bool) -> None:
    """Replace each parameter, its gradient and each buffer by what ``fn`` makes of it.

    Modules below that override ``_apply`` are asked to do it themselves.
    """
    keeps = _what_is_kept(fn)
    if keeps is not None and has_no_children(module) and _keeps_all(module, keeps):
        return
    with Applying(fn) as ties:
        if not recurse:
            _apply_to_own(module, fn, keeps, ties)
            return
        for owner in walk(module, "_apply", lambda child: child._apply(fn)):
            _apply_to_own(owner, fn, keeps, ties)


class Conversion:
    """A function on tensors that can tell, without being called, which ones it leaves alone."""

    __slots__ = ("convert", "keeps")

    def __init__(self, convert: TensorFunction, keeps: Keeps) -> None:
        self.convert = convert
        self.keeps = keeps

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.convert(tensor)


def _what_is_kept(fn: TensorFunction) -> Keeps | None:
    """Return how to tell which tensors need not be exchanged; None if all have to be."""
    if (
        not isinstance(fn, Conversion)
        or torch.__future__.get_overwrite_module_params_on_conversion()
        or torch.__future__.get_swap_module_params_on_conversion()
    ):
        return None
    return fn.keeps


def _keeps_all(module: torch.nn.Module, keeps: Keeps) -> bool:
    """Tell whether nothing in ``module`` has to be exchanged.

    A tensor of any other type than torch's own may do what it likes when it is converted.
    """
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not Parameter or not keeps(parameter):
            return False
        gradient = parameter.grad
        if gradient is not None and not (type(gradient) is torch.Tensor and keeps(gradient)):
            return False
    for buffer in module._buffers.values():
        if buffer is not None and not (type(buffer) is torch.Tensor and keeps(buffer)):
            return False
    return True


def _apply_to_own(
    module: torch.nn.Module, fn: TensorFunction, keeps: Keeps | None, ties: Ties
) -> None:
    if keeps is not None and _keeps_all(module, keeps):
        return
    if id(module) in ties.finished:
        return
    if module._parameters:
        # Parameters are leaves of the graph, so their conversion must not become part of it.
        with torch.no_grad():
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
        while id(current) not in converted and (found := replaced.find(current)) is not None:
            module._parameters[name] = current = found
        if id(current) not in converted:
            result = _convert_parameter(module, name, current, fn)
            converted[id(result)] = result
            if result is not current:
                replaced.note(current, result)


def _convert_buffer(buffer: torch.Tensor, fn: TensorFunction, ties: Ties) -> torch.Tensor:
    # What only acts like a tensor may not allow the weak reference that is noted. A parameter that
    # is also a buffer may be about to be swapped, which weak references forbid.
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


def _may_set_data(tensor: torch.Tensor, converted: torch.Tensor) -> bool:
    """Tell whether ``tensor.data = converted`` is possible and wanted."""
    return (
        has_compatible_shallow_copy_type(tensor, converted)
        and not isinstance(converted, FakeTensor)
        and not torch.__future__.get_overwrite_module_params_on_conversion()
    )


def _convert_parameter(
    module: torch.nn.Module, name: str, parameter: Parameter, fn: TensorFunction
) -> Parameter:
    """Put what ``fn`` makes of ``parameter`` in its place; return the parameter that is there."""
    converted = fn(parameter)
    set_data = _may_set_data(parameter, converted)
    gradient = parameter.grad
    # A wrapper subclass may hold several tensors, which only a swap exchanges all at once.
    swap = (
        torch.__future__.get_swap_module_params_on_conversion()
        or is_traceable_wrapper_subclass(converted)
        or isinstance(parameter, FakeTensor)
    )
    if swap:
        _swap_parameter(module, name, parameter, converted)
        result = parameter
    elif set_data:
        parameter.data = converted
        result = parameter
    else:
        _require_leaf(parameter)
        result = Parameter(converted, parameter.requires_grad)
        module._parameters[name] = result
    if gradient is not None:
        _convert_gradient(module, name, result, gradient, fn, swap=swap)
    return result


def _require_leaf(parameter: torch.Tensor) -> None:
    if not isinstance(parameter, Parameter):
        raise AssertionError(MSG_APPLY_NOT_A_PARAMETER)  # noqa: TRY004 - torch's type
    if not parameter.is_leaf:
        raise AssertionError(MSG_APPLY_PARAMETER_NOT_LEAF)


def _swap_parameter(
    module: torch.nn.Module, name: str, parameter: Parameter, converted: torch.Tensor
) -> None:
    gradient = parameter.grad
    try:
        # A reference from ``.grad`` would count as a second use, which forbids swapping.
        if gradient is not None:
            parameter.grad = None
        replacement = Parameter(converted, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, replacement)
    except Exception as error:
        if gradient is not None:
            parameter.grad = gradient
        message = f"_apply(): Couldn't swap {module._get_name()}.{name}"
        raise RuntimeError(message) from error


def _convert_gradient(
    module: torch.nn.Module,
    name: str,
    result: Parameter,
    gradient: torch.Tensor,
    fn: TensorFunction,
    *,
    swap: bool,
) -> None:
    converted = fn(gradient)
    set_data = _may_set_data(gradient, converted)
    if swap:
        converted.requires_grad_(gradient.requires_grad)
        try:
            torch.utils.swap_tensors(gradient, converted)
        except Exception as error:
            message = f"_apply(): Couldn't swap {module._get_name()}.{name}.grad"
            raise RuntimeError(message) from error
        result.grad = gradient
    elif set_data:
        if result.grad is None:
            raise AssertionError(MSG_APPLY_NO_GRADIENT)
        result.grad.data = converted
    else:
        if not gradient.is_leaf:
            raise AssertionError(MSG_APPLY_GRADIENT_NOT_LEAF)
        result.grad = converted.requires_grad_(gradient.requires_grad)


# A memory format for images is no format for volumes, and the other way round.
_DIMENSIONS: Final = {torch.channels_last: (4,), torch.channels_last_3d: (5,)}


def to_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorFunction:
    """Return what ``Module.to`` with these arguments does to one tensor; check them first."""
    # The stub of the parser does not say that any of the four may be None.
    device, dtype, non_blocking, memory_format = cast("tuple[Any, ...]", parse_to(*args, **kwargs))
    if dtype is not None:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(MSG_TO_DTYPE.format(dtype=dtype))
        if dtype.is_complex:
            warnings.warn(MSG_COMPLEX_MODULE, stacklevel=4)

    dims = _DIMENSIONS.get(memory_format, (4, 5))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        target = dtype if tensor.is_floating_point() or tensor.is_complex() else None
        try:
            if memory_format is not None and tensor.dim() in dims:
                return tensor.to(device, target, non_blocking, memory_format=memory_format)
            return tensor.to(device, target, non_blocking)
        except NotImplementedError as error:
            before, found, details = str(error).partition(META_COPY_REFUSED)
            if before or not found:
                raise
            raise NotImplementedError(
                MSG_USE_TO_EMPTY.format(refused=META_COPY_REFUSED, details=details)
            ) from None

    def keeps(tensor: torch.Tensor) -> bool:
        return (
            dtype is None
            or tensor.dtype is dtype
            or not (tensor.is_floating_point() or tensor.is_complex())
        ) and (device is None or tensor.device == device)

    return Conversion(convert, keeps) if memory_format is None else convert


def cast_function(method: str, dtype: torch.dtype) -> TensorFunction:
    """Return a cast by ``tensor.<method>()`` that leaves all but floating point tensors alone."""

    def convert(tensor: torch.Tensor) -> Any:
        return getattr(tensor, method)() if tensor.is_floating_point() else tensor

    def keeps(tensor: torch.Tensor) -> bool:
        return tensor.dtype is dtype or not tensor.is_floating_point()

    # A new object for each call, since the ties of one that is being applied are found by it.
    return Conversion(convert, keeps)


_SETATTR: Final = methods("__setattr__")


class _PlainClasses(StandardClasses):
    """Tells for which classes setting the mode is writing ``training`` to the instance."""

    def __missing__(self, cls: type) -> bool:
        plain = (
            super().__missing__(cls)
            and getattr(cls, "training", None) is None
            and cast("Any", super)(TorchModule, cls).__setattr__ is object.__setattr__
        )
        self[cls] = plain
        return plain


def set_training(module: torch.nn.Module, mode: bool) -> None:
    """Set ``training`` on ``module`` and all below it, parents first."""
    if not isinstance(cast("object", mode), bool):
        raise ValueError("training mode is expected to be boolean")  # noqa: TRY004 - torch's type
    module.training = mode
    if has_no_children(module):
        return
    plain = _PlainClasses(_SETATTR)
    below = walk(module, "train", lambda child: child.train(mode), parents_first=True)
    next(below)
    for each in below:
        if plain[type(each)]:
            each.__dict__["training"] = mode
        else:
            each.training = mode
