"""Types that type checkers must infer. Never run: `nox -s typing` reads it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import assert_type

import modkit
from modkit import jit, migrations, nn
from modkit._upstream import IncompatibleKeys
from modkit.models import EfficientZeroConfig, EfficientZeroModel, EZNetworkOutput
from modkit.nn import functional as F
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn


class Net(nn.Module):
    """A network as users write it: members are declared by assignment."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network."""
        return F.relu(self.linear(x - self.mean)) * self.gain


net = Net()

# The rows of README's table of types, with those about averages and TorchScript below. Torch's own
# annotations decide about calls and unknown attributes.
assert_type(net(torch.ones(1, 4)), Any)
assert_type(net.typo, torch.Tensor | torch.nn.Module)
first: torch.nn.Module = nn.Sequential(nn.Linear(4, 2))[0]

# Members keep the types that they were assigned or declared with.
assert_type(net.linear, nn.Linear)
assert_type(net.gain, nn.Parameter)
assert_type(net.mean, torch.Tensor)
assert_type(net.training, bool)

# Methods that return the module return the user's class.
assert_type(net.train(), Net)
assert_type(net.eval(), Net)
assert_type(net.to("cpu"), Net)
assert_type(net.to(torch.float64, non_blocking=True), Net)
assert_type(net.to_empty(device="cpu"), Net)
assert_type(net.float(), Net)
assert_type(net.double(), Net)
assert_type(net.half(), Net)
assert_type(net.bfloat16(), Net)
assert_type(net.cpu(), Net)
assert_type(net.cuda(), Net)
assert_type(net.requires_grad_(False), Net)
assert_type(net.apply(print), Net)
assert_type(net.share_memory(), Net)

# Traversal.
assert_type(net.parameters(), Iterator[nn.Parameter])
assert_type(net.named_parameters(), Iterator[tuple[str, nn.Parameter]])
assert_type(net.buffers(), Iterator[torch.Tensor])
assert_type(net.named_buffers(), Iterator[tuple[str, torch.Tensor]])
assert_type(net.children(), Iterator[torch.nn.Module])
assert_type(net.modules(), Iterator[torch.nn.Module])
assert_type(net.get_submodule("linear"), torch.nn.Module)
assert_type(net.get_parameter("gain"), nn.Parameter)
assert_type(net.get_buffer("mean"), torch.Tensor)

# State.
assert_type(net.state_dict(), dict[str, Any])
assert_type(modkit.load_state_dict(net, net.state_dict(), strict=False), IncompatibleKeys)
matched = modkit.load_matching(net, {}, strip=["module."], rename=lambda name: name.lower())
assert_type(matched, modkit.Matched)
assert_type(matched.loaded, list[str])
assert_type(matched.skipped, dict[str, str])
assert_type(matched.missing, list[str])
with modkit.fast_inference(net) as inside:
    assert_type(inside, Net)

# To type checkers the two namespaces are one: modules of either fit annotations of the other.
as_torch: torch.nn.Module = net
as_layer: torch.nn.Linear = net.linear
as_module: nn.Module = net.linear
as_container: nn.Module = nn.Sequential(net.linear, nn.ReLU(), torch.nn.Linear(2, 2))
loss: nn.Module = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

# Averaging knows the class of the model.
averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
assert_type(averaged, AveragedModel[Net])
assert_type(averaged.module, Net)
assert_type(averaged.module.linear, nn.Linear)
assert_type(averaged.n_averaged, torch.Tensor)
assert_type(averaged.eval(), AveragedModel[Net])
assert_type(update_bn([torch.ones(2, 4)], averaged), None)

assert_type(AveragedModel(net, precision="fp32", on_nonfinite="skip").module, Net)
assert_type(averaged.export_state_dict(), dict[str, torch.Tensor])

ema = modkit.EMA(net, schedule=[0.9, modkit.schedules.Equal()])
assert_type(ema, modkit.EMA[Net])
assert_type(ema.averaged_model(), Net)
assert_type(ema.module, Net)
callback = modkit.EMACallback(net, optimizer, schedule=[0.9], precision="fp64", index=0)
assert_type(callback, modkit.EMACallback[Net])
assert_type(callback.ema, modkit.EMA[Net])
with callback.evaluating() as evaluated:
    assert_type(evaluated, Net)
assert_type(ema.attach(optimizer), modkit.EMA[Net])

# As with torch, an annotation without the class of the model takes averages of every model.
of_any_model: AveragedModel = averaged
ema_of_any_model: modkit.EMA = ema
callback_of_any_model: modkit.EMACallback = callback
several: list[AveragedModel[nn.Module]] = [averaged]

assert_type(ema.named_averages(), Iterator[tuple[str, torch.Tensor]])
assert_type(modkit.average_checkpoints(["a.pt"], [1.0]), dict[str, torch.Tensor])
assert_type(modkit.schedules.Power(sigma_rel=0.1).over(20, 10), float)
assert_type(modkit.schedules.as_schedule(lambda n: n / (n + 1)), modkit.schedules.Schedule)
wide = modkit.PostHocEMA(net, "snapshots").reconstruct(sigma_rel=0.2)
assert_type(wide, modkit.posthoc.Reconstruction)
assert_type(modkit.posthoc.find_snapshots("snapshots"), list[modkit.posthoc.Snapshot])
assert_type(wide.averages, dict[str, torch.Tensor])
assert_type(wide.fit.error, float)

# Migrations.
steps = [migrations.rename("out.**", "proj.**"), migrations.merge(["q", "k"], "qk", dim=0)]


@migrations.declare({2: steps, 3: [migrations.convert("w", torch.t, torch.t, new="v")]})
class Migrated(nn.Module):
    """A declared class keeps its type."""


assert_type(Migrated(), Migrated)
migrated = migrations.migrate(net, {"w": torch.ones(1)}, to={Migrated: 1}, versions={Migrated: 2})
assert_type(migrated, OrderedDict[str, Any])
assert_type(migrations.plan(net, migrated), list[str])
assert_type(migrations.migrate_file(net, "old.pt", "new.safetensors", key="model"), list[str])

# TorchScript.
compiled = jit.script(net)
assert_type(compiled, jit.ScriptModule)
assert_type(compiled.code, str)
assert_type(compiled.original_name, str)
assert_type(compiled.save_to_buffer(), bytes)
assert_type(compiled.eval(), jit.ScriptModule)
assert_type(jit.trace_module(net, {"forward": torch.ones(1, 4)}), jit.ScriptModule)
assert_type(jit.load("net.pt"), jit.ScriptModule)
assert_type(jit.freeze(compiled), jit.ScriptModule)
assert_type(jit.optimize_for_inference(compiled, ["forward"]), jit.ScriptModule)
jit.save(compiled, "net.pt", _extra_files={"labels.txt": "cat", "raw": b"0"})
assert_type(jit.load("net.pt", sha256="0" * 64, strict_extra_files=True), jit.ScriptModule)
is_scripted = isinstance(compiled, (jit.RecursiveScriptModule, jit.TopLevelTracedModule))
compiler_names = (jit.frontend.get_jit_def, jit.ScriptWarning, jit.jit_module_from_flatbuffer)


class Scale(jit.ScriptModule):
    """A class with a script method, which keeps its types."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    @jit.script_method
    def scaled(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        """Multiply."""
        return x * self.weight * factor


assert_type(Scale(3), Scale)
assert_type(Scale(3).scaled(torch.ones(3), 2), torch.Tensor)

# LightZero's model takes a configuration, or its options as LightZero's does.
config = EfficientZeroConfig(observation_shape=(3, 6, 7), action_space_size=7)
search_model = EfficientZeroModel(config)
assert_type(config.latent_shape, Sequence[int])
assert_type(search_model.initial_inference(torch.ones(1, 3, 6, 7)), EZNetworkOutput)
assert_type(EfficientZeroModel(observation_shape=(3, 6, 7)).get_params_mean(), float)
