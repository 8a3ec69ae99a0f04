from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.helpers import Implementation, freeze
from tests.integration.networks import agree, make_batch, make_net
from tests.integration.torch_compile.dynamo import Recorder, compiled_tests


pytestmark = compiled_tests


def double_output(_module: torch.nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Act as a forward hook whose effect on the output cannot be missed."""
    return output * 2


def negate_input(_module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Act as a forward pre-hook whose effect on the output cannot be missed."""
    return (-args[0],)


REGISTRATIONS: Final[dict[str, Callable[[torch.nn.Module], Any]]] = {
    "forward": lambda m: m.register_forward_hook(double_output),
    "prepended": lambda m: m.register_forward_hook(double_output, prepend=True),
    "forward_kwargs": lambda m: m.register_forward_hook(
        lambda _m, _args, _kwargs, output: output + 1, with_kwargs=True
    ),
    "always_call": lambda m: m.register_forward_hook(double_output, always_call=True),
    "pre": lambda m: m.register_forward_pre_hook(negate_input),
    "pre_kwargs": lambda m: m.register_forward_pre_hook(
        lambda _m, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True
    ),
}


every_hook = pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, "") for kind in REGISTRATIONS),
        ("forward_kwargs", "blocks.1"),
        ("pre", "blocks.1"),
        ("forward", "heads.left"),
    ],
)


@every_hook
def test_hooks_after_compiling(kind: str, place: str) -> None:
    """A hook registered after the first call takes effect, and so does its removal."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, int]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        recorder = Recorder(net)
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            recorder.call(batch)
            handle = REGISTRATIONS[kind](net.get_submodule(place))
            recorder.call(batch)
            handle.remove()
            recorder.call(batch)
        return recorder.report()

    (before, hooked, after), _, _ = agree(scenario)

    assert torch.equal(before, after)
    assert not torch.equal(before, hooked)


def is_missed(impl: Implementation, kind: str, place: str) -> bool:
    """Return True if a hook that is registered after compiling does not run, by default."""
    torch._dynamo.reset()
    net, batch = make_net(impl.nn, "nested"), make_batch("nested")
    compiled = torch.compile(net, backend="eager")
    before = compiled(batch).detach()
    REGISTRATIONS[kind](net.get_submodule(place))
    return torch.equal(before, compiled(batch).detach())


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_later_hook_of_the_compiled_module_runs(impl: Implementation, kind: str) -> None:
    """A hook of the compiled module itself runs outside of the graph."""
    assert not is_missed(impl, kind, "")


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_later_hook_of_a_submodule_is_missed(impl: Implementation, kind: str) -> None:
    """By default nothing guards the hooks of modules in the graph."""
    assert is_missed(impl, kind, "blocks.1")


@every_hook
def test_hooks_before_compiling(kind: str, place: str) -> None:
    """A hook that is there when the network is compiled runs in the one graph."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, int]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        REGISTRATIONS[kind](net.get_submodule(place))
        recorder = Recorder(net)
        recorder.call(batch)
        recorder.call(batch)
        return recorder.report()

    (hooked, _), _, _ = agree(scenario)

    assert not torch.equal(hooked, make_net(torch.nn, "nested")(make_batch("nested")))


CHANGES: Final[dict[str, Callable[[torch.nn.Module, Any], object]]] = {
    "parameter": lambda net, nn: setattr(net, "w", nn.Parameter(torch.full((6,), 2.0))),
    "parameter_in_registry": lambda net, nn: net._parameters.update(
        w=nn.Parameter(torch.full((6,), 2.0))
    ),
    "parameter_data": lambda net, _nn: setattr(net.w, "data", torch.full((6,), 2.0)),
    "parameter_in_place": lambda net, nn: nn.init.constant_(net.w, 2.0),
    "child_parameter": lambda net, nn: setattr(
        net.inner, "weight", nn.Parameter(torch.full((6, 6), 2.0))
    ),
    "parameter_to_none": lambda net, _nn: setattr(net.inner, "bias", None),
    "parameter_deleted": lambda net, _nn: (
        net.__delattr__("w"),
        net.register_buffer("w", torch.full((6,), 2.0)),
    ),
    "buffer": lambda net, _nn: setattr(net, "scale", torch.full((6,), 2.0)),
    "buffer_in_registry": lambda net, _nn: net._buffers.update(scale=torch.full((6,), 2.0)),
    "child": lambda net, nn: setattr(net, "out", nn.Linear(6, 2)),
    "child_in_registry": lambda net, nn: net._modules.update(out=nn.Linear(6, 2)),
    "set_submodule": lambda net, nn: net.set_submodule("inner", nn.Identity()),
    "load_state_dict": lambda net, _nn: net.load_state_dict(
        {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    ),
    "load_assign": lambda net, _nn: net.load_state_dict(
        {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}, assign=True
    ),
    "forward": lambda net, _nn: setattr(net, "forward", lambda x: x.sum(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_after_compiling_is_not_stale(change: str) -> None:
    """A member replaced after the first call is the one that the next call uses."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, int]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        recorder = Recorder(net)
        recorder.call(batch)
        CHANGES[change](net, impl.nn)
        recorder.call(batch)
        return recorder.report()

    (before, after), frames, _ = agree(scenario)

    assert frames <= 2
    assert freeze(before) != freeze(after)


def test_dtype_change_recompiles() -> None:
    """A conversion after the first call compiles anew for the new dtype."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, int]:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        recorder = Recorder(net)
        recorder.call(batch)
        net.double()
        recorder.call(batch.double())
        return recorder.report()

    outputs, frames, _ = agree(scenario)

    assert outputs[1].dtype == torch.float64
    assert frames == 2


def test_train_and_eval() -> None:
    """Switching the mode compiles once for each, and BatchNorm follows it."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "conv"), make_batch("conv")
        counter = CompileCounter()
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        outputs = []
        for mode in (True, False, True, False):
            net.train(mode)
            outputs.append(compiled(batch).detach())
        return outputs, dict(net.state_dict()), counter.frame_count, counter.op_count

    outputs, state, frames, _ = agree(scenario)

    assert state["features.1.num_batches_tracked"] == 2
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[1], outputs[3])
    assert frames == 2
