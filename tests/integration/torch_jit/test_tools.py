import copy

import torch

import modkit
from modkit import jit, nn
from modkit.optim.swa_utils import AveragedModel
from tests.integration.torchscript import SharedLayer, scripted_tests
from tests.processes import python


pytestmark = scripted_tests


def test_an_archive_loads_in_another_process_with_torch_alone(tmp_path):
    """Plain torch reads what modkit has written, and computes the same."""
    path, x = tmp_path / "net.pt", torch.arange(8.0).view(2, 4)
    module = jit.script(SharedLayer())
    module.save(path)
    code = f"""
import sys, torch
module = torch.jit.load({str(path)!r})
print(module(torch.arange(8.0).view(2, 4)).tolist(), "modkit" in sys.modules)
"""
    done = python(code)

    assert done.stdout == f"{module(x).tolist()} False\n"


def test_an_average_of_a_compiled_network():
    """Weight averaging copies and averages a ScriptModule like any module."""
    module = jit.script(nn.Linear(2, 2))
    ema, averaged = modkit.EMA(module, decay=0.5), AveragedModel(module)
    start = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.add_(2)
    averaged.update_parameters(module)
    ema.update()
    with torch.no_grad():
        module.weight.add_(2)
    averaged.update_parameters(module)
    ema.update()
    with ema.applied(module):
        applied = module.weight.detach().clone()

    torch.testing.assert_close(averaged.module.weight.detach(), start + 3)
    torch.testing.assert_close(applied, start + 3)
    assert isinstance(averaged.module, jit.ScriptModule)


def test_a_compiled_child_moves_with_its_eager_parent():
    """Casts, copies, states and modes of an eager network reach the compiled child in it."""
    net = nn.Sequential(jit.script(SharedLayer()), nn.ReLU())
    copied = copy.deepcopy(net).double().eval()

    assert copied[0].head.weight.dtype == torch.float64
    assert not copied[0].head.training
    assert set(net.state_dict()) == {f"0.{name}" for name in SharedLayer().state_dict()}
    assert copied(torch.ones(1, 4, dtype=torch.float64)).dtype == torch.float64
    assert net[0].head.weight.dtype == torch.float32
