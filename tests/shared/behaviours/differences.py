"""The behaviors on which torch and modkit differ on purpose, with both results.

The reasons are rows of the one table of differences, ``docs/parity.md``.
"""

import pickle
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from modkit.compat.behaviours import Case, hooked, tried
from modkit.compat.behaviours.hooks import KINDS, PARAMETER, X, for_all, mark, run_backward, trained
from modkit.compat.behaviours.module import sub
from modkit.compat.behaviours.tools import averaged, updated
from torch.nn import Conv3d, ReLU


NO_ISSUE: Final = "no upstream issue"
ISSUES: Final = "https://github.com/pytorch/pytorch/issues/"
BOTH_KINDS: Final = (
    "RuntimeError: Cannot use both regular backward hooks and full backward hooks on a single "
    "Module. Please use only one of them."
)


class Difference(NamedTuple):
    """The reason of a difference, the case that shows it, and the results of torch and modkit."""

    reason: str
    case: Case
    torch: Any
    modkit: Any
    upstream: str = NO_ISSUE


def on(function: Callable[[Any], Any]) -> Case:
    """Return the case of a function of the standard network; of a tuple, the last item is compared."""

    def case(lib: Any) -> Any:
        found = tried(function, lib.net())
        return found[-1] if isinstance(found, tuple) else found

    return case


def on_scale(method: str, hook: Any, use: Callable[[Any], Any], **options: Any) -> Case:
    """Return the case of a small module with a hook; its result is the exception, if any."""
    return lambda lib: error_of(use, hooked(lib.nets.Scale(), method, hook, **options))


def error_of(function: Callable[..., Any], *arguments: Any) -> str | None:
    """Return the class of the exception of a function."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__
    return None


def removes_itself(net: Any) -> Any:
    """Save with a hook that removes itself, and one more."""
    handles = [net.register_state_dict_pre_hook(lambda *_: handles[0].remove())]
    net.register_state_dict_pre_hook(mark)
    return "offset" in net.state_dict()


def tied_after_load(net: Any) -> bool:
    """Tie two parameters, and return True if they are one after ``assign=True``."""
    net.left.weight = net.right.weight
    net.load_state_dict(net.state_dict(), assign=True)
    return net.left.weight is net.right.weight


DIFFERENCES: Final = {
    "members: a refused assignment": Difference(
        "Torch deletes the old attribute before it validates the new value, so a refused assignment "
        "loses it; modkit puts it back where it was.",
        on(
            lambda n: (
                vars(n).update({"a.b": 1}),
                tried(setattr, n, "a.b", n.offset),
                "a.b" in vars(n),
            )
        ),
        torch=False,
        modkit=True,
    ),
    "members: a reserved name": Difference(
        "Torch lets a parameter or a child take the name of a module's own state, such as `training`, "
        "if it is assigned, and the module no longer works; registering it raises, and so does "
        "assigning it in modkit.",
        on(lambda n: setattr(n, "training", n.offset)),
        torch=None,
        modkit="KeyError: \"attribute 'training' already exists\"",
    ),
    "members: set_submodule() on None": Difference(
        "`set_submodule` may replace a module or create one, but torch does not let it fill a name "
        "that is None.",
        on(lambda n: n.set_submodule("empty", ReLU())),
        torch="AttributeError: `empty` is not an nn.Module",
        modkit=None,
        upstream=ISSUES + "143441",
    ),
    "registration and global hooks: a hook returns text": Difference(
        "Torch stores whatever a registration hook returns, so a string may end up among the "
        "parameters; modkit raises a TypeError that names the class, the name and the value.",
        lambda lib: error_of(for_all, lib, PARAMETER, mark, "text"),
        torch=None,
        modkit="TypeError",
    ),
    "traversal: a module that contains itself": Difference(
        "On a module that contains itself torch runs into the recursion limit, and the error does not "
        "say why; modkit's names the module, and is raised at once.",
        on(lambda n: (n.add_module("self", n), "the module Net contains itself" in tried(n.eval))),
        torch=False,
        modkit=True,
    ),
    "traversal: modules that compare equal": Difference(
        "Torch keeps the modules that a walk has met in a set, so modules that cannot be hashed, such "
        "as dataclasses and mappings, raise, and those that compare equal are taken for one. Modkit "
        "tells them apart by identity.",
        lambda lib: [
            len(list(lib.nets.Pair(equal(), equal()).modules()))
            for equal in [sub(lib, __eq__=lambda self, other: True, __hash__=lambda self: 1)]
        ],
        torch=[2],
        modkit=[3],
        upstream=ISSUES + "110959",
    ),
    "conversion: shared parameters to another device": Difference(
        "Torch unties shared parameters where a conversion has to replace them, as `to_empty` and "
        '`to("meta")` do, and unties shared buffers always; what is shared is converted once for each '
        "place. In modkit it stays shared, and is converted once.",
        on(lambda n: n.to("meta").tied.weight is n.blocks[1].linear.weight),
        torch=False,
        modkit=True,
        upstream="https://github.com/huggingface/transformers/pull/44471",
    ),
    "conversion: channels_last with volumes": Difference(
        "Torch asks for the memory format of images in volumes too, and the other way round, which "
        "raises; modkit applies each format to tensors of its number of dimensions.",
        lambda lib: error_of(
            lambda net: net.to(memory_format=torch.channels_last),
            lib.nets.Pair(Conv3d(1, 1, 1), ReLU()),
        ),
        torch="RuntimeError",
        modkit=None,
        upstream=ISSUES + "77821",
    ),
    "state dict: a hook that removes itself": Difference(
        "In torch a state-dict, load or registration hook that removes itself while it runs raises "
        '"OrderedDict mutated during iteration"; modkit runs over a snapshot.',
        on(removes_itself),
        torch="RuntimeError: OrderedDict mutated during iteration",
        modkit=True,
        upstream=ISSUES + "60132",
    ),
    "loading: a refused load": Difference(
        "A load that torch refuses has already written the entries before and after the bad one. Where "
        "no hook or override takes part in loading, modkit checks all entries first.",
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
        "In torch `load_state_dict(sd, assign=True)` leaves its flag in `sd._metadata`, so a later "
        "load of the same state dict replaces Parameter objects instead of copying into them.",
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
        "In torch `load_state_dict(assign=True)` makes one Parameter per key, so tied parameters come "
        "apart; modkit keeps those tied whose entries are the same data.",
        lambda lib: tied_after_load(lib.nets.Pair(lib.nets.Scale(), lib.nets.Scale())),
        torch=False,
        modkit=True,
    ),
    "loading: keys below a child that is None": Difference(
        "Torch reports that all keys match, although those below a child that is None are not loaded.",
        on(lambda n: n.load_state_dict({"empty.weight": X}, strict=False).unexpected_keys),
        torch=[],
        modkit=["empty.weight"],
        upstream="https://github.com/facebookresearch/fairseq2/pull/330",
    ),
    "forward hooks: a pre-hook with kwargs returns two numbers": Difference(
        "Torch takes every pair that a forward pre-hook with keyword arguments returns for args and "
        "kwargs, and iterates over a tensor in the place of the args; modkit raises the documented "
        "error. A list of args, which torch takes apart only without backward hooks, always works.",
        on_scale("forward_pre_hook", lambda *_: (1, 2), lambda m: m(X), with_kwargs=True),
        torch="TypeError",
        modkit="RuntimeError",
    ),
    "backward hooks: the other kind after removal": Difference(
        "Once a module has had a full backward hook, torch refuses the other kind for ever, and the "
        "other way round. In modkit the kind is free again when the last hook is removed.",
        on(
            lambda n: (
                n.register_full_backward_hook(mark).remove(),
                n.register_backward_hook(mark).id > 0,
            )
        ),
        torch=BOTH_KINDS,
        modkit=True,
    ),
    "backward hooks: a pre-hook returns a tensor": Difference(
        "A full backward pre-hook may return a tensor, says its documentation, but torch takes its "
        "rows for the gradients of several outputs.",
        on_scale("full_backward_pre_hook", lambda m, grads: grads[0], trained),
        torch="RuntimeError",
        modkit=None,
        upstream=ISSUES + "102645",
    ),
    "backward hooks: the output is that of torch.max": Difference(
        "With a full backward hook torch rebuilds every tuple as if it were a named one, so an output "
        "whose class takes one iterable, those of torch.max and its like too, raises or falls apart.",
        lambda lib: error_of(run_backward, lib, KINDS[0], None, lambda x: x.max(0)),
        torch="TypeError",
        modkit=None,
    ),
    "averages: integer buffers": Difference(
        "With `use_buffers=True` torch averages integer and boolean buffers: values are truncated, wrap "
        "around, or raise. In modkit they are copied. Integer parameters are averaged as in torch.",
        lambda lib: averaged(lib, use_buffers=True).module.norm.num_batches_tracked.item(),
        torch=4,
        modkit=6,
    ),
    "averages: functions can be pickled": Difference(
        "The averaging functions of torch are closures, which pickle cannot find by name; those "
        "of modkit pickle as a call of the function that made them, decay included.",
        lambda lib: isinstance(tried(pickle.dumps, lib.swa.get_ema_avg_fn(0.9)), bytes),
        torch=False,
        modkit=True,
        upstream=ISSUES + "95376",
    ),
    "averages: update_bn without batches": Difference(
        "With an empty loader, torch's `update_bn` resets all statistics in silence; modkit raises "
        "a ValueError and leaves them.",
        lambda lib: error_of(updated, lib, []),
        torch=None,
        modkit="ValueError",
    ),
    "compile, export, fx, jit: buffers that are not persistent": Difference(
        "Compiling makes all buffers persistent in torch, so states do not fit those of the eager "
        "module. Modkit keeps the flag, in archives as the extra file `modkit.json`.",
        lambda lib: "again.scratch" in lib.jit.script(lib.net()).state_dict(),
        torch=True,
        modkit=False,
        upstream=ISSUES + "69250",
    ),
}
