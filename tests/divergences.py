"""The one table of differences between torch and modkit.

A key is a test id without its parameters' ``[...]``. ``fails_on`` names the implementation for
which that test is a strict xfail: ``"torch"`` where modkit fixes a defect of torch, ``"modkit"``
where torch does something that modkit does not, ``"lightzero"`` where networks of LightZero have
defects that modkit's do not have. ``docs/parity.md`` is rendered from this table.
"""

from typing import Final

from tests.divergence import ISSUES, NO_ISSUE, PULLS, Divergence
from tests.divergences_jit import JIT_DIVERGENCES
from tests.divergences_models import MODELS_DIVERGENCES
from tests.divergences_swa import SWA_DIVERGENCES


_LOST_MEMBER: Final = Divergence(
    "torch",
    "Torch deletes the old attribute before it validates the new value, so a refused assignment "
    "loses it; modkit puts it back where it was.",
    NO_ISSUE,
)
_SELF_REMOVAL: Final = Divergence(
    "torch",
    "In torch a state-dict, load or registration hook that removes itself while it runs raises "
    '"OrderedDict mutated during iteration"; modkit runs over a snapshot.',
    ISSUES + "60132",
)

_LOST_TIE: Final = Divergence(
    "torch",
    "In torch `load_state_dict(assign=True)` makes one Parameter per key, so tied parameters come "
    "apart; modkit keeps those tied whose entries are the same data.",
    NO_ISSUE,
)

_LOAD: Final = "tests/parity/fixes/test_load.py::"
_PARTIAL_LOAD: Final = Divergence(
    "torch",
    "A load that torch refuses has already written the entries before and after the bad one. Where "
    "no hook or override takes part in loading, modkit checks all entries first.",
    NO_ISSUE,
)


_OWN_SETATTR: Final = Divergence(
    "modkit",
    "`fully_shard` writes parameters past `__setattr__` where a class has that of torch, and calls any "
    "other one, as that of modkit: global parameter registration hooks see each exchange of shards.",
    NO_ISSUE,
)

_METACLASS: Final = Divergence(
    "modkit",
    "`Module` has a metaclass, so that torch's modules are instances of it. A class with a metaclass "
    "of its own raises Python's metaclass conflict unless that derives from `type(nn.Module)`, and "
    "`metaclass=ABCMeta` does not make a class abstract; put `abc.ABC` among the bases.",
    NO_ISSUE,
)
_SUPER_OF_MODULE: Final = Divergence(
    "modkit",
    "`super(nn.Module, self)` in a user's class finds the methods of `torch.nn.Module`, which come "
    "behind modkit's. To set an attribute without registering it, call `object.__setattr__`.",
    NO_ISSUE,
)

_AVERAGING: Final = "tests/parity/averaging/test_averaging_functions.py::"
_STICKY_KIND: Final = Divergence(
    "torch",
    "Once a module has had a full backward hook, torch refuses the other kind for ever, and the "
    "other way round. In modkit the kind is free again when the last hook is removed.",
    NO_ISSUE,
)
_MARKED_CALLABLE: Final = Divergence(
    "torch",
    "Torch's `register_state_dict_post_hook` marks the user's callable for ever: the same function "
    "cannot be a private hook anywhere, bound methods cannot be marked at all, and pickling loses "
    "the mark. In modkit the id in the hook table says that the hook is public.",
    PULLS + "131690",
)
_REUSED_ID: Final = Divergence(
    "torch",
    "Hook ids start from zero in each process, so in torch a hook that is registered on an "
    "unpickled module may silently take the place of one that it came with.",
    NO_ISSUE,
)
_UNCHECKED_PAIR: Final = Divergence(
    "torch",
    "Torch takes every pair that a forward pre-hook with keyword arguments returns for args and "
    "kwargs, and iterates over a tensor in the place of the args; modkit raises the documented "
    "error. A list of args, which torch takes apart only without backward hooks, always works.",
    NO_ISSUE,
)
_BARE_GRADIENT: Final = Divergence(
    "torch",
    "A full backward pre-hook may return a tensor, says its documentation, but torch takes its "
    "rows for the gradients of several outputs.",
    ISSUES + "102645",
)
_TUPLE_CLASS: Final = Divergence(
    "torch",
    "With a full backward hook torch rebuilds every tuple as if it were a named one, so an output "
    "whose class takes one iterable, those of torch.max and its like too, raises or falls apart.",
    NO_ISSUE,
)
_UNHASHABLE: Final = Divergence(
    "torch",
    "Torch keeps the modules that a walk has met in a set, so modules that cannot be hashed, such "
    "as dataclasses and mappings, raise, and those that compare equal are taken for one. Modkit "
    "tells them apart by identity.",
    ISSUES + "110959",
)
_UNTIED: Final = Divergence(
    "torch",
    "Torch unties shared parameters where a conversion has to replace them, as `to_empty` and "
    '`to("meta")` do, and unties shared buffers always; what is shared is converted once for each '
    "place. In modkit it stays shared, and is converted once.",
    "https://github.com/huggingface/transformers/pull/44471",
)
_MEMORY_FORMAT: Final = Divergence(
    "torch",
    "Torch asks for the memory format of images in volumes too, and the other way round, which "
    "raises; modkit applies each format to tensors of its number of dimensions.",
    ISSUES + "77821",
)
_UNCHECKED_RESULT: Final = Divergence(
    "torch",
    "Torch stores whatever a registration hook returns, so a string may end up among the "
    "parameters; modkit raises a TypeError that names the class, the name and the value.",
    NO_ISSUE,
)
_RESERVED_NAME: Final = Divergence(
    "torch",
    "Torch lets a parameter or a child take the name of a module's own state, such as `training`, "
    "if it is assigned, and the module no longer works; registering it raises, and so does "
    "assigning it in modkit.",
    NO_ISSUE,
)
_UNSET_CHILD: Final = Divergence(
    "torch",
    "`set_submodule` may replace a module or create one, but torch does not let it fill a name "
    "that is None.",
    ISSUES + "143441",
)
_CYCLE: Final = Divergence(
    "torch",
    "On a module that contains itself torch runs into the recursion limit, and the error does not "
    "say why; modkit's names the module, and is raised at once.",
    NO_ISSUE,
)

_ASSIGNMENT: Final = "tests/parity/module/test_failed_assignment.py::"
_REMOVAL: Final = "tests/parity/hooks/test_removal_while_running.py::"
_REGISTRATION: Final = "tests/parity/hooks/test_registration.py::"
_HOOK_IDS: Final = "tests/parity/fixes/test_hook_ids.py::"
_PRE_HOOKS: Final = "tests/parity/fixes/test_forward_pre_hooks.py::"
_BACKWARD_HOOKS: Final = "tests/parity/fixes/test_backward_hooks.py::"
_SAVE_HOOKS: Final = "tests/parity/fixes/test_state_dict_hooks.py::"
_HASHING: Final = "tests/parity/fixes/test_hashing.py::"
_MEMBERS: Final = "tests/parity/fixes/test_members.py::"
_CLASSES: Final = "tests/parity/module/test_classes.py::"
_CYCLES: Final = "tests/parity/fixes/test_cycles.py::"
_TIES: Final = "tests/parity/fixes/test_ties.py::"
_FORMATS: Final = "tests/parity/fixes/test_memory_format.py::"

DIVERGENCES: Final[dict[str, Divergence]] = {
    _ASSIGNMENT + "test_a_name_that_parameters_cannot_have_leaves_the_plain_value": _LOST_MEMBER,
    _ASSIGNMENT + "test_a_parameter_over_a_class_attribute_leaves_the_instance_value": _LOST_MEMBER,
    _ASSIGNMENT + "test_a_parameter_with_history_leaves_the_old_member": _LOST_MEMBER,
    _ASSIGNMENT + "test_a_refused_module_leaves_the_old_member": _LOST_MEMBER,
    _ASSIGNMENT + "test_a_refused_parameter_leaves_the_old_member": _LOST_MEMBER,
    _ASSIGNMENT + "test_an_override_that_refuses_leaves_the_old_member": _LOST_MEMBER,
    _REMOVAL + "test_registration_hook_may_remove_itself_while_it_runs": _SELF_REMOVAL,
    _REMOVAL + "test_state_hook_may_remove_itself_while_it_runs": _SELF_REMOVAL,
    _REMOVAL + "test_always_call_hook_may_remove_itself_after_an_error": Divergence(
        "torch",
        "In torch an always-called forward hook that removes itself after an exception replaces "
        'the user\'s exception by "OrderedDict mutated during iteration".',
        NO_ISSUE,
    ),
    _REMOVAL + "test_hook_removed_by_an_earlier_one_keeps_its_signature": Divergence(
        "torch",
        "A hook that an earlier one removed still runs in that call, but torch looks up live "
        "whether it takes the keyword arguments and leaves them out.",
        NO_ISSUE,
    ),
    _LOAD + "test_assign_leaves_nothing_behind_in_the_state_dict": Divergence(
        "torch",
        "In torch `load_state_dict(sd, assign=True)` leaves its flag in `sd._metadata`, so a later "
        "load of the same state dict replaces Parameter objects instead of copying into them.",
        ISSUES + "188166",
    ),
    _LOAD + "test_keys_below_a_child_that_is_none_are_unexpected": Divergence(
        "torch",
        "Torch says that all keys match although nobody loads those below a child that is None.",
        "https://github.com/facebookresearch/fairseq2/pull/330",
    ),
    _LOAD + "test_a_refused_load_changes_nothing": _PARTIAL_LOAD,
    _LOAD + "test_a_tensor_that_cannot_be_copied_changes_nothing": _PARTIAL_LOAD,
    _LOAD + "test_a_refused_load_of_an_old_checkpoint_changes_nothing": _PARTIAL_LOAD,
    _LOAD + "test_a_load_with_a_missing_key_changes_nothing": _PARTIAL_LOAD,
    _LOAD + "test_a_wrong_shape_changes_nothing_in_a_load_that_is_not_strict": _PARTIAL_LOAD,
    _LOAD + "test_a_refused_assignment_of_a_checkpoint_changes_nothing": _PARTIAL_LOAD,
    _LOAD + "test_assign_keeps_tied_parameters_tied": _LOST_TIE,
    _LOAD + "test_assign_keeps_tied_parameters_tied_on_the_meta_device": _LOST_TIE,
    "tests/parity/hooks/test_call_path.py"
    "::test_call_goes_through_slow_forward_while_a_function_is_traced": Divergence(
        "modkit",
        "While `torch.jit.trace` records a plain function, a module without hooks calls `forward` "
        "at once instead of through `_slow_forward`. The graph is the same; only a class that "
        "overrides `_slow_forward` can tell.",
        NO_ISSUE,
    ),
    "tests/distributed/modules/test_registration.py"
    "::test_hooks_of_registration_do_not_run_when_shards_become_whole": _OWN_SETATTR,
    _CLASSES + "test_a_module_with_a_metaclass": _METACLASS,
    _CLASSES + "test_abcmeta_as_the_metaclass": _METACLASS,
    _CLASSES + "test_super_of_module_sets_plain_attributes": _SUPER_OF_MODULE,
    **JIT_DIVERGENCES,
    **SWA_DIVERGENCES,
    **MODELS_DIVERGENCES,
    _AVERAGING + "test_functions_can_be_pickled": Divergence(
        "torch",
        "The averaging functions of torch are closures, which pickle cannot find by name; those "
        "of modkit pickle as a call of the function that made them, decay included.",
        ISSUES + "95376",
    ),
    _AVERAGING + "test_exponential_functions_show_their_decay": Divergence(
        "torch", "Torch's closures show neither what they compute nor their decay.", NO_ISSUE
    ),
    "tests/parity/averaging/test_averaged_state.py"
    "::test_averaged_model_with_a_function_of_the_library_can_be_pickled": Divergence(
        "torch",
        "An averaged model that holds one of torch's averaging functions cannot be pickled or "
        "saved whole.",
        ISSUES + "95376",
    ),
    "tests/parity/averaging/test_update_pairs.py"
    "::test_model_without_parameters_is_averaged_in_groups": Divergence(
        "torch",
        "The second update of an averaged model without parameters raises an internal error of "
        "torch unless `avg_fn` is given; modkit counts it.",
        NO_ISSUE,
    ),
    "tests/parity/hooks/test_always_call.py"
    "::test_global_always_call_hook_with_kwargs_gets_them_after_an_error": Divergence(
        "torch",
        "After an exception torch calls a global always-called hook without the keyword arguments "
        "that it asked for; the hook fails, and its error is swallowed into a warning.",
        f"{NO_ISSUE}; dates from {PULLS}137403",
    ),
    _REGISTRATION
    + "test_removing_the_last_backward_hook_frees_a_module_for_the_other_kind": _STICKY_KIND,
    _HOOK_IDS + "test_hooks_from_another_process_are_kept_when_one_is_added": _REUSED_ID,
    _HOOK_IDS + "test_ids_of_unpickled_hooks_are_not_given_again": _REUSED_ID,
    _SAVE_HOOKS + "test_bound_method_may_be_a_public_hook": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_bound_method_that_is_a_public_hook_must_return_none": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_method_of_the_module_itself_follows_a_copy": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_public_registration_leaves_the_callable_as_it_was": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_public_hook_may_be_registered_privately_too": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_copies_know_which_bound_methods_are_public": _MARKED_CALLABLE,
    _SAVE_HOOKS + "test_another_process_knows_which_hooks_are_public": _MARKED_CALLABLE,
    "tests/parity/hooks/test_state_dict_hooks.py"
    "::test_public_registration_leaves_no_mark_on_the_function": _MARKED_CALLABLE,
    _PRE_HOOKS
    + "test_pre_hook_with_kwargs_that_returns_two_of_something_else_is_an_error": _UNCHECKED_PAIR,
    _PRE_HOOKS
    + "test_pre_hook_with_kwargs_may_return_a_list_to_a_module_with_backward_hooks": _UNCHECKED_PAIR,
    _BACKWARD_HOOKS + "test_pre_hook_alone_does_not_warn_without_input_gradients": Divergence(
        "torch",
        "If no input requires grad torch warns that a full backward hook fires early even where "
        "there is only a pre-hook, which fires when it should.",
        ISSUES + "189093",
        "<2.14",
    ),
    "tests/parity/module/test_traversal.py::test_modules": Divergence(
        "torch",
        "`modules()` takes `remove_duplicate` with every release of torch.",
        NO_ISSUE,
        "<2.11",
    ),
    "tests/parity/fixes/test_older_torch.py::test_an_object_that_is_like_a_tensor_may_be_a_buffer": Divergence(
        "torch",
        "An object with `__torch_function__` may be a buffer with every release of torch.",
        NO_ISSUE,
        "<2.9",
    ),
    "tests/parity/module/test_load_state_dict.py::test_only_one_element_loads_into_a_scalar": Divergence(
        "torch",
        "Torch loads the first element of a longer vector into a scalar, and raises IndexError for an "
        "empty one.",
        NO_ISSUE,
        "<2.10",
    ),
    "tests/parity/module/test_conversion.py::test_casting_to_complex_warns_at_the_callers_line": Divergence(
        "torch", "Torch's warning names a line of its own file, not the caller's.", NO_ISSUE, "<2.10"
    ),
    "tests/parity/averaging/test_averaging_functions.py::test_integers_of_unequal_number_are_refused": Divergence(
        "torch",
        "`get_ema_multi_avg_fn()` passes over integer tensors that have no partner.",
        NO_ISSUE,
        "<2.10",
    ),
    "tests/parity/averaging/test_update_pairs.py::test_float_average_of_a_half_model_keeps_its_precision": Divergence(
        "torch",
        "An average cannot have another dtype than the model.",
        NO_ISSUE,
        "<2.10",
    ),
    _BACKWARD_HOOKS + "test_pre_hook_may_return_a_bare_tensor": _BARE_GRADIENT,
    _BACKWARD_HOOKS
    + "test_pre_hook_that_returns_a_bare_tensor_for_two_outputs_is_an_error": _BARE_GRADIENT,
    "tests/integration/test_compile_backward.py"
    "::test_pre_hook_may_return_a_bare_tensor_when_compiled": _BARE_GRADIENT,
    _BACKWARD_HOOKS + "test_output_of_a_tuple_class_is_rebuilt": _TUPLE_CLASS,
    _BACKWARD_HOOKS + "test_output_of_torchs_own_tuple_class_is_rebuilt": _TUPLE_CLASS,
    "tests/parity/hooks/test_wrapping.py"
    "::test_other_tuples_are_rebuilt_as_what_they_were": _TUPLE_CLASS,
    _HASHING + "test_modules_that_cannot_be_hashed_are_walked": _UNHASHABLE,
    _HASHING + "test_a_root_that_cannot_be_hashed_is_walked": _UNHASHABLE,
    _HASHING + "test_modules_that_compare_equal_are_both_walked": _UNHASHABLE,
    _HASHING + "test_a_memo_of_the_callers_is_filled_with_what_can_be_hashed": _UNHASHABLE,
    _HASHING + "test_an_override_passes_on_what_cannot_be_hashed": _UNHASHABLE,
    _TIES + "test_a_parameter_that_is_replaced_stays_tied": _UNTIED,
    _TIES + "test_a_parameter_that_is_overwritten_stays_tied": _UNTIED,
    _TIES + "test_a_shared_module_is_replaced_once": _UNTIED,
    _TIES + "test_the_function_is_called_once_for_a_shared_parameter": _UNTIED,
    _TIES + "test_the_gradient_of_a_shared_parameter_is_converted_once": _UNTIED,
    _TIES + "test_a_shared_buffer_stays_shared": _UNTIED,
    _TIES + "test_the_function_is_called_once_for_a_shared_buffer": _UNTIED,
    _TIES + "test_ties_hold_across_an_override": _UNTIED,
    _TIES + "test_ties_hold_across_an_override_with_a_function_of_its_own": _UNTIED,
    _TIES + "test_ties_hold_in_recurrent_layers": _UNTIED,
    _FORMATS + "test_channels_last_is_for_four_dimensions": _MEMORY_FORMAT,
    _FORMATS + "test_channels_last_3d_is_for_five_dimensions": _MEMORY_FORMAT,
    _FORMATS + "test_other_arguments_go_to_every_tensor": _MEMORY_FORMAT,
    _FORMATS + "test_a_volume_network_computes_the_same_after_channels_last": _MEMORY_FORMAT,
    _MEMBERS + "test_what_a_registration_hook_returns_is_checked": _UNCHECKED_RESULT,
    _MEMBERS + "test_a_refused_result_leaves_the_member_that_was_there": _UNCHECKED_RESULT,
    _MEMBERS + "test_names_of_the_modules_own_state_are_reserved": _RESERVED_NAME,
    _MEMBERS + "test_set_submodule_fills_a_name_that_is_none": _UNSET_CHILD,
    _MEMBERS + "test_a_filled_place_keeps_its_order": _UNSET_CHILD,
    _MEMBERS + "test_deleting_before_init_is_refused_by_that_reason": Divergence(
        "torch",
        "Deleting an attribute before `Module.__init__()` is in torch an error about the missing "
        "registry, instead of about what is missing.",
        NO_ISSUE,
    ),
    _CYCLES + "test_a_cycle_is_an_error_that_names_the_module": _CYCLE,
    _CYCLES + "test_a_module_that_is_its_own_child_is_named": _CYCLE,
    "tests/parity/fixes/test_uninitialized.py"
    "::test_calling_a_module_without_state_says_what_was_forgotten": Divergence(
        "torch",
        "A class that forgets `super().__init__()` is only noticed at the first call, by an error "
        "about a missing attribute. In modkit a note on that error says what was forgotten.",
        NO_ISSUE,
    ),
}
