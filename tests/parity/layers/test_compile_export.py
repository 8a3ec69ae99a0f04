import warnings

import pytest
import torch

from tests.helpers import MODKIT, TORCH, freeze
from tests.parity.layers.samples import samples, seed, torch_names


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=[name for name, s in samples().items() if s.inputs or s.input_kwargs])
def sample(request: pytest.FixtureRequest):
    """One instance of every public layer class that can be called."""
    return samples()[request.param]


def _attempt(action):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return action()
        except Exception as error:
            return type(error).__name__, torch_names(error).split("\n", 1)[0]


def _compiled(sample, impl):
    torch._dynamo.reset()
    module = torch.compile(sample.build(impl).eval(), fullgraph=True, backend="eager")
    seed()
    return freeze(module(*sample.inputs, **sample.input_kwargs))


def _exported(sample, impl):
    program = torch.export.export(
        sample.build(impl).eval(), sample.inputs, sample.input_kwargs, strict=False
    )
    stacks = [node.meta.get("nn_module_stack") for node in program.graph.nodes]
    seed()
    result = freeze(program.module()(*sample.inputs, **sample.input_kwargs))
    return result, torch_names(stacks), list(program.state_dict)


def test_compiles_as_torch(sample):
    """A layer compiles into one graph exactly if torch's does, and computes the same."""
    expected = _attempt(lambda: _compiled(sample, TORCH))

    assert _attempt(lambda: _compiled(sample, MODKIT)) == expected


def test_exports_as_torch(sample):
    """A layer is exported with torch's result, state and record of which module did what."""
    expected = _attempt(lambda: _exported(sample, TORCH))

    assert _attempt(lambda: _exported(sample, MODKIT)) == expected
