import inspect

import torch.optim.swa_utils as upstream

import modkit.optim
from modkit.optim import swa_utils
from tests.cases import for_each
from tests.helpers import Implementation


def parameters(function) -> list[tuple[str, str, object]]:
    """Return name, kind and default of each parameter."""
    return [
        (p.name, p.kind.name, p.default) for p in inspect.signature(function).parameters.values()
    ]


def test_public_names_are_those_of_torch() -> None:
    """Each name that torch exports is exported, and no other."""
    assert sorted(swa_utils.__all__) == sorted(upstream.__all__)
    assert modkit.optim.swa_utils is swa_utils


@for_each("name", upstream.__all__)
def test_signatures_are_those_of_torch(name: str) -> None:
    """Torch's parameters come first, unchanged; more are given by keyword and have defaults."""
    ours, theirs = (parameters(getattr(module, name)) for module in (swa_utils, upstream))
    more = ours[len(theirs) :]

    assert ours[: len(theirs)] == theirs
    assert {kind for _, kind, _ in more} <= {"KEYWORD_ONLY"}
    assert inspect.Parameter.empty not in {default for _, _, default in more}


@for_each("name", upstream.__all__)
def test_names_say_where_they_are_imported_from(impl: Implementation, name: str) -> None:
    """Functions and AveragedModel name their library; SWALR is torch's own in both."""
    home = "torch" if name == "SWALR" else impl.name
    found = getattr(impl.swa_utils, name)

    assert (found.__module__, found.__qualname__) == (f"{home}.optim.swa_utils", name)
    assert found.__doc__


def test_update_parameters_has_the_signature_of_torch() -> None:
    """The other methods are those of Module."""
    ours, theirs = swa_utils.AveragedModel, upstream.AveragedModel

    assert parameters(ours.update_parameters) == parameters(theirs.update_parameters)


def test_alias_for_lists_of_tensors(impl: Implementation) -> None:
    """The alias that annotates averaging functions can be imported, and means the same."""
    assert impl.swa_utils.PARAM_LIST == upstream.PARAM_LIST
