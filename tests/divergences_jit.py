"""The rows of the table of differences that concern ``torch.jit``."""

from typing import Final

from tests.divergence import ISSUES, NO_ISSUE, Divergence, listed


_DEFECTS: Final = "tests/parity/jit/test_defects.py::"
_ARCHIVES: Final = "tests/parity/jit/test_archive_defects.py::"
_COMPILING: Final = "tests/parity/jit/test_compiling.py::"
_REFUSED: Final = "tests/parity/jit/test_refused_members.py::"
_CONSTRUCTOR: Final = Divergence(
    "torch",
    "From the third instance on, a class whose constructor calls `define` runs in torch what the "
    "second one defined; in modkit each runs its own.",
    NO_ISSUE,
)
_REFUSALS: Final = Divergence(
    "torch",
    "Torch refuses on compiled modules much of what the page of ScriptModule documents: casts such "
    "as `bfloat16`, `requires_grad_`, `to_empty`, hooks, and members by path. In modkit they work.",
    ISSUES + "29037",
)

_DYNAMO: Final = Divergence(
    "modkit",
    "Dynamo compares the exact class with torch's `RecursiveScriptModule`. `torch.compile` of a "
    "ScriptModule of modkit is not refused and runs TorchScript's code; with `fullgraph=True` the error "
    "names the compiled method.",
    NO_ISSUE,
)

JIT_DIVERGENCES: Final[dict[str, Divergence]] = {
    _DEFECTS + "test_save_takes_an_open_file": Divergence(
        "torch",
        "In torch `module.save(file)` writes to a path that is the text of the file object; modkit "
        "writes to the file, and replaces a file at a path atomically.",
        ISSUES + "90466",
    ),
    _DEFECTS + "test_a_deep_copy_can_be_trained": Divergence(
        "torch",
        "A deep copy of a ScriptModule of torch has results of autograd in place of parameters; in "
        "modkit they are leaves, of type `Parameter`, with gradients of their own.",
        ISSUES + "44951",
    ),
    _DEFECTS + "test_a_deep_copy_keeps_ties": Divergence(
        "torch",
        "In a deep copy by torch, children that were one have become several objects.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_a_deep_copy_keeps_the_class_and_what_is_in_python": Divergence(
        "torch",
        "A deep copy by torch is no instance of the users' class, and has neither hooks nor plain "
        "attributes.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_loaded_parameters_are_parameters": Divergence(
        "torch",
        "The parameters of a module that torch has loaded are of type `Tensor`, so conversions that "
        "make a new one fail.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_buffers_that_are_not_persistent_stay_out_of_the_state": listed(
        "compile, export, fx, jit: buffers that are not persistent"
    ),
    _DEFECTS + "test_containers_hold_the_compiled_children": Divergence(
        "torch",
        "A compiled container of torch iterates over the modules before compilation, and after "
        "loading not at all.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_a_child_in_several_places_is_one": Divergence(
        "torch",
        "Torch compiles a module that stands in several places as several, which have their "
        "parameters in common; in modkit it stays one, also after loading.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_a_compiled_property_is_read_and_set": Divergence(
        "torch",
        "A compiled property reads in torch as an object of type `property`, and after loading is "
        "not there.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_special_methods_of_scripted_objects_run": Divergence(
        "torch",
        "Every special method of an object of a scripted class runs `__exit__` in torch.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_scripted_objects_without_special_methods_are_objects": Divergence(
        "torch",
        "Objects of a scripted class without special methods cannot be printed, compared or asked "
        "for their truth in torch.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_backward_hooks_run": Divergence(
        "torch",
        "In torch a full backward hook of a traced module never runs, and a class-based module "
        "refuses it.",
        NO_ISSUE,
    ),
    _ARCHIVES + "test_damaged_weights_are_not_loaded": Divergence(
        "torch",
        "Torch reads archives without looking at their checksums, so weights with flipped bits load "
        "without a complaint. Modkit verifies them, and raises a FileError.",
        ISSUES + "126952",
    ),
    _ARCHIVES + "test_a_member_that_is_marked_as_a_folder_is_not_loaded": Divergence(
        "torch",
        "Where one bit of a zip file marks weights as a folder, torch reads nothing and takes what is "
        "in memory for them.",
        NO_ISSUE,
    ),
    "tests/unit/test_jit_environment.py::test_an_archive_loads_with_the_compiler_turned_off": Divergence(
        "torch",
        "With `PYTORCH_JIT=0` torch cannot load an archive, as its wrapper of a C++ module is an empty "
        "class; modkit loads and runs it.",
        NO_ISSUE,
    ),
    _ARCHIVES + "test_a_file_that_was_just_written_is_read": Divergence(
        "torch",
        "Torch reads an open file from where it stands, so one that has just been written looks empty "
        "to it; modkit then begins at its start.",
        ISSUES + "65098",
    ),
    _ARCHIVES + "test_the_error_names_what_a_file_is": Divergence(
        "torch",
        "Torch says of most files that are no archives that a part of a zip file is missing. In modkit "
        "the error, of the same type, names what the file is and what reads it.",
        ISSUES + "31620",
    ),
    _ARCHIVES + "test_devices_are_looked_for_before_a_file_is_read": Divergence(
        "torch",
        "Torch validates `map_location` for CUDA alone, and for other devices fails in the middle of "
        "loading; modkit looks for all of them first, and the error names those that there are.",
        ISSUES + "197803",
    ),
    _DEFECTS + "test_each_instance_compiles_what_its_constructor_defines": _CONSTRUCTOR,
    _DEFECTS + "test_a_module_can_be_pickled": Divergence(
        "torch",
        "A ScriptModule of torch cannot be pickled; a pickle of modkit holds the archive.",
        ISSUES + "8077",
    ),
    _COMPILING + "test_names_around_a_class_are_found_when_it_is_compiled": Divergence(
        "torch",
        "In torch `define` looks names up in its own frames, not in the caller's, where the module "
        "is class-based.",
        NO_ISSUE,
    ),
    _DEFECTS + "test_members_can_be_replaced": Divergence(
        "torch",
        "On traced and class-based modules torch refuses to register a parameter or buffer anew, as "
        "if the constructor had not run.",
        NO_ISSUE,
    ),
    _REFUSED + "test_members_that_torch_refuses_do_what_they_do_on_any_module": _REFUSALS,
    _REFUSED + "test_torch_compile_refuses_a_compiled_module": _DYNAMO,
    _REFUSED + "test_dynamo_names_torchscript": _DYNAMO,
    _REFUSED + "test_set_submodule_takes_what_was_compiled_from_the_same": _REFUSALS,
}
