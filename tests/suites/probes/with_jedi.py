import re

import jedi

from tests.suites.probes.user_files import NETWORKS, imported


def _names(completions):
    return sorted(completion.name for completion in completions)


def _source(nn):
    return NETWORKS.replace("{nn}", nn.__name__)


def _text(shown):
    """Return a text without the name of a class, for which jedi takes that of its metaclass if it has one."""
    return re.sub(r"^\w+\((?!self)", "(", shown)


def _live(nn, code):
    """Return the completions on objects that exist, as a debugger and a notebook ask for them."""
    with imported(nn) as users:
        net = users.Net(users.Wide(4, 4))
        names = _names(jedi.Interpreter(code, [{"users": users, "net": net, "nn": nn}]).complete())
        # Attributes of the metaclass.
        return [
            name
            for name in names
            if name not in ("register", "_abc_impl", "__subclasscheck__", "__instancecheck__")
        ]


def live_instance(nn):
    return _live(nn, "net.")


def live_class(nn):
    return [name for name in _live(nn, "users.Wide.") if not name.startswith("__")]


def live_signatures(nn):
    with imported(nn) as users:
        net = users.Net(users.Block())
        space = [{"users": users, "net": net, "nn": nn}]
        calls = (
            "users.Wide(",
            "users.Block.forward(",
            "nn.Linear(",
            "net.load_state_dict(",
            "net.register_buffer(",
        )
        return [
            [_text(one.to_string()) for one in jedi.Interpreter(code, space).get_signatures()]
            for code in calls
        ]


def live_docstrings(nn):
    with imported(nn) as users:
        space = [{"users": users, "net": users.Net(users.Block())}]
        asked = ("users.Block", "users.Block.forward", "net.body.forward", "net")
        return [
            [_text(one.docstring()) for one in jedi.Interpreter(code, space).infer()]
            for code in asked
        ]


def members_of_self_in_a_file(nn):
    source = _source(nn).replace("self.calls += 1", "self.calls += 1\n        self.")
    line = next(n for n, text in enumerate(source.splitlines(), 1) if text == "        self.")
    return _names(jedi.Script(source).complete(line, 13))


def signatures_in_a_file(nn):
    source = _source(nn)
    calls = ("Wide(", "Net(", "nn.Linear(", "nn.Conv2d(", "Net(Block()).load_state_dict(")
    return [
        [one.to_string() for one in jedi.Script(f"{source}\n{call}").get_signatures()]
        for call in calls
    ]


def definitions_in_a_file(nn):
    source = _source(nn)
    found = []
    for line, text in enumerate(source.splitlines(), 1):
        for word in (
            "nn.Linear",
            "nn.ModuleList",
            "nn.Identity",
            "super().forward",
            "register_buffer",
        ):
            if word in text:
                column = text.index(word) + len(word) - 1
                names = jedi.Script(source).goto(line, column, follow_imports=True)
                found.append((word, [(name.full_name, name.type) for name in names]))
    return found


def inferred_types_in_a_file(nn):
    source = (
        _source(nn)
        + "\nnet = Net(Block())\nnet\nnet.body\nnet.blocks\nnet.parameters\nnet.state_dict\n"
    )
    first = source.splitlines().index("net") + 1
    script = jedi.Script(source)
    lengths = [(0, 1), (1, 5), (2, 5), (3, 5), (4, 5)]
    return [[one.name for one in script.infer(first + line, column)] for line, column in lengths]
