import pytest

from modkit.compat.behaviours import areas
from modkit.compat.outcomes import difference
from modkit.compat.run import run_case


CASES = {
    f"{area}: {name}": (area, name, case)
    for area, cases in areas().items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_shared_behaviour(name: str) -> None:
    """The behaviors of `modkit compat` are equal with both libraries, or differ exactly as listed."""
    found = run_case(*CASES[name])

    assert found.kind in {"equal", "listed"}, difference(found.torch, found.modkit)


def test_there_are_behaviours_of_every_area() -> None:
    """A command that ran next to nothing would find nothing, too."""
    assert {area for area, cases in areas().items() if len(cases) < 5} == set()
    assert len(CASES) >= 200
