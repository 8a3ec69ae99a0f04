"""The one table of differences between torch and modkit.

A key is a test id without its parameters' ``[...]``. ``fails_on`` names the implementation for
which that test is a strict xfail: ``"torch"`` where modkit fixes a defect of torch, ``"modkit"``
where torch does something that modkit does not, ``"lightzero"`` where networks of LightZero have
defects that modkit's do not have. ``docs/parity.md`` is rendered from this table.
"""

from typing import Final

from modkit.compat.behaviours.differences import DIFFERENCES
from tests.divergence import ISSUES, NO_ISSUE, PULLS, Divergence, listed
from tests.divergences_jit import JIT_DIVERGENCES
from tests.divergences_models import MODELS_DIVERGENCES
from tests.divergences_swa import SWA_DIVERGENCES


_LOST_MEMBER: Final = listed("members: a refused assignment")
_SELF_REMOVAL: Final = listed("state dict: a hook that removes itself")

_LOST_TIE: Final = listed("loading: assign=True and tied parameters")

_LOAD: Final = "tests/parity/fixes/test_load.py::"
_PARTIAL_LOAD: Final = listed("loading: a refused load")


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
_STICKY_KIND: Final = listed("backward hooks: the other kind after removal")
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
_UNCHECKED_PAIR: Final = listed("forward hooks: a pre-hook with kwargs returns two numbers")
_BARE_GRADIENT: Final = listed("backward hooks: a pre-hook returns a tensor")
_TUPLE_CLASS: Final = listed("backward hooks: the output is that of torch.max")
_UNHASHABLE: Final = listed("traversal: modules that compare equal")
_UNTIED: Final = listed("conversion: shared parameters to another device")
_MEMORY_FORMAT: Final = listed("conversion: channels_last with volumes")
_UNCHECKED_RESULT: Final = listed("registration and global hooks: a hook returns text")
_RESERVED_NAME: Final = listed("members: a reserved name")
_UNSET_CHILD: Final = listed("members: set_submodule() on None")
_CYCLE: Final = listed("traversal: a module that contains itself")

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
    _LOAD + "test_assign_leaves_nothing_behind_in_the_state_dict": listed(
        "loading: assign=True and the argument"
    ),
    _LOAD + "test_keys_below_a_child_that_is_none_are_unexpected": listed(
        "loading: keys below a child that is None"
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
    _AVERAGING + "test_functions_can_be_pickled": listed("averages: functions can be pickled"),
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

# Tested by their exact outcomes, so none of them is an xfail.
BEHAVIOURS: Final = {
    f"tests/parity/test_behaviours.py::test_a_shared_behaviour[{case}]": listed(case)
    for case in DIFFERENCES
}
