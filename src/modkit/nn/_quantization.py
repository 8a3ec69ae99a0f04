"""Telling users of ``torch.ao.quantization`` that it passes over the layers of modkit.

It finds layers by their exact class, and leaves others alone without a word. The one thing that it
does to every module is to set ``qconfig``, and that is where a layer can speak up.
"""

import sys
import warnings
from typing import Any, Final

import torch


_PROPAGATION: Final = "torch.ao.quantization.quantize"
_MESSAGE: Final = (
    "torch.ao.quantization finds layers by their exact class, so it leaves modkit.nn.{name} as it "
    "is. Quantize a copy that has torch's layers: modkit.release(copy.deepcopy(model))."
)


class QuantizationConfig:
    """Attribute ``qconfig`` of a layer: kept where torch keeps it, with a warning when it is set.

    The warning comes where torch's layer would have been quantized. A user's subclass of a layer
    would not, so subclasses are silent. This is no property, since TorchScript compiles those.
    """

    def __init__(self, owner: type, layer: type) -> None:
        self.owner = owner
        self.layer = layer

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None and "qconfig" in instance.__dict__:
            return instance.__dict__["qconfig"]
        raise AttributeError("qconfig")

    def __set__(self, instance: torch.nn.Module, value: object) -> None:
        instance.__dict__["qconfig"] = value
        setter = sys._getframe(1)
        while setter.f_code.co_name == "__setattr__" and setter.f_back is not None:
            setter = setter.f_back
        ours = type(instance) is self.owner
        if not ours or setter.f_globals.get("__name__") != _PROPAGATION:
            return
        from torch.ao.quantization import get_default_qconfig_propagation_list as quantizable

        by_class = setter.f_locals.get("qconfig_dict", {}).get(self.layer)
        # The list also has Sequential, which only hands the config on to what it holds.
        inherited = value is not None and self.layer in quantizable() - {torch.nn.Sequential}
        if by_class is not None or inherited:
            # Once for each kind of layer: Python shows one text from one place only once.
            warnings.warn(_MESSAGE.format(name=self.owner.__name__), UserWarning, stacklevel=3)

    def __delete__(self, instance: torch.nn.Module) -> None:
        if "qconfig" not in instance.__dict__:
            raise AttributeError("qconfig")
        del instance.__dict__["qconfig"]
