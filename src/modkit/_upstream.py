"""The only file that names private parts of torch, each with the reason it is needed.

The tests run with torch 2.8.0, 2.13.0 and 2.15.0. All of these have all names, and those of
``modkit/jit/_upstream.py``, except:

| name | in torch | in other releases |
|---|---|---|
| ``import_ir_module`` | builds that read TorchScript | ``jit.load`` refuses |
| ``torch.jit._script._magic_methods`` | unless ``PYTORCH_JIT=0`` | empty |

- ``get_tracing_state`` is truthy while ``torch.jit.trace`` runs; no public function says so without
  importing ``torch.jit``. ``is_tracing`` takes half the time, but dynamo does not know it.
- ``is_scripting`` is what TorchScript reads as a constant; the public name is one of ``torch.jit``.
- ``jit_trace`` holds the map of modules that is set while a module is traced.
- ``parse_to`` parses the four forms of ``Module.to``; its errors are documented behaviour.
- ``IncompatibleKeys`` and ``EXTRA_STATE_KEY``: Lightning and transformers import them by name.
- ``WrappedHook`` holds its module weakly; spectral_norm and others look for the class.
- ``foreach_*``: one launch for a list of tensors; bitwise identical to torch, which uses them too.
  ``foreach_devices`` names the devices where they are fused.
- ``tensor_guard`` checks in C++ whether tensors are as they were, as dynamo does before compiled code.
- ``BatchNormBase``: the base of every batch normalization layer, users' own included.
- ``trace_instead`` sets the attribute that tells dynamo which function to trace for another one.
- ``module_globals`` holds the tables of global hooks, looked up at each use, because torch and its
  tests rebind some of the names.
- ``modes_are_active``, ``tensors_are_fake``: torch has no public function for active modes.
- ``recurrent_kernels``, ``has_torch_function``, ``cudnn_is_enabled``: what ``torch.nn.functional`` and
  recurrent layers call; ``fast_inference`` calls them itself.
- ``_weights_only_unpickler``, ``_load``: the list of names that torch reads belongs to the process, so
  one file cannot have more of them without a copy of the function that reads the list.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import IO, Any, TypeVar, cast

import torch
import torch.nn.modules.module as module_globals
from torch._C import _get_tracing_state
from torch._C._nn import _parse_to as parse_to
from torch._jit_internal import is_scripting
from torch.jit import _trace as jit_trace
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.module import (
    _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY,
    _IncompatibleKeys as IncompatibleKeys,
    _WrappedHook as WrappedHook,
)
from torch.overrides import has_torch_function_variadic as has_torch_function
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as foreach_devices
from torch.utils.hooks import BackwardHook, RemovableHandle


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Imported names that other files import from here; names defined below need no entry.
__all__ = [
    "EXTRA_STATE_KEY",
    "BackwardHook",
    "BatchNormBase",
    "IncompatibleKeys",
    "RemovableHandle",
    "WrappedHook",
    "foreach_devices",
    "has_torch_function",
    "is_scripting",
    "jit_trace",
    "module_globals",
    "parse_to",
]

# The stub of torch does not say that there may be no state.
cudnn_is_enabled = cast("Callable[[], bool]", cast("Any", torch._C)._get_cudnn_enabled)
get_tracing_state = cast("Callable[[], object | None]", _get_tracing_state)
is_tracing = cast("Callable[[], bool]", cast("Any", torch._C)._is_tracing)

recurrent_kernels = cast("Any", torch)._VF

# The essence of ``Parameter(tensor)`` for a plain tensor, without the checks in Python.
make_parameter: Callable[[torch.Tensor, bool], torch.nn.Parameter] = partial(
    cast("Any", torch.Tensor)._make_subclass, torch.nn.Parameter
)

foreach_lerp_ = torch._foreach_lerp_
foreach_norm = cast("Any", torch)._foreach_norm
foreach_copy_ = torch._foreach_copy_


def _as_torch_wrote_it(value: Any) -> Any:
    # A function that was patched in before this import, by dynamo for instance, mostly has the one
    # that it wraps in its closure.
    while isinstance(value, FunctionType) and value.__code__.co_filename != module_globals.__file__:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        value = next((found for found in cells if isinstance(found, FunctionType)), None)
    return value


# The attributes of ``torch.nn.Module`` as torch wrote them. Libraries replace some, as accelerate does
# to initialize models on the meta device, and the replacements must then run.
original_methods: dict[str, Any] = {
    name: _as_torch_wrote_it(value) for name, value in vars(torch.nn.Module).items()
}

# The loading methods of torch's own layers, which only migrate the entries that they are given.
layer_loaders = frozenset(
    (BatchNormBase._load_from_state_dict, torch.nn.InstanceNorm1d._load_from_state_dict)
)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they share memory, meta tensors included."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def trace_instead(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let dynamo trace ``original`` wherever compiled code calls ``function``."""
    cast("Any", function)._torchdynamo_inline = original


def skip_frame(function: FunctionT) -> FunctionT:
    """Let dynamo capture what ``function`` calls, but not ``function`` itself.

    Dynamo skips the file of torch's own call path, so a graph begins at ``forward``, and hooks around
    it run outside. A tag on the code object does the same for ours.
    """
    frames = cast("Any", torch._C)._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a check that strided tensors keep their type, shape and address; None if torch has none.

    It fails under another grad mode or autocast.
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


def readable_globals() -> dict[str, Any]:
    """Return the classes and functions that ``torch.load(weights_only=True)`` reads now, by name."""
    theirs = cast("Any", torch)._weights_only_unpickler
    return {**theirs._get_allowed_globals(), **allowed_by_user()}


def allowed_by_user() -> dict[str, Any]:
    """Return what ``torch.serialization.safe_globals`` and ``add_safe_globals`` allow now, by name."""
    found: dict[str, Any] = cast("Any", torch)._weights_only_unpickler._get_user_allowed_globals()
    return found


def load_with_names(
    file: IO[bytes], map_location: Any, names: Mapping[str, Any], mapped: str | None
) -> Any:
    """Load as ``torch.load(weights_only=True)`` does, with further names, from a path if mapped.

    It changes nothing that other threads see.
    """
    theirs: Any = cast("Any", torch)._weights_only_unpickler
    load = theirs.Unpickler.load
    scope = {**vars(theirs), "_get_user_allowed_globals": lambda: {**allowed_by_user(), **names}}
    rest = load.__name__, load.__defaults__, load.__closure__
    own = {"load": FunctionType(load.__code__, scope, *rest)}
    module = SimpleNamespace(Unpickler=type("Unpickler", (theirs.Unpickler,), own))

    whole = None
    if mapped is not None:
        size = os.fstat(file.fileno()).st_size
        whole = torch.UntypedStorage.from_file(mapped, shared=False, nbytes=size)
    private: Any = torch.serialization
    with private._open_zipfile_reader(file) as reader:
        return private._load(reader, map_location, module, overall_storage=whole, encoding="utf-8")


def modes_are_active() -> bool:
    """Return True inside a mode that changes what functions of torch do, or skips data of files."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(modes or cast("Any", torch.serialization)._serialization_tls.skip_data)


def tensors_are_fake() -> bool:
    """Return True inside a mode in which ``torch.load`` makes tensors without memory."""
    return bool(cast("Any", torch)._guards.detect_fake_mode(None))
