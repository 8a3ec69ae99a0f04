import contextlib
import copy
import re
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import modkit
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import (
    COPIES,
    CountCalls,
    averaged,
    model_of,
    network,
    same_state,
    set_to,
    state_of,
    train,
)


def half(model: nn.Module, **options) -> "modkit.EMA[nn.Module]":
    """Return an average that lies half way between the model's weights and zero."""
    ema = modkit.EMA(model, decay=0.5, **options)
    values = copy.deepcopy(model.state_dict())
    set_to(model, 0.0)
    ema.update()
    model.load_state_dict(values)
    ema.update()
    return ema


def test_pointers_change_places() -> None:
    """The parameters stay the same objects, hold the memory of the average, and get theirs back."""
    net = network()
    ema = half(net)
    parameters = list(net.parameters())
    addresses = [parameter.data_ptr() for parameter in parameters]
    with CountCalls("empty", "clone", "copy", "zeros", "to") as counted, ema.applied():
        inside = [parameter.data_ptr() for parameter in net.parameters()]
        same_objects = all(map(lambda a, b: a is b, parameters, net.parameters()))

    assert inside == [value.data_ptr() for name, value in ema.named_averages()][: len(inside)]
    assert same_objects
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    assert counted.calls == []


def wrapping(wrap: Any = TwoTensor) -> nn.Module:
    """Return a model with a parameter and a buffer that wrap other tensors, and a plain one."""
    model = model_of([4.0])
    model.register_parameter("wrapper", nn.Parameter(wrap(torch.ones(3), torch.ones(3))))
    model.register_buffer("held", wrap(torch.zeros(2), torch.zeros(2)))
    return model


def contents(model: nn.Module) -> list[list[float]]:
    """Return the values of such a model, those of both tensors in each wrapper."""
    tensors = model.weight, model.wrapper.a, model.wrapper.b, model.held.a, model.held.b
    return [tensor.flatten().tolist() for tensor in tensors]


def moved(model: nn.Module, change: float) -> None:
    """Add to all values of such a model."""
    with torch.no_grad():
        for tensor in (model.weight, model.wrapper, model.held):
            tensor.add_(change)


@for_each("precision", ["fp32", "fp64", "same"])
def test_tensors_that_wrap_others_are_swapped(precision) -> None:
    """`tensor.data = ...` would leave what they wrap, so the block would see the training weights."""
    model = wrapping()
    ema = modkit.EMA(model, [0.5, 0.75], buffers="average", precision=precision)
    ema.update()
    moved(model, 4.0)
    ema.update()
    trained = contents(model)
    expected = [contents(ema.averaged_model(index)) for index in range(2)]
    # Plain tensors beside them move once in each step, too.
    assert expected[0] == [[6.0], [3.0] * 3, [3.0] * 3, [2.0] * 2, [2.0] * 2]
    assert expected[1] == [[5.0], [2.0] * 3, [2.0] * 3, [1.0] * 2, [1.0] * 2]

    with ema.applied():
        seen = [contents(model), contents(ema.module)]
        with ema.applied(index=1):
            seen.append(contents(model))
        seen.append(contents(model))
        raw = ema.state_dict()["raw"]["wrapper"].a.tolist()

    assert seen == [expected[0], expected[0], expected[1], expected[0]]
    assert contents(model) == trained
    assert raw == trained[1]

    # From a model without wrappers, too.
    ema.update(wrapping(torch.mul))
    assert contents(ema.averaged_model()) == [[5.0], [2.0] * 3, [2.0] * 3, [1.0] * 2, [1.0] * 2]


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("fails", [False, True])
def test_writing_inside_is_noticed(dtype, fails) -> None:
    """The error names the weights, or is a note of that of the block; the training weights are back."""
    model = model_of([8.0], dtype)
    ema = half(model)

    def write() -> None:
        with ema.applied():
            set_to(model, [1.0])
            if fails:
                raise KeyError("inside")

    with pytest.raises(KeyError if fails else RuntimeError) as caught:
        write()
    texts = [str(caught.value), *getattr(caught.value, "__notes__", [])]

    if not fails or sys.version_info >= (3, 11):
        assert "weight was written to inside applied()" in texts[-1]
    assert model.weight.item() == 8.0
    assert averaged(ema).item() == (1.0 if dtype == torch.float32 else 4.0)


@for_each("state", ["applied()", "copy_to() and restore()"])
def test_an_attached_optimizer_does_not_train_the_average(state) -> None:
    """The step is refused before it changes a weight, and taken afterwards."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net).attach(optimizer)
    train(net, optimizer, 0, 2)
    with contextlib.ExitStack() as stack:
        if state == "applied()":
            stack.enter_context(ema.applied())
        else:
            ema.store()
            ema.copy_to()
            stack.callback(ema.restore)
        held = state_of(net)
        with pytest.raises(RuntimeError, match=rf"step\(\) was called .*{re.escape(state)}"):
            optimizer.step()

        assert same_state(net, held)
    train(net, optimizer, 2, 3)
    assert ema.step == 3


def test_another_model_may_get_the_average() -> None:
    """Names decide, and a model that does not fit is refused whole."""
    net, other = network(), network()
    ema = half(net)
    before = state_of(other)
    with ema.applied(other):
        fits = torch.equal(other[0].weight, averaged(ema, "0.weight"))
    wrong = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5))

    assert fits
    assert same_state(other, before)
    with pytest.raises(NameMismatchError, match=r"missing: 3.weight.* of another shape: 1.weight"):
        ema.applied(wrong).__enter__()
    with pytest.raises(NameMismatchError):
        ema.copy_to(wrong)


def test_copy_and_restore() -> None:
    """The values that a copy replaces come back, those of the first copy of several."""
    net = network()
    ema = half(net)
    before = state_of(net)
    with pytest.raises(RuntimeError, match=r"restore\(\): nothing is stored"):
        ema.restore()
    ema.store()
    ema.copy_to()
    ema.copy_to()
    copied = torch.equal(net[0].weight, averaged(ema, "0.weight"))
    ema.restore()

    assert copied
    assert same_state(net, before)


def test_a_copied_buffer_of_another_shape_has_its_own_memory() -> None:
    """A write into the model does not reach the copy that belongs to the average."""
    model = Cached()
    ema = half(model)
    model.position = torch.ones(3, dtype=torch.int64)
    ema.copy_to()
    model.position.add_(1)

    assert averaged(ema, "position") == 0


# --- several averages in one model at the same time ---------------------------------------------


def two_averages() -> tuple[nn.Module, "modkit.EMA[nn.Module]", "modkit.EMA[nn.Module]"]:
    """Return a model that holds 8, an average of it that is 4, and one that is 2."""
    model = model_of([8.0])
    first, second = half(model), modkit.EMA(model, decay=0.0)
    set_to(model, [2.0])
    second.update()
    set_to(model, [8.0])
    return model, first, second


def test_blocks_may_be_nested() -> None:
    """Blocks of one average, and of another one inside, are restored in order.

    Inside, states hold the training weights, and neither average is updated.
    """
    model, first, second = two_averages()
    seen = []
    with first.applied():
        seen.append(model.weight.item())
        with first.applied():
            seen.append(model.weight.item())
            with second.applied():
                seen.append(model.weight.item())
                states = [first.state_dict(), second.state_dict()]
            seen.append(model.weight.item())
        for ema in first, second:
            with pytest.raises(RuntimeError, match=r"update\(\) was called inside applied\(\)"):
                ema.update()
        seen.append(model.weight.item())

    assert seen == [4.0, 4.0, 2.0, 4.0, 4.0]
    assert [state["raw"]["weight"].item() for state in states] == [8.0, 8.0]
    assert model.weight.item() == 8.0
    assert (first.step, second.step) == (2, 1)


class WithAverages(nn.Module):
    """A model that holds its own averages."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.ema = modkit.EMA(self, 0.5)


@pytest.mark.parametrize("copied", COPIES)
def test_a_model_with_its_own_averages_can_be_copied(copied) -> None:
    """The copy's averages are those of the copy; inside a block there is none."""
    model = WithAverages()
    nn.init.ones_(model.linear.weight)
    model.ema.update()
    set_to(model, 2.0)
    with model.ema.applied(), pytest.raises(RuntimeError, match="was called inside applied"):
        copied(model)
    other = copied(model)

    assert other.ema.model is other
    assert torch.equal(other.linear.weight, model.linear.weight)
    assert other.ema.averaged_model().linear.weight.eq(1.0).all()


def test_a_swap_that_ends_while_another_is_looked_up_hides_nothing(monkeypatch) -> None:
    """Training weights are saved even if another thread leaves its block at that moment."""
    from modkit.averaging.swap import Swap

    first, second = half(network()), half(network())
    position = Swap.position
    with contextlib.ExitStack() as other:
        other.enter_context(first.applied())

        def leave(swap: Swap, tensor: torch.Tensor) -> int | None:
            monkeypatch.undo()
            other.close()
            return position(swap, tensor)

        with second.applied():
            monkeypatch.setattr(Swap, "position", leave)
            raw = second.state_dict()["raw"]

    assert sorted(raw) == sorted(dict(second.named_averages()))


# --- members that are replaced inside a block ----------------------------------------------------


def load_by_assignment(net: nn.Module) -> None:
    """Load tensors that take the place of the parameters."""
    net.load_state_dict(state_of(net), assign=True)


def fuse(net: nn.Module) -> None:
    """Fold BatchNorm into the layer before it, as tools do before an evaluation."""
    net.eval()
    net[0] = torch.nn.utils.fuse_linear_bn_eval(net[0], net[1])
    net[1] = nn.Identity()


def hide(net: nn.Module) -> None:
    """Put a plain tensor in the place of a buffer."""
    del net[1].running_var
    net[1].running_var = torch.ones(6)


REPLACES = {
    "assign": lambda net: setattr(net[0], "weight", nn.Parameter(torch.zeros(6, 4))),
    "load": load_by_assignment,
    "fuse": fuse,
    "delete": lambda net: delattr(net[3], "bias"),
    "cast": nn.Module.double,
    "buffer": lambda net: setattr(net[1], "running_var", torch.ones(6)),
    "hide": hide,
}


@for_each("change", REPLACES)
@for_each("ending", ["normal", "error"])
@for_each("policy", ["copy", "average"])
def test_replaced_members_are_put_back(change, ending, policy) -> None:
    """A block that replaces, or casts, what a model holds ends with an error, and it is as before."""
    net = network()
    ema = half(net, buffers=policy)
    batch = torch.randn(5, 4)
    net(batch)
    expected = copy.deepcopy(net).eval()(batch)
    before, average = state_of(net), state_of(ema.averaged_model())
    kept = [*net.parameters(), *net.buffers()]
    modules = list(net.modules())

    def work() -> None:
        with ema.applied():
            REPLACES[change](net)
            if ending == "error":
                raise KeyError("inside")

    with pytest.raises((RuntimeError, KeyError)) as caught:
        work()
    texts = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    net.train()

    is_buffer = change in {"cast", "buffer", "hide"}
    told = "'ignore'" if is_buffer else "was replaced inside applied()"
    assert any(told in text for text in texts) or sys.version_info < (3, 11)
    assert list(map(id, net.modules())) == list(map(id, modules))
    assert list(map(id, [*net.parameters(), *net.buffers()])) == list(map(id, kept))
    assert same_state(net, before)
    assert same_state(ema.averaged_model(), average)
    assert torch.equal(net.eval()(batch), expected)
    ema.update()


REBUILDS = {
    "dict": lambda net: setattr(net, "table", nn.ParameterDict(net.table)),
    "list": lambda net: setattr(net, "layers", nn.ModuleList(net.layers)),
}


@for_each("container", REBUILDS)
def test_a_container_that_is_rebuilt_around_its_parameters_stays(container) -> None:
    """As each evaluation of Keras does: the weights of training return, and the next update averages."""
    net = nn.Module()
    net.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
    net.table = nn.ParameterDict({"own": nn.Parameter(torch.ones(3)), "tied": net.layers[0].weight})
    ema = half(net)
    before = state_of(net)
    for _ in range(2):
        with ema.applied():
            REBUILDS[container](net)
            rebuilt = list(net.modules())
            assert not same_state(net, before)

    assert list(net.modules()) == rebuilt
    assert same_state(net, before)
    ema.update()
    assert ema.n_averaged == 3


# --- between copy_to() and restore() ------------------------------------------------------------


def test_a_state_of_a_copied_average_has_the_training_weights() -> None:
    """Both are in the state, and a run that resumes with it trains the training weights."""
    net = network()
    ema = half(net)
    before = state_of(net)
    ema.store()
    ema.copy_to()
    saved = copy.deepcopy({"model": net.state_dict(), "ema": ema.state_dict()})
    other = network()
    other.load_state_dict(saved["model"])
    resumed = modkit.EMA(other, decay=0.5)
    with pytest.warns(UserWarning, match="its training weights are loaded into the model"):
        resumed.load_state_dict(saved["ema"])

    assert sorted(ema.training_weights()) == sorted(dict(ema.named_averages()))
    assert same_state(other, before)
    assert same_state(resumed.averaged_model(), state_of(ema.averaged_model()))
    ema.restore()
    assert ema.training_weights() == {}
    assert "raw" not in ema.state_dict()


def test_all_of_a_model_is_written_or_nothing() -> None:
    """A tensor that cannot be written to is named before the first one is."""
    net = network()
    ema = half(net)
    other = network()
    other[3].weight = nn.Parameter(torch.ones(1, 6).expand(2, 6))
    before = state_of(other)
    with pytest.raises(RuntimeError, match=r"3.weight cannot be written to: it is expanded"):
        ema.copy_to(other)

    assert same_state(other, before)


def test_what_cannot_be_stored_or_restored() -> None:
    """The error names the call, or the parameter that the model has lost."""
    net = network()
    ema = half(net)
    with ema.applied(), pytest.raises(RuntimeError, match=r"^EMA\.store\(\) was called inside"):
        ema.store()
    ema.store()
    del net[3].bias
    for call in ema.store, ema.restore:
        with pytest.raises(
            NameMismatchError,
            match=r"^EMA: the model lacks what was averaged: 1 missing: 3\.bias\.",
        ) as caught:
            call()
        assert caught.value.missing == ["3.bias"]


# --- buffers that an evaluation writes to -------------------------------------------------------


class Cached(nn.Module):
    """Writes to buffers in its forward, in evaluation too, as caches, counters and metrics do.

    ``kind`` is what it writes to, and ``persistent`` whether its state has that.
    """

    def __init__(self, kind: str = "count", persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kind, self.persistent = kind, persistent
        start = torch.zeros((), dtype=torch.int64) if kind == "count" else torch.ones(4)
        self.register_buffer("position", start, persistent=persistent)

    def forward(self, x):
        """Write to the buffer, or replace it."""
        if self.kind == "count":
            self.position += 1
        elif self.kind == "sum":
            self.position.add_(x.detach().sum())
        elif self.kind == "copied":
            # As rotary embeddings write the table for this length.
            self.position.copy_(torch.full((4,), float(len(x))))
        elif self.kind == "registered":
            longer = torch.ones(len(self.position) + 1)
            self.register_buffer("position", longer, persistent=self.persistent)
        else:
            self.position = torch.cat([self.position, x.detach().flatten()])
        return self.layer(x)


KINDS_OF_WRITES = ["count", "sum", "copied", "registered", "grown"]


@for_each("kind", KINDS_OF_WRITES)
@for_each("options", [{}, {"buffers": {"x*": "average"}}])
def test_a_copied_buffer_that_an_evaluation_writes_to(kind: str, options) -> None:
    """It is the model's again after the block, with one warning that names the option."""
    model = Cached(kind)
    if options:
        model.register_buffer("x", torch.ones(1))
    ema = modkit.EMA(model, 0.5, **options)
    for _ in range(2):
        model(torch.ones(1, 2))
        ema.update()
    before = state_of(model)
    weight = dict(ema.named_averages())["layer.weight"].clone()

    def evaluate() -> None:
        for _ in range(3):
            with ema.applied():
                model(torch.ones(1, 2))
            assert same_state(model, before)

    with pytest.warns(UserWarning, match=r"position, .*buffers=\{'position': 'ignore'\}") as found:
        evaluate()

    assert len(found) == 1
    assert found[0].filename == __file__
    model(torch.ones(1, 2))
    ema.update()
    now = dict(ema.named_averages())
    assert now["position"].equal(model.position)
    assert now["layer.weight"].equal(weight)


@for_each("kind", KINDS_OF_WRITES)
@for_each("place", ["applied", "evaluating", "hooks", "training weights"])
@for_each("buffers", ["copy", "average", "ignored by name", "another name"])
def test_buffers_that_are_no_state_are_the_models(kind: str, place: str, buffers: str) -> None:
    """They are not copied, swapped or saved, so an evaluation may do with them as the model does."""
    model = Cached(kind, persistent=False)
    policy = {"ignored by name": {"position": "ignore"}, "another name": {"layer*": "copy"}}
    policy = policy.get(buffers, buffers)
    if buffers == "another name":
        model.layer.register_buffer("x", torch.ones(1))
    callback = modkit.EMACallback(model, decay=0.5, buffers=policy)
    callback.step()
    expected = copy.deepcopy(model)
    expected(torch.ones(1, 2))
    if place == "applied":
        with callback.ema.applied():
            model(torch.ones(1, 2))
    elif place == "hooks":
        callback.on_validation_start()
        model(torch.ones(1, 2))
        callback.on_validation_end()
    else:
        with callback.evaluating():
            if place == "evaluating":
                model(torch.ones(1, 2))
            else:
                with callback.evaluating_training_weights():
                    model(torch.ones(1, 2))

    assert model.position.equal(expected.position)
    assert "position" not in dict(callback.ema.named_averages())
    assert callback.ema.state_dict()["buffers"].keys() <= {"layer.x"}


@for_each("policy", ["copy", "average"])
@for_each("with_statistics", [False, True])
@for_each("wrapped", [False, True])
@for_each("mode", [torch.enable_grad, torch.no_grad])
def test_batch_normalization_in_training_mode_is_noticed(
    policy, with_statistics, wrapped, mode
) -> None:
    """Its kernels write the statistics without a trace, but not the count of batches."""
    net = network()
    ema = half(net, buffers=policy)
    if with_statistics:
        ema.update_bn([torch.randn(8, 4)])
    before = state_of(net)
    model = nn.ModuleDict({"net": net}) if wrapped else net
    with (
        pytest.raises(RuntimeError, match=r"1\.num_batches_tracked was written to inside"),
        ema.applied(model),
        mode(),
    ):
        net.train()(torch.randn(8, 4))

    assert same_state(net, before)


def unusual(kind: str) -> torch.Tensor:
    """Return a tensor that is not an array in memory with strides."""
    ragged = [torch.ones(2, 3), torch.ones(1, 3)]
    with warnings.catch_warnings():
        # Sparse and nested tensors are in beta.
        warnings.simplefilter("ignore")
        if kind == "nested":
            return torch.nested.nested_tensor(ragged)
        if kind == "jagged":
            return torch.nested.nested_tensor(ragged, layout=torch.jagged)
        convert = getattr(torch.eye(4), f"to_{kind}")
        return convert((2, 2)) if kind.endswith(("bsr", "bsc")) else convert()


SPARSE = ["sparse", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]
OPAQUE = ["mkldnn", "nested", "jagged"]


@for_each("kind", SPARSE)
def test_a_state_with_a_sparse_buffer_is_loaded(kind) -> None:
    """A checkpoint resumes the copies too, as does one from inside the block, or of torch."""
    model = nn.Linear(2, 2)
    model.register_buffer("edges", unusual(kind))
    ema = modkit.EMA(model, decay=0.5)
    ema.update()
    resumed = modkit.EMA(model, decay=0.5)
    resumed.load_state_dict(ema.state_dict())
    assert freeze(resumed.state_dict()) == freeze(ema.state_dict())
    resumed.update()
    with resumed.applied():
        torch.testing.assert_close(model.edges, unusual(kind))
        inside = resumed.state_dict()
    with pytest.warns(UserWarning, match="its training weights are loaded"):
        ema.load_state_dict(inside)
    ema.load_state_dict({f"module.{k}": v for k, v in model.state_dict().items()}, step=ema.step)
    ema.update()
    torch.testing.assert_close(dict(ema.named_averages())["edges"], unusual(kind))

    for part in "buffers", "raw":
        broken = {**inside, part: {"edges": torch.eye(4)}}
        with pytest.raises(ValueError, match=r"edges.* like .* layout torch\.sparse.* Nothing"):
            ema.load_state_dict(broken)
    tensors = inside["averages"][0]["tensors"] | {"weight": torch.eye(2).to_sparse()}
    with pytest.raises(ValueError, match=r"'weight'\] .* like .* got .* layout torch\.sparse"):
        ema.load_state_dict({**inside, "averages": [{"tensors": tensors}]})


@for_each("kind", SPARSE + OPAQUE)
def test_a_parameter_that_torch_cannot_average_is_refused_by_name(kind) -> None:
    """The first update is refused, nothing has changed, and without the parameter it works."""
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(unusual(kind), requires_grad=False)
    ema = modkit.EMA(model)
    before = freeze(ema.state_dict())
    layout = r"torch\.\w+ \(nested\)" if kind in {"nested", "jagged"} else r"torch\.\w+"
    message = rf"EMA: odd has the layout {layout}, for .*exclude='odd'.*Nothing has"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            ema.update()
    assert freeze(ema.state_dict()) == before

    other = modkit.EMA(model, exclude="odd")
    for _ in range(3):
        other.update()
        with other.applied():
            pass
    assert other.n_averaged == 3
    assert sorted(name for name, _ in other.named_averages()) == ["bias", "weight"]


@for_each("kind", SPARSE)
@for_each("policy", ["copy", "average", "ignore"])
def test_a_buffer_that_torch_cannot_average_is_refused_by_name(kind, policy) -> None:
    """The error names the policy that works."""
    model = nn.Linear(2, 2)
    model.register_buffer("odd", unusual(kind))
    ema = modkit.EMA(model, buffers=policy)
    before = freeze(ema.state_dict())
    if policy == "average":
        with pytest.raises(RuntimeError, match=r"EMA: odd has the .*{'odd': 'ignore'}"):
            ema.update()
        assert freeze(ema.state_dict()) == before
        ema = modkit.EMA(model, buffers={"odd": "ignore"})
    for _ in range(3):
        ema.update()
        with ema.applied():
            pass

    assert ema.n_averaged == 3


class Quantized(TwoTensor):
    """A tensor that implements only what its layer needs, as torchao's quantized weights."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty_like.default:
            raise NotImplementedError("Quantized: unimplemented operator")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_parameter_without_operators_is_named() -> None:
    """A note on its error says which parameter it is, and the options that leave it out."""
    model = nn.Linear(2, 2)
    frozen = Quantized(torch.ones(2), torch.ones(2))
    model.register_parameter("frozen", nn.Parameter(frozen, requires_grad=False))
    ema = modkit.EMA(model)
    with pytest.raises(NotImplementedError, match="unimplemented") as raised:
        ema.update()
    others = [modkit.EMA(model, trainable_only=True), modkit.EMA(model, exclude="frozen")]
    for other in others:
        other.update()

    (note,) = raised.value.__notes__
    assert note.startswith("EMA: frozen cannot be averaged. Leave it out with exclude=")
    assert (ema.step, ema.n_averaged) == (0, 0)
    assert [other.n_averaged for other in others] == [1, 1]


@contextlib.contextmanager
def copied(ema: "modkit.EMA[nn.Module]"):
    """Copy the average into the model for a block."""
    ema.store()
    ema.copy_to()
    yield
    ema.restore()


SWAPS = {"applied": lambda ema: ema.applied(), "copy_to": copied}


@for_each("swap", SWAPS)
@for_each("gradients", [True, False])
def test_swaps_inside_autocast(swap: str, gradients: bool) -> None:
    """Autocast, which keeps its casts of weights, calls the model with those that it has now."""
    model = nn.Linear(2, 1)
    inputs = torch.ones(1, 2)
    set_to(model, -1.0)
    ema = half(model)

    outputs = []
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(gradients):
        outputs.append(model(inputs).item())
        for _ in range(2):
            with SWAPS[swap](ema):
                outputs.append(model(inputs).item())
            outputs.append(model(inputs).item())

    assert outputs == [-3.0, -1.5, -3.0, -1.5, -3.0]


@for_each("when", ["between blocks", "in the block"])
@for_each("is_added", [True, False])
def test_hooks_of_users_are_no_part_of_a_swap(when: str, is_added: bool) -> None:
    """They stay as the user has left them, also if the block replaces a tensor of their module."""
    net = nn.Linear(1, 1)
    calls: list[int] = []
    handle = net.register_forward_pre_hook(lambda *_: calls.append(0))
    ema = modkit.EMA(net, 0.5)
    ema.update()
    with ema.applied():
        pass

    def change() -> None:
        if is_added:
            net.register_forward_pre_hook(lambda *_: calls.append(1))
        else:
            handle.remove()

    if when == "between blocks":
        change()
    with pytest.raises(RuntimeError, match="weight"), ema.applied():
        if when == "in the block":
            change()
        net.weight = nn.Parameter(torch.zeros(1, 1))
    net(torch.ones(1))

    assert calls == ([0, 1] if is_added else [])


@for_each("call", ["copy_to", "averaged_model", "restore"])
def test_lazily_conjugated_tensors_are_written_to(call: str) -> None:
    """Torch has no list kernels for them, and none for lazily negated ones."""
    net = nn.Linear(1, 1)
    pairs = torch.complex(torch.ones(2), torch.ones(2))
    net.pairs = nn.Parameter(pairs.conj())
    net.register_buffer("negated", pairs.conj().imag)
    ema = modkit.EMA(net, 0.5, buffers="average")
    ema.update()
    before = copy.deepcopy(net.state_dict())
    ema.store()
    set_to(net, 3.0)

    if call == "averaged_model":
        net = ema.averaged_model()
    else:
        getattr(ema, call)()

    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
