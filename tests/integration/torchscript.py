"""What the tests of TorchScript share."""

import io
import re
from typing import Any

import pytest
import torch


# Every public entry of torch.jit says so since torch 2.13; it works all the same.
scripted_tests = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


def neutral(text: object) -> str:
    """Leave out of a graph or a dump what tells the library, the source line and the run."""
    shortened = re.sub(r"___torch_mangle_\d+\.| # \S+:\d+:\d+| at 0x[0-9a-f]+", "", str(text))
    return shortened.replace("__torch__.modkit.", "__torch__.torch.")


def layout(scripted: Any) -> list[str]:
    """List classes, attributes and methods of a compiled module and of all below it."""
    dump = neutral(scripted._c.dump_to_str(False, True, False))
    return re.findall(r"^ *(?:module|method) .*|^ *\w+ = ", dump, re.MULTILINE)


def reloaded(scripted: Any) -> Any:
    """Send a compiled module through an archive."""
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)
