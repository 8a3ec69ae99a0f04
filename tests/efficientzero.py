"""Configurations of EfficientZero's networks, and the results of one run of a network.

``tests/data/record_efficientzero.py`` records these runs of LightZero's networks, the tests compare
those of modkit's with the record, and where LightZero is installed with LightZero itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from modkit import models
from modkit.models import EfficientZeroConfig, _networks


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SAMPLE: Final = 2  # how many elements of each tensor are recorded as they are
BATCH: Final = 3


def _part(cls: Any, **defaults: Any) -> Any:
    """Return a constructor with LightZero's arguments for a part of a model."""
    names = {"out_channels": "num_channels", "output_support_size": "value_support_size"}

    def build(**options: Any) -> Any:
        given = {names.get(name, name): value for name, value in options.items()}
        return cls(EfficientZeroConfig.from_lightzero(**{**defaults, **given}))

    return build


# modkit's networks, all with LightZero's arguments.
NETWORKS: Final = SimpleNamespace(
    DownSample=_part(_networks.DownSample),
    DynamicsNetwork=models.DynamicsNetwork,
    EfficientZeroModel=models.EfficientZeroModel,
    PredictionNetwork=_part(_networks.PredictionNetwork),
    RepresentationNetwork=_part(_networks.RepresentationNetwork, downsample=True),
)


@dataclass(frozen=True)
class Case:
    """A network of one kind, its options, and the shapes of its inputs."""

    kind: str
    options: Mapping[str, Any]
    shape: tuple[int, ...]
    hidden: bool = True
    methods: tuple[str, ...] = ("__call__",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    latent: tuple[int, ...] = field(default=())

    def build(self, networks: Any = NETWORKS) -> Any:
        """Build a network with the class of this kind from a namespace, by default modkit's."""
        with one_thread():
            torch.default_generator.manual_seed(0)
            # A copy, as an activation among the options becomes a part of the network.
            return getattr(networks, self.kind)(**copy.deepcopy(dict(self.options)))

    def inputs(self, method: str, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments of a method."""
        source = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return numbers(shape, source, dtype)

        batch = BATCH
        if self.kind == "DynamicsNetwork":
            size = self.options.get("lstm_hidden_size", 512)
            x, state = random(batch, *self.shape), (random(1, batch, size), random(1, batch, size))
            return (x, state if self.hidden else None)
        if method == "recurrent_inference":
            size = self.options.get("lstm_hidden_size", 512)
            state = (random(1, batch, size), random(1, batch, size))
            actions = torch.arange(batch) % self.options.get("action_space_size", 6)
            return (random(batch, *self.latent).abs(), state, actions)
        return (random(batch, *(self.latent if method == "project" else self.shape)),)


def dynamics(shape: tuple[int, ...], **options: Any) -> Case:
    """Return a case of DynamicsNetwork; the shape is that of one sample."""
    options.setdefault("observation_shape", (12, 96, 96))
    return Case("DynamicsNetwork", options, shape)


def small(shape: tuple[int, ...] = (11, 6, 6), **options: Any) -> Case:
    """Return a small case of DynamicsNetwork whose last layer is not zero."""
    given = {
        "observation_shape": (4, 6, 6),
        "action_encoding_dim": 3,
        "num_channels": 11,
        "reward_head_channels": 2,
        "fc_reward_layers": [8],
        "output_support_size": 5,
        "flatten_output_size_for_reward_head": 72,
        "lstm_hidden_size": 12,
        "last_linear_layer_init_zero": False,
    }
    return dynamics(shape, **{**given, **options})


def model(latent: tuple[int, ...], observation_shape: tuple[int, ...], **options: Any) -> Case:
    """Return a case of EfficientZeroModel."""
    return Case(
        "EfficientZeroModel",
        {"observation_shape": observation_shape, **options},
        observation_shape,
        methods=("initial_inference", "recurrent_inference", "project"),
        # In double precision LightZero's first hidden state would still be float32.
        dtypes=(torch.float32,),
        latent=latent,
    )


def small_model(
    latent: tuple[int, ...], observation_shape: tuple[int, ...], **options: Any
) -> Case:
    """Return a case of EfficientZeroModel with few weights, in both precisions."""
    given = {
        "action_space_size": 5,
        "num_channels": 8,
        "lstm_hidden_size": 12,
        "reward_head_channels": 2,
        "reward_support_size": 5,
        "value_support_size": 7,
        "proj_hid": 16,
        "proj_out": 16,
        "pred_hid": 8,
        "pred_out": 16,
    }
    case = model(latent, observation_shape, **{**given, **options})
    methods = ("recurrent_inference", "project")
    return dataclasses.replace(case, methods=methods, dtypes=(torch.float32, torch.float64))


_ATARI: Final[dict[str, Any]] = {
    "downsample": True,
    "reward_head_channels": 16,
    "flatten_output_size_for_reward_head": 576,
}
_BOARD: Final[dict[str, Any]] = {
    "observation_shape": (4, 3, 3),
    "action_encoding_dim": 9,
    "num_channels": 25,
    "reward_head_channels": 16,
    "fc_reward_layers": [8],
    "output_support_size": 21,
    "flatten_output_size_for_reward_head": 144,
    "lstm_hidden_size": 64,
}
_UNIT_TEST: Final[dict[str, Any]] = {
    "observation_shape": [1, 3, 3],
    "action_encoding_dim": 1,
    "num_res_blocks": 3,
    "num_channels": 3,
    "reward_head_channels": 2,
    "fc_reward_layers": [16, 8],
    "output_support_size": 2,
    "flatten_output_size_for_reward_head": 18,
    "lstm_hidden_size": 64,
}
_PREDICTION: Final[dict[str, Any]] = {
    "observation_shape": (4, 6, 7),
    "action_space_size": 5,
    "num_res_blocks": 2,
    "num_channels": 8,
    "value_head_channels": 2,
    "policy_head_channels": 3,
    "fc_value_layers": [16, 3],
    "fc_policy_layers": [8],
    "output_support_size": 11,
    "flatten_output_size_for_value_head": 84,
    "flatten_output_size_for_policy_head": 126,
}

CASES: Final[dict[str, Case]] = {
    # The sizes that LightZero's configurations lead to.
    "defaults, 1x1": dynamics((64, 1, 1)),
    "Atari, one-hot": dynamics((70, 6, 6), action_encoding_dim=6, num_channels=70, **_ATARI),
    "Atari, not one-hot": dynamics((65, 6, 6), action_encoding_dim=1, num_channels=65, **_ATARI),
    "Atari, 2 planes": dynamics((66, 6, 6), num_channels=66, **_ATARI),
    "Atari, 1 of 64": dynamics((64, 6, 6), action_encoding_dim=1, **_ATARI),
    "Atari, 2 of 64": dynamics((64, 6, 6), observation_shape=(4, 96, 96), **_ATARI),
    "Atari, 2 of 64, LN": dynamics((64, 6, 6), norm_type="LN", **_ATARI),
    "defaults, 6x6": dynamics((64, 6, 6), flatten_output_size_for_reward_head=2304),
    "no blocks": dynamics((64, 6, 6), flatten_output_size_for_reward_head=2304, num_res_blocks=0),
    "3 blocks, 2 layers": dynamics(
        (64, 6, 6),
        flatten_output_size_for_reward_head=2304,
        num_res_blocks=3,
        fc_reward_layers=[32, 16],
    ),
    "64x64 pixels": dynamics(
        (70, 8, 8),
        observation_shape=(3, 64, 64),
        action_encoding_dim=6,
        num_channels=70,
        **{**_ATARI, "flatten_output_size_for_reward_head": 1024},
    ),
    "3x3 board": dynamics((25, 3, 3), **_BOARD),
    "LightZero's test": dynamics((3, 3, 3), **_UNIT_TEST),
    # Small ones, in all combinations.
    "BN": small(),
    "LN": small(norm_type="LN"),
    "BN, downsample": small(observation_shape=(4, 96, 96), downsample=True),
    "LN, downsample": small(observation_shape=(4, 96, 88), downsample=True, norm_type="LN"),
    "zero last layer": small(last_linear_layer_init_zero=True),
    "three layers": small(num_res_blocks=2, fc_reward_layers=[16, 8, 4]),
    "hidden None": dataclasses.replace(small(), hidden=False),
    "LN, hidden None": dataclasses.replace(small(norm_type="LN"), hidden=False),
    "PReLU": small(activation=torch.nn.PReLU()),
    **{
        f"{kind}{size}, {norm}": Case(
            kind,
            {"observation_shape": (4, size, size), **options, "norm_type": norm},
            (4, size, size),
        )
        for norm in ("BN", "LN")
        for size in (64, 96)
        for kind, options in {
            "DownSample": {"out_channels": 8},
            "RepresentationNetwork": {"num_channels": 8, "num_res_blocks": 2},
        }.items()
    },
    **{
        f"RepresentationNetwork, {norm}": Case(
            "RepresentationNetwork",
            {
                "observation_shape": (4, 6, 7),
                "num_channels": 8,
                "downsample": False,
                "norm_type": norm,
            },
            (4, 6, 7),
        )
        for norm in ("BN", "LN")
    },
    **{
        f"PredictionNetwork, {norm}": Case(
            "PredictionNetwork", {**_PREDICTION, "norm_type": norm}, (8, 6, 7)
        )
        for norm in ("BN", "LN")
    },
    **{
        f"model, {norm}, {encoding}": small_model(
            (8, 6, 7), (4, 6, 7), norm_type=norm, discrete_action_encoding_type=encoding
        )
        for norm in ("BN", "LN")
        for encoding in ("one_hot", "not_one_hot")
    },
    "model, 96, BN": small_model((8, 6, 6), (4, 96, 96), downsample=True),
    "model, 64, BN": small_model((8, 8, 8), (4, 64, 64), downsample=True),
    "model, vector": small_model((8, 5, 1), (1, 5, 1), categorical_distribution=False),
    # Whole models of LightZero's sizes.
    "Atari model, 12": model((64, 6, 6), (12, 96, 96), downsample=True),
    "Atari model, 4": model((64, 6, 6), (4, 96, 96), downsample=True),
    "Atari model, not one-hot": model(
        (64, 6, 6), (4, 96, 96), downsample=True, discrete_action_encoding_type="not_one_hot"
    ),
    "Atari model, 18 actions": model(
        (64, 6, 6), (4, 96, 96), downsample=True, action_space_size=18
    ),
    "model, 64x64 pixels": model((64, 8, 8), (3, 64, 64), downsample=True),
    "model, shipped": model(
        *((64, 8, 8), (4, 64, 64)),
        downsample=True,
        reward_support_size=101,
        value_support_size=101,
    ),
    "board model, BN": model((64, 3, 3), (4, 3, 3), action_space_size=3),
    "board model, LN": model((64, 3, 3), (4, 3, 3), action_space_size=3, norm_type="LN"),
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums do not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def numbers(shape: Sequence[int], source: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return random multiples of 1/1024 between -2 and 2, which are the same on every machine."""
    return torch.randint(-2048, 2049, tuple(shape), generator=source).to(dtype) / 1024


def scramble(network: torch.nn.Module) -> None:
    """Replace all weights and statistics, some of which start at zero."""
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = numbers(parameter.shape, source, parameter.dtype)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(values * 2.0 ** -round(math.log2(fan_in) / 2))
            else:
                parameter.copy_(values / 4 + (1 if name.endswith("weight") else 0))
        for name, buffer in network.named_buffers():
            if buffer.is_floating_point():
                values = numbers(buffer.shape, source, buffer.dtype)
                buffer.copy_(values.abs() + 0.5 if name.endswith("var") else values / 4)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result, in order."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, part.name) for part in dataclasses.fields(value)])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


Results = dict[str, list["Tensor | None"]]


def run(case: Case, network: Any, method: str, dtype: torch.dtype, *, training: bool) -> Results:
    """Call a network forwards and backwards; return outputs, gradients and statistics."""
    network.to(dtype).train(training)
    arguments = case.inputs(method, dtype)
    leaves = [t.requires_grad_() for t in tensors_in(arguments) if t.is_floating_point()]
    source = torch.Generator().manual_seed(3)
    with one_thread():
        outputs = list(tensors_in(getattr(network, method)(*arguments)))
        weights = [numbers(t.shape, source, t.dtype) for t in outputs]
        loss = sum((t * weight).sum() for t, weight in zip(outputs, weights, strict=True))
        torch.as_tensor(loss).backward()
    members = [*network.parameters(), *leaves]
    return {
        "outputs": [output.detach() for output in outputs],
        "gradients": [member.grad for member in members],
        "buffers": list(network.buffers()),
    }


def runs(case: Case, build: Any) -> Iterator[tuple[str, Results]]:
    """Yield the name and the results of each run; ``build()`` returns a new network."""
    for method in case.methods:
        for dtype in case.dtypes:
            for training in (True, False):
                network = build()
                scramble(network)
                name = f"{method} {dtype} {'train' if training else 'eval'}"
                yield name, run(case, network, method, dtype, training=training)


# --- the record -----------------------------------------------------------------------------------


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Return a bitwise fingerprint."""
    state = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            state.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            state.update(tensor.detach().contiguous().numpy().tobytes())
        state.update(b"|")
    return state.hexdigest()


def sample(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return some elements of each tensor, at indices that depend only on its size; NaN for None."""
    parts = []
    for tensor in tensors:
        if tensor is None:
            parts.append(torch.full((SAMPLE,), torch.nan))
        else:
            places = torch.linspace(0, tensor.numel() - 1, SAMPLE).long()
            parts.append(tensor.detach().flatten()[places])
    # The statistics of normalization include integers, which any of the precisions can hold.
    return torch.cat([part.to(parts[0].dtype) for part in parts]) if parts else torch.empty(0)


def kernels() -> str:
    """Return a fingerprint of what torch's kernels compute on this machine.

    If it equals the recorded one, results must be bitwise identical to the recorded results. Other
    machines sum in another order.
    """
    source = torch.Generator().manual_seed(4)
    results: list[Tensor | None] = []
    with one_thread():
        for dtype in (torch.float32, torch.float64):
            for channels, size in ((8, 6), (64, 6), (3, 3), (16, 48)):
                x = numbers((3, channels, size, size), source, dtype)
                kernel = numbers((channels, channels, 3, 3), source, dtype)
                x.requires_grad_()
                y = F.batch_norm(
                    F.conv2d(x, kernel.requires_grad_(), padding=1), None, None, training=True
                )
                z = F.layer_norm(y, y.shape[1:])
                rows = z.flatten(1)[:, :2304]
                lstm = torch.nn.LSTM(rows.shape[1], 32).to(dtype)
                with torch.no_grad():
                    for weight in lstm.parameters():
                        weight.copy_(numbers(weight.shape, source, dtype) / 16)
                out, _ = lstm(rows[None])
                out.sum().backward()
                results += [y.detach(), z.detach(), out.detach(), x.grad, kernel.grad]
                results += [weight.grad for weight in lstm.parameters()]
    return digest(results)


def summary(results: Results) -> dict[str, Any]:
    """Return the part of a run's results that is recorded.

    A single precision gradient has no elements on record: where another order of a sum moves a number
    across zero, ReLU passes on the whole gradient of it or nothing.
    """
    digests = {part: digest(found) for part, found in results.items()}
    sampled: list[Tensor | None] = []
    for part, found in results.items():
        if part != "gradients" or found[-1] is None or found[-1].dtype == torch.float64:
            sampled += found
    return {**digests, "sample": sample(sampled)}


def layout(network: torch.nn.Module) -> str:
    """Return a line for each entry of the state dict, in order: key, shape and dtype."""
    entries = network.state_dict().items()
    return "\n".join(f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in entries)


def mean_of_dynamics(network: Any) -> float:
    """Return LightZero's mean of the absolute weights, by its formula."""
    weights = network.conv.weight.detach().abs().flatten().tolist()
    for block in network.resblocks:
        for _, parameter in block.named_parameters():
            weights += parameter.detach().abs().flatten().tolist()
    return float(sum(weights) / len(weights))


def versions(network: torch.nn.Module) -> str:
    """Return a line for each module in the metadata of the state dict: name and version."""
    metadata: dict[str, dict[str, Any]] = network.state_dict()._metadata  # type: ignore[attr-defined]
    return "\n".join(f"{name} {entry}" for name, entry in metadata.items())


def record_of(case: Case, networks: Any) -> dict[str, Any]:
    network = case.build(networks)
    # LightZero's ``get_reward_mean`` raises AttributeError.
    means = {"mean": network.get_dynamic_mean()} if case.kind == "DynamicsNetwork" else {}
    return {
        **means,
        "layout": layout(network),
        "parameters": "\n".join(name for name, _ in network.named_parameters()),
        "count": sum(parameter.numel() for parameter in network.parameters()),
        "versions": versions(network),
        "initial": summary({"state": list(network.state_dict().values())}),
        "runs": {name: summary(found) for name, found in runs(case, lambda: case.build(networks))},
    }
