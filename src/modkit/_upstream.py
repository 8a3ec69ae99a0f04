"""The only file that names private parts of torch, each with the reason it is needed.

The tests run with torch 2.8.0, 2.13.0 and 2.15.0. All of these have all names, and those of
``modkit/jit/_upstream.py``, except:

| name | in torch | in other releases |
|---|---|---|
| ``FSDPState._fsdp_param_groups`` | since 2.12 | ``_fsdp_param_group``: one, or None |
| ``DataParallelMeshInfo.is_spmd_mesh`` | since 2.12 | False |
| ``import_ir_module`` | builds that read TorchScript | ``jit.load`` refuses |
| ``torch.jit._script._magic_methods`` | unless ``PYTORCH_JIT=0`` | empty |

- ``get_tracing_state`` is truthy while ``torch.jit.trace`` runs; the scopes of its graph come from
  ``_slow_forward``. No public function tells so without importing ``torch.jit``. ``is_tracing`` tells
  the same in half the time, but dynamo does not know it.
- ``is_scripting`` is what TorchScript reads as a constant; the public name is one of ``torch.jit``.
- ``jit_trace`` holds the map of modules that is set while a module is traced.
- ``parse_to`` parses the four forms of ``Module.to``; its errors are documented behaviour.
- ``FakeTensor`` and ``is_traceable_wrapper_subclass``: the two kinds of tensor whose ``.data``
  must not be set when a module is converted.
- ``IncompatibleKeys`` and ``EXTRA_STATE_KEY``: Lightning and transformers import them by name and
  compare types, so loading returns torch's class and uses torch's key.
- ``WrappedHook`` holds its module weakly; spectral_norm and others look for the class.
- ``foreach_*``: one launch for a list of tensors; torch's averages use the same kernels, and so
  get the same bits. ``foreach_devices`` names the devices where they are fused.
- ``tensor_guard`` is what dynamo asks before it runs compiled code: whether tensors are as they were,
  in a loop in C++. Python would need longer to ask than an update of an average takes.
- ``BatchNormBase`` is the base of every batch normalization layer, users' own included.
- ``BackwardHook`` stands for the autograd side of full backward hooks in compiled code: dynamo
  knows the class. ``pass_through_one_node`` is the autograd function that it uses.
- ``trace_instead`` sets the attribute that tells dynamo which function to trace for another one.
- ``module_globals`` holds the tables of global hooks. They are looked up at each use, because torch
  and its tests rebind some of the names.
- ``modes_are_active``: torch has no public function that says if a mode, such as a default device or
  fake tensors, changes what functions of torch do. ``tensors_are_fake`` asks for the second alone.
- ``recurrent_kernels`` holds the functions that recurrent layers call.
- ``has_torch_function`` and ``cudnn_is_enabled`` are what the functions of ``torch.nn.functional`` ask before
  they call a kernel; ``fast_inference`` calls the kernel itself.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.nn.modules.module as module_globals
from torch._C import _get_tracing_state
from torch._C._nn import _parse_to as parse_to
from torch._jit_internal import is_scripting
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import _trace as jit_trace
from torch.nn.modules._functions import BackwardHookFunction as _BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.module import (
    _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY,
    _IncompatibleKeys as IncompatibleKeys,
    _WrappedHook as WrappedHook,
)
from torch.overrides import has_torch_function_variadic as has_torch_function
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as foreach_devices
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _is_wrapper_subclass
from torch.utils.hooks import BackwardHook, RemovableHandle


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

__all__ = [
    "EXTRA_STATE_KEY",
    "BackwardHook",
    "BatchNormBase",
    "FakeTensor",
    "IncompatibleKeys",
    "RemovableHandle",
    "WrappedHook",
    "cudnn_is_enabled",
    "foreach_copy_",
    "foreach_devices",
    "foreach_lerp_",
    "foreach_norm",
    "get_tracing_state",
    "has_compatible_shallow_copy_type",
    "has_torch_function",
    "is_scripting",
    "is_traceable_wrapper_subclass",
    "is_tracing",
    "jit_trace",
    "layer_loaders",
    "make_parameter",
    "modes_are_active",
    "module_globals",
    "original_methods",
    "parse_to",
    "pass_through_one_node",
    "recurrent_kernels",
    "skip_frame",
    "storage_identity",
    "tensor_guard",
    "tensors_are_fake",
    "trace_instead",
]

# The stub of torch does not say that there may be no state.
cudnn_is_enabled = cast("Callable[[], bool]", cast("Any", torch._C)._get_cudnn_enabled)
get_tracing_state = cast("Callable[[], object | None]", _get_tracing_state)
is_tracing = cast("Callable[[], bool]", cast("Any", torch._C)._is_tracing)

recurrent_kernels = cast("Any", torch)._VF

# What ``Parameter(tensor)`` comes down to for a plain tensor, without the questions in Python.
make_parameter: Callable[[torch.Tensor, bool], torch.nn.Parameter] = partial(
    cast("Any", torch.Tensor)._make_subclass, torch.nn.Parameter
)

foreach_lerp_ = torch._foreach_lerp_
foreach_norm = cast("Any", torch)._foreach_norm
foreach_copy_ = torch._foreach_copy_


def _as_torch_wrote_it(value: Any) -> Any:
    """Look behind a function that was patched into ``torch.nn.Module`` before this import.

    Dynamo's own patches, like most, have the function that they wrap in their closure.
    """
    while isinstance(value, FunctionType) and value.__code__.co_filename != module_globals.__file__:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        value = next((found for found in cells if isinstance(found, FunctionType)), None)
    return value


# The attributes of ``torch.nn.Module`` as torch wrote them. Libraries replace some, accelerate for
# instance to initialize models on the meta device, and those must then be the ones that run.
original_methods: dict[str, Any] = {
    name: _as_torch_wrote_it(value) for name, value in vars(torch.nn.Module).items()
}

# What torch's own layers do when they load: no more than to migrate the entries that they are given.
layer_loaders = frozenset(
    (BatchNormBase._load_from_state_dict, torch.nn.InstanceNorm1d._load_from_state_dict)
)


def pass_through_one_node(tensors: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return views of ``tensors`` that come from one autograd node, and the node."""
    views: tuple[torch.Tensor, ...] = cast("Any", _BackwardHookFunction).apply(*tensors)
    for view in views:
        node = view.grad_fn
        if node is not None and node.name() == "BackwardHookFunctionBackward":
            return views, node
    raise RuntimeError(
        "Error while setting up backward hooks. Please open "
        "an issue with a code sample to reproduce this."
    )


def has_compatible_shallow_copy_type(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether ``tensor.data = other`` is possible; the check has no public name."""
    compatible: bool = cast("Any", torch)._has_compatible_shallow_copy_type(tensor, other)
    return compatible


def is_traceable_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` wraps other tensors; torch's guard would narrow to a protocol."""
    return bool(_is_wrapper_subclass(tensor))


def storage_identity(tensor: torch.Tensor) -> int:
    """Return what two tensors have in common that look at the same memory, meta ones included."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def trace_instead(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let dynamo trace ``original`` wherever compiled code calls ``function``."""
    cast("Any", function)._torchdynamo_inline = original


def skip_frame(function: FunctionT) -> FunctionT:
    """Let dynamo capture what ``function`` calls rather than ``function`` itself.

    Torch's own call path is in dynamo's list of files to skip, so a graph begins at ``forward``: its
    inputs are named after those of ``forward``, and hooks around it run outside. A tag on the code
    object does the same for ours; inside of compiled code it is inlined all the same.
    """
    frames = cast("Any", torch._C)._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return what tells whether strided tensors have the type, shape and place that they have now.

    It is None where this torch has none, and false where gradients or autocast are set otherwise.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return None
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [[None] * tensor.dim() for tensor in tensors]
    made = cast("Any", guards).TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    return cast("Callable[[], bool]", partial(made.check, *tensors))


def modes_are_active() -> bool:
    """Return True inside a mode that changes what functions of torch do, or what it loads of files."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(modes or cast("Any", torch.serialization)._serialization_tls.skip_data)


def tensors_are_fake() -> bool:
    """Return True inside a mode in which ``torch.load`` makes tensors without memory."""
    return bool(cast("Any", torch)._guards.detect_fake_mode(None))
