import pytest

from tests.helpers import Implementation
from tests.models import parent_and_child
from tests.parity.hooks.test_registration_hooks import CHECKED_WAYS, KINDS, register, register_hook
from tests.parity.hooks.tools import noting


LOAD_HOOKS = (
    *("register_load_state_dict_pre_hook", "_register_load_state_dict_pre_hook"),
    "register_load_state_dict_post_hook",
)


def run(module, registrar: str) -> None:
    """Save or load, so that the hook runs."""
    if "load" in registrar:
        module.load_state_dict({}, strict=False)
    else:
        module.state_dict()


@pytest.mark.parametrize("registrar", LOAD_HOOKS)
def test_load_hook_may_remove_itself_while_it_runs(impl: Implementation, registrar: str) -> None:
    """A load hook that removes itself runs once; the next one still runs."""
    log: list[str] = []
    module = parent_and_child(impl)

    def once(*_: object) -> None:
        log.append("once")
        handle.remove()

    handle = getattr(module, registrar)(once)
    getattr(module, registrar)(noting(log, "next"))
    run(module, registrar)
    run(module, registrar)

    assert log == ["once", "next", "next"]


@CHECKED_WAYS
def test_registration_hook_may_remove_itself_while_it_runs(
    impl: Implementation, kind: str, by_assignment: bool
) -> None:
    """A registration hook that removes itself is asked once; the next one is asked always."""
    log: list[str] = []

    def once(*_: object) -> None:
        log.append("once")
        handle.remove()

    handle = register_hook(impl, kind, once)
    register_hook(impl, kind, noting(log, "next"))
    module = impl.Module()
    for name in ("a", "b"):
        register(module, kind, name, KINDS[kind][0](), by_assignment=by_assignment)

    assert log == ["once", "next", "next"]
    assert set(module.__dir__()) >= {"a", "b"}
