"""Models of public scripts and libraries: steps per second with ``fast_inference``, and dynamo.

The scripts are read from checkouts (``--scripts FOLDER``, with OWNER/NAME below it), as
`python -m tests.suites.training_scripts` reads them. A row whose checkout or library is missing is
left out.
"""

import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import modkit
from benchmarks.measure import Arms, Code, Row
from benchmarks.rows import TRACE, both, module
from benchmarks.workloads import gnn, resnet18, transformer
from modkit.compat.swapped_imports import SwappedImports


# The call under test runs one step of the script.
Step = Callable[[], Any]


@contextmanager
def importing(name: str, folder: Path | None, *, swap: bool) -> Generator[ModuleType, None, None]:
    """Import a module anew, with modkit in place of ``torch.nn`` or without.

    Args:
        name: The module; its siblings below ``folder`` are imported anew, too.
        folder: A folder to import it from, in front of all others.
        swap: Rewrite it and the modules of its folder.

    Yields:
        The module, which is forgotten afterwards.
    """
    before, path = dict(sys.modules), list(sys.path)
    sys.modules.pop(name, None)
    packages, paths = ([name], []) if folder is None else ([], [folder])
    remove = SwappedImports(packages=packages, paths=paths).install() if swap else lambda: None
    try:
        if folder is not None:
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        remove()
        for new in [found for found in sys.modules if found not in before]:
            if folder is not None and str(folder) in str(getattr(sys.modules[new], "__file__", "")):
                del sys.modules[new]
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]


# Steps of scripts: each function gets the module, and returns the model and a step.


def rollout(script: Any) -> tuple[Any, Step]:
    """Act with the policy of PPO in four environments, as the script does."""
    gym = importlib.import_module("gymnasium")
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(4)])
    agent = script.Agent(envs)
    observation, _ = envs.reset(seed=1)
    state = {"observation": torch.Tensor(observation)}

    def step() -> Tensor:
        action, _, _, value = agent.get_action_and_value(state["observation"])
        following, *_ = envs.step(action.numpy())
        state["observation"] = torch.Tensor(following)
        return torch.cat([value.flatten(), state["observation"].flatten()])

    return agent, step


def token(script: Any, **sizes: int) -> tuple[Any, Step]:
    """Sample one token after 32 others."""
    config = script.GPTConfig(vocab_size=65, bias=False, dropout=0.0, **sizes)
    model = script.GPT(config)
    prompt = torch.arange(32)[None]
    return model, lambda: model.generate(prompt, max_new_tokens=1, top_k=10)


def classify(script: Any, nodes: int = 200) -> tuple[Any, Step]:
    """Classify all nodes of a graph."""
    model = script.GCN(nfeat=32, nhid=16, nclass=7, dropout=0.5)
    features = torch.rand(nodes, 32)
    adjacency = (torch.rand(nodes, nodes) < 0.02).float().to_sparse()
    return model, lambda: model(features, adjacency)


class Script(NamedTuple):
    """A step of a script: its repository, module, the maker of the step, and further modules."""

    name: str
    repository: str
    folder: str
    module: str
    make: Callable[[Any], tuple[Any, Step]]
    needs: tuple[str, ...] = ()


# The sizes of config/train_shakespeare_char.py.
CHARACTERS: Final = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256}
SMALL: Final = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64}
SCRIPTS: Final = (
    Script(
        "cleanrl/ppo.py: act in 4 environments",
        "vwxyzjn/cleanrl",
        "cleanrl",
        "ppo",
        rollout,
        ("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "nanoGPT, 4 layers of width 64: generate a token",
        "karpathy/nanoGPT",
        ".",
        "model",
        partial(token, **SMALL),
    ),
    Script(
        "nanoGPT, train_shakespeare_char: generate a token",
        "karpathy/nanoGPT",
        ".",
        "model",
        partial(token, **CHARACTERS),
    ),
    Script("pygcn: classify 200 nodes", "tkipf/pygcn", ".", "pygcn.models", classify),
)


def made(script: Script, folder: Path, *, swap: bool) -> tuple[Any, Step]:
    """Make the model and the step of a script from a fixed seed."""
    torch.manual_seed(0)
    root = (folder / script.repository / script.folder).resolve()
    # Some say how large they are.
    with importing(script.module, root, swap=swap) as found, redirect_stdout(io.StringIO()):
        model, step = script.make(found)
    model.eval()
    return model, step


def steps(stack: ExitStack, script: Script, folder: Path) -> Arms:
    """Make the arms of a script, and test that they do the same."""
    made_by = {"torch": False, "fast_inference": True, "modkit": True}
    pairs = {name: made(script, folder, swap=swap) for name, swap in made_by.items()}
    stack.enter_context(torch.inference_mode())
    stack.enter_context(modkit.fast_inference(pairs["fast_inference"][0]))

    results = {}
    for name, (_, step) in pairs.items():
        torch.manual_seed(0)
        results[name] = [step() for _ in range(3)]
    for result in results.values():
        assert all(map(torch.equal, result, results["torch"]))
    return {name: Code("step()", {"step": step}) for name, (_, step) in pairs.items()}


# Models for dynamo: functions of the namespace, and models of libraries.


def recurrent(nn: Any, length: int = 12) -> Any:
    """Make a recurrent network that reads a sequence step by step."""

    def forward(m: Any, words: Tensor) -> Any:
        state = torch.zeros(words.shape[0], 32)
        for word in m.embedding(words).unbind(1):
            state = m.norm(m.cell(word, state))
        return m.head(state)

    parts = {"embedding": nn.Embedding(64, 16), "cell": nn.GRUCell(16, 32)}
    made_of = {**parts, "norm": nn.LayerNorm(32), "head": nn.Linear(32, 64)}
    return module(nn, forward, **made_of), (torch.arange(length)[None],)


def vision_transformer(nn: Any) -> Any:
    """Make a vision transformer of timm, whose file uses the namespace."""
    name = "timm.models.vision_transformer"
    with importing(name, None, swap=nn is modkit.nn) as found:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 6, "num_heads": 4}
        return found.VisionTransformer(**sizes, num_classes=10), (torch.rand(1, 3, 32, 32),)


def gpt2(nn: Any) -> Any:
    """Make a GPT-2 of transformers, whose file uses the namespace."""
    config = importlib.import_module("transformers").GPT2Config(
        n_embd=64,
        n_layer=6,
        n_head=4,
        vocab_size=64,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with importing("transformers.models.gpt2.modeling_gpt2", None, swap=nn is modkit.nn) as found:
        return found.GPT2Model(config), (torch.arange(16)[None],)


# Name, library, maker.
COMPILED: Final = (
    ("ViT of timm", "timm", vision_transformer),
    ("GPT-2 of transformers", "transformers", gpt2),
    ("a transformer of 6 layers", "", partial(transformer, layers=6, heads=4, width=64)),
    ("ResNet-18", "", partial(resnet18, width=16)),
    ("GNN, 4 layers of 8 relations", "", gnn),
    ("RNN, 12 steps", "", recurrent),
)


def model_for_dynamo(nn: Any, make: Any, *, compiled: bool) -> dict[str, Any]:
    """Make a model; ``compiled`` has been traced already, so that a call is mostly guards."""
    torch.manual_seed(0)
    model, inputs = make(nn)
    model.eval()
    of_modkit = any(modkit.nn.Module in type(each).__mro__ for each in model.modules())
    assert of_modkit == (nn is modkit.nn)
    if compiled:
        compiled_model: Any = torch.compile(model, backend="eager", fullgraph=True)
        compiled_model(*inputs)
        model = compiled_model
    return {"m": model, "inputs": inputs, "torch": torch}


def of_dynamo(name: str, make: Any) -> list[Row]:
    """Return the rows of a model: the time to trace it, and the time of a compiled call."""
    trace, call = (
        partial(model_for_dynamo, make=make, compiled=compiled) for compiled in (False, True)
    )
    return [
        both(f"dynamo trace, {name}", TRACE, trace, 1.02),
        both(f"call of {name}, compiled", "m(*inputs)", call, 1.02),
    ]


def installed(*names: str) -> bool:
    """Return True if all these libraries can be imported."""
    return all(importlib.util.find_spec(name) for name in names if name)


def rows(folder: Path | None) -> list[Row]:
    """Return the rows that can be measured here.

    Args:
        folder: Where the checkouts are; None leaves the steps of scripts out.

    Returns:
        The rows.
    """
    scripts = [
        Row(script.name, None, partial(steps, script=script, folder=folder), table="scripts")
        for script in SCRIPTS
        if folder is not None and installed(*script.needs)
        if (folder / script.repository).is_dir()
    ]
    models = [
        row
        for name, library, make in COMPILED
        if installed(library)
        for row in of_dynamo(name, make)
    ]
    return [*scripts, *models]
