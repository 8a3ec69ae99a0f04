"""The tables of docs/comparison.md: modkit and other libraries.

The times are those of the last `nox -s peers`.
"""

from _render.markdown import fill, table
from _render.measured_code import note
from _render.stored_results import read


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
    libraries: list[str],
    selected: list[str] | None = None,
    results: str = "averaging_libraries",
) -> str:
    """Return a table of features for some of the libraries.

    Args:
        libraries: The columns.
        selected: The rows. Default: all.
        results: Name of the stored results.
    """
    stored = read(results)
    columns = [stored["libraries"].index(library) for library in libraries]
    rows = (
        [feature, *(outcomes[column] for column in columns)]
        for feature, outcomes in stored["features"].items()
        if selected is None or feature in selected
    )
    return table(["feature", *libraries], rows)


def times(name: str) -> str:
    """Return a table of times."""
    found = read("averaging_libraries")["times"][name]
    return table([name, *found["columns"]], found["rows"])


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    averages, state_dicts = read("averaging_libraries"), read("state_dict_libraries")
    loading = features([*STATE_DICTS], results="state_dict_libraries")
    return {
        "features": f"{features([*AVERAGES])}\n\n{compared(averages['versions'], AVERAGES)}",
        "features of loading": f"{loading}\n\n{compared(state_dicts['versions'], STATE_DICTS)}",
        "times of averages": "\n\n".join(
            [times("update"), times("swap"), *filter(None, [note("averaging_libraries")])]
        ),
    }
