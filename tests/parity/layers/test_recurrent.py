import copy
import io
import pickle

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import modkit.nn
from tests.helpers import freeze
from tests.parity.layers.samples import both


KINDS = ["RNN", "LSTM", "GRU"]
CELLS = ["RNNCell", "LSTMCell", "GRUCell"]
OPTIONS = [
    {},
    {"num_layers": 2, "dropout": 0.5},
    {"bidirectional": True, "batch_first": True},
    {"bias": False, "num_layers": 2, "bidirectional": True},
]


def _is_flat(layer):
    """Tell whether the list that the kernels read holds the parameters themselves."""
    names = layer._flat_weights_names
    return all(a is getattr(layer, n) for n, a in zip(names, layer._flat_weights, strict=True))


CHANGES = {
    "double": lambda layer: layer.double(),
    "to": lambda layer: layer.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "flatten": lambda layer: (layer.flatten_parameters(), layer)[1],
    "assign": lambda layer: (
        setattr(layer, "weight_hh_l0", torch.nn.Parameter(layer.weight_hh_l0 * 2)),
        layer,
    )[1],
    "load_assign": lambda layer: (
        layer.load_state_dict({k: v * 2 for k, v in layer.state_dict().items()}, assign=True),
        layer,
    )[1],
    "meta": lambda layer: layer.to("meta").to_empty(device="cpu"),
    "share_memory": lambda layer: layer.share_memory(),
    "freeze": lambda layer: layer.requires_grad_(False),
    "reset": lambda layer: (layer.reset_parameters(), layer)[1],
    "type": lambda layer: layer.type(torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_flat_weights_follow_the_parameters(impl, kind, change):
    """After any change of the parameters, the kernels read the parameters that are registered."""
    layer = CHANGES[change](getattr(impl.nn, kind)(3, 4, num_layers=2))

    assert _is_flat(layer)
    assert type(layer) is getattr(impl.nn, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_and_padded_sequences(kind, options):
    """Outputs, states and gradients for padded and packed sequences are torch's bits."""

    def scenario(impl):
        layer = getattr(impl.nn, kind)(3, 4, **options)
        x = torch.randn(5, 5, 3, requires_grad=True)
        packed = pack_padded_sequence(
            x, torch.tensor([5, 2, 3, 1, 4]), batch_first=layer.batch_first, enforce_sorted=False
        )
        torch.manual_seed(1)
        padded_output, state = layer(x)
        packed_output, packed_state = layer(packed)
        (padded_output.sum() + packed_output.data.sum()).backward()
        unpacked = pad_packed_sequence(packed_output, batch_first=layer.batch_first)
        return (
            unpacked,
            state,
            packed_state,
            x.grad,
            {n: p.grad for n, p in layer.named_parameters()},
        )

    expected, actual = both(scenario)

    assert expected.startswith("('returned'")
    assert actual == expected


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_projections():
    """An LSTM with projections has torch's parameters and outputs."""

    def scenario(impl):
        layer = impl.nn.LSTM(3, 4, proj_size=2, bidirectional=True)
        return layer, layer(torch.randn(5, 2, 3)), layer.all_weights

    expected, actual = both(scenario)

    assert expected.startswith("('returned'")
    assert actual == expected


BAD_CALLS = {
    "wrong_size": lambda nn: nn.LSTM(3, 4)(torch.ones(5, 2, 7)),
    "wrong_dimensions": lambda nn: nn.GRU(3, 4)(torch.ones(5)),
    "wrong_state": lambda nn: nn.RNN(3, 4)(torch.ones(5, 2, 3), torch.ones(1, 3, 4)),
    "state_of_other_kind": lambda nn: nn.LSTM(3, 4)(torch.ones(5, 2, 3), torch.ones(1, 2, 4)),
    "wrong_dtype": lambda nn: nn.LSTM(3, 4)(torch.ones(5, 2, 3).double()),
    "nonlinearity": lambda nn: nn.RNN(3, 4, nonlinearity="sin"),
    "dropout": lambda nn: nn.GRU(3, 4, dropout=2.0),
    "bias": lambda nn: nn.GRU(3, 4, bias=3),
    "hidden_size": lambda nn: nn.GRU(3, -1),
    "projection": lambda nn: nn.GRU(3, 4, proj_size=2),
    "projection_too_large": lambda nn: nn.LSTM(3, 4, proj_size=4),
    "cell_dimensions": lambda nn: nn.LSTMCell(3, 4)(torch.ones(2, 2, 2, 3)),
    "cell_nonlinearity": lambda nn: nn.RNNCell(3, 4, nonlinearity="sin")(torch.ones(2, 3)),
    "base_mode": lambda nn: nn.RNNBase("SINE", 3, 4),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_fail_as_in_torch(call):
    """Wrong options, sizes and types raise torch's exception with torch's text."""
    expected, actual = both(lambda impl: BAD_CALLS[call](impl.nn))

    assert expected.startswith("('raised'")
    assert actual == expected


@pytest.mark.parametrize("cell", CELLS)
def test_cell_steps_as_in_torch(cell):
    """A cell in a loop gives torch's states and gradients, batched or not."""

    def scenario(impl):
        layer = getattr(impl.nn, cell)(3, 4)
        state = None
        for step in torch.randn(3, 2, 3):
            state = layer(step, state)
        single = layer(torch.randn(3))
        (state[0].sum() + single[0].sum()).backward()
        return layer, state, single, {n: p.grad for n, p in layer.named_parameters()}

    expected, actual = both(scenario)

    assert expected.startswith("('returned'")
    assert actual == expected


def test_old_pickle_of_weights_instead_of_names(impl):
    """The state of an early release, which held weights where names are now, is completed."""
    layer = impl.nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    state = {**layer.__getstate__(), "_all_weights": layer.all_weights}
    for newer in ("_flat_weights", "_flat_weights_names", "proj_size"):
        del state[newer]
    restored = impl.nn.LSTM.__new__(impl.nn.LSTM)
    restored.__setstate__(state)
    x = torch.randn(5, 2, 3)

    assert _is_flat(restored)
    assert freeze(restored(x)) == freeze(layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_module_comes_back(kind):
    """``torch.save`` of a whole recurrent layer gives back a working modkit layer."""
    layer = getattr(modkit.nn, kind)(3, 4)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    sequence = pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])

    assert type(loaded) is type(layer)
    assert _is_flat(loaded)
    assert freeze(loaded(sequence)) == freeze(layer(sequence))
