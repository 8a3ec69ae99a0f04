"""Random module trees as plain data, and how to build one on either implementation."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers import Implementation
from tests.property import choices
from tests.property.classes import MIXED, OVERRIDDEN


# Few names, so that operations often meet members that exist. Some are odd on purpose: digits,
# spaces, a keyword, a name that is not an identifier, names of methods and of layers' parameters.
VALID_NAMES = ["a", "b", "c", "0", "1", "weight", "bias", "x y", "class", "né"]
# Names that some ways of registering refuse.
ODD_NAMES = ["", "a.b", "type", "forward"]


# Classes of users: plain ones, one with extra state, and ones that override a method.
NODES = ["Node", "Counting", *(f"Overrides{method}" for method in OVERRIDDEN), *MIXED]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor whose values follow from its shape, its type and one number."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    def build(self) -> torch.Tensor:
        """Make the tensor: an arithmetic progression, cast to the type."""
        count = 1
        for size in self.shape:
            count *= size
        values = (torch.arange(count, dtype=torch.float64) + self.start) / 8
        return values.to(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Member:
    """One member of a module: its kind, its name and its value."""

    kind: str
    name: str
    value: Any = None
    persistent: bool = True


@dataclass(frozen=True)
class ModuleSpec:
    """A module: its class, its members, and the children of a container."""

    kind: str
    members: tuple[Member, ...] = ()
    children: tuple["ModuleSpec", ...] = ()


@dataclass
class Builder:
    """Builds specs on one implementation, and remembers objects for sharing."""

    impl: Implementation
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)

    def parameter(self, spec: TensorSpec | None) -> Any:
        """Make a parameter, which requires grad if its type can."""
        if spec is None:
            return None
        differentiable = spec.dtype.is_floating_point or spec.dtype.is_complex
        made = self.impl.nn.Parameter(spec.build(), requires_grad=differentiable)
        self.parameters.append(made)
        return made

    def module(self, spec: ModuleSpec | None) -> Any:
        """Make a module with its members."""
        if spec is None:
            return None
        made = self._bare(spec)
        for member in spec.members:
            self._add(made, member)
        self.parameters.extend(p for p in made._parameters.values() if p is not None)
        self.modules.append(made)
        return made

    def _bare(self, spec: ModuleSpec) -> Any:
        nn = self.impl.nn
        children = [self.module(child) for child in spec.children]
        if spec.kind in NODES:
            home = importlib.import_module(f"tests.property.nodes_{self.impl.name}")
            made = getattr(home, spec.kind)
            return made[int]() if spec.kind == "GenericNode" else made()
        if spec.kind == "Sequential":
            return nn.Sequential(*children)
        if spec.kind == "ModuleList":
            return nn.ModuleList(children)
        if spec.kind == "ModuleDict":
            return nn.ModuleDict({f"k{index}": child for index, child in enumerate(children)})
        if spec.kind == "ParameterList":
            return nn.ParameterList([self.parameter(TensorSpec((2,), torch.float32, 1))])
        if spec.kind == "ParameterDict":
            return nn.ParameterDict({"p": self.parameter(TensorSpec((2,), torch.float32, 2))})
        arguments = {
            "Linear": (3, 3),
            "LazyLinear": (3,),
            "BatchNorm1d": (3,),
            "LayerNorm": (3,),
            "Dropout": (0.5,),
        }
        return getattr(nn, spec.kind)(*arguments.get(spec.kind, ()))

    def _add(self, module: Any, member: Member) -> None:
        if member.kind != "odd child" and hasattr(module, member.name):
            return
        if member.kind == "parameter":
            module.register_parameter(member.name, self.parameter(member.value))
        elif member.kind == "buffer":
            value = None if member.value is None else member.value.build()
            module.register_buffer(member.name, value, persistent=member.persistent)
        elif member.kind == "child":
            module.add_module(member.name, self.module(member.value))
        elif member.kind == "odd child":
            setattr(module, member.name, self.module(member.value))
        elif member.kind == "tied" and self.parameters:
            setattr(module, member.name, self.parameters[member.value % len(self.parameters)])
        elif member.kind == "shared" and self.modules:
            setattr(module, member.name, self.modules[member.value % len(self.modules)])
        elif member.kind == "plain":
            setattr(module, member.name, member.value)


valid_names = choices.sampled_from(VALID_NAMES)
all_names = choices.sampled_from(VALID_NAMES + ODD_NAMES)
dtypes = choices.sampled_from(
    [torch.float32, torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64]
)
shapes = choices.sampled_from([(3,), (), (1,), (2, 3), (0,), (1, 2, 1, 2)])
tensors = choices.builds(TensorSpec, shapes, dtypes, choices.integers(-4, 4))
plain_values = choices.sampled_from([None, 3, 1.5, "text", True])

LAYERS = ["Identity", "Linear", "BatchNorm1d", "LayerNorm", "Dropout", "Tanh", "PReLU"]
LAZY = ["LazyLinear", "LazyBatchNorm1d"]
layers = choices.builds(
    ModuleSpec, choices.sampled_from([*LAYERS * 2, *LAZY, "ParameterList", "ParameterDict", "Node"])
)


@choices.composite
def members(draw: choices.Draw, depth: int) -> tuple[Member, ...]:
    """Draw the members of a Node, with different names."""
    names = draw(choices.lists(valid_names, min_size=1, max_size=4, unique=True))
    found = []
    for name in names:
        kind = draw(
            choices.sampled_from(
                ["child", "parameter", "buffer", "child", "tied", "shared", "plain"]
            )
        )
        value: Any = None
        if kind in {"parameter", "buffer"}:
            value = draw(choices.none() | tensors)
        elif kind == "child":
            value = draw(choices.one_of(modules(depth - 1), modules(depth - 1), choices.none()))
        elif kind in {"tied", "shared"}:
            value = draw(choices.integers(0, 9))
        else:
            value = draw(plain_values)
        found.append(Member(kind, name, value, draw(choices.booleans())))
    if depth and draw(choices.integers(0, 4)) == 0:
        found.append(Member("odd child", draw(choices.sampled_from(ODD_NAMES)), draw(layers)))
    return tuple(found)


@choices.composite
def modules(draw: choices.Draw, depth: int = 2) -> ModuleSpec:
    """Draw a module of at most `depth` levels below it."""
    if depth == 0:
        return draw(layers)
    kind = draw(
        choices.sampled_from(["Node", "Node", "Sequential", "ModuleList", "ModuleDict", ""])
    )
    if kind == "":
        return draw(layers)
    if kind == "Node":
        own = draw(choices.sampled_from(["Node", "Node", *NODES]))
        return ModuleSpec(own, members=draw(members(depth)))
    children = draw(choices.lists(modules(depth - 1), min_size=1, max_size=3))
    return ModuleSpec(kind, children=tuple(children))


@choices.composite
def trees(draw: choices.Draw) -> ModuleSpec:
    """Draw a whole tree; its root is a user class, so that it can be called, with one child at least."""
    children = draw(choices.lists(modules(2), min_size=1, max_size=3))
    named = [Member("child", f"m{number}", child) for number, child in enumerate(children)]
    own = draw(choices.sampled_from(["Node", *NODES]))
    return ModuleSpec(own, members=(*named, *draw(members(1))))
