"""Everything else that a module does: none of it may be slower than in torch."""

import copy
import pickle
from types import ModuleType
from typing import Any, Final

import torch

from modkit.cli._row_kinds import Names, Row, Time


NOT_SLOWER: Final = 1.05


def user_model(nn: ModuleType, body: object) -> Any:
    """Put layers below a user's class: of all modules, only that one is modkit's."""

    class Model(nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: object) -> object:
            return x

    model = Model()
    model.body = body
    return model


def user_class(nn: ModuleType) -> Any:
    """Define a user's module with two layers, at module level, so that it can be pickled."""
    name = f"Block_{nn.__name__.partition('.')[0]}"
    if name not in globals():

        class Block(nn.Module):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.second = nn.Linear(8, 8)
                self.blocks = nn.ModuleList()
                self.scale = nn.Parameter(torch.ones(8))
                self.register_buffer("offset", torch.zeros(8))

            def forward(self, x: torch.Tensor) -> Any:
                for block in self.blocks:
                    x = block(x)
                return self.second(self.first(x).relu()) * self.scale + self.offset

        Block.__name__ = Block.__qualname__ = name
        globals()[name] = Block
    return globals()[name]


def members(nn: ModuleType) -> Names:
    """Make a block, and something of each kind to register in it."""
    return {
        "m": user_class(nn)(),
        "parameter": nn.Parameter(torch.ones(8)),
        "tensor": torch.ones(8),
        "child": nn.Linear(1, 1),
    }


def tree(nn: ModuleType) -> Names:
    """Make twenty blocks below another block."""
    block = user_class(nn)
    model = block()
    model.blocks.extend(block() for _ in range(20))
    return {
        "m": model,
        "x": torch.ones(1, 8),
        "copy": copy,
        "pickle": pickle,
        "data": pickle.dumps(model),
        "torch": torch,
    }


def ignore(*args: object, **kwargs: object) -> None:
    """Do nothing, as a hook."""


def failing(nn: ModuleType) -> Names:
    """Make a module whose forward raises, with a hook that is called all the same."""

    class Failing(nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: object) -> object:
            raise ValueError

    module = Failing()
    module.register_forward_hook(ignore, always_call=True)
    return {"m": module, "x": torch.ones(1)}


def hooked(register: str, count: int = 1, **options: bool) -> Any:
    """Return a maker of a module with that many hooks that change nothing."""

    def make(nn: ModuleType) -> Names:
        class Identity(nn.Module):  # type: ignore[name-defined, misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.view_as(x)

        module = Identity()
        for _ in range(count):
            getattr(module, register)(ignore, **options)
        return {"m": module, "x": torch.ones(1, requires_grad=True)}

    return make


def classes(nn: ModuleType) -> Names:
    """Give the class to derive from."""
    return {"Module": nn.Module}


def block_class(nn: ModuleType) -> Names:
    """Give the class of a user's module with two layers."""
    return {"Block": user_class(nn)}


def compiling(nn: ModuleType) -> Names:
    """Make a network that dynamo has not seen, and forget what it has seen of others."""
    names = tree(nn)

    def trace() -> None:
        torch.compiler.reset()
        torch.compile(names["m"], backend="eager", fullgraph=True)(names["x"])

    return {"trace": trace}


def compiled(nn: ModuleType) -> Names:
    """Make a compiled network: what a call of it costs is mostly dynamo's guards."""
    names = tree(nn)
    function = torch.compile(names["m"], backend="eager", fullgraph=True)
    function(names["x"])
    return {"m": function, "x": names["x"]}


_RAISING = "try: m(x)\nexcept ValueError: pass"
_EXPORT = "torch.export.export(m, (x,))"


def _row(name: str, statement: str, make: Any) -> Time:
    return Time(name, NOT_SLOWER, statement, make)


MODULE_ROWS: Final[list[Row]] = [
    _row("register_parameter()", "m.register_parameter('scale', parameter)", members),
    _row("register_buffer()", "m.register_buffer('offset', tensor)", members),
    _row("add_module()", "m.add_module('first', child)", members),
    _row("m.scale = Parameter", "m.scale = parameter", members),
    _row("m.scale = None", "m.scale = None", members),
    _row("m.offset = tensor", "m.offset = tensor", members),
    _row("m.first = Module", "m.first = child", members),
    _row("m.new = Parameter; del m.new", "m.new = parameter; del m.new", members),
    _row("get_submodule()", "m.get_submodule('blocks.7.first')", tree),
    _row("user block with two layers()", "Block()", block_class),
    _row("class definition", "class Net(Module): pass", classes),
    _row("copy.copy()", "copy.copy(m)", tree),
    _row("copy.deepcopy(), 84 modules", "copy.deepcopy(m)", tree),
    _row("pickle.dumps(), 84 modules", "pickle.dumps(m)", tree),
    _row("pickle.loads(), 84 modules", "pickle.loads(data)", tree),
    _row("repr(), 84 modules", "repr(m)", tree),
    _row("apply(), 84 modules", "m.apply(id)", tree),
    _row("forward of a block", "m(x)", tree),
    _row("m(x), forward pre-hook", "m(x)", hooked("register_forward_pre_hook")),
    _row("m(x), hook with kwargs", "m(x)", hooked("register_forward_hook", with_kwargs=True)),
    _row("m(x), ten forward hooks", "m(x)", hooked("register_forward_hook", 10)),
    _row("m(x), full backward hook", "m(x)", hooked("register_full_backward_hook")),
    _row("m(x) that raises, always_call hook", _RAISING, failing),
    _row("torch.fx.symbolic_trace()", "torch.fx.symbolic_trace(m)", tree),
    _row("torch.export.export()", _EXPORT, tree),
    _row("dynamo trace", "trace()", compiling),
    _row("call of a compiled network", "m(x)", compiled),
]
