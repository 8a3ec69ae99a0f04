"""Why a state dict does not fit a model: the few causes behind hundreds of names.

They are found from names and shapes. The file is imported when a load has failed. No tensor is
read, and nothing is changed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from modkit._renames import (
    LONGEST_NAME,
    Rule,
    Shape,
    Shapes,
    Unexplained,
    find_renames,
    starred,
)
from modkit.errors import printable


MOST_LINES: Final = 8
_LONGEST: Final = 80
# Keys in front of a state dict: checkpoint["state"]["model"]["module"].
_MOST_NESTED: Final = 4
_OF_OPTIMIZER: Final = frozenset({"state", "param_groups"})
# Descriptions of other states, by keys that they have.
_STATES: Final = {
    _OF_OPTIMIZER: "this is the state of an optimizer, not of a model",
    frozenset({"version", "averages", "schedules"}): (
        "this is the state of an EMA or EMACallback, not of a model: pass it to its "
        "load_state_dict(), or load ema.averaged_model().state_dict()"
    ),
}
# Parts of names that wrappers add, at any level, and what adds them.
WRAPPERS: Final = {
    "module": "DataParallel, DDP or AveragedModel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Fabric",
}
_WRAPPER: Final = re.compile(rf"(?:^|(?<=\.))({'|'.join(WRAPPERS)})(?=\.)")
_ADDED_BY: Final = {**WRAPPERS, "model": "Lightning or another trainer", "base_model": "PEFT"}
# Tensors that one side alone has, which no rename explains, by their names.
_FAMILIES: Final = {
    r"lora_|adapter": "an adapter such as LoRA",
    r"(^|\.)(SCB|weight\.absmax|weight\.quant_\w+|qweight|qzeros|g_idx)(\.|$)": "quantized weights",
    r"(^|\.)n_averaged$": "the counter of an AveragedModel",
    r"(^|\.)(running_mean|running_var|num_batches_tracked)$": "statistics of BatchNorm; the other "
    "side has another norm such as GroupNorm, none, or track_running_stats=False",
    r"(^|\.)weight_[gv]$": "weight_norm or spectral_norm",
    r"(^|\.)weight_(orig|mask|u)$": "spectral_norm or pruning",
    r"(^|\.)parametrizations\.": "a parametrization such as weight_norm",
    r"(^|\.)(gamma|beta)$": "TensorFlow's names of weight and bias, gamma and beta, or layer scale",
    r"(^|\.)_extra_state$": "extra state, for instance of TransformerEngine",
    r"(^|\.)(inv_freq|position_ids|relative_position_index|attn_mask|masked_bias|attn\.bias)$": (
        "constants that some versions of a library save"
    ),
}
_WITHOUT_DIGITS: Final = str.maketrans("", "", "0123456789")
# Names that are missing, unexpected, or of another shape.
Reported: TypeAlias = tuple[Collection[str], Collection[str], Collection[str]]
_KINDS: Final = {
    "transposed": "transposed (Conv1D, or another framework)",
    "outputs": "another number of outputs, classes or words",
    "other": "other sizes",
}
# The portion of tensors with other sizes from which on the whole model has another width.
_MOST_OTHER_SIZES: Final = 0.3


# The order of causes; of one rank, the one that explains most tensors comes first.
_PREFIX, _CAUSE, _REST = range(3)


class Note(NamedTuple):
    """A line of the explanation, and the number of tensors that it explains."""

    rank: int
    tensors: int
    line: str


def shapes_of(entries: Mapping[Any, Any]) -> dict[str, Shape | None]:
    """Return the shapes of the tensors among entries; None where one has no shape yet."""
    return {
        name: None if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
        for name, value in entries.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def explain(
    model: Shapes, state_dict: Mapping[Any, Any], reported: Reported | None = None
) -> list[str]:
    """Say why a state dict does not fit a model, the cause that explains most tensors first.

    Example:
        >>> state_dict = {"module.weight": torch.ones(2, 3), "module.bias": torch.ones(2)}
        >>> print(*explain({"weight": (2, 3), "bias": (2,)}, state_dict))
        all 2 names of the checkpoint have the extra prefix 'module.' (added by DataParallel, DDP \
or AveragedModel): remove it, or pass strip='module.' to modkit.load_matching()
    """
    file = shapes_of(state_dict)
    if not file.keys() & model.keys():
        nested = _find_state_dict(model, state_dict)
        if nested is not None:
            return nested
    return compare(model, file, reported)


def compare(model: Shapes, file: Shapes, reported: Reported | None = None) -> list[str]:
    """Say how names and shapes of a checkpoint differ from a model's."""
    notes: list[Note] = []
    parts = _wrapper_parts(file, model)
    names = {name: without_parts(name, parts) for name in file}
    if parts and len(set(names.values())) == len(names):
        changed = [name for name in names if names[name] != name]
        notes.append(Note(_PREFIX, len(changed), _say_wrappers(parts, len(changed), len(file))))
        file = {names[name]: shape for name, shape in file.items()}
        # The reported keys have other names now.
        reported = None

    if reported is None:
        of_other_shape = [name for name in model if name in file and file[name] != model[name]]
        reported = model.keys() - file.keys(), file.keys() - model.keys(), of_other_shape
    missing = set(reported[0])
    unexpected = set(reported[1])
    lacking = {name: shape for name, shape in model.items() if name in missing}
    surplus = {name: shape for name, shape in file.items() if name in unexpected}

    # Each removes from both what it explains.
    notes += _depths(model, file, surplus, lacking)
    notes += _families(surplus, lacking)
    renames = find_renames(file, model, surplus, lacking)
    is_other = renames.is_of_another_model and bool(surplus)
    if is_other:
        notes.append(Note(_PREFIX, len(file), _another_model([*lacking] or model, surplus)))
    notes += [_say_rule(rule, len(file)) for rule in renames.rules]

    pairs = {name: name for name in reported[2] if name in file} | renames.pairs
    sizes = {name: (file[old], model[name]) for old, name in pairs.items()}
    notes += _sizes(sizes, len(model))
    if not is_other:
        notes += _rest("the checkpoint", [renames.original[name] for name in renames.old])
        notes += _rest("the model", [*renames.new])

    lines = [note.line for note in sorted(notes, key=lambda note: (note.rank, -note.tensors))]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"and {len(lines) - MOST_LINES + 1} more differences"]
    return lines


def without_parts(name: str, parts: Collection[str]) -> str:
    """Return a name without some of its parts, at whatever level they stand."""
    return ".".join(part for part in name.split(".") if part not in parts) if parts else name


def _wrapper_parts(file: Collection[str], model: Iterable[str]) -> list[str]:
    """Return the parts that wrappers have added inside the names of a checkpoint, or several parts.

    A single one in front of names is found with all other prefixes.
    """
    of_model = {part for name in model for part in name.split(".")}
    found = dict.fromkeys(part for name in file for part in _WRAPPER.findall(name))
    parts = [part for part in found if part not in of_model]
    is_inside = any(f".{part}." in name for part in parts for name in file)
    return parts if is_inside or len(parts) > 1 else []


def _say_wrappers(parts: Collection[str], count: int, total: int) -> str:
    added = " and ".join(f"'{part}.' (added by {WRAPPERS[part]})" for part in parts)
    prefixes = [f"{part}." for part in parts]
    strip: object = prefixes if len(prefixes) > 1 else repr(prefixes[0])
    return (
        f"{_count(count, 'name', total)} of the checkpoint have parts of wrappers, {added}: remove "
        f"them, or pass strip={strip} to modkit.load_matching()"
    )


def _quoted(name: str) -> str:
    # Cut first, because escaping a name of a megabyte takes long.
    shown = printable(name[: 2 * _LONGEST])
    return repr(shown if len(name) <= _LONGEST else f"{shown[: _LONGEST // 2]}...")


def _key(key: object) -> str:
    # Another key stands as in code: checkpoint[0], without quotes.
    return _quoted(key) if isinstance(key, str) else _quoted(repr(key))[1:-1]


def _listed(names: Collection[str], most: int = 3, word: str = ", ") -> str:
    shown = word.join(map(_quoted, islice(names, most)))
    return shown + (", ..." if len(names) > most else "")


def _count(number: int, noun: str, among: int | None = None) -> str:
    if among is None:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
    return f"all {number} {noun}s" if number == among != 1 else f"{number} of {among} {noun}s"


def _another_model(model: Collection[str], file: Collection[str]) -> str:
    return (
        "hardly a name of the checkpoint fits, with or without a prefix: is it of another model, "
        f"or of another library? It has {_listed(file, 2)}; the model has {_listed(model, 2)}"
    )


def _find_state_dict(model: Shapes, given: Mapping[Any, Any]) -> list[str] | None:
    """Find the state dict in a checkpoint that has it below a key, or say that there is none."""
    for known_keys, what_it_is in _STATES.items():
        if given.keys() >= known_keys:
            return [what_it_is]

    nested: dict[tuple[Any, ...], Mapping[Any, Any]] = {}
    waiting: list[tuple[tuple[Any, ...], Mapping[Any, Any]]] = [((), given)]
    # A checkpoint may contain itself.
    seen = {id(given)}
    # The list grows meanwhile, so that outer entries come before inner ones.
    for path, entries in waiting:
        if len(path) == _MOST_NESTED or entries.keys() >= _OF_OPTIMIZER:
            continue
        for key, value in entries.items():
            if isinstance(value, Mapping) and id(value) not in seen:
                seen.add(id(value))
                nested[(*path, key)] = value
                waiting.append(((*path, key), value))

    model_shapes = Counter(model.values())
    scores: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    for path, entries in nested.items():
        shapes = shapes_of(entries)
        # Names first: averages, or the state of an optimizer, have the same shapes.
        if shapes:
            same_names = len(shapes.keys() & model.keys())
            same_shapes = (Counter(shapes.values()) & model_shapes).total()
            scores[path] = (same_names, same_shapes, len(shapes))
    if scores:
        best = max(scores.values())
        paths = [path for path, score in scores.items() if score == best]
        keys = [f"checkpoint{''.join(f'[{_key(key)}]' for key in path)}" for path in paths[:3]]
        # Any dict of tensors is a candidate, also one that has nothing in common with the model.
        is_below = "is" if any(best[:2]) else "may be"
        line = f"the state dict {is_below} below a key of this checkpoint: load {' or '.join(keys)}"
        return [line, *compare(model, shapes_of(nested[paths[0]]))][:MOST_LINES]

    if any(isinstance(value, torch.Tensor) for value in given.values()) and not nested:
        return None
    for key, value in given.items():
        if isinstance(value, torch.nn.Module):
            shown = _key(key)
            return [f"the entry {shown} is a whole model: load checkpoint[{shown}].state_dict()"]
    if not given:
        return ["the state dict is empty"]
    keys = [_key(key) for key in islice(given, 6)]
    return [
        "this is not a state dict, and no state dict is inside; its entries are " + ", ".join(keys)
    ]


def _families(surplus: Unexplained, lacking: Unexplained) -> Iterator[Note]:
    """Find tensors that only one side has, by what their names say.

    If both sides have some of a family among what does not fit, they may be renamed, and are left
    to the search for that.
    """
    families: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for index, names in enumerate((surplus, lacking)):
        for name in names:
            family = _family_of(name.translate(_WITHOUT_DIGITS))
            if family is not None:
                families[family][index].append(name)

    for family, (in_file, in_model) in families.items():
        if in_file and in_model:
            continue
        side = "the checkpoint" if in_file else "the model"
        explained = in_file or in_model
        for name in explained:
            del (surplus if in_file else lacking)[name]
        tensors = _count(len(explained), "tensor")
        line = f"only {side} has {tensors} such as {_quoted(explained[0])}: {family}"
        yield Note(_CAUSE, len(explained), line)


# Names of many layers are the same without digits, and are searched once.
@lru_cache(maxsize=1024)
def _family_of(name: str) -> str | None:
    return next((f for pattern, f in _FAMILIES.items() if re.search(pattern, name)), None)


def _numbered(name: str) -> Iterator[tuple[str, int]]:
    """Yield the path of each list of layers that a name is in, with the number, outer ones first.

    Example:
        >>> [*_numbered("layers.0.experts.12.weight")]
        [('layers', 0), ('layers.0.experts', 12)]
    """
    # Numbers as str() writes them, so that each has one name; lists of layers have no longer ones.
    # A name that begins with a dot is not one of a list without a path.
    for match in re.finditer(r"(?:^|(?<!^)\.)(0|[1-9]\d{0,8})(?=\.)", name[:LONGEST_NAME]):
        yield name[: match.start()], int(match[1])


def _lists_in(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers in each list of layers, by the path of the list."""
    lists: dict[str, set[int]] = defaultdict(set)
    # The tensors of a module are in the same lists.
    for home in {name.rpartition(".")[0] for name in names}:
        for path, number in _numbered(f"{home}."):
            lists[path].add(number)
    return lists


def _depths(
    model: Shapes, file: Shapes, surplus: Unexplained, lacking: Unexplained
) -> Iterator[Note]:
    """Find lists of layers that are longer on one side."""
    in_file = _lists_in(file)
    in_model = _lists_in(model)
    # The numbers that one side alone has. With numbers of its own on each, they are not one list.
    extra = {
        home: in_file[home] ^ in_model[home]
        for home in sorted(in_file.keys() & in_model.keys())
        if in_file[home] > in_model[home] or in_file[home] < in_model[home]
    }
    explained = Counter([*_below(extra, surplus), *_below(extra, lacking)])

    # Lists of one kind, such as the experts of each layer, by how they differ: the tensors by path.
    found: dict[tuple[str, int, int], dict[str, int]] = defaultdict(dict)
    for home in filter(explained.get, extra):
        key = (starred(home), len(in_file[home]), len(in_model[home]))
        found[key][home] = explained[home]
    for (pattern, number, model_number), tensors in found.items():
        home = _quoted(pattern if len(tensors) > 1 else next(iter(tensors)))
        line = (
            f"another depth: {home} has {number} entries in the checkpoint, {model_number} in "
            "the model"
        )
        yield Note(_CAUSE, sum(tensors.values()), line)


def _below(lists: Mapping[str, set[int]], names: Unexplained) -> Iterator[str]:
    """Remove the names below these numbers of lists, and yield the path of the list of each."""
    for name in [*names] if lists else ():
        for home, number in _numbered(name):
            if number in lists.get(home, ()):
                del names[name]
                yield home
                break


def _say_rule(rule: Rule, total: int) -> Note:
    """Return the line for a rule; ``total`` is the number of tensors in the checkpoint."""
    if rule.kind == "prefix":
        return Note(_PREFIX, rule.count, _say_prefix(rule, total))
    return Note(_CAUSE, rule.count, _say_rename(rule, total))


def _say_prefix(rule: Rule, total: int) -> str:
    names = f"{_count(rule.count, 'name', total)} of the checkpoint"
    old = _listed(rule.old, 4, " or ")
    new = _listed(rule.new, 4, " or ")
    libraries = (_ADDED_BY[part] for part in rule.old[0].split(".") if part in _ADDED_BY)
    added_by = next((f" (added by {library})" for library in libraries), "")

    difference = (
        f"have the extra prefix {old}{added_by}" if rule.old[0] else f"lack the prefix {new}"
    )
    if not rule.is_certain:
        return f"{names} {difference}; which one, shapes do not tell"
    if rule.old[0]:
        return f"{names} {difference}: remove it, or pass strip={old} to modkit.load_matching()"
    return (
        f"{names} {difference}: load it into that submodule, or pass "
        f"rename=lambda name: {new} + name to modkit.load_matching()"
    )


def _say_rename(rule: Rule, total: int) -> str:
    tensors = _count(rule.count, "tensor", total)
    old = _listed(rule.old, 4, " or ")
    new = _listed(rule.new, 4, " or ")
    doubt = "" if rule.is_certain else "; shapes do not tell which"
    return f"{tensors} are renamed: {old} in the checkpoint is {new} in the model{doubt}"


def _rest(side: str, names: list[str]) -> Iterator[Note]:
    """Name the modules of the tensors that no cause explains."""
    if not names:
        return
    homes = Counter(name.rpartition(".")[0] or name for name in names)
    tensors: Counter[str] = Counter()
    alike: dict[str, list[str]] = defaultdict(list)
    for home, count in homes.items():
        tensors[starred(home)] += count
        alike[starred(home)].append(home)
    # A star stands for several numbers only.
    patterns = [pattern for pattern, _ in tensors.most_common()]
    listed = _listed([p if len(alike[p]) > 1 else alike[p][0] for p in patterns])
    # If they are all of one module, its name alone would say little.
    if len(patterns) == 1 < len(names):
        listed += f": {_listed(dict.fromkeys(name.rpartition('.')[2] for name in names))}"
    line = f"only {side} has {_count(len(names), 'other tensor')}, in {listed}"
    yield Note(_REST, len(names), line)


def _sizes(sizes: Mapping[str, tuple[Shape | None, Shape | None]], total: int) -> Iterator[Note]:
    """Find what kinds of sizes differ."""
    changed: dict[str, tuple[Shape, Shape]] = {}
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, (old, new) in sizes.items():
        if old is not None and new is not None and old != new:
            changed[name] = (old, new)
            kinds[_kind(old, new)].append(name)

    of_width = ("outputs", "other")
    by_width = [name for kind in of_width for name in kinds.get(kind, ())]
    # One cause in place of a line for each kind of layer.
    # In a small model, a single layer is a large portion of the tensors.
    if len(by_width) > max(4, _MOST_OTHER_SIZES * total):
        kinds = {kind: names for kind, names in kinds.items() if kind not in of_width}
        changes = Counter(
            change
            for name in by_width
            for change in zip(*changed[name], strict=False)
            if change[0] != change[1]
        )
        line = f"another width: {len(by_width)} of {total} tensors have other sizes"
        # None if the shapes differ only in their number of dimensions.
        for (size, new_size), _ in changes.most_common(1):
            line += f", most often {size} in the checkpoint, {new_size} in the model"
        yield Note(_CAUSE, len(by_width), line)

    for kind, names in kinds.items():
        old, new = changed[names[0]]
        more = f" ({len(names)} tensors)" if len(names) > 1 else ""
        line = (
            f"{_KINDS[kind]}: {_quoted(names[0])} is {list(old)} in the checkpoint, {list(new)} in "
            f"the model{more}"
        )
        yield Note(_CAUSE, len(names), line)


def _kind(old: Shape, new: Shape) -> str:
    """Return the key in ``_KINDS`` for what differs between two shapes."""
    if len(old) == 2 and old[::-1] == new:
        return "transposed"
    return "outputs" if old[1:] == new[1:] and len(old) == len(new) else "other"
