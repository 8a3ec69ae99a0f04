import sys

import pytest

import modkit.nn
from modkit.compat.swap import swap_source


SWAPS = {
    "import as": ("import torch.nn as nn", "import modkit.nn as nn"),
    "import of a submodule": (
        "import os, torch.nn.functional as F, torch",
        "import os, modkit.nn.functional as F, torch",
    ),
    "from torch": (
        "from torch import nn, optim as o",
        "from torch import optim as o; from modkit import nn",
    ),
    "from torch alone": ("from torch import nn as n  # why", "from modkit import nn as n  # why"),
    "from nn": (
        "from torch.nn import Module, Linear as L",
        "from modkit.nn import Module, Linear as L",
    ),
    "from nn, star": ("from torch.nn import *", "from modkit.nn import *"),
    "from a module of nn": (
        "from torch.nn.modules.module import _addindent",
        "from modkit.nn.modules.module import _addindent",
    ),
    "from nn, several lines": (
        "from torch.nn import (\n    Module,  # a comment\n    Linear,\n)",
        "from modkit.nn import (\n    Module,  # a comment\n    Linear,\n)",
    ),
    "from torch, several lines": (
        "from torch import (\n    nn,\n    Tensor,\n); x = 1",
        "from torch import \\\n\\\n\\\nTensor; from modkit import nn; x = 1",
    ),
    "in a block": (
        "if x: from torch import Tensor, jit\nelse: y",
        "if x: from torch import Tensor; from modkit import jit\nelse: y",
    ),
    "attributes": (
        "import torch\nx: torch.nn.Module = torch.nn.Linear(1, torch.tensor(1))",
        "import modkit.nn; import torch\nx: modkit.nn.Module = modkit.nn.Linear(1, torch.tensor(1))",
    ),
    "attributes over lines": (
        "import torch\ny = (torch\n  .nn.Linear)",
        "import modkit.nn; import torch\ny = (modkit\n  .nn.Linear)",
    ),
    "plain import": (
        "import torch.nn\nclass Net(torch.nn.Module): pass",
        "import modkit.nn; import torch.nn\nclass Net(modkit.nn.Module): pass",
    ),
    "torch under another name": (
        "import torch as th\nth.jit.script(th.nn.Linear)",
        "import modkit.jit, modkit.nn; import torch as th\nmodkit.jit.script(modkit.nn.Linear)",
    ),
    "optim": (
        "from torch import optim\noptim.swa_utils.AveragedModel(optim.SGD)",
        "import modkit.optim.swa_utils; from torch import optim\nmodkit.optim.swa_utils.AveragedModel(optim.SGD)",
    ),
    "from optim": (
        "from torch.optim import SGD, swa_utils",
        "from torch.optim import SGD; from modkit.optim import swa_utils",
    ),
    "name that modkit lacks": (
        "from torch.optim.swa_utils import AveragedModel, _no_such",
        "from torch.optim.swa_utils import _no_such; from modkit.optim.swa_utils import AveragedModel",
    ),
    "head of the file": (
        '"""Text."""\nfrom __future__ import annotations  # why\nimport torch\ntorch.nn',
        '"""Text."""\nfrom __future__ import annotations; import modkit.nn  # why\nimport torch\nmodkit.nn',
    ),
    "docstring alone": (
        '"""Text."""\n\ntorch.nn.Linear',
        '"""Text."""; import modkit.nn\n\nmodkit.nn.Linear',
    ),
    "block below a comment": (
        "# A\n@torch.jit.script\ndef f(): pass",
        "import modkit.jit  # A\n@modkit.jit.script\ndef f(): pass",
    ),
    "block on the first line": (
        "try: import torch\nfinally: torch.nn",
        "import modkit.nn\ntry: import torch\nfinally: modkit.nn",
    ),
    "text outside ASCII": ('é = "…", torch.nn', 'import modkit.nn; é = "…", modkit.nn'),
}
KEPT = (
    "import torch.nn",
    'mock.patch("torch.nn.Linear")',
    "from .torch import nn",
    "from torch.optim import SGD",
    "import torch\ntorch.nn = 1",
    "import torch\ntorch.nn.NoSuchName",
    "import torch\ntorch.optim.swa_utils._no_such.name",
    "from mine import torch\ntorch.nn.Linear",
    "self.torch.nn.Linear",
)


@pytest.mark.parametrize(("source", "swapped"), SWAPS.values(), ids=SWAPS)
def test_uses_of_torch_become_uses_of_modkit(source, swapped):
    """Imports and attribute chains of torch's namespaces are rewritten, on the lines they are on."""
    found = swap_source(f"{source}\n")

    assert f"{swapped}\n" == found


@pytest.mark.parametrize("source", KEPT, ids=range(len(KEPT)))
def test_the_rest_stays(source):
    """Strings, other modules and names that modkit lacks are not changed."""
    assert source == swap_source(source)


def test_names_in_formatted_strings_are_found_where_python_knows_their_place():
    """From Python 3.12 on f-strings are rewritten; before, the code after them is still right."""
    inner = "modkit" if sys.version_info >= (3, 12) else "torch"

    found = swap_source('import torch\nf"{torch.nn.Linear!r:>{x}}" + torch.nn.Linear')

    assert (
        f'import modkit.nn; import torch\nf"{{{inner}.nn.Linear!r:>{{x}}}}" + modkit.nn.Linear'
        == found
    )


def test_the_swapped_source_uses_modkit():
    """A class that the rewritten source defines derives from modkit's Module."""
    names = {}
    exec(swap_source("import torch\nclass Net(torch.nn.Module): pass"), names)

    assert [modkit.nn.Module] == [*names["Net"].__bases__]
