"""Finding which names of one set of tensors are renamed in another one, from names and shapes alone.

A rename is certain only if names and shapes leave one reading. Where two tensors of one shape could
each be the other, both readings are reported, and none is chosen.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import count, islice
from typing import Final, Literal, TypeAlias


Shape: TypeAlias = tuple[int, ...]
# None where a parameter has no shape yet.
Shapes: TypeAlias = Mapping[str, Shape | None]
Parts: TypeAlias = tuple[str, ...]
# The tensors of a module: last parts of names, and shapes. For a tensor, no last part.
Content: TypeAlias = frozenset[tuple[str, Shape | None]]

# Names from a file may be of any length; what is longer than any attribute path is only counted.
_LONGEST_NAME: Final = 1000
_MOST_NAMES: Final = 100_000
# Names that beginnings do not explain, beyond which shapes are not compared.
_MOST_LEFT: Final = 10_000
_MOST_TAILS: Final = 40
# Names of one content that a name is compared with.
_MOST_CANDIDATES: Final = 64
# Comparisons of two names, for all names together.
_MOST_COMPARISONS: Final = 64_000
_MOST_COMPARED: Final = 2500
_MOST_HEADS: Final = 6
_MOST_READINGS: Final = 4
# How similar two names are that differ by a typing error.
_TYPO: Final = 0.8
# The portion of names that have to fit, apart from their beginnings, for shapes to make others certain.
_LEAST_BY_NAME: Final = 0.1

# Words of different libraries for one tensor.
_SYNONYMS: Final = {"query": "q", "wq": "q", "key": "k", "wk": "k", "value": "v", "wv": "v"} | {
    "wo": "o",
    "gamma": "weight",
    "beta": "bias",
}
_QUERY_KEY_VALUE: Final = frozenset("qkv")


@dataclass(frozen=True)
class Rule:
    """How several old names have become new ones.

    Attributes:
        kind: ``"prefix"``: a beginning is removed or added. ``"rename"``: parts are replaced. ``"join"``:
            several tensors are one now. ``"split"``: one tensor is several now.
        old: The parts of old names that are replaced, or the tensors; ``*`` stands for a number that
            stays. Several readings if it is not certain. A prefix that is added has an empty one.
        new: The parts of new names, or the tensors; several readings if it is not certain.
        count: The number of old names, or of tensors that are joined or split.
        is_certain: Whether names and shapes leave one reading.
    """

    kind: Literal["prefix", "rename", "join", "split"]
    old: Parts
    new: Parts
    count: int
    is_certain: bool = True


@dataclass
class Renames:
    """Rules that turn old names into new ones.

    Attributes:
        old: The shapes of the names that no rule explains, by the name that the rules gave them.
        new: The shapes of the new names that no rule explains.
        original: The old name of each name in ``old``.
        present: All new names that are not in question.
        rules: The rules, in the order in which they were found.
        pairs: Each old name that certainly is a new one.
        coverage: The portion of the names that fit, or that a rule explains without rivals.
        is_of_another_model: Whether hardly a name fits, apart from its beginning.
    """

    old: dict[str, Shape | None]
    new: dict[str, Shape | None]
    original: dict[str, str]
    present: Collection[str]
    rules: list[Rule] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    coverage: float = 1.0
    is_of_another_model: bool = False

    def take(self, names: Mapping[str, str]) -> None:
        """Take pairs of an old name and a new one."""
        for name, new_name in names.items():
            self.pairs[self.original.pop(name)] = new_name
            del self.old[name], self.new[new_name]

    def substitute(self, names: Mapping[str, str], *, is_certain: bool) -> int:
        """Give old names their names under a rule; return how many are names of the other side now."""
        explained = 0
        for name, substituted in names.items():
            if substituted in self.old:
                continue
            shape, original = self.old.pop(name), self.original.pop(name)
            # A load may have filled in what was missing: a counter of BatchNorm, for instance.
            is_explained = substituted in self.new or substituted in self.present
            explained += is_explained
            if not is_explained:
                self.old[substituted], self.original[substituted] = shape, original
            elif substituted in self.new:
                del self.new[substituted]
                if is_certain:
                    self.pairs[original] = substituted
        return explained


def find_renames(
    old: Shapes,
    new: Shapes,
    surplus: Collection[str] | None = None,
    lacking: Collection[str] | None = None,
) -> Renames:
    """Find the names that those of ``old`` have become in ``new``.

    Args:
        old: All tensors of one side.
        new: All tensors of the other side.
        surplus: The old names in question; without it, those that ``new`` lacks.
        lacking: The new names in question; without it, those that ``old`` lacks.

    Returns:
        The rules, the pairs of names that are certain, and what is left. It is deterministic.
    """
    surplus = [name for name in old if name not in new] if surplus is None else surplus
    lacking = [name for name in new if name not in old] if lacking is None else lacking
    left_old, left_new = (
        {n: shapes[n] for n in islice(names, _MOST_NAMES) if len(n) <= _LONGEST_NAME}
        for shapes, names in ((old, surplus), (new, lacking))
    )
    present = new.keys() - set(lacking)
    renames = Renames(left_old, left_new, {name: name for name in left_old}, present)
    enough = min(len(left_old), len(left_new))
    for _ in range(_MOST_HEADS):
        if not _find_head(renames, enough):
            break
    fitting = len(old.keys() & new.keys()) + sum(rule.count for rule in renames.rules)

    by_shape = 0
    if max(len(renames.old), len(renames.new)) <= _MOST_LEFT:
        _find_joined(renames, "join")
        _find_joined(renames, "split")
        once = [
            {shape for shape, n in Counter(side.values()).items() if n == 1} for side in (old, new)
        ]
        by_shape = _match_rest(renames, once[0] & once[1])

    least = max(1, min(len(old), len(new)))
    joined = sum(rule.count for rule in renames.rules if rule.kind in {"join", "split"})
    renames.coverage = (fitting + joined + by_shape) / least
    renames.is_of_another_model = fitting / least < _LEAST_BY_NAME
    if renames.is_of_another_model:
        # Some shapes are the same everywhere.
        renames.rules = [replace(rule, is_certain=False) for rule in renames.rules]
        renames.pairs = {}
    return renames


def _parts(name: str) -> Parts:
    return tuple(name.split("."))


def _numbers(name: str) -> Parts:
    return tuple(part for part in name.split(".") if part.isdecimal())


def starred(name: str, most: int = _LONGEST_NAME) -> str:
    """Return a name with ``*`` in place of its numbers, or of the first ones."""
    index = count()
    parts = name.split(".")
    return ".".join("*" if p.isdecimal() and next(index) < most else p for p in parts)


def _star_shared(names: Iterable[str]) -> Parts:
    """Return names with ``*`` for the first numbers, which all of them have."""
    names = tuple(names)
    columns = [*zip(*map(_numbers, names), strict=False)]
    shared = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    return tuple(starred(name, shared) for name in names)


def _differing_parts(*names: str) -> Parts:
    """Return names without the parts that all of them begin and end with, numbers as ``*``."""
    parts = [*map(_parts, names)]
    shortest = min(map(len, parts))
    start = next((i for i in range(shortest) if len({each[i] for each in parts}) > 1), shortest)
    most = shortest - start
    end = next((i for i in range(most) if len({each[-1 - i] for each in parts}) > 1), most)
    # A part that is inserted or removed is shown with the part that it follows, or is followed by.
    if any(len(each) == start + end for each in parts):
        end -= bool(end and not start)
        start -= bool(start)
    # A number alone says little.
    while start and any(each[start].isdecimal() for each in parts):
        start -= 1
    shortened = [".".join(each[start : len(each) - end]) for each in parts]
    return _star_shared(shortened) if any("." in each for each in shortened) else (*shortened,)


def _tails(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its first parts; its last part only if it is all."""
    yield name
    dots = [dot.end() for dot in islice(re.finditer(r"\.", name), _MOST_TAILS)]
    yield from (name[dot:] for dot in dots[:-1])


def _names_by_tail(renames: Renames) -> Iterator[tuple[str, str, str, bool]]:
    """Yield an old name, a new one, the longest end that they share, and whether only these two do."""
    by_tail: dict[tuple[str, Parts | None], list[str]] = defaultdict(list)
    for name in renames.new:
        inside = _numbers(name)
        last = name.rpartition(".")[2]
        for tail in (*_tails(name), *([last] if last != name and last in renames.old else [])):
            by_tail[tail, inside].append(name)
            by_tail[tail, None].append(name)

    longest: dict[str, tuple[str, Parts]] = {}
    for name in renames.old:
        tails = (*_tails(name), name.rpartition(".")[2])
        for tail in tails:
            if (tail, None) in by_tail:
                longest[name] = tail, _numbers(name)
                break
    uses = Counter(longest.values())
    for name, (tail, inside) in longest.items():
        others = by_tail.get((tail, inside)) or by_tail[tail, None]
        is_alone = len(others) == uses[tail, inside] == 1
        yield from ((name, other, tail, is_alone) for other in others[:_MOST_READINGS])


def _find_head(renames: Renames, enough: int) -> bool:
    """Find the beginnings of names whose other parts are the same: a prefix, or another home of layers."""
    votes: Counter[Parts] = Counter()
    fits: Counter[Parts] = Counter()
    modules: dict[Parts, set[str]] = defaultdict(set)
    for name, other, tail, is_alone in _names_by_tail(renames):
        rule = _star_shared(each[: -len(tail)].removesuffix(".") for each in (name, other))
        if is_alone or "" in rule:
            shapes = {renames.old[name], renames.new[other]}
            votes[rule] += 1
            fits[rule] += len(shapes) == 1 or None in shapes
            modules[rule].add(tail.rpartition(".")[0])

    # A prefix is of many names. Another beginning could be a coincidence in a single module.
    rules = [
        rule
        for rule, n in votes.items()
        if fits[rule] * 2 >= n and (n * 4 >= enough if "" in rule else len(modules[rule]) > 1)
    ]
    if not rules:
        return False
    best = max(rules, key=lambda rule: (votes[rule], fits[rule], rule))
    side = 0 if best[0] else 1
    rivals = sorted(r for r in rules if r[1 - side] == best[1 - side] and fits[r] == fits[best])
    is_certain = len(rivals) == 1
    head, new_head = rivals[0]
    explained = renames.substitute(_under(renames.old, head, new_head), is_certain=is_certain)
    olds, news = (tuple(dict.fromkeys(rival[i] for rival in rivals)) for i in (0, 1))
    if "" in best:
        olds, news = (tuple(f"{each}." if each else "" for each in side) for side in (olds, news))
        renames.rules.append(Rule("prefix", olds, news, explained, is_certain))
    else:
        if is_certain:
            olds, news = ((part,) for part in _differing_parts(head, new_head))
        renames.rules.append(Rule("rename", olds, news, explained, is_certain))
    return explained > 0


def _under(names: Iterable[str], head: str, new_head: str) -> dict[str, str]:
    """Return the names that begin with ``head``, each with the new beginning and the same numbers."""
    pattern = r"(\d+)".join(map(re.escape, head.split("*")))
    finder = re.compile(rf"{pattern}(?:\.|$)" if head else "")
    found: dict[str, str] = {}
    for name in names:
        if match := finder.match(name):
            filled = new_head
            for number in match.groups():
                filled = filled.replace("*", number, 1)
            found[name] = ".".join(part for part in (filled, name[match.end() :]) if part)
    return found


def _find_joined(renames: Renames, kind: Literal["join", "split"]) -> None:
    """Find tensors of one module whose sizes add up to that of one tensor of the other side."""
    sides = (renames.old, renames.new)
    parts, wholes = sides if kind == "join" else sides[::-1]
    beside: dict[Hashable, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, shape in parts.items():
        home, _, leaf = name.rpartition(".")
        if shape:
            beside[_numbers(name), shape[1:], leaf][home.rpartition(".")[0]].append(name)
    counts: Counter[tuple[Parts, str]] = Counter()
    for whole, size in list(wholes.items()):
        leaf = re.split(r"[._]", whole)[-1]
        groups = beside.get((_numbers(whole), size[1:], leaf), {}) if size else {}
        for names in islice(groups.values(), _MOST_CANDIDATES):
            # A tensor that is part of another one counts as too large.
            sizes = {name: (parts.get(name) or size or (0,))[0] for name in names}
            smaller = [name for name in names if size and sizes[name] < size[0]]
            chosen = _joined_names(whole, smaller) if len(smaller) > 1 else ()
            if size and sum(sizes[name] for name in chosen) == size[0]:
                counts[tuple(map(starred, chosen)), starred(whole)] += len(chosen)
                del wholes[whole]
                for name in chosen:
                    del parts[name]
                break
    for (chosen, whole), n in counts.items():
        olds, news = (chosen, (whole,)) if kind == "join" else ((whole,), chosen)
        renames.rules.append(Rule(kind, olds, news, n))


def _joined_names(whole: str, names: list[str]) -> Parts:
    """Return the names that the name of the whole speaks of: q, k and v, or gate and up."""
    words = _tokens(whole)
    telling = dict(zip(names, _telling(map(_tokens, names)), strict=True))
    if re.search(r"att|qkv|kv|in_proj|query", whole):
        words |= _QUERY_KEY_VALUE
    return tuple(name for name in names if telling[name] & words)


def _match_rest(renames: Renames, unique: set[Shape | None]) -> int:
    """Find modules that have the same tensors, and then tensors of the same shape; return their number.

    ``unique`` has the shapes that one tensor of each side has.
    """
    explained = 0
    for by_module in (True, False):
        old, new = (_contents(each, by_module=by_module) for each in (renames.old, renames.new))
        counts: Counter[tuple[Parts, Parts, bool]] = Counter()
        components = [*_components(old, new)]
        places = Counter(_differing_parts(*a, *b) for a, b in components if len(a) == len(b) == 1)
        repeated = {parts for parts, n in places.items() if n > 1}
        for olds, news in components:
            pairs = _certain_pairs(olds, news, old, unique, repeated)
            for name, other in pairs.items():
                tensors = [_tensors(each, old[name]) for each in (name, other)]
                renames.take(dict(zip(*tensors, strict=True)))
                explained += len(tensors[0])
                parts, new_parts = _differing_parts(name, other)
                counts[(parts,), (new_parts,), True] += len(tensors[0])

            rest = [name for name in olds if name not in pairs]
            others = [name for name in news if name not in pairs.values()]
            # Many readings do not help, and vectors of one size are everywhere.
            few = 0 < len(others) <= _MOST_READINGS and 0 < len(rest) <= _MOST_READINGS
            if few and (by_module or len(rest) == len(others)):
                shown = _differing_parts(*rest, *others)
                readings = sorted(shown[: len(rest)]), sorted(shown[len(rest) :])
                doubted = sum(len(old[name]) for name in rest)
                counts[tuple(readings[0]), tuple(readings[1]), False] += doubted
                for shapes, left, contents in (
                    (renames.old, rest, old),
                    (renames.new, others, new),
                ):
                    for name in left:
                        for each in _tensors(name, contents[name]):
                            del shapes[each]
        for doubtful in [key for key in counts if not key[2] and (key[0], key[1], True) in counts]:
            counts[doubtful[0], doubtful[1], True] += counts.pop(doubtful)
        renames.rules += [Rule("rename", a, b, n, sure) for (a, b, sure), n in counts.items()]
    return explained


def _contents(shapes: Shapes, *, by_module: bool) -> dict[str, Content]:
    """Return what each module, or tensor, has."""
    found: dict[str, set[tuple[str, Shape | None]]] = defaultdict(set)
    for name, shape in shapes.items():
        home, dot, leaf = name.rpartition(".")
        if not by_module:
            found[name].add(("", shape))
        elif dot:
            found[home].add((leaf, shape))
    return {name: frozenset(content) for name, content in found.items()}


def _tensors(name: str, content: Content) -> list[str]:
    """Return the names of the tensors of a module, or that of a tensor."""
    return sorted(f"{name}.{leaf}" if leaf else name for leaf, _ in content)


def _components(
    old: Mapping[str, Content], new: Mapping[str, Content]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield names that could be one another, and nothing else."""
    by_key: dict[Hashable, list[str]] = defaultdict(list)
    for name, content in new.items():
        for key in _keys(name, content):
            by_key[key].append(name)
    most = min(_MOST_CANDIDATES, 4 + _MOST_COMPARISONS // (1 + len(old)))
    targets, owners = {}, defaultdict[str, list[str]](list)
    for name, content in old.items():
        candidates = next((by_key[key] for key in _keys(name, content) if key in by_key), [])
        targets[name] = _closest(name, candidates[:most])
        for other in targets[name]:
            owners[other].append(name)

    seen: set[str] = set()
    for start, first in targets.items():
        if start in seen or not first:
            continue
        olds, news, waiting = {start: None}, dict[str, None](), [start]
        while waiting:
            for other in targets[waiting.pop()]:
                if other not in news:
                    news[other] = None
                    waiting += [name for name in owners[other] if name not in olds]
                    olds.update(dict.fromkeys(owners[other]))
        seen.update(olds)
        yield [*olds], [*news]


def _keys(name: str, content: Content) -> tuple[Hashable, ...]:
    """Return what names of one tensor may have in common, the numbers of layers first."""
    inside = _numbers(name)
    return (content, inside, ""), (content, inside[:1]), (content,)


def _closest(name: str, others: list[str]) -> list[str]:
    """Return the names that have most of the first parts in common with a name."""
    parts = _parts(name)
    shared = {}
    for other in others:
        pairs = zip(parts, _parts(other), strict=False)
        shared[other] = next((i for i, (a, b) in enumerate(pairs) if a != b), len(parts))
    most = max(shared.values(), default=0)
    return [other for other in others if shared[other] == most]


def _tokens(name: str) -> set[str]:
    words = re.findall(r"[a-z]+|\d+", name.lower())
    return {_SYNONYMS.get(str(word), str(word)) for word in words}


def _telling(words: Iterable[set[str]]) -> list[set[str]]:
    """Return the words that tell names apart."""
    words = [*words]
    common = set.intersection(*words) if len(words) > 1 else set[str]()
    return [each - common for each in words]


def _certain_pairs(
    olds: list[str],
    news: list[str],
    contents: Mapping[str, Content],
    unique: set[Shape | None],
    repeated: set[Parts],
) -> dict[str, str]:
    """Return which names certainly are which."""
    if len(olds) == len(news) == 1:
        old, new = olds[0], news[0]
        return {old: new} if _is_evident(old, new, contents[old], unique, repeated) else {}
    if len(olds) * len(news) > _MOST_COMPARED:
        return {}
    words = [*map(_tokens, _differing_parts(*olds, *news))]
    old_words = dict(zip(olds, _telling(words[: len(olds)]), strict=True))
    new_words = dict(zip(news, _telling(words[len(olds) :]), strict=True))
    shared = {(a, b): old_words[a] & new_words[b] for a in olds for b in news}
    uses = Counter(name for pair, common in shared.items() if common for name in pair)
    pairs = [pair for pair in shared if shared[pair] and uses[pair[0]] == uses[pair[1]] == 1]
    if not len(pairs) == len(olds) == len(news):
        pairs = [pair for pair in pairs if shared[pair] & _QUERY_KEY_VALUE]
    return dict(pairs)


def _is_evident(
    old: str, new: str, content: Content, unique: set[Shape | None], repeated: set[Parts]
) -> bool:
    """Return True if shapes or names leave little doubt that two names are one tensor."""
    matrices = [shape for _, shape in content if shape and sum(size > 1 for size in shape) > 1]
    if not unique.isdisjoint(matrices):
        return True
    (home, _, last), (new_home, _, new_last) = old.rpartition("."), new.rpartition(".")
    if home and home == new_home and (matrices or len(content) > 1):
        return True
    # In another layer. More numbers may follow, where a layer has become a list.
    if any(a != b for a, b in zip(_numbers(old), _numbers(new), strict=False)):
        return False
    parts = _differing_parts(old, new)
    # In several layers.
    if matrices and parts in repeated:
        return True
    words, others = _tokens(old), _tokens(new)
    if last == new_last and (words <= others or others <= words):
        return True
    return SequenceMatcher(None, parts[0], parts[1]).ratio() > _TYPO


def paths_after(new_names: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return where the tensors below the path of each module are after a renaming.

    Args:
        new_names: The new name of each tensor; its old one if it is not renamed.

    Returns:
        All paths below which some of them have the names relative to the module that they had; None
        stands for tensors whose relative names have changed.
    """
    paths: dict[str, dict[str | None, None]] = defaultdict(dict)
    for name, new_name in new_names.items():
        path = name
        new_path = new_name
        is_alike = True
        while path:
            path, _, last = path.rpartition(".")
            new_path, _, new_last = new_path.rpartition(".")
            is_alike = is_alike and last == new_last
            paths[path][new_path if is_alike else None] = None
    return {path: list(new_paths) for path, new_paths in paths.items()}
