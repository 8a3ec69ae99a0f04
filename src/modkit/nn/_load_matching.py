"""``load_matching``: loading the entries of a state dict that fit, and saying what was left out."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from modkit._messages import add_note
from modkit._mismatches import WRAPPERS, explain, shapes_of, without_parts
from modkit._namespace import publish
from modkit._renames import beginnings, paths_after
from modkit._upstream import EXTRA_STATE_KEY
from modkit.errors import NameMismatchError, printable
from modkit.nn._load_plan import read_once, tensors_of
from modkit.nn._load_state_dict import run_load
from modkit.nn._load_tensor import check, misfit
from modkit.nn._overrides import TorchModule, is_standard


# A table for a terminal: a model with another head differs in a few names.
_MOST_ROWS = 20
_LONGEST_NAME = 60


@dataclass(frozen=True, repr=False)
class Matched:
    """The names that :func:`modkit.load_matching` has loaded and left out; its ``repr`` is a table.

    Attributes:
        loaded: Names of the model that were loaded, those of extra state included.
        skipped: Names of the state dict that were not loaded, each with the reason; the present
            name of an entry that a class has migrated.
        missing: Names of the model that were not loaded, and so keep their values.
    """

    loaded: list[str]
    skipped: dict[str, str]
    missing: list[str]

    def __repr__(self) -> str:
        """Return a table of what was left out."""
        counts = (
            f"{len(self.loaded)} loaded, {len(self.skipped)} skipped, {len(self.missing)} missing"
        )
        rows = [("skipped", name, reason) for name, reason in self.skipped.items()]
        rows += [("missing", name, "keeps its value") for name in self.missing]

        shown = [(kind, _shortened(name), reason) for kind, name, reason in rows[:_MOST_ROWS]]
        width = max((len(name) for _, name, _ in shown), default=0)
        lines = [f"  {kind}  {name:{width}}  {reason}" for kind, name, reason in shown]
        if len(rows) > _MOST_ROWS:
            lines.append(f"  and {len(rows) - _MOST_ROWS} more")
        return "\n".join([f"Matched: {counts}", *lines])


def _shortened(name: str) -> str:
    return printable(name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}...")


def load_matching(
    model: torch.nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strip: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> Matched:
    """Load the entries of a state dict that fit a model, and return what was loaded and left out.

    For fine-tuning with another number of classes, or with a changed head. ``load_state_dict`` with
    ``strict=False`` raises where a shape differs; this function skips the entry, with both shapes.
    Names are never guessed: what ``strip`` and ``rename`` do not say has to be the same. As in
    ``load_state_dict``, nothing is written unless all that fits can be written, if no class and no
    hook takes part in loading. A class that migrates old entries does so first, so that shapes are
    compared under the present names.

    Args:
        model: Any ``torch.nn.Module``.
        state_dict: Names to tensors, as ``state_dict()`` returns them.
        strip: The beginning of names to remove, such as ``"backbone."``, or several of them, each
            removed once and in any order. Names without it stay. The parts that wrappers add
            (``"module."``, ``"_orig_mod."``, ``"_fsdp_wrapped_module."``,
            ``"_checkpoint_wrapped_module."``) are removed wherever they stand, unless the model has
            them itself.
        rename: Old names, or their first parts, to new ones: ``{"head": "classifier"}`` renames
            ``head.weight``, and the longest key counts. Or a function from an old name to the new
            one. It is applied after ``strip``.

    Returns:
        The names that were loaded, skipped and are missing. A tied parameter is loaded if one of
        its names is.

    Raises:
        NameMismatchError: If no entry fits. The note below it says why.
        ValueError: If two entries get one name, or ``rename`` has a name that no entry has.
        RuntimeError: If a tensor that fits cannot be written, or an old state dict not be migrated.
        TypeError: If the model is not a ``torch.nn.Module``, or its own ``load_state_dict`` has no
            argument ``strict``; or the state dict is not a mapping.

    Example:
        >>> import modkit, torch
        >>> model = torch.nn.Linear(2, 3)
        >>> old = {"net.weight": torch.ones(3, 2), "net.bias": torch.ones(5)}
        >>> modkit.load_matching(model, old, strip="net.")
        Matched: 1 loaded, 1 skipped, 1 missing
          skipped  net.bias  shape [5], the model has [3]
          missing  bias      keeps its value
    """  # noqa: DOC501 - _nothing_fits() makes a NameMismatchError
    _check_types(model, state_dict)
    state_dict = read_once(state_dict)
    targets = tensors_of(model)
    new_names = _new_names(state_dict, targets, strip, rename)
    old_names = {new: old for old, new in new_names.items()}
    without_name = {key: value for key, value in state_dict.items() if key not in new_names}
    entries: Any = OrderedDict((new, state_dict[old]) for new, old in old_names.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        entries._metadata = _moved_metadata(metadata, new_names)

    misfits: dict[str, str] = {}
    if is_standard(model, "load_state_dict"):
        loading = run_load(model, entries, strict=False, misfits=misfits)
        unexpected = {*loading.unexpected}
        missing = {*loading.missing}
    else:
        missing, unexpected = map(set, _load_by_override(model, entries, targets, misfits))
    missing |= misfits.keys()

    skipped = {repr(key): "its key is not a string" for key in without_name}
    # A name that a class or a hook has made during the load has no old one.
    skipped |= {old_names.get(name, name): reason for name, reason in misfits.items()}
    skipped |= {old_names[name]: "not in the model" for name in entries if name in unexpected}

    # Other names that were taken: extra state, or entries that a class migrated.
    others = [name for name in entries if name not in targets and name not in unexpected]
    loaded = [name for name in targets if name not in missing and (name in entries or others)]
    if not loaded and not others:
        raise _nothing_fits(model, targets, {**without_name, **entries})

    # A tied parameter that is loaded under one of its names is not missing under another one.
    written = {id(targets[name]) for name in loaded}
    lacking = [name for name in targets if name in missing and id(targets[name]) not in written]
    # Extra state, and what quantized layers save beside tensors; not old names that were migrated.
    saved = model.state_dict() if others else ()
    loaded += [name for name in others if name in saved or name.endswith(EXTRA_STATE_KEY)]
    return Matched(loaded, skipped, lacking)


def _check_types(model: object, state_dict: object) -> None:
    """Refuse what is not a module, and what is not a mapping."""
    if not isinstance(model, TorchModule):
        raise TypeError(
            f"modkit.load_matching(): model must be a torch.nn.Module, got {torch.typename(model)}"
        )
    if not isinstance(state_dict, Mapping):
        kind = torch.typename(state_dict)
        raise TypeError(f"modkit.load_matching(): state_dict must be a mapping, got {kind}")


def _new_names(
    state_dict: Mapping[str, Any],
    targets: Iterable[str],
    strip: str | Iterable[str] | None,
    rename: Mapping[str, str] | Callable[[str], str] | None,
) -> dict[str, str]:
    """Return the new name of each entry, which no other entry has."""
    prefixes = [strip] if isinstance(strip, str) else [*(strip or ())]
    of_model = {part for name in targets for part in name.split(".")}
    stripped = {part for prefix in prefixes for part in prefix.split(".")[:-1]}
    wrappers = stripped & WRAPPERS.keys() - of_model
    prefixes = [without_parts(prefix, wrappers) for prefix in prefixes]
    table = {} if rename is None or callable(rename) else rename
    used: set[str] = set()

    def renamed(name: str) -> str:
        name = without_parts(name, wrappers)
        left = [*prefixes]
        while found := [prefix for prefix in left if name.startswith(prefix)]:
            left.remove(found[0])
            name = name.removeprefix(found[0])
        if callable(rename):
            return rename(name)

        keys = [start for start in beginnings(name) if start in table]
        if not keys:
            return name
        used.add(keys[-1])
        return table[keys[-1]] + name.removeprefix(keys[-1])

    new_names = {key: renamed(key) for key in state_dict if isinstance(cast("object", key), str)}
    unknown = [name for name in table if name not in used]
    if unknown:
        listed = ", ".join(repr(name) for name in unknown)
        raise ValueError(
            f"modkit.load_matching(): rename has {printable(listed)}, which is not a name, or the "
            "first parts of a name, in the state dict. Nothing has been changed."
        )
    for name, uses in Counter(new_names.values()).items():
        if uses > 1:
            listed = ", ".join(repr(key) for key in new_names if new_names[key] == name)
            raise ValueError(
                f"modkit.load_matching(): {printable(listed)} would all be renamed to "
                f"{printable(name)!r}. Nothing has been changed."
            )
    return new_names


def _load_by_override(
    model: torch.nn.Module,
    entries: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    misfits: dict[str, str],
) -> tuple[Iterable[str], Iterable[str]]:
    """Call the model's own ``load_state_dict`` with what fits."""
    shared = entries.keys() & targets.keys()
    problems = (check(name, targets[name], entries[name])[1] for name in shared)
    misfits.update(found for found in map(misfit, filter(None, problems)) if found)
    fitting: Any = OrderedDict(item for item in entries.items() if item[0] not in misfits)
    if (metadata := getattr(entries, "_metadata", None)) is not None:
        fitting._metadata = metadata

    # Some overrides do not return the keys; then the names are compared.
    load: Callable[..., Any] = model.load_state_dict
    keys: tuple[Iterable[str], Iterable[str]] | None = load(fitting, strict=False)
    if keys is None:
        names = {*targets, *model.state_dict()}
        keys = targets.keys() - fitting.keys(), fitting.keys() - names
    return keys


def _moved_metadata(metadata: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions of modules under their new paths."""
    moved: dict[str, Any] = {}
    for path, new_paths in paths_after(new_names).items():
        for new_path in new_paths if path in metadata else ():
            if new_path is not None:
                moved.setdefault(new_path, metadata[path])
    return moved


def _nothing_fits(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], entries: Mapping[Any, Any]
) -> NameMismatchError:
    shapes = shapes_of(targets)
    saved_shapes = shapes_of(entries)
    error = NameMismatchError(
        f"modkit.load_matching(): no entry of the state dict fits {type(model).__name__}",
        missing=[name for name in shapes if name not in saved_shapes],
        unexpected=[printable(str(name)) for name in entries if name not in shapes],
        shapes=[
            f"{name} ({shape} instead of {shapes[name]})"
            for name, shape in saved_shapes.items()
            if name in shapes
        ],
    )

    for line in explain(shapes, entries):
        add_note(error, line)
    return error


publish("modkit", Matched, load_matching)
