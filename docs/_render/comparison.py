"""The tables of docs/comparison.md: averages of modkit and of other libraries.

The times are those of the last `nox -s peers`.
"""

from _render.markdown import fill, table
from _render.stored_results import read


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


def features(libraries: list[str], selected: list[str] | None = None) -> str:
    """Return the table of features, or the selected rows of it, for some of the libraries."""
    found = read("averaging_libraries")
    columns = [found["libraries"].index(library) for library in libraries]
    rows = (
        [feature, *(outcomes[column] for column in columns)]
        for feature, outcomes in found["features"].items()
        if selected is None or feature in selected
    )
    return table(["feature", *libraries], rows)


def times(name: str) -> str:
    """Return a table of times."""
    found = read("averaging_libraries")["times"][name]
    return table([name, *found["columns"]], found["rows"])


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    found = read("averaging_libraries")
    return {
        "features": f"{features(found['libraries'])}\n\n{compared(found['versions'])}",
        "times of averages": f"{times('update')}\n\n{times('swap')}",
    }
