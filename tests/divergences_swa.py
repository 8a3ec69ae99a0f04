"""The rows of the table of differences that concern ``swa_utils``."""

from typing import Final

from tests.divergence import ISSUES, NO_ISSUE, PULLS, Divergence, listed


_UPDATE_BN: Final = "tests/parity/fixes/test_swa_update_bn.py::"
_BATCH_KINDS: Final = Divergence(
    "torch",
    "Torch's `update_bn` calls the model with a tensor and nothing else; in modkit a mapping holds "
    "keyword arguments, and `call_fn` takes batches of any form.",
    ISSUES + "49082",
)
_HALF_WAY: Final = Divergence(
    "torch",
    "If the loader or the model fails, torch's `update_bn` leaves statistics that are half done, "
    "layers without momentum and the model in training mode; modkit puts everything back.",
    NO_ISSUE,
)
_UNEVEN_BATCHES: Final = Divergence(
    "torch",
    "Torch's `update_bn` takes the plain mean over batches, in which a small last batch weighs as "
    "much as a full one. Modkit pools the samples where batches differ in size; else the bits are "
    "torch's.",
    "https://github.com/timgaripov/swa/issues/10",
)
_TRAINING_ALL: Final = Divergence(
    "torch",
    "Torch's `update_bn` puts the whole model into training mode, dropout included, and then gives "
    "all modules the mode of the root. In modkit only the layers that are updated are in training "
    "mode, and each module gets its own mode back.",
    "https://github.com/timgaripov/swa/issues/22",
)
_AVERAGED: Final = "tests/parity/fixes/test_swa_averaged_model.py::"
_BY_POSITION: Final = Divergence(
    "torch",
    "Torch's `AveragedModel` pairs tensors by position, cuts the longer list and broadcasts shapes, "
    "so a wrong tensor may be averaged in silence, or an error comes after half of the update. "
    "Modkit pairs by name, and names what does not fit before anything is written.",
    NO_ISSUE,
)
_READS: Final = Divergence(
    "torch",
    "Each update of torch's `AveragedModel` reads the count on the host, which synchronizes with the "
    "device and breaks the graph of `torch.compile`. On CPU modkit reads it too. On accelerators it reads "
    "it only if the buffer was replaced or written, and compiled updates never read it.",
    PULLS + "157705",
)
_INTEGERS: Final = listed("averages: integer buffers")
_NO_COPY: Final = Divergence(
    "torch",
    "Torch's `AveragedModel` cannot copy a model that holds a result of autograd, as weight_norm "
    "does after a call; modkit copies its value.",
    ISSUES + "28594",
)

SWA_DIVERGENCES: Final = {
    _AVERAGED + "test_parameters_are_paired_by_name": _BY_POSITION,
    _AVERAGED + "test_a_model_that_does_not_fit_is_refused": _BY_POSITION,
    _AVERAGED + "test_a_buffer_that_came_later_is_refused_before_anything_is_written": _BY_POSITION,
    _AVERAGED + "test_tying_after_the_copy_shifts_nothing": _BY_POSITION,
    _AVERAGED + "test_a_subclass_may_have_parameters_of_its_own": Divergence(
        "torch",
        "With `use_buffers=False` torch's `AveragedModel` takes its own `parameters()`, so those of a "
        "subclass are overwritten, and those of the average get the values of their neighbours. "
        "In modkit, as in torch with `use_buffers=True`, only those of `module` are averaged.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_an_update_never_asks_for_a_value": _READS,
    _AVERAGED + "test_an_update_is_one_graph_for_the_compiler": _READS,
    _AVERAGED + "test_buffers_without_fractions_are_copied": _INTEGERS,
    _AVERAGED + "test_the_count_of_batches_is_that_of_the_model": _INTEGERS,
    _AVERAGED + "test_an_average_in_float32_follows_a_model_in_bfloat16": Divergence(
        "torch",
        "In torch the averaging functions for lists refuse an average whose dtype is not the "
        "model's; in modkit they take it.",
        ISSUES + "57947",
    ),
    _AVERAGED + "test_models_with_weight_norm_are_copied_after_a_call": _NO_COPY,
    _AVERAGED + "test_models_that_keep_results_are_copied": _NO_COPY,
    _AVERAGED + "test_models_that_are_split_up_are_copied": Divergence(
        "torch",
        "Torch refuses to copy a model that `fully_shard` has sharded, so it has no `AveragedModel`; "
        "modkit makes a copy that is sharded in the same way.",
        ISSUES + "149138",
    ),
    _AVERAGED + "test_lazy_models_are_averaged_once_they_have_shapes": Divergence(
        "torch",
        "Torch cannot update the average of a model that was lazy when it was copied; modkit "
        "copies it again when it has shapes.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_a_model_may_hold_its_average": Divergence(
        "torch",
        "A model of torch cannot hold its own average as a child: the first update fails after "
        "the parameters were overwritten. Modkit leaves the average out.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_an_average_made_in_inference_mode_can_be_updated": Divergence(
        "torch",
        "An averaged model that is made in inference mode can in torch never be updated outside.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_buffers_may_change_their_shape": Divergence(
        "torch",
        "Buffers that change their shape, caches for instance, make torch's update fail or "
        "broadcast; modkit copies them whole.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_what_a_function_keeps_does_not_change": Divergence(
        "torch",
        "Torch hands its own counter to averaging functions, so a count that one keeps changes "
        "later; modkit hands over a copy.",
        NO_ISSUE,
    ),
    _AVERAGED + "test_parameters_in_8_bits_are_averaged": Divergence(
        "torch",
        "Torch cannot average 8-bit floating-point parameters; modkit calculates in float32 and "
        "rounds.",
        NO_ISSUE,
    ),
    _UPDATE_BN + "test_a_mapping_holds_keyword_arguments": _BATCH_KINDS,
    _UPDATE_BN + "test_a_function_calls_the_model_with_the_moved_batch": _BATCH_KINDS,
    _UPDATE_BN + "test_a_failing_loader_leaves_every_module_as_it_was": _HALF_WAY,
    _UPDATE_BN + "test_a_failing_model_leaves_every_module_as_it_was": _HALF_WAY,
    _UPDATE_BN + "test_an_empty_loader_is_an_error": listed("averages: update_bn without batches"),
    _UPDATE_BN + "test_samples_weigh_the_same_in_batches_of_several_sizes": _UNEVEN_BATCHES,
    _UPDATE_BN + "test_pixels_weigh_the_same_in_images_of_several_sizes": _UNEVEN_BATCHES,
    _UPDATE_BN + "test_only_normalization_runs_in_training_mode": _TRAINING_ALL,
    _UPDATE_BN + "test_every_module_gets_its_own_mode_back": _TRAINING_ALL,
    _UPDATE_BN + "test_instance_normalization_gets_statistics_too": Divergence(
        "torch",
        "Torch's `update_bn` passes over instance normalization with `track_running_stats`.",
        NO_ISSUE,
    ),
}
