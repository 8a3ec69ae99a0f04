"""Programs that declare nothing do not import the folder."""

from tests.processes import python


CODE = """
import sys, torch, modkit
model = torch.nn.BatchNorm1d(2)
modkit.load_state_dict(model, model.state_dict())
modkit.EMA(model, buffers="ignore")
assert not [name for name in sys.modules if name.startswith("modkit.migrations")]
from modkit import migrations
assert migrations is modkit.migrations
"""


def test_modkit_does_not_import_migrations():
    """Importing modkit, its loader and its averages leaves ``modkit.migrations`` out."""
    done = python(CODE)

    assert done.returncode == 0, done.stderr
