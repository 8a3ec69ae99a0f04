"""Notes, warnings at the user's line, and long texts of errors."""

import sys
import warnings
from types import FrameType
from typing import Final


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the error's text, where the version of Python can show one."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


def warn_user(text: str) -> None:
    """Warn at the line that called modkit, whatever decorators and blocks are in between."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _IN_BETWEEN:
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)


_IN_BETWEEN: Final = frozenset({"modkit", "contextlib", "torch"})


def install_extra(extra: str) -> str:
    """Return how to install one of modkit's extras.

    Never by a name: on the package index, the name modkit belongs to another project, whose files
    would replace ours.
    """
    return (
        f'In a checkout of modkit, run `python -m pip install ".[{extra}]"`; with a wheel of it, '
        f'`python -m pip install "PATH_OF_THE_WHEEL[{extra}]"`.'
    )


MSG_CYCLE: Final = "maximum recursion depth exceeded: the module {name} contains itself"

_UNCHANGED: Final = "PostHocEMA has to begin in another directory. The averages are unchanged."
MSG_REBIND: Final = f"If the model has changed on purpose, call EMA.rebind(). {_UNCHANGED}"

MSG_UNFROZEN: Final = (
    "With trainable_only=True, those that are unexpected require gradients now: call EMA.rebind() "
    f"to begin their averages, or average all parameters. {_UNCHANGED}"
)

MSG_NO_UPDATE: Final = (
    "EMA: there has been no update, but the model was trained, since the latest one or since the "
    "EMA was created: the average lacks these steps. Call update() after each optimizer step, or "
    "attach() the optimizer that takes the steps, also one that was made later"
)

MSG_LEAVE_OUT: Final = (
    "Leave it out with exclude=, or average only what trains with trainable_only=True. Nothing has "
    "been changed."
)

MSG_NOTHING_CHOSEN: Final = (
    "no parameter of the model is selected; with trainable_only=True one must require gradients. "
    "Nothing has been changed."
)

MSG_WRITTEN_INSIDE: Final = (
    "EMA: {name} was written to inside applied(); the training weights are restored, and the "
    "average has the change where the two share memory. To train or change an average, take "
    "averaged_model()"
)

MSG_CONVERTED_INSIDE: Final = (
    "EMA: {name} was cast, moved or replaced inside applied(); the change is lost, and the "
    "training weights are restored"
)

MSG_REPLACED_INSIDE: Final = (
    "EMA: {name}, or its module, was replaced inside applied(); the members that were "
    "registered before are back, with the training weights. To fuse layers, assign parameters or "
    "remove parametrizations, whose hooks and properties are not back, take averaged_model()"
)

MSG_COPY_WRITTEN: Final = (
    "EMA: {name}, a buffer that is copied with the average, was written to or replaced inside "
    "applied(). The model has its training value again, and the next update renews the copy. To "
    "leave the buffer to the model, pass buffers={{'{name}': 'ignore'}}"
)

MSG_BUFFER_OPTION: Final = (
    "If an evaluation may change this buffer, pass buffers={{'{name}': 'ignore'}}: it then keeps "
    "the model's value"
)
