"""Inference with real models at batch 1: each is written once, for any namespace ``nn``."""

import copy
import operator
import runpy
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

import modkit
from benchmarks.measure import Arms, Code, Row
from benchmarks.rows import module
from modkit.models import DynamicsNetwork


EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "efficientzero_mcts.py"
RAW: Any = torch  # Functions that torch has no annotations for.
F: Any = torch.nn.functional
GRU, LSTM = RAW.gru_cell, RAW.lstm_cell
GPT2: Final = {"layers": 12, "heads": 12, "width": 768, "words": 50257}
TWO_LAYERS: Final = {"layers": 2, "heads": 4, "width": 128, "past": 0, "new": 32}
ONE: Final = (1, 64)
STEP: Final = (1, 1, 64)


def rand(*shapes: Any) -> Any:
    """Draw tensors of these shapes; a list of shapes becomes a tuple of tensors."""
    return tuple(rand(*s) if isinstance(s, list) else torch.rand(s) for s in shapes)


# Models, each with its inputs.


def mlp(nn: Any) -> Any:
    """Make an MLP 8-64-64-4."""
    hidden = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    layers = nn.Sequential(*hidden, nn.Linear(64, 4))
    return module(nn, lambda m, x: m.layers(x), layers=layers), rand((1, 8))


def actor_critic(nn: Any) -> Any:
    """Make two heads on a common body."""

    def forward(m: Any, x: Tensor) -> Any:
        x = m.body(x)
        return m.actor(x), m.critic(x)

    body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    heads = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n)) for n in (4, 1))
    made = module(nn, forward, body=body, actor=next(heads), critic=next(heads))
    return made, rand((1, 8))


def stacked(nn: Any) -> Any:
    """Make 20 x (Linear, LayerNorm, ReLU)."""
    layers = ((nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(20))
    return nn.Sequential(*(layer for three in layers for layer in three)), rand((1, 32))


def gnn(nn: Any) -> Any:
    """Make four layers of eight relations, each a module of its own."""

    def forward(m: Any, x: Tensor, edges: tuple[Tensor, ...]) -> Any:
        for relations in m.layers:
            messages = [relation(x, edges[i]) for i, relation in enumerate(relations)]
            x = F.relu(sum(messages, x))
        return x

    def relation() -> Any:
        return module(nn, lambda m, x, edges: edges @ m.linear(x), linear=nn.Linear(16, 16))

    layers = (nn.ModuleList(relation() for _ in range(8)) for _ in range(4))
    return module(nn, forward, layers=nn.ModuleList(layers)), rand((12, 16), [(12, 12)] * 8)


def transformer(
    nn: Any, layers: int, heads: int, width: int, words: int = 256, past: int = 63, new: int = 1
) -> Any:
    """Make a transformer like GPT-2, new tokens, and the keys and values of past ones."""
    size = (1, -1, heads, width // heads)

    def block_forward(m: Any, x: Tensor, past: tuple[Tensor, Tensor]) -> Any:
        q, k, v = m.qkv(m.norm_1(x)).chunk(3, -1)
        k = torch.cat([past[0], k.view(size).transpose(1, 2)], 2)
        v = torch.cat([past[1], v.view(size).transpose(1, 2)], 2)
        read = F.scaled_dot_product_attention(q.view(size).transpose(1, 2), k, v)
        x = x + m.proj(read.transpose(1, 2).flatten(2))
        return x + m.down(m.act(m.up(m.norm_2(x))))

    def block() -> Any:
        norms = {"norm_1": nn.LayerNorm(width), "norm_2": nn.LayerNorm(width), "act": nn.GELU()}
        inner = {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        outer = {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
        return module(nn, block_forward, **norms, **inner, **outer)

    def forward(m: Any, x: Tensor, past: tuple[tuple[Tensor, Tensor], ...]) -> Any:
        x = m.embedding(x)
        for i, block in enumerate(m.blocks):
            x = block(x, past[i])
        return m.head(m.norm(x))

    ends = {"embedding": nn.Embedding(words, width), "head": nn.Linear(width, words, bias=False)}
    blocks = nn.ModuleList(block() for _ in range(layers))
    made = module(nn, forward, blocks=blocks, norm=nn.LayerNorm(width), **ends)
    states = [[(1, heads, past, width // heads)] * 2] * layers
    return made, (torch.arange(new)[None], *rand(states))


def resnet18(nn: Any, width: int) -> Any:
    """Make a ResNet-18 for images of 32x32 pixels."""

    def forward(m: Any, x: Tensor) -> Any:
        out = m.relu(m.norm_1(m.conv_1(x)))
        return m.relu(m.norm_2(m.conv_2(out)) + m.shortcut(x))

    def conv(inner: int, outer: int, size: int, stride: int = 1) -> Any:
        return nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)

    def block(inner: int, outer: int) -> Any:
        stride = 1 + (inner != outer)
        convs = {"conv_1": conv(inner, outer, 3, stride), "conv_2": conv(outer, outer, 3)}
        norms = {"norm_1": nn.BatchNorm2d(outer), "norm_2": nn.BatchNorm2d(outer)}
        shortcut = [conv(inner, outer, 1, 2), nn.BatchNorm2d(outer)] if stride > 1 else []
        ends = {"relu": nn.ReLU(inplace=True), "shortcut": nn.Sequential(*shortcut)}
        return module(nn, forward, **convs, **norms, **ends)

    widths = [width, *(width * 2**n for n in range(4) for _ in range(2))]
    blocks = (block(*pair) for pair in pairwise(widths))
    stem = [conv(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return nn.Sequential(*stem, *blocks, *head), rand((1, 3, 32, 32))


def attention(nn: Any) -> Any:
    """Make self-attention without its weights."""
    layer = nn.MultiheadAttention(64, 4, batch_first=True)
    made = module(nn, lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)
    return made, rand((1, 16, 64))


def encoder(nn: Any) -> Any:
    """Make two layers of torch's own."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), rand((1, 16, 64))


@cache
def example() -> SimpleNamespace:
    """Import the example of EfficientZero."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def dynamics(nn: Any) -> Any:
    """Make the dynamics of the example, which torch calls in either namespace."""
    heads: Any = {"reward_head_channels": 4, "flatten_output_size_for_reward_head": 36}
    sizes: Any = {"num_channels": 17, "lstm_hidden_size": 32, "output_support_size": 3}
    model = DynamicsNetwork((3, 3, 3), 1, **heads, **sizes)
    return model, rand((1, 17, 3, 3), [(1, 1, 32)] * 2)


# The limit: a function that computes with the tensors alone.


class _EveryLayer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Trace into the layers of torch as well."""
        return False


def flat(model: torch.nn.Module) -> Callable[..., Any]:
    """Write the operations of a model as one function, with its tensors in place of modules."""
    graph = _EveryLayer().trace(model)
    code = graph.python_code("root")
    nodes = [node for node in graph.nodes if node.op == "get_attr"]
    tensors = {node.name: operator.attrgetter(node.target)(model).detach() for node in nodes}
    lines = (line.partition(";")[0] for line in code.src.splitlines())
    source = "\n".join(line for line in lines if line.partition(" = ")[0].strip() not in tensors)
    source = source.replace(", inplace = False", "")
    for name in ("relu", "layer_norm"):
        source = source.replace(f"torch.nn.functional.{name}", f"torch.{name}")
    names = {**code.globals, **tensors}
    exec(source.replace("forward(self, ", "forward("), names)  # noqa: S102 - torch.fx wrote it
    function: Callable[..., Any] = names["forward"]
    return function


def fused_encoder(model: Any) -> Callable[..., Any]:
    """Call the fused kernel of torch for each layer."""
    layers = [[p.detach() for p in layer.parameters()] for layer in model.layers]

    def forward(x: Tensor) -> Any:
        for wi, bi, wo, bo, w1, b1, w2, b2, *norms in layers:
            first = (64, 4, wi, bi, wo, bo, False, False, 1e-5)
            x = RAW._transformer_encoder_layer_fwd(x, *first, *norms, w1, b1, w2, b2)
        return x

    return forward


def fused_attention(model: Any) -> Callable[..., Any]:
    """Call the fused kernel of torch."""
    tensors, kernel = [p.detach() for p in model.parameters()], RAW._native_multi_head_attention
    return lambda x: kernel(x, x, x, 64, 4, *tensors, None, False)[0]


def lstm(model: Any) -> Callable[..., Any]:
    """Call the kernel of torch."""
    tensors = [p.detach() for p in model.parameters()]

    def forward(x: Tensor, state: Any) -> Any:
        out, *state = RAW.lstm(x, state, tensors, True, 1, 0.0, False, False, False)
        return out, tuple(state)

    return forward


def cell(kernel: Any, model: Any) -> Callable[..., Any]:
    """Call the kernel of torch."""
    tensors = [p.detach() for p in model.parameters()]
    return lambda x, state: kernel(x, state, *tensors)


# The other contestants.


def frozen(model: torch.nn.Module, inputs: Any) -> Callable[..., Any]:
    """Trace a copy to TorchScript, and freeze it."""
    traced = torch.jit.trace(copy.deepcopy(model), inputs, check_trace=False)
    function: Callable[..., Any] = torch.jit.freeze(traced)
    for _ in range(5):  # The executor optimizes in the first calls.
        function(*inputs)
    return function


def compiled(model: torch.nn.Module, inputs: Any) -> Callable[..., Any]:
    """Compile a copy with inductor."""
    torch.compiler.reset()
    function: Callable[..., Any] = torch.compile(copy.deepcopy(model))
    function(*inputs)
    return function


def attempt(make: Callable[[], Any]) -> Any:
    """Return the arm, or the name of the exception."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - a tracer or compiler may raise anything
        return type(error).__name__


def contestants(stack: ExitStack, make: Any, limit: Any, *, with_compile: bool) -> Arms:
    """Make all arms of a model on the same tensors, and test that their outputs agree."""
    torch.manual_seed(0)
    (plain, inputs), (ours, _), (fast, _) = (make(nn) for nn in (torch.nn, modkit.nn, modkit.nn))
    for model in (plain.eval(), ours.eval(), fast.eval()):
        model.load_state_dict(plain.state_dict(), assign=True)
    arms = {"torch": plain, "fast_inference": fast, "modkit": ours}
    stack.enter_context(torch.no_grad())
    arms["TorchScript frozen"] = attempt(partial(frozen, plain, inputs))
    if with_compile:
        arms["torch.compile"] = attempt(partial(compiled, plain, inputs))
    if limit is not None:
        arms["limit"] = limit(plain)
    stack.enter_context(torch.inference_mode())
    stack.enter_context(modkit.fast_inference(fast))
    expected = plain(*inputs)
    for name, arm in arms.items():
        tolerance = 0.0 if name in {"fast_inference", "modkit"} else 1e-4
        if not isinstance(arm, str):
            torch.testing.assert_close(arm(*inputs), expected, rtol=tolerance, atol=tolerance)
    return {
        name: arm if isinstance(arm, str) else Code("f(*x)", {"f": arm, "x": inputs})
        for name, arm in arms.items()
    }


def searching(stack: ExitStack) -> Arms:
    """Search 50 nodes from an empty board, as the example does."""
    game = example()
    torch.manual_seed(0)
    ours = modkit.models.EfficientZeroModel(**game.GAME, **game.SMALL).eval()
    fast = copy.deepcopy(ours)
    models = {"torch": copy.deepcopy(ours), "fast_inference": fast, "modkit": ours}
    stack.enter_context(torch.inference_mode())
    stack.enter_context(modkit.fast_inference(fast))
    found = {name: game.visits(game.search(m, [game.Board()], 50)[0]) for name, m in models.items()}
    assert found["torch"] == found["fast_inference"] == found["modkit"]
    names = {"search": game.search, "Board": game.Board}
    return {n: Code("search(m, [Board()], 50)", {**names, "m": m}) for n, m in models.items()}


# Name, budget, maker of the model and its inputs, maker of the limit.
MODELS: Final[list[tuple[str, float | None, Any, Any]]] = [
    ("MLP 8-64-64-4", 0.62, mlp, flat),
    ("RL actor-critic", 0.55, actor_critic, flat),
    ("20 x (Linear, LayerNorm, ReLU)", 0.50, stacked, flat),
    ("GPT decode step, 6 layers", 0.72, partial(transformer, layers=6, heads=4, width=64), flat),
    ("GNN, 4 layers of 8 relations", 0.72, gnn, flat),
    ("GPT-2 small, decode step", None, partial(transformer, **GPT2), flat),
    ("two-layer transformer, 32 words", None, partial(transformer, **TWO_LAYERS), flat),
    ("ResNet-18, width 16", None, partial(resnet18, width=16), None),
    ("ResNet-18, width 64", None, partial(resnet18, width=64), None),
    ("EfficientZero dynamics, 16 channels", None, dynamics, None),
    ("LSTM, one step", None, lambda nn: (nn.LSTM(64, 64), rand(STEP, [STEP] * 2)), lstm),
    ("GRUCell", None, lambda nn: (nn.GRUCell(64, 64), rand(ONE, ONE)), partial(cell, GRU)),
    ("LSTMCell", None, lambda nn: (nn.LSTMCell(64, 64), rand(ONE, [ONE] * 2)), partial(cell, LSTM)),
    ("MultiheadAttention", None, attention, fused_attention),
    ("TransformerEncoder, two layers", None, encoder, fused_encoder),
]


def rows(*, with_compile: bool = True) -> list[Row]:
    """Return all rows of this file; torch.compile takes most of the time to prepare them."""
    made = []
    for name, budget, make, limit in MODELS:
        arms = partial(contestants, make=make, limit=limit, with_compile=with_compile)
        made.append(Row(name, budget, arms, None, "inference"))
    search = Row("EfficientZero search, 16 channels", 0.77, searching, None, "inference")
    return [*made, search]
