"""One word about the future of TorchScript, in place of torch's warning at every step."""

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final


MESSAGE: Final = (
    "TorchScript gets no new features and a later release of torch may drop it: for new work see "
    "torch.export and torch.compile. Until then modkit.jit keeps it working; this is said once."
)

# The first Python for which torch says that TorchScript is not supported.
_UNSUPPORTED: Final = (3, 14)

_said: Final[set[str]] = set()


def give_notice(stacklevel: int = 3) -> None:
    """Warn the first time in a process, as if the caller's caller had warned."""
    if _said:
        return
    # Entered first: where the warning is made an error, the next call works.
    _said.add(MESSAGE)
    warnings.warn(message(), DeprecationWarning, stacklevel=stacklevel)


def message() -> str:
    """Return what is said, with a word about the Python that runs where there is one."""
    if sys.version_info < _UNSUPPORTED:
        return MESSAGE
    running = ".".join(map(str, sys.version_info[:2]))
    return f"{MESSAGE} Torch does not support it on Python {running}, where compiling may fail."


@contextmanager
def without_warnings_of_torch() -> Generator[None, None, None]:
    """Keep quiet what torch says about TorchScript being deprecated; let all else through.

    The compiler calls the public functions back, once for each function that it meets.
    """
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings(
                "ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", category
            )
        yield
