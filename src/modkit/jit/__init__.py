"""TorchScript: what is in its archives, whether they are whole, and the way to torch.export."""

from modkit.jit._archive import (
    ArchiveInfo as ArchiveInfo,
    check_archive as check_archive,
    inspect as inspect,
)
from modkit.jit._archive_code import ClassInfo as ClassInfo
from modkit.jit._archive_errors import (
    ArchiveError as ArchiveError,
    ConversionError as ConversionError,
)
from modkit.jit._archive_tensors import TensorInfo as TensorInfo
from modkit.jit._export import (
    add_export as add_export,
    read_export as read_export,
    to_export as to_export,
)


__all__ = [
    "ArchiveError",
    "ArchiveInfo",
    "ClassInfo",
    "ConversionError",
    "TensorInfo",
    "add_export",
    "check_archive",
    "inspect",
    "read_export",
    "to_export",
]
