from tests.helpers import Implementation, same


def test_forward_runs(impl: Implementation) -> None:
    """A module is called through its forward."""

    class Double(impl.Module):
        def forward(self, x: int) -> int:
            return 2 * x

    assert Double()(3) == 6


def test_missing_forward_is_named() -> None:
    """A module without forward raises NotImplementedError with its class name."""
    assert same(lambda impl: impl.Module()(1))[0] == "raised"
