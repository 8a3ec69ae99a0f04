import copy
import io

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, same
from tests.parity.jit.networks import build, inputs


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def archive():
    """Return an archive as an open file."""
    return io.BytesIO(build(MODKIT, "scripted").save_to_buffer())


@for_each("device", ["cpu", torch.device("cpu"), "meta", None], ids=repr)
def test_tensors_go_where_map_location_says(device):
    """Parameters and buffers of all parts are on that device, and stay Parameters."""
    module = MODKIT.jit.load(archive(), map_location=device)
    expected = TORCH.jit.load(archive(), map_location=device)

    assert [t.device for t in (*module.parameters(), *module.buffers())] == [
        t.device for t in (*expected.parameters(), *expected.buffers())
    ]
    assert {type(p) for p in module.parameters()} == {torch.nn.Parameter}


@pytest.mark.parametrize("device", [3, {"cuda": "cpu"}, "nonsense"], ids=str)
def test_what_is_no_device_is_refused_as_in_torch(device):
    """An invalid map_location raises torch's error."""
    assert same(lambda impl: impl.jit.load(archive(), map_location=device))[0] == "raised"


@pytest.mark.parametrize("where", ["missing.pt", "."], ids=["missing", "folder"])
def test_a_path_that_is_no_file_is_refused_as_in_torch(where, tmp_path, monkeypatch):
    """Torch's errors name the path."""
    monkeypatch.chdir(tmp_path)

    assert same(lambda impl: impl.jit.load(where))[0] == "raised"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """Saving below a folder that does not exist raises, and makes none."""
    module = build(MODKIT, "scripted")

    with pytest.raises(RuntimeError, match=r"Parent directory .*missing does not exist"):
        module.save(tmp_path / "missing" / "net.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_link_leads_to_the_new_archive(tmp_path):
    """Saving to a link writes what it leads to, and the link stays."""
    (tmp_path / "real.pt").write_bytes(b"old")
    link = tmp_path / "link.pt"
    link.symlink_to(tmp_path / "real.pt")
    module = build(MODKIT, "scripted").eval()
    MODKIT.jit.save(module, link)

    assert link.is_symlink()
    assert torch.equal(MODKIT.jit.load(tmp_path / "real.pt")(inputs()), module(inputs()))


def test_what_is_not_compiled_is_not_saved(tmp_path):
    """Saving an eager module, or an extra file that is not text, raises and writes nothing."""
    path = tmp_path / "net.pt"
    module = build(MODKIT, "scripted")

    for target in (path, io.BytesIO()):
        assert same(lambda impl, f=target: impl.jit.save(impl.nn.Linear(1, 1), f))[0] == "raised"
    with pytest.raises(TypeError, match="extra file 'a' must be str or bytes, not int"):
        MODKIT.jit.save(module, path, _extra_files={"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_any_object_with_the_methods_is_saved(impl, tmp_path):
    """An object to save needs ``save`` for a path, ``save_to_buffer`` for a file, and no base class."""
    module = build(TORCH, "scripted").eval()

    class Wrapper:
        def save(self, path, _extra_files):
            module._c.save(str(path), _extra_files)

        def save_to_buffer(self, _extra_files):
            return module._c.save_to_buffer(_extra_files)

    buffer = io.BytesIO()
    impl.jit.save(Wrapper(), buffer, _extra_files={"note": "text"})
    impl.jit.save(Wrapper(), tmp_path / "wrapped.pt")
    impl.jit.save(module, tmp_path / "module.pt")
    files = {"note": ""}

    assert torch.equal(
        impl.jit.load(io.BytesIO(buffer.getvalue()), _extra_files=files)(inputs()), module(inputs())
    )
    assert files == {"note": b"text"}
    for name in ("wrapped.pt", "module.pt"):
        assert torch.equal(impl.jit.load(tmp_path / name)(inputs()), module(inputs()))


def test_functions_are_saved_and_loaded(impl, tmp_path):
    """An archive of a function loads as a module with that function as its forward."""

    @impl.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    path = str(tmp_path / "double.pt")
    impl.jit.save(double, path)
    buffer = io.BytesIO()
    impl.jit.save(double, buffer, _extra_files={"note": b"text"})
    files = {"note": ""}
    loaded = impl.jit.load(io.BytesIO(buffer.getvalue()), _extra_files=files)

    assert torch.equal(impl.jit.load(path)(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 2.0))
    assert files == {"note": b"text"}


def test_ties_with_an_eager_module_survive_a_copy():
    """A parameter that an eager and a compiled module have in common is one in the copy of both."""
    layer = MODKIT.nn.Linear(2, 2)
    for parts in ((layer, MODKIT.jit.script(layer)), (MODKIT.jit.script(layer), layer)):
        copied = copy.deepcopy(MODKIT.nn.Sequential(*parts))

        assert copied[0].weight is copied[1].weight
        assert copied[0].weight is not layer.weight


def test_the_record_of_another_archive_is_left_out():
    """Extra files that were read from an archive say nothing of the module they are saved with."""
    buffer = io.BytesIO()
    net = torch.nn.BatchNorm1d(2)
    record = '{"version": 1, "non_persistent_buffers": {"": ["running_mean"]}}'
    MODKIT.jit.save(MODKIT.jit.script(net), buffer, _extra_files={"modkit.json": record})
    module = MODKIT.jit.load(io.BytesIO(buffer.getvalue()))

    assert list(module.state_dict()) == list(net.state_dict())


def test_gradients_of_a_loaded_module_stay():
    """Gradients of a module that torch has loaded are in modkit's module too."""
    loaded = TORCH.jit.load(archive())
    loaded(inputs()).sum().backward()
    gradients = {name: tensor.grad for name, tensor in loaded.named_parameters()}
    module = MODKIT.jit.ScriptModule.from_torch(loaded)

    assert all(torch.equal(p.grad, gradients[name]) for name, p in module.named_parameters())
    assert len(gradients) > 2
