"""Files that hold one average at one step, written whole or not at all and read piece by piece."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modkit.files.atomic_write import written_whole
from modkit.files.safetensors_files import library
from modkit.files.torch_files import compact, load_checked, load_plain


FORMATS = ("pt", "safetensors")


@dataclass(frozen=True, order=True)
class Snapshot:
    """A file with one power average at one step.

    Args:
        step: Number of steps that the average spans, the copy included.
        sigma_rel: Relative width of the average.
        path: The file: ``.pt``, which ``torch.load(weights_only=True)`` reads, or ``.safetensors``.
    """

    step: int
    sigma_rel: float
    path: Path


def save_snapshot(
    directory: str | os.PathLike[str],
    averages: Mapping[str, Tensor],
    *,
    step: int,
    sigma_rel: float,
    buffers: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    file_format: str = "pt",
) -> Snapshot:
    """Write an average to a file whose name tells the step and the width.

    The file appears under its name only when it is complete, and replaces one of the same name.

    Args:
        directory: Where the file goes; it is made if it is not there.
        averages: The averaged tensors by name; each is taken once, whatever else it is tied to.
        step: Number of steps that the average spans, the copy included.
        sigma_rel: Relative width of the average.
        buffers: Tensors that are not averaged, by name.
        dtype: A narrower floating-point dtype to save space. A tensor that would lose more in it than
            half a unit in the last place, because its values are too large or too small for that dtype,
            keeps its own.
        file_format: ``"pt"`` or ``"safetensors"``.

    Returns:
        The step, the width and the path of the file.

    Raises:
        ValueError: The format is neither of the two, or the dtype is not a floating-point one.
        ImportError: The package safetensors is needed and not installed.
    """
    check_options(dtype, file_format)
    tensors = {name: narrowed(tensor, dtype) for name, tensor in averages.items()}
    others = {name: narrowed(tensor, None) for name, tensor in (buffers or {}).items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ema-{step:010d}-{sigma_rel:.6g}.{file_format}"
    with written_whole(path) as unfinished:
        if file_format == "pt":
            facts = {"step": step, "sigma_rel": sigma_rel}
            torch.save({**facts, "averages": tensors, "buffers": others}, unfinished)
        else:
            save_safetensors(unfinished, tensors, others, step, sigma_rel)
    return Snapshot(step, sigma_rel, path)


def check_options(dtype: torch.dtype | None, file_format: str) -> None:
    """Refuse a dtype or a format that no average can be saved in."""
    if file_format not in FORMATS:
        raise ValueError(f"file_format must be one of {FORMATS}, got {file_format!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor in a narrower dtype if its values survive that, and in its own otherwise."""
    own = tensor.detach().cpu()
    if dtype is None or not own.is_floating_point() or dtype.itemsize >= own.dtype.itemsize:
        return compact(own)
    narrower = own.to(dtype)
    lost = torch.linalg.vector_norm(narrower.to(own.dtype) - own, dtype=torch.float64)
    allowed = torch.finfo(dtype).eps / 2 * torch.linalg.vector_norm(own, dtype=torch.float64)
    # An overflow makes the left side infinite, and a NaN the comparison false.
    return compact(narrower if bool(lost <= allowed) else own)


def save_safetensors(
    path: Path, averages: dict[str, Tensor], buffers: dict[str, Tensor], step: int, sigma_rel: float
) -> None:
    """Write one flat file of tensors under their own names, which any reader of such files takes."""
    facts = {"step": str(step), "sigma_rel": repr(sigma_rel), "buffers": json.dumps([*buffers])}
    library("safetensors.torch").save_file({**averages, **buffers}, path, metadata=facts)


def find_snapshots(directory: str | os.PathLike[str]) -> list[Snapshot]:
    """Return the snapshots in a directory, by step and then by width.

    Their names begin with ``ema-``; the step and the width are what the files themselves say. A file
    that is still being written, or was left behind by a process that died, does not count.
    """
    files = [path for kind in FORMATS for path in Path(directory).glob(f"ema-*.{kind}")]
    return sorted(read_facts(path) for path in files)


def read_facts(path: Path) -> Snapshot:
    """Return what a file says of itself, without reading its tensors."""
    try:
        if path.suffix == ".safetensors":
            with library("safetensors").safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
        else:
            facts = load_plain(path)
        return Snapshot(int(facts["step"]), float(facts["sigma_rel"]), path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a snapshot of an average") from error


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the name, the tensor and whether it was averaged, one tensor in memory at a time.

    Raises:
        ValueError: A tensor in a file of torch does not fit its checksum.
    """
    if path.suffix == ".safetensors":
        with library("safetensors").safe_open(path, framework="pt") as file:
            buffers = set(json.loads(file.metadata()["buffers"]))
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name), name not in buffers
        return
    content, checksums = load_checked(path)
    for part in ("averages", "buffers"):
        for name, tensor in content[part].items():
            checksums.check(name, tensor)
            yield name, tensor, part == "averages"
