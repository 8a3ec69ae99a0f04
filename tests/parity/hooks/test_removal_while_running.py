import pytest
import torch

from tests.helpers import Implementation
from tests.models import parent_and_child
from tests.parity.hooks.tools import noting


def test_hook_removed_by_an_earlier_one_is_still_marked_as_run(impl: Implementation) -> None:
    """An always_call hook that runs after its removal is not called again (rules 15 and 21)."""
    log: list[str] = []

    def fails(*_: object) -> None:
        log.append("fails")
        raise LookupError("removed hook")

    module = impl.own.Identity()
    module.register_forward_hook(lambda *_: later.remove())
    later = module.register_forward_hook(fails, always_call=True)
    with pytest.raises(LookupError, match="removed hook"):
        module(0)

    assert log == ["fails"]


STATE_HOOKS = pytest.mark.parametrize(
    ("registrar", "run"),
    [
        ("register_state_dict_pre_hook", lambda module: module.state_dict()),
        ("register_state_dict_post_hook", lambda module: module.state_dict()),
        ("_register_state_dict_hook", lambda module: module.state_dict()),
        ("register_load_state_dict_pre_hook", lambda module: module.load_state_dict({}, False)),
        ("_register_load_state_dict_pre_hook", lambda module: module.load_state_dict({}, False)),
        ("register_load_state_dict_post_hook", lambda module: module.load_state_dict({}, False)),
    ],
)


@STATE_HOOKS
def test_state_hook_may_remove_itself_while_it_runs(
    impl: Implementation, registrar: str, run
) -> None:
    """A state-dict or load hook that removes itself runs once; the next one still runs."""
    log: list[str] = []
    module = parent_and_child(impl)

    def once(*_: object) -> None:
        log.append("once")
        handle.remove()

    handle = getattr(module, registrar)(once)
    getattr(module, registrar)(noting(log, "next"))
    run(module)
    run(module)

    assert log == ["once", "next", "next"]


@STATE_HOOKS
def test_state_hook_may_add_another_while_it_runs(
    impl: Implementation, registrar: str, run
) -> None:
    """A state-dict or load hook that is registered by another waits for the next time."""
    log: list[str] = []
    module = parent_and_child(impl)

    def adds(*_: object) -> None:
        log.append("adds")
        if len(log) == 1:
            getattr(module, registrar)(noting(log, "added"))

    getattr(module, registrar)(adds)
    run(module)

    assert log == ["adds"]

    run(module)

    assert log == ["adds", "adds", "added"]


@pytest.mark.parametrize(
    ("kind", "by_assignment"),
    # Torch's own code runs the hooks of a buffer, and those of a module that is assigned.
    [("parameter", False), ("parameter", True), ("module", False)],
)
def test_registration_hook_may_remove_itself_while_it_runs(
    impl: Implementation, kind: str, by_assignment: bool
) -> None:
    """A registration hook that removes itself is asked once; the next one is asked always."""
    log: list[str] = []
    register_hook = getattr(impl, f"register_module_{kind}_registration_hook")

    def once(*_: object) -> None:
        log.append("once")
        handle.remove()

    handle = register_hook(once)
    register_hook(noting(log, "next"))
    module = impl.Module()
    for name in ("a", "b"):
        member = {
            "parameter": impl.own.Parameter(torch.ones(1)),
            "module": impl.Module(),
        }[kind]
        if by_assignment:
            setattr(module, name, member)
        else:
            getattr(module, f"register_{kind}")(name, member)

    assert log == ["once", "next", "next"]
    assert set(module.__dir__()) >= {"a", "b"}
