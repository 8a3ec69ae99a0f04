"""Calls that type checkers must refuse. Never run: an ignore that is not needed is an error."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import torch

import modkit
from modkit import jit, migrations, nn
from modkit.optim.swa_utils import AveragedModel


net = nn.Module()

net.train("yes")  # type: ignore[arg-type]
net.add_module(0, net)  # type: ignore[arg-type]
net.register_parameter("weight", torch.ones(1))  # type: ignore[arg-type]
net.load_state_dict(5)  # type: ignore[arg-type]
net.load_state_dict({}, strictly=True)  # type: ignore[call-arg]
net.to_empty()  # type: ignore[call-arg]
net.register_forward_hook(3)  # type: ignore[arg-type]
modkit.load_matching(net, {}, "module.")  # type: ignore[call-arg]
modkit.load_matching(net, {}, strip=5)  # type: ignore[arg-type]
AveragedModel("net")  # type: ignore[type-var]
jit.freeze(net)  # type: ignore[arg-type]
jit.trace_module(5, {})  # type: ignore[arg-type]
jit.script_method(5)  # type: ignore[type-var]
migrations.rename("a")  # type: ignore[call-arg]
migrations.declare({2: ["a"]})  # type: ignore[list-item]
migrations.migrate(net, {}, to=1)  # type: ignore[arg-type]
