"""What goes wrong with an archive before anything of it is loaded."""


class ArchiveError(RuntimeError):
    """A file is no TorchScript archive, or is damaged; nothing of it has been loaded.

    Attributes:
        kind: What the file is, as :func:`modkit.jit.inspect` calls it.
    """

    def __init__(self, message: str, kind: str = "unknown") -> None:
        super().__init__(message)
        self.kind = kind
