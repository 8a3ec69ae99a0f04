"""Write the lines per capability into CONTRIBUTING.md: `python docs/count_lines.py`."""

import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "modkit"
PAGE = ROOT / "CONTRIBUTING.md"
# Files and folders of each capability. Everything else counts as the foundation.
CAPABILITIES = {
    "`Module`": ("nn",),
    "`EMA`, schedules, `EMACallback`, `PostHocEMA`": ("averaging", "schedules.py"),
    "`torch.optim.swa_utils`": ("optim",),
    "sharded averages": ("distributed.py",),
    "Lightning, transformers": ("integrations",),
    "TorchScript": ("jit",),
    "checkpoints and other files": ("files", "checkpoints.py"),
    "`fast_inference`": ("fast_inference",),
    "EfficientZero": ("models",),
    "`modkit compat`": ("compat", "cli/compat.py"),
    "other commands": ("cli", "__main__.py"),
    "foundation": ("",),
}


def count() -> dict[str, tuple[int, int]]:
    """Return the number of files and of lines of each capability."""
    rest = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    found = {}
    for name, parts in CAPABILITIES.items():
        files = [
            f for f in rest if any(f == part or f.startswith(part and f"{part}/") for part in parts)
        ]
        lines = sum(rest.pop(file).read_text(encoding="utf-8").count("\n") for file in files)
        found[name] = (len(files), lines)
    return found


def table() -> str:
    """Render the counts in Markdown, the largest first, with their sum."""
    rows = sorted(count().items(), key=lambda row: -row[1][1])
    total = tuple(map(sum, zip(*(numbers for _, numbers in rows), strict=True)))
    lines = [
        f"| {name} | {files} | {lines:,} |" for name, (files, lines) in [*rows, ("sum", total)]
    ]
    return "\n".join(["| capability | files | lines |", "|---|--:|--:|", *lines])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    block = re.compile("(?<=<!-- lines -->\n\n).*?(?=\n\n<!-- end of lines -->)", re.DOTALL)
    PAGE.write_text(block.sub(lambda _: table(), text), encoding="utf-8")
