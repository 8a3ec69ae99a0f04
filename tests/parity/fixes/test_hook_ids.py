import pickle

import pytest
from torch.utils.hooks import RemovableHandle

from tests.helpers import Implementation
from tests.parity.hooks.tools import MODULE_REGISTRARS, do_nothing
from tests.processes import python


ANOTHER_PROCESS = """
import pickle, sys
import tests.helpers

module = pickle.loads(sys.stdin.buffer.read())
module[0].register_forward_hook(lambda module, args, output: None)
print(*(hook.__name__ for hook in module[0]._forward_hooks.values()))
"""


def test_hooks_from_another_process_are_kept_when_one_is_added(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new hook does not take the place of those that came with an unpickled network."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    network = impl.own.Sequential(impl.own.Identity())
    for _ in range(3):
        network[0].register_forward_hook(print)
    result = python(ANOTHER_PROCESS, stdin=pickle.dumps(network))

    assert result.stdout.split() == ["print", "print", "print", "<lambda>"], result.stderr


def do_nothing_private(*_arguments: object) -> None:
    """Be a state-dict hook that no test registers publicly, which torch would not forget."""


@pytest.mark.parametrize("registrar", MODULE_REGISTRARS)
def test_ids_of_unpickled_hooks_are_not_given_again(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch, registrar: str
) -> None:
    """Where ids start from zero again, an unpickled hook of any kind keeps its own."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    network = impl.own.Sequential(impl.own.Identity())
    hook = do_nothing_private if registrar == "_register_state_dict_hook" else do_nothing
    old = getattr(network[0], registrar)(hook)
    pickled = pickle.dumps(network)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    copied = pickle.loads(pickled)
    new = getattr(copied[0], registrar)(hook)

    assert new.id == old.id + 1
    assert list(new.hooks_dict_ref()) == [old.id, new.id]


def test_unpickling_does_not_set_ids_back(impl: Implementation) -> None:
    """Old ids in an unpickled module have no effect on a process that is far beyond them."""
    module = impl.own.Identity()
    module.register_forward_hook(do_nothing)
    pickled = pickle.dumps(module)
    last = module.register_forward_hook(do_nothing)
    copied = pickle.loads(pickled)

    assert copied.register_forward_hook(do_nothing).id == last.id + 1
