import pytest

from modkit.compat.model import compare
from modkit.compat.outcomes import difference
from tests.integration.compat.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library(name: str) -> None:
    """A model whose library is imported with modkit.nn is the same in every check."""
    pytest.importorskip(
        name.split(maxsplit=1)[0], reason="needs the library: nox -s ecosystem installs it"
    )
    title, results = compare(MODELS[name])
    kinds = {each.case: each.kind for each in results}

    assert ", 0 of modkit's Module" not in title
    assert kinds["output in evaluation mode"] == "equal"
    assert [
        (each.case, difference(each.torch, each.modkit))
        for each in results
        if each.kind == "unlisted"
    ] == []
    # Compilers refuse many models; the rest was compared.
    refused = [each.case for each in results if each.kind == "not compared"]
    assert [case for case in refused if not case.startswith("torch.")] == []
