import copy
import functools
import warnings

import pytest
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


def test_records_have_the_names_that_torch_gives_them(tmp_path):
    """Two libraries write the same records under the same names."""
    module = jit.script(nn.Linear(2, 2))
    for name, save in (
        ("ours", module.save),
        ("torch.jit", functools.partial(torch.jit.save, module)),
        ("theirs", module._c.save),
    ):
        (tmp_path / name).mkdir()
        save(str(tmp_path / name / "net.pt"))
    readers = [
        torch._C.PyTorchFileReader(str(tmp_path / name / "net.pt"))
        for name in ("ours", "torch.jit", "theirs")
    ]

    records = [reader.get_all_records() for reader in readers]
    assert records[0] == records[1] == records[2]


@pytest.mark.skipif("none" in torch.backends.quantized.supported_engines, reason="no engine")
def test_quantization_in_place_takes_a_module():
    """A module that is quantized in place is the same object, around what came of it."""
    quantize = pytest.importorskip("torch.ao.quantization.quantize_jit")
    qconfig = {"": torch.ao.quantization.default_qconfig}
    x = torch.randn(8, 4)
    module = jit.script(nn.Sequential(nn.Linear(4, 4)).eval())
    expected = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert quantize.prepare_jit(module, qconfig, inplace=True) is module
        module(x)
        assert quantize.convert_jit(module, inplace=True) is module
        result = module(x)

    assert "quantized::linear" in str(module.inlined_graph)
    torch.testing.assert_close(result, expected, atol=0.2, rtol=0.2)


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


def test_views_refuse_what_a_compiled_type_cannot_do():
    """No way of deleting or adding goes past the compiled type; replacing works in all of them."""
    module = jit.script(SharedLayer())
    other = copy.deepcopy(module)
    children, parameters = module._modules, module._parameters
    for change in (
        lambda: children.pop("head"),
        children.popitem,
        children.clear,
        lambda: children.__delitem__("head"),
        lambda: children.setdefault("more", other.head),
        lambda: children.update(more=other.head),
        lambda: module.head._parameters.pop("weight"),
        lambda: delattr(module, "head"),
        lambda: delattr(module.head, "weight"),
        lambda: module._buffers.__delitem__("mask"),
    ):
        with pytest.raises(RuntimeError, match=r"cannot delete|Can't add"):
            change()
    children.update({"head": other.head})

    assert module.head is other.head
    assert children.setdefault("head") is other.head
    assert list(parameters) == []
    assert list(module._buffers) == ["mask", "count"]
    assert module.head._parameters.get("missing") is None
    with pytest.raises(KeyError, match="missing"):
        module._buffers["missing"]
