"""Loading one tensor of a state dict: the check before any write, and three ways of writing."""

import re
import warnings
from typing import Any, Final, TypeAlias, cast

import torch
from torch.nn import Parameter

from modkit._upstream import PLAIN, copy_, make_parameter, module_globals, storage_identity


# Module, its dict that holds the tensor, name there, key in the state dict, current tensor, new
# value.
Entry: TypeAlias = tuple[torch.nn.Module, dict[str, Any], str, str, torch.Tensor, Any]

# For ``assign``: the parameter that replaces another one, by what it was made of. The old tensor
# and the value are held so that neither identity is used again.
Ties: TypeAlias = dict[Any, tuple[torch.Tensor, Any, Parameter]]

# Any of these dtypes can be copied to any other.
_PLAIN_DTYPES: Final = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


def check(key: str, target: torch.Tensor, value: Any) -> tuple[Any, str | None]:
    """Check the type and shape of a value; the model is unchanged."""
    if type(value) not in PLAIN and not torch.overrides.is_tensor_like(value):
        return value, (
            f'While copying the parameter named "{key}", '
            "expected torch.Tensor or Tensor-like object from checkpoint but "
            f"received {type(value)}"
        )

    # An uninitialized parameter has no shape to compare; its module's own hook has materialized
    # it if the checkpoint holds a real tensor.
    if torch.nn.parameter.is_lazy(target) or value.shape == target.shape:
        return value, None
    # Checkpoints from before torch 0.4 hold scalars as one element.
    if target.dim() == 0 and tuple(value.shape) == (1,):
        return value[0], None

    return value, (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {target.shape}."
    )


_MISFIT: Final = re.compile(
    r"size mismatch for (?P<name>.*): copying a param with shape torch\.Size\((?P<size>.*)\) from "
    r"checkpoint, the shape in current model is torch\.Size\((?P<expected>.*)\)\."
    r'|While copying the parameter named "(?P<key>.*)", expected torch\.Tensor or Tensor-like '
    r"object from checkpoint but received <class '(?P<type>.*)'>",
    re.DOTALL,
)


def misfit(problem: str) -> tuple[str, str] | None:
    """Return the key of an entry that ``check`` refuses, and why; None for another problem.

    It is read from the text, since modules of other classes report in it.
    """
    match = _MISFIT.fullmatch(problem)
    if match is None:
        return None
    if match["key"] is not None:
        return match["key"], f"not a tensor: {match['type']}"
    return match["name"], f"shape {match['size']}, the model has {match['expected']}"


def warn_if_meta(entry: Entry, *, assign: bool) -> None:
    """Warn that a copy to the meta device does nothing, as torch's module: filters name it."""
    _, _, _, key, target, value = entry
    if target.is_meta and not assign and not value.is_meta:
        text = (
            f"for {key}: copying from a non-meta parameter in the checkpoint to a meta "
            "parameter in the current model, which is a no-op. (Did you mean to "
            "pass `assign=True` to assign items in the state dictionary to their "
            "corresponding key in the module instead of copying them in place?)"
        )
        place = module_globals.__file__, 1, module_globals.__name__
        registry = module_globals.__dict__.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UserWarning, *place, registry)


def may_fail(target: torch.Tensor, value: torch.Tensor, assign: bool) -> bool:
    """Return True if only an attempt shows whether one plain tensor loads into another."""
    dtype = value.dtype
    if assign:
        has_gradients = dtype.is_floating_point or dtype.is_complex
        return target.requires_grad and (not has_gradients or value.is_inference())
    return (
        dtype not in _PLAIN_DTYPES
        or value.layout is not torch.strided
        or value.is_meta
        or target.is_meta
        or _is_of_inference_mode(target)
        # Strided, and no two elements at one place.
        or not target.is_contiguous()
        or (target.dtype is not dtype and target.dtype not in _PLAIN_DTYPES)
    )


def _is_of_inference_mode(tensor: torch.Tensor) -> bool:
    """Return True for a tensor made in inference mode, also if it has other data since.

    A cast outside gives a parameter data that is not of that mode. Only the version counter, which
    it lacks, shows that writes are refused.
    """
    try:
        tensor._version  # noqa: B018 - raises
    except RuntimeError:
        return True
    return False


def try_out(entry: Entry, *, assign: bool) -> list[str]:
    """Find the problem that writing a checked entry would give; the model is unchanged."""
    _, _, _, key, target, value = entry

    # The steps of ``write``, on a copy of the target: their error is the problem.
    try:
        with torch.no_grad():
            if not assign:
                _scratch(target).copy_(value)
            elif isinstance(target, Parameter) and isinstance(value, Parameter):
                before = value.requires_grad
                value.requires_grad_(target.requires_grad)
                value.requires_grad_(before)
            elif isinstance(target, Parameter):
                Parameter(value, requires_grad=target.requires_grad)
    except Exception as error:  # noqa: BLE001 - all problems are reported together
        return [_failure("copying", key, target, value, error)]
    return []


def _scratch(target: torch.Tensor) -> torch.Tensor:
    """Return a tensor that takes and refuses the values that the target does.

    It is the target itself only where every write raises before it changes something.
    """
    if torch.nn.parameter.is_lazy(target):
        return target
    if _is_of_inference_mode(target) and not torch.is_inference_mode_enabled():
        # Torch notices the write to such a tensor only when it has been made.
        with torch.inference_mode():
            return target.clone()
    strides = target.stride() if target.layout is torch.strided else ()
    repeats = any(step == 0 and size > 1 for step, size in zip(strides, target.shape, strict=False))
    return target if repeats else target.clone()


def _failure(action: str, key: str, target: torch.Tensor, value: Any, error: BaseException) -> str:
    return (
        f'While {action} the parameter named "{key}", '
        f"whose dimensions in the model are {target.size()} and "
        f"whose dimensions in the checkpoint are {value.size()}, "
        f"an exception occurred : {error.args}."
    )


def write(entry: Entry, *, assign: bool, ties: Ties | None) -> list[str]:
    """Write one checked entry, in a context without gradients."""
    module, _, name, key, target, value = entry
    swap = torch.__future__.get_swap_module_params_on_conversion()

    try:
        if swap:
            _swap_in(target, value, assign=assign)
        elif assign:
            if isinstance(target, Parameter):
                value = _assigned(target, value, ties)
            setattr(module, name, value)
        elif type(value) in PLAIN:
            copy_(target, value)
        else:
            target.copy_(value)
    except Exception as error:  # noqa: BLE001 - all problems are reported together
        return [_failure("swapping" if swap else "copying", key, target, value, error)]
    return []


def _assigned(target: torch.Tensor, value: torch.Tensor, ties: Ties | None) -> Parameter:
    if ties is None:
        return _as_parameter(value, requires_grad=target.requires_grad)
    # A tied parameter stays tied if the checkpoint holds the same data under its names.
    key = _same_data(target, value)
    if key not in ties:
        parameter = _as_parameter(value, requires_grad=target.requires_grad)
        ties[key] = (target, value, parameter)
    return ties[key][2]


def _as_parameter(value: torch.Tensor, *, requires_grad: bool) -> Parameter:
    if isinstance(value, Parameter):
        value.requires_grad_(requires_grad)
        return value
    make: Any = make_parameter if type(value) is torch.Tensor else Parameter
    return cast("Parameter", make(value, requires_grad))


def _same_data(target: torch.Tensor, value: torch.Tensor) -> Any:
    """Return a key that is equal for one parameter loaded twice from the same data."""
    if type(value) not in PLAIN or value.layout is not torch.strided:
        return id(target), id(value)
    view = (value.dtype, value.storage_offset(), value.shape, value.stride())
    return id(target), storage_identity(value), view


def _swap_in(target: torch.Tensor, value: torch.Tensor, *, assign: bool) -> None:
    loaded = target.module_load(value, assign=assign)
    if loaded is value or loaded is target:
        raise RuntimeError(
            "module_load returned one of self or other, please .detach() "
            "the result if returning one of the inputs in module_load"
        )
    if isinstance(target, Parameter):
        loaded = _as_parameter(loaded, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, loaded)
