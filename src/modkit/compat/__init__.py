"""Comparing modkit with the installed torch."""

from pathlib import Path


# The behaviours are tests of this repository; a wheel contains them, as ``behaviours/`` beside this file.
_SHARED = Path(__file__).parents[3] / "tests" / "shared"
if _SHARED.is_dir():
    __path__.append(str(_SHARED))
