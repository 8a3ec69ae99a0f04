"""Behaviors of a module without hooks and files: members, walks, modes, casts, classes, copies."""

# The networks are known only when a library is chosen, so the lambdas take and return anything.
# pyright: reportUnknownLambdaType=false

import abc
import copy
import io
import pickle
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import Buffer, Linear, Parameter, ReLU

from modkit.compat.behaviours.cases import Cases, Uses, on_net, tried
from modkit.compat.outcomes import Library


X: Final = torch.ones(2, 3)


def reloaded(value: Any) -> Any:
    """Return the result of ``torch.load`` after ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sub(lib: Library, *mixins: type, **members: Any) -> Any:
    """Return a class of modules with mixins in front and these members."""
    return type(lib.nn.Module)("Sub", (*mixins, lib.nn.Module), members)


def filled_memo(net: Any) -> bool:
    """Return True if a walk adds each module that it yields to the memo."""
    memo: set[Any] = set()
    return len(list(net.named_modules(memo))) == len(memo)


def assigned_early(lib: Library, value: Any) -> None:
    """Assign a member of a module whose constructor does not call ``super().__init__()``."""
    module = sub(lib, __init__=lambda self: None)()
    module.member = value


def backward(net: Any) -> None:
    """Compute gradients."""
    net(X).square().sum().backward()


def overridden(lib: Library, name: str, use: Any) -> Any:
    """Use a tree in which a class overrides a method; return how the override was called."""
    calls: list[Any] = []

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((len(args), sorted(kwargs)))
        return getattr(super(cls, self), name)(*args, **kwargs)

    cls = sub(lib, **{name: override, "forward": lambda self, x: x})
    net = lib.net()
    net.other = cls()
    calls.clear()
    return use(net), calls


class Counted:
    """A mixin with a constructor that passes its arguments on."""

    def __init__(self, *args: Any, count: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = count


MEMBERS: Final[Uses] = {
    "assigning a parameter": lambda n: setattr(n, "p", Parameter(X)),
    "assigning None to a parameter": lambda n: setattr(n, "offset", None),
    "assigning a tensor to a parameter": lambda n: setattr(n, "offset", X),
    "deleting a parameter": lambda n: delattr(n, "offset"),
    "reading what is not there": lambda n: n.nothing,
    "register_parameter()": lambda n: n.register_parameter("p", None),
    "register_buffer()": lambda n: n.register_buffer("b", X, persistent=False),
    "add_module() in a place that is taken": lambda n: n.add_module("last", Linear(4, 3)),
    "get_submodule()": lambda n: n.get_submodule("blocks.1.linear"),
    "set_submodule()": lambda n: n.set_submodule("blocks.0.linear", ReLU()),
    "the classes of tables": lambda n: [type(n._parameters), type(n._buffers), type(n._modules)],
}
ERRORS: Final[Uses] = {
    "register_parameter(): a tensor": lambda n: n.register_parameter("p", X),
    "register_parameter(): a dot": lambda n: n.register_parameter("a.b", None),
    "register_parameter(): no name": lambda n: n.register_parameter("", None),
    "register_parameter(): no leaf": lambda n: n.register_parameter("p", n.offset * 2),
    "add_module(): no module": lambda n: n.add_module("m", 1),
    "get_submodule(): no such child": lambda n: n.get_submodule("blocks.7.linear"),
    "get_parameter(): no such member": lambda n: n.get_parameter("last.nothing"),
    "to(): integers": lambda n: n.to(torch.int64),
}
TRAVERSAL: Final[Uses] = {
    "modules()": lambda n: [type(m) for m in n.modules()],
    "named_modules()": lambda n: [name for name, _ in n.named_modules(prefix="root")],
    "every place": lambda n: [name for name, _ in n.named_modules(remove_duplicate=False)],
    "a memo": lambda n: [name for name, _ in n.named_modules({n.again})],
    "a memo is filled": filled_memo,
    "named_children()": lambda n: [name for name, _ in n.named_children()],
    "parameters()": lambda n: n.parameters(),
    "named_parameters()": lambda n: n.named_parameters("root"),
    "tied parameters": lambda n: n.named_parameters(remove_duplicate=False),
    "named_buffers()": lambda n: n.named_buffers(prefix="root"),
    "shared buffers": lambda n: n.named_buffers(remove_duplicate=False),
    "walks are lazy": lambda n: [type(n.modules()), type(n.parameters()), type(n.named_buffers())],
    "apply()": lambda n: (n.apply(lambda m: setattr(n, "last_seen", type(m))), n.last_seen),
    "a change during a walk": lambda n: [delattr(n, "last") for _ in n.children()],
}
MODES: Final[Uses] = {
    "eval()": lambda n: n.eval(),
    "train()": lambda n: (n.blocks.eval(), n.train()),
    "requires_grad_()": lambda n: n.requires_grad_(False),
    "gradients": backward,
    "gradients add up": lambda n: (backward(n), backward(n)),
    "zero_grad()": lambda n: (backward(n), n.zero_grad()),
    "output in training mode": lambda n: n(torch.randn(3, 3)),
    "output in evaluation mode": lambda n: n.eval()(torch.randn(3, 3)),
    "output in inference mode": lambda n: torch.inference_mode()(n)(X).is_inference(),
    "autocast": lambda n: torch.autocast("cpu", torch.bfloat16)(n)(X),
    "a step": lambda n: (backward(n), torch.optim.AdamW(n.parameters()).step()),
}
CONVERSION: Final[Uses] = {
    "double()": lambda n: n.double(),
    "half() and float()": lambda n: n.half().float(),
    "type()": lambda n: n.type(torch.float64),
    "to(tensor)": lambda n: n.to(X.double()),
    "to(device, dtype)": lambda n: n.to("cpu", torch.float64, non_blocking=True),
    "complex parameters": lambda n: n.to(torch.complex64),
    "to_empty()": lambda n: n.last.to_empty(device="meta"),
    "identity of parameters": lambda n: n.offset is n.double().offset,
    "gradients are converted": lambda n: (backward(n), n.double()),
    "tied parameters": lambda n: n.double().tied.weight is n.blocks[1].linear.weight,
    "share_memory()": lambda n: n.share_memory().offset.is_shared(),
    "_apply(recurse=False)": lambda n: n._apply(lambda tensor: tensor * 2, recurse=False),
}
TEXT: Final[Uses] = {
    "repr()": repr,
    "extra_repr() of several lines": lambda n: (setattr(n.again, "gain", "1\n2"), repr(n)),
    "dir() lists members": lambda n: [name for name in dir(n) if name in {"offset", "blocks"}],
    "names of torch's Module": lambda n: {*dir(nn.Module)} - {*dir(n)},
    "hash and equality": lambda n: [n == copy.copy(n), hash(n) == object.__hash__(n)],
}
COPIES: Final[Uses] = {
    "copy": copy.copy,
    "copy shares tensors, not tables": lambda n: [
        (m.offset is n.offset, m._parameters is n._parameters) for m in [copy.copy(n)]
    ],
    "deepcopy": copy.deepcopy,
    "deepcopy keeps ties": lambda n: [m.again is m.blocks[0] for m in [copy.deepcopy(n)]],
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),  # noqa: S301 - written in this line
    "torch.save": reloaded,
}
CLASSES: Final[Uses] = {
    "a module is torch's": lambda lib: isinstance(lib.net(), nn.Module),
    "torch's modules are modules": lambda lib: isinstance(ReLU(), lib.nn.Module),
    "torch's layers are subclasses": lambda lib: issubclass(ReLU, lib.nn.Module),
    "layers are torch's own": lambda lib: [lib.nn.Linear is Linear, lib.nn.ReLU is ReLU],
    "names of the namespace": lambda lib: {*dir(nn)} - {*dir(lib.nn)},
    "a mixin with a constructor": lambda lib: sub(lib, Counted)(count=2).count,
    "an abstract class": lambda lib: sub(lib, abc.ABC, f=abc.abstractmethod(lambda self: 0))(),
    "arguments of super().__init__()": lambda lib: lib.nn.Module(1, two=2),
    "call_super_init": lambda lib: sub(lib, call_super_init=True)(two=2),
    "a property": lambda lib: sub(lib, size=property(lambda self: 3))().size,
    "a property that raises": lambda lib: sub(lib, size=property(lambda self: self.no))().size,
    "a forward of an instance": lambda lib: [
        (setattr(n, "forward", torch.neg), n(X)) for n in [lib.net()]
    ],
    **{
        f"before super().__init__(): {type(value).__name__}": partial(assigned_early, value=value)
        for value in (Parameter(X), ReLU(), Buffer(X), 1)
    },
}
OVERRIDES: Final[Uses] = {
    "train": lambda n: n.eval(),
    "_apply": lambda n: n.double(),
    "requires_grad_": lambda n: n.requires_grad_(False),
    "named_parameters": lambda n: n.other.parameters(),
    "named_modules": lambda n: list(n.modules()),
    "state_dict": lambda n: list(n.state_dict()),
    "_save_to_state_dict": lambda n: list(n.state_dict()),
    "_load_from_state_dict": lambda n: n.load_state_dict(n.state_dict()),
    "__setattr__": lambda n: setattr(n.other, "flag", 1),
    "__call__": lambda n: n.other(X),
    "_call_impl": lambda n: n.other(X),
    "extra_repr": repr,
}


def lazy(lib: Library, use: Any) -> Any:
    """Return a network of lazy modules after a use, with the result of the use."""
    net = lib.nets.Pair(nn.LazyLinear(4), nn.Sequential(nn.LazyBatchNorm1d(), ReLU()))
    return tried(use, net), net


LAZY: Final[Uses] = {
    "a call": lambda n: n(X),
    "a state dict before a call": lambda n: n.state_dict(),
    "loading before a call": lambda n: n.load_state_dict(copy.copy(n).state_dict()),
    "a cast before a call": lambda n: n.double()(X.double()),
    "share_memory() before a call": lambda n: n.share_memory(),
}


AREAS: Final[dict[str, Cases]] = {
    "members": on_net(MEMBERS),
    "errors": on_net(ERRORS),
    "traversal": on_net(TRAVERSAL),
    "modes and gradients": on_net(MODES),
    "conversion": on_net(CONVERSION),
    "text and dir": on_net(TEXT),
    "copies and pickles": on_net(COPIES),
    "class protocol": {
        **CLASSES,
        **{f"an override of {n}": partial(overridden, name=n, use=f) for n, f in OVERRIDES.items()},
    },
    "lazy modules": {name: partial(lazy, use=use) for name, use in LAZY.items()},
}
