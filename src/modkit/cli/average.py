"""``python -m modkit average``: several checkpoints into one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from modkit.averaging import posthoc
from modkit.averaging.checkpoints import average_checkpoints
from modkit.cli._tables import cell, console, one_line_errors
from modkit.files.checkpoint_files import (
    Checkpoint,
    file_in,
    is_safetensors,
    library,
    save_safetensors,
)
from modkit.files.torch_files import save_checkpoint
from modkit.files.zip_archive import open_regular


DTYPES: Final = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}


def numbers(_: click.Context, __: click.Parameter, value: str | None) -> list[float] | None:
    """Read numbers with commas between them."""
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,1,2") from None


@click.command
@click.argument(
    "checkpoints",
    nargs=-1,
    required=True,
    metavar="CKPT...",
    type=click.Path(exists=True, path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the average goes; a name that ends in .safetensors chooses that format.",
)
@click.option(
    "--weights", callback=numbers, help="How much each counts, as 1,1,2; default: the same."
)
@click.option("--key", help="Where in files of torch the state dict is, as model or ema.module.")
@click.option("--prefix", default="", help="Only tensors whose names begin so, and without it.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Of the floating-point tensors of the average; default: as in the first checkpoint.",
)
@click.option(
    "--ema-sigma",
    type=click.FloatRange(min=0, min_open=True),
    help="CKPT are snapshots of PostHocEMA, or their directory: the average of this relative width.",
)
@click.option("--step", type=int, help="With --ema-sigma: at which step; default: the latest.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists; never an input.")
@click.option("--dry-run", is_flag=True, help="Show which tensors fit; read and write no more.")
def average(
    checkpoints: tuple[Path, ...],
    output: Path | None,
    weights: list[float] | None,
    key: str | None,
    prefix: str,
    dtype: str | None,
    ema_sigma: float | None,
    step: int | None,
    overwrite: bool,
    dry_run: bool,
) -> None:
    """Average checkpoints of one model into one: of torch and of safetensors, sharded ones too.

    They are read one after the other, so memory holds the average and one of them. All names and
    shapes are compared first. The output appears when it is complete.
    """
    if step is not None and ema_sigma is None:
        raise click.UsageError("--step goes with --ema-sigma")
    with one_line_errors():
        for path in checkpoints:
            # Opening a FIFO could wait forever. A directory may hold snapshots.
            if ema_sigma is None or not path.is_dir():
                with open_regular(file_in(path)):
                    pass
        if dry_run:
            show_match(checkpoints, key)
            return
        if output is None:
            raise click.UsageError("missing option '-o' / '--output'")
        check_output(output, checkpoints, overwrite=overwrite)
        if ema_sigma is None:
            found = averaged(checkpoints, weights, key, dtype)
        else:
            found = reconstructed(checkpoints, ema_sigma, step, dtype)
        found = without_prefix(found, prefix)
        write(output, found)
        console().print(f"{cell(output)}: the average of {len(checkpoints)}, {len(found)} tensors")


def show_match(checkpoints: Sequence[Path], key: str | None) -> None:
    """Print how the names and shapes of the checkpoints fit; raise where they do not."""
    shapes = [Checkpoint(path, key).shapes for path in checkpoints]
    table = Table("name", "shape", "fits", title=f"{len(shapes)} checkpoints", title_justify="left")
    problems: list[str] = []
    for name in dict.fromkeys(name for each in shapes for name in each):
        first = shapes[0].get(name)
        others = [
            f"{path.name}: {text_of(each.get(name))}"
            for path, each in zip(checkpoints, shapes, strict=True)
            if each.get(name) != first
        ]
        verdict = f"[red]{cell('; '.join(others))}[/]" if others else "[green]yes[/]"
        table.add_row(cell(name), text_of(first), verdict)
        if others:
            problems.append(name)
    console().print(table)
    if problems:
        raise ValueError(f"{len(problems)} tensors do not fit, the first is {problems[0]}")


def text_of(shape: torch.Size | None) -> str:
    """Write a shape for a table."""
    return "missing" if shape is None else " x ".join(map(str, shape))


def check_output(output: Path, checkpoints: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output that is an input or cannot be written, before any work is done."""
    if is_safetensors(output):
        library("safetensors")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {output.parent}")
    special = output.exists() and not output.is_file()
    if not os.access(output if special else output.parent, os.W_OK):
        raise PermissionError(f"{output if special else output.parent} is not writable")
    if not output.exists():
        return
    for path in checkpoints:
        if any(output.samefile(used) for used in files_of(path)):
            raise FileExistsError(f"{output} is an input: {path}")
    if not overwrite:
        raise FileExistsError(f"{output} exists; --overwrite replaces it")


def files_of(path: Path) -> list[Path]:
    """Return the files that are read for an input, the shards beside an index among them."""
    if path.is_dir():
        return [path, *path.iterdir()]
    if path.name.endswith(".index.json"):
        return [path, *path.parent.iterdir()]
    return [file_in(path)]


def averaged(
    checkpoints: Sequence[Path], weights: list[float] | None, key: str | None, dtype: str | None
) -> Mapping[str, Tensor]:
    """Average the files, with a bar where somebody looks."""
    columns = (TextColumn("averaging"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    hidden = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=1.0)
        return average_checkpoints(
            checkpoints,
            weights,
            key=key,
            dtype=DTYPES[dtype] if dtype else None,
            progress=lambda part: bar.update(task, completed=part),
        )


def reconstructed(
    checkpoints: Sequence[Path], sigma_rel: float, step: int | None, dtype: str | None
) -> Mapping[str, Tensor]:
    """Put the average of a width together, and say how well that went."""
    single = len(checkpoints) == 1 and checkpoints[0].is_dir()
    found = posthoc.reconstruct(checkpoints[0] if single else checkpoints, sigma_rel, step)
    console().print(
        f"sigma_rel {sigma_rel:g} at step {found.step} from {len(found.snapshots)} snapshots: "
        f"relative error of the fit {found.fit.error:.2g}"
    )
    if dtype is None:
        return {**found.averages, **found.buffers}
    averages = {name: tensor.to(DTYPES[dtype]) for name, tensor in found.averages.items()}
    return {**averages, **found.buffers}


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """Return the tensors of a part of the model, as that part names them."""
    found = {
        n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)
    }
    if not found:
        raise ValueError(f"no name begins with --prefix {prefix!r}; the first is {min(tensors)!r}")
    return found


def write(output: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors atomically, in the format that the name of the output chooses."""
    if is_safetensors(output):
        save_safetensors(tensors, output)
    else:
        save_checkpoint({name: tensor.contiguous() for name, tensor in tensors.items()}, output)
