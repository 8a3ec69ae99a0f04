import copy

import pytest
import torch

from tests.helpers import Implementation


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lora(impl: Implementation) -> None:
    """LoRA of peft wraps a linear layer, trains its own weights alone, and merges them."""
    peft = pytest.importorskip("peft", reason="needs peft: nox -s ecosystem installs it")
    net = impl.nn.Sequential(impl.nn.Linear(4, 8), impl.nn.ReLU(), impl.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected, before = net(x), copy.deepcopy(net.state_dict())
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    model = peft.get_peft_model(net, config)
    wrapped = model(x)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    trained = model(x)

    merged = model.merge_and_unload()

    assert torch.equal(wrapped, expected)
    assert not torch.equal(trained, expected)
    assert type(merged[0]) is impl.nn.Linear
    torch.testing.assert_close(merged(x), trained)
    assert not torch.equal(merged[0].weight, before["0.weight"])
