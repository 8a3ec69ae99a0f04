"""The rows of the table of differences that concern LightZero's networks."""

from typing import Final

from tests.divergence import NO_ISSUE, Divergence


_TESTS: Final = "tests/unit/models/test_differences.py::"


def _row(reason: str) -> Divergence:
    return Divergence("lightzero", reason, NO_ISSUE)


_IN_PLACE: Final = _row(
    "LightZero adds the shortcut of `DynamicsNetwork` into the output of `norm_common`: hooks see it "
    "overwritten, and backward hooks raise. Modkit adds out of place, with the same bits."
)

MODELS_DIVERGENCES: Final = {
    _TESTS + "test_mean_of_the_reward_head": _row(
        "LightZero's `DynamicsNetwork.get_reward_mean` always raises AttributeError; modkit's returns "
        "what its documentation says."
    ),
    _TESTS + "test_default_activation_is_not_shared_between_networks": _row(
        "In LightZero the default activation is one module for all networks of a class in the process, "
        "so its hooks and its mode are shared. In modkit each network has its own."
    ),
    _TESTS + "test_output_of_the_first_normalization": _IN_PLACE,
    _TESTS + "test_backward_hook_on_the_first_normalization": _IN_PLACE,
    _TESTS + "test_planes_of_another_size": _row(
        "LightZero reshapes to rows of the configured size, which mixes the samples of a batch where "
        "the numbers happen to divide. In modkit that is an error which names the argument."
    ),
    _TESTS + "test_no_planes_of_the_action": _row(
        "LightZero builds a `DynamicsNetwork` with `action_encoding_dim` below 1, which fails in its "
        "call or means nothing; modkit refuses it."
    ),
    _TESTS + "test_checkpoint_of_early_versions": _row(
        "Checkpoints of LightZero 0.0.2 to 0.0.4 hold blocks that were never used, which later "
        "versions refuse in a strict load; modkit leaves them out."
    ),
    _TESTS + "test_script": _row(
        "LightZero's networks cannot be scripted: their blocks name a child that most do not have, and "
        "annotations lack the element types."
    ),
    _TESTS + "test_layer_norm_with_downsampling": _row(
        "LightZero cannot build an `EfficientZeroModel` with LayerNorm and downsampling."
    ),
    _TESTS + "test_images_of_84_pixels": _row(
        "LightZero 0.1.0 fails in the call for images of 84 pixels, which later versions take."
    ),
    _TESTS + "test_shape_of_vector_observations": _row(
        "LightZero takes a number for the shape of vector observations, and fails for a tuple of one."
    ),
    _TESTS + "test_search_in_another_precision": _row(
        "In LightZero the first hidden state and the planes of actions have single precision, so a "
        "model in another one cannot search. In modkit they have that of the latent state."
    ),
    _TESTS + "test_latent_states_between_0_and_1": _row(
        "`state_norm` raises in LightZero 0.1.0, and makes a constant latent state NaN in the versions "
        "after it; in modkit that becomes zero."
    ),
}
