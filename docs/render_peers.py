"""The tables of docs/comparison.md: averages of modkit and of other libraries, from docs/peers.json.

python docs/render_peers.py --run    # run every cell of the table of features first

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


CLASSES = {
    "modkit": "`EMA`, `PostHocEMA`",
    "torch": "`AveragedModel` with `get_ema_multi_avg_fn`",
    "timm": "`ModelEmaV3`",
    "ema-pytorch": "`EMA`, `PostHocEMA`",
    "diffusers": "`EMAModel`",
    "torch_ema": "`ExponentialMovingAverage`",
    "Lightning": "`EMAWeightAveraging`",
}


def compared(versions: dict[str, str | None]) -> str:
    """Name the classes that were compared, with the versions of their libraries."""
    named = [f"{name} {versions[name] or ''}".strip() + f" ({CLASSES[name]})" for name in CLASSES]
    return fill(f"Compared: {', '.join(named)}.")


def features(libraries: list[str], wanted: list[str] | None = None) -> str:
    """Return the table of features, or the wanted rows of it, for some of the libraries."""
    found = read("peers")
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
    return {
        "features": f"{features(found['libraries'])}\n\n{compared(found['versions'])}",
        "times of averages": f"{times('update')}\n\n{times('swap')}",
        "times of files": render_bench.files(),
    }


def run() -> dict[str, Any]:
    """Run every cell of the table of features."""
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    cases = importlib.import_module("tests.integration.averaging_peers.features")
    peers = importlib.import_module("tests.integration.averaging_peers.peers").PEERS
    names = {library: peers[library].distribution for library in CLASSES}
    return {
        **read("peers"),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "versions": {
            library: version(name).partition("+")[0] if name else None
            for library, name in names.items()
        },
        "libraries": [*CLASSES],
        "features": {
            feature: [cases.outcome(feature, library) for library in CLASSES]
            for feature in cases.FEATURES
        },
    }


if __name__ == "__main__":
    from render import write_pages

    if "--run" in sys.argv[1:]:
        write("peers", run())
    write_pages()
