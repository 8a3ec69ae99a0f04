import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.unit.test_public_face import public_objects


# The namespaces whose objects replace those of torch.
DROP_INS = {"modkit.nn", "modkit.jit", "modkit.optim.swa_utils"}


def torch_object(path: str) -> Any:
    """Return the object of torch at the same path as one of modkit; None if there is none."""
    names = path.split(".")[1:]
    found: Any = torch
    for name in names:
        found = getattr(found, name, None) if found is not None else None
    return found


def objects() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of the drop-ins, and public methods, with their paths."""
    for namespace in sorted(DROP_INS):
        for name, found in public_objects(namespace):
            yield f"{namespace}.{name}", found
            members = vars(found).items() if isinstance(found, type) else ()
            for member, value in members:
                if inspect.isfunction(value) and not member.startswith("__"):
                    yield f"{namespace}.{name}.{member}", value


DOCUMENTED_BY_TORCH = {
    path: found
    for path, found in objects()
    # From Python 3.13 on, None has a docstring.
    if torch_object(path) is not None and torch_object(path).__doc__
}


@for_each("path", DOCUMENTED_BY_TORCH)
def test_help_is_that_of_torch_and_then_what_differs(path: str) -> None:
    """Torch's docstring of the installed release comes first; a part of modkit's may follow."""
    found = DOCUMENTED_BY_TORCH[path]
    theirs, shown = inspect.getdoc(torch_object(path)), inspect.getdoc(found)
    difference = shown.removeprefix(theirs)

    assert f"{found.__module__}.{found.__qualname__}" == path
    assert shown.startswith(theirs)
    assert difference == "" or difference.startswith("\n\nmodkit: ")
    assert difference.count("\nmodkit: ") <= 1


# Torch is compiled anew for such a process.
@pytest.mark.slow
def test_without_docstrings() -> None:
    """With ``python -OO`` there are no docstrings, and everything else works."""
    code = """
import pydoc, torch, modkit, modkit.jit
from modkit.optim import swa_utils
net = modkit.nn.Module()
net.child = torch.nn.Linear(2, 1)
net.load_state_dict(net.float().train().state_dict())
average = swa_utils.AveragedModel(net)
average.update_parameters(net)
print(torch.nn.Module.to.__doc__, modkit.nn.Module.to.__doc__, modkit.jit.load.__doc__)
print("to(self" in pydoc.plain(pydoc.render_doc(modkit.nn.Module.to)))
print(int(average.n_averaged))
"""
    command = [sys.executable, "-B", "-OO", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.stderr == ""
    assert run.stdout.splitlines() == ["None None None", "True", "1"]
