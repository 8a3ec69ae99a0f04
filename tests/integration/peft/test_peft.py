import pytest
import torch

import modkit
from tests.helpers import Implementation
from tests.integration.image_networks import image_net, images, scaled_net
from tests.integration.networks import agree


REASON = "needs peft: nox -s ecosystem installs it"


def test_lora_and_merge() -> None:
    """LoRA finds its layer for each kind, trains, and merges into layers of the first kind."""
    peft = pytest.importorskip("peft", reason=REASON)

    def scenario(impl: Implementation) -> object:
        net, x = image_net(impl.nn).eval(), images()
        config = peft.LoraConfig(r=2, target_modules=["conv", "head"], init_lora_weights=False)
        model = peft.get_peft_model(net, config)
        adapted = type(net.conv).__name__, type(net.head).__name__
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
        trained = model(x)
        merged = model.merge_and_unload()
        kept = type(merged.conv) is impl.nn.Conv2d and type(merged.head) is impl.nn.Linear
        return adapted, kept, trained, merged, merged(x)

    adapted, kept, trained, _, output = agree(scenario)

    assert adapted == ("Conv2d", "Linear")
    assert kept
    torch.testing.assert_close(output, trained)


def test_modules_to_save() -> None:
    """A user's module is copied for training, and the copy is what the adapter's state holds."""
    peft = pytest.importorskip("peft", reason=REASON)

    def scenario(impl: Implementation) -> object:
        net = impl.nn.Sequential()
        net.add_module("body", scaled_net(impl.nn).eval())
        net.add_module("head", impl.nn.Linear(3, 2))
        config = peft.LoraConfig(r=2, target_modules=["head"], modules_to_save=["body"])
        model, x = peft.get_peft_model(net, config), images()
        model(x).square().sum().backward()
        trained = [name for name, p in model.named_parameters() if p.grad is not None]
        return trained, peft.get_peft_model_state_dict(model), model(x)

    trained, state, _ = agree(scenario)

    assert any(name.endswith("body.modules_to_save.default.scale") for name in trained)
    assert any(name.endswith("body.shift") for name in state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_averages_follow_the_layers_that_are_wrapped() -> None:
    """A running average goes on under the names of peft, and those of the adapter begin as copies."""
    peft = pytest.importorskip("peft", reason=REASON)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ema = modkit.EMA(net, 0.9)
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1)
        ema.update()
    before = {name: value.clone() for name, value in ema.named_averages()}
    peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"]))
    ema.rebind()
    found = dict(ema.named_averages())

    for name in ("weight", "bias"):
        assert torch.equal(found[f"0.base_layer.{name}"], before[f"0.{name}"])
        assert torch.equal(found[f"2.{name}"], before[f"2.{name}"])
    assert torch.equal(found["0.lora_A.default.weight"], net[0].lora_A.default.weight)
