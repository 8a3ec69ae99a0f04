import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from modkit import jit, nn
from tests.integration.torchscript import SharedLayer, scripted_tests


SOURCE = Path(__file__).parent / "cpp" / "round_trip.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    scripted_tests,
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the flags are those of Linux"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Build the program against the libtorch that the wheel has."""
    path = tmp_path_factory.mktemp("cpp") / "round_trip"
    (libraries,) = cpp_extension.library_paths()[:1]
    command = [
        COMPILER,
        "-std=c++20",
        "-O0",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        str(SOURCE),
        "-o",
        str(path),
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    subprocess.run(command, check=True)
    return path


def class_based():
    """Return a class-based module."""

    class Scale(jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.head.bias.requires_grad_(False)

        @jit.script_method
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) * 2

    return Scale()


@pytest.mark.parametrize("kind", ["scripted", "traced", "class-based"])
def test_a_way_through_cpp_and_back(program, tmp_path, kind):
    """C++ loads and runs an archive, and what it saves loads again with all that was in it."""
    x = torch.arange(8.0).view(2, 4)
    module = {
        "scripted": lambda: jit.script(SharedLayer()),
        "traced": lambda: jit.trace(SharedLayer(), x),
        "class-based": class_based,
    }[kind]()
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    jit.save(module, there, _extra_files={"labels.txt": "cat,dog"})
    done = subprocess.run([program, there, back], check=True, capture_output=True, text=True)
    labels, *flags, output = done.stdout.splitlines()
    files = {"labels.txt": ""}
    loaded = jit.load(back, _extra_files=files)

    assert labels == "labels cat,dog"
    assert dict(line.rsplit(" ", 1) for line in flags) == {
        name: str(int(p.requires_grad))
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    numbers = torch.tensor([float(word) for word in output.split()[1:]])
    torch.testing.assert_close(numbers, module(x).detach().flatten(), atol=1e-3, rtol=1e-3)
    assert torch.equal(loaded(x), module(x))
    assert files == {"labels.txt": b"cat,dog"}
    assert list(loaded.state_dict()) == list(module.state_dict())
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]
    if kind == "scripted":
        assert loaded.first is loaded.second
        assert "mask" not in loaded.state_dict()
