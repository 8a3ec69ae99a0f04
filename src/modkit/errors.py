"""Every exception class that modkit raises by itself."""

from modkit._namespace import publish_all


__all__ = ["FileError", "NameMismatchError"]


class FileError(ValueError, RuntimeError):
    """A file is corrupt, unsafe to read, or of another kind than expected. Nothing of it was loaded.

    It is a ``ValueError``, and a ``RuntimeError`` as well because ``torch.load`` and ``torch.jit.load``
    raise that for corrupt files. Text that comes from the file is printable in the message: control
    characters are escaped.

    Attributes:
        kind: What the file is, as :func:`modkit.files.inspect` names it, or ``""`` if unknown.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(printable(message))
        self.kind = kind


class NameMismatchError(ValueError):
    """The names or shapes of a model's tensors are not those that are averaged.

    Attributes:
        missing: Names that are averaged, and that the model does not have.
        unexpected: Names that the model has, and that are not averaged.
        shapes: Names whose shapes differ, each with both shapes.
    """

    SHOWN = 5

    def __init__(
        self, what: str, *, missing: list[str], unexpected: list[str], shapes: list[str]
    ) -> None:
        self.missing, self.unexpected, self.shapes = missing, unexpected, shapes
        kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        parts = [
            f"{len(names)} {kind}: {', '.join(names[: self.SHOWN])}"
            + (", ..." if len(names) > self.SHOWN else "")
            for kind, names in kinds
            if names
        ]
        super().__init__(f"{what}: {'; '.join(parts)}. Nothing has been changed.")


def printable(text: str) -> str:
    """Return the text with each character that is not printable, line breaks included, escaped.

    Names in a file are chosen by whoever wrote it. Printed raw, they can move the cursor of a terminal
    or forge a line of output.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


publish_all(globals())
