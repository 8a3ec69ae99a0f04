"""Calling a module: hooks around ``forward``, in torch's order."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypedDict

import torch

from modkit._messages import add_note
from modkit._upstream import (
    WrappedHook,
    get_tracing_state,
    is_tracing,
    jit_trace,
    module_globals,
    original_methods,
    skip_frame,
    trace_instead,
)
from modkit.nn._backward_hooks import backward_hooks
from modkit.nn._overrides import TorchModule


Forward = Callable[..., Any]
_NONE: Final[tuple[Any, ...]] = ()
_TORCH_CALL: Final = original_methods["__call__"]
_TORCH_CALL_IMPL: Final = original_methods["_call_impl"]
is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Call(TypedDict):
    """The progress of a call, for always-called hooks; a dict, which is created in less time."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    ran: Collection[int]


@skip_frame
def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
    """Call ``forward`` with the hooks around it.

    Torch's own function is called instead if a class, an instance or a patch has another
    ``_call_impl``; if ``__call__`` is patched, as fx does to see every call; in a compiled module; and
    while a module is traced, because ``_slow_forward`` names the scopes of the graph.

    Nothing is cached, since libraries assign and clear the tables directly.
    """
    # Empty tables are noticed here: a hook that ``forward`` itself adds runs next time.
    state = self.__dict__
    if (
        type(self)._call_impl is not _TORCH_CALL_IMPL
        or "_call_impl" in state
        or TorchModule.__call__ is not _TORCH_CALL
        or self._compiled_call_impl is not None
        or jit_trace._trace_module_map is not None
    ):
        return TorchModule.__call__(self, *args, **kwargs)
    try:
        hooked = (
            state["_backward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_pre_hooks"]
            or module_globals._global_forward_hooks
            or module_globals._global_forward_pre_hooks
            or module_globals._global_backward_hooks
            or module_globals._global_backward_pre_hooks
        )
        forward_hooks = state["_forward_hooks"]
    except KeyError:
        return _call_without_tables(self, args, kwargs)
    if hooked:
        return _call_with_hooks(self, args, kwargs)
    if forward_hooks:
        return _call_with_forward_hooks(self, args, kwargs)
    # Passing on empty keywords costs as much as two of the checks above.
    return self.forward(*args, **kwargs) if kwargs else self.forward(*args)


# The names that errors and signatures show are torch's.
__call__.__name__ = "_wrapped_call_impl"
__call__.__qualname__ = "Module._wrapped_call_impl"


def _call_without_tables(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        module._backward_hooks  # noqa: B018 - what torch reads first
    except AttributeError as error:
        if "_modules" not in module.__dict__:
            name = type(module).__qualname__
            add_note(error, f"{name}.__init__() must call super().__init__() first.")
        raise
    return TorchModule.__call__(module, *args, **kwargs)


def _call_in_graph(m: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # In compiled code: dynamo takes time for each check, and line, in every module.
    if type(m)._call_impl is not _TORCH_CALL_IMPL or "_call_impl" in m.__dict__:
        return m._call_impl(*args, **kwargs)
    if m._backward_hooks or m._backward_pre_hooks or m._forward_hooks or m._forward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    if module_globals._global_backward_hooks or module_globals._global_backward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    if module_globals._global_forward_hooks or module_globals._global_forward_pre_hooks:
        return _run(m, {"args": args, "kwargs": kwargs, "result": None, "ran": ()})
    return m.forward(*args, **kwargs) if kwargs else m.forward(*args)


trace_instead(__call__, _call_in_graph)


@skip_frame
def _call_with_hooks(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Dynamo cannot compile a frame that catches and re-raises, so compiled code has no error path.
    call: _Call = {"args": args, "kwargs": kwargs, "result": None, "ran": ()}
    if is_dynamo_compiling():
        return _run(module, call)
    try:
        return _run(module, call)
    except Exception:
        _run_always_called(module, call)
        raise


@skip_frame
def _call_with_forward_hooks(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # The most frequent case: there are no other hooks at entry.
    call: _Call = {"args": args, "kwargs": kwargs, "result": None, "ran": ()}
    try:
        if is_tracing():
            call["result"] = module._slow_forward(*args, **kwargs)
        else:
            call["result"] = module.forward(*args, **kwargs) if kwargs else module.forward(*args)
        return _run_forward_hooks(module, call)
    except Exception:
        _run_always_called(module, call)
        raise


@skip_frame
def _run(module: torch.nn.Module, call: _Call) -> Any:
    forward: Forward = module._slow_forward if get_tracing_state() else module.forward
    pre_backward = full = non_full = _NONE
    # Backward hooks are collected first, so one that a forward pre-hook adds runs next time.
    if module._backward_pre_hooks or module_globals._global_backward_pre_hooks:
        pre_backward = module._get_backward_pre_hooks()
    if module._backward_hooks or module_globals._global_backward_hooks:
        full, non_full = module._get_backward_hooks()

    if module._forward_pre_hooks or module_globals._global_forward_pre_hooks:
        _run_pre_hooks(module, call)

    backward = None
    if full or pre_backward:
        backward = backward_hooks(module, full, pre_backward)
        call["args"] = backward.setup_input_hook(call["args"])

    result = forward(*call["args"], **call["kwargs"]) if call["kwargs"] else forward(*call["args"])
    call["result"] = result
    if module._forward_hooks or module_globals._global_forward_hooks:
        result = _run_forward_hooks(module, call)

    if backward is not None:
        if not isinstance(result, (torch.Tensor, tuple)):
            warnings.warn(
                "For backward hooks to be called, module output should be a Tensor or a tuple of "
                f"Tensors but received {type(result)}",
                stacklevel=4,
            )
        result = call["result"] = backward.setup_output_hook(result)
    if non_full:
        _attach_non_full_hooks(module, call, non_full)
    return result


@skip_frame
def _hooks_and_flags(
    table: Mapping[int, Any], flags: Mapping[int, bool]
) -> tuple[tuple[tuple[int, Any], ...], Collection[int]]:
    """Return a snapshot of a hook table and of the ids with a flag.

    Another thread may add and remove hooks in between. A hook enters the table after its flags and
    leaves it before them, so the flags of a hook that is there before and after are right.
    """
    hooks = tuple(table.items())
    flagged = set(flags) if flags else _NONE
    for hook_id, _ in hooks:
        if hook_id not in table:
            return _hooks_and_flags(table, flags)
    return hooks, flagged


@skip_frame
def _run_pre_hooks(module: torch.nn.Module, call: _Call) -> None:
    hooks, with_kwargs = _hooks_and_flags(
        module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    )
    if module_globals._global_forward_pre_hooks:
        hooks = (*module_globals._global_forward_pre_hooks.items(), *hooks)
    for hook_id, hook in hooks:
        if hook_id in with_kwargs:
            changed = hook(module, call["args"], call["kwargs"])
            if changed is None:
                continue
            if not (
                isinstance(changed, tuple)
                and len(changed) == 2
                and isinstance(changed[0], (tuple, list))
                and isinstance(changed[1], (dict, Mapping))
            ):
                raise RuntimeError(
                    "forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got "
                    f"{changed}."
                )
            call["args"], call["kwargs"] = changed
        else:
            changed = hook(module, call["args"])
            if changed is not None:
                call["args"] = changed if isinstance(changed, tuple) else (changed,)


@skip_frame
def _run_forward_hooks(module: torch.nn.Module, call: _Call) -> Any:
    result = call["result"]
    hooks, with_kwargs = _hooks_and_flags(module._forward_hooks, module._forward_hooks_with_kwargs)
    if module_globals._global_forward_hooks:
        global_hooks, global_flags = _hooks_and_flags(
            module_globals._global_forward_hooks, module_globals._global_forward_hooks_with_kwargs
        )
        hooks = (*global_hooks, *hooks)
        with_kwargs = {*global_flags, *with_kwargs}
    ran: list[int] = []
    call["ran"] = ran
    for hook_id, hook in hooks:
        # Before the call: a hook that raises here is not called again for its own error.
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
    """Run the always-called hooks that an exception has skipped, global ones first."""
    if torch.compiler.is_compiling():
        return
    names = ("_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    for scope, tables in (
        ("global module", [getattr(module_globals, f"_global{name}") for name in names]),
        ("module", [getattr(module, name) for name in names]),
    ):
        table, always_called, with_kwargs = tables
        hooks, flags = _hooks_and_flags(table, with_kwargs) if always_called else ((), ())
        waiting = [one for one in hooks if one[0] in always_called and one[0] not in call["ran"]]
        for hook_id, hook in waiting:
            try:
                if hook_id in flags:
                    changed = hook(module, call["args"], call["kwargs"], call["result"])
                else:
                    changed = hook(module, call["args"], call["result"])
                if changed is not None:
                    call["result"] = changed
            except Exception as error:  # noqa: BLE001, PERF203 - the caller re-raises the first error
                warnings.warn(
                    f"{scope} forward hook with ``always_call=True`` raised an exception "
                    f"that was silenced as another error was raised in forward: {error}",
                    stacklevel=4,
                )


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
