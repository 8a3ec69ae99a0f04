"""The behaviors on which torch and modkit differ on purpose, with both results.

The reasons are rows of the one table of differences, ``docs/differences.md``.
"""

# The networks are known only when a library is chosen, so the lambdas take and return anything.
# pyright: reportUnknownLambdaType=false

import pickle
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.nn import Conv3d, ReLU

from modkit.compat.behaviours.cases import Case, hooked, tried
from modkit.compat.behaviours.hooks import PARAMETER, X, for_all, mark, trained
from modkit.compat.behaviours.module import sub
from modkit.compat.behaviours.tools import averaged, updated


NO_ISSUE: Final = "no upstream issue"
ISSUES: Final = "https://github.com/pytorch/pytorch/issues/"


class Difference(NamedTuple):
    """A listed difference.

    Attributes:
        reason: What torch does | what modkit does.
        case: A function of a ``Library`` that shows it.
        torch: The result with torch.
        modkit: The result with modkit.
        upstream: The issue of torch, or of the library that ran into it.
    """

    reason: str
    case: Case
    torch: Any
    modkit: Any
    upstream: str = NO_ISSUE


def on(function: Callable[[Any], Any]) -> Case:
    """Return the case of a function of the standard network."""

    def case(lib: Any) -> Any:
        result = tried(function, lib.net())
        return result[-1] if isinstance(result, tuple) else result

    return case


def on_scale(method: str, hook: Any, use: Callable[[Any], Any], **options: Any) -> Case:
    """Return the case of a small module with a hook; its result is the exception, if any."""
    return lambda lib: error_of(use, hooked(lib.nets.Scale(), method, hook, **options))


def error_of(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Return the class of the exception of a function."""
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - the exception is the result
        return type(error).__name__
    return None


def removes_itself(net: Any) -> Any:
    """Load with a hook that removes itself, and one more."""
    handles: list[Any] = [net.register_load_state_dict_pre_hook(lambda *_: handles[0].remove())]
    net.register_load_state_dict_pre_hook(mark)
    return len(net.load_state_dict(net.state_dict()).missing_keys)


def tied_after_load(net: Any) -> bool:
    """Tie two parameters, and return True if they are one after ``assign=True``."""
    net.left.weight = net.right.weight
    net.load_state_dict(net.state_dict(), assign=True)
    return net.left.weight is net.right.weight


DIFFERENCES: Final = {
    "registration and global hooks: a hook returns text": Difference(
        "Any value that a registration hook returns is stored, even a string among the parameters"
        " | For parameters, and for modules that are registered by `add_module`, a TypeError names "
        "the class, the name and the value",
        lambda lib: error_of(for_all, lib, PARAMETER, mark, "text"),
        torch=None,
        modkit="TypeError",
    ),
    "traversal: a module that contains itself": Difference(
        "A module that contains itself ends in the recursion limit | Walks, conversions and loads "
        "name the module at once; no method can work on such a tree in either",
        on(lambda n: (n.add_module("self", n), "the module Net contains itself" in tried(n.float))),
        torch=False,
        modkit=True,
        upstream=ISSUES + "47582",
    ),
    "traversal: modules that compare equal": Difference(
        "Traversal compares modules by hash and equality: unhashable modules raise, and equal "
        "ones count as one | Modules are compared by identity",
        lambda lib: [
            len(list(lib.nets.Pair(equal(), equal()).modules()))
            for equal in [sub(lib, __eq__=lambda self, other: True, __hash__=lambda self: 1)]
        ],
        torch=[2],
        modkit=[3],
        upstream=ISSUES + "110959",
    ),
    "conversion: shared parameters to another device": Difference(
        'Conversions that replace parameters (`to_empty`, `to("meta")`) untie them, and always '
        "untie buffers | Tied tensors stay tied, and are converted once",
        on(lambda n: n.to("meta").tied.weight is n.blocks[1].linear.weight),
        torch=False,
        modkit=True,
        upstream="https://github.com/huggingface/transformers/pull/44471",
    ),
    "conversion: channels_last with volumes": Difference(
        "`to(memory_format=)` applies a format for images to volumes, and the other way round, "
        "which raises | A format applies to tensors with its number of dimensions",
        lambda lib: error_of(
            lambda net: net.to(memory_format=torch.channels_last),
            lib.nets.Pair(Conv3d(1, 1, 1), ReLU()),
        ),
        torch="RuntimeError",
        modkit=None,
        upstream=ISSUES + "77821",
    ),
    "loading: a hook that removes itself": Difference(
        "A load hook that removes itself raises "
        '"OrderedDict mutated during iteration", as does a registration hook | Hooks run over a '
        "snapshot of the table, except registration hooks of buffers and of assigned modules",
        on(removes_itself),
        torch="RuntimeError: OrderedDict mutated during iteration",
        modkit=0,
    ),
    "loading: a refused load": Difference(
        "A refused load has already written the other entries | Without hooks and overrides in "
        "the load, all entries are checked first, and nothing is written",
        on(
            lambda n: (
                tried(n.load_state_dict, {"offset": X[0], "last.weight": X}),
                n.offset.tolist(),
            )
        ),
        torch=[0.0, 1.0, 2.0],
        modkit=[1.0, 1.0, 1.0],
    ),
    "loading: assign=True and the argument": Difference(
        "`load_state_dict(sd, assign=True)` leaves its flag in `sd._metadata`: a later load of "
        "`sd` replaces Parameter objects | The state dict is not modified; such a flag is ignored",
        on(
            lambda n: [
                n.load_state_dict(s, assign=True) and len(s._metadata[""]) for s in [n.state_dict()]
            ]
        ),
        torch=[2],
        modkit=[1],
        upstream=ISSUES + "188166",
    ),
    "loading: assign=True and tied parameters": Difference(
        "`load_state_dict(assign=True)` unties parameters: one Parameter per key | Parameters "
        "stay tied if their entries share data",
        lambda lib: tied_after_load(lib.nets.Pair(lib.nets.Scale(), lib.nets.Scale())),
        torch=False,
        modkit=True,
        upstream=ISSUES + "188346",
    ),
    "loading: keys below a child that is None": Difference(
        "Keys below a child that is None are reported as matched, although they are not loaded | "
        "They are unexpected keys",
        on(
            lambda n: (
                n.load_state_dict(
                    {**n.state_dict(), "empty.weight": X}, strict=False
                ).unexpected_keys
            )
        ),
        torch=[],
        modkit=["empty.weight"],
        upstream="https://github.com/facebookresearch/fairseq2/pull/330",
    ),
    "backward hooks: a pre-hook returns a tensor": Difference(
        "A tensor returned by a full backward pre-hook is taken apart into rows, against the "
        "documentation | It is the gradient of the output",
        on_scale("full_backward_pre_hook", lambda m, grads: grads[0], trained),
        torch="RuntimeError",
        modkit=None,
        upstream=ISSUES + "102645",
    ),
    "averages: integer buffers": Difference(
        "With `use_buffers=True`, integer, boolean and quantized buffers are averaged: truncated, "
        "wrapped around, or an error | They are copied. "
        "Integer parameters are averaged as in torch",
        lambda lib: averaged(lib, use_buffers=True).module.norm.num_batches_tracked.item(),
        torch=4,
        modkit=6,
    ),
    "averages: functions can be pickled": Difference(
        "The averaging functions are closures and cannot be pickled | They can be pickled, with "
        "their decay",
        lambda lib: isinstance(tried(pickle.dumps, lib.swa.get_ema_avg_fn(0.9)), bytes),
        torch=False,
        modkit=True,
        upstream=ISSUES + "95376",
    ),
    "averages: update_bn without batches": Difference(
        "`update_bn` with an empty loader resets all statistics without an error | It raises "
        "ValueError and keeps the statistics",
        lambda lib: error_of(updated, lib, []),
        torch=None,
        modkit="ValueError",
    ),
    "compile, export, fx, jit: buffers that are not persistent": Difference(
        "Compiling makes all buffers persistent, so state dicts do not match those of the eager "
        "module | The flag is kept, in archives as the extra file `modkit.json`",
        lambda lib: "again.scratch" in lib.jit.script(lib.net()).state_dict(),
        torch=True,
        modkit=False,
        upstream=ISSUES + "69250",
    ),
}
