"""The one table of differences between torch and modkit.

A row names the tests that show the difference, by their ids without parameters' ``[...]``. ``fails_on``
is the implementation for which these tests are strict xfails: ``"torch"`` where modkit fixes a bug of
torch, ``"modkit"`` where torch does something that modkit does not, ``"lightzero"`` where networks of
LightZero have bugs that modkit's do not have. ``docs/differences.md`` is rendered from this table.
Differences of the behaviors that ``modkit compat`` runs are in ``src/modkit/compat/behaviours/differences.py``.
"""

from dataclasses import dataclass
from typing import Final, Literal

from packaging.specifiers import SpecifierSet

from modkit.compat.behaviours import differences


@dataclass(frozen=True)
class Divergence:
    """One observable difference, with the reason, where it is discussed, and its tests.

    ``reason`` is what torch does and what modkit does, with ``" | "`` in between.
    ``case`` is the behaviour of ``modkit compat`` that shows it, if there is one.
    ``torch`` and ``python`` name the releases that have it, as a requirement does; empty stands for all.
    """

    fails_on: Literal["torch", "modkit", "lightzero"]
    reason: str
    upstream: str
    tests: tuple[str, ...]
    case: str = ""
    torch: str = ""
    python: str = ""

    def applies_to(self, torch: str, python: str) -> bool:
        """Return True if these releases have the difference."""
        return all(
            SpecifierSet(has_it).contains(release, prereleases=True)
            for has_it, release in ((self.torch, torch), (self.python, python))
        )


def _row(
    fails_on: Literal["torch", "modkit", "lightzero"],
    reason: str,
    upstream: str,
    *tests: str,
    torch: str = "",
    python: str = "",
) -> Divergence:
    return Divergence(fails_on, reason, upstream, tests, torch=torch, python=python)


def _shown(case: str, *tests: str) -> Divergence:
    found = differences.DIFFERENCES[case]
    return Divergence("torch", found.reason, found.upstream, tests, case)


NO_ISSUE: Final = differences.NO_ISSUE
ISSUES: Final = differences.ISSUES
PULLS: Final = "https://github.com/pytorch/pytorch/pull/"

ROWS: Final = (
    _shown(
        "loading: a hook that removes itself",
        "tests/parity/hooks/test_removal_while_running.py::test_registration_hook_may_remove_itself_while_it_runs",
        "tests/parity/hooks/test_removal_while_running.py::test_load_hook_may_remove_itself_while_it_runs",
    ),
    _shown(
        "loading: assign=True and the argument",
        "tests/parity/fixes/test_load.py::test_assign_leaves_nothing_behind_in_the_state_dict",
        "tests/parity/fixes/test_load.py::test_a_flag_that_torch_left_in_a_state_dict_does_not_count",
    ),
    _shown(
        "loading: keys below a child that is None",
        "tests/parity/fixes/test_load.py::test_keys_below_a_child_that_is_none_are_unexpected",
    ),
    _shown(
        "loading: a refused load",
        "tests/parity/fixes/test_load.py::test_a_refused_load_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_tensor_that_cannot_be_copied_changes_nothing",
        "tests/parity/fixes/test_load.py::test_a_model_made_in_inference_mode_keeps_its_values",
    ),
    _row(
        "torch",
        "`load_state_dict(strict=False)` that takes none of the parameters returns silently | A "
        "UserWarning says why, if some of the keys are unexpected",
        "https://github.com/pytorch/examples/issues/1029",
        "tests/parity/fixes/test_load.py::test_a_load_that_takes_nothing_warns",
    ),
    _shown(
        "loading: assign=True and tied parameters",
        "tests/parity/fixes/test_load.py::test_assign_keeps_tied_parameters_tied",
    ),
    _row(
        "modkit",
        "A class can have any metaclass | One that does not derive from `type(nn.Module)`, which makes "
        "`isinstance` accept torch's modules, is a metaclass conflict. "
        "[Metaclasses](module.md#metaclasses) has the recipe for pyro's `PyroModule`",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_a_module_with_a_metaclass",
    ),
    _row(
        "modkit",
        "`inspect.getsource(nn.Module)` shows the class | It raises OSError: Python looks for a class in "
        "the file of the module that `__module__` names, which is the public path, as for NumPy. "
        "It finds the source of methods, and of classes of users",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_the_source_of_a_public_class",
    ),
    _row(
        "modkit",
        "A load hook that keeps the dict of its module, and edits it while a child is loaded, changes what "
        "the next children load | It does so if the number of names or the last name is another one "
        "then; a comparison of all names for each child would take quadratic time",
        NO_ISSUE,
        "tests/parity/hooks/test_load_state_dict_hooks.py::test_a_dict_that_a_hook_keeps_and_fills_anew_later",
    ),
    _row(
        "modkit",
        "With `metaclass=ABCMeta`, a class with abstract methods cannot be instantiated | It can: only "
        "with `abc.ABC` among the bases are abstract methods enforced. `register` works for both",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_abcmeta_as_the_metaclass",
    ),
    _row(
        "modkit",
        "`inspect.isabstract` is False for a class with abstract methods that does not derive from "
        "`abc.ABC` | It is True, although the class can be instantiated: its metaclass is one of "
        "abstract classes, so `inspect` looks for the methods",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_a_plain_class_is_not_abstract",
    ),
    _row(
        "modkit",
        "`type(Net) is type` | `type(Net)` is `type(nn.Module)`, which has the attributes of "
        "`ABCMeta`, such as `register`. `isinstance(Net, type)` is True for both",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_the_metaclass_is_type",
        "tests/parity/module/test_classes.py::test_a_plain_class_cannot_register",
    ),
    _row(
        "modkit",
        "`nn.Module in nn.Linear.__mro__` | The layers are torch's own, and their bases include "
        "`torch.nn.Module`. `isinstance` and `issubclass` accept them for both",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_layers_name_module_among_their_bases",
    ),
    _row(
        "torch",
        "`pickle` and `copy.deepcopy` refuse modules such as `torch.nn` | `modkit.nn` and "
        "`modkit.jit` are pickled by their name, which picklers by value such as cloudpickle need",
        NO_ISSUE,
        "tests/parity/test_namespace.py::test_a_namespace_is_pickled_by_reference",
    ),
    _row(
        "modkit",
        "`torch.package` leaves torch out of a package by itself | modkit is left out after "
        '`exporter.extern("modkit.**")`. Without it, `PackagingError` names the modules',
        NO_ISSUE,
        "tests/integration/torch_core/test_package.py::test_a_package_needs_no_pattern_for_the_library",
    ),
    _row(
        "modkit",
        "`functools.singledispatch` with functions for `nn.Module` and for an abstract class takes the "
        "latter for layers that fit both, such as `Iterable` for `nn.Sequential` | It raises "
        '"Ambiguous dispatch", because the layer derives from neither; register `torch.nn.Module`',
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_a_generic_function_takes_layers_that_fit_twice",
    ),
    _row(
        "modkit",
        "`super(nn.Module, self)` finds the methods of `object` | It finds those of "
        "`torch.nn.Module`. To set an attribute without registering it, call `object.__setattr__`",
        NO_ISSUE,
        "tests/parity/module/test_classes.py::test_super_of_module_sets_plain_attributes",
    ),
    _row(
        "modkit",
        "A method assigned to `nn.Module` holds for all layers | Assigned to `modkit.nn.Module`, "
        "it holds for classes that derive from it; assigned to `torch.nn.Module`, for all",
        NO_ISSUE,
        "tests/parity/module/test_override_contract.py::test_a_method_set_on_module_holds_for_layers",
    ),
    _row(
        "torch",
        "`module.save(file)` writes to a path named after the text of the file object | It writes"
        " to the file; a path is replaced atomically",
        ISSUES + "90466",
        "tests/parity/jit/test_defects.py::test_save_takes_an_open_file",
    ),
    _row(
        "torch",
        "A deep copy of a ScriptModule has non-leaf tensors in place of parameters | It has leaf "
        "Parameters with their own gradients",
        ISSUES + "44951",
        "tests/parity/jit/test_defects.py::test_a_deep_copy_can_be_trained",
    ),
    _row(
        "torch",
        "A deep copy unties shared children | They stay shared",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_deep_copy_keeps_ties",
    ),
    _row(
        "torch",
        "A deep copy loses the user's class, hooks and plain attributes | It keeps them",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_deep_copy_keeps_the_class_and_what_is_in_python",
    ),
    _row(
        "torch",
        "A `ScriptModule` that assigns a `torch.jit.Attribute` cannot be made | The type is entered in "
        "the annotations of its class",
        PULLS + "195201",
        "tests/parity/jit/test_compiling.py::test_a_derived_class_has_the_methods_and_constants_of_its_base",
        "tests/parity/jit/test_members.py::test_a_new_attribute_with_a_type",
        torch="<2.15",
        python=">=3.14",
    ),
    _row(
        "torch",
        "Loaded parameters have type `Tensor`, so conversions that create new ones fail | They "
        "have type `Parameter`",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_loaded_parameters_are_parameters",
    ),
    _shown(
        "compile, export, fx, jit: buffers that are not persistent",
        "tests/parity/jit/test_defects.py::test_buffers_that_are_not_persistent_stay_out_of_the_state",
    ),
    _row(
        "torch",
        "A compiled container iterates over the modules from before compilation, and after "
        "loading over nothing | It iterates over its compiled children",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_containers_hold_the_compiled_children",
    ),
    _row(
        "torch",
        "`script` compiles a shared module into several modules that share parameters | It stays one "
        "module, also after loading. In a traced module it is several, as in torch",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_child_in_several_places_is_one",
    ),
    _row(
        "torch",
        "A frozen module lacks the children that its code writes to: their buffers are not in "
        "`state_dict()`, and conversions leave them out | It has them",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_frozen_module_has_the_children_that_change",
    ),
    _row(
        "torch",
        "A compiled property reads as an object of type `property`, and is lost by loading | It "
        "can be read and set",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_a_compiled_property_is_read_and_set",
    ),
    _row(
        "torch",
        "A full backward hook of a traced module never runs; a class-based module refuses it | It"
        " runs",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_backward_hooks_run",
    ),
    _row(
        "torch",
        "Checksums of archives are ignored: corrupt weights load without an error | Checksums are"
        " verified; a corrupt file raises `FileError`",
        ISSUES + "126952",
        "tests/parity/jit/test_archive_defects.py::test_damaged_weights_are_not_loaded",
    ),
    _row(
        "torch",
        'The place in the file of tensors that are loaded with `map_location="meta"` is computed, which'
        " is wrong in files that another program has rewritten | It is read from the file",
        NO_ISSUE,
        "tests/parity/jit/test_archive_defects.py::test_meta_tensors_know_their_place_in_a_rewritten_file",
    ),
    _row(
        "torch",
        "A flipped bit that marks a member as a folder loads uninitialized memory as weights | "
        "The file is refused",
        NO_ISSUE,
        "tests/parity/jit/test_archive_defects.py::test_a_member_that_is_marked_as_a_folder_is_not_loaded",
    ),
    _row(
        "modkit",
        "Each call of `torch.jit.script`, `trace`, `load` and `save` warns that it is deprecated | The "
        "first one in a process does; filters for torch's warning hold",
        NO_ISSUE,
        "tests/parity/jit/test_compiling.py::test_each_call_warns_that_torchscript_is_deprecated",
    ),
    _row(
        "modkit",
        "The folder in an archive has the name of the file | It is called `archive`, as in what "
        "`save_to_buffer` returns: C++ writes to memory only, since it ends the process on a full disk",
        NO_ISSUE,
        "tests/parity/jit/test_files.py::test_the_folder_in_an_archive_has_the_name_of_the_file",
    ),
    _row(
        "torch",
        "On a full disk `torch.jit.save` ends the process, and leaves a part of a file | It raises an "
        "`OSError`, and the previous file stays",
        NO_ISSUE,
        "tests/parity/jit/test_archive_defects.py::test_a_full_disk_is_an_error",
    ),
    _row(
        "torch",
        "Writing to a weight or buffer of a module that was loaded from the path of a flatbuffer ends the "
        "process, as training it does | It is written to",
        NO_ISSUE,
        "tests/parity/jit/test_archive_defects.py::test_weights_of_a_flatbuffer_can_be_written",
    ),
    _row(
        "torch",
        "With `PYTORCH_JIT=0` an archive cannot be loaded | It is loaded and runs",
        NO_ISSUE,
        "tests/unit/jit/test_environment.py::test_an_archive_loads_with_the_compiler_turned_off",
    ),
    _row(
        "torch",
        "A file object is read from its position, so a file that was just written looks empty | "
        "It is then read from its start",
        ISSUES + "65098",
        "tests/parity/jit/test_archive_defects.py::test_a_file_that_was_just_written_is_read",
    ),
    _row(
        "torch",
        "For most files that are not archives, the error says that a part of a zip file is "
        "missing | The error, of the same type, names the kind of the file, and what reads it if that "
        "is known",
        ISSUES + "31620",
        "tests/parity/jit/test_archive_defects.py::test_the_error_names_what_a_file_is",
    ),
    _row(
        "torch",
        "If a constructor calls `define`, the third and later instances run the code of the "
        "second | Each instance runs its own code",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_each_instance_compiles_what_its_constructor_defines",
    ),
    _row(
        "torch",
        "`define` of a class-based module resolves names in frames of torch | Names are resolved "
        "in the caller's scope",
        NO_ISSUE,
        "tests/parity/jit/test_compiling.py::test_names_around_a_class_are_found_when_it_is_compiled",
    ),
    _row(
        "torch",
        "Traced and class-based modules refuse to register an existing parameter or buffer again "
        "| It is replaced",
        NO_ISSUE,
        "tests/parity/jit/test_defects.py::test_members_can_be_replaced",
    ),
    _row(
        "torch",
        "Compiled modules refuse casts such as `bfloat16`, `requires_grad_`, `to_empty`, hooks "
        "and members by path, all documented | They work",
        ISSUES + "29037",
        "tests/parity/jit/test_refused_members.py::test_members_that_torch_refuses_do_what_they_do_on_any_module",
        "tests/parity/jit/test_refused_members.py::test_set_submodule_takes_what_was_compiled_from_the_same",
    ),
    _row(
        "modkit",
        "`torch.compile` refuses a ScriptModule | It runs the code of TorchScript, because dynamo"
        " compares the exact class; with `fullgraph=True` the error names `ScriptMethod`. A frozen one"
        " raises an AttributeError, as in torch before 2.13",
        NO_ISSUE,
        "tests/parity/jit/test_refused_members.py::test_torch_compile_refuses_a_compiled_module",
        "tests/parity/jit/test_refused_members.py::test_dynamo_names_torchscript",
    ),
    _row(
        "torch",
        "`AveragedModel` pairs tensors by position, truncates the longer list and broadcasts "
        "shapes: wrong tensors are averaged, or an error comes after half of the update | Tensors"
        " are paired by name, and a mismatch is an error before anything is written. One prefix "
        "that all names of a wrapper have is ignored",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_parameters_are_paired_by_name",
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_model_that_does_not_fit_is_refused",
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_buffer_that_came_later_is_refused_before_anything_is_written",
        "tests/parity/fixes/test_swa_averaged_model.py::test_tying_after_the_copy_shifts_nothing",
    ),
    _row(
        "modkit",
        "A model whose parameters have other names, in the order of the average, can be given to "
        "`AveragedModel.update_parameters` | It is refused, since only names show that the order fits",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_model_of_other_names_in_the_same_order",
    ),
    _row(
        "modkit",
        "Any object with `parameters()` and `buffers()` can be given to "
        "`AveragedModel.update_parameters` | Only modules give their tensors names; other objects "
        "raise TypeError",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_object_that_is_not_a_module_can_update_an_average",
    ),
    _row(
        "torch",
        "A parameter that is also registered as a buffer is overwritten with the model's value | "
        "It is averaged",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_parameter_that_is_a_buffer_too_is_averaged",
    ),
    _row(
        "torch",
        "With `use_buffers=False`, parameters of a subclass of `AveragedModel` are overwritten "
        "with values of the model | Only the parameters of `module` are averaged",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_subclass_may_have_parameters_of_its_own",
    ),
    _row(
        "torch",
        "Each `update_parameters` reads the count on the host: a host sync, and a graph break in "
        "`torch.compile` | A count in the memory of an accelerator is not read on the host: the "
        "device decides by it, as in compiled updates",
        PULLS + "157705",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_update_never_asks_for_a_value",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_update_is_one_graph_for_the_compiler",
    ),
    _row(
        "torch",
        "On XLA, `update_parameters` frees tensors of the model whose values do not change, such as "
        "frozen parameters and averaged buffers: later steps fail with `buffer is deleted` | Copies "
        "have memory of their own, and the model keeps its tensors",
        NO_ISSUE,
        "tests/xla/test_averaged_model.py::test_values_that_do_not_change",
    ),
    _row(
        "modkit",
        "An averaging function is called from the second update on | With a count in the memory of"
        " an accelerator, and in compiled updates, it is also called in updates that copy, with a "
        "count of 1; the result is not used",
        NO_ISSUE,
        "tests/parity/averaging/test_counts_on_devices.py::test_functions_are_called_from_the_second_update_on",
    ),
    _shown(
        "averages: integer buffers",
        "tests/parity/fixes/test_swa_averaged_model.py::test_buffers_without_fractions_are_copied",
        "tests/parity/fixes/test_swa_averaged_model.py::test_the_count_of_batches_is_that_of_the_model",
        "tests/parity/fixes/test_swa_averaged_model.py::test_quantized_buffers_are_copied",
    ),
    _row(
        "torch",
        "The averaging functions for lists refuse an average in another dtype than the model | "
        "They accept it",
        ISSUES + "57947",
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_average_in_float32_follows_a_model_in_bfloat16",
    ),
    _row(
        "torch",
        "`AveragedModel` cannot copy a model that holds a non-leaf tensor, as `weight_norm` does "
        "after a call | The value is copied",
        ISSUES + "28594",
        "tests/parity/fixes/test_swa_averaged_model.py::test_models_with_weight_norm_are_copied_after_a_call",
        "tests/parity/fixes/test_swa_averaged_model.py::test_models_that_keep_results_are_copied",
    ),
    _row(
        "torch",
        "The average of a model that was lazy when copied cannot be updated | The model is copied"
        " again once it has shapes",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_lazy_models_are_averaged_once_they_have_shapes",
    ),
    _row(
        "torch",
        "If a model holds its own average as a child, the first update fails after overwriting "
        "parameters | The average is left out",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_a_model_may_hold_its_average",
        torch=">=2.10",
    ),
    _row(
        "torch",
        "An average created in inference mode cannot be updated outside | It can be updated",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_an_average_made_in_inference_mode_can_be_updated",
    ),
    _row(
        "torch",
        "Buffers that change their shape make an update fail or broadcast | They are copied",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_buffers_may_change_their_shape",
    ),
    _row(
        "torch",
        "Averaging functions receive the live counter, which later changes | They receive a copy",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_averaged_model.py::test_what_a_function_keeps_does_not_change",
    ),
    _row(
        "torch",
        "If the loader or the model raises, `update_bn` leaves partial statistics, no momentum "
        "and training mode | Everything is restored",
        NO_ISSUE,
        "tests/parity/fixes/test_swa_update_bn.py::test_a_failure_leaves_every_module_as_it_was",
    ),
    _shown(
        "averages: update_bn without batches",
        "tests/parity/fixes/test_swa_update_bn.py::test_an_empty_loader_is_an_error",
    ),
    _row(
        "torch",
        "`update_bn` sets the whole model to training mode, dropout included, and then all "
        "modules to the mode of the root | Only updated layers are in training mode, and each "
        "module gets its own mode back",
        "https://github.com/timgaripov/swa/issues/22",
        "tests/parity/fixes/test_swa_update_bn.py::test_only_normalization_runs_in_training_mode",
        "tests/parity/fixes/test_swa_update_bn.py::test_every_module_gets_its_own_mode_back",
    ),
    _row(
        "lightzero",
        "`DynamicsNetwork.get_reward_mean` and, up to version 0.1.0, "
        "`EfficientZeroModel.get_params_mean` always raise AttributeError | They return what their "
        "documentation says",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_mean_of_the_parameters",
        "tests/unit/models/test_differences.py::test_mean_of_the_reward_head",
    ),
    _row(
        "lightzero",
        "The default activation is one module for all networks of the process, with shared hooks "
        "and mode | Each network has its own",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_default_activation_is_not_shared_between_networks",
    ),
    _row(
        "lightzero",
        "The shortcut of `DynamicsNetwork` is added in place to the output of `norm_common`: "
        "hooks see it overwritten, backward hooks raise | It is added out of place, bitwise "
        "identical",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_output_of_the_first_normalization",
        "tests/unit/models/test_differences.py::test_backward_hook_on_the_first_normalization",
    ),
    _row(
        "lightzero",
        "Latent states of a wrong size are reshaped, which can mix the samples of a batch | They "
        "are refused",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_planes_of_another_size",
    ),
    _row(
        "lightzero",
        "`action_encoding_dim` below 1 fails in the call or has no meaning | It is refused",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_no_planes_of_the_action",
    ),
    _row(
        "lightzero",
        "The networks cannot be scripted | They can",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_script",
    ),
    _row(
        "lightzero",
        "`EfficientZeroModel` cannot be built with LayerNorm and downsampling | It can",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_layer_norm_with_downsampling",
    ),
    _row(
        "lightzero",
        "`EfficientZeroModel` with `downsample=True` cannot be built for images of 84 pixels: "
        "UnboundLocalError | It can",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_images_of_84_pixels",
    ),
    _row(
        "lightzero",
        "The shape of vector observations must be an int; a tuple of one fails | Both are accepted",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_shape_of_vector_observations",
    ),
    _row(
        "lightzero",
        "The first hidden state and the action planes are float32, so a model in another dtype "
        "cannot search | They have the dtype of the latent state",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_search_in_another_precision",
    ),
    _row(
        "lightzero",
        "`state_norm` raises in version 0.1.0, and turns a constant latent state into NaN later |"
        " A constant state becomes zero",
        NO_ISSUE,
        "tests/unit/models/test_differences.py::test_latent_states_between_0_and_1",
    ),
    _shown(
        "averages: functions can be pickled",
        "tests/parity/averaging/test_averaging_functions.py::test_functions_can_be_pickled",
    ),
    _row(
        "torch",
        "The `repr` of an averaging function shows neither its rule nor its decay | It shows both",
        NO_ISSUE,
        "tests/parity/averaging/test_averaging_functions.py::test_exponential_functions_show_their_decay",
    ),
    _row(
        "modkit",
        "`inspect.isfunction` is True for an averaging function | It is False: to be pickled it is "
        "an object, with the name and the signature of torch's function",
        NO_ISSUE,
        "tests/parity/averaging/test_averaging_functions.py::test_functions_are_functions",
    ),
    _row(
        "torch",
        "An averaged model with one of torch's averaging functions cannot be pickled | It can be "
        "pickled",
        ISSUES + "95376",
        "tests/parity/averaging/test_averaged_state.py::test_averaged_model_with_a_function_of_the_library_can_be_pickled",
    ),
    _row(
        "torch",
        "The second update of an averaged model without parameters raises an internal error | The"
        " update is counted",
        NO_ISSUE,
        "tests/parity/averaging/test_update_pairs.py::test_model_without_parameters_is_averaged_in_groups",
    ),
    _row(
        "modkit",
        "A method saved from `nn.Module` does not call a later patch | If it was saved from "
        "`modkit.nn.Module`, it calls a later patch of `torch.nn.Module`",
        NO_ISSUE,
        "tests/parity/module/test_override_contract.py::test_a_saved_method_does_not_call_a_later_patch",
    ),
    _row(
        "torch",
        "The first element of a longer vector loads into a scalar, and an empty one raises "
        "IndexError | Only one element loads, as in newer torch",
        NO_ISSUE,
        "tests/parity/module/test_load_state_dict.py::test_only_one_element_loads_into_a_scalar",
        torch="<2.10",
    ),
    _row(
        "modkit",
        "The warning about complex modules names the caller's line | It names the line of modkit "
        "that calls torch's `to`, as older torch names its own",
        NO_ISSUE,
        "tests/parity/module/test_conversion.py::test_casting_to_complex_warns_at_the_callers_line",
        torch=">=2.10",
    ),
    _row(
        "torch",
        "A grouped average cannot have another dtype than the model | It can, as in newer torch",
        NO_ISSUE,
        "tests/parity/averaging/test_update_pairs.py::test_float_average_of_a_half_model_keeps_its_precision",
        torch="<2.12",
    ),
    _shown(
        "backward hooks: a pre-hook returns a tensor",
        "tests/parity/hooks/test_backward_hooks.py::test_pre_hook_may_return_a_bare_tensor",
        "tests/parity/hooks/test_backward_hooks.py::test_pre_hook_that_returns_a_bare_tensor_for_two_outputs_is_an_error",
        "tests/integration/torch_compile/test_backward.py::test_pre_hook_may_return_a_bare_tensor_when_compiled",
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
        "tests/parity/fixes/test_ties.py::test_ties_hold_across_an_override",
        "tests/parity/fixes/test_ties.py::test_ties_hold_in_recurrent_layers",
    ),
    _shown(
        "conversion: channels_last with volumes",
        "tests/parity/fixes/test_memory_format.py::test_a_format_is_for_its_number_of_dimensions",
        "tests/parity/fixes/test_memory_format.py::test_other_arguments_go_to_every_tensor",
    ),
    _shown(
        "registration and global hooks: a hook returns text",
        "tests/parity/hooks/test_registration_hooks.py::test_what_a_registration_hook_returns_is_checked",
        "tests/parity/hooks/test_registration_hooks.py::test_a_refused_result_leaves_the_member_that_was_there",
    ),
    _shown(
        "traversal: a module that contains itself",
        "tests/parity/fixes/test_cycles.py::test_a_cycle_is_an_error_that_names_the_module",
    ),
    _row(
        "torch",
        "A class that forgets `super().__init__()` fails when it is used, with an error about a"
        " missing attribute | On errors of conversions and loading, a note names the cause",
        NO_ISSUE,
        "tests/parity/fixes/test_uninitialized.py::test_using_a_module_without_state_says_what_was_forgotten",
    ),
)

DIVERGENCES: Final = {test: row for row in ROWS for test in row.tests}
