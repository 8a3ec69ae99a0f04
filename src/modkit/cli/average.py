"""``modkit average``: several checkpoints into one."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from modkit.averaging import posthoc
from modkit.averaging.checkpoints import average_checkpoints
from modkit.cli import _tables as ui
from modkit.files.checkpoints import save_checkpoint
from modkit.files.safetensors_files import library, save_safetensors
from modkit.files.tensor_files import Checkpoint, file_in
from modkit.files.zip_archive import open_regular


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> list[float] | None:
    if value is None:
        return None
    try:
        weights = [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,1,2") from None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
        raise click.BadParameter(f"{value!r}: weights must be finite, 0 or more, and not all 0")
    return weights


@click.command(epilog=ui.EPILOG)
@click.argument("checkpoints", nargs=-1, required=True, metavar="CKPT...", type=ui.INPUT)
@click.option(
    "-o",
    "--output",
    type=ui.OUTPUT,
    help="The average; a name in .safetensors chooses that format.",
)
@click.option("--weights", callback=_numbers, help="Weight of each CKPT, as 1,1,2; default: equal.")
@click.option("--key", help="Path of the state dict in torch files, as model or ema.module.")
@click.option("--prefix", default="", help="Only tensors with this prefix, which is removed.")
@click.option(
    "--dtype",
    type=click.Choice(ui.DTYPES),
    help="Dtype of the averages; default: that of the first.",
)
@click.option(
    "--ema-sigma",
    type=click.FloatRange(0, min_open=True),
    help="Relative width; CKPT are snapshots of PostHocEMA or their directory.",
)
@click.option("--step", type=int, help="Step for --ema-sigma; default: the latest.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists; never an input.")
@click.option("--dry-run", is_flag=True, help="Only compare names and shapes.")
@ui.json_option
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
    as_json: bool,
) -> None:
    """Average checkpoints of one model: torch or safetensors files, sharded or not.

    All names and shapes are compared before any tensor is read. OUTPUT is written atomically.

    \b
    Examples:
      modkit average run/1.pt run/2.pt --key model --dry-run
      modkit average run/1.pt run/2.pt --key model --weights 1,2 -o soup.safetensors
      modkit average snapshots/ --ema-sigma 0.1 -o ema.pt
    """  # noqa: D301
    if step is not None and ema_sigma is None:
        raise click.UsageError("--step needs --ema-sigma")
    if weights is not None and len(weights) != len(checkpoints):
        text = f"--weights has {len(weights)} numbers for {len(checkpoints)} checkpoints"
        raise click.UsageError(text)
    if output is None and not dry_run:
        raise click.UsageError("missing option '-o' / '--output'")
    if any(path.suffix == ".safetensors" for path in (*checkpoints, output or Path())):
        library("safetensors")
    for path in checkpoints:
        # Opening a FIFO could block. A directory may hold snapshots.
        if ema_sigma is None or not path.is_dir():
            with open_regular(file_in(path)):
                pass
    if dry_run:
        _show_match(checkpoints, key, as_json=as_json)
        return
    assert output is not None
    ui.check_output(output, checkpoints, overwrite=overwrite)
    facts: dict[str, Any] = {"output": os.fspath(output), "checkpoints": len(checkpoints)}
    wanted = getattr(torch, dtype) if dtype else None
    tensors: Mapping[str, Tensor]
    if ema_sigma is None:
        with ui.progress("averaging", 1.0) as bar:
            tensors = average_checkpoints(checkpoints, weights, key=key, dtype=wanted, progress=bar)
    else:
        tensors, fit = _reconstructed(checkpoints, ema_sigma, step, wanted)
        facts |= fit
    names = [name for name in tensors if name.startswith(prefix)]
    chosen = {name.removeprefix(prefix): tensors[name].contiguous() for name in names}
    if not chosen:
        raise ValueError(f"no name begins with --prefix {prefix!r}; the first is {min(tensors)!r}")
    (save_safetensors if output.suffix == ".safetensors" else save_checkpoint)(chosen, output)
    facts["tensors"] = len(chosen)
    if as_json:
        ui.print_json(facts)
        return
    if ema_sigma is not None:
        ui.console().print(
            f"sigma_rel {ema_sigma:g} at step {facts['step']} from {facts['snapshots']} snapshots: "
            f"relative error of the fit {facts['fit_error']:.2g}"
        )
    average_of = f"the average of {len(checkpoints)}, {facts['tensors']} tensors"
    ui.console().print(f"{ui.cell(output)}: {average_of}", soft_wrap=True)


def _reconstructed(
    checkpoints: Sequence[Path], sigma_rel: float, step: int | None, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the average of a width from snapshots or their directory, and facts of the fit."""
    is_folder = len(checkpoints) == 1 and checkpoints[0].is_dir()
    with ui.progress("reconstructing"):
        found = posthoc.reconstruct(checkpoints[0] if is_folder else checkpoints, sigma_rel, step)
    averages = {name: each.to(dtype or each.dtype) for name, each in found.averages.items()}
    facts = {"sigma_rel": sigma_rel, "step": found.step, "snapshots": len(found.snapshots)}
    return {**averages, **found.buffers}, {**facts, "fit_error": found.fit.error}


def _show_match(checkpoints: Sequence[Path], key: str | None, *, as_json: bool) -> None:
    """Print how the names and shapes of the checkpoints match; raise if they do not."""
    paths = [str(path) for path in checkpoints]
    shapes = [Checkpoint(path, key).shapes for path in checkpoints]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for each in shapes for name in each):
        texts = [" x ".join(map(str, each.get(name, ["missing"]))) for each in shapes]
        others = {k: text for k, text in zip(paths, texts, strict=True) if text != texts[0]}
        rows.append({"name": name, "shape": texts[0], "fits": not others, "others": others})
    if as_json:
        ui.print_json({"checkpoints": paths, "tensors": rows})
    else:
        fits = ["; ".join(f"{Path(k).name}: {v}" for k, v in r["others"].items()) for r in rows]
        cells = [(r["name"], r["shape"], fit or "yes") for r, fit in zip(rows, fits, strict=True)]
        ui.print_table(("name", "shape", "fits"), cells, f"{len(shapes)} checkpoints")
    if problems := [row["name"] for row in rows if not row["fits"]]:
        raise ValueError(f"{len(problems)} tensors do not fit, the first is {problems[0]}")
