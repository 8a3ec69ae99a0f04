"""Which names of one set of tensors are renamed in another one, from names and shapes alone.

A rename is certain only if names and shapes leave one reading. Where two tensors of one shape could
each be the other, both readings are reported, and none is chosen.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import accumulate, count, islice, takewhile
from typing import Final, Literal, NamedTuple, TypeAlias
from zlib import crc32

from modkit._layer_lists import LONGEST_NAME, Shape, Shapes, is_renumbered, lists_in, names_below


# The names that no rule and no cause explains yet.
Unexplained: TypeAlias = dict[str, Shape | None]
Parts: TypeAlias = tuple[str, ...]
# The tensors of a module: last parts of names, and shapes. For a tensor, no last part.
Content: TypeAlias = frozenset[tuple[str, Shape | None]]

# Limits on the work: names come from files, which may be crafted to make it slow.
_MOST_NAMES: Final = 100_000
# Names of each side that decide about a beginning, and names that beginnings do not explain beyond
# which shapes are not compared: a refused load is to take a few times as long as torch's.
_MOST_VOTERS: Final = 250
_MOST_LEFT: Final = 1_000
_MOST_TAILS: Final = 40
_PARTS_OF_AN_END: Final = 3
# Names of one content that a name is compared with.
_MOST_CANDIDATES: Final = 64
# Comparisons of two names, for all names together.
_MOST_COMPARISONS: Final = 64_000
_MOST_COMPARED: Final = 2500
_MOST_HEADS: Final = 6
_MOST_READINGS: Final = 4
# How similar two names are that differ by a typing error.
_TYPO: Final = 0.8
# The portion of names that have to fit, apart from their beginnings, for shapes to make others
# certain.
_LEAST_BY_NAME: Final = 0.1

# Words of different libraries for one tensor.
_SYNONYMS: Final = {
    "query": "q",
    "wq": "q",
    "key": "k",
    "wk": "k",
    "value": "v",
    "wv": "v",
    "wo": "o",
    "gamma": "weight",
    "beta": "bias",
}
_QUERY_KEY_VALUE: Final = frozenset("qkv")


@dataclass(frozen=True)
class Rule:
    """How several old names have become new ones.

    Attributes:
        kind: ``"prefix"``: a beginning is removed or added. ``"rename"``: parts are replaced.
            ``"join"``: several tensors are one now. ``"split"``: one tensor is several now.
        old: The parts of old names that are replaced, or the tensors; ``*`` stands for a number
            that stays. Several readings if it is not certain. A prefix that is added has an empty
            one.
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
        renumbered: The paths of lists in which layers were inserted or removed, with the new names
            below them.
        coverage: The portion of the names that fit, or that a rule explains without rivals.
        is_of_another_model: Whether hardly a name fits, apart from its beginning.
    """

    old: Unexplained
    new: Unexplained
    original: dict[str, str]
    present: Collection[str]
    rules: list[Rule] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    renumbered: dict[str, list[str]] = field(default_factory=dict)
    coverage: float = 1.0
    is_of_another_model: bool = False

    def take(self, names: Mapping[str, str]) -> None:
        """Take pairs of an old name and a new one."""
        for name, new_name in names.items():
            self.pairs[self.original.pop(name)] = new_name
            del self.old[name], self.new[new_name]

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
    enough = min(len(_voters(left_old)), len(_voters(left_new)))
    for _ in range(_MOST_HEADS):
        if not _find_head(renames, enough):
            break
    fitting = len(old.keys() & new.keys()) + sum(rule.count for rule in renames.rules)

    # Where each name has its own, no list has become another.
    disordered = _find_renumbered(renames, old, new) if renames.old or renames.new else set[str]()
    by_shape = 0
    if max(len(renames.old), len(renames.new)) <= _MOST_LEFT:
        _find_joined(renames, "join")
        _find_joined(renames, "split")
        unique = _shapes_used_once(old) & _shapes_used_once(new)
        by_shape = _match_rest(renames, unique, disordered)

    fewest = max(1, min(len(old), len(new)))
    joined = sum(rule.count for rule in renames.rules if rule.kind in {"join", "split"})
    renames.coverage = (fitting + joined + by_shape) / fewest
    renames.is_of_another_model = fitting / fewest < _LEAST_BY_NAME
    if renames.is_of_another_model:
        # Some shapes are the same everywhere.
        renames.rules = [replace(rule, is_certain=False) for rule in renames.rules]
        renames.pairs = {}
    return renames


def _limited(shapes: Shapes, names: Iterable[str]) -> Unexplained:
    first = islice(names, _MOST_NAMES)
    return {name: shapes[name] for name in first if len(name) <= LONGEST_NAME}


def _shapes_used_once(shapes: Shapes) -> set[Shape | None]:
    return {shape for shape, uses in Counter(shapes.values()).items() if uses == 1}


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


def _shared(sequences: Iterable[Sequence[str]]) -> int:
    """Return how many items all sequences begin with."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


def _star_shared(names: Collection[str]) -> Parts:
    """Return names with ``*`` for the first numbers, which all of them have."""
    shared = _shared(map(_numbers, names))
    return tuple(starred(name, shared) for name in names)


def _differing_parts(*names: str) -> Parts:
    """Return names without the parts that all of them begin and end with, numbers as ``*``.

    Example:
        >>> _differing_parts("blocks.0.attn.proj.weight", "blocks.0.attn.out.weight")
        ('proj', 'out')
    """
    paths = [name.split(".") for name in names]
    start = _shared(paths)
    most = min(map(len, paths)) - start
    end = min(most, _shared(path[::-1] for path in paths))

    # A part that is inserted or removed is shown with the part that it follows, or is followed by.
    if any(len(path) == start + end for path in paths):
        if start:
            start -= 1
        elif end:
            end -= 1
    # A number alone says little.
    while start and any(path[start].isdecimal() for path in paths):
        start -= 1

    shortened = tuple(".".join(path[start : len(path) - end]) for path in paths)
    return _star_shared(shortened) if any("." in name for name in shortened) else shortened


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


def _alignments(renames: Renames) -> Iterator[_Alignment]:
    """Yield the new names that share the longest end with an old one."""
    by_tail: dict[tuple[str, Parts | None], list[str]] = defaultdict(list)
    for name in _voters(renames.new):
        for tail in _tails(name, renames.old):
            by_tail[tail, _numbers(name)].append(name)
            by_tail[tail, None].append(name)

    longest: dict[str, tuple[str, Parts]] = {}
    bare = renames.old.keys() | renames.new.keys()
    for name in _voters(renames.old):
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
    votes: Counter[_Heads] = Counter()
    fits: Counter[_Heads] = Counter()
    modules: dict[_Heads, set[str]] = defaultdict(set)
    for name, other, tail, is_alone in _alignments(renames):
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
        is_of_all = n > _MOST_READINGS and n * 4 >= len(_voters(renames.old)) * 3
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
    if kind == "rename" and is_certain:
        old_part, new_part = _differing_parts(*olds, *news)
        olds = (old_part,)
        news = (new_part,)
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


def _find_renumbered(renames: Renames, old: Shapes, new: Shapes) -> set[str]:
    """Remove the tensors of lists in which layers were inserted or removed."""
    current = {original: name for name, original in renames.original.items()} | renames.pairs
    originals = {current.get(name, name): name for name in old}
    old_lists = lists_in({name: old[original] for name, original in originals.items()})
    new_lists = lists_in(new)
    disordered: set[str] = set()
    for home in sorted(old_lists.keys() & new_lists.keys()):
        in_old = old_lists[home]
        in_new = new_lists[home]
        old_names = dict.fromkeys(names_below(home, in_old, in_old))
        new_names = names_below(home, in_new, in_new)
        if any(name in old_names and old[originals[name]] != new[name] for name in new_names):
            disordered.add(home)

        in_question = any(name in renames.new for name in new_names) or any(
            name in renames.old or originals[name] in renames.pairs for name in old_names
        )
        # A hook of the model may give names their numbers. A list within one is found with it.
        if not in_question or not is_renumbered(in_old, in_new):
            continue

        renames.renumbered[home] = new_names
        for name in old_names:
            renames.pairs.pop(originals[name], None)
            if renames.old.pop(name, None) is not None:
                del renames.original[name]
        for name in new_names:
            renames.new.pop(name, None)
    return disordered


def _find_joined(renames: Renames, kind: Literal["join", "split"]) -> None:
    """Find tensors of one module whose sizes add up to that of one tensor of the other side."""
    parts = renames.old if kind == "join" else renames.new
    wholes = renames.new if kind == "join" else renames.old
    # The first dimension of tensors that could be joined, by what they share and by module.
    beside: dict[Hashable, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in parts.items():
        home, _, leaf = name.rpartition(".")
        if shape:
            beside[_numbers(name), shape[1:], leaf][home.rpartition(".")[0]][name] = shape[0]

    counts: Counter[tuple[Parts, str]] = Counter()
    for whole, shape in list(wholes.items()):
        if not shape:
            continue
        # The weight of in_proj is called in_proj_weight in MultiheadAttention.
        leaf = re.split(r"[._]", whole)[-1]
        groups = beside.get((_numbers(whole), shape[1:], leaf), {})
        for sizes in islice(groups.values(), _MOST_CANDIDATES):
            beside_each_other = islice(sizes, _MOST_CANDIDATES)
            smaller = [n for n in beside_each_other if n in parts and sizes[n] < shape[0]]
            chosen = _joined_names(whole, smaller) if len(smaller) > 1 else ()
            if chosen and sum(sizes[name] for name in chosen) == shape[0]:
                shown = [starred(renames.original.get(n, n)) for n in (*chosen, whole)]
                counts[tuple(shown[:-1]), shown[-1]] += len(chosen)
                del wholes[whole]
                for name in chosen:
                    del parts[name]
                break

    for (chosen, whole), n in counts.items():
        if kind == "join":
            renames.rules.append(Rule(kind, chosen, (whole,), n))
        else:
            renames.rules.append(Rule(kind, (whole,), chosen, n))


def _joined_names(whole: str, names: list[str]) -> Parts:
    """Return the names that the name of the whole speaks of: q, k and v, or gate and up.

    Sizes alone would join what happens to add up, such as a norm's weight and a bias.

    Example:
        >>> _joined_names("mlp.gate_up.weight", ["mlp.gate.weight", "mlp.up.weight"])
        ('mlp.gate.weight', 'mlp.up.weight')
    """
    words = _tokens(whole)
    if re.search(r"att|qkv|kv|in_proj|query", whole):
        words |= _QUERY_KEY_VALUE
    telling = dict(zip(names, _telling(map(_tokens, names)), strict=True))
    chosen = tuple(name for name in names if telling[name] & words)
    # Where heads share them, k and v together often have the size of the output.
    is_output = [telling[name] & words for name in chosen] in ([{"k"}, {"v"}], [{"v"}, {"k"}])
    return () if is_output and "kv" not in ".".join(whole.split(".")[-2:]) else chosen


class _Evidence(NamedTuple):
    """The evidence of all names together about two of them.

    Attributes:
        unique: The shapes that one tensor of each side has.
        repeated: The parts in which several pairs of names differ alike.
        disordered: The lists whose numbers say nothing.
    """

    unique: set[Shape | None]
    repeated: set[Parts]
    disordered: set[str]


class _Reading(NamedTuple):
    """Names that may be those of the other side: several on each if it is not certain."""

    old: Parts
    new: Parts
    is_certain: bool


def _match_rest(renames: Renames, unique: set[Shape | None], disordered: set[str]) -> int:
    """Find modules that have the same tensors, and then tensors of the same shape."""
    explained = 0
    for by_module in (True, False):
        old = _contents(renames.old, by_module=by_module)
        new = _contents(renames.new, by_module=by_module)
        components = [*_components(old, new)]
        single = [(*olds, *news) for olds, news in components if len(olds) == len(news) == 1]
        places = Counter(_differing_parts(*pair) for pair in single)
        repeated = {parts for parts, n in places.items() if n > 1}
        evidence = _Evidence(unique, repeated, disordered)

        counts: Counter[_Reading] = Counter()
        for olds, news in components:
            pairs = _certain_pairs(olds, news, old, evidence)
            for name, other in pairs.items():
                tensors = _tensors(name, old[name])
                old_part, new_part = _shown(renames, {name: tensors[0]}, [other])
                renames.take(dict(zip(tensors, _tensors(other, new[other]), strict=True)))
                explained += len(tensors)
                counts[_Reading((old_part,), (new_part,), is_certain=True)] += len(tensors)

            olds_left = [name for name in olds if name not in pairs]
            news_left = [name for name in news if name not in pairs.values()]
            # Many readings do not help, and vectors of one size are everywhere.
            sizes = {len(olds_left), len(news_left)}
            if 0 in sizes or max(sizes) > _MOST_READINGS or (len(sizes) > 1 and not by_module):
                continue
            first_tensors = {name: _tensors(name, old[name])[0] for name in olds_left}
            shown = _shown(renames, first_tensors, news_left)
            old_parts = tuple(sorted(shown[: len(olds_left)]))
            new_parts = tuple(sorted(shown[len(olds_left) :]))
            for name in olds_left:
                counts[_Reading(old_parts, new_parts, is_certain=False)] += len(old[name])
                for tensor in _tensors(name, old[name]):
                    del renames.old[tensor]
            for name in news_left:
                for tensor in _tensors(name, new[name]):
                    del renames.new[tensor]

        # The same parts are certain elsewhere: in another layer, with other shapes.
        for reading in [*counts]:
            certain = reading._replace(is_certain=True)
            if not reading.is_certain and certain in counts:
                counts[certain] += counts.pop(reading)
        renames.rules += [
            Rule("rename", reading.old, reading.new, n, is_certain=reading.is_certain)
            for reading, n in counts.items()
        ]
    return explained


def _shown(renames: Renames, olds: Mapping[str, str], news: Iterable[str]) -> Parts:
    """Return the parts in which names differ, as the file has them."""
    originals = [
        renames.original[tensor].removesuffix(tensor.removeprefix(name))
        for name, tensor in olds.items()
    ]
    parts = _differing_parts(*olds, *news)
    are_in_file = all(
        f".{starred(part)}." in f".{starred(original)}."
        for part, original in zip(parts, originals, strict=False)
    )
    return parts if are_in_file else _differing_parts(*originals, *news)


def _contents(shapes: Shapes, *, by_module: bool) -> dict[str, Content]:
    """Return what each module, or tensor, has."""
    # A tensor is a module of one tensor without a name, so that one search finds both.
    if not by_module:
        return {name: frozenset({("", shape)}) for name, shape in shapes.items()}
    contents: dict[str, set[tuple[str, Shape | None]]] = defaultdict(set)
    for name, shape in shapes.items():
        home, dot, leaf = name.rpartition(".")
        if dot and leaf:
            contents[home].add((leaf, shape))
    return {name: frozenset(content) for name, content in contents.items()}


def _tensors(name: str, content: Content) -> list[str]:
    """Return the names of the tensors of a module, or that of a tensor."""
    return sorted(f"{name}.{leaf}" if leaf else name for leaf, _ in content)


def _components(
    old: Mapping[str, Content], new: Mapping[str, Content]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield old and new names that could be one another, and nothing else.

    Names are candidates if they have the same content, best in a layer of the same number. Names
    that share a candidate are compared together, since one could take the other's.
    """
    by_key: dict[Hashable, list[str]] = defaultdict(list)
    for name, content in new.items():
        for key in _keys(name, content):
            by_key[key].append(name)

    # The more names there are, the fewer candidates each has, and never fewer than four.
    most = min(_MOST_CANDIDATES, 4 + _MOST_COMPARISONS // (1 + len(old)))
    candidates: dict[str, list[str]] = {}
    owners: dict[str, list[str]] = defaultdict(list)
    for name, content in old.items():
        alike = next((by_key[key] for key in _keys(name, content) if key in by_key), [])
        candidates[name] = _closest(name, alike[:most])
        for other in candidates[name]:
            owners[other].append(name)

    seen_old: set[str] = set()
    seen_new: set[str] = set()
    for start, others in candidates.items():
        if start in seen_old or not others:
            continue
        seen_old.add(start)
        olds = [start]
        news: list[str] = []
        # It grows while it is walked over.
        for name in olds:
            for other in candidates[name]:
                if other not in seen_new:
                    seen_new.add(other)
                    news.append(other)
                    olds += [owner for owner in owners[other] if owner not in seen_old]
                    seen_old.update(owners[other])
        yield olds, news


def _keys(name: str, content: Content) -> tuple[Hashable, ...]:
    """Return what names of one tensor may have in common, the numbers of layers first."""
    numbers = _numbers(name)
    # The keys have three lengths, so that those of one kind are never equal to those of another.
    return (content, numbers, ""), (content, numbers[:1]), (content,)


def _closest(name: str, others: list[str]) -> list[str]:
    """Return the names that have most of the first parts in common with a name."""
    path = name.split(".")
    shared = {other: _shared((path, other.split("."))) for other in others}
    most = max(shared.values(), default=0)
    return [other for other in others if shared[other] == most]


def _tokens(name: str) -> set[str]:
    words: list[str] = re.findall(r"[a-z]+|\d+", name.lower())
    return {_SYNONYMS.get(word, word) for word in words}


def _telling(names: Iterable[set[str]]) -> list[set[str]]:
    """Return of the words of several names those that tell the names apart."""
    all_words = [*names]
    common = set.intersection(*all_words) if len(all_words) > 1 else set[str]()
    return [words - common for words in all_words]


def _certain_pairs(
    olds: list[str],
    news: list[str],
    contents: Mapping[str, Content],
    evidence: _Evidence,
) -> dict[str, str]:
    """Return which names certainly are which."""
    if len(olds) == len(news) == 1:
        old = olds[0]
        new = news[0]
        return {old: new} if _is_evident(old, new, contents[old], evidence) else {}
    if len(olds) * len(news) > _MOST_COMPARED:
        return {}

    words = [_tokens(part) for part in _differing_parts(*olds, *news)]
    old_words = dict(zip(olds, _telling(words[: len(olds)]), strict=True))
    new_words = dict(zip(news, _telling(words[len(olds) :]), strict=True))
    shared = {(old, new): old_words[old] & new_words[new] for old in olds for new in news}
    uses = Counter(name for pair, common in shared.items() if common for name in pair)
    pairs = [pair for pair in shared if shared[pair] and {uses[name] for name in pair} == {1}]
    # If some names stay in doubt, words other than q, k and v may be a coincidence.
    if not len(pairs) == len(olds) == len(news):
        pairs = [pair for pair in pairs if shared[pair] & _QUERY_KEY_VALUE]
    return dict(pairs)


def _is_evident(old: str, new: str, content: Content, evidence: _Evidence) -> bool:
    """Return True if shapes or names leave little doubt that two names are one tensor.

    Vectors alone say little: biases and norms of one size are everywhere.
    """
    matrices = [shape for _, shape in content if shape and sum(size > 1 for size in shape) > 1]
    if not evidence.unique.isdisjoint(matrices):
        return True
    # Where a layer was inserted, another one has this number.
    path = old.split(".")
    new_path = new.split(".")
    start = _shared((path, new_path))
    numbers = [*path[start : start + 1], *new_path[start : start + 1]]
    has_moved = len(numbers) == 2 and all(part.isdecimal() for part in numbers)
    if has_moved and ".".join(path[:start]) in evidence.disordered:
        return False

    home, _, last = old.rpartition(".")
    new_home, _, new_last = new.rpartition(".")
    # Under one parent, where nothing else has this content.
    if home and home == new_home and (matrices or len(content) > 1):
        return True

    # In another layer. More numbers may follow, where a layer has become a list.
    if any(a != b for a, b in zip(_numbers(old), _numbers(new), strict=False)):
        return False
    parts = _differing_parts(old, new)
    # In several layers.
    if matrices and parts in evidence.repeated:
        return True
    words = _tokens(old)
    new_words = _tokens(new)
    if last == new_last and (words <= new_words or new_words <= words):
        return True
    return SequenceMatcher(None, parts[0], parts[1]).ratio() > _TYPO


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
