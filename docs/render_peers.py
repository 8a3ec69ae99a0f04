"""The tables of docs/comparison.md: modkit and other libraries, from docs/peers.json.

python docs/render_peers.py --run    # run every cell of the tables of features first

`--run` needs the libraries of `nox -s ecosystem`. The times are those of the last `nox -s peers`.
"""

import importlib
import sys
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import render_bench
from blocks import ROOT, fill, read, table, write


AVERAGES = {
    "modkit": "`EMA`, `PostHocEMA`",
    "torch": "`AveragedModel` with `get_ema_multi_avg_fn`",
    "timm": "`ModelEmaV3`",
    "ema-pytorch": "`EMA`, `PostHocEMA`",
    "diffusers": "`EMAModel`",
    "torch_ema": "`ExponentialMovingAverage`",
    "Lightning": "`EMAWeightAveraging`",
}
STATE_DICTS = {
    "modkit": "`migrations`, `load_state_dict`, `load_matching`",
    "torch": "`load_state_dict`",
    "timm": "`load_checkpoint`",
    "diffusers": "`from_pretrained`",
    "transformers": "`register_checkpoint_conversion_mapping`, `from_pretrained`, `save_pretrained`",
    "Lightning": "`load_from_checkpoint`",
}


def compared(versions: dict[str, str | None], used: dict[str, str]) -> str:
    """Name the classes or functions that were compared, with the versions of their libraries."""
    named = [f"{name} {versions[name] or ''}".strip() + f" ({used[name]})" for name in used]
    return fill(f"Compared: {', '.join(named)}.")


def features(
    libraries: list[str], wanted: list[str] | None = None, found: dict[str, Any] | None = None
) -> str:
    """Return a table of features, or the wanted rows of it, for some of the libraries.

    Args:
        libraries: The columns.
        wanted: The rows. Default: all.
        found: The results. Default: those of averages.
    """
    found = found or read("peers")
    columns = [found["libraries"].index(library) for library in libraries]
    rows = (
        [feature, *(outcomes[column] for column in columns)]
        for feature, outcomes in found["features"].items()
        if wanted is None or feature in wanted
    )
    return table(["feature", *libraries], rows)


def times(name: str) -> str:
    """Return a table of times."""
    found = read("peers")["times"][name]
    return table([name, *found["columns"]], found["rows"])


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    found = read("peers")
    loads = found["state_dicts"]
    return {
        "features": f"{features([*AVERAGES])}\n\n{compared(found['versions'], AVERAGES)}",
        "features of loading": (
            f"{features([*STATE_DICTS], found=loads)}\n\n{compared(loads['versions'], STATE_DICTS)}"
        ),
        "times of averages": f"{times('update')}\n\n{times('swap')}",
        "times of files": render_bench.files(),
    }


def outcomes(folder: str, libraries: dict[str, str]) -> dict[str, Any]:
    """Run every cell of a table of features, whose tests are in a folder."""
    cases = importlib.import_module(f"tests.integration.{folder}.features")
    names = {library: cases.PEERS[library].distribution for library in libraries}
    return {
        "versions": {
            library: version(name).partition("+")[0] if name else None
            for library, name in names.items()
        },
        "libraries": [*libraries],
        "features": {
            feature: [cases.outcome(feature, library) for library in libraries]
            for feature in cases.FEATURES
        },
    }


def run() -> dict[str, Any]:
    """Run every cell of the tables of features."""
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    return {
        **read("peers"),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        **outcomes("averaging_peers", AVERAGES),
        "state_dicts": outcomes("state_dict_peers", STATE_DICTS),
    }


if __name__ == "__main__":
    from render import write_pages

    if "--run" in sys.argv[1:]:
        write("peers", run())
    write_pages()
