"""The one table of differences between torch and modkit.

A row names the tests that show the difference, by their ids without parameters' ``[...]``. ``fails_on``
is the implementation for which these tests are strict xfails: ``"torch"`` where modkit fixes a bug of
torch, ``"modkit"`` where torch does something that modkit does not, ``"lightzero"`` where networks of
LightZero have bugs that modkit's do not have. ``docs/parity.md`` is rendered from this table.
Differences of the behaviors that ``modkit compat`` runs are in ``behaviours/differences.py``.
"""

from dataclasses import dataclass
from typing import Final, Literal

from modkit.compat.behaviours import differences
from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason, where it is discussed, and its tests.

    ``case`` is the behaviour of ``modkit compat`` that shows it, if there is one.
    ``torch`` names the releases of torch that have it, as a requirement does; empty stands for all.
    """

    fails_on: Literal["torch", "modkit", "lightzero"]
    reason: str
    upstream: str
    tests: tuple[str, ...]
    case: str = ""
    torch: str = ""

    def applies_to(self, release: str) -> bool:
        """Return True if a release of torch has the difference."""
        return SpecifierSet(self.torch).contains(release, prereleases=True)


def _row(
    fails_on: Literal["torch", "modkit", "lightzero"],
    reason: str,
    upstream: str,
    *tests: str,
    torch: str = "",
) -> Divergence:
    return Divergence(fails_on, reason, upstream, tests, torch=torch)


def _shown(case: str, *tests: str) -> Divergence:
    found = differences.DIFFERENCES[case]
    return Divergence("torch", found.reason, found.upstream, tests, case)


NO_ISSUE: Final = differences.NO_ISSUE
ISSUES: Final = differences.ISSUES
PULLS: Final = "https://github.com/pytorch/pytorch/pull/"

ROWS: Final = (
    _shown(
        "members: a refused assignment",
        "tests/parity/module/test_failed_assignment.py::test_a_name_that_parameters_cannot_have_leaves_the_plain_value",
        "tests/parity/module/test_failed_assignment.py::test_a_parameter_over_a_class_attribute_leaves_the_instance_value",
        "tests/parity/module/test_failed_assignment.py::test_a_parameter_with_history_leaves_the_old_member",
        "tests/parity/module/test_failed_assignment.py::test_a_refused_module_leaves_the_old_member",
        "tests/parity/module/test_failed_assignment.py::test_a_refused_parameter_leaves_the_old_member",
        "tests/parity/module/test_failed_assignment.py::test_an_override_that_refuses_leaves_the_old_member",
    ),
    _shown(
        "state dict: a hook that removes itself",
        "tests/parity/hooks/test_removal_while_running.py::test_registration_hook_may_remove_itself_while_it_runs",
        "tests/parity/hooks/test_removal_while_running.py::test_state_hook_may_remove_itself_while_it_runs",
    ),
    _row(
        "torch",
        "In torch an always-called forward hook that removes itself after an exception replaces the "
        'user\'s exception by "OrderedDict mutated during iteration".',
        NO_ISSUE,
        "tests/parity/hooks/test_removal_while_running.py::test_always_call_hook_may_remove_itself_after_an_error",
    ),
    _row(
        "torch",
        "A hook that an earlier one removed still runs in that call, but torch looks up live whether "
        "it takes the keyword arguments and leaves them out.",
        NO_ISSUE,
        "tests/parity/hooks/test_removal_while_running.py::test_hook_removed_by_an_earlier_one_keeps_its_signature",
    ),
    _shown(
        "loading: assign=True and the argument",
        "tests/parity/fixes/test_load.py::test_assign_leaves_nothing_behind_in_the_state_dict",
    ),
    _shown(
        "loading: keys below a child that is None",
        "tests/parity/fixes/test_load.py::test_keys_below_a_child_that_is_none_are_unexpected",
    ),
    _shown(
        "loading: a refused load",
        "tests/parity/fixes/test_load.py::test_a_refused_load_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_tensor_that_cannot_be_copied_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_refused_load_of_an_old_checkpoint_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_load_with_a_missing_key_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_wrong_shape_changes_nothing_in_a_load_that_is_not_strict",
        "tests/parity/fixes/test_load.py::test_a_refused_assignment_of_a_checkpoint_changes_nothing",
    ),
    _shown(
        "loading: assign=True and tied parameters",
        "tests/parity/fixes/test_load.py::test_assign_keeps_tied_parameters_tied",
        "tests/parity/fixes/test_load.py::test_assign_keeps_tied_parameters_tied_on_the_meta_device",
    ),
    _row(
        "modkit",
        "While `torch.jit.trace` records a plain function, a module without hooks calls `forward` at "
        "once instead of through `_slow_forward`. The graph is the same; only a class that overrides "
        "`_slow_forward` can tell.",
        NO_ISSUE,
        "tests/parity/hooks/test_call_path.py::test_call_goes_through_slow_forward_while_a_function_is_traced",
    ),
    _row(
        "modkit",
        "`fully_shard` writes parameters past `__setattr__` where a class has that of torch, and "
        "calls any other one, as that of modkit: global parameter registration hooks see each "
        "exchange of shards.",
        NO_ISSUE,
        "tests/distributed/modules/test_registration.py::test_hooks_of_registration_do_not_run_when_shards_become_whole",
    ),
    _row(
        "modkit",
        "`Module` has a metaclass, so that torch's modules are instances of it. A class with a "
        "metaclass of its own raises Python's metaclass conflict unless that derives from "
        "`type(nn.Module)`, and `metaclass=ABCMeta` does not make a class abstract; put `abc.ABC` "
        "among the bases.",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_a_module_with_a_metaclass",
        "tests/parity/module/test_classes.py::test_abcmeta_as_the_metaclass",
    ),
    _row(
        "modkit",
        "`super(nn.Module, self)` in a user's class finds the methods of `torch.nn.Module`, which "
        "come behind modkit's. To set an attribute without registering it, call `object.__setattr__`.",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_super_of_module_sets_plain_attributes",
    ),
    _row(
        "modkit",
        "A method that is assigned to `modkit.nn.Module` holds for classes that derive from it, not for "
        "torch's layers. Assigned to `torch.nn.Module` it holds for both.",
        NO_ISSUE,
        "tests/parity/module/test_override_contract.py::test_a_method_set_on_module_holds_for_layers",
    ),
    _row(
        "torch",
        "In torch `module.save(file)` writes to a path that is the text of the file object; modkit "
        "writes to the file, and replaces a file at a path atomically.",
        ISSUES + "90466",
        "tests/parity/jit/test_defects.py::test_save_takes_an_open_file",
    ),
    _row(
        "torch",
        "A deep copy of a ScriptModule of torch has results of autograd in place of parameters; in "
        "modkit they are leaves, of type `Parameter`, with gradients of their own.",
        ISSUES + "44951",
        "tests/parity/jit/test_defects.py::test_a_deep_copy_can_be_trained",
    ),
    _row(
        "torch",
        "In a deep copy by torch, children that were one have become several objects.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_deep_copy_keeps_ties",
    ),
    _row(
        "torch",
        "A deep copy by torch is not an instance of the users' class, and has neither hooks nor plain "
        "attributes.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_deep_copy_keeps_the_class_and_what_is_in_python",
    ),
    _row(
        "torch",
        "The parameters of a module that torch has loaded are of type `Tensor`, so conversions that "
        "make a new one fail.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_loaded_parameters_are_parameters",
    ),
    _shown(
        "compile, export, fx, jit: buffers that are not persistent",
        "tests/parity/jit/test_defects.py::test_buffers_that_are_not_persistent_stay_out_of_the_state",
    ),
    _row(
        "torch",
        "A compiled container of torch iterates over the modules before compilation, and after "
        "loading not at all.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_containers_hold_the_compiled_children",
    ),
    _row(
        "torch",
        "Torch compiles a module in several places as several modules, which share their "
        "parameters; in modkit it stays one, also after loading.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_child_in_several_places_is_one",
    ),
    _row(
        "torch",
        "A compiled property reads in torch as an object of type `property`, and after loading is not "
        "there.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_compiled_property_is_read_and_set",
    ),
    _row(
        "torch",
        "In torch a full backward hook of a traced module never runs, and a class-based module "
        "refuses it.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_backward_hooks_run",
    ),
    _row(
        "torch",
        "Torch reads archives without looking at their checksums, so weights with flipped bits load "
        "without a complaint. Modkit verifies them, and raises a FileError.",
        ISSUES + "126952",
        "tests/parity/jit/test_archive_defects.py::test_damaged_weights_are_not_loaded",
    ),
    _row(
        "torch",
        "Where one bit of a zip file marks weights as a folder, torch reads nothing and takes what is "
        "in memory for them.",
        NO_ISSUE,
        "tests/parity/jit/test_archive_defects.py::test_a_member_that_is_marked_as_a_folder_is_not_loaded",
    ),
    _row(
        "torch",
        "With `PYTORCH_JIT=0` torch cannot load an archive, as its wrapper of a C++ module is an "
        "empty class; modkit loads and runs it.",
        NO_ISSUE,
        "tests/unit/jit/test_environment.py::test_an_archive_loads_with_the_compiler_turned_off",
    ),
    _row(
        "torch",
        "Torch reads an open file from where it stands, so one that has just been written looks empty "
        "to it; modkit then begins at its start.",
        ISSUES + "65098",
        "tests/parity/jit/test_archive_defects.py::test_a_file_that_was_just_written_is_read",
    ),
    _row(
        "torch",
        "Torch reports for most files that are not archives that a part of a zip file is missing. In "
        "modkit the error, of the same type, names what the file is and what reads it.",
        ISSUES + "31620",
        "tests/parity/jit/test_archive_defects.py::test_the_error_names_what_a_file_is",
    ),
    _row(
        "torch",
        "From the third instance on, a class whose constructor calls `define` runs in torch what the "
        "second one defined; in modkit each runs its own.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_each_instance_compiles_what_its_constructor_defines",
    ),
    _row(
        "torch",
        "In torch `define` looks names up in its own frames, not in the caller's, where the module is "
        "class-based.",
        NO_ISSUE,
        "tests/parity/jit/test_compiling.py::test_names_around_a_class_are_found_when_it_is_compiled",
    ),
    _row(
        "torch",
        "On traced and class-based modules torch refuses to register a parameter or buffer anew, as "
        "if the constructor had not run.",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_members_can_be_replaced",
    ),
    _row(
        "torch",
        "Torch refuses on compiled modules much of what the page of ScriptModule documents: casts "
        "such as `bfloat16`, `requires_grad_`, `to_empty`, hooks, and members by path. In modkit they "
        "work.",
        ISSUES + "29037",
        "tests/parity/jit/test_refused_members.py::test_members_that_torch_refuses_do_what_they_do_on_any_module",
        "tests/parity/jit/test_refused_members.py::test_set_submodule_takes_what_was_compiled_from_the_same",
    ),
    _row(
        "modkit",
        "Dynamo compares the exact class with torch's `RecursiveScriptModule`. `torch.compile` of a "
        "ScriptModule of modkit is not refused and runs TorchScript's code; with `fullgraph=True` the "
        "error names the compiled method.",
        NO_ISSUE,
        "tests/parity/jit/test_refused_members.py::test_torch_compile_refuses_a_compiled_module",
        "tests/parity/jit/test_refused_members.py::test_dynamo_names_torchscript",
    ),
    _row(
        "torch",
        "Torch's `AveragedModel` pairs tensors by position, cuts the longer list and broadcasts "
        "shapes, so a wrong tensor may be averaged in silence, or an error comes after half of the "
        "update. Modkit pairs by name, and names what does not fit before anything is written.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_parameters_are_paired_by_name",
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_model_that_does_not_fit_is_refused",
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_buffer_that_came_later_is_refused_before_anything_is_written",
        "tests/parity/fixes/test_swa_averaged_model.py::test_tying_after_the_copy_shifts_nothing",
    ),
    _row(
        "torch",
        "With `use_buffers=False` torch's `AveragedModel` takes its own `parameters()`, so those of a "
        "subclass are overwritten, and those of the average get the values of their neighbours. In "
        "modkit, as in torch with `use_buffers=True`, only those of `module` are averaged.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_subclass_may_have_parameters_of_its_own",
    ),
    _row(
        "torch",
        "Each update of torch's `AveragedModel` reads the count on the host, which synchronizes with "
        "the device and breaks the graph of `torch.compile`. On CPU modkit reads it too. On "
        "accelerators it reads it only if the buffer was replaced or written, and compiled updates "
        "never read it.",
        PULLS + "157705",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_update_never_asks_for_a_value",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_update_is_one_graph_for_the_compiler",
    ),
    _shown(
        "averages: integer buffers",
        "tests/parity/fixes/test_swa_averaged_model.py::test_buffers_without_fractions_are_copied",
        "tests/parity/fixes/test_swa_averaged_model.py::test_the_count_of_batches_is_that_of_the_model",
    ),
    _row(
        "torch",
        "In torch the averaging functions for lists refuse an average whose dtype is not the model's; "
        "in modkit they take it.",
        ISSUES + "57947",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_average_in_float32_follows_a_model_in_bfloat16",
    ),
    _row(
        "torch",
        "Torch's `AveragedModel` cannot copy a model that holds a result of autograd, as weight_norm "
        "does after a call; modkit copies its value.",
        ISSUES + "28594",
        "tests/parity/fixes/test_swa_averaged_model.py::test_models_with_weight_norm_are_copied_after_a_call",
        "tests/parity/fixes/test_swa_averaged_model.py::test_models_that_keep_results_are_copied",
    ),
    _row(
        "torch",
        "Torch cannot update the average of a model that was lazy when it was copied; modkit copies "
        "it again when it has shapes.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_lazy_models_are_averaged_once_they_have_shapes",
    ),
    _row(
        "torch",
        "A model of torch cannot hold its own average as a child: the first update fails after the "
        "parameters were overwritten. Modkit leaves the average out.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_model_may_hold_its_average",
        torch=">=2.10",
    ),
    _row(
        "torch",
        "An averaged model that is made in inference mode can in torch never be updated outside.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_average_made_in_inference_mode_can_be_updated",
    ),
    _row(
        "torch",
        "Buffers that change their shape, caches for instance, make torch's update fail or broadcast; "
        "modkit copies them whole.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_buffers_may_change_their_shape",
    ),
    _row(
        "torch",
        "Torch hands its own counter to averaging functions, so a count that one keeps changes later; "
        "modkit hands over a copy.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_what_a_function_keeps_does_not_change",
    ),
    _row(
        "torch",
        "If the loader or the model fails, torch's `update_bn` leaves statistics that are half done, "
        "layers without momentum and the model in training mode; modkit puts everything back.",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_update_bn.py::test_a_failing_loader_leaves_every_module_as_it_was",
        "tests/parity/fixes/test_swa_update_bn.py::test_a_failing_model_leaves_every_module_as_it_was",
    ),
    _shown(
        "averages: update_bn without batches",
        "tests/parity/fixes/test_swa_update_bn.py::test_an_empty_loader_is_an_error",
    ),
    _row(
        "torch",
        "Torch's `update_bn` puts the whole model into training mode, dropout included, and then "
        "gives all modules the mode of the root. In modkit only the layers that are updated are in "
        "training mode, and each module gets its own mode back.",
        "https://github.com/timgaripov/swa/issues/22",
        "tests/parity/fixes/test_swa_update_bn.py::test_only_normalization_runs_in_training_mode",
        "tests/parity/fixes/test_swa_update_bn.py::test_every_module_gets_its_own_mode_back",
    ),
    _row(
        "lightzero",
        "LightZero's `DynamicsNetwork.get_reward_mean` always raises AttributeError; modkit's returns "
        "what its documentation says.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_mean_of_the_reward_head",
    ),
    _row(
        "lightzero",
        "In LightZero the default activation is one module for all networks of a class in the "
        "process, so its hooks and its mode are shared. In modkit each network has its own.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_default_activation_is_not_shared_between_networks",
    ),
    _row(
        "lightzero",
        "LightZero adds the shortcut of `DynamicsNetwork` into the output of `norm_common`: hooks see "
        "it overwritten, and backward hooks raise. Modkit adds out of place, bitwise identically.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_output_of_the_first_normalization",
        "tests/unit/models/test_differences.py::test_backward_hook_on_the_first_normalization",
    ),
    _row(
        "lightzero",
        "LightZero reshapes to rows of the configured size, which mixes the samples of a batch where "
        "the numbers happen to divide. In modkit that is an error which names the argument.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_planes_of_another_size",
    ),
    _row(
        "lightzero",
        "LightZero builds a `DynamicsNetwork` with `action_encoding_dim` below 1, which fails in its "
        "call or means nothing; modkit refuses it.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_no_planes_of_the_action",
    ),
    _row(
        "lightzero",
        "Checkpoints of LightZero 0.0.2 to 0.0.4 hold blocks that were never used, which later "
        "versions refuse in a strict load; modkit leaves them out.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_checkpoint_of_early_versions",
    ),
    _row(
        "lightzero",
        "LightZero's networks cannot be scripted: their blocks name a child that most do not have, "
        "and annotations lack the element types.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_script",
    ),
    _row(
        "lightzero",
        "LightZero cannot build an `EfficientZeroModel` with LayerNorm and downsampling.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_layer_norm_with_downsampling",
    ),
    _row(
        "lightzero",
        "LightZero 0.1.0 fails in the call for images of 84 pixels, which later versions take.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_images_of_84_pixels",
    ),
    _row(
        "lightzero",
        "LightZero takes a number for the shape of vector observations, and fails for a tuple of one.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_shape_of_vector_observations",
    ),
    _row(
        "lightzero",
        "In LightZero the first hidden state and the planes of actions have single precision, so a "
        "model in another one cannot search. In modkit they have that of the latent state.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_search_in_another_precision",
    ),
    _row(
        "lightzero",
        "`state_norm` raises in LightZero 0.1.0, and makes a constant latent state NaN in the "
        "versions after it; in modkit that becomes zero.",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_latent_states_between_0_and_1",
    ),
    _shown(
        "averages: functions can be pickled",
        "tests/parity/averaging/test_averaging_functions.py::test_functions_can_be_pickled",
    ),
    _row(
        "torch",
        "Torch's closures show neither what they compute nor their decay.",
        NO_ISSUE,
        "tests/parity/averaging/test_averaging_functions.py::test_exponential_functions_show_their_decay",
    ),
    _row(
        "torch",
        "An averaged model that holds one of torch's averaging functions cannot be pickled or saved "
        "whole.",
        ISSUES + "95376",
        "tests/parity/averaging/test_averaged_state.py::test_averaged_model_with_a_function_of_the_library_can_be_pickled",
    ),
    _row(
        "torch",
        "The second update of an averaged model without parameters raises an internal error of torch "
        "unless `avg_fn` is given; modkit counts it.",
        NO_ISSUE,
        "tests/parity/averaging/test_update_pairs.py::test_model_without_parameters_is_averaged_in_groups",
    ),
    _row(
        "torch",
        "After an exception torch calls a global always-called hook without the keyword arguments "
        "that it asked for; the hook fails, and its error is swallowed into a warning.",
        f"{NO_ISSUE}; dates from {PULLS}137403",
        "tests/parity/hooks/test_always_call.py::test_global_always_call_hook_with_kwargs_gets_them_after_an_error",
    ),
    _shown(
        "backward hooks: the other kind after removal",
        "tests/parity/hooks/test_registration.py::test_removing_the_last_backward_hook_frees_a_module_for_the_other_kind",
    ),
    _row(
        "torch",
        "Hook ids start from zero in each process, so in torch a hook that is registered on an "
        "unpickled module may silently take the place of one that it came with.",
        NO_ISSUE,
        "tests/parity/fixes/test_hook_ids.py::test_hooks_from_another_process_are_kept_when_one_is_added",
        "tests/parity/fixes/test_hook_ids.py::test_ids_of_unpickled_hooks_are_not_given_again",
    ),
    _row(
        "torch",
        "Torch's `register_state_dict_post_hook` marks the user's callable for ever: the same "
        "function cannot be a private hook anywhere, bound methods cannot be marked at all, and "
        "pickling loses the mark. In modkit the id in the hook table says that the hook is public.",
        PULLS + "131690",
        "tests/parity/fixes/test_state_dict_hooks.py::test_bound_method_may_be_a_public_hook",
        "tests/parity/fixes/test_state_dict_hooks.py::test_bound_method_that_is_a_public_hook_must_return_none",
        "tests/parity/fixes/test_state_dict_hooks.py::test_method_of_the_module_itself_follows_a_copy",
        "tests/parity/fixes/test_state_dict_hooks.py::test_public_registration_leaves_the_callable_as_it_was",
        "tests/parity/fixes/test_state_dict_hooks.py::test_public_hook_may_be_registered_privately_too",
        "tests/parity/fixes/test_state_dict_hooks.py::test_copies_know_which_bound_methods_are_public",
        "tests/parity/fixes/test_state_dict_hooks.py::test_another_process_knows_which_hooks_are_public",
        "tests/parity/hooks/test_state_dict_hooks.py::test_public_registration_leaves_no_mark_on_the_function",
    ),
    _shown(
        "forward hooks: a pre-hook with kwargs returns two numbers",
        "tests/parity/fixes/test_forward_pre_hooks.py::test_pre_hook_with_kwargs_that_returns_two_of_something_else_is_an_error",
        "tests/parity/fixes/test_forward_pre_hooks.py::test_pre_hook_with_kwargs_may_return_a_list_to_a_module_with_backward_hooks",
    ),
    _row(
        "torch",
        "If no input requires grad torch warns that a full backward hook fires early even where there "
        "is only a pre-hook, which fires when it should.",
        ISSUES + "189093",
        "tests/parity/fixes/test_backward_hooks.py::test_pre_hook_alone_does_not_warn_without_input_gradients",
        torch="<2.14",
    ),
    _row(
        "modkit",
        "A method that was saved from `modkit.nn.Module` before that of `torch.nn.Module` is patched calls the patch.",
        NO_ISSUE,
        "tests/parity/module/test_override_contract.py::test_a_saved_method_does_not_call_a_later_patch",
    ),
    _row(
        "modkit",
        "A hook that a submodule gets after compiling runs by a recompilation; torch misses it unless "
        "`torch._dynamo.config.skip_nnmodule_hook_guards` is False.",
        NO_ISSUE,
        "tests/integration/torch_compile/test_changes.py::test_a_later_hook_of_a_submodule_is_missed",
        torch=">=2.14",
    ),
    _row(
        "modkit",
        "Dynamo of torch 2.8 cannot trace what walks over a modkit module, such as `modules()`, "
        "`parameters()` or `train()`: the graph breaks there.",
        NO_ISSUE,
        "tests/integration/torch_compile/test_compile.py::test_modules_are_walked_in_a_graph",
        torch="<2.9",
    ),
    _row(
        "torch",
        "`modules()` takes no `remove_duplicate`.",
        NO_ISSUE,
        "tests/parity/module/test_traversal.py::test_modules",
        torch="<2.11",
    ),
    _row(
        "torch",
        "An object with `__torch_function__` that is not a tensor cannot be a buffer.",
        NO_ISSUE,
        "tests/parity/module/test_registration.py::test_an_object_like_a_tensor_may_be_a_buffer",
        torch="<2.9",
    ),
    _row(
        "torch",
        "Torch loads the first element of a longer vector into a scalar, and raises IndexError for an "
        "empty one.",
        NO_ISSUE,
        "tests/parity/module/test_load_state_dict.py::test_only_one_element_loads_into_a_scalar",
        torch="<2.10",
    ),
    _row(
        "torch",
        "The warning about complex modules names a line of torch, not the caller's.",
        NO_ISSUE,
        "tests/parity/module/test_conversion.py::test_casting_to_complex_warns_at_the_callers_line",
        torch="<2.10",
    ),
    _row(
        "torch",
        "`get_ema_multi_avg_fn()` passes over integer tensors that have no partner.",
        NO_ISSUE,
        "tests/parity/averaging/test_averaging_functions.py::test_integers_of_unequal_number_are_refused",
        torch="<2.10",
    ),
    _row(
        "torch",
        "A grouped average cannot have another dtype than the model.",
        NO_ISSUE,
        "tests/parity/averaging/test_update_pairs.py::test_float_average_of_a_half_model_keeps_its_precision",
        torch="<2.10",
    ),
    _shown(
        "backward hooks: a pre-hook returns a tensor",
        "tests/parity/fixes/test_backward_hooks.py::test_pre_hook_may_return_a_bare_tensor",
        "tests/parity/fixes/test_backward_hooks.py::test_pre_hook_that_returns_a_bare_tensor_for_two_outputs_is_an_error",
        "tests/integration/torch_compile/test_backward.py::test_pre_hook_may_return_a_bare_tensor_when_compiled",
    ),
    _shown(
        "backward hooks: the output is that of torch.max",
        "tests/parity/fixes/test_backward_hooks.py::test_output_of_a_tuple_class_is_rebuilt",
        "tests/parity/fixes/test_backward_hooks.py::test_output_of_torchs_own_tuple_class_is_rebuilt",
        "tests/parity/hooks/test_wrapping.py::test_other_tuples_are_rebuilt_as_what_they_were",
    ),
    _shown(
        "traversal: modules that compare equal",
        "tests/parity/fixes/test_hashing.py::test_modules_that_cannot_be_hashed_are_walked",
        "tests/parity/fixes/test_hashing.py::test_a_root_that_cannot_be_hashed_is_walked",
        "tests/parity/fixes/test_hashing.py::test_modules_that_compare_equal_are_both_walked",
        "tests/parity/fixes/test_hashing.py::test_a_memo_of_the_callers_is_filled_with_what_can_be_hashed",
        "tests/parity/fixes/test_hashing.py::test_an_override_passes_on_what_cannot_be_hashed",
    ),
    _shown(
        "conversion: shared parameters to another device",
        "tests/parity/fixes/test_ties.py::test_a_parameter_that_is_replaced_stays_tied",
        "tests/parity/fixes/test_ties.py::test_a_parameter_that_is_overwritten_stays_tied",
        "tests/parity/fixes/test_ties.py::test_a_shared_module_is_replaced_once",
        "tests/parity/fixes/test_ties.py::test_the_function_is_called_once_for_a_shared_parameter",
        "tests/parity/fixes/test_ties.py::test_the_gradient_of_a_shared_parameter_is_converted_once",
        "tests/parity/fixes/test_ties.py::test_a_shared_buffer_stays_shared",
        "tests/parity/fixes/test_ties.py::test_the_function_is_called_once_for_a_shared_buffer",
        "tests/parity/fixes/test_ties.py::test_ties_hold_across_an_override",
        "tests/parity/fixes/test_ties.py::test_ties_hold_across_an_override_with_a_function_of_its_own",
        "tests/parity/fixes/test_ties.py::test_ties_hold_in_recurrent_layers",
    ),
    _shown(
        "conversion: channels_last with volumes",
        "tests/parity/fixes/test_memory_format.py::test_channels_last_is_for_four_dimensions",
        "tests/parity/fixes/test_memory_format.py::test_channels_last_3d_is_for_five_dimensions",
        "tests/parity/fixes/test_memory_format.py::test_other_arguments_go_to_every_tensor",
        "tests/parity/fixes/test_memory_format.py::test_a_volume_network_computes_the_same_after_channels_last",
    ),
    _shown(
        "registration and global hooks: a hook returns text",
        "tests/parity/fixes/test_members.py::test_what_a_registration_hook_returns_is_checked",
        "tests/parity/fixes/test_members.py::test_a_refused_result_leaves_the_member_that_was_there",
    ),
    _shown(
        "members: a reserved name",
        "tests/parity/fixes/test_members.py::test_names_of_the_modules_own_state_are_reserved",
    ),
    _shown(
        "members: set_submodule() on None",
        "tests/parity/fixes/test_members.py::test_set_submodule_fills_a_name_that_is_none",
        "tests/parity/fixes/test_members.py::test_a_filled_place_keeps_its_order",
    ),
    _row(
        "torch",
        "Deleting an attribute before `Module.__init__()` is in torch an error about the missing "
        "registry, instead of about what is missing.",
        NO_ISSUE,
        "tests/parity/fixes/test_members.py::test_deleting_before_init_is_refused_by_that_reason",
    ),
    _row(
        "torch",
        "Torch enters a hook before its flags, and looks a flag up when the hook is due. A call in another "
        "thread may thus find a `with_kwargs` hook without its flag, and leave the keywords out.",
        NO_ISSUE,
        "tests/parity/fixes/test_hook_threads.py::test_a_call_during_a_registration_sees_a_hook_with_its_flag",
        "tests/parity/fixes/test_hook_threads.py::test_a_removal_during_a_call_leaves_no_hook_without_its_flag",
        "tests/parity/fixes/test_hook_threads.py::test_a_hook_that_comes_and_goes_during_a_call_has_its_flag",
    ),
    _shown(
        "traversal: a module that contains itself",
        "tests/parity/fixes/test_cycles.py::test_a_cycle_is_an_error_that_names_the_module",
        "tests/parity/fixes/test_cycles.py::test_a_module_that_is_its_own_child_is_named",
    ),
    _row(
        "torch",
        "A class that forgets `super().__init__()` is only noticed at the first call, by an error "
        "about a missing attribute. In modkit a note on that error says what was forgotten.",
        NO_ISSUE,
        "tests/parity/fixes/test_uninitialized.py::test_calling_a_module_without_state_says_what_was_forgotten",
    ),
)

DIVERGENCES: Final = {test: row for row in ROWS for test in row.tests}
