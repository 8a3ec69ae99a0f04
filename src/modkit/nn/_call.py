"""What happens when a module is called: hooks around ``forward``, in torch's order."""

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypedDict

import torch

from modkit._errors import (
    MSG_ALWAYS_CALL_SILENCED,
    MSG_BACKWARD_OUTPUT,
    MSG_NOT_INITIALIZED,
    MSG_PRE_HOOK_RESULT,
    add_note,
)
from modkit._upstream import (
    WrappedHook,
    get_tracing_state,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_hooks_always_called,
    global_forward_hooks_with_kwargs,
    global_forward_pre_hooks,
    is_tracing,
    jit_trace,
    original_methods,
    skip_frame,
    trace_instead,
)
from modkit.nn._backward import backward_hooks
from modkit.nn._hook_entries import KeywordPreHook, is_args_and_kwargs
from modkit.nn._tree import method_of_module


Forward = Callable[..., Any]
_NONE: Sequence[Any] = ()
_TorchModule = torch.nn.Module
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_TORCH_CALL = original_methods["__call__"]


class _Call(TypedDict):
    """How far a call has come; an always-called hook on the error path is shown just this.

    A dict, since making an object with fields takes a tenth of the time of the whole call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ran: Collection[int]


@skip_frame
@method_of_module
def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
    """Call ``forward``, at once where there are no hooks.

    This function is itself the method ``Module.__call__``. It steps aside whenever torch's own
    function is not the original: fx and quantization put theirs there to see every call. The
    module map is set while ``torch.jit.trace`` runs, which takes the scopes of its graph from
    ``_slow_forward``. Classes with a ``_call_impl`` of their own have another ``__call__``.
    """
    if (
        self._compiled_call_impl is not None
        or _TorchModule.__call__ is not _TORCH_CALL
        or jit_trace._trace_module_map is not None
    ):
        return _TorchModule.__call__(self, *args, **kwargs)
    try:
        hooks = self._backward_hooks
    except AttributeError as error:
        if "_modules" not in self.__dict__:
            add_note(error, MSG_NOT_INITIALIZED.format(name=type(self).__qualname__))
        raise
    if (
        hooks
        or self._forward_pre_hooks
        or self._backward_pre_hooks
        or global_forward_hooks
        or global_forward_pre_hooks
        or global_backward_hooks
        or global_backward_pre_hooks
    ):
        return _call_with_hooks(self, args, kwargs)
    if self._forward_hooks:
        return _call_with_forward_hooks(self, args, kwargs)
    # Passing on empty keywords costs as much as two of the checks above.
    return self.forward(*args, **kwargs) if kwargs else self.forward(*args)


def _call_in_graph(m: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Do the same in compiled code: dynamo takes time for each check, and line, in every module."""
    if m._backward_hooks or m._backward_pre_hooks or m._forward_hooks or m._forward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    if global_backward_hooks or global_backward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    if global_forward_hooks or global_forward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    return m.forward(*args, **kwargs) if kwargs else m.forward(*args)


trace_instead(__call__, _call_in_graph)


@skip_frame
@method_of_module
def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` and whatever hooks there are at this moment.

    This function is itself the method ``Module._call_impl``: one more frame a call would let
    deeply nested networks overflow where torch's do not.

    Which tables are empty is read here: a hook that ``forward`` itself adds runs next time.
    Nothing may be cached, since libraries assign and clear the tables directly.
    """
    if (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or global_forward_hooks
        or global_forward_pre_hooks
        or global_backward_hooks
        or global_backward_pre_hooks
    ):
        return _call_with_hooks(self, args, kwargs)
    forward: Forward = self._slow_forward if get_tracing_state() else self.forward
    return forward(*args, **kwargs)


@skip_frame
@method_of_module
def _wrapped_call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Leave the call to torch's function, which asks for ``_call_impl``."""
    return _TorchModule.__call__(self, *args, **kwargs)


def give_way(cls: type[torch.nn.Module]) -> None:
    """Let the instances of ``cls`` be called through their ``_call_impl``.

    Asking for it in each call would take a tenth of the time, and next to no class overrides it.
    """
    if cls.__call__ is __call__:
        cls.__call__ = _wrapped_call_impl  # type: ignore[method-assign]


def note_state(module: torch.nn.Module) -> None:
    """Look at an unpickled or adopted module, which may hold a ``_call_impl`` of its own."""
    if "_call_impl" in module.__dict__:
        give_way(type(module))


def note_override(cls: type[torch.nn.Module]) -> None:
    """Look at a new class: one with a ``_call_impl`` of its own, or inherited, is to use it."""
    if cls._call_impl is not _call_impl:
        give_way(cls)


@skip_frame
def _call_with_hooks(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Dynamo cannot compile a frame that catches and re-raises, so compiled code has no error path.
    call: _Call = {"args": args, "kwargs": kwargs, "result": None, "ran": ()}
    if is_dynamo_compiling():
        return _run(module, call)
    try:
        return _run(module, call)
    except Exception:
        if not torch.compiler.is_compiling():
            _run_always_called(module, call)
        raise


@skip_frame
def _call_with_forward_hooks(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do the same for the most frequent case: no other kind of hook is there at entry."""
    call: _Call = {"args": args, "kwargs": kwargs, "result": None, "ran": ()}
    try:
        if is_tracing():
            call["result"] = module._slow_forward(*args, **kwargs)
        else:
            call["result"] = module.forward(*args, **kwargs) if kwargs else module.forward(*args)
        return _run_forward_hooks(module, call)
    except Exception:
        if not torch.compiler.is_compiling():
            _run_always_called(module, call)
        raise


@skip_frame
def _run(module: torch.nn.Module, call: _Call) -> Any:
    forward: Forward = module._slow_forward if get_tracing_state() else module.forward
    pre_backward = full = non_full = _NONE
    # Backward hooks are collected first, so one that a forward pre-hook adds runs next time.
    if module._backward_pre_hooks or global_backward_pre_hooks:
        pre_backward = module._get_backward_pre_hooks()
    if module._backward_hooks or global_backward_hooks:
        full, non_full = module._get_backward_hooks()

    if module._forward_pre_hooks or global_forward_pre_hooks:
        _run_pre_hooks(module, call)

    backward = None
    if full or pre_backward:
        backward = backward_hooks(module, full, pre_backward)
        call["args"] = backward.setup_input_hook(call["args"])

    result = forward(*call["args"], **call["kwargs"]) if call["kwargs"] else forward(*call["args"])
    call["result"] = result
    if module._forward_hooks or global_forward_hooks:
        result = _run_forward_hooks(module, call)

    if backward is not None:
        if not isinstance(result, (torch.Tensor, tuple)):
            warnings.warn(MSG_BACKWARD_OUTPUT.format(kind=type(result)), stacklevel=4)
        result = call["result"] = backward.setup_output_hook(result)
    if non_full:
        _attach_non_full_hooks(module, call, non_full)
    return result


@skip_frame
def _run_pre_hooks(module: torch.nn.Module, call: _Call) -> None:
    # A hook may remove another one during the call; the other still runs, with its signature.
    with_kwargs = set(module._forward_pre_hooks_with_kwargs)
    for hook_id, hook in (*global_forward_pre_hooks.items(), *module._forward_pre_hooks.items()):
        if hook_id in with_kwargs or isinstance(hook, KeywordPreHook):
            changed = hook(module, call["args"], call["kwargs"])
            if changed is None:
                continue
            if not is_args_and_kwargs(changed):
                raise RuntimeError(MSG_PRE_HOOK_RESULT.format(result=changed))
            call["args"], call["kwargs"] = changed
        else:
            changed = hook(module, call["args"])
            if changed is not None:
                call["args"] = changed if isinstance(changed, tuple) else (changed,)


@skip_frame
def _run_forward_hooks(module: torch.nn.Module, call: _Call) -> Any:
    result = call["result"]
    hooks: tuple[tuple[int, Any], ...] = tuple(module._forward_hooks.items())
    if global_forward_hooks:
        hooks = (*global_forward_hooks.items(), *hooks)
    with_kwargs = module._forward_hooks_with_kwargs or global_forward_hooks_with_kwargs
    if with_kwargs:
        # As above: the other hook's signature does not change with its removal.
        with_kwargs = {**global_forward_hooks_with_kwargs, **module._forward_hooks_with_kwargs}
    ran: list[int] = []
    call["ran"] = ran
    for hook_id, hook in hooks:
        # Entered before the call: a hook that raises here is not called again for its own error.
        ran.append(hook_id)
        if hook_id in with_kwargs:
            changed = hook(module, call["args"], call["kwargs"], result)
        else:
            changed = hook(module, call["args"], result)
        if changed is not None:
            result = call["result"] = changed
    return result


@skip_frame
def _run_always_called(module: torch.nn.Module, call: _Call) -> None:
    """Run the always-called hooks that an exception has kept from running, global ones first."""
    tables = (
        (
            "global module",
            global_forward_hooks,
            global_forward_hooks_always_called,
            global_forward_hooks_with_kwargs,
        ),
        (
            "module",
            module._forward_hooks,
            module._forward_hooks_always_called,
            module._forward_hooks_with_kwargs,
        ),
    )
    for scope, hooks, always_called, with_kwargs in tables:
        flags = set(with_kwargs)
        waiting = [key for key in hooks if key in always_called and key not in call["ran"]]
        for hook_id, hook in [(key, hooks[key]) for key in waiting]:
            try:
                if hook_id in flags:
                    changed = hook(module, call["args"], call["kwargs"], call["result"])
                else:
                    changed = hook(module, call["args"], call["result"])
                if changed is not None:
                    call["result"] = changed
            except Exception as error:  # noqa: BLE001, PERF203 - the caller re-raises the first error
                message = MSG_ALWAYS_CALL_SILENCED.format(scope=scope, error=error)
                warnings.warn(message, stacklevel=4)


@skip_frame
def _attach_non_full_hooks(module: torch.nn.Module, call: _Call, hooks: Sequence[Any]) -> None:
    found = call["result"]
    while not isinstance(found, torch.Tensor):
        if isinstance(found, dict):
            found = next(item for item in found.values() if isinstance(item, torch.Tensor))
        else:
            found = found[0]
    grad_fn = found.grad_fn
    if grad_fn is None:
        return
    for hook in hooks:
        grad_fn.register_hook(WrappedHook(hook, module))
    module._maybe_warn_non_full_backward_hook(call["args"], call["result"], grad_fn)
