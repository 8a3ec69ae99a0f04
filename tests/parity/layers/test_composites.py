import copy

import pytest
import torch
from torch import nn
from torch.profiler import profile

import modkit.nn
from modkit.nn._layers import rebase_children
from modkit.nn.modules._newer import layer_class
from tests.helpers import MODKIT, freeze, seed_everything


COMPOSITES = {
    "MultiheadAttention": lambda nn: nn.MultiheadAttention(4, 2),
    "TransformerEncoderLayer": lambda nn: nn.TransformerEncoderLayer(4, 2, 8),
    "TransformerDecoderLayer": lambda nn: nn.TransformerDecoderLayer(4, 2, 8),
    "TransformerEncoder": lambda nn: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, nn.LayerNorm(4)
    ),
    "TransformerDecoder": lambda nn: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(4, 2, 8), 2, nn.LayerNorm(4)
    ),
    "Transformer": lambda nn: nn.Transformer(4, 2, 2, 2, 8, batch_first=True),
    "AdaptiveLogSoftmaxWithLoss": lambda nn: nn.AdaptiveLogSoftmaxWithLoss(32, 10, [3, 6]),
    "LinearCrossEntropyLoss": lambda nn: nn.LinearCrossEntropyLoss(4, 3),
    "TripletMarginWithDistanceLoss": lambda nn: nn.TripletMarginWithDistanceLoss(),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_is_modkit_all_the_way_down(name):
    """What a layer builds for itself are modkit layers, of the classes that torch would take."""
    theirs, mine = COMPOSITES[name](nn), COMPOSITES[name](modkit.nn)
    pairs = list(zip(theirs.named_modules(), mine.named_modules(), strict=True))

    assert len(pairs) > 1
    assert all(path == other_path for (path, _), (other_path, _) in pairs)
    assert all(type(other) is layer_class(type(module)) for (_, module), (_, other) in pairs)
    assert all(other.__module__ == module.__module__ for (_, module), (_, other) in pairs)


@pytest.mark.parametrize("name", COMPOSITES)
def test_draws_the_same_random_numbers(name):
    """Weights are the same bits from the same seed, and so is the next random number."""
    seen = []
    for library in (nn, modkit.nn):
        seed_everything(3)
        made = COMPOSITES[name](library)
        seen.append((freeze(dict(made.state_dict())), torch.rand(1).item()))

    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_subclass_is_built_in_the_same_way(name):
    """The children of a user's subclass are modkit's too; what it adds stays as it is."""
    parent = getattr(modkit.nn, name)

    class Own(parent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.added = nn.Linear(2, 3)

    namespace = copy.copy(vars(modkit.nn))
    namespace[name] = Own
    own = COMPOSITES[name](
        type("Namespace", (), {k: v for k, v in namespace.items() if k[0] != "_"})
    )
    others = [type(m) for path, m in own.named_modules() if path not in {"", "added"}]

    assert type(own) is Own
    assert type(own.added) is nn.Linear
    assert others
    assert all(issubclass(other, modkit.nn.Module) for other in others)


def test_given_activation_stays():
    """An activation module that the user gives is used as it is, not converted."""
    activation = nn.GELU()
    for layer in (modkit.nn.TransformerEncoderLayer, modkit.nn.TransformerDecoderLayer):
        made = layer(4, 2, 8, activation=activation)

        assert made.activation is activation
        assert type(activation) is nn.GELU
        assert "__module__" not in vars(activation)
        assert type(made.linear1) is modkit.nn.Linear


@pytest.mark.parametrize("library", [nn, modkit.nn])
def test_copies_of_a_given_activation_keep_its_class(library):
    """A Transformer copies the activation into each layer; copies have the class of the original."""
    made = modkit.nn.Transformer(4, 2, 2, 2, 8, activation=library.GELU(), batch_first=True)
    layers = [*made.encoder.layers, *made.decoder.layers]

    # Unpickled and copied decoder layers of torch hide the module behind a function.
    assert [type(layer._modules["activation"]) for layer in layers] == [library.GELU] * 4
    assert all(type(layer.linear1) is modkit.nn.Linear for layer in layers)


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_copies_of_a_given_layer_keep_its_class(kind):
    """A stack copies the given layer; the copies, and all in them, are of the given classes."""
    layer = getattr(nn, f"Transformer{kind}Layer")(4, 2, 8, batch_first=True)
    norm = nn.LayerNorm(4)
    stack = getattr(modkit.nn, f"Transformer{kind}")(layer, 2, norm)

    assert type(stack.layers) is modkit.nn.ModuleList
    assert [type(copied) for copied in stack.layers] == [type(layer)] * 2
    assert {type(m).__module__.split(".")[0] for c in stack.layers for m in c.modules()} == {
        "torch"
    }
    assert (stack.norm, type(norm)) == (norm, nn.LayerNorm)


def test_given_encoder_and_decoder_stay():
    """A custom encoder or decoder is used as it is, whichever library it is from."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)

    encoder, decoder = Own(), nn.Identity()
    made = modkit.nn.Transformer(
        4, 2, 1, 1, 8, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    )

    assert (made.encoder, made.decoder) == (encoder, decoder)
    assert type(encoder.body) is nn.Linear
    assert type(decoder) is nn.Identity


def test_given_distance_module_stays():
    """A distance function that is a module is used as it is; the default one is modkit's."""
    distance = nn.CosineSimilarity()
    made = modkit.nn.TripletMarginWithDistanceLoss(distance_function=distance)

    assert made.distance_function is distance
    assert type(distance) is nn.CosineSimilarity
    assert (
        type(modkit.nn.TripletMarginWithDistanceLoss().distance_function)
        is modkit.nn.PairwiseDistance
    )


def test_bad_arguments_fail_as_in_torch(impl):
    """The constructors raise torch's errors."""
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        impl.nn.MultiheadAttention(5, 2)
    with pytest.raises(RuntimeError, match="activation should be relu/gelu, not tanh"):
        impl.nn.TransformerEncoderLayer(4, 2, activation="tanh")
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'num_heads'"):
        impl.nn.MultiheadAttention(4)
    with pytest.raises(ValueError, match="cutoffs should be a sequence of unique"):
        impl.nn.AdaptiveLogSoftmaxWithLoss(32, 10, [6, 3])


def _operators(impl, mask):
    seed_everything()
    layer = impl.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = impl.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 4)
    with torch.inference_mode(), profile() as recorded:
        output = encoder(x, src_key_padding_mask=mask)
    return freeze(output), [event.key for event in recorded.key_averages()]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mask", [None, torch.tensor([[False] * 3, [False, True, True]])])
def test_encoder_takes_the_fast_path(impl, mask):
    """In inference an encoder runs as fused operators; with a padding mask on nested tensors."""
    _, operators = _operators(impl, mask)

    assert "aten::_transformer_encoder_layer_fwd" in operators
    assert ("aten::_nested_tensor_from_mask" in operators) == (mask is not None)


def test_attention_gives_torch_results_in_all_modes(impl):
    """Weights or none, masks, batch order and the fast path: results are torch's bits."""
    seed_everything()
    expected = nn.MultiheadAttention(4, 2, batch_first=True)
    seed_everything()
    layer = impl.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    padding = torch.tensor([[False] * 3, [False, False, True]])
    for training in (True, False):
        for arguments in ({}, {"need_weights": False}, {"key_padding_mask": padding}):
            given = {"query": x, "key": x, "value": x, **arguments}
            actual = layer.train(training)(**given)

            assert freeze(actual) == freeze(expected.train(training)(**given))


def test_deepcopy_of_a_composite_stays_modkit():
    """Copies of composite layers have the classes of the originals."""
    made = modkit.nn.Transformer(4, 2, 1, 1, 8, batch_first=True)

    assert [type(m) for m in copy.deepcopy(made).modules()] == [type(m) for m in made.modules()]


def test_rebasing_children_spares_what_is_kept_and_what_is_shared():
    """Conversion in place keeps objects and parameters, passes shared children once, and spares."""
    shared, kept = nn.Linear(2, 2), nn.Sequential(nn.ReLU())
    root = nn.Sequential(shared, nn.Sequential(shared, None), kept, nn.Sequential(kept))
    weight = shared.weight
    root.register_module("empty", None)
    rebase_children(root, keep=[kept])

    assert type(root) is nn.Sequential
    assert root[0] is root[1][0] is shared
    assert type(shared) is modkit.nn.Linear
    assert shared.weight is weight
    assert type(root[1]) is modkit.nn.Sequential
    assert type(kept) is nn.Sequential
    assert type(kept[0]) is nn.ReLU


def test_rebasing_children_leaves_other_classes():
    """Only exact layer classes of torch are converted; users' classes are walked through."""

    class Own(nn.Linear):
        pass

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.plain, self.mine = Own(2, 2), nn.Linear(2, 2), MODKIT.nn.ReLU()

    root = nn.Sequential(Block())
    rebase_children(root)

    assert type(root[0]) is Block
    assert [type(m) for m in root[0].children()] == [Own, modkit.nn.Linear, modkit.nn.ReLU]
    assert not isinstance(root[0].own, modkit.nn.Module)
