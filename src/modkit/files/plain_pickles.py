"""Which pickles are plain: only the instructions that ``torch.save`` writes for state dicts.

They are found by an expression over the bytes, at a tenth of the time that following each
instruction takes. It bounds the time and the memory that the standard unpickler can take. Nothing
here needs torch.
"""

import pickle
import re
import struct
from typing import Final

from modkit.files.pickle_limits import memory_bound, most_memory


# The instructions that torch.save writes, by their names in the module pickle, each with its
# argument; except those whose argument has a length of its own, which no expression can follow.
_INSTRUCTIONS_WITHOUT_LENGTH: Final = r"""(?:
    # The memo. Its places are below 2 ** 21: the unpickler allocates all below the largest one.
    (?: BINGET | BINPUT ) .
  | LONG_BINPUT ..[\x00-\x1f]\x00
  | LONG_BINGET ....

    # Empty containers, what fills them, and calls.
  | (?: EMPTY_TUPLE | EMPTY_LIST | EMPTY_DICT
      | APPEND | APPENDS | SETITEM | SETITEMS (?: MARK SETITEMS )? | BUILD | REDUCE | BINPERSID )

    # A tuple of anything is the arguments of a call, or describes a storage: hashing nested tuples
    # may take exponential time. torch.save may memoize it first.
  | (?: TUPLE | TUPLE1 | TUPLE2 | TUPLE3 )
    (?: BINPUT . | LONG_BINPUT ..[\x00-\x1f]\x00 )?
    (?: REDUCE | BINPERSID )

    # Any other tuple holds only numbers: sizes and strides. torch.save never marks an empty list
    # or dict, but a dict of 1,000 entries ends in a batch of none.
  | MARK (?: NUMBER{1,99} TUPLE | (?! APPENDS | SETITEMS | TUPLE ) )
  | NUMBER{3} TUPLE3
  | NUMBER{2} TUPLE2
  | NUMBER TUPLE1
  | NUMBER

    # A name: two lines, compared with those that are allowed when it is looked up.
  | GLOBAL [^\n]{0,99}\n [^\n]{0,99}\n

    # Strings of one to four bytes: with them, the keys of storages need no match of their own.
  | BINUNICODE (?: \x01\0{3} . | \x02\0{3} .. | \x03\0{3} ... | \x04\0{3} .... )

    # The limit bounds the memory for backtracking; the next match goes on where this one ends.
){0,1000}"""
_NUMBER: Final = (
    "(?: BININT1 . | BININT2 .. | BININT .... | BINFLOAT .{8} | NEWTRUE | NEWFALSE | NONE )"
)


def _compiled(expression: str) -> re.Pattern[bytes]:
    """Compile an expression in which names of the module pickle stand for their opcodes."""

    def opcode(name: re.Match[str]) -> str:
        code: bytes = getattr(pickle, name[0])
        return re.escape(code.decode("latin-1"))

    with_numbers = expression.replace("NUMBER", _NUMBER)
    without_comments = re.sub(r"#.*", "", with_numbers)
    with_opcodes = re.sub(r"[A-Z][A-Z_\d]+", opcode, without_comments)
    return re.compile(with_opcodes.encode("latin-1"), re.DOTALL | re.VERBOSE)


_INSTRUCTIONS: Final = _compiled(_INSTRUCTIONS_WITHOUT_LENGTH)
_PROTOCOL: Final = pickle.PROTO + b"\x02"
_LENGTH: Final = struct.Struct("<L")


def is_plain_pickle(content: bytes, members: int) -> bool:
    """Return True if a pickle has known instructions, and containers that its size explains.

    Args:
        content: The pickle.
        members: The number of members of its archive.
    """
    # A pickle with more containers than this is followed, and refused if they are really in it.
    is_small = memory_bound(content) <= most_memory(len(content), members)
    return is_small and _has_known_instructions(content)


def _has_known_instructions(content: bytes) -> bool:
    """Return True if a pickle has only the instructions above, strings and long integers."""
    if not content.startswith(_PROTOCOL) or content[-1:] != pickle.STOP:
        return False

    string = pickle.BINUNICODE[0]
    long_integer = pickle.LONG1[0]
    position = len(_PROTOCOL)
    end = len(content) - 1
    while position < end:
        before = position
        if content[position] == string and position + _LENGTH.size < end:
            position += 1 + _LENGTH.size + _LENGTH.unpack_from(content, position + 1)[0]
        elif content[position] == long_integer:
            position += 2 + content[position + 1]
        run = _INSTRUCTIONS.match(content, position, end)
        position = run.end() if run else position
        if position == before:
            return False
    # A string may state a length that reaches beyond the end.
    return position == end
