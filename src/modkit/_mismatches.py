"""Why a state dict does not fit a model: the few causes behind hundreds of names, from names and shapes.

It is imported when a load has failed. No tensor is read, and nothing is changed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

import torch

from modkit._renames import Rule, Shape, Shapes, find_renames, starred
from modkit.errors import printable


MOST_LINES: Final = 8
_LONGEST: Final = 80
# Keys in front of a state dict: checkpoint["state"]["model"]["module"].
_MOST_NESTED: Final = 4
_OF_OPTIMIZER: Final = frozenset({"state", "param_groups"})
# Below this portion of names that rules explain, what they explain are coincidences.
_LEAST_COVERAGE: Final = 0.1
_ADDED_BY: Final = {
    "module": "DataParallel, DDP or AveragedModel",
    "model": "Lightning or another trainer",
    "base_model": "PEFT",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
# Tensors that one side alone has, which no rename explains, by their names.
_FAMILIES: Final = {
    r"lora_|adapter": "an adapter such as LoRA",
    r"(^|\.)(SCB|weight\.absmax|weight\.quant_\w+|qweight|qzeros|g_idx)(\.|$)": "quantized weights",
    r"(^|\.)n_averaged$": "the counter of an AveragedModel",
    r"(^|\.)(running_mean|running_var|num_batches_tracked)$": "statistics of BatchNorm; the other "
    "side has another norm such as GroupNorm, none, or track_running_stats=False",
    r"(^|\.)weight_[gv]$": "weight_norm",
    r"(^|\.)weight_(orig|mask|u)$": "spectral_norm or pruning",
    r"(^|\.)parametrizations\.": "a parametrization such as weight_norm",
    r"(^|\.)_extra_state$": "extra state, for instance of TransformerEngine",
    r"(^|\.)(inv_freq|position_ids|relative_position_index|attn_mask|masked_bias|attn\.bias)$": (
        "constants that some versions of a library save"
    ),
}
# Names that are missing, unexpected, or of another shape.
Reported: TypeAlias = tuple[Collection[str], Collection[str], Collection[str]]
Note: TypeAlias = tuple[int, int, str]  # rank, number of tensors, text
# In this order, and the cause that explains most tensors first.
_PREFIX, _CAUSE, _DOUBTFUL, _REST = range(4)


def shapes_of(entries: Mapping[Any, Any]) -> dict[str, Shape | None]:
    """Return the shapes of the tensors among entries of a state dict; None where one has no shape yet."""
    return {
        name: None if torch.nn.parameter.is_lazy(value) else tuple(value.shape)
        for name, value in entries.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def explain(
    model: Shapes, state_dict: Mapping[Any, Any], reported: Reported | None = None
) -> list[str]:
    """Say why a state dict does not fit a model, the cause that explains most tensors first.

    Args:
        model: The names and shapes of the model's tensors.
        state_dict: What was given for a state dict, of any content.
        reported: The names that a load reported as missing, as unexpected and for their shapes; without
            it, all that differ.

    Returns:
        At most eight lines. They propose, and may name several causes where shapes do not tell.
    """
    file = shapes_of(state_dict)
    if not file.keys() & model.keys():
        nested = _find_state_dict(model, state_dict)
        if nested is not None:
            return nested
    return compare(model, file, reported)


def compare(model: Shapes, file: Shapes, reported: Reported | None = None) -> list[str]:
    """Say how names and shapes of a checkpoint differ from a model's; see :func:`explain`."""
    if reported is None:
        differing = [name for name in model if name in file and file[name] != model[name]]
        reported = model.keys() - file.keys(), file.keys() - model.keys(), differing
    missing, unexpected = set(reported[0]), set(reported[1])
    lacking = {name: shape for name, shape in model.items() if name in missing}
    surplus = {name: shape for name, shape in file.items() if name in unexpected}

    notes = list(_dotless(surplus, lacking))
    notes += _families(model, file, surplus, lacking)
    notes += _depths(model, file, surplus, lacking)
    renames = find_renames(file, model, surplus, lacking)
    is_other = renames.is_of_another_model and bool(surplus)
    if is_other:
        notes.append((_PREFIX, len(file), _another_model([*lacking] or model, surplus)))
    is_covered = not is_other or renames.coverage >= _LEAST_COVERAGE
    if is_covered:
        notes += [_say_rule(rule, len(file)) for rule in renames.rules]
    sizes = {name: (file[name], model[name]) for name in reported[2] if name in file}
    sizes |= {
        new: (file[old], model[new])
        for old, new in renames.pairs.items()
        if file[old] != model[new]
    }
    notes += _sizes({name: pair for name, pair in sizes.items() if None not in pair}, len(model))
    if is_covered:
        notes += _rest("the checkpoint", [renames.original[name] for name in renames.old])
        notes += _rest("the model", [*renames.new])
    return _lines(notes)


def _lines(notes: list[Note]) -> list[str]:
    texts = [text for *_, text in sorted(notes, key=lambda note: (note[0], -note[1]))]
    if len(texts) > MOST_LINES:
        texts[MOST_LINES - 1 :] = [f"and {len(texts) - MOST_LINES + 1} more differences"]
    return texts


def _quoted(name: str) -> str:
    text = printable(name[: 2 * _LONGEST])
    return repr(text if len(name) <= _LONGEST else f"{text[: _LONGEST // 2]}...")


def _listed(names: Collection[str], most: int = 3, word: str = ", ") -> str:
    shown = word.join(map(_quoted, islice(names, most)))
    return shown + (", ..." if len(names) > most else "")


def _another_model(model: Collection[str], file: Collection[str]) -> str:
    return (
        "hardly a name of the checkpoint fits, with or without a prefix: is it of another model, or of "
        f"another library? It has {_listed(file, 2)}; the model has {_listed(model, 2)}"
    )


def _find_state_dict(model: Shapes, given: Mapping[Any, Any]) -> list[str] | None:
    """Find the state dict in a checkpoint that has it below a key, or say that there is none."""
    if given.keys() >= _OF_OPTIMIZER:
        return ["this is the state of an optimizer, not of a model"]
    nested: dict[tuple[Any, ...], Mapping[Any, Any]] = {}
    waiting: list[tuple[tuple[Any, ...], Mapping[Any, Any]]] = [((), given)]
    # A dict may hold itself.
    seen = {id(given)}
    for path, inner in waiting:
        if len(path) == _MOST_NESTED or inner.keys() >= _OF_OPTIMIZER:
            continue
        for key, value in inner.items():
            if isinstance(value, Mapping) and id(value) not in seen:
                seen.add(id(value))
                nested[(*path, key)] = value
                waiting.append(((*path, key), value))

    wanted = Counter(model.values())
    scores = {}
    for path, inner in nested.items():
        shapes = shapes_of(inner)
        if shapes:
            same = len(shapes.keys() & model.keys())
            scores[path] = (same, (Counter(shapes.values()) & wanted).total(), len(shapes))
    if scores:
        best = max(scores.values())
        good = [path for path, score in scores.items() if score == best]
        keys = [f"checkpoint{''.join(f'[{_key(key)}]' for key in path)}" for path in good[:3]]
        # Any dict of tensors is a candidate, also one that has nothing in common with the model.
        is_below = "is" if any(best[:2]) else "may be"
        where = (
            f"the state dict {is_below} below a key of this checkpoint: load {' or '.join(keys)}"
        )
        inside = shapes_of(nested[good[0]])
        return [where, *compare(model, inside)][:MOST_LINES]
    if any(isinstance(value, torch.Tensor) for value in given.values()) and not nested:
        return None
    modules = [key for key, value in given.items() if isinstance(value, torch.nn.Module)]
    if modules:
        key = _key(modules[0])
        return [f"the entry {key} is a whole model: load checkpoint[{key}].state_dict()"]
    if not given:
        return ["the state dict is empty"]
    entries = ", ".join(_key(key) for key in islice(given, 6))
    return [f"this is not a state dict, and no state dict is inside; its entries are {entries}"]


def _key(key: object) -> str:
    return _quoted(key) if isinstance(key, str) else _quoted(repr(key))[1:-1]


def _dotless(surplus: dict[str, Shape | None], lacking: dict[str, Shape | None]) -> Iterator[Note]:
    """Find averages that some libraries store without the dots of names, behind a prefix."""
    plain = {name.replace(".", ""): name for name in lacking if "." in name}
    for prefix in ("ema_", "ema.", "model_ema.", "ema_model.", ""):
        pairs = {n: plain.get(n.removeprefix(prefix)) for n in surplus if n.startswith(prefix)}
        found = {name: other for name, other in pairs.items() if other}
        if len(found) > 1:
            for name, other in found.items():
                del surplus[name], lacking[other]
            behind = f" behind {prefix!r}" if prefix else ""
            text = (
                f"{len(found)} names of the checkpoint are those of the model without dots{behind}"
            )
            yield _PREFIX, len(found), f"{text}: averages (EMA) that another library saved?"
            return


def _families(
    model: Shapes,
    file: Shapes,
    surplus: dict[str, Shape | None],
    lacking: dict[str, Shape | None],
) -> Iterator[Note]:
    """Find tensors that only one side has, by what their names say."""
    for pattern, why in _FAMILIES.items():
        finder = re.compile(pattern)
        hits = [[n for n in names if finder.search(n)] for names in (surplus, lacking)]
        if bool(hits[0]) == bool(hits[1]):
            continue
        side, names = ("the checkpoint", surplus) if hits[0] else ("the model", lacking)
        found = hits[0] or hits[1]
        others = model if hits[0] else file
        if any(finder.search(name) for name in others):
            # Both have the family, so a module that the other side lacks has another cause, such as the depth.
            homes = {name.rpartition(".")[0] for name in others}
            found = [name for name in found if name.rpartition(".")[0] in homes]
        if not found:
            continue
        if all(name.endswith("num_batches_tracked") for name in found):
            why = "counters of BatchNorm, which torch before 0.4.1 did not save"
        text = f"only {side} has {_count(len(found), 'tensor')} such as {_quoted(found[0])}: {why}"
        yield _CAUSE, len(found), text
        for name in found:
            del names[name]


def _numbered(names: Collection[str]) -> dict[str, set[int]]:
    """Return the numbers below each home, such as those of layers in a list."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for match in re.finditer(r"(?:^|\.)(\d{1,9})(?=\.)", name[:1000]):
            found[name[: match.start()]].add(int(match[1]))
    return found


def _depths(
    model: Shapes,
    file: Shapes,
    surplus: dict[str, Shape | None],
    lacking: dict[str, Shape | None],
) -> Iterator[Note]:
    """Find lists of layers that are longer on one side, or that start at another number."""
    here, there = _numbered(file), _numbered(model)
    for home in sorted(here.keys() & there.keys()):
        extra, lost = here[home] - there[home], there[home] - here[home]
        if (not extra and not lost) or not here[home] & there[home]:
            continue
        first, last = min(here[home]), min(there[home])
        if extra and lost:
            if {n - first for n in here[home]} == {n - last for n in there[home]}:
                text = (
                    f"the numbers below {_quoted(home)} begin with {first} in the checkpoint and "
                    f"with {last} in the model: are all of them shifted?"
                )
                yield _PREFIX, len(here[home]), text
                _forget_below(home, extra, surplus)
                _forget_below(home, lost, lacking)
            continue
        count = _forget_below(home, extra, surplus) + _forget_below(home, lost, lacking)
        if count:
            text = (
                f"another depth: {_quoted(home)} has {len(here[home])} entries in the checkpoint, "
                f"{len(there[home])} in the model"
            )
            yield _CAUSE, count, text


def _forget_below(home: str, indices: set[int], names: dict[str, Shape | None]) -> int:
    starts = tuple(f"{home}.{index}." if home else f"{index}." for index in indices)
    found = [name for name in names if name.startswith(starts)] if starts else []
    for name in found:
        del names[name]
    return len(found)


def _count(number: int, noun: str, among: int | None = None) -> str:
    shown = f"{number}" if among is None else f"{number} of {among}"
    if number == among != 1:
        shown = f"all {number}"
    return f"{shown} {noun}" if number == 1 and among is None else f"{shown} {noun}s"


def _say_rule(rule: Rule, total: int) -> Note:
    old, new = _listed(rule.old, 4, " or "), _listed(rule.new, 4, " or ")
    if rule.kind == "prefix":
        text = f"{_count(rule.count, 'name', total)} of the checkpoint "
        text += f"have {old} too much" if rule.old[0] else f"lack the prefix {new}"
        why = next((_ADDED_BY[p] for p in rule.old[0].split(".") if p in _ADDED_BY), "")
        text += f" (added by {why})" if why else ""
        if not rule.is_certain:
            text += "; which one, shapes do not tell"
        elif rule.old[0]:
            text += f": remove it, or pass strip={old} to modkit.load_matching()"
        else:
            text += ": load it into that submodule, or pass rename= to modkit.load_matching()"
        return _PREFIX, rule.count, text
    if rule.kind == "rename":
        tensors, be = _count(rule.count, "tensor", total), "is" if rule.is_certain else "may be"
        are = "are" if rule.is_certain else "may be"
        text = f"{tensors} {are} renamed: {old} in the checkpoint {be} {new} in the model"
        if not rule.is_certain:
            is_single = len(rule.old) == len(rule.new) == 1
            text += "; they have one shape" if is_single else "; shapes do not tell which"
        return _CAUSE if rule.is_certain else _DOUBTFUL, rule.count, text

    (whole,), parts = (rule.new, rule.old) if rule.kind == "join" else (rule.old, rule.new)
    one, other = ("model", "checkpoint") if rule.kind == "join" else ("checkpoint", "model")
    home = parts[0].rpartition(".")[0].rpartition(".")[0]
    names = ", ".join(_quoted(part[len(home) + bool(home) :]) for part in parts)
    are = "are" if rule.is_certain else "may be"
    text = (
        f"{_count(rule.count, 'tensor')} of the {other} {are} joined in the {one}: {_quoted(whole)}"
    )
    return _CAUSE, rule.count, f"{text} has the size of {names} in {_quoted(home)}"


def _rest(side: str, names: list[str]) -> Iterator[Note]:
    if names:
        homes = Counter(starred(name.rpartition(".")[0] or name) for name in names)
        text = f"only {side} has {_count(len(names), 'other tensor')}, in "
        text += _listed([home for home, _ in homes.most_common()])
        if len(homes) == 1 < len(names):
            text += f": {_listed([name.rpartition('.')[2] for name in names])}"
        yield _REST, len(names), text


Sizes: TypeAlias = dict[str, tuple[Any, Any]]


def _sizes(sizes: Sizes, total: int) -> Iterator[Note]:
    """Find what kinds of sizes differ."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, pair in sizes.items():
        kinds[_kind(name, *pair)].append(name)
    by_width = kinds["outputs"] + kinds["other"] + kinds["channels"]
    if len(by_width) > max(4, 0.3 * total):
        for kind in ("outputs", "other", "channels"):
            del kinds[kind]
        changes = Counter(
            change
            for name in by_width
            for change in zip(*sizes[name], strict=False)
            if change[0] != change[1]
        )
        text = f"another width: {len(by_width)} of {total} tensors have other sizes"
        for (old, new), _ in changes.most_common(1):
            text += f", most often {old} in the checkpoint, {new} in the model"
        yield _CAUSE, len(by_width), text
    for kind, names in kinds.items():
        if names:
            old, new = sizes[names[0]]
            shown = (
                f"{_quoted(names[0])} is {list(old)} in the checkpoint, {list(new)} in the model"
            )
            more = f" ({len(names)} tensors)" if len(names) > 1 else ""
            yield _CAUSE, len(names), f"{_KINDS[kind]}: {shown}{more}"


_KINDS: Final = {
    "transposed": "transposed (Conv1D, or another framework)",
    "ones": "dimensions of size 1 differ (a 1x1 convolution, a scalar)",
    "positions": "another length or resolution, so other positions",
    "vocabulary": "another vocabulary",
    "outputs": "another number of outputs or classes",
    "channels": "another number of input channels",
    "other": "other sizes",
}


# Parts of names, not those of other embeddings: patches, classes.
_OF_WORDS: Final = r"(^|\.)(wte|lm_head|\w*vocab\w*|(word_|tok(en)?_)?emb\w*)(\.|$)"


def _kind(name: str, old: Shape, new: Shape) -> str:
    differing = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    if len(old) == 2 and old[::-1] == new:
        return "transposed"
    if [n for n in old if n != 1] == [n for n in new if n != 1]:
        return "ones"
    if re.search(r"pos(ition)?[a-z]*_?emb|relative_position|positional|wpe", name):
        # Not the width, which stands last.
        return "other" if differing == [len(old) - 1] else "positions"
    if len(old) == len(new) and differing == [0]:
        of_words = len(old) <= 2 and re.search(_OF_WORDS, name)
        return "vocabulary" if of_words else "outputs"
    return "channels" if len(old) == len(new) >= 3 and differing == [1] else "other"
