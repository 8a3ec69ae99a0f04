from unittest import mock

import pytest
import torch
from torch import nn

import modkit
from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.fast_inference.test_scope import snapshot
from tests.parity.fast_inference.twins import bits
from tests.parity.module.module_cases import seed


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 0.1}


def prepared(model, dtype=torch.float32, training=False):
    """Give a model statistics and affine parameters that matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor in (*module.parameters(), *module.buffers()):
                    if tensor.is_floating_point():
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.to(dtype).train(training)


def image(dimensions=2, dtype=torch.float32, channels=4):
    """Make an input."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, channels, *(6,) * dimensions, generator=generator).to(dtype)


def stack(dimensions=2, affine=True, **options):
    """Build convolutions that BatchNorm follows."""
    seed()
    return nn.Sequential(
        CONVOLUTIONS[dimensions](4, 8, 3, padding=1, **options),
        NORMS[dimensions](8, affine=affine),
        nn.ReLU(),
        CONVOLUTIONS[dimensions](8, 4, 3, padding=1, **options),
        NORMS[dimensions](4, affine=affine),
    )


def resnet(impl):
    """Build a residual network in a user's classes."""

    class Basic(impl.nn.Module):
        def __init__(self, inside, out, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(out)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(out)
            self.down = None
            if stride > 1:
                self.down = nn.Sequential(
                    nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
                )

        def forward(self, x):
            branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(branch + (x if self.down is None else self.down(x)))

    class ResNet(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
            self.layers = nn.Sequential(Basic(6, 6, 1), Basic(6, 8, 2))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.layers(self.stem(x)).mean((2, 3)))

    seed()
    return prepared(ResNet())


def assert_close(actual, expected):
    """Compare within the tolerance of the dtype, and the layout exactly."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_follows(build, x, change=lambda model: None):
    """Compare with the plain model before and after a change inside, and after the scope."""
    plain, model = build(), build()
    with torch.no_grad(), modkit.fast_inference(model, fold_batch_norm=True):
        assert_close(model(x), plain(x))
        for each in (model, plain):
            seed()
            change(each)
        for _ in range(2):
            assert_close(model(x), plain(x))

    with torch.no_grad():
        assert bits(model(x)) == bits(plain(x))
    assert [list(vars(each)) for each in model.modules()] == [
        list(vars(each)) for each in plain.modules()
    ]


CASES = {
    "plain": {},
    "no bias": {"bias": False},
    "not affine": {"affine": False},
    "groups": {"groups": 4},
    "dilated": {"dilation": 2},
    "circular": {"padding_mode": "circular"},
}


@for_each("dtype", TOLERANCES, ids=str)
@for_each("options", CASES.values(), ids=CASES.keys())
@for_each("dimensions", [1, 2, 3])
def test_sequential(dimensions, options, dtype):
    """A folded Sequential gives the plain results within rounding, and is as before afterwards."""
    assert_follows(lambda: prepared(stack(dimensions, **options), dtype), image(dimensions, dtype))


def _in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def _statistics(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.add_(0.5)
            module.running_var.mul_(2)


def _load(model, **options):
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, **options)


def _averages(model):
    ema = modkit.EMA(model, 0.5)
    ema.update()
    _in_place(model)
    ema.update()
    ema.copy_to(model)


def _layer(kind):
    return lambda model: next(m for m in model.modules() if isinstance(m, kind))


FIRST_CONV = _layer(nn.Conv2d)
FIRST_NORM = _layer(nn.BatchNorm2d)


def _replace(kind, make):
    def change(model):
        for name, module in list(model.named_modules()):
            if type(module) is kind:
                model.set_submodule(name, make(module))
                return

    return change


CHANGES = {
    "in place": _in_place,
    "statistics": _statistics,
    "loaded": _load,
    "EMA": _averages,
    "eps": lambda model: setattr(FIRST_NORM(model), "eps", 0.5),
    "no affine": lambda model: setattr(FIRST_NORM(model), "weight", None),
    "no statistics": lambda model: setattr(FIRST_NORM(model), "track_running_stats", False),
    "training": lambda model: FIRST_NORM(model).train(),
    "train": lambda model: model.train(),
    "new weight": lambda model: setattr(
        FIRST_CONV(model), "weight", nn.Parameter(FIRST_CONV(model).weight.detach() * 3)
    ),
    "stride": lambda model: setattr(FIRST_CONV(model), "stride", (2, 2)),
    "norm becomes Identity": _replace(nn.BatchNorm2d, lambda module: nn.Identity()),
    "norm becomes GroupNorm": _replace(
        nn.BatchNorm2d, lambda module: nn.GroupNorm(2, module.num_features)
    ),
    "norm becomes another": _replace(
        nn.BatchNorm2d, lambda module: nn.BatchNorm2d(module.num_features).eval()
    ),
    "doubling hook on the conv": lambda model: FIRST_CONV(model).register_forward_hook(
        lambda module, args, output: output * 2
    ),
    "doubling hook on the norm": lambda model: FIRST_NORM(model).register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)
    ),
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(FIRST_CONV(model)),
    "forward of the norm": lambda model: setattr(FIRST_NORM(model), "forward", lambda x: x * 2),
    "forward of the conv": lambda model: setattr(
        FIRST_CONV(model), "forward", lambda x: torch.ones(2, model_width(model), 6, 6)
    ),
}


def model_width(model):
    """Return the channels after the first convolution."""
    return FIRST_NORM(model).num_features


MODELS = {
    "Sequential": lambda: prepared(stack()),
    "user, torch": lambda: resnet(TORCH),
    "user, modkit": lambda: resnet(MODKIT),
}


@for_each("build", MODELS.values(), ids=MODELS.keys())
@for_each("change", CHANGES.values(), ids=CHANGES.keys())
def test_change(change, build):
    """A change of the layers inside counts, whether they stay folded or not."""
    assert_follows(build, image(), change)


def test_averages_applied():
    """The averages that `EMA.applied()` swaps in are the ones that are folded."""
    plain, model = prepared(stack()), prepared(stack())
    x = image()
    averages = [modkit.EMA(each, 0.5) for each in (plain, model)]
    for each, ema in zip((plain, model), averages, strict=True):
        ema.update()
        _in_place(each)
    with torch.no_grad(), modkit.fast_inference(model, fold_batch_norm=True):
        assert_close(model(x), plain(x))
        for _ in range(2):
            with averages[0].applied(), averages[1].applied():
                assert_close(model(x), plain(x))
            assert_close(model(x), plain(x))
    with averages[0].applied(), averages[1].applied(), torch.no_grad():
        with modkit.fast_inference(model, fold_batch_norm=True):
            assert_close(model(x), plain(x))

        assert bits(model(x)) == bits(plain(x))


def shared_models(impl):
    """Return models whose convolutions or norms are used more than once."""

    class Twice(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.bn = nn.BatchNorm2d(4)
            self.other = nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y + self.other(self.conv(self.bn(x)))

    class Branching(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.bn = nn.BatchNorm2d(4)
            self.depth = 2

        def forward(self, x):
            if x.sum() > 0:
                return self.bn(self.conv(x))
            return self.conv(self.bn(x))

    seed()
    conv, norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    return {
        "used twice": Twice(),
        "cannot be traced": Branching(),
        "shared conv": nn.Sequential(conv, norm, conv, nn.BatchNorm2d(4)),
        "shared conv, alone": nn.Sequential(conv, norm, nn.Sequential(conv)),
        "shared norm": nn.Sequential(conv, norm, nn.Conv2d(4, 4, 1), norm),
        "norm first": nn.Sequential(norm, conv, nn.ReLU(), nn.BatchNorm2d(4)),
        "two norms": nn.Sequential(conv, norm, nn.BatchNorm2d(4)),
        "not adjacent": nn.Sequential(conv, nn.ReLU(), norm),
        "nested": nn.Sequential(nn.Sequential(conv), nn.Sequential(norm, nn.ReLU())),
        "shared weight": _tied(),
    }


def _tied():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
    )
    model[2].weight = model[0].weight
    return model


def test_shared_layers(impl):
    """Layers that are used several times give the plain results within rounding."""
    for name in shared_models(impl):
        for x in (image(), -image()):
            assert_follows(lambda name=name: prepared(shared_models(impl)[name]), x, _in_place)


def test_gradients():
    """Gradients of the parameters and of the input are the plain ones within rounding."""
    plain, model = prepared(stack()), prepared(stack())
    x, y = image().requires_grad_(), image().requires_grad_()
    plain(x).square().sum().backward()
    with modkit.fast_inference(model, fold_batch_norm=True):
        model(y).square().sum().backward()

    assert_close(y.grad, x.grad)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_nested_with_the_exact_scope():
    """A folding scope in an exact one is refused, and leaves the exact one exact."""
    plain, model = prepared(stack()), prepared(stack())
    x = image()
    before = snapshot(model)
    with torch.no_grad(), modkit.fast_inference(model):
        exact = bits(model(x))
        with (
            pytest.raises(RuntimeError) as refused,
            modkit.fast_inference(model, fold_batch_norm=True),
        ):
            model(x)
        after = bits(model(x))
    with torch.no_grad():
        expected = bits(plain(x))

    assert exact == expected
    assert after == expected
    assert str(refused.value) == (
        "fast_inference(): Conv2d is in a block with another value of fold_batch_norm. Give both "
        "blocks the same value, or leave the first one."
    )
    assert snapshot(model) == before


def test_patched_batch_norm():
    """A replaced `torch.nn.functional.batch_norm` is called, so nothing is folded."""
    model = prepared(stack())
    x = image()
    with torch.no_grad(), modkit.fast_inference(model, fold_batch_norm=True):
        folded = model(x)
        with mock.patch.object(nn.functional, "batch_norm", lambda x, *_, **__: x * 0):
            patched = model(x)

    assert not torch.equal(folded, patched)
