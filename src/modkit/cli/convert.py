"""``modkit convert``: one checkpoint in another format or dtype, in one file."""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modkit.cli import _tables as ui
from modkit.files.atomic_write import atomic_write
from modkit.files.safetensors_files import (
    Described,
    in_file_order,
    versions_as_metadata,
    write_safetensors,
)
from modkit.files.tensor_files import Checkpoint


if TYPE_CHECKING:
    from torch import Tensor


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
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists; never a source.")
@ui.json_option
def convert(
    sources: tuple[Path, ...],
    output: Path,
    key: str | None,
    dtype: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to one file of another format or dtype.

    SRC is a torch or safetensors file, the index of a sharded checkpoint, a directory with one
    checkpoint, or all shards of one. Tensors are read one at a time. DST is written atomically;
    checksums of torch files are verified.

    \b
    Examples:
      modkit convert pytorch_model.bin -o model.safetensors --dtype bfloat16
      modkit convert last.ckpt --key state_dict -o model.safetensors
      modkit convert sharded/ -o one.pt
    """  # noqa: D301
    source = _Source(Checkpoint(*sources, key=key), dtype)
    ui.check_output(output, sources, overwrite=overwrite)

    with ui.progress(f"converting {sources[0].name}", 1.0) as bar:
        _write(output, source, bar)

    unverified = source.checkpoint.unverified
    tensors = len(source.described)
    if as_json:
        facts = {"output": os.fspath(output), "tensors": tensors}
        ui.print_json({**facts, "unverified": [*map(str, unverified)]})
    else:
        ui.say(f"{output}: {tensors} tensors")
    ui.warn_unverified(unverified)


class _Source:
    """A checkpoint, with the dtypes that its tensors will have.

    Attributes:
        checkpoint: The checkpoint.
        described: The new dtype and the shape of each tensor.
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
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in self.described.values())

    def memory(self, name: str) -> Hashable:
        """Return equal values for tied tensors."""
        memory = self.checkpoint.memory(name)
        # Tensors of safetensors files, and those without elements, are tied to no other.
        return name if memory is None else memory

    def read(self, name: str, progress: Callable[[float], object]) -> "Tensor":
        """Return one tensor, verified, in its new dtype; report the part that is done."""
        from modkit.averaging.checkpoints import cast

        tensor = self.checkpoint.tensor(name)
        if self.described[name].dtype != tensor.dtype:
            tensor = cast(name, tensor, str(tensor.dtype)[6:], self.described[name].dtype)
        self._done += tensor.nbytes
        # All tensors may be empty.
        progress(self._done / max(self._total, 1))
        return tensor


def _write(file: Path, source: _Source, progress: Callable[[float], object]) -> None:
    """Write the file. Tied tensors are written to safetensors under each name."""
    if file.suffix == ".safetensors":
        described = in_file_order(source.described)
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
    for name in source.described:
        memory = source.memory(name)
        if memory not in first:
            # A view of a larger storage would be saved with all of it.
            first[memory] = compact(source.read(name, progress))
        state[name] = first[memory]

    if source.checkpoint.versions:
        vars(state)["_metadata"] = source.checkpoint.versions
    save_checkpoint(state, file)
