"""Same as ``torch.nn.utils``."""

# pyright: reportDeprecated=false

from typing import TYPE_CHECKING

from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from modkit.nn.modules._newer import upstream_names
from modkit.nn.utils import parametrizations, parametrize, rnn, stateless
from modkit.nn.utils.clip_grad import clip_grad_norm, clip_grad_norm_, clip_grad_value_
from modkit.nn.utils.convert_parameters import parameters_to_vector, vector_to_parameters
from modkit.nn.utils.fusion import (
    fuse_conv_bn_eval,
    fuse_conv_bn_weights,
    fuse_linear_bn_eval,
    fuse_linear_bn_weights,
)
from modkit.nn.utils.init import skip_init
from modkit.nn.utils.memory_format import (
    convert_conv2d_weight_memory_format,
    convert_conv3d_weight_memory_format,
)
from modkit.nn.utils.spectral_norm import remove_spectral_norm, spectral_norm
from modkit.nn.utils.weight_norm import remove_weight_norm, weight_norm


__all__ = [
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "convert_conv2d_weight_memory_format",
    "convert_conv3d_weight_memory_format",
    "fuse_conv_bn_eval",
    "fuse_conv_bn_weights",
    "fuse_linear_bn_eval",
    "fuse_linear_bn_weights",
    "get_total_norm",
    "parameters_to_vector",
    "parametrizations",
    "parametrize",
    "remove_spectral_norm",
    "remove_weight_norm",
    "rnn",
    "skip_init",
    "spectral_norm",
    "stateless",
    "vector_to_parameters",
    "weight_norm",
]

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
