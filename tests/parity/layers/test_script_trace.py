import io
import re
import warnings

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.helpers import MODKIT, TORCH, freeze
from tests.parity.layers.samples import samples, seed, torch_names


# Torch 2.14 and later say that TorchScript is deprecated; these tests are about what it does.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(params=samples())
def sample(request: pytest.FixtureRequest):
    """One instance of every public layer class."""
    return samples()[request.param]


def _plain(text):
    """Drop addresses, source lines, and which of two equal types TorchScript has seen first."""
    noise = r"___torch_mangle_\d+\.|at 0x[0-9a-f]+| # [^\s:]+:\d+:\d+$"
    text = torch_names(text).replace("RecursiveScriptModule", "ScriptModule")
    return re.sub(noise, "", text, flags=re.MULTILINE)


def _attempt(action):
    """Return what the action returns, or the exception's type and the first line of its text."""
    with warnings.catch_warnings():
        # Warnings, some of them once a process, say that shapes and random numbers get fixed.
        warnings.simplefilter("ignore")
        try:
            return action()
        except Exception as error:
            return type(error).__name__, _plain(error).strip().split("\n", 1)[0]


def _called(module, sample):
    seed()
    return freeze(module(*sample.inputs, **sample.input_kwargs))


def _reloaded(scripted, jit):
    file = io.BytesIO()
    jit.save(scripted, file)
    file.seek(0)
    return jit.load(file)


def _described(scripted, sample):
    """Return the attributes, code, state and result of a module that TorchScript made."""
    return {
        "attributes": _plain(scripted._c.dump_to_str(False, True, False)),
        "code": _plain(getattr(scripted, "code", "")),
        "state": freeze(dict(scripted.state_dict())),
        "result": _attempt(lambda: _called(scripted, sample)),
    }


def _scripted(sample, impl, jit):
    scripted = jit.script(sample.build(impl).eval())
    return _described(scripted, sample), _described(_reloaded(scripted, jit), sample)


def test_scripts_as_torch(sample):
    """A layer scripts exactly if torch's does, to the same code, attributes and results."""
    expected = _attempt(lambda: _scripted(sample, TORCH, torch.jit))

    assert _attempt(lambda: _scripted(sample, MODKIT, torch.jit)) == expected
    again = _attempt(lambda: _scripted(sample, MODKIT, MODKIT.jit))
    # A type that has failed once fails at its first method from then on, with that as the reason.
    failed = isinstance(expected[0], str)
    assert (isinstance(again[0], str), None if failed else again) == (
        failed,
        None if failed else expected,
    )


def _traced(sample, impl, jit):
    made = sample.build(impl).eval()
    seed()
    traced = jit.trace(
        made,
        example_inputs=sample.inputs or None,
        example_kwarg_inputs=sample.input_kwargs or None,
        check_trace=False,
    )
    graphs = [_plain(traced.graph), _plain(traced.inlined_graph)]
    return graphs, _described(traced, sample), _described(_reloaded(traced, jit), sample)


def test_traces_as_torch(sample):
    """A layer traces to the same graph and results as torch's, or fails in the same way."""
    expected = _attempt(lambda: _traced(sample, TORCH, torch.jit))

    assert _attempt(lambda: _traced(sample, MODKIT, torch.jit)) == expected
    assert _attempt(lambda: _traced(sample, MODKIT, MODKIT.jit)) == expected


@pytest.mark.parametrize(
    "name", ["BatchNorm2d", "Conv2d", "Embedding", "Linear", "LSTM", "Sequential", "Transformer"]
)
def test_common_layer_scripts_and_traces(impl, name):
    """What is compared above are results, not failures that both libraries have in common."""
    assert isinstance(_attempt(lambda: _scripted(samples()[name], impl, impl.jit))[-1], dict)
    assert isinstance(_attempt(lambda: _traced(samples()[name], impl, impl.jit))[-1], dict)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layer_scripts_for_tensors(impl, kind):
    """TorchScript picks the overload of a recurrent layer that takes a padded tensor."""

    class Reader(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(impl.nn, kind)(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    reader, x = Reader(), torch.randn(5, 2, 3)

    assert freeze(torch.jit.script(reader)(x)) == freeze(reader(x))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layer_scripts_for_packed_sequences(impl, kind):
    """TorchScript picks the overload of a recurrent layer that takes a packed sequence."""

    class Reader(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(impl.nn, kind)(3, 4)

        def forward(self, sequence: PackedSequence) -> torch.Tensor:
            return self.rnn(sequence)[0].data

    reader, sequence = Reader(), pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 2]))

    assert freeze(torch.jit.script(reader)(sequence)) == freeze(reader(sequence))


def test_subclass_of_a_recurrent_layer_scripts_as_torch():
    """A user's recurrent layer with a forward of its own is scripted from its own source."""

    def outcome(impl):
        class Echo(impl.nn.LSTM):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.hidden_size

        scripted = torch.jit.script(Echo(3, 4))
        return scripted.code, freeze(scripted(torch.ones(2)))

    assert outcome(MODKIT) == outcome(TORCH)
