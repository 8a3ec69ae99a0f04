"""``modkit convert``: one checkpoint in another format, dtype or number of files."""

import gc
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from modkit.cli import _tables as ui
from modkit.errors import FileError
from modkit.files.atomic_write import atomic_write
from modkit.files.safetensors_files import (
    Described,
    in_file_order,
    versions_as_metadata,
    write_safetensors,
)
from modkit.files.tensor_files import INDEX, Checkpoint, shards_of


if TYPE_CHECKING:
    from torch import Tensor

# A number, a unit, and an i if the unit is a power of 1024: 500, 5GB, 1.5 gib.
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)


def _bytes(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Read a size as 5GB, with 1000 as the base, or 5GiB, with 1024."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not a size such as 5GB or 500MB")
    number, unit, binary = match.groups()
    exponent = ("", "K", "M", "G", "T").index(unit.upper())
    return float(number) * (1024.0 if binary else 1000.0) ** exponent


@click.command(epilog=ui.EPILOG)
@click.argument("sources", nargs=-1, required=True, metavar="SRC...", type=ui.INPUT)
@click.option(
    "-o",
    "--output",
    required=True,
    type=ui.OUTPUT,
    metavar="DST",
    help="The file to write; a name in .safetensors chooses that format.",
)
@click.option("--key", help="Path of the state dict in torch files, as model or ema.module.")
@click.option("--dtype", type=click.Choice(ui.DTYPES), help="Dtype of floating-point tensors.")
@click.option(
    "--max-shard-size", metavar="SIZE", callback=_bytes, help="Split DST into files of 5GB, say."
)
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists; never a source.")
@ui.json_option
def convert(
    sources: tuple[Path, ...],
    output: Path,
    key: str | None,
    dtype: str | None,
    max_shard_size: float | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another format, dtype or sharding.

    SRC is a torch or safetensors file, the index of a sharded checkpoint, a directory with one
    checkpoint, or all shards of one. Tensors are read one at a time. With --max-shard-size, the
    files are named as transformers does, as model-00001-of-00003.safetensors for model.safetensors,
    and the index is written last. Files are written atomically; checksums of torch files are
    verified.

    \b
    Examples:
      modkit convert pytorch_model.bin -o model.safetensors --dtype bfloat16
      modkit convert last.ckpt --key state_dict -o model.safetensors
      modkit convert sharded/ -o one.pt
      modkit convert one.pt -o out/model.safetensors --max-shard-size 5GB
    """  # noqa: D301
    source = _Source(Checkpoint(*sources, key=key), dtype)
    shards = source.split(max_shard_size, tied=output.suffix != ".safetensors")
    target = _Target(output, len(shards))
    for path in target.touched():
        ui.check_output(path, sources, overwrite=overwrite)

    with ui.progress(f"converting {sources[0].name}", 1.0) as bar:
        target.write(shards, source, bar)

    tensors = sum(map(len, shards))
    if as_json:
        facts = {"output": str(output), "files": [*map(str, target.files)], "tensors": tensors}
        ui.print_json({**facts, "unverified": ui.paths(source.checkpoint.unverified)})
    elif target.index in target.new_files:
        ui.say(f"{target.index}: {tensors} tensors in {len(shards)} files")
    else:
        ui.say(f"{output}: {tensors} tensors")
    ui.warn_unverified(source.checkpoint.unverified)


class _Target:
    """The files to write, and those of an older checkpoint of the same name, which they replace.

    Attributes:
        files: One file, or all shards.
        index: The index beside them.
        new_files: The files, and the index if there are several.
    """

    def __init__(self, output: Path, count: int) -> None:
        self.files = [output]
        if count > 1:
            self.files = [
                output.with_name(f"{output.stem}-{number:05d}-of-{count:05d}{output.suffix}")
                for number in range(1, count + 1)
            ]
        self.index = output.with_name(output.name + INDEX)
        self.new_files = [*self.files, self.index] if count > 1 else self.files

        # The same checkpoint in another number of files would be a second answer for a reader.
        old_files = [output, self.index, *_shards_in(self.index)]
        self._obsolete = [
            path
            for path in old_files
            # False also for a name that no file can have, where Path.is_file() raises.
            if path not in self.new_files and os.path.isfile(path)  # noqa: PTH113
        ]
        self._replaces_shards = not set(self.files).isdisjoint(old_files[2:])

    def touched(self) -> list[Path]:
        """Return all files that are written or removed."""
        return [*self.new_files, *self._obsolete]

    def write(
        self, shards: Sequence[list[str]], source: "_Source", progress: Callable[[float], object]
    ) -> None:
        """Write all files, the index last, and then remove those that they replace.

        Until the new index is there, or the one file, a reader finds the old checkpoint. The
        exception are shards that replace old ones of the same names: then it finds none, as the old
        index goes first.
        """
        if self._replaces_shards:
            # While shards are replaced one by one, the old index would describe a mixture of two
            # checkpoints.
            self.index.unlink()
        written: list[Path] = []
        try:
            for file, names in zip(self.files, shards, strict=True):
                _write(file, names, source, progress)
                written.append(file)
                # torch.save() of torch 2.8 leaves its tensors in a reference cycle.
                gc.collect()
            if self.index in self.new_files:
                self._write_index(shards, source.done)
        except BaseException:
            # Shards without an index are of no use, and may fill the disk.
            for file in written:
                file.unlink()
            raise

        # The index goes before the shards that it names.
        for file in self._obsolete:
            # An index whose shards were replaced has been removed above.
            file.unlink(missing_ok=True)

    def _write_index(self, shards: Sequence[list[str]], total_size: int) -> None:
        homes = zip(self.files, shards, strict=True)
        weight_map = {name: file.name for file, names in homes for name in names}
        # The format that transformers reads: the file of each tensor, and the bytes of all of them.
        table = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        with atomic_write(self.index) as unfinished:
            unfinished.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def _shards_in(index: Path) -> list[Path]:
    """Return the files that an index names; none if there is no index, or a corrupt one."""
    try:
        return [*shards_of(index)]
    except (FileError, OSError):
        return []


class _Source:
    """A checkpoint, with the dtypes that its tensors will have.

    Attributes:
        checkpoint: The checkpoint.
        described: The new dtype and the shape of each tensor.
        done: The bytes that were read, in their new dtypes.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str | None) -> None:
        import torch

        self.checkpoint = checkpoint
        self.described: dict[str, Described] = {}
        for name, shape in checkpoint.shapes.items():
            old_dtype = checkpoint.dtype(name)
            is_cast = dtype is not None and old_dtype.is_floating_point
            new_dtype = getattr(torch, str(dtype)) if is_cast else old_dtype
            self.described[name] = Described(new_dtype, shape)
        self.done = 0
        self._total = sum(tensor.nbytes for tensor in self.described.values())

    def memory(self, name: str) -> Hashable:
        """Return equal values for tied tensors."""
        memory = self.checkpoint.memory(name)
        # Tensors of safetensors files, and those without elements, are tied to no other.
        return name if memory is None else memory

    def split(self, most: float | None, *, tied: bool) -> list[list[str]]:
        """Return the names in each file.

        Args:
            most: Most bytes in a file; None for one file.
            tied: Whether tied tensors share a file, and are stored once.
        """
        groups: dict[Hashable, list[str]] = {}
        for name in self.described:
            groups.setdefault(self.memory(name) if tied else name, []).append(name)

        shards: list[list[str]] = [[]]
        used = 0
        for group in groups.values():
            size = self.described[group[0]].nbytes
            # A tensor that is larger than a file may be has a file of its own.
            if shards[-1] and most is not None and used + size > most:
                shards.append([])
                used = 0
            shards[-1] += group
            used += size

        # Groups have moved tied tensors to the first of them; a file has its tensors in their old
        # order.
        order = {name: number for number, name in enumerate(self.described)}
        return [sorted(shard, key=order.__getitem__) for shard in shards]

    def read(self, name: str, progress: Callable[[float], object]) -> "Tensor":
        """Return one tensor, verified, in its new dtype; report the part that is done."""
        from modkit.averaging.checkpoints import cast

        tensor = self.checkpoint.tensor(name)
        if self.described[name].dtype != tensor.dtype:
            tensor = cast(name, tensor, str(tensor.dtype)[6:], self.described[name].dtype)
        self.done += tensor.nbytes
        # All tensors may be empty.
        progress(self.done / max(self._total, 1))
        return tensor


def _write(
    file: Path, names: Iterable[str], source: _Source, progress: Callable[[float], object]
) -> None:
    """Write one file. Tied tensors are written to safetensors under each name."""
    if file.suffix == ".safetensors":
        described = in_file_order({name: source.described[name] for name in names})
        tensors = ((name, source.read(name, progress)) for name in described)
        metadata = {
            **source.checkpoint.metadata,
            **versions_as_metadata(source.checkpoint.versions),
        }
        with atomic_write(file) as unfinished:
            write_safetensors(unfinished, described, tensors, metadata)
        return

    from modkit.averaging.precision import compact
    from modkit.files.checkpoints import save_checkpoint

    # As model.state_dict(), so that versions can be attached. Torch's format is written at once.
    state: OrderedDict[str, Tensor] = OrderedDict()
    first: dict[Hashable, Tensor] = {}
    for name in names:
        memory = source.memory(name)
        if memory not in first:
            # A view of a larger storage would be saved with all of it.
            first[memory] = compact(source.read(name, progress))
        state[name] = first[memory]
    if source.checkpoint.versions:
        vars(state)["_metadata"] = source.checkpoint.versions
    save_checkpoint(state, file)
