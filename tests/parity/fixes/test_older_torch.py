from tests.helpers import Implementation
from tests.parity.module.nets import TensorLike


def test_an_object_that_is_like_a_tensor_may_be_a_buffer(impl: Implementation) -> None:
    """An object that takes part in torch's function protocol is registered and assigned."""
    module, first, second = impl.Module(), TensorLike(), TensorLike()
    module.register_buffer("x", first)
    registered = module.x
    module.x = second

    assert registered is first
    assert module._buffers == {"x": second}
