"""The properties that all commands share."""

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from modkit import __main__ as entry
from modkit._messages import install_extra
from modkit.averaging import checkpoints
from modkit.cli import convert, inspect, tensor_differences, verify
from modkit.compat import run
from modkit.migrations import files as migrations
from tests.cases import for_each
from tests.processes import python
from tests.unit.cli.command_line import invoke


NAMES = ("average", "compat", "convert", "diff", "inspect", "migrate", "verify")
MAIN = "from modkit.__main__ import main; main()"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Write a state dict with a long name."""
    path = tmp_path / "net.pt"
    torch.save({f"{'encoder.' * 8}weight": torch.ones(2, 3), "bias": torch.ones(3)}, path)
    return path


def test_the_help_of_the_group_names_every_command() -> None:
    """The help has the commands with a whole sentence, examples, statuses and completion."""
    found = invoke("--help").output

    assert "..." not in found.replace("[ARGS]...", "")

    for text in (*NAMES, "Examples:", "130  interrupted", "_MODKIT_COMPLETE=bash_source"):
        assert text in found


@for_each("name", NAMES)
def test_the_help_of_a_command(name: str) -> None:
    """Each command has a help with examples, ``--json`` and the exit statuses, of 80 columns."""
    found = invoke(name, "--help")

    assert found.exit_code == 0
    assert max(map(len, found.output.splitlines())) <= 80
    for text in ("Examples:", f"modkit {name}", "--json", "Exit status:"):
        assert text in found.output


# Each line, and the exit status.
WITHOUT_TORCH = {
    **dict.fromkeys(["--version", "--help", *(f"{name} --help" for name in NAMES)], 0),
    **dict.fromkeys(["nonsense", "diff", "diff --nonsense", "diff {0} absent.pt"], 2),
    **dict.fromkeys(["diff {0} {0} --rtol 1", "compat -n 3", "compat --input 1"], 2),
    **dict.fromkeys(["average {0}", "convert {0}", "migrate {0}", "verify"], 2),
    "convert {0} -o {0}": 1,
    **dict.fromkeys(["inspect {0}", "verify {0}", "diff {0} {0}"], 0),
}


def test_what_needs_no_torch(net: Path) -> None:
    """Help, completion, wrong command lines, and what reads no values: importing torch takes seconds."""
    code = """
import os, sys
sys.modules["torch"] = None  # importing it raises
from click.testing import CliRunner
from modkit.cli._commands import commands
for line in sys.argv[1:]:
    print(CliRunner().invoke(commands, line.split(), prog_name="modkit").exit_code)
os.environ.update(_MODKIT_COMPLETE="bash_complete", COMP_WORDS="modkit di", COMP_CWORD="1")
sys.argv[:] = ["modkit"]
from modkit.__main__ import main
main()
"""
    # In a fresh interpreter: those of python() have imported torch.
    lines = [line.format(net) for line in WITHOUT_TORCH]
    shown = subprocess.check_output([sys.executable, "-c", code, *lines], text=True)

    assert shown.splitlines() == [*map(str, WITHOUT_TORCH.values()), "plain,diff"]


def test_the_version() -> None:
    """``--version`` names the version of the code that runs."""
    as_main = "import runpy; runpy.run_module('modkit', run_name='__main__', alter_sys=True)"
    done = python(as_main, "--version")

    assert done.stdout == f"python -m modkit, version {modkit.__version__}\n"


def test_the_version_in_a_checkout_that_is_not_installed() -> None:
    """The version is that of the code, whatever packages are installed under the name modkit."""
    code = "import importlib.metadata as m; m.distribution = m.distributions = m.version = None;"
    found = python(f"{code} import sys; sys.argv[:] = ['modkit', '--version']; {MAIN}")

    assert (found.stdout, found.stderr) == (f"modkit, version {modkit.__version__}\n", "")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch) -> None:
    """Without the extra, the command line names the missing library and how to install it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "click" else find(name)
    )
    with pytest.raises(SystemExit) as ended:
        entry.main()

    assert ended.value.code == f"Error: the command line needs click. {install_extra('cli')}"


@for_each("width", [80, 40])
@for_each("line", ["inspect {0}", "compat --area members"])
def test_tables_fit_the_terminal(net: Path, monkeypatch, line: str, width: int) -> None:
    """No line is wider than the terminal, and long names are folded, not cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    found = invoke(*line.format(net).split()).stdout

    assert max(map(len, found.splitlines())) <= width
    assert "…" not in found
    letters = "".join(row.split("│")[1] for row in found.splitlines() if "│" in row)
    name = f"{'encoder.' * 8}weight"
    assert (name in "".join(letters.split())) == ("{0}" in line)


@for_each("columns", ["0", "wide"])
def test_columns_without_a_width(net: Path, monkeypatch, columns: str) -> None:
    """The width is that without the variable, as for other programs in Python."""
    monkeypatch.delenv("COLUMNS", raising=False)
    expected = invoke("inspect", net).stdout
    monkeypatch.setenv("COLUMNS", columns)

    assert invoke("inspect", net).stdout == expected != ""


@for_each("line", ["inspect {0}", "diff {0} {0}"])
def test_characters_that_the_encoding_lacks(net: Path, line: str) -> None:
    """They are escaped, as in errors: a locale may be ASCII, and a pipe of Windows has a code page."""
    path = net.with_name("gewicht_\N{LATIN SMALL LETTER A WITH DIAERESIS}.pt")
    torch.save({"\N{GREEK SMALL LETTER ALPHA}": torch.ones(1)}, path)
    ascii_only = "import sys; sys.stdout.reconfigure(encoding='ascii'); "
    done = python(ascii_only + MAIN, *line.format(path).split(), finalize=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe4" in done.stdout or "\\u03b1" in done.stdout


def test_the_json_of_each_command(net: Path) -> None:
    """``--json`` prints one JSON document."""
    out = net.with_name("out.pt")
    facts = json.loads(invoke("average", net, net, "-o", out, "--json").stdout)

    assert facts == {"output": str(out), "checkpoints": 2, "tensors": 2}
    assert json.loads(invoke("inspect", net, "--json").stdout)["kind"] == "torch.save file"
    assert json.loads(invoke("compat", "--area", "members", "--json").stdout)["areas"]
    assert json.loads(invoke("diff", net, net, "--json").stdout)["equal"]


@for_each(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.pt"), 1, "No space left on device"),
        (MemoryError(), 1, "Error: MemoryError\n"),
        (RuntimeError("a\x1b[31m\nb"), 1, r"Error: a\x1b[31m\nb"),
        (RuntimeError("\n        Some.\n        More.\n    "), 1, "Error: Some. More.\n"),
    ],
    ids=["Ctrl-C", "full disk", "memory", "forged", "paragraphs"],
)
@for_each(
    ("line", "where"),
    [
        ("average {0} -o {0}.out", (checkpoints, "average_checkpoints")),
        ("compat", (run, "run")),
        ("convert {0} -o {0}.out", (convert, "_write")),
        ("diff {0} {0} --values", (tensor_differences, "largest_difference")),
        ("inspect {0}", (inspect, "show")),
        ("migrate {0} --dry-run --model torch.nn:Module", (migrations, "plan_file")),
        ("verify {0}", (verify, "_model_files")),
    ],
    ids=NAMES,
)
def test_errors_are_one_line(
    net: Path, monkeypatch, line: str, where: Any, error: BaseException, status: int, message: str
) -> None:
    """Ctrl-C, a full disk and other errors end each command in one line with its exit status.

    The status of an error is 2 for ``diff``, whose 1 says that two checkpoints differ.
    """

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*where, failing)
    found = invoke(*line.format(net).split())

    assert found.exit_code == (2 if line.startswith("diff") and status == 1 else status)
    assert found.stderr.count("\n") == 1
    assert message in found.stderr


CLOSED = "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1); "
# Without its buffer, which an environment may take from it, Python ignores a part that was left out.
FULL = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
    "sys.stdout = open(1, 'w', closefd=False); "
)


@for_each(
    ("line", "why", "status", "error"),
    [
        ("--help", CLOSED, 0, ""),
        ("inspect {0} --limit 2000", CLOSED, 0, ""),
        ("diff {0} {1} --limit 2000 --json", CLOSED, 1, ""),
        ("verify {0} {2}", CLOSED, 1, "Error: 1 of 2 files failed\n"),
        ("inspect {0} --limit 2000 --json", FULL, 1, "Error: [Errno 27] File too large\n"),
        ("diff {0} {1} --limit 2000", FULL, 2, "Error: [Errno 27] File too large\n"),
    ],
)
def test_output_that_cannot_be_written(
    tmp_path: Path, line: str, why: str, status: int, error: str
) -> None:
    """A closed pipe is not an error and hides none, a full disk is one line."""
    paths = [tmp_path / name for name in ("net.pt", "other.pt", "empty.pt")]
    torch.save({f"{n}": torch.ones(1) for n in range(300)}, paths[0])
    torch.save({f"{n}": torch.ones(2) for n in range(300)}, paths[1])
    paths[2].touch()
    done = python(f"{why}{MAIN}", *line.format(*paths).split(), finalize=True)

    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@for_each("line", ["--help", "--version", "inspect {0}", "diff {0} {0}"])
def test_a_full_disk_is_reported_once(net: Path, line: str) -> None:
    """As the process ends, it does not try again to write the rest of the output."""
    buffered = "import sys; sys.stdout = open(1, 'w', closefd=False); "
    done = python(buffered + MAIN, *line.format(net).split(), stdout="/dev/full", finalize=True)

    assert done.stderr == "Error: [Errno 28] No space left on device\n"
    assert done.returncode == (2 if line.startswith("diff") else 1)


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys) -> None:
    """The bar goes to standard error, only if that is a terminal, and fits 80 columns with its percentage."""
    from modkit.cli._tables import progress

    with progress("averaging", 1.0) as bar:
        bar(0.5)
    plain = capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with progress(f"averaging {'a_long_name_of_a_file.pt ' * 8}", 1.0) as bar:
        bar(0.5)
    shown = capsys.readouterr()

    assert plain == ("", "")
    assert shown.out == ""
    assert "averaging" in shown.err
    assert "50%" in shown.err
