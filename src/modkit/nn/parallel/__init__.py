"""Same as ``torch.nn.parallel``; the wrappers are modkit modules."""

from typing import TYPE_CHECKING

from modkit.nn.modules._newer import upstream_names
from modkit.nn.parallel import comm as comm, scatter_gather as scatter_gather
from modkit.nn.parallel.data_parallel import DataParallel, data_parallel
from modkit.nn.parallel.distributed import DistributedDataParallel
from modkit.nn.parallel.parallel_apply import parallel_apply
from modkit.nn.parallel.replicate import replicate
from modkit.nn.parallel.scatter_gather import gather, scatter


__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
]

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
