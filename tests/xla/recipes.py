"""Networks, steps, comparisons and counters that the tests on XLA share."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import Implementation


# All that the tests measure are sums of products in float32, in another order than on the CPU.
RELATIVE, ABSOLUTE = 1e-5, 1e-6
HALF = {"rtol": 2e-2, "atol": 2e-2}


def end_step() -> None:
    """Compile and run what has been recorded, as loops on XLA do at the end of a step."""
    import torch_xla

    torch_xla.sync()


@dataclass
class Counts:
    """Graphs compiled, and tensors read by the host, in a block."""

    compilations: int = 0
    reads: int = 0


def _totals() -> Counts:
    from torch_xla.debug import metrics

    def recorded(name: str) -> int:
        data = metrics.metric_data(name)
        return 0 if data is None else data[0]

    scalars = metrics.counter_value("aten::_local_scalar_dense") or 0
    compiled = max(recorded("CompileTime"), metrics.counter_value("UncachedCompile") or 0)
    return Counts(compiled, recorded("TransferFromDeviceTime") + scalars)


@contextmanager
def counted() -> Generator[Counts]:
    """Count compilations and reads by the host in a block."""
    before, counts = _totals(), Counts()
    yield counts
    after = _totals()
    counts.compilations = after.compilations - before.compilations
    counts.reads = after.reads - before.reads


def network(
    device: torch.device | str, dtype: torch.dtype = torch.float32, namespace: Any = nn
) -> nn.Module:
    """Return a network with buffers of both kinds, the same each time.

    Its statistics do not follow the batches, because torch_xla keeps the biased variance.
    """
    torch.manual_seed(0)
    norm = namespace.BatchNorm1d(6, momentum=0.0)
    layers = namespace.Linear(4, 6), norm, namespace.ReLU(), namespace.Linear(6, 2)
    net = namespace.Sequential(*layers).to(device, dtype)
    if torch.device(device).type == "xla":
        end_step()
    return net


def inputs(device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a batch, the same for a seed."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return batch.to(device, dtype)


def train_step(net: nn.Module, step: int) -> None:
    """Change parameters and buffers, as one step of training does."""
    parameters = [one for one in net.parameters() if one.requires_grad]
    place = parameters[0].device, parameters[0].dtype
    net(inputs(place[0], step, place[1])).square().mean().backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm1d):
                for buffer in norm.running_mean, norm.running_var:
                    # Zero and one are constants of a graph, other numbers are its arguments.
                    buffer.mul_(0.9).add_(0.1 * step + 0.03)


def train(
    net: nn.Module, update: Callable[[], object], first: int, last: int, *, syncs: bool = True
) -> None:
    """Take the steps from ``first`` up to ``last``, each followed by an update."""
    for step in range(first, last):
        train_step(net, step)
        update()
        if syncs and next(net.parameters()).is_xla:
            end_step()


def on_host(values: Any) -> Any:
    """Return a copy of tensors in the memory of the host."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    if isinstance(values, Mapping):
        return {name: on_host(value) for name, value in values.items()}
    if isinstance(values, Iterable) and not isinstance(values, str):
        return [on_host(value) for value in values]
    return values


def agree(scenario: Callable[[Any], Any], device: torch.device, **tolerance: float) -> None:
    """Assert that a scenario returns the same values on the CPU and on XLA."""
    expected = on_host(scenario(torch.device("cpu")))
    found = on_host(scenario(device))

    torch.testing.assert_close(
        found, expected, **(tolerance or {"rtol": RELATIVE, "atol": ABSOLUTE})
    )


def frozen_network(place: torch.device | str) -> nn.Module:
    """Return a network with a layer and a buffer whose values never change."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net[0].requires_grad_(False)
    net.register_buffer("scale", torch.ones(3))
    net.to(place)
    if torch.device(place).type == "xla":
        end_step()
    return net


def own_network(impl: Implementation, device: torch.device | str) -> nn.Module:
    class Block(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = impl.nn.Linear(4, 4)
            self.norm = impl.nn.BatchNorm1d(4, momentum=0.0)
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.linear(x)))

    class Net(impl.nn.Module):
        # The root decides whose methods load and convert: those of a container are torch's.
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", Block())
            self.add_module("1", Block())

        def __getitem__(self, index: int) -> nn.Module:
            return self.get_submodule(str(index))

        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x))

    torch.manual_seed(0)
    return Net().to(device)
