"""``modkit`` and ``python -m modkit``: the command line."""

import importlib.util
import sys

from modkit._messages import install_extra


def main() -> None:
    """Run the command line, or exit with an error if the extra ``cli`` is not installed."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        sys.exit(f"Error: the command line needs {names}. {install_extra('cli')}")
    # Only now, because it imports both.
    from modkit.cli._commands import commands

    # Click would call the program __main__.py in usage lines.
    commands(prog_name="python -m modkit" if sys.argv[0].endswith("__main__.py") else "modkit")


if __name__ == "__main__":
    main()
