"""The only file that names private parts of torch, each with the reason it is needed.

The tests run with each release of torch from 2.8 to 2.15. All of these have all names, and those of
``modkit/jit/_upstream.py``, except:

| name | in torch | in other releases |
|---|---|---|
| ``import_ir_module`` | builds that read TorchScript | ``jit.load`` refuses |
| ``torch._utils._get_sparse_tensors_to_validate`` | since 2.15 | a list of the process |
| ``torch.jit._script._magic_methods`` | unless ``PYTORCH_JIT=0`` | empty |

No name below has a public alternative that does the same. A release of torch may change each of
them without notice; behind the reason stands what breaks then, which the tests of that part show.

- ``jit_trace`` holds the map of modules that is set while a module is traced: ``fast_inference``.
- ``parse_to`` parses the four forms of ``Module.to``; its errors are documented behaviour: ``to``.
- ``IncompatibleKeys``: the type that ``load_state_dict`` returns, imported by Lightning and
  transformers: every load.
- ``foreach_*``: one launch for a list of tensors; bitwise identical to torch, which uses them too.
  ``foreach_devices`` names the devices where they are fused. ``copy_`` and ``copy_all_`` copy where
  XLA would share memory or crash: averages.
- ``flatten`` and ``unflatten`` make and read the buckets of data-parallel training: a view of each
  of many tensors takes twice as long in Python: stochastic rounding.
- ``make_parameter``: the constructor without its checks in Python: loading with ``assign``.
- ``storage_identity``: tensors without memory have no address, so ties among them show in the C++
  object alone: loading tied parameters.
- ``tensor_guard`` checks in C++ whether tensors are as they were, as dynamo does before compiled
  code. Without it, averages compare attributes, which takes longer.
- ``steps_in_progress`` and ``is_allocating_state`` find calls on the stack: of the wrapper around
  ``Optimizer.step``, and of the function of ``torch.distributed.checkpoint`` that calls it for
  another purpose than to train: ``EMA.attach``.
- ``never_compiled`` does what ``torch.compiler.disable`` does, which imports all of dynamo; with
  ``skip_code`` and ``skip_frames``: the number of graphs in compiled code.
- ``module_globals`` holds the tables of global hooks, looked up at each use, because torch and its
  tests rebind some of the names: registration hooks.
- ``modes_are_active``, ``transforms_are_active``, ``tensors_are_fake``: torch has no public
  function for active modes and transforms: loading and ``fast_inference`` inside of them.
- ``restore_of``: the rules of ``map_location``: the fast path of ``load_checkpoint``.
- ``is_meta``, ``shares_all_storages``: what ``torch.load`` does with tensors without memory differs
  between releases: the same path.
- ``has_torch_function``: what ``torch.nn.functional`` asks first; ``fast_inference`` asks itself.
- ``sparse_tensors_to_check``, ``check_sparse_tensors``: what ``torch.load`` checks at its end.
  After an error it keeps them, and checks them with the next file: errors of sparse tensors in
  ``load_checkpoint``.
- ``readable_globals``: the classes and functions that torch reads: the same path.
- ``typed_storage``: what they are given, made without the warning that it is old: the same path.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch
import torch.nn.modules.module as module_globals
from torch._C._nn import _parse_to as parse_to
from torch.jit import _trace as jit_trace
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.overrides import has_torch_function_variadic as has_torch_function
from torch.torch_version import TorchVersion
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as foreach_devices
from torch.utils.hooks import RemovableHandle


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Imported names that other files import from here; names defined below need no entry.
__all__ = [
    "IncompatibleKeys",
    "RemovableHandle",
    "foreach_devices",
    "has_torch_function",
    "jit_trace",
    "module_globals",
    "parse_to",
]

# The last part of the name of extra state in every state dict.
EXTRA_STATE_KEY: Final = "_extra_state"
# The base of every batch normalization layer, users' own included.
BatchNormBase: Final[type[Any]] = cast("Any", torch.nn.BatchNorm1d.__base__)

# The essence of ``Parameter(tensor)`` for a plain tensor, without the checks in Python.
make_parameter: Callable[[torch.Tensor, bool], torch.nn.Parameter] = partial(
    cast("Any", torch.Tensor)._make_subclass, torch.nn.Parameter
)

foreach_lerp_ = torch._foreach_lerp_
foreach_norm = cast("Any", torch)._foreach_norm
_foreach_copy_ = torch._foreach_copy_
_buckets = cast("Any", torch)._utils
# From tensors to one flat tensor, and from that to views of it like other tensors.
flatten: Callable[[list[torch.Tensor]], torch.Tensor] = _buckets._flatten_dense_tensors
unflatten: Callable[..., tuple[torch.Tensor, ...]] = _buckets._unflatten_dense_tensors
_IS_XLA: Callable[[torch.Tensor], bool] = attrgetter("is_xla")

# Types of tensors that have no arithmetic of their own, and do nothing unusual when they are
# compared or copied. A buffer is a Tensor.
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, across dtypes and devices; the copy has memory of its own.

    From XLA to XLA, ``Tensor.copy_`` and ``Tensor.clone`` share memory (torch_xla 2.9). An
    operation in place on the target then reuses it, and the source is lost. The result of an
    operation is not shared.
    """
    target.copy_(torch.stack((source,))[0] if _IS_XLA(source) else source)


def copy_all_(
    targets: list[torch.Tensor], sources: list[torch.Tensor], *, mixed: bool = False
) -> None:
    """Copy each tensor of a list, across dtypes and devices."""
    if mixed and any(map(_IS_XLA, chain(targets, sources))):
        _copy_each_(targets, sources)
    else:
        copier(targets[0], sources[0])(targets, sources)


def _copy_each_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        copy_(target, source)


ListCopier: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor]], object]


def copier(target: torch.Tensor, source: torch.Tensor) -> ListCopier:
    """Return what copies lists of tensors that are like these: the kernel itself where it is safe.

    The list kernel raises or crashes for tensors of XLA beside tensors of other devices, and
    subclasses may have none.
    """
    is_safe = type(target) in PLAIN and type(source) in PLAIN
    is_safe = is_safe and not (_IS_XLA(target) or _IS_XLA(source))
    return _foreach_copy_ if is_safe else _copy_each_


def _as_torch_wrote_it(value: Any) -> Any:
    """Return the function of torch behind a patch.

    A function that was patched in before this import, by dynamo for instance, mostly has the one
    that it wraps in its closure.
    """
    reached = [value]
    for each in reached:
        code = getattr(each, "__code__", None)
        if code is None or code.co_filename == module_globals.__file__:
            return each
        # A recursive function holds itself, and one that was deleted since has an empty cell.
        held = [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
        reached += [one for one in held if isinstance(one, FunctionType) and one not in reached]
    return None


# The attributes of ``torch.nn.Module`` as torch wrote them. Libraries replace some, as accelerate
# does to initialize models on the meta device, and the replacements must then run.
original_methods: dict[str, Any] = {
    name: _as_torch_wrote_it(value) for name, value in vars(torch.nn.Module).items()
}


# The loading methods of torch's own layers, which only migrate the entries that they are given.
layer_loaders = frozenset(
    (BatchNormBase._load_from_state_dict, torch.nn.InstanceNorm1d._load_from_state_dict)
)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they share memory, meta tensors included."""
    # The address of the storage's C++ object, valid while the storage lives.
    return cast("int", tensor.untyped_storage()._cdata)


def skip_code(code: CodeType, calls: str = "DEFAULT") -> None:
    """Let dynamo run a code object in eager mode, unless it traces the caller."""
    frames = cast("Any", torch._C)._dynamo.eval_frame
    actions = frames._FrameAction
    frames.set_code_exec_strategy(
        code, frames._FrameExecStrategy(actions.SKIP, getattr(actions, calls))
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            skip_code(constant, calls)


def skip_frames(file: ModuleType) -> None:
    """Let dynamo treat the functions of a file as those of ``torch/nn/modules/module.py``.

    Dynamo traces them where compiled code calls them. Called after a graph break, they run as they
    are: a frame of its own would be one more graph, and tables of hooks in it would become copies.
    """
    members = [*vars(file).values()]
    for cls in [member for member in members if isinstance(member, type)]:
        members += vars(cls).values()
    functions = [member for member in members if isinstance(member, FunctionType)]
    # A decorator puts a function of its own file in front of the one that it decorates.
    codes = [inspect.unwrap(function).__code__ for function in functions]
    codes += [function.__code__ for function in functions]

    for code in codes:
        if code.co_filename == file.__file__:
            skip_code(code)


def never_compiled(function: FunctionT) -> FunctionT:
    """Let dynamo run a function, and all that it calls, in eager mode: one graph break.

    Unlike ``torch.compiler.disable``, it neither imports dynamo nor adds a frame to eager calls.
    """
    skip_code(function.__code__, calls="SKIP")
    cast("Any", function)._torchdynamo_disable = True
    return function


# The function inside ``Optimizer.profile_hook_step`` that runs the hooks around ``step()``.
_STEP_WRAPPER: Final = "wrapper"
_OPTIMIZER_FILE: Final = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
# Copies of this function in other libraries have the same name.
_ALLOCATES_STATE: Final = "_init_optim_state"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def steps_in_progress() -> list[torch.optim.Optimizer]:
    """Return the optimizers whose ``step()`` is running in this thread, innermost first."""
    calls = (
        frame
        for frame in _frames()
        if frame.f_code.co_name == _STEP_WRAPPER and frame.f_code.co_filename == _OPTIMIZER_FILE
    )
    # The wrapper takes any arguments; the first is the optimizer.
    return [frame.f_locals["args"][0] for frame in calls]


def is_allocating_state() -> bool:
    """Return True in a step that trains nothing.

    ``torch.distributed.checkpoint`` allocates an optimizer's state by one: it sets learning rates
    and gradients to zero, and calls ``step(closure=None)``.
    """
    return any(frame.f_code.co_name == _ALLOCATES_STATE for frame in _frames())


def step_hooks(optimizer: object) -> object | None:
    """Return the table of hooks before each step; wrappers share it with the optimizer inside."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", None)


def runs_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if torch has wrapped ``step()`` to run hooks, as ``Optimizer.__init__`` does."""
    # It has not for a class that replaces ``step`` later.
    return bool(getattr(type(optimizer).step, "hooked", False))


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a check that strided tensors keep their type, shape and address.

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
    """Return the classes and functions that ``torch.load(weights_only=True)`` reads now."""
    theirs = cast("Any", torch)._weights_only_unpickler
    return {**theirs._get_allowed_globals(), **allowed_by_user()}


def allowed_by_user() -> dict[str, Any]:
    """Return what ``torch.serialization.safe_globals`` and ``add_safe_globals`` allow now."""
    allowed: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            value, name = entry
        else:
            value, name = entry, f"{entry.__module__}.{entry.__qualname__}"
        allowed[name] = value
    return allowed


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage as torch's functions that rebuild tensors expect it."""
    # Its constructor takes longer than to read a small storage.
    typed: Any = object.__new__(torch.TypedStorage)
    typed._untyped_storage, typed.dtype = storage, dtype
    return cast("torch.TypedStorage", typed)


# Before, ``torch.load`` allocates again what has no address: tied tensors without memory or
# elements.
shares_all_storages = TorchVersion(torch.__version__) >= "2.15"


def sparse_tensors_to_check() -> list[torch.Tensor]:
    """Return the list of tensors that ``torch.load`` of this thread will check."""
    # The list itself. Before torch 2.15, all threads have one.
    theirs: Any = cast("Any", torch)._utils
    if hasattr(theirs, "_get_sparse_tensors_to_validate"):
        return cast("list[torch.Tensor]", theirs._get_sparse_tensors_to_validate())
    return cast("list[torch.Tensor]", theirs._sparse_tensors_to_validate)


# Checks these tensors where the user asks for it, and empties the list.
check_sparse_tensors: Final[Callable[[], object]] = cast(
    "Any", torch
)._utils._validate_loaded_sparse_tensors


# Makes a function of a storage, and the location that it was saved from, for a ``map_location``.
restore_of: Callable[[Any], Callable[[Any, str], Any]] = cast(
    "Any", torch.serialization
)._get_restore_location


def is_meta(map_location: Any) -> bool:
    """Return True if ``torch.load`` reads no content of tensors for a ``map_location``.

    Newer releases do so for ``"meta"``.
    """
    rule = getattr(torch.serialization, "_is_meta_location", None)
    return bool(rule and rule(map_location))


def modes_are_active() -> bool:
    """Return True inside a mode that changes what functions of torch do, or skips data of files."""
    modes = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
    return bool(modes or cast("Any", torch.serialization)._serialization_tls.skip_data)


def transforms_are_active() -> bool:
    """Return True inside modes, transforms of ``torch.func`` and forward AD."""
    return bool(
        modes_are_active()
        or cast("Any", torch._C)._functorch.peek_interpreter_stack() is not None
        or cast("Any", torch.autograd.forward_ad)._current_level >= 0
    )


# ``fast_inference`` calls it between the graphs of compiled code.
skip_code(modes_are_active.__code__)


def tensors_are_fake() -> bool:
    """Return True inside a mode in which ``torch.load`` makes tensors without memory."""
    return bool(cast("Any", torch)._guards.detect_fake_mode(None))
