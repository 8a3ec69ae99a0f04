"""Weight averaging, equal (SWA) and exponential (EMA): drop-in for ``torch.optim.swa_utils``.

``AveragedModel`` keeps a running average of a model's weights, ``update_bn`` refreshes the batch
normalization statistics of the result, and ``SWALR`` is the learning-rate schedule that goes with
equal averaging. ``SWALR`` is torch's own class: schedulers belong to the optimizer, of which modkit
has no version.
"""

from typing import TypeAlias

from torch.optim.swa_utils import SWALR

from modkit._namespace import publish_all
from modkit.averaging.precision import TensorList
from modkit.optim._averaged_model import AveragedModel
from modkit.optim._averaging_functions import (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)
from modkit.optim._update_bn import update_bn


__all__ = [
    "SWALR",
    "AveragedModel",
    "get_ema_avg_fn",
    "get_ema_multi_avg_fn",
    "get_swa_avg_fn",
    "get_swa_multi_avg_fn",
    "update_bn",
]

PARAM_LIST: TypeAlias = TensorList

publish_all(globals())
