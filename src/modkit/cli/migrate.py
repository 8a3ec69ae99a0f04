"""``modkit migrate``: a checkpoint of another version of a model, as its classes write it now."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modkit.cli import _tables as ui
from modkit.errors import MigrationError
from modkit.files.tensor_files import Checkpoint


if TYPE_CHECKING:
    import torch


def _numbers(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    """Read classes and versions as Attention=1."""
    numbers: dict[str, int] = {}
    for value in values:
        name, _, number = value.rpartition("=")
        # int() alone would also read -1, 1_0 and a number in spaces.
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{value!r} is not a class and a version such as Attention=1")
        numbers[name] = int(number)
    return numbers


@click.command(epilog=ui.EPILOG)
@click.argument("source", metavar="SRC", type=ui.INPUT)
@click.option(
    "-o", "--output", type=ui.OUTPUT, metavar="DST", help="The safetensors file to write."
)
@click.option(
    "--model", "target", required=True, help="The model: package.module:Net or file.py:make."
)
@click.option("--key", help="Path of the state dict in torch files, as model or ema.module.")
@click.option("--to", multiple=True, callback=_numbers, help="Return to a version: Attention=1.")
@click.option(
    "--version", "saved", multiple=True, callback=_numbers, help="The saved version: Attention=1."
)
@click.option("--overwrite", is_flag=True, help="Replace DST if it exists; never SRC.")
@click.option("--dry-run", is_flag=True, help="Only show what would change; no tensor is read.")
@ui.json_option
def migrate(
    source: Path,
    output: Path | None,
    target: str,
    key: str | None,
    to: dict[str, int],
    saved: dict[str, int],
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Migrate a checkpoint to the present version of a model.

    The classes of the model declare migrations. The model is built without arguments and without
    memory for its tensors. Tensors are read and written one at a time. DST is written atomically.

    \b
    Examples:
      modkit migrate old.pt -o new.safetensors --model my_package:Net --key model
      modkit migrate new.pt --model train.py:make --to Attention=1 --dry-run
    """  # noqa: D301
    if output is None and not dry_run:
        raise click.UsageError("missing option '-o' / '--output'")
    if output is not None and not dry_run:
        ui.check_output(output, [source], overwrite=overwrite)
    import torch

    from modkit.compat.model import Target, TargetError, build
    from modkit.migrations.files import migrate_file, plan_file

    try:
        with torch.device("meta"):
            model = build(Target(target))
    except TargetError as error:
        # Status 2, as for any wrong argument: nothing has been read yet.
        raise click.UsageError(str(error)) from error
    except Exception as error:
        text = f"the model cannot be built without arguments: {type(error).__name__}: {error}"
        raise RuntimeError(text) from error

    goals, versions = _by_class(model, to), _by_class(model, saved)
    with ui.progress("migrating"):
        # Only a dry run has no output, which type checkers cannot know.
        if dry_run or output is None:
            lines = plan_file(model, source, key=key, to=goals, versions=versions)
        else:
            lines = migrate_file(model, source, output, key=key, to=goals, versions=versions)
    ui.warn_unverified(Checkpoint(source, key=key).unverified)
    if as_json:
        # A dry run may name an output, and does not write it.
        written = None if dry_run or output is None else os.fspath(output)
        ui.print_json({"output": written, "changes": lines})
        return
    for line in lines or ["nothing to migrate"]:
        ui.console().print(ui.cell(line), soft_wrap=True)


def _by_class(model: "torch.nn.Module", numbers: dict[str, int]) -> dict[type, int]:
    """Return versions by class, for classes of the model that are named."""
    classes: dict[str, dict[type, None]] = {}
    for module in model.modules():
        classes.setdefault(type(module).__name__, {})[type(module)] = None
    for name in numbers:
        if name not in classes:
            raise MigrationError(f"the model has no module of a class {name}")
        if len(classes[name]) > 1:
            paths = ", ".join(f"{each.__module__}.{each.__qualname__}" for each in classes[name])
            advice = "migrate_file() of modkit.migrations takes classes"
            raise MigrationError(f"the model has several classes {name}: {paths}; {advice}")
    return {next(iter(classes[name])): number for name, number in numbers.items()}
