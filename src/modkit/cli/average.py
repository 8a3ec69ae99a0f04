"""``python -m modkit average``: several checkpoints into one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from modkit.averaging import posthoc
from modkit.averaging.checkpoints import average_checkpoints
from modkit.cli._checkpoint_tables import contents, contents_tables, match_table, print_tables
from modkit.files.atomic_write import atomic_write
from modkit.files.checkpoint_files import file_in, is_safetensors
from modkit.files.safetensors_files import library


DTYPES: Final = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}
# What the tables need where there is no terminal to ask for its width.
PLAIN_WIDTH: Final = 120


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
@click.option("--inspect", is_flag=True, help="Show what is in each CKPT, with nothing run.")
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
    inspect: bool,
) -> None:
    """Average checkpoints of one model into one: of torch and of safetensors, sharded ones too.

    They are read one after the other, so memory holds the average and one of them. All names and
    shapes are compared first. The output appears when it is complete.
    """
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if step is not None and ema_sigma is None:
        raise click.UsageError("--step goes with --ema-sigma")
    try:
        if inspect:
            for path in checkpoints:
                print_tables(console, contents_tables(path, contents(path), key))
            return
        if dry_run:
            show_match(console, checkpoints, key)
            return
        if output is None:
            raise click.UsageError("missing option '-o' / '--output'")
        check_output(output, checkpoints, overwrite=overwrite)
        if ema_sigma is None:
            found = averaged(checkpoints, weights, key, dtype)
        else:
            found = reconstructed(console, checkpoints, ema_sigma, step, dtype)
        found = without_prefix(found, prefix)
        write(output, found)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    console.print(f"{output}: the average of {len(checkpoints)}, {len(found)} tensors")


def show_match(console: Console, checkpoints: Sequence[Path], key: str | None) -> None:
    """Print how the checkpoints fit; raise where they do not."""
    table, problems = match_table(checkpoints, key)
    print_tables(console, [table])
    if problems:
        raise click.ClickException(
            f"{len(problems)} tensors do not fit, the first is {problems[0]}"
        )


def check_output(output: Path, checkpoints: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse to write over an input, whatever name it goes by, or over anything that is unasked for."""
    if not output.parent.is_dir():
        raise click.ClickException(f"there is no directory {output.parent}")
    if not output.exists():
        return
    for path in checkpoints:
        if any(output.samefile(used) for used in files_of(path)):
            raise click.ClickException(f"{output} is an input: {path}")
    if not overwrite:
        raise click.ClickException(f"{output} exists; --overwrite replaces it")


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
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=1.0)
        return average_checkpoints(
            checkpoints,
            weights,
            key=key,
            dtype=DTYPES[dtype] if dtype else None,
            progress=lambda part: bar.update(task, completed=part),
        )


def reconstructed(
    console: Console,
    checkpoints: Sequence[Path],
    sigma_rel: float,
    step: int | None,
    dtype: str | None,
) -> Mapping[str, Tensor]:
    """Put the average of a width together, and say how well that went."""
    single = len(checkpoints) == 1 and checkpoints[0].is_dir()
    found = posthoc.reconstruct(checkpoints[0] if single else checkpoints, sigma_rel, step)
    console.print(
        f"sigma_rel {sigma_rel:g} at step {found.step} from {len(found.snapshots)} snapshots: "
        f"relative error of the fit {found.fit.error:.2g}",
        highlight=False,
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
    """Write the tensors so that the file is there whole or not at all."""
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        with atomic_write(output) as unfinished:
            if is_safetensors(output):
                # transformers refuses a file that does not say for which library it is.
                save = library("safetensors.torch").save_file
                save(plain, unfinished, metadata={"format": "pt"})
            else:
                torch.save(plain, unfinished)
    except Exception as error:
        raise OSError(f"{output} cannot be written: {error}") from error
