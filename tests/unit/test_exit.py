from pathlib import Path

from tests.processes import python


# Modules of an older import are cleared last, so torch keeps the objects until after those of modkit
# are cleared. sys keeps the modules, since one that nothing refers to is not cleared, but deleted.
PROGRAM = """
import sys
import warnings
import torch
import modkit
from modkit.optim.swa_utils import AveragedModel

warnings.simplefilter("ignore")
models = [torch.nn.Linear(2, 2).eval() for _ in range(6)]
ema, called = modkit.EMA(models[0], 0.5), modkit.EMA(models[1], [0.5, 0.9])
averaged, post_hoc = AveragedModel(models[2]), modkit.PostHocEMA(models[3], sys.argv[1])
callback = modkit.EMACallback(models[4], torch.optim.SGD(models[4].parameters(), lr=0.1), decay=0.5)
for one in (ema, called, post_hoc, callback.ema):
    one.update()
averaged.update_parameters(models[2])
with ema.applied(), modkit.fast_inference(models[5]), torch.no_grad():
    called(models[5](torch.ones(3, 2)))
# The program ends inside these blocks.
callback.on_validation_start()
blocks = [ema.applied(), modkit.fast_inference(models[0]), modkit.fast_inference(models[5])]
blocks += [modkit.EMACallback(models[4]).evaluating()]
for block in blocks:
    block.__enter__()
torch.kept = [*blocks, ema, called, averaged, post_hoc, callback, modkit.jit.script(models[5])]
sys.kept = [module for name, module in sys.modules.items() if name.startswith("modkit.")]
"""


def test_objects_that_outlive_the_names_of_modkit_end_in_silence(tmp_path: Path) -> None:
    """As an interpreter ends, models, averages and blocks are deleted without an error on stderr."""
    found = python(PROGRAM, tmp_path, finalize=True)

    assert (found.returncode, found.stderr) == (0, "")
