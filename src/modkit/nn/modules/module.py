"""``Module`` and the functions that register hooks for all modules.

The tables behind the functions are torch's own: a hook registered here runs for the modules of
both libraries, and functions of torch that need no fix are torch's too. Private names are looked up
in torch at each access, because torch rebinds some.
"""

from typing import TYPE_CHECKING

from torch.nn.modules.module import (  # noqa: TID251 - public functions, re-exported
    register_module_buffer_registration_hook,
    register_module_full_backward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from modkit.nn._global_hooks import (
    register_module_backward_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "Module",
    "register_module_backward_hook",
    "register_module_buffer_registration_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_full_backward_pre_hook",
    "register_module_module_registration_hook",
    "register_module_parameter_registration_hook",
]

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
