"""Hooks that can be pickled and compared: they log their arguments, and may change them."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers import freeze
from tests.property.node_tools import LOG


@dataclass(eq=False)
class Hook:
    """A hook of one kind.

    With `effect` it changes what it may change, returns what it should not, raises, or removes itself or
    all hooks of the kind from the module.
    """

    ordinal: int
    kind: str
    effect: str

    def __call__(self, *arguments: Any) -> Any:
        """Run the hook."""
        if self.effect in {"remove", "clear"}:
            self._remove_from(arguments[0])
        return getattr(self, f"_{self.kind}")(*arguments)

    def _remove_from(self, module: Any) -> None:
        table, *flags = CALL_TABLES[self.kind]
        hooks = getattr(module, table)
        for number in [*hooks]:
            if hooks[number] is self or self.effect == "clear":
                for name in (table, *flags):
                    getattr(module, name).pop(number, None)

    def _note(self, *details: Any) -> None:
        LOG.append((self.ordinal, self.kind, *(freeze(detail) for detail in details)))
        if self.effect == "raise":
            raise LookupError(f"hook {self.ordinal}")

    def _forward_pre(self, module: Any, args: Any, kwargs: Any = None) -> Any:
        self._note(type(module).__name__, args, kwargs)
        if self.effect == "change" and args and isinstance(args[0], torch.Tensor):
            changed = (args[0] + 1, *args[1:])
            return changed if kwargs is None else (changed, kwargs)
        if self.effect == "odd":
            return [*args] if kwargs is None else (1, 2)
        return None

    def _forward(self, module: Any, args: Any, *rest: Any) -> Any:
        self._note(type(module).__name__, args, rest)
        output = rest[-1]
        if not isinstance(output, torch.Tensor):
            return None
        if self.effect == "odd":
            return output.max(0) if output.dim() else (output, None)
        return output * 2 if self.changes else None

    def _backward_pre(self, module: Any, grad_output: Any) -> Any:
        self._note(type(module).__name__, grad_output)
        if self.effect == "odd":
            return ()
        return tuple(g if g is None else g * 2 for g in grad_output) if self.changes else None

    def _backward(self, module: Any, grad_input: Any, grad_output: Any) -> Any:
        self._note(type(module).__name__, grad_input, grad_output)
        if self.effect == "odd":
            return grad_input[0]
        return tuple(g if g is None else g + 1 for g in grad_input) if self.changes else None

    _old_backward = _backward

    def _state_dict_pre(self, module: Any, prefix: str, keep_vars: bool) -> None:
        self._note(type(module).__name__, prefix, keep_vars)

    def _state_dict_post(self, module: Any, state: Any, prefix: str, metadata: Any) -> Any:
        self._note(type(module).__name__, list(state), prefix, metadata)
        if self.changes:
            state[f"{prefix}added"] = torch.ones(1)
        return state if self.effect == "odd" else None

    def _load_pre(self, module: Any, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        strict, *reports = rest
        found = [list(report) for report in reports]
        self._note(type(module).__name__, list(state), prefix, metadata, strict, found)
        if self.changes:
            state.pop(f"{prefix}added", None)

    def _load_post(self, module: Any, incompatible: Any) -> Any:
        self._note(type(module).__name__, list(incompatible))
        if self.changes:
            incompatible.missing_keys.clear()
        return incompatible if self.effect == "odd" else None

    @property
    def changes(self) -> bool:
        """Return True if the hook changes its arguments or result."""
        return self.effect == "change"


# The table of each kind of hook of a call, and the tables of its flags.
CALL_TABLES = {
    "forward_pre": ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    "forward": (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ),
    "backward_pre": ("_backward_pre_hooks",),
    "backward": ("_backward_hooks",),
    "old_backward": ("_backward_hooks",),
}
REGISTRARS = {
    "forward_pre": "register_forward_pre_hook",
    "forward": "register_forward_hook",
    "backward_pre": "register_full_backward_pre_hook",
    "backward": "register_full_backward_hook",
    "old_backward": "register_backward_hook",
    "state_dict_pre": "register_state_dict_pre_hook",
    "state_dict_post": "register_state_dict_post_hook",
    "load_pre": "register_load_state_dict_pre_hook",
    "load_post": "register_load_state_dict_post_hook",
}
# The keyword options that each registration takes.
OPTIONS = {
    "forward_pre": ("prepend", "with_kwargs"),
    "forward": ("prepend", "with_kwargs", "always_call"),
    "backward_pre": ("prepend",),
    "backward": ("prepend",),
}
GLOBAL_OPTIONS = {"forward": ("with_kwargs", "always_call")}
GLOBAL_REGISTRARS = {
    "forward_pre": "register_module_forward_pre_hook",
    "forward": "register_module_forward_hook",
    "backward_pre": "register_module_full_backward_pre_hook",
    "backward": "register_module_full_backward_hook",
}
