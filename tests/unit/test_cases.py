import pytest

from tests import cases
from tests.cases import for_each


def items(monkeypatch: pytest.MonkeyPatch, *axes: tuple[object, ...]) -> list[list[tuple]]:
    """Return the ids and values that `--unfold` gives a test with these cases, outermost first."""
    monkeypatch.setattr(cases, "unfolded", True)

    def test(**_arguments: object) -> None:
        raise AssertionError

    for axis in axes:
        test = for_each(*axis)(test)
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return [[(parameter.id, parameter.values) for parameter in mark.args[1]] for mark in marks]


def test_unfolded_cases_have_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short values are their ids; others, and those that are there already, are numbered."""
    values = ["a b", 3, None, len, object(), "x" * 61, 3]

    assert [name for name, _ in items(monkeypatch, ("value", values))[0]] == [
        "a b",
        "3",
        "None",
        "len",
        "value4",
        "value5",
        "3-6",
    ]


def test_unfolded_cases_have_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several names take tuples, ids may be given, and each decorator adds a mark."""
    axes = (("a, b", [(1, 2), (3, 4)], ["first", "second"]), ("c", lambda: [5]))

    assert items(monkeypatch, *axes) == [[("first", (1, 2)), ("second", (3, 4))], [("5", (5,))]]


def test_unfolded_cases_start_without_global_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the fixture that removes the hooks of a case."""
    monkeypatch.setattr(cases, "unfolded", True)

    def test(value: int) -> None:
        assert value

    test = for_each("value", [1])(test)

    assert ("clean_hooks",) in [mark.args for mark in test.pytestmark]


def test_folded_cases_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One item runs every case, and its failure names those that fail."""
    monkeypatch.setattr(cases, "unfolded", False)
    seen = []

    @for_each("value", [1, 2, 3])
    def test(value: int) -> None:
        seen.append(value)
        assert value == 2

    with pytest.raises(AssertionError, match="2 of 3 cases failed; --unfold") as caught:
        test()

    assert seen == [1, 2, 3]
    assert "case 1\n" in str(caught.value)
    assert "case 3\n" in str(caught.value)


def test_the_option_unfolds(request: pytest.FixtureRequest) -> None:
    """The flag is set in a run with `--unfold`, and only there."""
    assert cases.unfolded is request.config.getoption("--unfold")
