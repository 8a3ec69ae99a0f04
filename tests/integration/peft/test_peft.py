from collections.abc import Callable
from typing import Any

import pytest
import torch

import modkit


REASON = "needs peft: nox -s ecosystem installs it"


def lora(**options: Any) -> Any:
    """Return a configuration that adapts the first layer, with an effect from the start."""
    peft = pytest.importorskip("peft", reason=REASON)
    return peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **options)


def take_steps(ema: Any, count: int = 3) -> None:
    """Change all parameters, and update."""
    for step in range(count):
        with torch.no_grad():
            for parameter in ema.model.parameters():
                parameter.add_(torch.full_like(parameter, 0.1 * (step + 1)))
        ema.update()


def small_net() -> torch.nn.Module:
    """Return a network, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adapters_come_and_go() -> None:
    """A parameter that stays keeps its average: with a second adapter, without it, without any."""
    peft = pytest.importorskip("peft", reason=REASON)
    net = small_net()
    ema = modkit.EMA(net, 0.9)

    def rebind_after(change: Callable[[], object]) -> set[str]:
        """Return the names whose averages have gone on; the others are copies."""
        take_steps(ema)
        parameters = dict(net.named_parameters())
        before = {id(parameters[name]): value.clone() for name, value in ema.named_averages()}
        change()
        ema.rebind()
        parameters = dict(net.named_parameters())
        kept = set()
        for name, value in ema.named_averages():
            former = before.get(id(parameters[name]))
            assert torch.equal(value, parameters[name] if former is None else former)
            if former is not None:
                kept.add(name)
        return kept

    layer = {"0.base_layer.weight", "0.base_layer.bias", "2.weight", "2.bias"}
    adapter = {"0.lora_A.default.weight", "0.lora_B.default.weight"}

    adapted: list[Any] = []
    assert rebind_after(lambda: adapted.append(peft.get_peft_model(net, lora()))) == layer
    (model,) = adapted
    assert rebind_after(lambda: model.add_adapter("second", lora())) == layer | adapter
    assert rebind_after(lambda: model.delete_adapter("second")) == layer | adapter
    assert rebind_after(model.unload) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    take_steps(ema)
    assert ema.n_averaged == 15


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_average_is_merged_in_a_copy() -> None:
    """Merging the averaged model gives its outputs; the model in training stays adapted."""
    peft = pytest.importorskip("peft", reason=REASON)
    model = peft.get_peft_model(small_net(), lora())
    ema = modkit.EMA(model, 0.9)
    take_steps(ema)
    x = torch.randn(3, 4)
    with ema.applied(), torch.no_grad():
        expected = model.eval()(x)
    before = dict(ema.named_averages())["base_model.model.0.base_layer.weight"].clone()
    merged = ema.averaged_model().merge_and_unload()

    assert type(merged[0]) is torch.nn.Linear
    torch.testing.assert_close(merged(x), expected)
    found = dict(ema.named_averages())["base_model.model.0.base_layer.weight"]
    assert torch.equal(found, before)
    ema.update()
    assert ema.n_averaged == 4

    # Merging the model itself writes into its weights, as an optimizer does.
    before = dict(ema.named_averages())["base_model.model.0.base_layer.weight"].clone()
    model.merge_and_unload()
    ema.rebind()
    assert torch.equal(dict(ema.named_averages())["base_model.model.0.weight"], before)
