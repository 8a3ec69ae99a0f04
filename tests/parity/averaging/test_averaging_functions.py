import copy
import inspect
import pickle

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, Implementation, same


FUNCTIONS = {
    "get_ema_avg_fn": {"decay": 0.9},
    "get_swa_avg_fn": {},
    "get_ema_multi_avg_fn": {"decay": 0.9},
    "get_swa_multi_avg_fn": {},
}
SINGLE = [name for name in FUNCTIONS if "multi" not in name]
MANY = [name for name in FUNCTIONS if "multi" in name]
EMA = [name for name in FUNCTIONS if "ema" in name]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def made(impl: Implementation, name: str):
    """Make an averaging function."""
    return getattr(impl, name)(**FUNCTIONS[name])


def called(impl: Implementation, name: str, averaged, current, count):
    """Call a function on one tensor, or on a list and a tuple; return what became of the average."""
    if name in SINGLE:
        return made(impl, name)(averaged, current, count)
    tensors = [averaged, averaged.clone()]
    result = made(impl, name)(tensors, [current, current * 2], count)
    made(impl, name)(tuple(tensors), (current, current * 2), count)
    return result, tensors


@for_each("name", FUNCTIONS)
def test_functions_have_the_names_of_torch(name: str) -> None:
    """Name, qualified name, module, docstring and signature equal torch's."""

    def scenario(impl: Implementation):
        function = made(impl, name)
        names = (function.__name__, function.__qualname__, function.__module__, function.__doc__)
        return names, str(inspect.signature(function)), inspect.unwrap(function).__code__.co_name

    assert same(scenario)[0] == "returned"


@for_each("way", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@for_each("name", FUNCTIONS)
def test_copies_have_the_names_too(name: str, way) -> None:
    """A copy equals its original, and has its name and signature."""
    function = made(MODKIT, name)
    copied = way(function)

    assert copied == function
    assert hash(copied) == hash(function)
    assert copied.__qualname__ == function.__qualname__
    assert inspect.signature(copied) == inspect.signature(function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_functions(impl: Implementation, name: str) -> None:
    """``inspect`` takes an averaging function for a function."""
    assert inspect.isfunction(made(impl, name))


@for_each("count", [0, 1, 7, torch.tensor(0), torch.tensor(7)])
@for_each(("dtype", "other"), [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.bfloat16)])
@for_each("name", FUNCTIONS)
def test_functions_give_the_bits_of_torch(
    name: str, dtype: torch.dtype, other: torch.dtype, count
) -> None:
    """Values, dtypes and errors equal torch's for every dtype, two of them, and each kind of count."""

    def scenario(impl: Implementation):
        averaged, current = (5 * torch.randn(2, 3)).to(dtype), (5 * torch.randn(2, 3)).to(other)
        try:
            return called(impl, name, averaged, current, count)
        except RuntimeError as error:
            return str(error), averaged

    assert same(scenario)[0] == "returned"


@for_each("dtype", [torch.float32, torch.int64])
@for_each("name", MANY)
def test_lists_that_do_not_fit_are_refused_as_in_torch(name: str, dtype: torch.dtype) -> None:
    """Empty lists, lists of unequal length and tensors of unequal shape raise torch's errors."""

    def scenario(lengths):
        def run(impl: Implementation):
            averaged, current = ([torch.ones(n).to(dtype) for n in row] for row in lengths)
            made(impl, name)(averaged, current, 1)

        return run

    assert same(scenario(([], [])))[:2] == ("raised", "IndexError")
    unequal = [same(scenario(rows))[0] for rows in (([1, 1], [1]), ([1], [1, 1]))]
    # Torch before 2.10 leaves out integers without a partner.
    if dtype.is_floating_point or name == "get_swa_multi_avg_fn":
        assert unequal == ["raised", "raised"]
    assert same(scenario(([2], [3])))[0] == "raised"


DECAYS = {
    "ValueError": [-0.1, 1.1, -1, 2, float("inf"), torch.tensor(1.5)],
    "TypeError": [None, "0.9", [0.9]],
    # The limits, and NaN, which compares with nothing.
    "": [0, 1, 0.0, 1.0, True, float("nan"), torch.tensor(0.5)],
}


@for_each(("error", "decay"), [(error, one) for error, row in DECAYS.items() for one in row])
@for_each("name", EMA)
def test_decays(name: str, error: str, decay) -> None:
    """A decay outside [0, 1], or that is not a number, raises torch's error; others work as in torch."""

    def scenario(impl: Implementation):
        function = getattr(impl, name)(decay)
        averaged, current = torch.randn(3), torch.randn(3)
        if name in SINGLE:
            return function(averaged, current, 1)
        function([averaged], [current], 1)
        return averaged

    kind, value, *_ = same(scenario)

    assert kind == ("raised" if error else "returned")
    assert not error or value == error


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_can_be_pickled(impl: Implementation, name: str) -> None:
    """A function that was pickled averages with the decay that it was made with."""
    function = pickle.loads(pickle.dumps(made(impl, name)))
    averaged, current = torch.randn(3), torch.randn(3)
    if name in SINGLE:
        assert torch.equal(function(averaged, current, 4), made(impl, name)(averaged, current, 4))
    else:
        other = averaged.clone()
        function([averaged], [current], 4)
        made(impl, name)([other], [current], 4)
        assert torch.equal(averaged, other)


@pytest.mark.parametrize("name", EMA)
def test_exponential_functions_show_their_decay(impl: Implementation, name: str) -> None:
    """The decay can be read in the representation of the function."""
    assert repr(made(impl, name)) == f"{name}(decay=0.9)"
