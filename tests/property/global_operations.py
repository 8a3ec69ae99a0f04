"""Operations on global state, hooks for all modules, patches and classes, and on hooks beyond registering one."""

import types
from typing import Any, Final

import torch
import torch.nn.modules.module as torch_module
from torch.nn.parameter import is_lazy

import modkit
from tests.property import choices
from tests.property.classes import (
    GLOBAL_OPTIONS,
    GLOBAL_REGISTRARS,
    LOG,
    OVERRIDDEN,
    REGISTRARS,
    Hook,
    override,
    summary,
)
from tests.property.operations import Skipped, operation
from tests.property.scoped_calls import PATCHED
from tests.property.sides import METHODS, TABLES, home_of
from tests.property.tree_operations import CALL_EFFECTS


REGISTRATION: Final = ("parameter", "buffer", "module")
GLOBAL_HOOKS: Final = choices.one_of(
    *(
        choices.tuples(
            choices.just(kind),
            choices.optional({o: choices.booleans() for o in GLOBAL_OPTIONS.get(kind, ())}),
            CALL_EFFECTS,
        )
        for kind in GLOBAL_REGISTRARS
    )
)


@operation(GLOBAL_HOOKS)
def add_global_hook(side: Any, module: Any, form: Any) -> None:
    """Register a hook for all modules, which stays for the operations that follow."""
    kind, options, effect = form
    hook = Hook(100 + len(side.handles), kind, effect)
    side.handles.append(getattr(side.impl, GLOBAL_REGISTRARS[kind])(hook, **options))


def replacement(side: Any, value: Any) -> Any:
    """Return another member of the same kind."""
    if isinstance(value, torch.nn.Module):
        return side.impl.nn.Tanh()
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return value
    copied = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return side.impl.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied


def registration_hook(side: Any, kind: str, effect: str) -> Any:
    """Register a hook that sees new members of one kind; return its handle."""

    def see(owner: Any, name: str, value: Any) -> Any:
        LOG.append((f"new {kind}", type(owner).__name__, name, summary(value)))
        if effect == "raise":
            raise LookupError(f"{kind} {name}")
        if effect == "remove":
            handle.remove()
        if effect == "text":
            return "text"
        return replacement(side, value) if effect == "replace" else None

    handle = getattr(side.impl, f"register_module_{kind}_registration_hook")(see)
    return handle


@operation(choices.sampled_from(REGISTRATION), choices.sampled_from(["note", "replace"]))
def add_registration_hook(side: Any, module: Any, kind: str, effect: str) -> None:
    """Register a hook that sees new members of one kind, and may replace them."""
    side.handles.append(registration_hook(side, kind, effect))


# Values that hooks for new parameters and children of `add_module` return are checked, and such hooks
# may remove themselves: listed differences.
HOOKED: Final = choices.sampled_from(
    [
        *(("buffer", effect, registers) for effect in ("text", "remove") for registers in (0, 1)),
        *((kind, "raise", registers) for kind in REGISTRATION for registers in (0, 1)),
        ("module", "text", 0),
        ("module", "remove", 0),
    ]
)


@operation(HOOKED)
def add_under_hook(side: Any, module: Any, form: Any) -> None:
    """Add a member for a moment, under a hook that raises, removes itself or returns a text."""
    kind, effect, registers = form
    value = {
        "parameter": side.impl.nn.Parameter,
        "buffer": side.impl.nn.Buffer,
        "module": lambda _: side.impl.nn.Tanh(),
    }[kind](torch.ones(1))
    handle = registration_hook(side, kind, effect)
    try:
        if registers:
            method = "add_module" if kind == "module" else f"register_{kind}"
            getattr(module, method)("hooked", value)
        else:
            module.hooked = value
    finally:
        handle.remove()
        tables = (vars(module), module._parameters, module._buffers, module._modules)
        LOG.append([summary(table.pop("hooked", None)) for table in tables])
        module._non_persistent_buffers_set.discard("hooked")


@operation()
def remove_global_hooks(side: Any, module: Any) -> list[int]:
    """Empty all the global tables, as test suites do."""
    found = [len(getattr(torch_module, name)) for name in TABLES]
    for name in TABLES:
        getattr(torch_module, name).clear()
    torch_module._global_is_full_backward_hook = None
    return found


@operation(choices.sampled_from(["copies", "copies", "empty", "back"]))
def rebind_tables(side: Any, module: Any, how: str) -> None:
    """Replace the global tables, or restore torch's."""
    for name, original in TABLES.items():
        table = original if how == "back" else type(original)()
        if how == "copies":
            table.update(getattr(torch_module, name))
        setattr(torch_module, name, table)


PATCHES: Final = choices.sampled_from([f"TorchModule.{name}" for name in METHODS]) | (
    choices.sampled_from(
        [*PATCHED, *(f"Node.{name}" for name in OVERRIDDEN), "Node.forward", "Lora.train"]
    )
)


def saved_before(dotted: str, patches: list[str]) -> bool:
    """Return True if another patch has saved a method of modkit's: a listed difference."""
    home, _, name = dotted.partition(".")
    overridden = name in vars(modkit.nn.Module)
    return home == "TorchModule" and overridden and any(p.endswith(f".{name}") for p in patches)


@operation(PATCHES)
def patch_class(side: Any, module: Any, dotted: str) -> list[str]:
    """Patch a method of a class for the operations that follow; undo all at the third."""
    patches: list[str] = side.world.patches
    if dotted in patches or len(patches) >= 2:
        patches.clear()
    elif saved_before(dotted, patches):
        raise Skipped
    else:
        patches.append(dotted)
    return patches


@operation()
def undo_patches(side: Any, module: Any) -> None:
    side.world.patches.clear()


BASES: Final = choices.sampled_from(
    [
        ("Node",),
        ("Plain", "Node"),
        ("Node", "Lora"),
        ("Lora", "Node"),
        ("Module",),
        ("Plain", "Module"),
        ("Module", "Lora"),
        ("Counting", "Lora", "Plain"),
        ("OwnLinear", "Lora"),
        ("Linear", "Node"),
        ("PlainBefore", "Module"),
        ("Concrete", "Data"),
        ("Abstract",),
        ("Module", "Node"),
    ]
)


@operation(BASES, choices.none() | choices.sampled_from(OVERRIDDEN), choices.booleans())
def define_class(side: Any, module: Any, names: Any, method: Any, twice: bool) -> list[str]:
    """Define a class, perhaps while something is patched, and add an instance of it."""
    bases = tuple(side.impl.Module if n == "Module" else home_of(side, n) for n in names)
    defined: Any = types.new_class("Late", bases)
    defined.__module__ = "late"
    if method:
        defined = override(defined, method)
        defined.__module__ = "late"
    made = defined(3, 3) if "Linear" in names else defined()
    module.add_module("late", made)
    if twice:
        module.later = defined(3, 3) if "Linear" in names else defined()
    order = [each.__name__ for each in defined.__mro__]
    return [name for name in order if name != "Module"]


LATE: Final = choices.sampled_from([*OVERRIDDEN, "_call_impl", "_call_impl", "forward", "__call__"])


@operation(LATE, choices.booleans())
def override_late(side: Any, module: Any, method: str, parent: bool) -> None:
    """Override a method of a class after the module was made, on the class or on a parent."""
    kind = type(module)
    if kind.__name__ != "Late":
        below = types.new_class("Late", (kind,))
        below.__module__ = "late"
        module.__class__ = types.new_class("Late", (below,))
        type(module).__module__ = "late"
    target = type(module).__mro__[1] if parent and type(module).__mro__[1:] else type(module)
    if target.__name__ != "Late":
        target = type(module)

    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        LOG.append(("late", method, len(args)))
        return getattr(super(target, self), method)(*args, **kwargs)

    setattr(target, method, logging)


PRIVATE: Final = ("_register_state_dict_hook", "_register_load_state_dict_pre_hook")


@operation(
    choices.integers(0, 9),
    choices.sampled_from([*sorted(REGISTRARS.values()), *PRIVATE * 3]),
    choices.booleans(),
)
def register_again(side: Any, module: Any, number: int, registrar: str, bound: bool) -> None:
    """Register a hook of the module once more, perhaps as a hook of another kind or as a method."""
    tables = (module._state_dict_hooks, module._state_dict_pre_hooks, module._forward_hooks)
    hooks = [hook for table in tables for hook in table.values() if isinstance(hook, Hook)]
    hook = hooks[number % len(hooks)] if hooks else Hook(50, "state_dict_post", "note")
    side.handles.append(getattr(module, registrar)(hook.__call__ if bound else hook))
