"""The pairs of code blocks in docs/migration.md, and what they run on."""

import re
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.integration.pages import DOCS


PAGE = DOCS / "migration.md"
_BLOCK = re.compile(
    r"^<!-- recipe: (?P<name>\S+) (?P<side>theirs|ours) -->\n```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def recipes():
    """Return the code of each pair, as `{name: {"theirs": code, "ours": code}}`."""
    found = {}
    for block in _BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        found.setdefault(block["name"], {})[block["side"]] = block["code"]
    return found


def section(heading):
    """Return the first block below a heading that belongs to no recipe: its setup."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    return re.search(r"^```python\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)[1]


def network():
    """Return a small network with buffers of both kinds."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@dataclass
class Run:
    """What a block sees: a model that takes a random walk, and a `validate` that looks at it.

    Two runs of the same seed walk the same way.
    """

    steps: int
    seen: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = network()
        self._noise = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def train_step(self):
        """Move every parameter and running statistic by a random step."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=self._noise), alpha=0.01)
            else:
                tensor.add_(1)

    def validate(self, model):
        """Keep a copy of the floating-point tensors that the evaluation sees."""
        state = model.state_dict()
        self.seen.append(
            {name: value.clone() for name, value in state.items() if value.is_floating_point()}
        )

    def names(self):
        """Return the names that the page's setup gives to the blocks."""
        return {
            "model": self.model,
            "train_step": self.train_step,
            "validate": self.validate,
            "steps": self.steps,
            "steps_per_epoch": 7,
        }
