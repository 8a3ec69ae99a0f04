"""Messages that are long or used more than once. Texts that torch has too are equal word for word.

Where torch's text does not help, the help goes into a note, so that the text stays the same.
"""

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Final

from modkit._upstream import original_methods


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _of_torch(method: str, start: str) -> str:
    """Return what a method of the installed torch says, by its first words; empty if it says nothing."""
    code = getattr(original_methods[method], "__code__", None)
    return next((text for text in _texts(code) if text.startswith(start)), "") if code else ""


MSG_MIXED_BACKWARD_HOOKS: Final = _of_torch("register_full_backward_hook", "Cannot use both")

MSG_PUBLIC_STATE_DICT_HOOK: Final = _of_torch(
    "_register_state_dict_hook", "Cannot register the same"
)

MSG_STATE_DICT_POSITIONAL: Final = _of_torch("state_dict", "Positional args")

MSG_STATE_DICT_HOOK_RETURN: Final = _of_torch("state_dict", "state_dict post-hook")

MSG_LOAD_POST_HOOK_RETURN: Final = _of_torch("load_state_dict", "Hooks registered")

MSG_META_COPY: Final = (
    "for {key}: copying from a non-meta parameter in the checkpoint to a meta "
    "parameter in the current model, which is a no-op. (Did you mean to "
    "pass `assign=True` to assign items in the state dictionary to their "
    "corresponding key in the module instead of copying them in place?)"
)

MSG_MODULE_LOAD_ALIAS: Final = (
    "module_load returned one of self or other, please .detach() "
    "the result if returning one of the inputs in module_load"
)

MSG_LOAD_NOT_A_TENSOR: Final = (
    'While copying the parameter named "{key}", '
    "expected torch.Tensor or Tensor-like object from checkpoint but "
    "received {kind}"
)

MSG_LOAD_SIZE: Final = (
    "size mismatch for {key}: copying a param with shape {theirs} from checkpoint, "
    "the shape in current model is {ours}."
)

MSG_LOAD_FAILED: Final = (
    'While {action} the parameter named "{key}", '
    "whose dimensions in the model are {ours} and "
    "whose dimensions in the checkpoint are {theirs}, "
    "an exception occurred : {reason}."
)

MSG_COMPLEX_MODULE: Final = _of_torch("to", "Complex modules")

MSG_TO_DTYPE: Final = (
    "nn.Module.to only accepts floating point or complex dtypes, but got desired dtype={dtype}"
)

MSG_APPLY_NOT_A_PARAMETER: Final = _of_torch("_apply", "param must be a Parameter")
MSG_APPLY_PARAMETER_NOT_LEAF: Final = _of_torch("_apply", "param must be a leaf")
MSG_APPLY_NO_GRADIENT: Final = _of_torch("_apply", "out_param.grad must")
MSG_APPLY_GRADIENT_NOT_LEAF: Final = _of_torch("_apply", "param_grad must")

META_COPY_REFUSED: Final = "Cannot copy out of meta tensor; no data!"

MSG_USE_TO_EMPTY: Final = (
    "{refused} Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to() "
    "when moving module from meta to a different device.{details}"
)

MSG_PRE_HOOK_RESULT: Final = (
    "forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
)

MSG_BACKWARD_OUTPUT: Final = (
    "For backward hooks to be called, module output should be a Tensor or a tuple of Tensors"
    " but received {kind}"
)

MSG_BACKWARD_PRE_HOOK_LENGTH: Final = (
    "Backward pre hook returned an invalid number of grad_output, "
    "got {got}, but expected {expected}"
)

MSG_BACKWARD_HOOK_LENGTH: Final = (
    "Backward hook returned an invalid number of grad_input, got {got}, but expected {expected}"
)

MSG_BACKWARD_HOOK_AT_OUTPUT: Final = (
    "Full backward hook is firing when gradients are computed "
    "with respect to module outputs since no inputs require gradients. See "
    "https://docs.pytorch.org/docs/main/generated/torch.nn.Module.html"
    "#torch.nn.Module.register_full_backward_hook "
    "for more details."
)

MSG_BACKWARD_HOOK_NO_INPUT_GRADIENT: Final = (
    "Backward hook for Modules where no input requires "
    "gradient should always return None or None for all gradients."
)

MSG_ALWAYS_CALL_SILENCED: Final = (
    "{scope} forward hook with ``always_call=True`` raised an exception "
    "that was silenced as another error was raised in forward: {error}"
)

MSG_BUFFER_NOT_PERSISTENT: Final = _of_torch("__setattr__", "Registering a non-persistent")

MSG_PARAMETER_NOT_LEAF: Final = (
    "Cannot assign non-leaf Tensor to parameter '{name}'. Model "
    "parameters must be created explicitly. To express '{name}' "
    "as a function of another Tensor, compute the value in "
    "the forward() method."
)

MSG_CYCLE: Final = "maximum recursion depth exceeded: the module {name} contains itself"

MSG_NOT_INITIALIZED: Final = (
    "{name}.__init__() has not called super().__init__(), without which a module has no state."
)


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the error's text, where the version of Python can show one."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


MSG_REBIND: Final = "If the model has changed on purpose, call EMA.rebind() and go on."

MSG_NOTHING_CHOSEN: Final = (
    "no parameter of the model is selected; with trainable_only=True one must require gradients. "
    "Nothing has been changed."
)

MSG_WRITTEN_INSIDE: Final = (
    "EMA: {name} was written to inside applied(), and so was its average; to train or change an "
    "average, take averaged_model()"
)


MSG_WRITTEN_IN_VAIN: Final = (
    "EMA: {name} was written to inside applied(), where it held a cast copy of its average; the change "
    "is lost, and the training weights are restored"
)

MSG_CONVERTED_INSIDE: Final = (
    "EMA: {name} was cast, moved or replaced inside applied(); the change is lost, and the training "
    "weights are restored"
)
