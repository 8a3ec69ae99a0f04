import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import modkit.nn
from tests.parity.layers.samples import modkit_of


# Functions of modkit's own, because torch's have defects that modkit fixes.
FIXED = {
    "register_module_backward_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_module_full_backward_hook",
}


def _public_modules():
    for found in pkgutil.walk_packages(nn.__path__, "torch.nn."):
        if not any(part.startswith("_") for part in found.name.split(".")):
            yield found.name


def _in_fresh_process(code):
    """Run code in another interpreter, where every warning is an error, and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(_public_modules()))
def test_module_imports_under_both_names(name):
    """Every file of ``torch.nn`` has a counterpart, with the same public names and objects."""
    theirs = importlib.import_module(name)
    mine = importlib.import_module(name.replace("torch", "modkit", 1))
    public = getattr(theirs, "__all__", None) or [n for n in vars(theirs) if not n.startswith("_")]
    wanted = {name: getattr(theirs, name) for name in public}
    differing = [
        name
        for name, value in wanted.items()
        if getattr(mine, name, None) is not (modkit_of(value) if inspect.isclass(value) else value)
        and not inspect.ismodule(value)
    ]

    assert inspect.ismodule(mine)
    assert set(differing) <= FIXED
    assert [name for name in differing if getattr(mine, name).__name__ != name] == []


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fixed_function_takes_all_that_torch_takes(name):
    """A registration function of modkit's own has torch's parameters; new ones are keywords."""
    theirs = inspect.signature(getattr(torch.nn.modules.module, name)).parameters
    mine = inspect.signature(getattr(modkit.nn.modules.module, name)).parameters
    added = [mine[extra] for extra in mine if extra not in theirs]

    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in mine.values() if p not in added
    ]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)


@pytest.mark.parametrize("library", ["torch", "modkit"])
def test_star_import_gives_torch_names(library):
    """``from ... import *`` binds the public names of ``torch.nn``, modules among them."""
    bound = _in_fresh_process(
        f"""
        import torch.nn
        expected = [name for name in dir(torch.nn) if not name.startswith("_")]
        del torch
        before = set(globals())
        from {library}.nn import *
        print(sorted(set(globals()) - before - {{"before"}}) == sorted(expected))
        """
    )

    assert bound == ["True"]


@pytest.mark.parametrize(
    "name",
    [
        "functional",
        "init",
        "parameter",
        "grad",
        "utils.rnn",
        "utils.weight_norm",
        "utils.prune",
        "utils.parametrize",
        "modules.utils",
        "parallel.replicate",
        "attention.bias",
    ],
)
def test_module_without_layers_is_torch_module(name):
    """A file that defines no layer is the same module, so replacing a function reaches both."""
    mine = importlib.import_module(f"modkit.nn.{name}")

    assert mine is importlib.import_module(f"torch.nn.{name}")
    assert mine is sys.modules[f"torch.nn.{name}"]


@pytest.mark.parametrize(
    "statement",
    [
        "import {0}.nn.functional as F; F.relu",
        "from {0}.nn import functional as F; F.scaled_dot_product_attention",
        "from {0}.nn import init; init.kaiming_normal_",
        "from {0}.nn.utils import parametrize; parametrize.register_parametrization",
        "from {0}.nn.utils import clip_grad_norm_, weight_norm; weight_norm.__wrapped__",
        "from {0}.nn.utils import spectral_norm; spectral_norm.__code__",
        "import {0}.nn.utils.prune as prune; prune.l1_unstructured",
        "from {0}.nn.utils.rnn import pad_sequence, PackedSequence",
        "import {0}.nn.utils.parametrizations; {0}.nn.utils.parametrizations.orthogonal",
        "from {0}.nn.parameter import Buffer, Parameter, UninitializedParameter",
        "from {0}.nn.parallel import DataParallel, DistributedDataParallel, data_parallel",
        "from {0}.nn.parallel.scatter_gather import gather",
        "from {0}.nn.attention import SDPBackend, sdpa_kernel",
        "from {0}.nn.modules.batchnorm import _BatchNorm, _NormBase",
        "from {0}.nn.modules.conv import _ConvNd, _size_2_t",
        "from {0}.nn.modules.linear import NonDynamicallyQuantizableLinear",
        "from {0}.nn.modules.lazy import LazyModuleMixin",
        "from {0}.nn.modules.module import _IncompatibleKeys, _addindent, _WrappedHook",
        "from {0}.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _global_forward_hooks",
        "from {0}.nn.modules.module import register_module_full_backward_pre_hook",
        "from {0}.nn.modules.transformer import _get_activation_fn, _get_clones",
        "from {0}.nn.modules.utils import _pair, consume_prefix_in_state_dict_if_present",
        "import {0}.nn.quantized.dynamic; {0}.nn.quantized.dynamic.Linear",
        "import {0}.nn.intrinsic.qat; {0}.nn.qat; {0}.nn.quantizable; {0}.nn.quantized.Linear",
        "from {0}.nn import quantized, qat; quantized.dynamic.LSTM",
        "from {0}.nn.common_types import _size_2_t",
        "from {0}.nn import _reduction",
        "from {0}.nn.modules.no_such_file import Linear",
        "from {0}.nn.modules.linear import NoSuchLayer",
        "import {0}.nn.no_such_file",
    ],
)
def test_statement_works_as_in_torch(statement):
    """Users' import statements work, or fail, whichever library's name stands in them."""

    def outcome(library):
        try:
            exec(statement.format(library), {})
        except Exception as error:
            return type(error).__name__
        return "works"

    assert outcome("modkit") == outcome("torch")


def test_functions_keep_their_names():
    """Where a file and its function share a name, the package shows the function, as in torch."""
    for package, names in {
        "utils": ["weight_norm", "spectral_norm"],
        "parallel": ["data_parallel", "parallel_apply", "replicate"],
    }.items():
        for name in names:
            importlib.import_module(f"modkit.nn.{package}.{name}")
            mine, theirs = getattr(modkit.nn, package), getattr(nn, package)

            assert getattr(mine, name) is getattr(theirs, name)
            assert inspect.isfunction(getattr(mine, name))


def test_rebound_flag_is_not_a_stale_copy(monkeypatch):
    """The flag that torch rebinds is read from torch at each access."""
    hooks = modkit.nn.modules.module
    seen = []
    for value in (None, True, False):
        monkeypatch.setattr(torch.nn.modules.module, "_global_is_full_backward_hook", value)
        seen.append(hooks._global_is_full_backward_hook)

    assert seen == [None, True, False]


def test_tables_of_global_hooks_are_torch_objects():
    """Whoever writes into a global hook table through either library writes into the same one."""
    theirs = torch.nn.modules.module
    tables = [name for name in vars(theirs) if name.startswith("_global_")]

    assert len(tables) >= 10
    assert all(getattr(modkit.nn.modules.module, n) is getattr(theirs, n) for n in tables)


def test_import_is_quiet_and_light():
    """``import modkit.nn`` warns of nothing and imports no part of torch that torch has not."""
    imported = _in_fresh_process(
        """
        import sys
        import torch
        before = set(sys.modules)
        import modkit.nn
        print(*(name for name in set(sys.modules) - before if not name.startswith("modkit")))
        """
    )

    assert imported == []


def test_older_torch_without_the_newest_layers():
    """On a torch that lacks the newest names, everything else is there."""
    answers = _in_fresh_process(
        """
        import sys
        import torch
        for name in ("LinearCrossEntropyLoss", "LinearCrossEntropyOptions"):
            for namespace in (torch.nn, torch.nn.modules):
                delattr(namespace, name)
            torch.nn.modules.__all__.remove(name)
        del torch.nn.modules.loss.LinearCrossEntropyLoss
        torch.nn.modules.loss.__all__.remove("LinearCrossEntropyLoss")
        del torch.nn.modules.linear_cross_entropy_options
        sys.modules["torch.nn.modules.linear_cross_entropy_options"] = None
        import modkit.nn
        print(hasattr(modkit.nn, "LinearCrossEntropyLoss"), hasattr(modkit.nn.modules, "Linear"))
        print(sorted(modkit.nn.modules.__all__) == sorted(torch.nn.modules.__all__))
        """
    )

    assert answers == ["False", "True", "True"]


def test_newer_torch_with_more_layers():
    """A layer that only a newer torch has is there after the import, as a modkit layer."""
    answers = _in_fresh_process(
        """
        import pickle
        import torch
        class Doubling(torch.nn.Linear):
            pass
        Doubling.__module__ = "torch.nn.modules.linear"
        for namespace in (torch.nn, torch.nn.modules, torch.nn.modules.linear):
            namespace.Doubling = Doubling
        torch.nn.modules.__all__.append("Doubling")
        import modkit.nn
        print("Doubling" in vars(modkit.nn), "Doubling" in modkit.nn.modules.__all__)
        print(issubclass(modkit.nn.Doubling, (Doubling)), issubclass(modkit.nn.Doubling, modkit.nn.Linear))
        print(modkit.nn.Doubling.__module__, modkit.nn.modules.linear.Doubling is modkit.nn.Doubling)
        print(type(pickle.loads(pickle.dumps(modkit.nn.Doubling(2, 3)))) is modkit.nn.Doubling)
        """
    )

    assert answers == ["True"] * 4 + ["modkit.nn.modules.linear"] + ["True"] * 2
