"""Drop-in for ``torch.nn``: the same names, with modkit's ``Module`` below every layer.

Module classes are modkit's; functions, ``Parameter`` and the like are torch's own objects.
"""

from typing import TYPE_CHECKING

import torch.nn
from torch.nn import factory_kwargs as factory_kwargs

from modkit.nn import (
    attention as attention,
    functional as functional,
    init as init,
    modules as modules,
    parallel as parallel,
    parameter as parameter,
    utils as utils,
)
from modkit.nn.modules import *  # noqa: F403
from modkit.nn.modules._newer import upstream_names
from modkit.nn.parallel import DataParallel as DataParallel
from modkit.nn.parameter import (
    Buffer as Buffer,
    Parameter as Parameter,
    UninitializedBuffer as UninitializedBuffer,
    UninitializedParameter as UninitializedParameter,
)


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)

    # What the installed torch shows, newer layers and deprecated packages included.
    __all__ = [_name for _name in dir(torch.nn) if not _name.startswith("_")]
    for _name in __all__:
        if _name not in globals():
            globals()[_name] = __getattr__(_name)
