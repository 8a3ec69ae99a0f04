import contextlib
import io
import os
import pickle
import re

from IPython.core.interactiveshell import InteractiveShell

from tests.suites.probes.user_files import written


ABSTRACT = """\
class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Twice(Abstract):
    def forward(self, x):
        return x * 2
"""


def _shell():
    """Return a new shell: there is one in a process, and it keeps the times of files."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(colors="nocolor")
    shell.history_manager.enabled = False
    return shell


@contextlib.contextmanager
def _notebook(nn):
    """Start a notebook that reloads a user's file when it changes."""
    with written(nn) as file:
        shell = _shell()
        _run(shell, "%load_ext autoreload")
        _run(shell, "%autoreload 2")
        _run(shell, "import torch, users_networks as users")
        try:
            yield shell, file
        finally:
            _run(shell, "%autoreload 0")


def _run(shell, cell):
    """Run a cell, and return its value and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        result = shell.run_cell(cell, store_history=False)
    result.raise_error()
    return result.result


def _edit(file, before, after):
    """Change the file, with a time of change that is later for sure."""
    source = file.read_text(encoding="utf-8")
    assert before in source
    file.write_text(source.replace(before, after), encoding="utf-8")
    later = file.stat().st_mtime + 10
    os.utime(file, (later, later))


def _plain(text):
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"/\S*users_networks", "users_networks", text)
    return text.replace("modkit.nn.Module", "torch.nn.modules.module.Module")


def autoreload_changes_forward_of_instances(nn):
    with _notebook(nn) as (shell, file):
        _run(shell, "net = users.Wide(4); hidden = [users.Block()]; x = torch.ones(1, 4)")
        before = _run(shell, "net(x)")
        _edit(file, "* self.scale", "* self.scale - 3")
        return before, _run(shell, "net(x)"), _run(shell, "hidden[0](x)"), _run(shell, "net")


def autoreload_adds_a_method(nn):
    with _notebook(nn) as (shell, file):
        _run(shell, "net = users.Block()")
        _edit(
            file,
            "    def forward",
            "    def width_of(self):\n        return self.width\n\n    def forward",
        )
        return _run(shell, "net.width_of()"), _run(shell, "isinstance(net, users.Block)")


def autoreload_keeps_super(nn):
    with _notebook(nn) as (shell, file):
        _run(shell, "net = users.Wide(4)")
        _edit(file, "self.last(super().forward(x))", "self.last(super().forward(x)) * 0 + 2")
        return _run(shell, "net(torch.ones(1, 4))"), _run(shell, "users.Wide(4)(torch.ones(1, 4))")


def autoreload_under_hooks_and_training(nn):
    with _notebook(nn) as (shell, file):
        _run(
            shell,
            "net, seen = users.Net(users.Block()), []\n"
            "for m in net.modules(): m.register_forward_hook(lambda m, a, o: seen.append(type(m).__name__))\n"
            "optimizer = torch.optim.SGD(net.parameters(), 0.1)",
        )
        _edit(file, "* self.scale", "* self.scale + x")
        _run(shell, "net(torch.ones(1, 4)).sum().backward(); optimizer.step()")
        return _run(shell, "seen, net.state_dict()")


def autoreload_and_files(nn):
    with _notebook(nn) as (shell, file):
        _run(shell, "import io, copy, pickle\nnet = users.Wide(4)\ndata = pickle.dumps(net)")
        _edit(file, "* self.scale", "* self.scale + 1")
        return _run(
            shell,
            "copied = pickle.loads(data)\ncopied(torch.ones(1, 4)), copy.deepcopy(net)(torch.ones(1, 4)), "
            "users.Wide(4).load_state_dict(net.state_dict()), pickle.loads(pickle.dumps(net))(torch.ones(1, 4))",
        )


def autoreload_of_an_abstract_class(nn):
    with _notebook(nn) as (shell, file):
        _edit(file, "import torch\n", "import abc\nimport torch\n")
        _edit(file, "class Net(", ABSTRACT + "\n\nclass Net(")
        _edit(file, "x * 2", "x * 22")
        _run(shell, "net = users.Twice()")
        first = _run(shell, "net(torch.ones(1))")
        _edit(file, "x * 22", "x * 3")
        return first, _run(shell, "net(torch.ones(1)), isinstance(net, users.Abstract)")


def cell_defines_a_class_again(nn):
    shell = _shell()
    cell = (
        f"import torch, {nn.__name__} as nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.weight = nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x):\n        return x * self.weight * FACTOR\n"
        "net = Net()\n"
    )
    _run(shell, cell.replace("FACTOR", "2"))
    data = pickle.dumps(_run(shell, "net.state_dict()"))
    _run(shell, "old = net")
    _run(shell, cell.replace("FACTOR", "3"))
    shell.user_ns["state"] = pickle.loads(data)
    return _run(
        shell,
        "net.load_state_dict(state), old(torch.ones(2)), net(torch.ones(2)), isinstance(old, Net)",
    )


def completions(nn):
    with _notebook(nn) as (shell, _):
        _run(shell, "net = users.Net(users.Block())")
        shell.Completer.use_jedi = False
        found = [
            shell.complete(text)[1]
            for text in ("net.", "net.body.li", "users.", "users.Block.", "net.blo")
        ]
        # The metaclass has one method more.
        return [sorted({*names} - {".register"}) for names in found]


def shown_information(nn):
    with _notebook(nn) as (shell, _):
        _run(shell, "net = users.Block()")
        shown = {}
        for name in ("net", "users.Block", "net.forward", "users.Block.forward", "net.linear"):
            info = shell.object_inspect(name, detail_level=1)
            # Dynamo replaces the initializer of torch's class, from the first compilation on.
            del info["init_docstring"]
            if info["isclass"]:
                # Its metaclass.
                del info["type_name"], info["base_class"]
            shown[name] = {key: _plain(str(value)) for key, value in info.items()}
        return shown


def tracebacks(nn):
    with _notebook(nn) as (shell, _):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            shell.run_cell("users.Wide(4)(torch.ones(1, 3))")
        return _plain(printed.getvalue())
