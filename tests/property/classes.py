"""Classes and hooks of users for random trees, and the log that they write."""

import abc
import dataclasses
import re
import types
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from tests.helpers import TORCH, Implementation, freeze


# The log of the side that is running.
LOG: Final[list[Any]] = []


def override(base: type, method: str) -> type:
    """Make a subclass whose method logs its arguments and passes them on."""

    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        keywords = [(name, summary(value)) for name, value in kwargs.items()]
        LOG.append((method, [summary(value) for value in args], keywords))
        return getattr(super(overriding, self), method)(*args, **kwargs)

    overriding = type("Overriding", (base,), {method: logging})
    return overriding


def summary(value: Any) -> Any:
    """Describe an argument so that both implementations compare equal."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if callable(value):
        return "callable"
    for kind in (list, set, dict):
        if isinstance(value, kind):
            return kind.__name__, len(value)
    return type(value).__name__


def plain_text(message: object) -> str:
    """Return the text of an error without addresses, and with modkit's homes named like torch's."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", str(message))
    return text.replace("nodes_modkit", "nodes_torch").replace("modkit.nn.", "torch.nn.")


T = TypeVar("T")

# Methods that mixins which are modules of torch override, before or behind a user's class.
MIXED_IN: Final = (
    "forward",
    "train",
    "_apply",
    "state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "named_modules",
    "named_parameters",
    "children",
    "__setattr__",
    "__delattr__",
    "register_parameter",
    "extra_repr",
    "_call_impl",
    "__call__",
)


class Plain:
    """A mixin that is not a module, with a cooperative `__init__` and override."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plain = 1

    def train(self, mode: bool = True) -> Any:
        """Log the call."""
        LOG.append(("Plain.train", mode))
        return super().train(mode)  # type: ignore[misc]


class Behind:
    """A mixin behind `Module`, which receives the arguments that `Module` passes on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        LOG.append(("Behind.__init__", args))
        self.behind = 1

    def __setattr__(self, name: str, value: Any) -> None:
        LOG.append(("Behind.__setattr__", name))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        LOG.append(("Behind.__delattr__", name))
        super().__delattr__(name)


class Slotted:
    """A mixin with a slot."""

    __slots__ = ("slot",)


class Silent:
    """A mixin whose `__init_subclass__` does not cooperate."""

    def __init_subclass__(cls, **_: Any) -> None: ...


class Encodes(Protocol):
    """A protocol with one method."""

    plain: int

    def encode(self) -> int:
        """Encode."""


class Lora(torch.nn.Module):
    """A module of a library: it has a parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora = torch.nn.Parameter(torch.ones(2))


class Sized:
    """A mixin that builds a layer without arguments."""

    size: tuple[Any, ...] = (3, 3)

    def __init__(self) -> None:
        super().__init__(*self.size)


def mixed_bases(impl: Implementation, node: Any) -> dict[str, Any]:
    """Define classes with bases of several kinds."""
    nn = impl.nn
    bases: dict[str, tuple[Any, ...]] = {
        "PlainBefore": (Plain, node),
        "LoraBehind": (node, Lora),
        "LoraBefore": (Lora, node),
        "LayerBehind": (Sized, node, torch.nn.Linear),
        "OwnLinear": (Sized, torch.nn.Linear, impl.Module),
        "OwnSequential": (torch.nn.Sequential, impl.Module),
        "OwnModuleList": (node, torch.nn.ModuleList),
        "OwnModuleDict": (node, torch.nn.ModuleDict),
        "WithSlot": (Slotted, node),
        "BehindSilent": (Silent, node),
        "WithProtocol": (node, Encodes),
        "GenericNode": (node, Generic[T]),
        "OwnLazy": (Sized, torch.nn.LazyLinear, impl.Module),
    }
    found = {name: new_class(name, some) for name, some in bases.items()}
    found["OwnNorm"] = new_class(
        "OwnNorm", (Sized, torch.nn.BatchNorm1d, nn.Module), {"size": (3,)}
    )
    found["OwnLazy"].size = (3,)
    found["OwnLazy"].cls_to_become = found["OwnLinear"]
    found["CallsInit"] = new_class("CallsInit", (node, Behind), {"call_super_init": True})
    for method in MIXED_IN:
        mixin = override(torch.nn.Module, method)
        found[f"{method}Behind"] = new_class("X", (node, mixin))
        found[f"{method}Before"] = new_class("X", (mixin, node))

    class Abstract(node, abc.ABC):
        @abc.abstractmethod
        def encode(self) -> int: ...

    class Concrete(Abstract):
        def encode(self) -> int:
            return 1

    return {**found, "Abstract": Abstract, "Concrete": Concrete}


def new_class(name: str, bases: tuple[Any, ...], body: dict[str, Any] | None = None) -> Any:
    """Define a class."""
    return types.new_class(name, bases, {}, lambda namespace: namespace.update(body or {}))


def unusual(node: Any) -> dict[str, Any]:  # noqa: C901 - one class after the other
    """Define classes with special methods, and ones that take part in saving, loading and copying."""

    @dataclasses.dataclass(eq=False)
    class Data(node):
        width: int = 3
        names: Any = dataclasses.field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__()

    class Falsy(node):
        def __bool__(self) -> bool:
            return False

        def __len__(self) -> int:
            return 0

    class Properties(node):
        @property
        def first(self) -> Any:
            return next(iter(self._modules.values()))

        @property
        def broken(self) -> Any:
            return self.nothing

        @property
        def weight(self) -> Any:
            return self._parameters.get("weight")

        @weight.setter
        def weight(self, value: Any) -> None:
            LOG.append("weight set")
            self._parameters["weight"] = value

    class Both(node):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            LOG.append("__call__")
            return super().__call__(*args, **kwargs)

        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            LOG.append("_call_impl")
            return super()._call_impl(*args, **kwargs)

    class Idiom(node):
        """Report a missing key as torch's own quantizers do."""

        def _load_from_state_dict(self, state, prefix, metadata, strict, missing, *rest) -> None:
            if f"{prefix}n" in state:
                state.pop(f"{prefix}n")
            elif strict:
                missing.append(f"{prefix}n")
            super()._load_from_state_dict(state, prefix, metadata, strict, missing, *rest)

    class Renaming(node):
        """Rename a key of old checkpoints, with a hook of each private kind."""

        _version = 2

        def __init__(self) -> None:
            super().__init__()
            self._register_state_dict_hook(self._saved)
            self._register_load_state_dict_pre_hook(self._upgrade)
            self.register_load_state_dict_pre_hook(type(self)._upgrade_module)

        @staticmethod
        def _saved(module: Any, state: Any, prefix: str, metadata: Any) -> Any:
            LOG.append(("saved", prefix, len(state)))
            return state if prefix else None

        def _upgrade(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            LOG.append(("upgrade", prefix, metadata.get("version"), len(rest)))
            if f"{prefix}old" in state:
                state[f"{prefix}a"] = state.pop(f"{prefix}old")

        @staticmethod
        def _upgrade_module(module: Any, state: Any, prefix: str, *rest: Any) -> None:
            LOG.append(("upgrade of", type(module).__name__, prefix, len(rest)))

    class Stateful(node):
        """Define `__getstate__`."""

        def __getstate__(self) -> dict[str, Any]:
            return {k: v for k, v in self.__dict__.items() if k != "training"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__({**state, "training": False})

    class Attentive(node):
        """Look up missing attributes in the children."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                LOG.append(("__getattr__", name))
                for child in self.__dict__.get("_modules", {}).values():
                    if name in getattr(child, "__dict__", ()):
                        return child.__dict__[name]
                raise

    classes = (Data, Falsy, Properties, Both, Idiom, Renaming, Stateful, Attentive)
    return {each.__name__: each for each in classes}


def define_mixed(impl: Implementation, node: Any) -> dict[str, Any]:
    """Define the classes of this file."""
    return {**mixed_bases(impl, node), **unusual(node)}


# Those that random trees are made of; `Abstract` cannot be built.
MIXED: Final = tuple(
    name for name in define_mixed(TORCH, type("Any", (torch.nn.Module,), {})) if name != "Abstract"
)


# Containers that are not called themselves: their children are, in order.
TRANSPARENT = ("ModuleList", "ModuleDict")
# Containers of parameters, which have nothing to call.
SILENT = ("ParameterList", "ParameterDict")
# The methods that users override; an override logs its call and passes it on.
OVERRIDDEN = (
    "train",
    "eval",
    "_apply",
    "apply",
    "float",
    "zero_grad",
    "requires_grad_",
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "modules",
    "named_modules",
    "children",
    "named_children",
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "_named_members",
    "register_parameter",
    "register_buffer",
    "add_module",
    "__setattr__",
    "__delattr__",
    "__repr__",
    "extra_repr",
    "_get_name",
    "get_submodule",
    "_call_impl",
    "_get_backward_hooks",
)


def define_classes(impl: Implementation, home: str) -> dict[str, type]:
    """Define the classes of the file `home` as modules of the implementation."""

    class Node(impl.Module):
        """Add the sums of all own tensors to the input, then pass it through the children."""

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            for value in [*self._parameters.values(), *self._buffers.values()]:
                if value is not None and value.is_floating_point():
                    x = x + value.to(x.dtype).sum() * scale
            return pass_through(self._modules.values(), x)

    class Counting(Node):
        """A module whose extra state is its number of calls."""

        calls = 0

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            self.calls += 1
            return super().forward(x, scale)

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    class Reader(impl.Module):
        """A module that reads its members as attributes."""

        residual = False

        def forward(self, x: Any, scale: float = 1.0) -> Any:
            hidden = self.act(self.inner(x) * self.scale + self.shift)
            for child in self.more:
                hidden = child(hidden)
            hidden = hidden * scale
            return x + hidden if self.residual else hidden

    class Forwarding(impl.Module):
        """A wrapper that looks up missing attributes in the wrapped module, and logs each lookup."""

        def forward(self, x: Any, **kwargs: Any) -> Any:
            return self.inner(x, **kwargs) * self.scale

        def __getattr__(self, name: str) -> Any:
            LOG.append(("__getattr__", name))
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "inner":
                    raise
                return getattr(self.inner, name)

    classes = {"Node": Node, "Counting": Counting, "Reader": Reader, "Forwarding": Forwarding}
    for method in OVERRIDDEN:
        classes[f"Overrides{method}"] = override(Node, method)
    classes.update(define_mixed(impl, Node))
    for name, defined in classes.items():
        defined.__module__ = home
        defined.__name__ = defined.__qualname__ = name
    return classes


def pass_through(children: Any, x: Any) -> Any:
    """Call the children one after the other, looking into containers that cannot be called."""
    for child in children:
        if child is None or type(child).__name__ in SILENT:
            continue
        if type(child).__name__ in TRANSPARENT:
            x = pass_through(child._modules.values(), x)
        else:
            x = child(x)
    return x


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
