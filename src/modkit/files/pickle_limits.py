"""Limits on pickles, tested before torch or the standard unpickler reads one.

Reading a few hundred bytes can take hours (a tuple of tuples as a key, whose hash doubles at each level),
all memory (``bytearray(2 ** 40)``, a place far out in the memo), or the stack of the process (containers
nested 100,000 times). Nothing is built here: objects are counted, by how deep they nest and how many parts
they have.
"""

import re
from typing import Final


_DEEPEST: Final = 1000
_MOST_PARTS: Final = 1_000_000
# The standard unpickler allocates twice this many places.
_MOST_PLACES: Final = 1 << 21

# What torch.save writes for a tensor, except for the first ones of a file; most of a checkpoint.
_NUMBER: Final = rb"(?:K.|M..|J....)"
_GET: Final = rb"(?:h.|j....)"
_PUT: Final = rb"(?:q.|r..[\x00-\x1f]\x00)"
_SIZES: Final = rb"(?:\)|%(n)s\x85%(p)s|%(n)s{2}\x86%(p)s|%(n)s{3}\x87%(p)s|\(%(n)s{4,8}t%(p)s)" % {
    b"n": _NUMBER,
    b"p": _PUT,
}
_TENSOR: Final = re.compile(
    rb"%(g)s\(\(%(g)s%(g)sX(.)\x00\x00\x00([0-9]{1,9})%(p)s%(g)s%(n)st%(p)sQ%(n)s%(s)s%(s)s"
    rb"[\x88\x89]%(g)s\)R%(p)st%(p)sR%(p)s" % {b"g": _GET, b"p": _PUT, b"n": _NUMBER, b"s": _SIZES},
    re.DOTALL,
)
# Instructions that push an object, by the length of their argument.
_PUSHES: Final = {
    **dict.fromkeys(b"N\x88\x89)]}\x8f", 0),
    **dict.fromkeys(b"K", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"J", 4),
    **dict.fromkeys(b"G", 8),
}
_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}
# How many objects an instruction puts into the one below them.
_FILLS: Final = {ord("a"): 1, ord("s"): 2, ord("b"): 1}
_CALLS: Final = {ord("R"): 2, 0x81: 2, ord("Q"): 1}

# What weights_only=True lets a pickle call, and whose arguments can ask for any amount of memory or time.
_COSTLY: Final = re.compile(
    rb"_codecs\nencode|(?:builtins|__builtin__)\nbytearray|torch(?:\.\w+)*\n\w*(?:Tensor|Storage)"
)
_LATIN: Final = {b"latin1", b"latin-1"}
_OTHER, _NUMBER_KIND, _TEXT, _LATIN_TEXT, _COSTLY_FUNCTION, _FINE_ARGUMENTS = range(6)

# How deep it nests; 1 if it is inside another object; the parts of a tuple, all that is in it counted; kind.
_Object = list[int]


class _LimitError(Exception):
    """A pickle is beyond a limit."""


class PickleLimits:
    """What a pickle would need, found without building anything.

    Args:
        data: The pickle.
        start: Where it begins.

    Attributes:
        end: Where it ends, or cannot be followed any further.
        problem: Why it must not be read, or None.
        usual: True if it has only instructions that torch writes by default.
    """

    def __init__(self, data: bytes, start: int = 0) -> None:
        self.problem: str | None = None
        self.usual = data.startswith(b"\x80\x02", start)
        self._data, self._at = data, start
        self._stack: list[_Object] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Object] = {}
        try:
            while self._step():
                pass
        except IndexError:
            # The unpickler stops here too.
            self.usual = False
        except _LimitError as error:
            self.problem = str(error)
        self.end = self._at

    def _step(self) -> bool:
        data, at = self._data, self._at
        code = data[at]
        tensor = _TENSOR.match(data, at) if code in b"hj" else None
        if tensor and tensor[1][0] == len(tensor[2]):
            self._at = tensor.end()
            self._stack.append([2, 0, 1, _OTHER])
            return True
        if code == 0x58:
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            self._push(
                end - at, _LATIN_TEXT if data[at + 5 : min(end, at + 13)] in _LATIN else _TEXT
            )
        elif code in b"qr":
            length = 2 if code == 0x71 else 5
            place = int.from_bytes(data[at + 1 : at + length], "little")
            self._memo[place] = self._stack[-1]
            self.usual = self.usual and place < _MOST_PLACES
            self._at += length
        elif code in b"hj":
            length = 2 if code == 0x68 else 5
            # What is not there was put by one of the tensors.
            place = int.from_bytes(data[at + 1 : at + length], "little")
            self._stack.append(self._memo.get(place, [2, 1, 8, _OTHER]))
            self._at += length
        elif code in _PUSHES:
            self._push(1 + _PUSHES[code], _NUMBER_KIND if _PUSHES[code] else _OTHER)
        else:
            return self._step_rarely(code)
        return True

    def _step_rarely(self, code: int) -> bool:
        data, at = self._data, self._at
        self._at += 1
        if code == 0x28:
            self._marks.append(len(self._stack))
        elif code in _TUPLES or code == 0x74:
            begin = len(self._stack) - _TUPLES[code] if code in _TUPLES else self._marks.pop()
            kinds = [each[3] for each in self._stack[begin:]]
            fine = _NUMBER_KIND not in kinds and kinds[1:] in ([], [_LATIN_TEXT])
            self._replace(begin, [0, 0, 1, _FINE_ARGUMENTS if fine else _OTHER])
        elif code in _CALLS:
            begin = len(self._stack) - _CALLS[code]
            costly = code != 0x51 and self._stack[begin][3] == _COSTLY_FUNCTION
            if costly and self._stack[-1][3] != _FINE_ARGUMENTS:
                raise _LimitError("its pickle calls a function that could take any memory or time")
            self._replace(begin, [0, 0, 1, _OTHER])
        elif code in _FILLS or code in b"eu":
            begin = len(self._stack) - _FILLS[code] if code in _FILLS else self._marks.pop()
            target = self._stack[begin - 1] if begin > 0 else self._stack[len(self._stack)]
            self._replace(begin, target)
            self._stack.pop()
        elif code == 0x63:
            self._at = self._line_end(self._line_end(at) + 1)
            costly = _COSTLY.fullmatch(data, at + 1, self._at)
            self._push(1, _COSTLY_FUNCTION if costly else _OTHER)
        elif code in b"U\x8a":
            self.usual = self.usual and code == 0x8A
            self._at = at
            self._push(2 + data[at + 1], _NUMBER_KIND if code == 0x8A else _OTHER)
        elif code == 0x80:
            self._at += 1
        else:
            self.usual = self.usual and code == 0x2E and self._at == len(data)
            return False
        return True

    def _line_end(self, at: int) -> int:
        found = self._data.find(b"\n", at)
        if found < 0:
            raise IndexError
        return found

    def _push(self, length: int, kind: int) -> None:
        self._at += length
        if self._at > len(self._data):
            raise IndexError
        self._stack.append([0, 0, 1, kind])

    def _replace(self, begin: int, holder: _Object) -> None:
        """Put the objects from a place of the stack into one, which takes their place."""
        if begin < 0:
            raise IndexError
        inside = self._stack[begin:]
        depth = max([each[0] for each in inside], default=-1) + 1
        if depth > _DEEPEST:
            raise _LimitError(f"its pickle nests deeper than {_DEEPEST:,} levels")
        if depth > holder[0]:
            # The depth of what holds it would not be right any more; picklers write this for cycles.
            self.usual = self.usual and not holder[1]
            holder[0] = depth
        holder[2] += sum(each[2] for each in inside)
        if holder[2] > max(_MOST_PARTS, len(self._data)):
            raise _LimitError("its pickle has a tuple with more parts than the file has bytes")
        for each in inside:
            each[1] = 1
        self._stack[begin:] = [holder]
