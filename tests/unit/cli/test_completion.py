"""Shell completion in real shells, with the lines of the documentation; skipped where a shell is missing."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest


PAGE = Path(__file__).resolve().parents[3] / "docs" / "command_line.md"
MAIN = "from modkit.__main__ import main; main()"
PROMPT = "ready> "
# How each shell is started without the user's files, and how its prompt is set.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], f"PS1='{PROMPT}'"),
    "zsh": (["zsh", "-f", "-i"], f"PROMPT='{PROMPT}'; autoload -Uz compinit; compinit -u -D"),
}


def documented(shell: str) -> str:
    """Return the line for the start-up file of a shell."""
    found = re.search(
        rf"^\$ (.*_MODKIT_COMPLETE={shell}_source .*)$", PAGE.read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which ``modkit`` is a command."""
    command = tmp_path / "bin" / "modkit"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'modkit'\n{MAIN.replace('; ', chr(10))}\n"
    )
    command.chmod(0o755)
    search = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": search, "TERM": "dumb", "HOME": str(tmp_path)}


class Terminal:
    """An interactive shell in a terminal."""

    def __init__(self, shell: str, environment: dict[str, str]) -> None:
        command, prompt = SHELLS[shell]
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.send(f"{prompt}; echo pre''pared\n")
        self.wait_for("prepared")

    def send(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """Return what the shell has printed up to a text."""
        seen, end = "", time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} did not appear in {seen!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                seen += os.read(self._ours, 4096).decode(errors="replace")
        return seen

    def close(self) -> None:
        """End the shell."""
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key(environment: dict[str, str], shell: str) -> None:
    """In an interactive shell, tab completes commands and options."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    terminal = Terminal(shell, environment)
    try:
        terminal.send(f"{documented(shell)}; echo sour''ced\n")
        terminal.wait_for("sourced")
        terminal.send("modkit av\t")
        terminal.wait_for("erage ")
        terminal.send("--ov\t")
        shown = terminal.wait_for("erwrite ")
    finally:
        terminal.close()

    assert "--overwrite " in shown
