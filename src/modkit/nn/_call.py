"""What happens when a module is called: hooks around ``forward``, in torch's order."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

import torch

from modkit._errors import MSG_ALWAYS_CALL_SILENCED, MSG_BACKWARD_OUTPUT, MSG_PRE_HOOK_RESULT
from modkit._upstream import (
    BackwardHook,
    WrappedHook,
    get_tracing_state,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_hooks_always_called,
    global_forward_hooks_with_kwargs,
    global_forward_pre_hooks,
)
from modkit.nn._backward import BackwardHooks
from modkit.nn._hook_entries import KeywordPreHook, is_args_and_kwargs
from modkit.nn._tree import method_of_module


Forward = Callable[..., Any]
_NONE: Sequence[Any] = ()
# Dynamo knows torch's class, and puts its own code in its place.
_COMPILED_BACKWARD_HOOKS = cast("type[BackwardHooks]", BackwardHook)


class _Call(TypedDict):
    """How far a call has come; an always-called hook on the error path is shown just this."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ran: set[int]


@method_of_module
def _call_impl(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` and whatever hooks there are at this moment.

    This function is itself the method ``Module._call_impl``: one more frame a call would let
    deeply nested networks overflow where torch's do not.

    Which tables are empty is read here: a hook that ``forward`` itself adds runs next time.
    Nothing may be cached, since libraries assign and clear the tables directly.
    """
    forward: Forward = self._slow_forward if get_tracing_state() else self.forward
    if not (
        self._backward_hooks
        or self._backward_pre_hooks
        or self._forward_hooks
        or self._forward_pre_hooks
        or global_backward_pre_hooks
        or global_backward_hooks
        or global_forward_hooks
        or global_forward_pre_hooks
    ):
        return forward(*args, **kwargs)
    state: _Call = {"args": args, "kwargs": kwargs, "result": None, "ran": set()}
    # Dynamo cannot compile a frame that catches and re-raises, so compiled code has no error path.
    if torch.compiler.is_compiling():
        return _run(self, forward, state)
    try:
        return _run(self, forward, state)
    except Exception:
        _run_always_called(self, state)
        raise


def _run(module: torch.nn.Module, forward: Forward, state: _Call) -> Any:
    pre_backward = full = non_full = _NONE
    # Backward hooks are collected first, so one that a forward pre-hook adds runs next time.
    if module._backward_pre_hooks or global_backward_pre_hooks:
        pre_backward = module._get_backward_pre_hooks()
    if module._backward_hooks or global_backward_hooks:
        full, non_full = module._get_backward_hooks()

    if global_forward_pre_hooks or module._forward_pre_hooks:
        _run_pre_hooks(module, state)

    backward = None
    if full or pre_backward:
        kind = _COMPILED_BACKWARD_HOOKS if torch.compiler.is_compiling() else BackwardHooks
        backward = kind(module, full, pre_backward)
        state["args"] = backward.setup_input_hook(state["args"])

    state["result"] = forward(*state["args"], **state["kwargs"])
    if global_forward_hooks or module._forward_hooks:
        _run_forward_hooks(module, state)

    if backward is not None:
        result = state["result"]
        if not isinstance(result, (torch.Tensor, tuple)):
            warnings.warn(MSG_BACKWARD_OUTPUT.format(kind=type(result)), stacklevel=4)
        state["result"] = backward.setup_output_hook(result)
    if non_full:
        _attach_non_full_hooks(module, state, non_full)
    return state["result"]


def _snapshot(flags: Mapping[int, bool]) -> Mapping[int, bool]:
    return flags and dict(flags)


def _run_pre_hooks(module: torch.nn.Module, state: _Call) -> None:
    # A hook may remove another one during the call; the other still runs, with its signature.
    with_kwargs = _snapshot(module._forward_pre_hooks_with_kwargs)
    for hook_id, hook in (*global_forward_pre_hooks.items(), *module._forward_pre_hooks.items()):
        if hook_id in with_kwargs or isinstance(hook, KeywordPreHook):
            changed = hook(module, state["args"], state["kwargs"])
            if changed is None:
                continue
            if not is_args_and_kwargs(changed):
                raise RuntimeError(MSG_PRE_HOOK_RESULT.format(result=changed))
            state["args"], state["kwargs"] = changed
        else:
            changed = hook(module, state["args"])
            if changed is not None:
                state["args"] = changed if isinstance(changed, tuple) else (changed,)


def _run_forward_hooks(module: torch.nn.Module, state: _Call) -> None:
    with_kwargs = _snapshot(module._forward_hooks_with_kwargs)
    global_with_kwargs = _snapshot(global_forward_hooks_with_kwargs)
    for hook_id, hook in (*global_forward_hooks.items(), *module._forward_hooks.items()):
        # Entered before the call: a hook that raises here is not called again for its own error.
        state["ran"].add(hook_id)
        if hook_id in with_kwargs or hook_id in global_with_kwargs:
            changed = hook(module, state["args"], state["kwargs"], state["result"])
        else:
            changed = hook(module, state["args"], state["result"])
        if changed is not None:
            state["result"] = changed


def _run_always_called(module: torch.nn.Module, state: _Call) -> None:
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
        flags = _snapshot(with_kwargs)
        waiting = [key for key in hooks if key in always_called and key not in state["ran"]]
        for hook_id, hook in [(key, hooks[key]) for key in waiting]:
            try:
                if hook_id in flags:
                    changed = hook(module, state["args"], state["kwargs"], state["result"])
                else:
                    changed = hook(module, state["args"], state["result"])
                if changed is not None:
                    state["result"] = changed
            except Exception as error:  # noqa: BLE001, PERF203 - the caller re-raises the first error
                message = MSG_ALWAYS_CALL_SILENCED.format(scope=scope, error=error)
                warnings.warn(message, stacklevel=4)


def _attach_non_full_hooks(module: torch.nn.Module, state: _Call, hooks: Sequence[Any]) -> None:
    found = state["result"]
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
    module._maybe_warn_non_full_backward_hook(state["args"], state["result"], grad_fn)
