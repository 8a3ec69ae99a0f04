import contextlib
import io
import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

import modkit.nn as nn
from modkit import jit
from modkit.jit import _upstream
from tests.cases import for_each
from tests.processes import python


# Torch's warnings are shown by default since 2.14.
CATEGORY = "FutureWarning" if _upstream.DEPRECATION is FutureWarning else "DeprecationWarning"


def run(folder, code):
    """Run code in a process of its own, from a file as TorchScript reads it, and return the output."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    done = python(script)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_subpackages_are_attributes(tmp_path):
    """As with torch, one import is enough; each subpackage is imported when it is asked for."""
    lines = run(
        tmp_path,
        """
        import sys, warnings
        import torch
        warnings.simplefilter("error")
        before = set(sys.modules)
        import modkit, modkit.nn, modkit.schedules
        print([name for name in sorted(set(sys.modules) - before) if "jit" in name])
        later = ["modkit.distributed", "modkit.jit", "modkit.models", "modkit.optim.swa_utils"]
        print([name for name in later if name in sys.modules])
        print(modkit.jit.ScriptModule.__name__, modkit.models.DynamicsNetwork.__name__)
        print(modkit.optim.swa_utils.AveragedModel.__name__)
        print(modkit.distributed.export_average.__name__)
        print({"jit", "models", "nn", "optim", "EMA"} <= set(dir(modkit)))
        try:
            modkit.jitt
        except AttributeError as error:
            print(error)
        """,
    )

    assert lines == [
        "[]",
        "[]",
        "ScriptModule DynamicsNetwork",
        "AveragedModel",
        "export_average",
        "True",
        "module 'modkit' has no attribute 'jitt'",
    ]


def test_one_notice_takes_the_place_of_all_warnings(tmp_path):
    """A program that compiles, saves, loads and freezes is warned once, where it calls first."""
    lines = run(
        tmp_path,
        """
        import copy, io, warnings
        import torch
        import modkit.nn as nn
        from modkit import jit

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            class Scale(jit.ScriptModule):
                @jit.script_method
                def forward(self, x):
                    return x * 2

            Scale()(torch.ones(1))
            module = jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
            jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
            jit.trace_module(nn.Linear(2, 2), {"forward": torch.ones(1, 2)})
            module.define("def none(self) -> int:\\n    return 0\\n")
            copy.deepcopy(module)

            @jit.interface
            class Numbers:
                def number(self) -> int:
                    pass

            @jit.script_if_tracing
            def doubled(x):
                return x * 2

            jit.trace(lambda x: doubled(x), torch.ones(1))
            buffer = io.BytesIO()
            jit.save(module, buffer)
            buffer.seek(0)
            jit.freeze(jit.load(buffer))
            jit.optimize_for_inference(jit.script(nn.Linear(2, 2)))
        for one in caught:
            print(one.category.__name__, one.filename, str(one.message).split(":")[0])
        """,
    )

    notice = "TorchScript gets no new features and a later release of torch may drop it"
    (line,) = lines
    assert line.startswith(f"{CATEGORY} {tmp_path / 'script.py'} `torch.jit.script_method` is ")
    assert line.endswith(notice)


def test_the_notice_can_be_an_error(tmp_path):
    """Where warnings are errors the first call raises, and the next one works."""
    lines = run(
        tmp_path,
        """
        import warnings
        import torch
        import modkit.nn as nn
        from modkit import jit

        warnings.simplefilter("error")
        try:
            jit.script(nn.Linear(2, 2))
        except (DeprecationWarning, FutureWarning) as warning:
            print(type(warning).__name__)
        print(type(jit.script(nn.Linear(2, 2))).__name__)
        """,
    )

    assert lines == [CATEGORY, "RecursiveScriptModule"]


TURNED_OFF = """
import copy, io, warnings
import torch
import {library}.nn as nn
from {library} import jit

warnings.simplefilter("ignore")

class Scale(jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.factor = jit.Attribute(3, int)

    @jit.script_method
    def forward(self, x):
        return x * self.weight * self.factor

def double(x):
    return x * 2

linear, x = nn.Linear(2, 2), torch.ones(1, 2)
print(jit.script(linear) is linear, jit.trace(linear, x) is linear, jit.script(double) is double)
print(jit.trace_module(linear, {{"forward": x}}) is linear, jit.script(Scale) is Scale)
scale = Scale()
print(scale(torch.ones(2)).tolist(), copy.deepcopy(scale)(torch.ones(2)).tolist())
print(list(scale.state_dict()), scale.factor, scale, isinstance(scale, jit.ScriptModule))
print([name for name in ("code", "graph", "save", "define", "_c") if hasattr(scale, name)])
traced = jit.script_if_tracing(double)
print(traced(torch.ones(1)).item(), sorted(vars(traced)), traced.__name__)
for call in (
    lambda: scale.code,
    lambda: jit.script(double).graph,
    lambda: jit.script(double).code,
    lambda: jit.script(linear).graph,
    lambda: jit.trace(double, x).graph,
    lambda: jit.script({{"a": 1}}),
    lambda: jit.script(None),
    lambda: jit.interface(type("Named", (nn.Module,), {{}})),
    lambda: jit.optimize_for_inference(scale),
    lambda: scale.define("def one(self): return 1"),
    lambda: sorted(name for name in dir(scale) if name[0] != "_"),
    lambda: sorted(vars(scale)),
    lambda: jit.save(scale, io.BytesIO()),
    lambda: jit.save(scale, "net.pt"),
    lambda: jit.freeze(linear),
    lambda: len(scale),
    lambda: iter(scale),
):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, error if "graph" in str(error) else "")
"""


LOADING = """
import torch
from {library} import jit

module, x = jit.load({path!r}), torch.ones(1, 2)
print(torch.equal(module(x), x @ next(module.parameters()).T))
"""
# Each script by itself, in one process: torch looks at PYTORCH_JIT when it is imported.
ALL = """
import contextlib, io, json, runpy, sys

printed = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_path(path)
        except Exception as error:
            print(error)
    printed[path.rpartition("/")[2]] = output.getvalue().splitlines()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def turned_off(tmp_path_factory):
    """Run both programs on both libraries with PYTORCH_JIT=0; return what each prints."""
    folder = tmp_path_factory.mktemp("turned_off")
    path = str(folder / "net.pt")
    jit.script(nn.Sequential(nn.Linear(2, 2, bias=False))).save(path)
    for library in ("torch", "modkit"):
        for name, code in {"running": TURNED_OFF, "loading": LOADING}.items():
            script = folder / f"{name}_{library}"
            script.write_text(code.format(library=library, path=path), encoding="utf-8")

    scripts = [str(script) for script in folder.iterdir() if script.suffix != ".pt"]
    done = subprocess.run(
        [sys.executable, "-c", ALL, *scripts],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTORCH_JIT": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_with_the_compiler_turned_off_modules_run_as_python(turned_off):
    """With PYTORCH_JIT=0 functions return, and classes have, what they do in torch."""
    ours, theirs = turned_off["running_modkit"], turned_off["running_torch"]

    assert ours == theirs
    assert ours[2] == "[3.0, 3.0] [3.0, 3.0]"
    assert len(ours) > 20


def test_an_archive_loads_with_the_compiler_turned_off(impl, turned_off):
    """Archives need no compiler: they load and run with PYTORCH_JIT=0."""
    assert turned_off[f"loading_{impl}"] == ["True"]


NET, BATCH = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)


@for_each(
    ("name", "arguments"),
    [
        ("script", (NET,)),
        ("trace", (NET, BATCH)),
        ("trace_module", (NET, {"forward": BATCH})),
        ("save", (NET, io.BytesIO())),
        ("load", (io.BytesIO(),)),
    ],
    ids=["script", "trace", "trace_module", "save", "load"],
)
def test_the_notice_names_what_was_called_first(monkeypatch, name, arguments):
    """It has the name of the function and the file of the caller, and the next call does not warn."""
    call = getattr(jit, name)
    monkeypatch.setattr(_upstream, "_given", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with contextlib.suppress(Exception):
                call(*arguments)

    (notice,) = caught
    assert str(notice.message).startswith(f"`torch.jit.{name}` is ")
    assert (notice.filename, notice.category.__name__) == (__file__, CATEGORY)
