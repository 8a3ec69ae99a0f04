import importlib.util

import pytest
import torch

from tests.cases import for_each
from tests.efficientzero import CASES, layout, runs, versions
from tests.integration.lightzero.networks import lightzero_networks


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lzero") is None,
    reason="needs LightZero: nox -s lightzero installs it",
)
every_case = for_each("name", CASES)


@pytest.fixture(scope="module")
def lightzero():
    """The networks of LightZero, as a namespace."""
    return lightzero_networks()


def assert_equal(actual, expected):
    """Assert that two lists of tensors, which may contain None, are bitwise identical."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def modules_of(network):
    """Name all modules, the places of a shared one included."""
    return [name for name, _ in network.named_modules(remove_duplicate=False)]


@every_case
def test_structure(name, lightzero):
    """Modules, their order, and the state dict with its versions are LightZero's."""
    ours, theirs = CASES[name].build(), CASES[name].build(lightzero)

    assert modules_of(ours) == modules_of(theirs)
    assert layout(ours) == layout(theirs)
    assert versions(ours) == versions(theirs)
    assert [key for key, _ in ours.named_parameters()] == [k for k, _ in theirs.named_parameters()]
    assert_equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))


@every_case
def test_numbers(name, lightzero):
    """Outputs, gradients and statistics are bitwise identical to LightZero's."""
    case = CASES[name]

    actual = dict(runs(case, case.build))

    expected = dict(runs(case, lambda: case.build(lightzero)))
    assert actual.keys() == expected.keys()
    for run, results in expected.items():
        for part in results:
            assert_equal(actual[run][part], results[part])


@pytest.mark.parametrize("direction", ["from LightZero", "to LightZero"])
@every_case
def test_checkpoints(name, direction, lightzero, tmp_path):
    """A file of one library loads strictly into the network of the other."""
    source, target = CASES[name].build(), CASES[name].build(lightzero)
    if direction == "from LightZero":
        source, target = target, source
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter)
    torch.save(source.state_dict(), tmp_path / "checkpoint.pt")

    keys = target.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))

    assert keys == ([], [])
    assert_equal(list(target.state_dict().values()), list(source.state_dict().values()))


def test_training(lightzero):
    """Ten steps of training by equal optimizers leave bitwise identical weights."""
    case = CASES["model, BN, one_hot"]
    ours, theirs = case.build(), case.build(lightzero)
    latent, hidden, action = case.inputs("recurrent_inference", torch.float32)
    obs = torch.randn(3, 4, 6, 7)

    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(10):
            root = model.initial_inference(obs)
            step = model.recurrent_inference(root.latent_state, hidden, action)
            likeness = model.project(step.latent_state) * model.project(latent, with_grad=False)
            loss = (step.value**2).sum() + (step.value_prefix - 1).square().sum() + likeness.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert_equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_mean_of_the_dynamics(lightzero):
    """The mean of the weights of the dynamics is LightZero's, which adds up single numbers."""
    for name in ("defaults, 1x1", "no blocks", "PReLU"):
        expected = CASES[name].build(lightzero).get_dynamic_mean()

        assert CASES[name].build().get_dynamic_mean() == pytest.approx(expected, rel=1e-6)
