import contextlib
import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel

import modkit
from modkit._fast_inference import layers, runs
from tests.cases import for_each
from tests.integration.networks import PICKLABLE
from tests.parity.fast_inference.nets import batch, extra, net, run
from tests.parity.fast_inference.twins import (
    bits,
    left_behind,
    outcome,
    same_inside,
)
from tests.parity.module.module_cases import seed


class OwnState(nn.Module):
    """A module that decides what is pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.cache = [1, 2]

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "cache"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.cache = []


class OwnReduce(nn.Linear):
    """A layer that is pickled as a call."""

    def __reduce__(self):
        return OwnReduce, (self.in_features, self.out_features), {"training": False}


BUILDERS = {
    "layers": lambda: nn.Sequential(
        nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2), nn.Tanh())
    ).eval(),
    "user, torch": PICKLABLE["torch"],
    "user, modkit": PICKLABLE["modkit"],
    "own state": OwnState,
    "fx": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    "own state in a Sequential": lambda: nn.Sequential(nn.Linear(2, 2), OwnState()),
    "own call": lambda: OwnReduce(2, 2),
}


def snapshot(model):
    """Return the objects in each module's `__dict__`, and in its tables of members, in order."""
    seen = []
    for module in model.modules():
        state = vars(module)
        seen.append([(key, id(value)) for key, value in state.items()])
        seen += [
            [type(state[table]), *((key, id(value)) for key, value in state[table].items())]
            for table in ("_modules", "_parameters", "_buffers")
        ]
    return seen


@for_each("raised", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_restored_after_an_exception(impl, raised):
    """An exception leaves the scope unchanged, and nothing stays behind."""
    model = net(impl)
    before = snapshot(model)
    error = raised("in the scope")
    with pytest.raises(raised) as caught, modkit.fast_inference(model):
        model(batch())
        raise error

    assert caught.value is error
    assert snapshot(model) == before


@for_each("wrong", [None, 3, "text", nn.Linear, [nn.ReLU()], torch.relu], ids=repr)
def test_wrong_model(wrong):
    """An object that is not a module raises TypeError that names fast_inference."""
    with pytest.raises(TypeError, match="fast_inference"), modkit.fast_inference(wrong):
        pass


def what_is_read_inside(scope, impl):
    """`state_dict()`, `repr()`, `named_*()` and counts are those of the plain model."""
    model = net(impl)
    with scope(model):
        run(model)
        return [
            model.state_dict(),
            list(model.state_dict()._metadata.items()),
            repr(model),
            [name for name, _ in model.named_modules()],
            [name for name, _ in model.named_children()],
            [name for name, _ in model.named_buffers()],
            list(model.named_parameters()),
            [name for name, _ in model.blocks[0].named_parameters()],
            len(model.stem),
            len(list(model.children())),
            bits(list(model.stem)),
            model.get_parameter("stem.0.weight"),
            model.get_buffer("blocks.0.shift"),
            repr(model.get_submodule("head.1")),
            repr(model.stem[0:2]),
            repr(model.stem + model.head),
            repr(model.stem * 2),
            model.stem[0].weight is model.stem[0]._parameters["weight"],
            list(model._modules),
            list(model.blocks[0]._parameters.items()),
            model._modules == {**model._modules},
            outcome(lambda: model.get_submodule("stem.7")),
        ]


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "pickle, protocol 2": lambda module: pickle.loads(pickle.dumps(module, protocol=2)),
    "deepcopy of a list": lambda module: copy.deepcopy([module])[0],
    "reduce": lambda module: copy._reconstruct(module, None, *module.__reduce_ex__(4)),
}


@for_each("make", COPIES.values(), ids=COPIES.keys())
@for_each("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_copies_are_plain(make, build):
    """A copy that is made inside is one that is made outside: it holds nothing of the scope."""
    model = build()

    shares_children = make in {COPIES["copy"], COPIES["reduce"]}

    def described():
        seed()
        made = make(model)
        if shares_children:
            made._modules = {}
        return [
            (
                name,
                type(each).__name__,
                list(vars(each)),
                {k: type(v) for k, v in vars(each).items()},
            )
            for name, each in made.named_modules()
        ], bits(made.state_dict())

    expected = described()
    before = [list(vars(module)) for module in model.modules()]
    with modkit.fast_inference(model):
        inside = described()
        copied = make(model)
    size = len(pickle.dumps(copied))
    expected_size = len(pickle.dumps(make(model)))

    assert inside == expected
    assert size == expected_size
    assert [list(vars(module)) for module in model.modules()] == before


def a_copy_is_independent(scope, impl):
    """A copy that is made inside can be changed, and enter a scope of its own."""
    model = net(impl)
    with scope(model):
        other = copy.deepcopy(model)
        other.stem[0] = extra(4)
        first = run(model), run(other)
        with scope(other):
            other.head[2] = extra(6, 3)
            second = run(model), run(other)
        third = run(other)
    return first, second, third, run(other), left_behind(model), left_behind(other)


def averages_updated_before_a_change(scope, impl):
    """An update inside the block knows nothing of what the model gets after it."""
    model = net(impl)
    averages = {"EMA": modkit.EMA(model, 0.5), "AveragedModel": AveragedModel(model)}
    seen = []
    for change_outside in (True, False):
        with scope(model):
            averages["EMA"].update()
            averages["AveragedModel"].update_parameters(model)
            if not change_outside:
                _replace_tensors(model)
        if change_outside:
            _replace_tensors(model)
        averages["EMA"].update()
        averages["AveragedModel"].update_parameters(model)
        seen.append(dict(averages["EMA"].named_averages()))
        seen.append(averages["AveragedModel"].state_dict())
    return [{name: tensor.clone() for name, tensor in one.items()} for one in seen]


def _replace_tensors(model):
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(parameter.detach() + 1.0))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, buffer + 1)


def buffers_cast_across_scopes(scope, impl):
    """A block of `EMA.applied()` puts back what it has cast, also when the scope has been left."""
    model = net(impl)
    ema = modkit.EMA(model, 0.5)
    ema.update()
    outer, inner = scope(model), ema.applied()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    model.double()
    seen = outcome(lambda: inner.__exit__(None, None, None))
    return seen, {name: tensor.dtype for name, tensor in model.state_dict().items()}


def test_threads(impl):
    """Eight threads enter and leave scopes of one model, and each call is exact."""
    model = net(impl)
    before = snapshot(model)
    with torch.no_grad():
        expected = bits(model(batch()))
    wrong, start = [], threading.Barrier(8)

    def work(number):
        order = random.Random(number)
        parts = [model, model.stem, model.blocks[0], model.head[1]]
        try:
            start.wait()
            with torch.no_grad():
                for _ in range(40):
                    with ExitStack() as stack:
                        for part in order.sample(parts, order.randrange(4)):
                            stack.enter_context(modkit.fast_inference(part))
                        results = [bits(model(batch())) for _ in range(order.randrange(4))]
                    results.append(bits(model(batch())))
                    wrong.extend(number for result in results if result != expected)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert snapshot(model) == before


@for_each("raised", [False, True])
def test_model_is_freed_without_the_collector(impl, raised):
    """Modules and functions of the scope need no cyclic collector, after an exception either."""

    def freed():
        model = net(impl)
        references = [weakref.ref(module) for module in model.modules()]
        with contextlib.suppress(ZeroDivisionError), modkit.fast_inference(model):
            model.stem[2] = nn.Tanh()
            model(batch())
            functions = [vars(each).get("_compiled_call_impl") for each in model.modules()]
            references += [weakref.ref(each) for each in functions if each is not None]
            if raised:
                raise ZeroDivisionError
            del functions
        return references, len(references)

    gc.collect()
    gc.disable()
    try:
        references, count = freed()
        left = [reference() for reference in references]
    finally:
        gc.enable()

    assert left == [None] * count
    assert count > 20


def shared_and_cyclic_models(scope, impl):
    """A module in several places, or one that refers to its parent, is handled once."""

    class Cyclic(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.same = self.fc
            self.chain = nn.Sequential(self.fc, self.fc, nn.Tanh(), self.fc)
            self._modules["none"] = None

        def forward(self, x):
            return self.chain(self.same(x))

    model = Cyclic()
    model.chain.parent = [model]
    with scope(model):
        first = run(model)
        model.fc.weight = nn.Parameter(torch.ones(4, 4))
        second = run(model)
        model.fc = nn.Linear(4, 4, bias=False)
        third = run(model)
    return first, second, third, left_behind(model)


def empty_models(scope, impl):
    """Models without layers, parameters or forward give the same results and errors."""
    seen = []
    deep = nn.Sequential()
    for _ in range(2 * sys.getrecursionlimit()):
        deep = nn.Sequential(deep)
    with scope(deep):
        seen.append(len(deep))
    for model in (
        nn.Sequential(),
        nn.Sequential(nn.Sequential(), nn.Sequential(nn.Sequential())),
        nn.ModuleList(),
        nn.ModuleDict(),
        nn.ParameterList([nn.Parameter(torch.ones(2))]),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
        impl.nn.Module(),
        nn.Identity(),
    ):
        with scope(model):
            seen += [outcome(lambda: model(batch())), outcome(model)]
            seen += [outcome(lambda: model(batch(), 2)), outcome(lambda: list(model))]
        seen += [left_behind(model)]
    return seen


def a_deleted_member_is_gone(scope, impl):
    """A member of each kind, deleted by name or from its table, cannot be read any more."""
    block = net(impl).blocks[0]
    with scope(block):
        del block.fc, block._parameters["scale"]
        block._buffers.pop("shift")
        return [
            outcome(lambda name=name: getattr(block, name)) for name in ("fc", "scale", "shift")
        ]


def a_name_without_a_value_gets_one(scope, impl):
    """A buffer that is None gives its name to a parameter."""
    model = impl.nn.Module()
    model.register_buffer("scale", None)
    with scope(model):
        model.scale = nn.Parameter(torch.ones(2))
        seen = model.scale, list(model.named_parameters()), list(model._buffers)
    return *seen, left_behind(model)


def test_a_table_assigned_back_outlasts_the_block():
    """`module._modules |= ...` leaves a plain dict, in copies made inside too."""
    model = nn.Sequential(nn.Linear(2, 2))
    with modkit.fast_inference(model):
        model._modules |= {"1": nn.ReLU()}
        copied = copy.copy(model)

    assert [dict, dict] == [type(model._modules), type(copied._modules)]
    assert ["0", "1"] == list(model._modules) == list(copied._modules)


def test_a_table_that_is_kept_changes_the_module_after_the_block(impl):
    """A caller that keeps ``_modules`` of the block changes what the module has now."""
    model = impl.nn.Module()
    model.first, model.second = nn.Linear(2, 2), nn.ReLU()
    with modkit.fast_inference(model):
        table = model._modules
        table.update({"third": nn.Tanh()}, fourth=nn.GELU())
        inside = [*vars(model)]
    model.fifth = nn.SiLU()
    table.pop("first")
    table["sixth"] = nn.ELU()

    assert {"third", "fourth"} <= {*inside}
    assert [*model._modules] == ["second", "third", "fourth", "fifth", "sixth"]
    assert [*model._modules] == [*table]


def test_a_table_of_another_class_stays(impl):
    """A table that counts its reads, as one that gathers shards does, is not replaced."""

    class Counting(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    reads, layer = [], impl.nn.Linear(2, 2)
    table = layer._parameters = Counting(layer._parameters)
    with modkit.fast_inference(layer):
        inside = layer._parameters
        layer(torch.ones(1, 2))

    assert inside is layer._parameters is table
    assert reads == ["weight", "bias"]


class Shared(nn.Module):
    """A module that calls a layer by itself, and in a container of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.chain = nn.Sequential(layer, nn.Tanh())

    def forward(self, x):
        return self.chain(self.layer(x))


def shared():
    """Make a container that has layers in several places too."""
    layer, other = nn.Linear(6, 6), nn.Linear(6, 6)
    return nn.Sequential(
        *(layer, Shared(layer), other, Shared(layer)),
        *(nn.Sequential(other, nn.Sequential(layer, nn.Tanh())), Shared(layer)),
    )


IMAGE, STEPS, STATE = torch.randn(2, 3, 6, 6), torch.randn(5, 2, 4), torch.zeros(1, 2, 4)
# A model, its inputs, and the number of functions that it takes.
ON_THE_SHORT_PATH = {
    "image": (
        nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            nn.GroupNorm(2, 4),
            nn.Flatten(),
            nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Dropout()),
            nn.Softmax(1),
        ),
        (IMAGE,),
        1,
    ),
    "long": (nn.Sequential(*(nn.Linear(6, 6) for _ in range(30))), (IMAGE,), 3),
    "shared": (shared(), (IMAGE,), 10),
    "tokens": (nn.Sequential(nn.Embedding(5, 4), nn.GELU()), (torch.tensor([[1, 2]]),), 1),
    "GRUCell": (nn.GRUCell(4, 4), (STEPS[0], STATE[0]), 1),
    "LSTMCell": (nn.LSTMCell(4, 4), (STEPS[0], (STATE[0], STATE[0])), 1),
    "GRU": (nn.GRU(4, 4), (STEPS, STATE), 1),
    "LSTM": (nn.LSTM(4, 4), (STEPS, (STATE, STATE)), 1),
}


@for_each("case", ON_THE_SHORT_PATH)
def test_no_layer_takes_torchs_path(case):
    """Results alone would not show it: whatever is in doubt is computed by torch's own calls."""
    model, inputs, functions = ON_THE_SHORT_PATH[case]
    model.eval()
    slow = {nn.Module._call_impl.__code__, runs._one_by_one.__code__}
    calls = []

    def count(frame, event, _argument):
        if event == "call" and (frame.f_code in slow or frame.f_code.co_filename == "<string>"):
            calls.append(frame.f_code.co_name)

    with torch.no_grad(), modkit.fast_inference(model):
        assert vars(model)["_compiled_call_impl"].__code__.co_filename == "<string>"
        # Entering a container gives its dict no entry for each child, and a layer that only runs
        # call no function.
        assert "0" not in vars(model)
        if case == "long":
            assert not any("_compiled_call_impl" in vars(layer) for layer in model)
        sys.setprofile(count)
        try:
            model(*inputs)
        finally:
            sys.setprofile(None)

    # The kernel of an LSTM is in a function of its own.
    assert [name for name in calls if name != "<lambda>"] == ["call"] * functions


@for_each(("owner", "name"), [(nn.Module, "__call__"), (nn.Linear, "forward")])
def test_a_patch_counts_only_while_it_is_there(owner, name):
    """A block that was entered under a profiler does not slow down those after it."""
    layer = type("Own", (nn.Linear,), {})(2, 2)
    original = getattr(owner, name)
    patch = mock.patch.object(owner, name, lambda *given: [original(*given)])
    with patch, modkit.fast_inference(layer):
        assert layer(torch.ones(2))[0].shape == (2,)
    with modkit.fast_inference(layer):
        function = vars(layer)["_compiled_call_impl"]

    assert function.__code__.co_filename == "<string>"


def test_a_block_says_what_it_is():
    """Its text helps a user who has left out the ``with``."""
    block = modkit.fast_inference(nn.ReLU())

    assert repr(block) == "<modkit.fast_inference(model): a block, for a with statement>"


def test_replicas_are_refused():
    """They would copy the dict of a module with the members that are in it inside the block."""
    layer = nn.Linear(2, 2)
    with modkit.fast_inference(layer), pytest.raises(RuntimeError) as caught:
        layer._replicate_for_data_parallel()

    assert str(caught.value) == (
        "DataParallel cannot replicate Linear inside fast_inference(): the replicas would use the "
        "weights of the original. Use fast_inference() for a model on one device."
    )
    assert layer._replicate_for_data_parallel() is not layer


def _writes(self, x):
    x.abs_()


def _returns_nothing(self, x):
    return


def _has_a_default(self, x, scale=2):
    return x * scale


def _calls_a_method(self, x):
    return self.scaled(x)


@for_each("forward", [_writes, _returns_nothing, _has_a_default, _calls_a_method])
def test_only_a_forward_of_one_expression_is_read(forward):
    """A layer of a later torch whose `forward` has another form takes torch's own path."""
    assert layers._read(forward) is None


def runs_around_a_users_module(scope, impl):
    """Layers in front of a user's module, and more behind it than one function has, run together."""

    class Own(impl.nn.Module):
        def forward(self, x):
            return x + 1

    layers = [nn.Linear(4, 4), nn.Tanh(), Own(), *(nn.Linear(4, 4) for _ in range(30))]
    model = nn.Sequential(*layers)
    with scope(model):
        plain = run(model)
        model[0].register_forward_hook(lambda *given: given[-1] * 2)
        return plain, run(model)


SCENARIOS = (
    runs_around_a_users_module,
    what_is_read_inside,
    a_copy_is_independent,
    averages_updated_before_a_change,
    buffers_cast_across_scopes,
    shared_and_cyclic_models,
    empty_models,
    a_deleted_member_is_gone,
    a_name_without_a_value_gets_one,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_same_inside(impl, scenario):
    """Values read, computed and left behind are the same inside."""
    result = same_inside(lambda scope: scenario(scope, impl))

    assert result[0] == "returned"
