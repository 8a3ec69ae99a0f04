"""What is in a file of a model, as plain data for JSON."""

from dataclasses import asdict
from typing import Any

from modkit.jit._archive import ArchiveInfo


def as_data(info: ArchiveInfo) -> dict[str, Any]:
    """Turn all that is known of a file into dicts, lists and numbers."""
    shown = {name: getattr(info, name) for name in info.__dataclass_fields__}
    return {
        **shown,
        "classes": [asdict(each) for each in info.classes],
        "tensors": [asdict(each) for each in info.tensors],
        "extra_files": dict(info.extra_files),
        "runs_at_load": list(info.runs_at_load),
    }


def amount(nbytes: int) -> str:
    """Write a number of bytes with a prefix that suits it."""
    for prefix, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {prefix}"
    return f"{nbytes} B"
