import copy

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import one_weight, set_weight
from tests.parity.averaging.rules import RULES, state_after_updates
from tests.unit.averaging.recipes import as_accelerator


every_rule = for_each("rule", RULES)


def add_in_place(averaged, count: int) -> None:
    """Add the difference with an augmented assignment to the attribute."""
    averaged.n_averaged += count - averaged.n_averaged


def write_all_buffers(averaged, count: int) -> None:
    """Write every buffer through `.data`, as a routine that broadcasts buffers does."""
    for buffer in averaged.buffers():
        buffer.data.copy_(count)


def load(averaged, count: int, *, assign: bool = False) -> None:
    state = {**averaged.state_dict(), "n_averaged": torch.tensor(count)}
    averaged.load_state_dict(state, assign=assign)


def load_swapping(averaged, count: int) -> None:
    """Load a state with that count, and exchange the tensors behind the Python objects."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(averaged, count, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


WRITES = {
    "fill_": lambda averaged, count: averaged.n_averaged.fill_(count),
    "copy_": lambda averaged, count: averaged.n_averaged.copy_(torch.tensor(count)),
    "+=": add_in_place,
    "detach": lambda averaged, count: averaged.n_averaged.detach().fill_(count),
    "view": lambda averaged, count: averaged.n_averaged.view(1).fill_(count),
    "data": lambda averaged, count: averaged.n_averaged.data.fill_(count),
    "data of all buffers": write_all_buffers,
    "assigned data": lambda averaged, count: setattr(
        averaged.n_averaged, "data", torch.tensor(count)
    ),
    "numpy": lambda averaged, count: averaged.n_averaged.numpy().fill(count),
    "dlpack": lambda averaged, count: torch.from_dlpack(averaged.n_averaged).fill_(count),
    "set_": lambda averaged, count: averaged.n_averaged.set_(torch.tensor(count)),
    "swap_tensors": lambda averaged, count: torch.utils.swap_tensors(
        averaged.n_averaged, torch.tensor(count)
    ),
    "inference mode": torch.inference_mode()(
        lambda averaged, count: averaged.n_averaged.fill_(count)
    ),
    "replaced": lambda averaged, count: setattr(averaged, "n_averaged", torch.tensor(count)),
    "registered anew": lambda averaged, count: averaged.register_buffer(
        "n_averaged", torch.tensor(count)
    ),
    "_buffers": lambda averaged, count: averaged._buffers.update(n_averaged=torch.tensor(count)),
    "state_dict": lambda averaged, count: averaged.state_dict()["n_averaged"].fill_(count),
    "state_dict(keep_vars=True)": lambda averaged, count: averaged.state_dict(keep_vars=True)[
        "n_averaged"
    ].data.fill_(count),
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda averaged, count: load(averaged, count, assign=True),
    "load_state_dict with swap_tensors": load_swapping,
}
# Only where the host does not read the count at each update.
STORAGE_WRITES = {
    "storage": lambda averaged, count: averaged.n_averaged.untyped_storage().copy_(
        torch.tensor(count).untyped_storage()
    ),
    "data.zero_": lambda averaged, count: averaged.n_averaged.data.zero_().add_(count),
    "out=": lambda averaged, count: torch.add(torch.tensor(count), 0, out=averaged.n_averaged.data),
}


def average_of_two(impl: Implementation, rule: str = "default"):
    """Build a model and its average after updates with the weights 1 and 3."""
    model = one_weight(impl, 1.0)
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    averaged.update_parameters(model)
    averaged.update_parameters(set_weight(model, 3.0))
    return model, averaged


def values(averaged) -> tuple[float, int]:
    """Return the averaged weight and the count."""
    return averaged.module.weight.item(), averaged.n_averaged.item()


@for_each(("rule", "copied"), [*((rule, False) for rule in RULES), ("default", True)])
@for_each(
    ("write", "on_device"),
    [
        *((write, False) for write in WRITES.items()),
        *((write, True) for write in (WRITES | STORAGE_WRITES).items()),
    ],
)
def test_a_written_count_reaches_every_rule(
    rule: str, copied: bool, write, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rule copies, averages or waits by the latest written count with the bits of torch."""
    if on_device:
        as_accelerator(monkeypatch)

    def scenario(impl: Implementation):
        model, averaged = average_of_two(impl, rule)
        found = []
        for count in 5, 0, 3, 0, -1:
            write[1](averaged, count)
            if copied:
                averaged = copy.deepcopy(averaged)
            for value in 0.3, float("inf"), 0.7:
                averaged.update_parameters(set_weight(model, value))
                found.append(values(averaged))
            set_weight(averaged.module, 1.0)
        return repr(found)

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("write", ["zero_", "replaced"])
def test_a_count_made_in_inference_mode_is_read_at_each_update(
    impl: Implementation, write: str
) -> None:
    """A counter made and updated in inference mode may be set to zero there."""
    model = one_weight(impl, 1.0)
    averaged = impl.AveragedModel(model)
    with torch.inference_mode():
        averaged.n_averaged = torch.tensor(1)
        averaged.update_parameters(model)
        set_weight(model, 5.0)
        if write == "zero_":
            averaged.n_averaged.zero_()
        else:
            averaged.n_averaged = torch.tensor(0)
        averaged.update_parameters(model)

    assert values(averaged) == (5.0, 1)


def integers(impl: Implementation, *numbers: int, dtype: torch.dtype = torch.int64):
    """Build a model with one parameter of integers and one of floats."""
    model = one_weight(impl)
    model.index = impl.nn.Parameter(torch.tensor(numbers, dtype=dtype), requires_grad=False)
    return model


@every_rule
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_integer_parameters_do_what_torch_does(rule: str, use_buffers: bool, dtype) -> None:
    """Each rule gives torch's integers, or torch's error where a kernel takes none."""

    def scenario(impl: Implementation):
        first, second = (integers(impl, *n, dtype=dtype) for n in [(0, 1, 3), (1, 1, 120)])
        averaged = impl.AveragedModel(first, use_buffers=use_buffers, **RULES[rule](impl))
        state, problem = state_after_updates(averaged, first, second)
        return state["module.index"], problem

    assert same(scenario)[0] == "returned"
