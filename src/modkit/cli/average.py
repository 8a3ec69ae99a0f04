"""``modkit average``: several checkpoints into one."""

import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modkit.cli import _tables as ui
from modkit.files.safetensors_files import save_safetensors
from modkit.files.tensor_files import Checkpoint


if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> list[float] | None:
    """Read weights as 1,1,2."""
    if value is None:
        return None
    try:
        weights = [float(number) for number in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,1,2") from None
    if not sum(weights) or not math.isfinite(sum(map(abs, weights))):
        raise click.BadParameter(f"{value!r}: weights must be finite, with a sum other than 0")
    return weights


@click.command(epilog=ui.EPILOG)
@click.argument("checkpoints", nargs=-1, required=True, metavar="CKPT...", type=ui.INPUT)
@click.option(
    "-o",
    "--output",
    required=True,
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
@ui.json_option
def average(
    checkpoints: tuple[Path, ...],
    output: Path,
    weights: list[float] | None,
    key: str | None,
    prefix: str,
    dtype: str | None,
    ema_sigma: float | None,
    step: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Average checkpoints of one model.

    CKPT are torch or safetensors files, sharded or not. All names and shapes are compared before
    any tensor is read, and those that differ are an error. OUTPUT is written atomically.

    \b
    Examples:
      modkit average run/1.pt run/2.pt --key model -o soup.pt
      modkit average run/1.pt run/2.pt --weights 1,2 -o soup.safetensors
      modkit average snapshots/ --ema-sigma 0.1 -o ema.pt
    """  # noqa: D301
    if ema_sigma is None and step is not None:
        raise click.UsageError("--step needs --ema-sigma")
    if ema_sigma is not None and (key is not None or weights is not None):
        raise click.UsageError("--ema-sigma takes neither --key nor --weights")
    if weights is not None and len(weights) != len(checkpoints):
        raise click.UsageError(
            f"--weights has {len(weights)} numbers for {len(checkpoints)} checkpoints"
        )

    unverified: list[Path] = []
    # Snapshots have checksums.
    for path in checkpoints if ema_sigma is None else ():
        unverified += Checkpoint(path, key=key, prefix=prefix).unverified
    ui.check_output(output, checkpoints, overwrite=overwrite)
    import torch

    from modkit.averaging.checkpoints import average_checkpoints

    facts: dict[str, Any] = {"output": os.fspath(output), "checkpoints": len(checkpoints)}
    torch_dtype = getattr(torch, dtype) if dtype else None
    averages: Mapping[str, Tensor]
    if ema_sigma is None:
        with ui.progress("averaging", 1.0) as bar:
            averages = average_checkpoints(
                checkpoints, weights, key=key, prefix=prefix, dtype=torch_dtype, progress=bar
            )
    else:
        averages, fit = _reconstructed(checkpoints, ema_sigma, torch_dtype, step)
        facts |= fit

    facts["tensors"] = _save(averages, prefix, output)
    ui.warn_unverified(unverified)
    if as_json:
        ui.print_json(facts)
        return
    if "sigma_rel" in facts:
        ui.say(
            f"sigma_rel {facts['sigma_rel']:g} at step {facts['step']} from {facts['snapshots']} "
            f"snapshots: relative error of the fit {facts['fit_error']:.2g}"
        )
    ui.say(f"{facts['output']}: the average of {facts['checkpoints']}, {facts['tensors']} tensors")


def _save(averages: "Mapping[str, Tensor]", prefix: str, output: Path) -> int:
    """Write the tensors whose names have a prefix, without it; return their number."""
    names = [name for name in averages if name.startswith(prefix)]
    if not names:
        raise ValueError(f"no name begins with --prefix {prefix!r}; the first is {min(averages)!r}")

    chosen = OrderedDict((name.removeprefix(prefix), averages[name].contiguous()) for name in names)
    # With a dot at its end, the path of a module begins with the prefix as its tensors do.
    versions = {
        f"{path}.".removeprefix(prefix).removesuffix("."): entry
        for path, entry in getattr(averages, "_metadata", {}).items()
        if f"{path}.".startswith(prefix)
    }
    if output.suffix == ".safetensors":
        save_safetensors(chosen, output, versions)
    else:
        from modkit.files.checkpoints import save_checkpoint

        if versions:
            vars(chosen)["_metadata"] = versions
        save_checkpoint(chosen, output)
    return len(chosen)


def _reconstructed(
    checkpoints: Sequence[Path], sigma_rel: float, dtype: "torch.dtype | None", step: int | None
) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Return the average of a width, at a step, from snapshots, and facts of the fit."""
    from modkit.averaging import posthoc
    from modkit.averaging.checkpoints import cast

    is_folder = len(checkpoints) == 1 and checkpoints[0].is_dir()
    snapshots = checkpoints[0] if is_folder else checkpoints
    with ui.progress("reconstructing"):
        result = posthoc.reconstruct(snapshots, sigma_rel, step)

    averages = {
        name: cast(name, average, str(average.dtype)[6:], dtype)
        for name, average in result.averages.items()
    }
    facts = {
        "sigma_rel": result.sigma_rel,
        "step": result.step,
        "snapshots": len(result.snapshots),
        "fit_error": result.fit.error,
    }
    # Buffers are those of a snapshot, not averaged: integers among them keep their dtype.
    return {**averages, **result.buffers}, facts
