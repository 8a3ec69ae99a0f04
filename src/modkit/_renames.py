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
from typing import Final, NamedTuple, TypeAlias


Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape | None]
Parts: TypeAlias = tuple[str, ...]
# The tensors of a module: last parts of names, and shapes. For a tensor, no last part.
Content: TypeAlias = frozenset[tuple[str, Shape | None]]

# Names from a file may be of any length; what is longer than any attribute path is only counted.
_LONGEST_NAME: Final = 1000
_MOST_NAMES: Final = 20_000
# Tensors of one shape and without a common number, which a name is compared with.
_MOST_CANDIDATES: Final = 64
_MOST_SAMPLES: Final = 200
_MOST_SUBSTITUTIONS: Final = 4
# The portion of names that have to fit, apart from a few parts, for shapes to make others certain.
_LEAST_BY_NAME: Final = 0.1
_MOST_READINGS: Final = 4
_MOST_COMPARED: Final = 2500
# How similar two names are that differ by a typing error.
_TYPO: Final = 0.8

# Parts that wrappers of modules add to names, and which of them do.
WRAPPERS: Final = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
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
QUERY_KEY_VALUE: Final = frozenset("qkv")


@dataclass(frozen=True)
class Rule:
    """One replacement of parts of names.

    Attributes:
        old: The parts in the old names, ``*`` for a number that stays; several readings if not certain.
        new: The parts in the new names; several readings if not certain. Without any, it is removed.
        count: The number of tensors that it explains.
        is_certain: Whether names and shapes leave one reading.
        is_prefix: Whether it removes or adds the beginning of all names.
        by_name: Whether it was found from what the names have in common.
    """

    old: Parts
    new: Parts
    count: int
    is_certain: bool = True
    is_prefix: bool = False
    by_name: bool = True


@dataclass
class Renames:
    """Rules that turn old names into new ones.

    Attributes:
        rules: The rules, in the order in which they were found.
        pairs: Each old name that certainly is a new one.
        joined: Tensors of one side that are one tensor of the other side.
        coverage: The portion of the names that fit, or that a rule explains without rivals.
        is_of_another_model: Whether hardly a name fits, apart from a prefix or a few parts.
        old: The shapes of the names that no rule explains, by the name that the rules gave them.
        new: The shapes of the new names that no rule explains.
        original: The old name of each name in ``old``.
        present: All new names that are not in question.
    """

    old: dict[str, Shape | None]
    new: dict[str, Shape | None]
    original: dict[str, str]
    present: Collection[str] = ()
    rules: list[Rule] = field(default_factory=list)
    pairs: dict[str, str] = field(default_factory=dict)
    joined: list["Joined"] = field(default_factory=list)
    coverage: float = 1.0
    is_of_another_model: bool = False

    def substitute(self, names: Mapping[str, str]) -> int:
        """Give old names their names under a rule, and take those that are new names now as pairs."""
        for name, substituted in names.items():
            if substituted not in self.old:
                self.old[substituted] = self.old.pop(name)
                self.original[substituted] = self.original.pop(name)
        # A load may have filled in what it found missing: a counter of BatchNorm, for instance.
        present = [name for name in names.values() if name in self.present and name in self.old]
        for name in present:
            del self.old[name], self.original[name]
        return len(present) + self.take({n: n for n in names.values() if n in self.new})

    def take(self, names: Mapping[str, str]) -> int:
        """Take pairs of an old name and a new one; return their number."""
        for name, new_name in names.items():
            self.pairs[self.original.pop(name)] = new_name
            del self.old[name], self.new[new_name]
        return len(names)


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
    kept_old, kept_new = (
        {n: shapes[n] for n in islice(names, _MOST_NAMES) if len(n) <= _LONGEST_NAME}
        for shapes, names in ((old, surplus), (new, lacking))
    )
    present = new.keys() - set(lacking)
    renames = Renames(kept_old, kept_new, {name: name for name in kept_old}, present)
    _remove_wrappers(renames)
    for _ in range(_MOST_SUBSTITUTIONS):
        if not _find_prefix(renames):
            break
    for _ in range(_MOST_SUBSTITUTIONS):
        if not _find_substitution(renames):
            break
    by_name = len(renames.pairs) + sum(name in new for name in old if name not in renames.pairs)
    by_name += sum(rule.count for rule in renames.rules if not rule.is_certain)
    _find_joined(renames)
    once = [{shape for shape, n in Counter(side.values()).items() if n == 1} for side in (old, new)]
    _match_rest(renames, once[0] & once[1])

    explained = by_name + sum(each.count for each in renames.joined)
    explained += sum(rule.count for rule in renames.rules if rule.is_certain and not rule.by_name)
    least = max(1, min(len(old), len(new)))
    renames.coverage = explained / least
    renames.is_of_another_model = by_name / least < _LEAST_BY_NAME
    if renames.is_of_another_model:
        # Some shapes are the same everywhere.
        renames.rules = [replace(rule, is_certain=False) for rule in renames.rules]
        renames.pairs = {}
        renames.joined = [replace(each, is_certain=False) for each in renames.joined]
    return renames


def _parts(name: str) -> Parts:
    return tuple(name.split("."))


def numbers(name: str) -> Parts:
    """Return the parts of a name that are numbers, as of layers in a list."""
    return tuple(part for part in name.split(".") if part.isdecimal())


def starred(name: str, most: int = _LONGEST_NAME) -> str:
    """Return a name with ``*`` in place of its numbers, or of the first ones."""
    left = count()
    return ".".join(
        "*" if part.isdecimal() and next(left) < most else part for part in name.split(".")
    )


def _remove_wrappers(renames: Renames) -> None:
    """Remove the parts inside of names that wrappers of submodules add."""
    for part in WRAPPERS:
        inside = f".{part}."
        names = {name: name.replace(inside, ".") for name in renames.old if inside in name}
        if names and not any(part in name for name in renames.new):
            renames.substitute(names)
            renames.rules.append(Rule((part,), ("",), len(names)))


def _find_prefix(renames: Renames) -> bool:
    """Find a beginning that all names have too much, or lack."""
    old, new = renames.old, renames.new
    votes: Counter[tuple[str, str]] = Counter()
    fitting: Counter[tuple[str, str]] = Counter()
    for longer, shorter, side in ((old, new, 0), (new, old, 1)):
        for name, shape in longer.items():
            for match in re.finditer(r"\.", name):
                tail = name[match.end() :]
                if tail in shorter:
                    prefix = name[: match.end()]
                    rule = (prefix, "") if side == 0 else ("", prefix)
                    votes[rule] += 1
                    fitting[rule] += shape == shorter[tail] or None in {shape, shorter[tail]}

    enough = min(len(old), len(new))
    accepted = [rule for rule, n in votes.items() if n * 4 >= enough and fitting[rule] * 2 >= n]
    if not accepted:
        return False
    best = max(accepted, key=lambda rule: (votes[rule], fitting[rule], -len(rule[0] + rule[1])))
    rivals = sorted(
        rule[0] for rule in accepted if best[0] and rule[0] and fitting[rule] == fitting[best]
    )
    removed, added = best
    substituted = {name: added + name[len(removed) :] for name in old if name.startswith(removed)}
    before = dict(renames.pairs)
    explained = renames.substitute(substituted)
    if len(rivals) > 1:
        renames.pairs = before
    readings = tuple(rivals) if len(rivals) > 1 else (removed,)
    renames.rules.append(Rule(readings, (added,), explained, len(rivals) <= 1, is_prefix=True))
    return True


def _difference(names: Iterable[Parts]) -> list[Parts]:
    """Return the parts of names without those that all begin and end with."""
    names = list(names)
    shortest = min(map(len, names))
    start = next((i for i in range(shortest) if len({name[i] for name in names}) > 1), shortest)
    most = shortest - start
    end = next((i for i in range(most) if len({name[-1 - i] for name in names}) > 1), most)
    # What is inserted or removed is shown with the part that it follows, or is followed by.
    if any(len(name) == start + end for name in names):
        end -= bool(end and not start)
        start -= bool(start)
    # A number alone says little.
    while start and any(name[start].isdecimal() for name in names):
        start -= 1
    return [name[start : len(name) - end] for name in names]


def _rule_parts(*names: str) -> tuple[str, ...]:
    """Return what is different in names, with ``*`` for the first numbers, which all of them have."""
    shortened = _difference(map(_parts, names))
    columns = zip(*([p for p in each if p.isdecimal()] for each in shortened), strict=False)
    shared = next((i for i, column in enumerate(columns) if len(set(column)) > 1), None)
    if shared is None:
        shared = min(sum(part.isdecimal() for part in each) for each in shortened)
    if max(map(len, shortened)) == 1:
        shared = 0
    return tuple(starred(".".join(each), shared) for each in shortened)


def _modules(shapes: Shapes) -> dict[str, Content]:
    """Return what each module has: leaves of names, and shapes."""
    leaves: dict[str, set[tuple[str, Shape | None]]] = defaultdict(set)
    for name, shape in shapes.items():
        home, dot, leaf = name.rpartition(".")
        if dot:
            leaves[home].add((leaf, shape))
    return {home: frozenset(found) for home, found in leaves.items()}


class _Candidates:
    """Names by what they have, those with the same numbers first."""

    def __init__(self, names: Mapping[str, Hashable]) -> None:
        self._by_key: dict[Hashable, list[str]] = defaultdict(list)
        for name, content in names.items():
            for key in self._keys(name, content):
                self._by_key[key].append(name)

    @staticmethod
    def _keys(name: str, content: Hashable) -> Iterator[Hashable]:
        inside = numbers(name)
        yield from dict.fromkeys(((content, inside), (content, "first", inside[:1]), (content,)))

    def of(self, name: str, content: Hashable) -> list[str]:
        """Return the names that have the same content and, if there are any, the same numbers."""
        found = (self._by_key[key] for key in self._keys(name, content) if key in self._by_key)
        return next(found, [])[:_MOST_CANDIDATES]


def _find_substitution(renames: Renames) -> bool:
    """Find parts that are others in several modules whose names are the same otherwise."""
    old, new = _modules(renames.old), _modules(renames.new)
    candidates = _Candidates(new)
    tails: dict[tuple[str, ...], set[str]] = defaultdict(set)
    # One of the modules whose names differ in numbers alone.
    samples = {(starred(name), content): name for name, content in old.items()}
    for (_, content), name in islice(samples.items(), _MOST_SAMPLES):
        last = name.rpartition(".")[2]
        for other in candidates.of(name, content):
            if other.rpartition(".")[2] == last and not last.isdecimal():
                tails[_rule_parts(name, other)].add(last)
    several = {rule: len(found) for rule, found in tails.items() if len(found) > 1}
    if not several:
        return False
    rule = max(several, key=lambda each: (several[each], each))
    rivals = [each for each in several if each[0] == rule[0] and several[each] == several[rule]]
    if len(rivals) > 1:
        return False
    pattern = r"(\d+)".join(map(re.escape, rule[0].split("*")))
    groups = iter(range(1, 100))
    replacement = re.sub(r"\*", lambda _: f"\\g<{next(groups)}>", rule[1])
    finder = re.compile(rf"(?:^|(?<=\.)){pattern}(?=\.)")
    substituted = {
        name: result
        for name in renames.old
        if (result := finder.sub(replacement, name, count=1)) in renames.new and result != name
    }
    explained = renames.substitute(substituted)
    renames.rules.append(Rule(rule[:1], rule[1:], explained))
    return explained > 0


@dataclass(frozen=True)
class Joined:
    """Tensors of one side that are one tensor of the other side.

    Attributes:
        parts: The names of the tensors, in their order; of a stack, the first one.
        whole: The name of the tensor that has their elements.
        count: The number of tensors that are joined.
        in_old: Whether the old names are the parts.
        is_certain: Whether the names of the two sides have enough in common to say so.
    """

    parts: Parts
    whole: str
    count: int
    in_old: bool
    is_certain: bool = True


def _find_joined(renames: Renames) -> None:
    """Find tensors whose sizes add up to that of one tensor of the other side."""
    for parts, wholes, in_old in (
        (renames.old, renames.new, True),
        (renames.new, renames.old, False),
    ):
        separate = {name: _Piece(shape, (name,)) for name, shape in parts.items() if shape}
        for dim, pieces in ((0, separate), (1, _stacks(parts))):
            beside = _pieces_beside(pieces, dim)
            for whole, size in list(wholes.items()):
                if not size or len(size) <= dim:
                    continue
                groups = beside.get((numbers(whole), size[:dim] + size[dim + 1 :]), [])
                for names in groups[:_MOST_CANDIDATES]:
                    sizes = {name: pieces[name].shape[dim] for name in names}
                    chosen = _adding_up(whole, size[dim], sizes, least=2 - dim)
                    joined = [name for piece in chosen for name in pieces[piece].names]
                    if joined and all(name in parts for name in joined):
                        first = tuple(pieces[piece].names[0] for piece in chosen)
                        renames.joined.append(Joined(first, whole, len(joined), in_old))
                        del wholes[whole]
                        for name in joined:
                            del parts[name]
                        break


class _Piece(NamedTuple):
    """A tensor, or several that may be stacked."""

    shape: Shape
    names: Parts


def _pieces_beside(pieces: Mapping[str, _Piece], dim: int) -> dict[Hashable, list[list[str]]]:
    """Return the names below one module, such as q, k and v, that could be joined along ``dim``."""
    beside: dict[Hashable, list[str]] = defaultdict(list)
    for name, piece in pieces.items():
        home, _, leaf = name.rpartition(".")
        others = piece.shape[:dim] + piece.shape[dim + 1 :]
        beside[numbers(name), others, home.rpartition(".")[0], leaf].append(name)
    groups: dict[Hashable, list[list[str]]] = defaultdict(list)
    for (inside, others, _, _), names in beside.items():
        # A stack may be a single name.
        if len(names) >= 2 - dim:
            groups[inside, others].append(names)
    return groups


def _adding_up(whole: str, size: int, sizes: Mapping[str, int], least: int) -> list[str]:
    """Return the names whose sizes add up, if the name of the whole says the same."""
    if sum(sizes.values()) < size:
        return []
    leaf = re.split(r"[._]", whole)[-1]
    names = [name for name in sizes if leaf not in {"weight", "bias"} or name.endswith(leaf)]
    attention = [name for name in names if QUERY_KEY_VALUE & _tokens(name)]
    if not re.search(r"att|qkv|kv|in_proj|query", whole):
        attention = []
    words = _tokens(whole)
    telling = zip(names, _telling([_tokens(name) for name in names]), strict=True)
    named = [name for name, own in telling if own & words]
    for chosen in (attention, named):
        if len(chosen) >= least and sum(sizes[name] for name in chosen) == size:
            return chosen
    return []


def _stacks(parts: Shapes) -> dict[str, _Piece]:
    """Return tensors of one shape whose names differ in the last number, as one piece each."""
    members: dict[tuple[str, Shape], list[str]] = defaultdict(list)
    for name, shape in parts.items():
        head, _, tail = name.rpartition(f".{''.join(numbers(name)[-1:])}.")
        if shape and head:
            members[f"{head}.*.{tail}", shape].append(name)
    return {
        name: _Piece((len(names), *shape), tuple(names))
        for (name, shape), names in members.items()
        if len(names) > 1
    }


def _match_rest(renames: Renames, unique: set[Shape | None]) -> None:
    """Find modules that have the same tensors, and then tensors of the same shape.

    ``unique`` has the shapes that one tensor of each side has.
    """
    for by_module in (True, False):
        old = _modules(renames.old) if by_module else {n: {("", s)} for n, s in renames.old.items()}
        new = _modules(renames.new) if by_module else {n: {("", s)} for n, s in renames.new.items()}
        old, new = ({n: frozenset(c) for n, c in side.items()} for side in (old, new))
        counts: Counter[tuple[Parts, Parts, bool]] = Counter()
        for olds, news in _components(old, new):
            pairs = _certain_pairs(olds, news, old, unique)
            for name, other in pairs.items():
                old_parts, new_parts = _rule_parts(name, other)
                counts[(old_parts,), (new_parts,), True] += len(old[name])
                renames.take(
                    dict(zip(_tensors(name, old[name]), _tensors(other, old[name]), strict=True))
                )

            rest = [name for name in olds if name not in pairs]
            others = [name for name in news if name not in pairs.values()]
            # Many readings are no help, and vectors of one size are everywhere.
            few = 0 < len(others) <= _MOST_READINGS and 0 < len(rest) <= _MOST_READINGS
            if few and (by_module or len(rest) == len(others)):
                readings = _rule_parts(*rest, *others)
                counts[
                    tuple(sorted(readings[: len(rest)])),
                    tuple(sorted(readings[len(rest) :])),
                    False,
                ] += sum(len(old[name]) for name in rest)
                for shapes, left, contents in (
                    (renames.old, rest, old),
                    (renames.new, others, new),
                ):
                    for name in left:
                        for each in _tensors(name, contents[name]):
                            del shapes[each]
        for olds, news in [key[:2] for key in counts if not key[2] and (*key[:2], True) in counts]:
            counts[olds, news, True] += counts.pop((olds, news, False))
        renames.rules += [
            Rule(olds, news, n, sure, by_name=False) for (olds, news, sure), n in counts.items()
        ]


def _tensors(name: str, content: Content) -> list[str]:
    """Return the names of the tensors of a module, or that of a tensor."""
    return sorted(f"{name}.{leaf}" if leaf else name for leaf, _ in content)


def _components(
    old: Mapping[str, Content], new: Mapping[str, Content]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield names that could be one another, and nothing else."""
    candidates = _Candidates(new)
    targets = {name: _closest(name, candidates.of(name, content)) for name, content in old.items()}
    owners: dict[str, list[str]] = defaultdict(list)
    for name, others in targets.items():
        for other in others:
            owners[other].append(name)

    seen: set[str] = set()
    for start, first in targets.items():
        if start in seen or not first:
            continue
        olds, news = {start: None}, {}
        waiting = [start]
        while waiting:
            for other in targets[waiting.pop()]:
                if other not in news:
                    news[other] = None
                    waiting += [name for name in owners[other] if name not in olds]
                    olds.update(dict.fromkeys(owners[other]))
        seen.update(olds)
        yield [*olds], [*news]


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
    return {_SYNONYMS.get(word, word) for word in words}


def _certain_pairs(
    olds: list[str], news: list[str], contents: Mapping[str, Content], unique: set[Shape | None]
) -> dict[str, str]:
    """Return which names certainly are which."""
    if len(olds) == len(news) == 1:
        old, new = olds[0], news[0]
        return {old: new} if _is_evident(old, new, contents[old], unique) else {}
    if len(olds) * len(news) > _MOST_COMPARED:
        return {}

    words = [_tokens(".".join(parts)) for parts in _difference(map(_parts, (*olds, *news)))]
    old_words = _telling(words[: len(olds)])
    new_words = _telling(words[len(olds) :])
    shared = {
        (old, new): old_words[i] & new_words[j]
        for i, old in enumerate(olds)
        for j, new in enumerate(news)
        if old_words[i] & new_words[j]
    }
    uses = Counter(name for pair in shared for name in pair)
    pairs = {old: new for old, new in shared if uses[old] == uses[new] == 1}
    if len(pairs) == len(olds) == len(news):
        return pairs
    return {old: new for old, new in pairs.items() if shared[old, new] & QUERY_KEY_VALUE}


def _telling(words: list[set[str]]) -> list[set[str]]:
    """Return the words that tell names apart."""
    common = set.intersection(*words) if len(words) > 1 else set[str]()
    return [each - common for each in words]


def _is_evident(old: str, new: str, content: Content, unique: set[Shape | None]) -> bool:
    """Return True if shapes or names leave little doubt that two names are one tensor."""
    matrices = [s for _, s in content if s and sum(size > 1 for size in s) > 1]
    if not unique.isdisjoint(matrices):
        return True
    home = old.rpartition(".")[0]
    if home and home == new.rpartition(".")[0] and (matrices or len(content) > 1):
        return True
    # In the layer of the same number.
    if matrices and numbers(old) == numbers(new) != ():
        return True
    words, others = _tokens(old), _tokens(new)
    if words <= others or others <= words:
        return True
    return SequenceMatcher(None, *_rule_parts(old, new)).ratio() > _TYPO
