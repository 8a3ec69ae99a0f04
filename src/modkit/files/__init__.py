"""Files: inspection, verification, atomic writes, readers of torch and safetensors files."""

from modkit._namespace import publish_all
from modkit.files.inspect import FileInfo, TensorInfo, inspect, verify


__all__ = ["FileInfo", "TensorInfo", "inspect", "verify"]


publish_all(globals())
