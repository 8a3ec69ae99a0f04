"""``modkit`` and ``python -m modkit``: the command line."""

import importlib.util
import sys
from pathlib import Path


NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line, or exit with an error if the extra ``cli`` is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"Error: the command line needs {' and '.join(missing)}: pip install modkit[cli]")
    from modkit.cli._commands import commands

    script = Path(sys.argv[0]).name != "__main__.py"
    commands(prog_name="modkit" if script else "python -m modkit")


if __name__ == "__main__":
    main()
