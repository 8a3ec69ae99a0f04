"""User classes of the random trees that mix bases, and ones that override what libraries rely on."""

import abc
import dataclasses
import types
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from tests.helpers import TORCH, Implementation
from tests.property.node_tools import LOG, override


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
