"""Which names of one set of tensors are renamed in another one, from names and shapes alone.

Names say more than shapes: a beginning is removed, added or replaced, or one part of a name is. A
rename is taken only if names and shapes leave one reading. Of beginnings that could each be
removed, all are reported, and none is chosen.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count, islice, takewhile
from typing import Final, Literal, NamedTuple, TypeAlias
from zlib import crc32


Shape: TypeAlias = tuple[int, ...]
# None where a parameter has no shape yet.
Shapes: TypeAlias = Mapping[str, Shape | None]
# The names that no rule and no cause explains yet.
Unexplained: TypeAlias = dict[str, Shape | None]
Parts: TypeAlias = tuple[str, ...]
# The tensors of a module: last parts of names, and shapes. For a tensor, no last part.
Content: TypeAlias = frozenset[tuple[str, Shape | None]]

# Names from a file may be of any length; what is longer than any attribute path is only counted.
LONGEST_NAME: Final = 1000
# Limits on the work: names come from files, which may be crafted to make it slow.
_MOST_NAMES: Final = 100_000
# Names of each side that decide about a beginning, and names that beginnings do not explain beyond
# which parts are not compared: a refused load is to take a few times as long as torch's.
_MOST_VOTERS: Final = 250
_MOST_LEFT: Final = 1_000
_MOST_TAILS: Final = 40
_PARTS_OF_AN_END: Final = 3
_MOST_HEADS: Final = 6
_MOST_READINGS: Final = 4
# The portion of names that have to fit, apart from what is renamed; the others are another model's.
_LEAST_BY_NAME: Final = 0.1


@dataclass(frozen=True)
class Rule:
    """How several old names have become new ones.

    Attributes:
        kind: ``"prefix"``: a beginning is removed or added. ``"rename"``: parts are replaced.
        old: The parts of old names that are replaced; ``*`` stands for a number that stays. Several
            readings if it is not certain. A prefix that is added has an empty one.
        new: The parts of new names; several readings if it is not certain.
        count: The number of old names.
        is_certain: Whether names and shapes leave one reading.
    """

    kind: Literal["prefix", "rename"]
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
        is_of_another_model: Whether hardly a name fits, also with the rules.
    """

    old: Unexplained
    new: Unexplained
    original: dict[str, str]
    present: Collection[str]
    rules: list[Rule] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    is_of_another_model: bool = False

    def substitute(self, names: Mapping[str, str], *, is_certain: bool) -> int:
        """Give old names their names under a rule; return how many are new names then."""
        explained = 0
        for name, substituted in names.items():
            # Two old names cannot be the same new one, so this one stays as it is.
            if substituted in self.old:
                continue

            shape = self.old.pop(name)
            original = self.original.pop(name)
            # A load may have filled in what was missing: a counter of BatchNorm, for instance.
            if substituted in self.new or substituted in self.present:
                explained += 1
                if is_certain and substituted in self.new:
                    self.pairs[original] = substituted
                self.new.pop(substituted, None)
            else:
                self.old[substituted] = shape
                self.original[substituted] = original
        return explained


def find_renames(
    old: Shapes,
    new: Shapes,
    surplus: Collection[str] | None = None,
    lacking: Collection[str] | None = None,
) -> Renames:
    """Find the names that those of ``old`` have become in ``new``.

    Example:
        >>> old = {"net.fc.weight": (4, 2), "net.fc.bias": (4,)}
        >>> renames = find_renames(old, {"fc.weight": (4, 2), "fc.bias": (4,)})
        >>> renames.rules
        [Rule(kind='prefix', old=('net.',), new=('',), count=2, is_certain=True)]
        >>> renames.pairs
        {'net.fc.weight': 'fc.weight', 'net.fc.bias': 'fc.bias'}
    """
    surplus = [name for name in old if name not in new] if surplus is None else surplus
    lacking = [name for name in new if name not in old] if lacking is None else lacking
    left_old = _limited(old, surplus)
    left_new = _limited(new, lacking)
    present = new.keys() - set(lacking)
    renames = Renames(left_old, left_new, {name: name for name in left_old}, present)

    # Names say more than shapes, so beginnings are found first. One may hide another: ``module.``
    # stands before a part that is renamed.
    enough = min(len(left_old), len(left_new), _MOST_VOTERS)
    for _ in range(_MOST_HEADS):
        if not _find_head(renames, enough):
            break
    if max(len(renames.old), len(renames.new)) <= _MOST_LEFT:
        _find_parts(renames)

    fitting = len(old.keys() & new.keys()) + sum(rule.count for rule in renames.rules)
    renames.is_of_another_model = fitting < _LEAST_BY_NAME * max(1, min(len(old), len(new)))
    if renames.is_of_another_model:
        # Few names have something in common by coincidence.
        renames.rules = []
        renames.pairs = {}
    return renames


def _limited(shapes: Shapes, names: Iterable[str]) -> Unexplained:
    first = islice(names, _MOST_NAMES)
    return {name: shapes[name] for name in first if len(name) <= LONGEST_NAME}


def _numbers(name: str) -> Parts:
    return tuple(part for part in name.split(".") if part.isdecimal())


def starred(name: str, most: int = LONGEST_NAME) -> str:
    """Return a name with ``*`` in place of its numbers, or of the first ones.

    Example:
        >>> starred("layers.0.blocks.1.weight", most=1)
        'layers.*.blocks.1.weight'
    """
    index = count()
    parts = name.split(".")
    return ".".join("*" if p.isdecimal() and next(index) < most else p for p in parts)


def _star_shared(names: Collection[str]) -> Parts:
    """Return names with ``*`` for the first numbers, which all of them have."""
    columns = zip(*map(_numbers, names), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))
    return tuple(starred(name, shared) for name in names)


def _tails(name: str, bare: Collection[str]) -> Iterator[str]:
    """Yield a name, and what is left of it without its first parts.

    Its last part is only yielded if there is a name ``bare`` of its other parts.
    """
    yield name
    dots = [dot.end() for dot in islice(re.finditer(r"\.", name), _MOST_TAILS)]
    yield from (name[dot:] for dot in dots[:-1])
    last = name.rpartition(".")[2]
    if last != name and last in bare:
        yield last


class _Alignment(NamedTuple):
    """An old name and a new one, and the longest end that they share."""

    old: str
    new: str
    tail: str
    is_alone: bool  # whether only these two share it


def _voters(names: Collection[str]) -> Collection[str]:
    """Return some of many names: those with the same ends on both sides, whatever comes before."""
    if len(names) <= _MOST_VOTERS:
        return names
    ends = {name: ".".join(name.split(".")[-_PARTS_OF_AN_END:]) for name in names}
    portion = _MOST_VOTERS / len(names)
    return [name for name, end in ends.items() if crc32(end.encode()) < portion * 2**32]


def _alignments(renames: Renames, old: Iterable[str], new: Iterable[str]) -> Iterator[_Alignment]:
    """Yield the new names that share the longest end with an old one."""
    by_tail: dict[tuple[str, Parts | None], list[str]] = defaultdict(list)
    for name in new:
        for tail in _tails(name, renames.old):
            by_tail[tail, _numbers(name)].append(name)
            by_tail[tail, None].append(name)

    longest: dict[str, tuple[str, Parts]] = {}
    bare = renames.old.keys() | renames.new.keys()
    for name in old:
        for tail in _tails(name, bare):
            if (tail, None) in by_tail:
                longest[name] = tail, _numbers(name)
                break

    uses = Counter(longest.values())
    for name, (tail, numbers) in longest.items():
        others = by_tail.get((tail, numbers)) or by_tail[tail, None]
        is_alone = len(others) == uses[tail, numbers] == 1
        for other in others[:_MOST_READINGS]:
            yield _Alignment(name, other, tail, is_alone)


class _Heads(NamedTuple):
    """The beginnings of old and of new names, with their last dot.

    One is empty if a prefix is added or removed.
    """

    old: str
    new: str


def _find_head(renames: Renames, enough: int) -> bool:
    """Find a beginning of names whose other parts stay: a prefix, or another home of layers.

    Each pair of names that share a long end votes for the beginnings before it.
    """
    voters = _voters(renames.old)
    votes: Counter[_Heads] = Counter()
    fits: Counter[_Heads] = Counter()
    modules: dict[_Heads, set[str]] = defaultdict(set)
    for name, other, tail, is_alone in _alignments(renames, voters, _voters(renames.new)):
        starts = (name.removesuffix(tail), other.removesuffix(tail))
        heads = _Heads(*_star_shared(starts))
        if is_alone or "" in heads:
            shapes = {renames.old[name], renames.new[other]}
            votes[heads] += 1
            fits[heads] += len(shapes) == 1 or None in shapes
            modules[heads].add(tail.rpartition(".")[0])

    def is_likely(heads: _Heads) -> bool:
        n = votes[heads]
        fit = fits[heads] * 2 >= n
        # Another beginning could be a coincidence in a single module.
        if "" not in heads:
            return fit and len(modules[heads]) > 1
        # A prefix is of many names. If nearly all of them fit, the model may have another width.
        is_of_all = n > _MOST_READINGS and n * 4 >= len(voters) * 3
        return n * 4 >= enough if fit else is_of_all

    likely = [heads for heads in votes if is_likely(heads)]
    if not likely:
        return False

    # The names themselves break ties, so that the order in a file has no influence.
    best = max(likely, key=lambda heads: (votes[heads], fits[heads], heads))
    # Other beginnings on the side that has one would explain as much.
    side = 0 if best.old else 1
    rivals = sorted(
        heads for heads in likely if heads[1 - side] == best[1 - side] and fits[heads] == fits[best]
    )
    # Both are reported, and neither is chosen.
    is_certain = len(rivals) == 1
    substituted = _with_new_head(renames.old, rivals[0])
    explained = renames.substitute(substituted, is_certain=is_certain)

    kind: Literal["prefix", "rename"] = "prefix" if "" in best else "rename"
    end = None if kind == "prefix" else -1
    olds = tuple(dict.fromkeys(heads.old[:end] for heads in rivals))
    news = tuple(dict.fromkeys(heads.new[:end] for heads in rivals))
    renames.rules.append(Rule(kind, olds, news, explained, is_certain=is_certain))
    return explained > 0


def _with_new_head(names: Iterable[str], heads: _Heads) -> dict[str, str]:
    """Return the names that begin with the old head, each with the new one and the same numbers."""
    # The star of a head stands for the number of a layer, which the new name has as well.
    pattern = r"(\d+)".join(map(re.escape, heads.old[:-1].split("*")))
    finder = re.compile(rf"{pattern}(?:\.|$)" if heads.old else "")
    new_names: dict[str, str] = {}
    for name in names:
        match = finder.match(name)
        if match is None:
            continue
        new_head = heads.new
        for number in match.groups():
            new_head = new_head.replace("*", number, 1)
        new_names[name] = (new_head + name[match.end() :]).removesuffix(".")
    return new_names


def _find_parts(renames: Renames) -> None:
    """Find modules, and then tensors, of one shape whose names differ in one part."""
    counts: Counter[Parts] = Counter()
    for by_module in (True, False):
        old = _by_other_parts(renames.old, by_module=by_module)
        new = _by_other_parts(renames.new, by_module=by_module)
        shared = [key for key in old if key in new]
        readings = Counter(path for key in shared for path in old[key])
        new_readings = Counter(path for key in shared for path in new[key])
        for key in shared:
            path = old[key][0]
            new_path = new[key][0]
            # A path that could be one of two, or that two could be, stays as it is.
            if not len(old[key]) == len(new[key]) == readings[path] == new_readings[new_path] == 1:
                continue
            content, place, _ = key
            # Where a layer was inserted, another one has its number.
            if all(each.split(".")[place].isdecimal() for each in (path, new_path)):
                continue
            names = {path + leaf: new_path + leaf for leaf, _ in content}
            explained = renames.substitute(names, is_certain=True)
            counts[_star_shared((path, new_path))] += explained
    renames.rules += [Rule("rename", (old,), (new,), n) for (old, new), n in counts.items()]


# Paths that differ in one part have this in common: their tensors, and the other parts.
_OtherParts: TypeAlias = tuple[Content, int, Parts]


def _by_other_parts(shapes: Shapes, *, by_module: bool) -> dict[_OtherParts, list[str]]:
    """Return the paths of modules, or of tensors, by all that they are without one part."""
    # A tensor is a module of one tensor without a name, so that one search finds both.
    contents: dict[str, set[tuple[str, Shape | None]]] = defaultdict(set)
    for name, shape in shapes.items():
        path, dot, leaf = name.rpartition(".") if by_module else (name, "", "")
        contents[path].add((dot + leaf, shape))

    paths: dict[_OtherParts, list[str]] = defaultdict(list)
    for path, content in contents.items():
        # Vectors alone say little: biases and norms of one size are everywhere.
        sizes = [size for _, shape in content for size in shape or () if size > 1]
        if len(content) == 1 and len(sizes) < 2:
            continue
        tensors = frozenset(content)
        parts = tuple(path.split("."))
        for place in range(len(parts)):
            paths[tensors, place, parts[:place] + parts[place + 1 :]].append(path)
    return paths


def beginnings(name: str) -> list[str]:
    """Return the beginnings of a name that end with a whole part, and the name itself last.

    Example:
        >>> beginnings("blocks.0.weight")
        ['blocks', 'blocks.0', 'blocks.0.weight']
    """
    return [*accumulate(name.split("."), "{}.{}".format)]


def paths_after(new_names: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Return where the tensors below the path of each module are after a renaming.

    Example:
        >>> paths_after({"fc.weight": "head.weight", "fc.bias": "head.bias"})
        {'fc': ['head'], '': [None]}
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
