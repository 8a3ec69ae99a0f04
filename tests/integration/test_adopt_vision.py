import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import modkit
import modkit.nn
from tests.helpers import freeze, seed_everything


torchvision = pytest.importorskip(
    "torchvision", reason="needs torchvision: nox -s ecosystem installs it"
)
timm = pytest.importorskip("timm", reason="needs timm: nox -s ecosystem installs it")


def timm_model(name: str, **options: Any) -> torch.nn.Module:
    """Build a small model of timm for images of 32 by 32 pixels."""
    model: torch.nn.Module = timm.create_model(name, num_classes=3, **options)
    return model


MODELS: Final[dict[str, Callable[[], torch.nn.Module]]] = {
    "timm_resnet": lambda: timm_model("resnet10t"),
    "timm_mixer": lambda: timm.models.mlp_mixer.MlpMixer(
        num_classes=3, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, drop_rate=0.1
    ),
    "timm_vit": lambda: timm_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, proj_drop_rate=0.1
    ),
    "timm_convnext": lambda: timm_model(
        "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), drop_path_rate=0.1
    ),
    "timm_efficientnet": lambda: timm_model("efficientnet_lite0", drop_path_rate=0.1),
    "torchvision_resnet": lambda: torchvision.models.resnet18(num_classes=3),
    "torchvision_mobilenet": lambda: torchvision.models.mobilenet_v3_small(num_classes=3),
    "torchvision_vit": lambda: torchvision.models.VisionTransformer(
        32, 8, 2, 2, 32, 64, dropout=0.1, num_classes=3
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)
IMAGES: Final = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
CLASSES: Final = torch.tensor([0, 2])


def build(name: str) -> torch.nn.Module:
    """Build a model with weights from one seed."""
    seed_everything()
    return MODELS[name]()


@every_model
def test_logits_are_equal(name: str) -> None:
    """The logits are the same bits before adopt, after it, in the fast mode, and after release."""
    model = build(name).eval()
    classes, shown = [type(module) for module in model.modules()], repr(model)
    before = model(IMAGES)

    modkit.adopt(model)
    adopted, shown_adopted = model(IMAGES), repr(model)
    all_adopted = all(isinstance(module, modkit.nn.Module) for module in model.modules())
    with modkit.fast_attributes(model), torch.inference_mode():
        fast = model(IMAGES)
    modkit.release(model)

    assert all_adopted
    assert torch.equal(adopted, before)
    assert torch.equal(fast, before)
    assert shown_adopted == shown
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(IMAGES), before)


@every_model
def test_state_dicts_are_equal(name: str) -> None:
    """An adopted model saves what it saved before, and loads what an unadopted one has saved."""
    model, other = build(name), MODELS[name]()
    before = freeze(dict(model.state_dict()))

    modkit.adopt(model)
    during = freeze(dict(model.state_dict()))
    report = model.load_state_dict(other.state_dict())

    assert during == before
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert freeze(dict(model.state_dict())) == freeze(dict(other.state_dict()))


@every_model
def test_training_is_equal(name: str) -> None:
    """Twenty steps of training, dropout included, give the losses of an unadopted copy."""
    model = build(name).train()
    plain = copy.deepcopy(model)

    def train(model: torch.nn.Module) -> list[float]:
        seed_everything()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(model(IMAGES), CLASSES)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    losses = train(modkit.adopt(model))

    assert losses == train(plain)
    assert len(set(losses)) == 20
    assert freeze(dict(model.state_dict())) == freeze(dict(plain.state_dict()))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["timm_mixer", "timm_vit", "torchvision_resnet"])
def test_compile_in_one_graph(name: str) -> None:
    """An adopted model compiles into one graph, with the logits of the eager model."""
    model = modkit.adopt(build(name).eval())
    expected = model(IMAGES)

    compiled = torch.compile(model, fullgraph=True, backend="eager")

    torch.testing.assert_close(compiled(IMAGES), expected)


@pytest.mark.parametrize("name", ["timm_resnet", "torchvision_mobilenet"])
def test_features(name: str) -> None:
    """Torchvision cuts an adopted model at an inner layer with fx, as it cuts one of torch."""
    cut = torchvision.models.feature_extraction
    model = build(name).eval()
    nodes = cut.get_graph_node_names(model)
    middle = nodes[1][len(nodes[1]) // 2]
    expected = cut.create_feature_extractor(model, [middle])(IMAGES)

    modkit.adopt(model)
    found: dict[str, Tensor] = cut.create_feature_extractor(model, [middle])(IMAGES)

    assert cut.get_graph_node_names(model) == nodes
    assert found.keys() == expected.keys()
    assert torch.equal(found[middle], expected[middle])
