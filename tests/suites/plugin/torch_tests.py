"""Pytest plugin for torch's own tests: forks their processes, and stands in for what they lack here.

Tests for another release or device import helpers that this torch does not have, and packages of
the device or of that release. The helpers do nothing and the packages are empty, on both sides.
"""

import builtins
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType


_HELPERS = (
    "torch._dynamo.exc",
    "torch._dynamo.testing",
    "torch._dynamo.utils",
    "torch._export",
    "torch._inductor.compile_fx",
    "torch._inductor.utils",
    "torch.autograd._functions.utils",
    "torch.export",
    "torch.jit.frontend",
    "torch.testing._internal.common_cuda",
    "torch.testing._internal.common_device_type",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_mkldnn",
    "torch.testing._internal.common_nn",
    "torch.testing._internal.common_utils",
    "torch.testing._internal.hop_db",
    "torch.testing._internal.inductor_utils",
    "torch.testing._internal.jit_metaprogramming_utils",
    "torch.testing._internal.triton_utils",
)
_ABSENT_PACKAGES = (
    "torch.ao.quantization.quantize_pt2e",
    "torch.ao.quantization.quantizer",
    "torch.ao.quantization.quantizer.x86_inductor_quantizer",
    "torch.npu",
    "torch_npu",
    "torch_npu.contrib",
    "torch_npu.contrib.transfer_to_npu",
    "torch_npu.testing",
    "torch_npu.testing._internal",
    "torch_npu.testing._internal.common_fsdp",
    "torch_npu.testing.common_distributed",
    "torch_npu.testing.common_utils",
    "torch_npu.testing.testcase",
    "torch_npu.utils",
    "torchair",
)


class _Absent(ModuleType):
    """A package whose functions return their argument, and whose device is not available."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return {"npu": _Absent("npu"), "is_available": bool, "device_count": int}.get(
            name, _ignored
        )


def pytest_configure():
    """Prepare the modules of torch, which the plugin that swaps imports must see imported."""
    for name in _ABSENT_PACKAGES:
        sys.modules[name] = _Absent(name)
    torch = importlib.import_module("torch")
    torch.npu = sys.modules["torch.npu"]
    for name in _HELPERS:
        importlib.import_module(name).__getattr__ = _decorator

    export = importlib.import_module("torch.export")
    vars(export).setdefault("export_for_training", export.export)
    _stand_in_for_overloads(Path("test/export/testing.py"), torch.ops.aten)

    # Tests of many devices run on one. Some adapted tests are for their own device only.
    device = os.environ.get("SUITE_DEVICE", "cpu")
    devices = importlib.import_module("torch.testing._internal.common_device_type")
    instantiate = devices.instantiate_device_type_tests

    def for_the_device(test_class, scope, **options):
        return instantiate(test_class, scope, **{**options, "only_for": device})

    devices.instantiate_device_type_tests = for_the_device

    # The names of tests have those of modules, which must be alike on both sides.
    names = importlib.import_module("torch.testing._internal.common_modules").MODULE_CLASS_NAMES
    names.update({module: name.removeprefix("modkit.") for module, name in names.items()})

    # Some adapted tests use this name without importing it.
    builtins.HAS_CUDA = False
    common = importlib.import_module("torch.testing._internal.common_distributed")
    # A spawned process would import the tests as they are, without the swapped imports.
    common.MultiProcessTestCase._spawn_processes = _fork_processes

    # Torch's own helpers take the place of the device's.
    fsdp = importlib.import_module("torch.testing._internal.common_fsdp")
    dtensor = importlib.import_module("torch.testing._internal.distributed._tensor.common_dtensor")
    sys.modules["torch_npu.testing._internal.common_fsdp"].FSDPNPUTest = fsdp.FSDPTest
    sys.modules["torch_npu.testing.common_distributed"].with_comms = dtensor.with_comms
    # The models and helpers that tests in these folders share.
    sys.path += [f"test/{name}" for name in ("distributed/pipelining", "export", "functorch")]
    if importlib.util.find_spec("common_utils") is None:
        sys.modules["common_utils"] = _Absent("common_utils")


def _stand_in_for_overloads(tests, operators):
    """Give operators the overloads that tests list, and that this release does not have."""
    listed = re.findall(r"aten\.(\w+)\.(\w+),", tests.read_text()) if tests.exists() else []
    for name, overload in listed:
        operator = getattr(operators, name)
        if overload not in operator.overloads():
            setattr(operator, overload, operator)


def _fork_processes(case):
    multiprocessing = importlib.import_module("torch.multiprocessing")
    case._start_processes(multiprocessing.get_context("fork").Process)


def _decorator(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _ignored


class _Ignored(list):
    """A list of no tests, and a decorator that does nothing, with or without arguments."""

    def __call__(self, *arguments, **keywords):
        if len(arguments) == 1 and callable(arguments[0]):
            return arguments[0]
        return lambda function: function


_ignored = _Ignored()
