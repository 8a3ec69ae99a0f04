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

import modkit.nn
from modkit._files import atomic_write
from modkit.jit._archive import check_archive, inspect
from modkit.jit._archive_seal import sealed
from modkit.jit._export import export_files, to_export
from tests.integration.torchscript import scripted_tests


COMPILER = next(
    (
        name
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
        if name and shutil.which(name)
    ),
    None,
)
pytestmark = [
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
    return built


def network(layers):
    """Return a network with parameters, buffers, a frozen layer and a child in two places."""
    torch.manual_seed(0)
    shared = layers.Linear(4, 4)
    net = layers.Sequential(
        layers.Linear(3, 4), layers.BatchNorm1d(4), shared, layers.ReLU(), shared
    )
    net[0].bias.requires_grad_(False)
    return net.eval()


def written(tmp_path, data):
    """Write an archive to a file."""
    path = tmp_path / "net.pt"
    path.write_bytes(data)
    return path


def run(program, path):
    """Run the program, and return the lines it prints as lists of words, by their first word."""
    out = path.with_name("out.pt")
    ran = subprocess.run(
        [program, path, out, "labels.txt", "2", "3"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = {}
    for line in ran.stdout.splitlines():
        first, *rest = line.split(" ")
        lines.setdefault(first, []).append(rest)
    return lines, out


INPUTS = torch.arange(6.0).div(8).reshape(2, 3)


@pytest.mark.parametrize("layers", [torch.nn, modkit.nn], ids=["torch", "modkit"])
@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_an_archive_in_cpp_and_back(program, tmp_path, layers, how):
    """C++ loads an archive, computes the same from it, and what it saves is the same again."""
    net = network(layers)
    compiled = torch.jit.trace(net, INPUTS) if how == "trace" else torch.jit.script(net)
    if how == "freeze":
        compiled = torch.jit.freeze(compiled)
    path = written(tmp_path, compiled.save_to_buffer(_extra_files={"labels.txt": "cat,dog"}))
    expected = compiled(INPUTS)

    lines, out = run(program, path)
    extra = {"labels.txt": ""}
    again = torch.jit.load(out, _extra_files=extra)
    assert [float.fromhex(value) for (value,) in lines["output"]] == expected.flatten().tolist()
    assert lines["extra"] == [["cat,dog"]]
    assert [(name, int(grad)) for name, grad in lines.get("parameter", [])] == [
        (name, tensor.requires_grad)
        for name, tensor in compiled.named_parameters(remove_duplicate=False)
    ]
    assert [name for (name,) in lines.get("buffer", [])] == [
        name for name, _ in compiled.named_buffers(remove_duplicate=False)
    ]
    assert extra == {"labels.txt": b"cat,dog"}
    assert torch.equal(again(INPUTS), expected)
    assert {name: tensor.requires_grad for name, tensor in again.named_parameters()} == {
        name: tensor.requires_grad for name, tensor in compiled.named_parameters()
    }


def test_what_cpp_saves_passes_the_check(program, tmp_path):
    """An archive that C++ has written is whole, and holds the same tensors under the same names."""
    data = torch.jit.script(network(torch.nn)).save_to_buffer(_extra_files={"labels.txt": ""})
    _, out = run(program, written(tmp_path, data))

    assert check_archive(out) == {"labels.txt": 0}
    assert inspect(out).tensors == inspect(data).tensors
    assert inspect(out).classes == inspect(data).classes


def test_what_modkit_adds_is_no_hindrance(program, tmp_path):
    """C++ reads an archive with a list of its members and a program of torch.export beside it."""
    net = network(torch.nn)
    scripted = torch.jit.script(net)
    files = {"labels.txt": "cat", **export_files(to_export(net, (INPUTS,)))}
    path = written(tmp_path, sealed(scripted.save_to_buffer(_extra_files=files)))

    lines, _ = run(program, path)
    assert check_archive(path) == {name: len(content) for name, content in files.items()}
    assert [float.fromhex(value) for (value,) in lines["output"]] == net(INPUTS).flatten().tolist()


def test_cpp_does_not_notice_what_the_check_refuses(program, tmp_path):
    """C++ computes from damaged weights without a complaint; the check names what is damaged."""
    scripted = torch.jit.script(network(torch.nn))
    data = bytearray(scripted.save_to_buffer(_extra_files={"labels.txt": ""}))
    weights = scripted.state_dict()["0.weight"].numpy().tobytes()
    data[data.index(weights) + 3] ^= 0x40
    path = written(tmp_path, bytes(data))

    lines, _ = run(program, path)
    assert [float.fromhex(value) for (value,) in lines["output"]] != scripted(
        INPUTS
    ).flatten().tolist()
    with pytest.raises(RuntimeError, match=r"the content of data/\d+ does not match its checksum"):
        check_archive(io.BytesIO(bytes(data)))
