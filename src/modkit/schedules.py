"""Decays that change in training: a second name of :mod:`modkit.averaging.schedules`."""

import sys

from modkit.averaging.schedules import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["modkit.averaging.schedules"]
