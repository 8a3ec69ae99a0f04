"""What goes wrong with an archive before anything of it is loaded."""


class ArchiveError(RuntimeError):
    """A file is no TorchScript archive, or is damaged; nothing of it has been loaded.

    Attributes:
        kind: What the file is, as :func:`modkit.jit.inspect` calls it.
    """

    def __init__(self, message: str, kind: str = "unknown") -> None:
        super().__init__(message)
        self.kind = kind


class ConversionError(RuntimeError):
    """A module of TorchScript cannot be turned into a program of torch.export.

    Attributes:
        node: The kind of node that stops it, such as ``prim::Loop``, or None if it is not known.
        source: Where the node comes from in the source of the module.
    """

    def __init__(self, message: str, node: str | None = None, source: str = "") -> None:
        super().__init__(message)
        self.node, self.source = node, source
