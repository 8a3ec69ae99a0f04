"""The class ``Module``: every method is a signature, a docstring and one call.

Each call goes to a mechanism beside this file; hot and protected methods are the mechanisms'
functions themselves, which saves a frame. What torch's own function does well is inherited.

Some names must *not* be defined here, because torch, fx, dynamo, TorchScript, FSDP2 or accelerate
compare or patch the function of ``torch.nn.Module``: ``forward``, ``_call_impl``, ``__getattr__``,
``get_extra_state``, ``set_extra_state`` and ``__getstate__``.
"""

import sys
from abc import ABCMeta
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.nn import Parameter
from typing_extensions import Protocol, Self

from modkit._types import TensorFunction
from modkit._upstream import IncompatibleKeys
from modkit.nn import (
    _attributes,
    _call,
    _conversion,
    _hooks,
    _load_state_dict,
    _state_dict,
    _traversal,
)
from modkit.nn._overrides import TorchModule, patchable, walk


DestinationT = TypeVar("DestinationT", bound=dict[str, Any])


if TYPE_CHECKING:
    _ProtocolType = ABCMeta
else:
    _ProtocolType = type(Protocol)


class ModuleType(_ProtocolType):
    """The metaclass of ``Module``: torch's modules count as instances of ``Module``.

    It is derived from the metaclass of protocols, itself derived from that of abstract classes, so
    that ``abc.ABC``, ``Protocol`` and modules mix. A class with another metaclass of its own derives
    that from ``type(modkit.nn.Module)``.
    """

    # Compared by identity, at C speed: dynamo looks for classes with ``==``, protocols define it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __init__ = type.__init__

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> "ModuleType":
        """Make an abstract class where a base is one; elsewhere a plain one, as torch's are."""
        if "__module__" not in namespace:
            # A call of ``type()``: Python would take the file of this method for the caller's.
            module = sys._getframe(1).f_globals.get("__name__")
            namespace = {**namespace, "__module__": module}
        for base in bases:
            if "_abc_impl" in base.__dict__:
                return super().__new__(mcs, name, bases, namespace, **kwargs)
        return type.__new__(mcs, name, bases, namespace, **kwargs)

    def mro(cls) -> list[type]:
        """Put ``Module`` directly before ``torch.nn.Module``.

        Everything that torch's order of bases has before ``torch.nn.Module`` stays before both, so
        that a mixin of torch's keeps its ``__init__`` and its overrides.
        """
        order: list[Any] = super().mro()
        if order[-2] is TorchModule and (order[-3] is cls or order[-3] is Module):
            return order
        if Module not in order:
            return order
        bases = cls.__bases__
        behind = bases[bases.index(Module) + 1 :] if Module in bases else ()
        if any(TorchModule in base.__mro__ for base in behind):
            # Torch's own ``Module`` may not stand before a class that is derived from it.
            names = ", ".join(base.__name__ for base in bases)
            raise TypeError(
                f"Cannot create a consistent method resolution\norder (MRO) for bases {names}"
            )
        order.remove(Module)
        order.insert(order.index(TorchModule), Module)
        return order

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is Module:
            return isinstance(instance, TorchModule)
        if "_abc_impl" in cls.__dict__:
            return super().__instancecheck__(instance)
        return type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is Module:
            return issubclass(subclass, TorchModule)
        if "_abc_impl" in cls.__dict__:
            return super().__subclasscheck__(subclass)
        return type.__subclasscheck__(cls, subclass)


class Module(torch.nn.Module, metaclass=ModuleType):
    """Base class of all neural network modules; same as ``torch.nn.Module``.

    A subclass calls ``super().__init__()``, assigns parameters, buffers and child modules as
    attributes, and implements ``forward``. Calling the instance runs ``forward`` with the hooks.
    ``isinstance(x, Module)`` holds for every module of torch, too.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.body(x).relu()
        >>> net = Net()
        >>> net(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    __init__ = _attributes.__init__
    __call__ = _call.__call__

    # Registration and attributes.

    register_parameter = _attributes.register_parameter
    register_buffer = _attributes.register_buffer
    add_module = _attributes.add_module
    set_submodule = _attributes.set_submodule
    __setattr__ = _attributes.__setattr__
    __delattr__ = _attributes.__delattr__
    __setstate__ = _attributes.__setstate__

    # Traversal.

    @patchable
    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, torch.nn.Module], None, None]:
        """Yield ``(dotted name, module)`` for this module and all below it, parents first.

        Args:
            memo: Modules to leave out; filled with those that were yielded.
            prefix: Name of this module; names below it start with it and a dot.
            remove_duplicate: Yield a module that stands in several places only once.
        """
        return _traversal.named_modules(self, memo, prefix, remove_duplicate)

    @patchable
    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        """Yield this module and all below it, parents first, by default each once."""
        return _traversal.modules(self, remove_duplicate)

    @patchable
    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield ``(name, module)`` for the direct children, each module once."""
        return _traversal.named_children(self)

    @patchable
    def _named_members(
        self,
        get_members_fn: _traversal.NamedMembers,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield the pairs that ``get_members_fn`` finds in this module and all below it."""
        return _traversal.named_members(self, get_members_fn, prefix, recurse, remove_duplicate)

    @patchable
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield ``(dotted name, parameter)``.

        Args:
            prefix: Name of this module; names start with it and a dot.
            recurse: Include the parameters of all modules below.
            remove_duplicate: Yield a tied parameter only under its first name.
        """
        return _traversal.named_tensors(self, "_parameters", prefix, recurse, remove_duplicate)

    @patchable
    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield the parameters, each once; of all modules below too if ``recurse``."""
        return _traversal.parameters(self, recurse)

    @patchable
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(dotted name, buffer)``; arguments as in ``named_parameters``."""
        return _traversal.named_tensors(self, "_buffers", prefix, recurse, remove_duplicate)

    @patchable
    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Call ``fn`` on every module below this one, then on this one; return this module."""
        for module in walk(self, "apply", lambda child: child.apply(fn)):
            fn(module)
        return self

    # Modes and conversion.

    @patchable
    def train(self, mode: bool = True) -> Self:
        """Set training mode (or evaluation mode) here and below; return this module.

        Raises:
            ValueError: ``mode`` is not a bool.
        """
        _conversion.set_training(self, mode)
        return self

    @patchable
    def _apply(self, fn: TensorFunction, recurse: bool = True) -> Self:
        """Replace every parameter, gradient and buffer by ``fn`` of it; return this module."""
        _conversion.apply_to_tensors(self, fn, recurse=recurse)
        return self

    @patchable
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and cast parameters and buffers in place; return this module.

        Takes ``(device, dtype, non_blocking)``, ``(dtype, non_blocking)``,
        ``(tensor, non_blocking)`` or ``(memory_format=…)``. A dtype applies to floating point
        and complex tensors only, ``channels_last`` to 4 dimensions, ``channels_last_3d`` to 5.

        Raises:
            TypeError: the dtype is neither floating point nor complex.
            NotImplementedError: a tensor is on the meta device; use ``to_empty``.
        """
        return self._apply(_conversion.to_function(args, kwargs))

    @patchable
    def float(self) -> Self:
        """Cast floating point parameters and buffers to float32."""
        return self._apply(_conversion.cast_function("float", torch.float32))

    @patchable
    def double(self) -> Self:
        """Cast floating point parameters and buffers to float64."""
        return self._apply(_conversion.cast_function("double", torch.float64))

    @patchable
    def half(self) -> Self:
        """Cast floating point parameters and buffers to float16."""
        return self._apply(_conversion.cast_function("half", torch.float16))

    @patchable
    def bfloat16(self) -> Self:
        """Cast floating point parameters and buffers to bfloat16."""
        return self._apply(_conversion.cast_function("bfloat16", torch.bfloat16))

    # Hooks. Each returns a handle whose ``remove()`` takes the hook out again.

    register_forward_pre_hook = _hooks.register_forward_pre_hook
    register_forward_hook = _hooks.register_forward_hook
    register_full_backward_hook = _hooks.register_full_backward_hook
    register_backward_hook = _hooks.register_backward_hook
    register_state_dict_post_hook = _hooks.register_state_dict_post_hook
    _register_state_dict_hook = _hooks._register_state_dict_hook

    # State.

    @overload
    def state_dict(
        self, *, destination: DestinationT, prefix: str = ..., keep_vars: bool = ...
    ) -> DestinationT: ...

    @overload
    def state_dict(self, *, prefix: str = ..., keep_vars: bool = ...) -> dict[str, Any]: ...

    @patchable
    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the parameters, persistent buffers and extra state, here and below, by name.

        Args:
            args: Deprecated positional form of the following.
            destination: Mapping to write into; by default a new OrderedDict whose
                ``_metadata`` holds each module's ``_version``.
            prefix: Prefix of each name.
            keep_vars: Keep the tensors' autograd history instead of detaching them.
        """
        if args:
            destination, prefix, keep_vars = _state_dict.positional_arguments(
                args, destination, prefix, keep_vars
            )
        return _state_dict.save(self, destination, prefix, keep_vars)

    @patchable
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy what ``state_dict`` holds into this module and all below it.

        Args:
            state_dict: Names as ``state_dict()`` gives them, to tensors and extra state.
            strict: Require that the names match exactly.
            assign: Put in the tensors themselves, with their dtype and device, instead of
                copying their values; an optimizer must then be created afterwards.

        Returns:
            The named tuple ``(missing_keys, unexpected_keys)``.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            RuntimeError: names do not match and ``strict`` is set, or shapes do not match;
                all problems are listed.
        """
        return _load_state_dict.load(self, state_dict, strict=strict, assign=assign)

    _save_to_state_dict = _state_dict._save_to_state_dict
    _load_from_state_dict = _load_state_dict._load_from_state_dict
