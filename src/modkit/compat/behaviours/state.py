"""State dicts: saving and loading them."""

# The networks are known only when a library is chosen, so the lambdas take and return anything.
# pyright: reportUnknownLambdaType=false

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.nn import Parameter

from modkit.compat.behaviours.cases import Cases, Uses, cases_of, on_net, tried
from modkit.compat.behaviours.hooks import Log, fails
from modkit.compat.behaviours.module import reloaded
from modkit.compat.outcomes import Library


ONES: Final = torch.ones(3)


def load(lib: Library, changes: Any, **options: Any) -> Any:
    """Load a state dict with other entries; those that are None are left out."""
    net = lib.net()
    state = {**{name: -value for name, value in net.state_dict().items()}, **changes}
    state = {name: value for name, value in state.items() if value is not None}
    result = tried(net.load_state_dict, state, **options)
    # A refused load leaves more behind in torch: a listed difference.
    return result, None if isinstance(result, str) else net


def with_hook(lib: Library, kind: str, use: Any, result: Any = None) -> Any:
    """Use a network whose block has a hook."""
    net, log = lib.net(), Log()
    # Private kinds have a private method.
    method = f"_register{kind}" if kind.startswith("_") else f"register_{kind}"
    getattr(net.again, method)(log.hook(kind, result))
    return tried(use, net), log


def with_part(lib: Library, use: Any, **members: Any) -> Any:
    """Use a network with a part that has unusual members."""
    net = lib.net()
    net.part = type(lib.nn.Module)("Part", (lib.nn.Module,), members)()
    return tried(use, net), getattr(net.part, "seen", None)


def stores(module: Any, *arguments: Any) -> None:
    """Record the arguments of a method of a part."""
    module.seen = [type(arg) if isinstance(arg, OrderedDict) else arg for arg in arguments]


def save(net: Any) -> Any:
    """Return the state dict."""
    return net.state_dict()


def load_own(net: Any) -> Any:
    """Load the state dict of the network."""
    return net.load_state_dict(net.state_dict())


def load_nothing(net: Any) -> Any:
    """Load an empty state dict, which is an error."""
    return net.load_state_dict({})


# Kinds of hooks; a private one is registered by a method whose name begins with an underscore.
SAVE: Final = "state_dict_pre_hook state_dict_post_hook _state_dict_hook"
LOAD: Final = "load_state_dict_pre_hook load_state_dict_post_hook _load_state_dict_pre_hook"
SAVING: Final[Uses] = {
    "entries": save,
    "class and metadata": lambda n: [type(save(n)), save(n)._metadata],
    "a prefix": lambda n: n.state_dict(prefix="root."),
    "a destination": lambda n: n.state_dict(destination=OrderedDict(old=1)),
    "positional arguments": lambda n: n.state_dict(OrderedDict(), "root.", True),
    "keep_vars": lambda n: n.state_dict(keep_vars=True),
    "memory": lambda n: save(n)["offset"].data_ptr() == n.offset.data_ptr(),
    "torch.save": lambda n: reloaded(save(n)),
    "metadata of a copy": lambda n: copy.deepcopy(save(n))._metadata,
    "get_extra_state() is not implemented": lambda n: n.get_extra_state(),
}
SAVING_A_PART: Final[Any] = {
    "extra state": {"use": save, "get_extra_state": lambda self: 1},
    "a version": {"use": lambda n: save(n)._metadata, "_version": 3},
}
RESULTS: Final[Mapping[str, Any]] = {"": None, ", raising": fails, ", returning": {}}
SAVING_WITH_HOOKS: Final[Any] = {
    f"{kind}{name}": {"kind": kind, "use": save, "result": result}
    for kind in SAVE.split()
    for name, result in RESULTS.items()
}
ENTRIES: Final[Any] = {
    **{
        f"{name}{suffix}": {"changes": changes, "assign": assign}
        for suffix, assign in (("", False), (", assign", True))
        for name, changes in {
            "all entries": {},
            "a missing key": {"offset": None},
            "unexpected keys": {"other": ONES, "norm.more": ONES},
            "missing, unexpected, misshapen": {"offset": None, "a": 1, "first.bias": ONES},
            "another dtype": {"offset": ONES.double()},
            "a parameter": {"offset": Parameter(ONES, requires_grad=False)},
            "not a tensor": {"offset": [1.0]},
            "a broadcast": {"offset": torch.ones(1).expand(3)},
            "an array for a scalar": {"norm.num_batches_tracked": ONES[:1].long()},
        }.items()
    },
    "strict=False": {"changes": {"offset": None, "other": ONES}, "strict": False},
    "strict=False, a wrong shape": {"changes": {"first.bias": ONES}, "strict": False},
}
LOADING: Final[Uses] = {
    "a list": lambda n: n.load_state_dict([]),
    "a plain dict": lambda n: n.load_state_dict(dict(save(n))),
    "the result": lambda n: n.load_state_dict({}, strict=False),
    "identity of parameters": lambda n: [n.offset is p for p in [n.offset] if load_own(n)],
    "a part": lambda n: n.blocks[0].load_state_dict(save(n.blocks[1])),
    "gradients stay": lambda n: (n(torch.ones(2, 3)).sum().backward(), load_own(n)),
    "into the meta device": lambda n: load_own(n.to("meta")),
    "in inference mode": torch.inference_mode()(load_own),
}
LOADING_A_PART: Final[Any] = {
    "an override": {"use": load_own, "_version": 3, "_load_from_state_dict": stores},
    "extra state": {"use": load_own, "get_extra_state": lambda m: 1, "set_extra_state": stores},
    "extra state that is missing": {"use": load_nothing, "set_extra_state": stores},
    "extra state without a setter": {"use": load_own, "get_extra_state": lambda self: 1},
}
LOADING_WITH_HOOKS: Final[Any] = {
    f"{kind}{name}": {"kind": kind, "use": use, "result": result}
    for kind in LOAD.split()
    for name, use, result in (
        ("", load_own, None),
        (", errors", load_nothing, None),
        (", raising", load_own, fails),
    )
}
AREAS: Final[dict[str, Cases]] = {
    "state dict": {
        **on_net(SAVING),
        **cases_of(with_part, SAVING_A_PART),
        **cases_of(with_hook, SAVING_WITH_HOOKS),
    },
    "loading": {
        **cases_of(load, ENTRIES),
        **on_net(LOADING),
        **cases_of(with_part, LOADING_A_PART),
        **cases_of(with_hook, LOADING_WITH_HOOKS),
    },
}
