"""Programs under ``python -O``, ``-OO``, ``-W error`` and development mode."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.cases import for_each


FLAGS: Final = [["-O"], ["-OO"], ["-W", "error"], ["-bb"], ["-X", "dev"], ["-I"]]
# Without assert, which -O removes. It prints what must be the same under each flag.
PROGRAM: Final = '''
import copy, inspect, pickle, sys, tempfile, warnings
sys.path[:0] = {path!r}
from pathlib import Path

import modkit
import modkit.migrations
import modkit.nn as nn
import torch
from modkit import jit
from modkit.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn


class Net(nn.Module):
    """A network."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        """Return one number for each row."""
        return self.head(self.body(x))


torch.manual_seed(0)
net, x = Net(), torch.randn(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
ema, swa = modkit.EMA(net, decay=0.9), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for _ in range(3):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    ema.update()
    swa.update_parameters(net)
SWALR(optimizer, 0.05)
update_bn([x], swa)
print([value.tolist() for value in net.state_dict().values()])
net.eval()
with ema.applied():
    print(net(x).tolist())
print(swa(x).tolist())

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "net.pt"
    modkit.save_checkpoint(dict(net=net.state_dict(), ema=ema.state_dict()), file)
    loaded = modkit.load_checkpoint(file)
    print(Net().load_state_dict(loaded["net"]), ema.load_state_dict(loaded["ema"]))
    mean = modkit.average_checkpoints([file, file], key="net")
    print(sorted(mean))

with modkit.fast_inference(net):
    print(net(x).tolist())
with warnings.catch_warnings():
    # TorchScript itself is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = jit.trace(net, x)
print(scripted(x).tolist())
print(copy.deepcopy(net)(x).tolist(), pickle.loads(pickle.dumps(net))(x).tolist())
print(modkit.load_state_dict(net, dict(net.state_dict()), strict=True))
print(inspect.signature(modkit.EMA), inspect.signature(nn.Module.state_dict))

for wrong in (
    lambda: net.load_state_dict({{}}),
    lambda: modkit.EMA(net, decay=2.0),
    lambda: net.add_module("a.b", None),
    lambda: net.register_parameter("body", None),
    lambda: modkit.load_checkpoint("missing.pt"),
    lambda: modkit.average_checkpoints([]),
    lambda: modkit.load_state_dict(3, {{}}),
    lambda: ema.load_state_dict(dict(a=1)),
):
    try:
        wrong()
    except Exception as error:
        print(type(error).__name__, error, *getattr(error, "__notes__", ()))
print("end")
'''


def run(flags: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the program in a process of its own."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(path=[path for path in sys.path if path]), encoding="utf-8")
    return subprocess.run(
        [sys.executable, *flags, str(program)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": ""},
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run the program without flags, and return the lines that it prints."""
    result = run([], tmp_path_factory.mktemp("plain"))
    lines = result.stdout.splitlines()
    assert lines[-1:] == ["end"], result.stderr
    return lines


@pytest.mark.slow
@for_each("flags", FLAGS, ids=[" ".join(flags) for flags in FLAGS])
def test_a_program_prints_the_same(flags: list[str], tmp_path: Path, plain: list[str]) -> None:
    """Assertions and docstrings that are gone, and warnings that are errors, change no result."""
    result = run(flags, tmp_path)

    assert result.stderr == ""
    assert result.stdout.splitlines() == plain
