import pytest
import torch

from tests.helpers import Implementation
from tests.models import leaf


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
@pytest.mark.parametrize("asked", ["property", "getattr"])
def test_a_name_that_is_taken_is_asked_for_once(impl: Implementation, kind, asked) -> None:
    """A property may compute something, such as a step of a spectral norm's power iteration."""
    reads = []

    class Lazy(impl.Module):
        if asked == "property":

            @property
            def weight(self):
                reads.append("weight")
                return torch.ones(1)

        else:

            def __getattr__(self, name):
                reads.append(name)
                return torch.ones(1)

    register = getattr(Lazy(), f"register_{kind}")
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        register("weight", None)

    assert reads == ["weight"]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_name_is_asked_for_once_for_a_value_that_is_refused(impl: Implementation, kind) -> None:
    """A `__getattr__` of the class sees each lookup, of which torch makes at most one."""
    reads = []

    class Watched(impl.Module):
        def __getattr__(self, name):
            reads.append(name)
            return super().__getattr__(name)

    register = getattr(Watched(), f"register_{kind}")
    reads.clear()
    with pytest.raises(TypeError):
        register("weight", "text")

    assert reads == (["weight"] if kind != "module" else [])


def test_a_replaced_registry_takes_new_members(impl: Implementation) -> None:
    """Later registrations and deletions go to the object that was assigned."""
    module = leaf(impl)
    replacement = type("Registry", (dict,), {})(module._parameters)
    module._parameters = replacement
    module.extra = torch.nn.Parameter(torch.ones(1))
    del module.weight

    assert module._parameters is replacement
    assert list(replacement) == ["bias", "extra"]
    assert [name for name, _ in module.named_parameters()] == ["extra"]
    assert "extra" in module.state_dict()
