import hashlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import modkit.nn as nn
from modkit import jit
from modkit.files.atomic_write import atomic_write
from tests.integration.torchscript import SharedLayer, scripted_tests


COMPILER = next(
    (
        name
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
        if name and shutil.which(name)
    ),
    None,
)
pytestmark = [
    # The compiler takes more than ten seconds for torch's headers.
    pytest.mark.slow,
    scripted_tests,
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(sys.platform == "win32", reason="the options are those of GCC and Clang"),
]

SOURCE = Path(__file__).with_name("roundtrip.cpp")


@pytest.fixture(scope="module")
def program(request):
    """Build the program against the libraries of the installed torch, unless that has been done."""
    paths = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [
        option
        for path in cpp_extension.library_paths()
        for option in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [COMPILER, "-std=c++20", "-O0", "-w", abi, *paths, str(SOURCE), *libraries]
    if sys.platform == "linux":
        command.append("-Wl,--no-as-needed")
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    recipe = repr((torch.__version__, command, SOURCE.read_text())).encode()
    folder = request.config.cache.mkdir("cpp")
    built = folder / f"roundtrip-{hashlib.sha256(recipe).hexdigest()[:16]}"
    if not built.exists():
        with atomic_write(built) as unfinished:
            run = subprocess.run(
                [*command, "-o", str(unfinished)], capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, run.stderr
    built.chmod(0o755)
    return built


class Scale(jit.ScriptModule):
    """A class with script methods, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)

    @jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.head(x) * 2


INPUTS = torch.arange(8.0).div(8).reshape(2, 4)
EXTRA = ("labels.txt", "modkit.json")


def made(kind):
    """Return a ScriptModule with parameters, buffers, a frozen parameter and mostly a shared child."""
    torch.manual_seed(0)
    return {
        "scripted": lambda: jit.script(SharedLayer()),
        "traced": lambda: jit.trace(SharedLayer(), INPUTS),
        "loaded": lambda: through(jit, jit.script(SharedLayer())),
        "frozen": lambda: jit.freeze(jit.script(SharedLayer().eval())),
        "class-based": Scale,
        "torch": lambda: torch.jit.script(SharedLayer()),
    }[kind]()


def through(namespace, module):
    """Save and load in memory."""
    buffer = io.BytesIO()
    namespace.save(module, buffer)
    buffer.seek(0)
    return namespace.load(buffer)


def run(program, path):
    """Run the program; return what it prints by the first word of each line, and what it saves."""
    out = path.with_name("out.pt")
    command = [program, path, out, *map(str, INPUTS.shape), *EXTRA]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = {}
    for line in ran.stdout.splitlines():
        first, *rest = line.split(" ", 2)
        lines.setdefault(first, []).append(rest)
    return lines, out


def numbers(lines):
    """Return what the program has computed, with every bit."""
    return [float.fromhex(value) for (value,) in lines["output"]]


def flags(module):
    """Return which parameters are trained, with every name of a tied one."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.requires_grad for name, parameter in named}


@pytest.mark.parametrize("kind", ["scripted", "traced", "loaded", "frozen", "class-based", "torch"])
def test_a_way_through_cpp_and_back(program, tmp_path, kind):
    """C++ loads and runs an archive, and what it saves loads again with all that was in it."""
    module, path = made(kind), tmp_path / "there.pt"
    jit.save(module, path, _extra_files={"labels.txt": "cat,dog"})
    lines, out = run(program, path)
    files = {"labels.txt": ""}
    again = jit.load(out, _extra_files=files)

    assert numbers(lines) == module(INPUTS).flatten().tolist()
    assert dict(lines["extra"])["labels.txt"] == "cat,dog"
    assert {name: grad == "1" for name, grad in lines.get("parameter", [])} == flags(module)
    assert [name for (name,) in lines.get("buffer", [])] == [
        name for name, _ in module.named_buffers(remove_duplicate=False)
    ]
    assert torch.equal(again(INPUTS), module(INPUTS))
    assert files == {"labels.txt": b"cat,dog"}
    assert flags(again) == flags(module)
    assert list(again.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("kind", ["scripted", "loaded"])
def test_what_only_modkit_knows_comes_through_cpp(program, tmp_path, kind):
    """A layer in two places stays one, and a buffer beside the state stays there."""
    path = tmp_path / "there.pt"
    jit.save(made(kind), path)
    again = jit.load(run(program, path)[1])

    assert again.first is again.second
    assert "mask" not in again.state_dict()
    assert "mask" in dict(again.named_buffers())


def test_cpp_does_not_notice_what_loading_refuses(program, tmp_path):
    """C++ computes from corrupt weights without an error; modkit's error names the corrupt member."""
    module, path = made("scripted"), tmp_path / "there.pt"
    jit.save(module, path)
    data = bytearray(path.read_bytes())
    weights = module.state_dict()["first.weight"].numpy().tobytes()
    data[data.index(weights) + 3] ^= 0x40
    path.write_bytes(data)
    lines, _ = run(program, path)

    assert numbers(lines) != module(INPUTS).flatten().tolist()
    with pytest.raises(RuntimeError, match=r"'archive/data/\d+' does not match its checksum"):
        jit.load(path)
