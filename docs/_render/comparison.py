"""The tables of docs/comparison.md: modkit and other libraries.

The times are those of the last `nox -s peers`.
"""

from _render.markdown import fill, table
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

# The rows of the tables of times: the name in benchmarks/averaging_contestants.py, and the row's.
CONTESTANTS = {
    "update": {
        "modkit.EMA": "modkit `EMA`",
        "modkit AveragedModel": "modkit `AveragedModel` with `multi_avg_fn`",
        "torch AveragedModel": "torch `AveragedModel` with `multi_avg_fn`",
        "Lightning EMAWeightAveraging": "Lightning `EMAWeightAveraging`",
        "timm ModelEmaV3": "timm `ModelEmaV3`",
        "ema-pytorch EMA": "ema-pytorch `EMA`, `use_foreach=True`",
        "modkit.EMA(buffers='ignore')": 'parameters only: modkit `EMA(buffers="ignore")`',
        "diffusers EMAModel": "parameters only: diffusers `EMAModel`, `foreach=True`",
        "torch_ema": "parameters only: torch_ema",
    },
    "swap in and out": {
        "modkit.EMA": "modkit `applied()`",
        "Lightning EMAWeightAveraging": "Lightning, its two calls around validation",
        "modkit.EMA(buffers='ignore')": 'parameters only: modkit `applied()`, `buffers="ignore"`',
        "torch_ema": "parameters only: torch_ema `average_parameters()`",
        "diffusers EMAModel": "parameters only: diffusers `store()`, `copy_to()`, `restore()`",
    },
}
# Its models whose averages are in float32, and the column of each.
MODELS = {
    "512 Linear + BatchNorm, averages in float32": "512 Linear + BatchNorm",
    "ResNet-50, averages in float32": "ResNet-50",
    "GPT-2 small, fp32, averages in float32": "GPT-2 small",
}


# The same on a GPU, which has one more: bf16 weights whose averages are in float32.
GPU_MODELS = {**MODELS, "GPT-2 small, bf16, averages in float32": "GPT-2 small, bf16 weights"}


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


def medians(operation: str) -> dict[tuple[str, str], float]:
    """Return the milliseconds of an operation with evicted caches, by model and contestant."""
    return {
        (row["case"], row["name"]): row["quartiles_ms"][1]
        for row in read("averaging_libraries")["times"]["rows"]
        if row["operation"] == operation and row["timed"] == "evicted"
    }


def times(operation: str) -> str:
    """Return a table of the times of an operation."""
    found = medians(operation)
    rows = (
        [title, *(digits(found[model, name]) for model in MODELS)]
        for name, title in CONTESTANTS[operation].items()
        if all((model, name) in found for model in MODELS)
    )
    return table([operation, *MODELS.values()], rows)


def gpu_times(operation: str) -> str:
    """Return a table of the times of an operation on a GPU: until it returns, and until it is done."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in read("averaging_libraries")["gpu_times"]["rows"]:
        if row["operation"] == operation:
            cell = found.setdefault((row["case"], row["name"]), {})
            cell[row["timed"]] = digits(row["quartiles_ms"][1])
    rows = (
        [
            title,
            *(
                "{launched} / {finished}".format(**found[m, name]) if (m, name) in found else ""
                for m in GPU_MODELS
            ),
        ]
        for name, title in CONTESTANTS[operation].items()
    )
    return table([operation, *GPU_MODELS.values()], rows)


def gpu_measured() -> str:
    """Return how the times on a GPU were measured."""
    results = read("averaging_libraries")["gpu_times"]
    rounds = [row["times"] for row in results["rows"]]
    return fill(
        "Milliseconds on a clock, until the call returns / until the device is done: medians of "
        f"{min(rounds)} to {max(rounds)} interleaved rounds, {results['machine']} "
        f"({results['date']}). A call of the first kind finds the device idle; starting a kernel "
        "takes about 10 us on that virtual machine. Empty where a library has no such averages. "
        "modkit is slower than timm and diffusers where bf16 weights have float32 averages: it "
        "casts them in parts, for averages that are bitwise identical on every device. The parts "
        "were half as large in this run as they are now."
    )


def digits(milliseconds: float) -> str:
    """Return a time with two digits, or the digits before the point."""
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:#.2g}"


def measured() -> str:
    """Return how the times were measured."""
    results = read("averaging_libraries")["times"]
    rounds = [row["times"] for row in results["rows"] if row["timed"] == "evicted"]
    text = (
        "Milliseconds of CPU time with evicted caches: medians of "
        f"{min(rounds)} to {max(rounds)} interleaved rounds, {results['machine']}, float32 averages "
        f"with a decay of 0.999 ({results['date']}). *Parameters only* rows leave buffers out."
    )
    return fill(text)


def blocks() -> dict[str, str]:
    """Return the blocks of the page."""
    averages, state_dicts = read("averaging_libraries"), read("state_dict_libraries")
    loading = features([*STATE_DICTS], results="state_dict_libraries")
    return {
        "features": f"{features([*AVERAGES])}\n\n{compared(averages['versions'], AVERAGES)}",
        "features of loading": f"{loading}\n\n{compared(state_dicts['versions'], STATE_DICTS)}",
        "times of averages": "\n\n".join([measured(), *map(times, CONTESTANTS)]),
        "times on a GPU": "\n\n".join([gpu_measured(), *map(gpu_times, CONTESTANTS)]),
    }
