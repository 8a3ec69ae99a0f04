"""Loading one entry of a state dict: the check, and the three ways to write it."""

import warnings
from typing import Any, Final, TypeAlias

import torch
from torch.nn import Parameter

from modkit._errors import (
    MSG_LOAD_FAILED,
    MSG_LOAD_NOT_A_TENSOR,
    MSG_LOAD_SIZE,
    MSG_META_COPY,
    MSG_MODULE_LOAD_ALIAS,
)
from modkit._upstream import storage_identity


# Module, name in the module, key in the state dict, the tensor there now, the value to load.
Entry: TypeAlias = tuple[torch.nn.Module, str, str, torch.Tensor, Any]

# Tensors of exactly these types are initialized, and do nothing unusual when they are compared or
# copied.
PLAIN_TENSORS: Final = frozenset({torch.Tensor, Parameter})


class Problems(list[str]):
    """The ``error_msgs`` of one load, which also carries what that load as a whole shares.

    Every module's ``_load_from_state_dict`` is handed this list, through whatever overrides there
    are, so nothing of one load can leak into another one.
    """

    __slots__ = ("found", "planned", "ties")

    def __init__(self, planned: list[Entry] | None = None) -> None:
        super().__init__()
        # Where the entries of a load that is checked as a whole wait to be written.
        self.planned = planned
        # The keys of such a load that belong to something.
        self.found: set[str] = set()
        # For ``assign``: which parameter has taken the place of which, by what it was made of.
        # The old tensor and the value are held so that neither identity is used again.
        self.ties: dict[Any, tuple[torch.Tensor, Any, Parameter]] = {}


def check(key: str, target: torch.Tensor, value: Any) -> tuple[Any, str | None]:
    """Return the value to load into ``target``, and what is wrong with it, if anything."""
    if type(value) not in PLAIN_TENSORS and not torch.overrides.is_tensor_like(value):
        return value, MSG_LOAD_NOT_A_TENSOR.format(key=key, kind=type(value))
    # An uninitialized parameter has no shape to compare; its module's own hook has materialized
    # it if the checkpoint holds a real tensor.
    if type(target) not in PLAIN_TENSORS and torch.nn.parameter.is_lazy(target):
        return value, None
    if value.shape != target.shape:
        # Checkpoints from before torch 0.4 hold scalars as one element.
        if target.dim() == 0 and tuple(value.shape) == (1,):
            return value[0], None
        return value, MSG_LOAD_SIZE.format(key=key, theirs=value.shape, ours=target.shape)
    return value, None


def write(entry: Entry, *, assign: bool, problems: Any) -> str | None:
    """Write one checked entry; return what went wrong, or None."""
    module, name, key, target, value = entry
    warn_if_meta(entry, assign=assign)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    try:
        with torch.no_grad():
            if swap:
                _swap_in(target, value, assign=assign)
            elif assign:
                _assign(module, name, target, value, problems)
            else:
                target.copy_(value)
    except Exception as error:  # noqa: BLE001 - all problems are reported together
        return MSG_LOAD_FAILED.format(
            action="swapping" if swap else "copying",
            key=key,
            ours=target.size(),
            theirs=value.size(),
            reason=error.args,
        )
    return None


def warn_if_meta(entry: Entry, *, assign: bool) -> None:
    """Warn that a copy to the meta device does nothing."""
    _, _, key, target, value = entry
    if target.is_meta and not value.is_meta and not assign:
        warnings.warn(MSG_META_COPY.format(key=key), stacklevel=6)


def _as_parameter(value: torch.Tensor, *, requires_grad: bool) -> Parameter:
    if isinstance(value, Parameter):
        value.requires_grad_(requires_grad)
        return value
    return Parameter(value, requires_grad=requires_grad)


def _same_data(target: torch.Tensor, value: torch.Tensor) -> Any:
    """Return a key that is equal for one parameter loaded twice from the same data."""
    if type(value) not in PLAIN_TENSORS or value.layout is not torch.strided:
        return id(target), id(value)
    view = (value.dtype, value.storage_offset(), value.shape, value.stride())
    return id(target), storage_identity(value), view


def _assign(
    module: torch.nn.Module, name: str, target: torch.Tensor, value: torch.Tensor, problems: Any
) -> None:
    if isinstance(target, Parameter):
        requires_grad = target.requires_grad
        if isinstance(problems, Problems):
            # A tied parameter stays tied if the checkpoint holds the same data under its names.
            key = _same_data(target, value)
            if key not in problems.ties:
                parameter = _as_parameter(value, requires_grad=requires_grad)
                problems.ties[key] = (target, value, parameter)
            value = problems.ties[key][2]
        else:
            value = _as_parameter(value, requires_grad=requires_grad)
    setattr(module, name, value)


def _swap_in(target: torch.Tensor, value: torch.Tensor, *, assign: bool) -> None:
    loaded = target.module_load(value, assign=assign)
    if loaded is value or loaded is target:
        raise RuntimeError(MSG_MODULE_LOAD_ALIAS)
    if isinstance(target, Parameter):
        loaded = _as_parameter(loaded, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, loaded)
