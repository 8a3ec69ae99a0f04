"""The cells of a notebook: its classes cannot be imported, so they are pickled by value."""

from types import SimpleNamespace

from tests.helpers import Implementation


# `{library}` is the name of the implementation. `CASES` has one network, or function, of each kind, and
# `describe` what must be the same after pickling. All of it is pickled, so `describe` goes along.
CELLS = """
import abc
import inspect
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
import {library}.nn as nn
from {library} import jit

T = TypeVar("T")


class Plain(nn.Module):
    '''Has class attributes, methods of every kind and a call of super().'''

    width: int = 2
    names = ("a", "b")

    def __init__(self, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(self.width, self.width)
        self.register_buffer("scale", torch.tensor(scale))

    @classmethod
    def double(cls):
        return cls(scale=2.0)

    @staticmethod
    def shift(x):
        return x + 1

    @property
    def names_joined(self):
        return "-".join(self.names)

    def forward(self, x):
        return self.shift(nn.functional.relu(self.linear(x))) * self.scale


class Derived(Plain):
    def forward(self, x):
        return super().forward(x) - 1


class Compiling(nn.Module):
    '''Reads both namespaces of the library in a method.'''

    def forward(self, x):
        return jit.annotate(torch.Tensor, nn.Identity()(x))


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return x * 3


class Virtual:
    pass


class Open(nn.Module, metaclass=abc.ABCMeta):
    '''A class whose registry holds another one.'''

    def forward(self, x):
        return x


class BelowOpen(Open):
    pass


Open.register(Virtual)


@runtime_checkable
class HasWidth(Protocol):
    def width(self) -> int: ...


class Explicit(nn.Module, HasWidth):
    def width(self):
        return 3

    def forward(self, x):
        return x * self.width()


class Box(nn.Module, Generic[T]):
    def __init__(self, item: T):
        super().__init__()
        self.item = item

    def forward(self, x):
        return self.item(x)


class LayerAndModule(nn.Linear, nn.Module):
    pass


def in_a_function(factor):
    class Local(nn.Module):
        def forward(self, x):
            return x * factor + Local.extra

        extra = 1

    return Local()


def describe(made):
    x = torch.ones(1, 2)
    cls = type(made)
    found = dict(
        name=cls.__name__,
        bases=[base.__name__ for base in cls.__mro__ if base.__name__ != "Module"],
        module=isinstance(made, nn.Module) and issubclass(cls, torch.nn.Module),
        abstract=inspect.isabstract(cls),
        output=made(x).tolist(),
        # Python 3.14 has a function for annotations, which pickles do not keep.
        own=sorted(
            name
            for name, value in vars(cls).items()
            if inspect.isfunction(value) and not name.startswith("__annotat")
        ),
        virtual=[issubclass(Virtual, each) for each in (Open, BelowOpen, Abstract, Plain)],
        refused=inspect.isabstract(Abstract),
        protocol=isinstance(made, HasWidth),
    )
    if isinstance(made, nn.Module):
        made.added = nn.PReLU()
        found.update(
            state={{name: value.tolist() for name, value in made.state_dict().items()}},
            members=sorted(made._modules),
            training=made.eval().training,
        )
        del made.added
    return found


CASES = dict(
    plain=Plain.double(),
    derived=Derived(),
    compiling=Compiling(),
    concrete=Concrete(),
    open=Open(),
    below_open=BelowOpen(),
    explicit=Explicit(),
    generic=Box[int](Plain()),
    layer=LayerAndModule(2, 2),
    local=in_a_function(2),
    tree=nn.Sequential(Plain(), nn.ModuleList([Concrete()])[0], nn.ReLU()),
    function=lambda x: nn.ReLU()(x),
    constructor=lambda x: Derived()(x) * 0,
)
"""


def run_cells(impl: Implementation) -> SimpleNamespace:
    """Run the cells in a namespace like that of a notebook, and return what they define."""
    namespace = {"__name__": "__main__"}
    exec(compile(CELLS.format(library=impl.name), "<cell>", "exec"), namespace)
    return SimpleNamespace(**namespace)
