"""The exception classes of modkit, and the text that they show of names from files."""

from typing import Any, Final

from modkit._namespace import publish_all


# A file may have names of any length.
_LONGEST: Final = 2000

__all__ = ["FileError", "MigrationError", "NameMismatchError", "printable"]


class FileError(ValueError, RuntimeError):
    """A file is corrupt, unsafe to read, or of another kind than expected; nothing was loaded.

    It is also a ``RuntimeError``, as ``torch.load`` raises for corrupt files. Control characters in
    the message are escaped, and it is shortened to 2,000 characters.

    Args:
        message: The text, which may quote the file.
        kind: The kind of file, as in :class:`modkit.files.FileInfo`; ``""`` if unknown. It is an
            attribute of the exception, too.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(shown(message))
        self.kind = kind


class MigrationError(ValueError, RuntimeError):
    """A state dict cannot be migrated; nothing has been changed.

    It is also a ``RuntimeError``, as ``load_state_dict`` raises for a state dict that does not fit.
    Names may come from a file: control characters are escaped, and the message is shortened to
    2,000 characters.

    Args:
        message: The text, which may quote the state dict.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shown(message))


class NameMismatchError(ValueError):
    """The names or shapes of a model's tensors do not match those of averages or a state dict.

    Attributes:
        missing: Names in the averages that the model does not have; for ``load_matching()``, names
            in the model that the state dict does not have.
        unexpected: Names in the model that the averages do not have; for ``load_matching()``, names
            in the state dict that the model does not have.
        shapes: Names whose shapes differ, each with both shapes.

    Args:
        what: What was called, or compared.
        missing: Names that one side has and the other lacks.
        unexpected: Names that the other side has in addition.
        shapes: Names whose shapes differ, each with both shapes.
        end: The last sentence, by default that nothing has been changed.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: list[str],
        unexpected: list[str],
        shapes: list[str],
        end: str = "Nothing has been changed.",
    ) -> None:
        self.missing = missing
        self.unexpected = unexpected
        self.shapes = shapes

        kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
        listed: list[str] = []
        for kind, names in kinds.items():
            if names:
                first = names if len(names) <= 5 else [*names[:5], "..."]
                listed.append(f"{len(names)} {kind}: {', '.join(first)}")
        super().__init__(shown(f"{what}: {'; '.join(listed)}. {end}".rstrip()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled by its text and attributes: ``__init__`` does not take the text.
        return ValueError.__new__, (type(self), *self.args), vars(self)


def shown(text: str) -> str:
    """Return the text of an exception that quotes a file: printable, and at most 2,000 characters.

    Args:
        text: The text, whose names a file may have chosen.

    Returns:
        The text, with its middle left out if it is longer.
    """
    text = printable(text)
    if len(text) <= _LONGEST:
        return text
    # A half and a third leave room for the words between them.
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 3 :]}"


def printable(text: str) -> str:
    """Escape control characters: names from a file could move the cursor or forge a line.

    Args:
        text: Any text.

    Returns:
        One line that a terminal shows as it is.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


publish_all(globals())
