"""Decay schedules: the decay of each averaging step as a function of its number.

A schedule is called with ``n``, the number of steps since the average was a copy of the model, and
returns the decay ``d`` of that step: ``average = d * average + (1 - d) * model``. A step is one
call of ``EMA.update()``, usually one step of the optimizer; a schedule knows nothing of batches,
samples or epochs. Step 0 is the copy, for which every schedule returns 0, and ``n = 1`` is the
first step that mixes. With ``update_after_step = a`` and a counter ``step`` that is incremented
before it is read, as in most libraries, ``n = max(0, step - a - 1)``. With ``update_every = k``,
the average is updated at each ``n`` that ``k`` divides, with the decay of ``k`` steps together
(:meth:`Schedule.over`).

A decay is a number from 0 to 1: the part of the average that stays in a step. A momentum, as batch
normalization has it, is one minus a decay. Decays are computed on the host, in double precision.

Schedules are frozen dataclasses. :meth:`Schedule.to_config` returns their fields for a checkpoint.

Example:
    >>> from modkit import schedules
    >>> warm = schedules.CountWarmup(decay=0.999)
    >>> [round(warm(n), 3) for n in (0, 1, 10, 100, 100_000)]
    [0.0, 0.182, 0.55, 0.918, 0.999]
"""

from modkit._namespace import publish_all
from modkit.averaging.schedules import *  # noqa: F403
from modkit.averaging.schedules import __all__  # noqa: F401 - read by publish_all


publish_all(globals())
