import pytest

from tests.helpers import MODKIT
from tests.stress.threads import Storm


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_sixteen_threads_use_one_model(seconds: float) -> None:
    """Concurrent use gives no wrong result, lost hook, lost error, or crash."""
    storm = Storm(MODKIT)
    storm.run(seconds)

    assert storm.wrong == {}
    assert len(storm.done) == 16
