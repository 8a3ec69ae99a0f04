"""The class ``Module``: every method is a signature, a docstring and one call.

Each call goes to a mechanism beside this file. The protected methods that only torch and
overriding classes call are the mechanisms' functions themselves, which saves a frame.

Some names must *not* be defined here, because torch, fx, dynamo, TorchScript, FSDP2 or accelerate
compare or patch the function of ``torch.nn.Module``: ``forward``, ``__getattr__``,
``get_extra_state``, ``set_extra_state`` and ``__getstate__``. Others, such as ``eval`` and ``cuda``,
are inherited because they only call what is defined here.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch
from torch.nn import Parameter
from typing_extensions import Self

from modkit._types import (
    BackwardHook,
    BackwardPreHook,
    ForwardHook,
    ForwardPreHook,
    LoadStateDictPostHook,
    LoadStateDictPreHook,
    StateDictPostHook,
    StateDictPreHook,
    TensorFunction,
)
from modkit._upstream import IncompatibleKeys, RemovableHandle, log_api_usage_once
from modkit.nn import _call, _convert, _hook_entries, _hooks, _load, _registry, _repr, _state, _walk
from modkit.nn._layers import mark_leaf
from modkit.nn._tree import named_children_of, post_order, standard


DestinationT = TypeVar("DestinationT", bound=dict[str, Any])
Device = int | torch.device | str | None


class Module(torch.nn.Module):
    """Base class of all neural network modules; same as ``torch.nn.Module``.

    A subclass calls ``super().__init__()``, assigns parameters, buffers and child modules as
    attributes, and implements ``forward``. Calling the instance runs ``forward`` with the hooks.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _call.note_override(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the empty state; with ``call_super_init``, pass the arguments on."""
        log_api_usage_once("python.nn_module")
        if self.call_super_init is False and (args or kwargs):
            _registry.refuse_arguments(self, args, kwargs)
        _registry.fill(self)
        mark_leaf(self)
        if self.call_super_init:
            super(torch.nn.Module, self).__init__(*args, **kwargs)

    # Registration and lookup.

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Register ``param`` as the parameter ``name``; None keeps the name free of a tensor.

        Raises:
            TypeError: ``param`` is no parameter, or ``name`` is not a string.
            KeyError: ``name`` is empty, has a dot, or is an attribute that is no parameter.
            ValueError: ``param`` was computed, so it is not a leaf of the autograd graph.
        """
        _registry.register_parameter(self, name, param)

    @standard
    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Register ``tensor`` as the buffer ``name``, part of the state dict if ``persistent``.

        Raises:
            TypeError: ``tensor`` is no tensor, or ``name`` is not a string.
            KeyError: ``name`` is empty, has a dot, or is an attribute that is no buffer.
        """
        _registry.register_buffer(self, name, tensor, persistent)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Register ``module`` as the child ``name``.

        Raises:
            TypeError: ``module`` is neither a module nor None, or ``name`` is not a string.
            KeyError: ``name`` is empty, has a dot, or is an attribute that is no child.
        """
        _registry.add_module(self, name, module)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return the module at the dotted path ``target``; the empty path is this module.

        Raises:
            AttributeError: a name on the path does not exist or is not a module.
        """
        return _registry.get_submodule(self, target)

    def set_submodule(self, target: str, module: torch.nn.Module, strict: bool = False) -> None:
        """Put ``module`` at the path ``target``; with ``strict`` only in the place of another one.

        Raises:
            ValueError: ``target`` is empty or ``module`` is not a module.
            AttributeError: the parent does not exist, or the name is something else.
        """
        _registry.set_submodule(self, target, module, strict)

    def get_parameter(self, target: str) -> Parameter:
        """Return the parameter at the dotted path ``target``.

        Raises:
            AttributeError: the path is wrong, or ends in something that is no parameter.
        """
        return _registry.get_parameter(self, target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer at the dotted path ``target``.

        Raises:
            AttributeError: the path is wrong, or ends in something that is no buffer.
        """
        return _registry.get_buffer(self, target)

    @standard
    def __setattr__(self, name: str, value: Any) -> None:
        """Register parameters, buffers and modules; set anything else as usual."""
        if (
            type(value) in _registry.PLAIN_TYPES and not _registry.holds(self, name)
        ) or not _registry.set_member(self, name, value):
            if name == "_call_impl":
                _call.give_way(type(self))
            super(torch.nn.Module, self).__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete a registered name or a plain attribute."""
        if not _registry.delete_member(self, name):
            super(torch.nn.Module, self).__delattr__(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, those of older torch releases included."""
        self.__dict__.update(state)
        _registry.complete_state(self.__dict__)
        _call.note_state(self)

    # Traversal.

    @standard
    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, torch.nn.Module], None, None]:
        """Yield ``(dotted name, module)`` for this module and all below it, parents first.

        Args:
            memo: modules to leave out; filled with those that were yielded.
            prefix: the name of this module; names below it start with it and a dot.
            remove_duplicate: yield a module that stands in several places only once.
        """
        return _walk.named_modules(self, memo, prefix, remove_duplicate)

    @standard
    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        """Yield this module and all below it, parents first, by default each once."""
        return _walk.modules(self, remove_duplicate)

    @standard
    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield ``(name, module)`` for the direct children, each module once."""
        return named_children_of(self)

    @standard
    def children(self) -> Iterator[torch.nn.Module]:
        """Yield the direct children, each module once."""
        for _, module in self.named_children():
            yield module

    @standard
    def _named_members(
        self,
        get_members_fn: _walk.NamedMembers,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, Any], None, None]:
        """Yield the pairs that ``get_members_fn`` finds in this module and all below it."""
        return _walk.named_members(self, get_members_fn, prefix, recurse, remove_duplicate)

    @standard
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield ``(dotted name, parameter)``.

        Args:
            prefix: the name of this module; names start with it and a dot.
            recurse: include the parameters of all modules below.
            remove_duplicate: yield a tied parameter only under its first name.
        """
        return _walk.named_tensors(self, "_parameters", prefix, recurse, remove_duplicate)

    @standard
    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield the parameters, each once; of all modules below too if ``recurse``."""
        return _walk.parameters(self, recurse)

    @standard
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(dotted name, buffer)``; arguments as in ``named_parameters``."""
        return _walk.named_tensors(self, "_buffers", prefix, recurse, remove_duplicate)

    @standard
    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers, each once; of all modules below too if ``recurse``."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    @standard
    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Call ``fn`` on every module below this one, then on this one; return this module."""
        for module in post_order(self, "apply", lambda child: child.apply(fn)):
            fn(module)
        return self

    # Modes, conversion and gradients.

    @standard
    def train(self, mode: bool = True) -> Self:
        """Set training mode (or evaluation mode) here and below; return this module.

        Raises:
            ValueError: ``mode`` is not a bool.
        """
        _convert.set_training(self, mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or fill them with zeros in place."""
        _convert.zero_gradients(self, self.parameters(), set_to_none=set_to_none)

    @standard
    def _apply(self, fn: TensorFunction, recurse: bool = True) -> Self:
        """Replace every parameter, gradient and buffer by ``fn`` of it; return this module."""
        _convert.apply_to_tensors(self, fn, recurse=recurse)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and cast parameters and buffers in place; return this module.

        Takes ``(device, dtype, non_blocking)``, ``(dtype, non_blocking)``,
        ``(tensor, non_blocking)`` or ``(memory_format=…)``. A dtype applies to floating point
        and complex tensors only, ``channels_last`` to 4 dimensions, ``channels_last_3d`` to 5.

        Raises:
            TypeError: the dtype is neither floating point nor complex.
            NotImplementedError: a tensor is on the meta device; use ``to_empty``.
        """
        return self._apply(_convert.to_function(args, kwargs))

    def to_empty(self, *, device: Device, recurse: bool = True) -> Self:
        """Move to ``device`` with uninitialized values, for instance off the meta device."""
        return self._apply(lambda t: torch.empty_like(t, device=device), recurse=recurse)

    def type(self, dst_type: torch.dtype | str) -> Self:
        """Cast all parameters and buffers, integer ones too, to ``dst_type``."""
        return self._apply(lambda t: t.type(dst_type))

    def float(self) -> Self:
        """Cast floating point parameters and buffers to float32."""
        return self._apply(_convert.cast_function("float", torch.float32))

    def double(self) -> Self:
        """Cast floating point parameters and buffers to float64."""
        return self._apply(_convert.cast_function("double", torch.float64))

    def half(self) -> Self:
        """Cast floating point parameters and buffers to float16."""
        return self._apply(_convert.cast_function("half", torch.float16))

    def bfloat16(self) -> Self:
        """Cast floating point parameters and buffers to bfloat16."""
        return self._apply(_convert.cast_function("bfloat16", torch.bfloat16))

    # Hooks. Each returns a handle whose ``remove()`` takes the hook out again.

    def register_forward_pre_hook(
        self, hook: ForwardPreHook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Run ``hook(module, args)`` before ``forward``; a result replaces the arguments.

        With ``with_kwargs`` the hook is called with ``(module, args, kwargs)`` and returns None
        or both. ``prepend`` puts it before the module's other hooks of its kind.
        """
        return _hooks.add_forward_pre_hook(self, hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        hook: ForwardHook,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Run ``hook(module, args, output)`` after ``forward``; a result replaces the output.

        With ``with_kwargs`` the hook is called with ``(module, args, kwargs, output)``. With
        ``always_call`` it runs even if something raised, with the output None if there is none.
        """
        return _hooks.add_forward_hook(
            self, hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )

    def register_full_backward_pre_hook(
        self, hook: BackwardPreHook, prepend: bool = False
    ) -> RemovableHandle:
        """Run ``hook(module, grad_output)`` before gradients of the module are computed."""
        return _hook_entries.add(self._backward_pre_hooks, hook, prepend=prepend)

    def register_full_backward_hook(
        self, hook: BackwardHook, prepend: bool = False
    ) -> RemovableHandle:
        """Run ``hook(module, grad_input, grad_output)`` when gradients have been computed.

        Raises:
            RuntimeError: the module has a hook of the deprecated kind.
        """
        return _hooks.add_backward_hook(self, hook, full=True, prepend=prepend)

    def register_backward_hook(self, hook: BackwardHook) -> RemovableHandle:
        """Register a backward hook of the deprecated kind; prefer the full one."""
        return _hooks.add_backward_hook(self, hook, full=False)

    def register_state_dict_pre_hook(self, hook: StateDictPreHook) -> RemovableHandle:
        """Run ``hook(module, prefix, keep_vars)`` before ``state_dict``."""
        return _hook_entries.add(self._state_dict_pre_hooks, hook)

    def register_state_dict_post_hook(self, hook: StateDictPostHook) -> RemovableHandle:
        """Run ``hook(module, state_dict, prefix, local_metadata)``, which edits in place."""
        return _hooks.add_state_dict_hook(self, hook, public=True)

    def _register_state_dict_hook(self, hook: StateDictPostHook) -> RemovableHandle:
        """Register a hook after ``state_dict`` that may, at the root, return another dict."""
        return _hooks.add_state_dict_hook(self, hook, public=False)

    def register_load_state_dict_pre_hook(self, hook: LoadStateDictPreHook) -> RemovableHandle:
        """Run ``hook`` before this module loads, with the module and what it loads from.

        Arguments: ``(module, state_dict, prefix, local_metadata, strict, missing_keys,
        unexpected_keys, error_msgs)``; all of the containers may be edited.
        """
        return self._register_load_state_dict_pre_hook(hook, with_module=True)

    def _register_load_state_dict_pre_hook(
        self, hook: LoadStateDictPreHook, with_module: bool = False
    ) -> RemovableHandle:
        """Register a hook as above that gets the module only if ``with_module``."""
        return _hooks.add_load_state_dict_pre_hook(self, hook, with_module=with_module)

    def register_load_state_dict_post_hook(self, hook: LoadStateDictPostHook) -> RemovableHandle:
        """Run ``hook(module, incompatible_keys)`` after loading; it may edit the two lists."""
        return _hook_entries.add(self._load_state_dict_post_hooks, hook)

    _get_backward_hooks = _hooks._get_backward_hooks
    _get_backward_pre_hooks = _hooks._get_backward_pre_hooks
    _maybe_warn_non_full_backward_hook = _hooks._maybe_warn_non_full_backward_hook
    _call_impl = _call._call_impl
    __call__ = _call.__call__

    # State.

    @overload
    def state_dict(
        self, *, destination: DestinationT, prefix: str = ..., keep_vars: bool = ...
    ) -> DestinationT: ...

    @overload
    def state_dict(self, *, prefix: str = ..., keep_vars: bool = ...) -> dict[str, Any]: ...

    @standard
    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the parameters, persistent buffers and extra state, here and below, by name.

        Args:
            args: the deprecated positional form of the following.
            destination: a mapping to write into; by default a new OrderedDict whose
                ``_metadata`` holds each module's ``_version``.
            prefix: put before each name.
            keep_vars: keep the tensors' autograd history instead of detaching them.
        """
        if args:
            destination, prefix, keep_vars = _state.positional_arguments(
                args, destination, prefix, keep_vars
            )
        return _state.save(self, destination, prefix, keep_vars)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copy what ``state_dict`` holds into this module and all below it.

        Args:
            state_dict: names as ``state_dict()`` gives them, to tensors and extra state.
            strict: require that the names match exactly.
            assign: put in the tensors themselves, with their dtype and device, instead of
                copying their values; an optimizer must then be created afterwards.

        Returns:
            The named tuple ``(missing_keys, unexpected_keys)``.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            RuntimeError: names do not match and ``strict`` is set, or shapes do not match;
                all problems are listed.
        """
        return _load.load(self, state_dict, strict=strict, assign=assign)

    _save_to_state_dict = _state._save_to_state_dict
    _load_from_state_dict = _load._load_from_state_dict

    # Printing.

    @standard
    def __repr__(self) -> str:
        """Return the class name, ``extra_repr`` and the children, one a line."""
        return _repr.render(self)

    def __dir__(self) -> list[str]:
        """Return the attribute names, members included."""
        return _repr.directory(self)
