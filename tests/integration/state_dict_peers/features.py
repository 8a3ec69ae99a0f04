"""Features of the loading of state dicts: each function returns True if a library has it.

A function takes a class of `tests.integration.state_dict_peers.peers`. `docs/render.py --renew state_dict_libraries` stores
all outcomes.
"""

import contextlib
from functools import partial

import torch
from torch import nn

from tests.integration.pages import Missing, answer
from tests.integration.state_dict_peers.peers import PEERS


# A library says by one of these that a state dict does not fit. transformers raises ValueError.
REFUSALS = (RuntimeError, ValueError)
RENAME = ("rename", "fc", "head")


def linear(inputs=2, outputs=3):
    """Return a function that makes a linear layer."""
    return partial(nn.Linear, inputs, outputs)


def layer(name, inputs=2, outputs=3):
    """Return the state dict of a linear layer of this name, with other values than a new one's."""
    return {f"{name}.weight": torch.randn(outputs, inputs), f"{name}.bias": torch.randn(outputs)}


def holds(model, name, values):
    """Return True if a layer of a model has these values, bitwise."""
    found = model.get_submodule(name).state_dict()
    return all(torch.equal(found[end], value) for end, value in zip(found, values, strict=True))


def renamed(peer):
    """A renamed layer is declared once, and old and new state dicts load as before."""
    for name in ("fc", "head"):
        state = layer(name)
        model, _ = peer.load(peer.network({"head": linear()}, [RENAME]), state)
        if not holds(model, "head", state.values()):
            return False
    return True


def joined(peer):
    """Two layers that became one are declared."""
    state = {**layer("q"), **layer("k")}
    model = peer.network({"qk": linear(2, 6)}, [("join", ["q", "k"], "qk")])
    model, _ = peer.load(model, state)
    weights, biases = ([state[f"{part}.{end}"] for part in "qk"] for end in ("weight", "bias"))
    return holds(model, "qk", [torch.cat(weights), torch.cat(biases)])


def way_back(peer):
    """The declaration also makes the old state dict of the new model, bitwise."""
    state = {**layer("fc"), **layer("q"), **layer("k")}
    steps = [RENAME, ("join", ["q", "k"], "qk")]
    model, _ = peer.load(peer.network({"head": linear(), "qk": linear(2, 6)}, steps), state)
    older = peer.older(model)
    return older.keys() == state.keys() and all(
        torch.equal(older[name], state[name]) for name in older
    )


def plain_module(peer):
    """A plain module declares it, and any model that contains the module loads old state dicts."""
    block = peer.block({"head": linear()}, [RENAME])
    state = layer("blocks.1.fc")
    model = peer.network({"blocks": lambda: nn.ModuleList([nn.Identity(), block()])})
    with contextlib.suppress(*REFUSALS):
        model, _ = peer.load(model, state)
        return holds(model, "blocks.1.head", state.values())
    return False


def newer(peer):
    """A state dict of a newer version of the class is refused."""
    try:
        model = peer.network({"head": linear()}, [RENAME])
    except Missing:
        model = peer.network({"head": linear()})
    state = model.state_dict()
    state._metadata[""]["version"] = 9
    try:
        peer.load(model, state)
    except REFUSALS:
        return True
    return False


def undecided(peer):
    """A square weight that may be transposed or not is refused, as its state dict has no version."""
    model = peer.network({"head": linear(2, 2)}, [("transpose", "head.weight")])
    try:
        peer.load(model, layer("head", 2, 2))
    except REFUSALS:
        return True
    return False


def optimizer(peer):
    """The state of an optimizer migrates with the model."""
    model = peer.network({"head": linear()}, [RENAME])
    trainer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model.head(torch.ones(1, 2)).sum().backward()
    trainer.step()
    older = peer.older_optimizer(model, trainer.state_dict())
    return sorted(older["param_groups"][0]["param_names"]) == ["fc.bias", "fc.weight"]


def said(peer, state):
    """Return the warnings of a library that loads what fits of a state dict, or its refusal."""
    model = peer.network({"head": linear()})
    try:
        _, texts = peer.load(model, state, strict=False)
    except REFUSALS as error:
        texts = [str(error), *getattr(error, "__notes__", [])]
    return texts


def nothing_loaded(peer):
    """Loading what fits is not silent when nothing fits."""
    return said(peer, layer("student.backbone.head")) != []


def cause(peer):
    """A warning or error about a load in which nothing fits names the prefix that is too much."""
    texts = said(peer, layer("student.backbone.head"))
    return any(f"{quote}student.backbone.{quote}" in text for text in texts for quote in "'\"`")


def fitting(peer):
    """Layers that fit are loaded on demand, and the one that has another shape is named."""
    state = {**layer("body"), **layer("head", 3, 7)}
    model = peer.network({"body": linear(), "head": linear(3, 5)})
    try:
        model, texts = peer.load(model, state, fitting=True)
    except REFUSALS:
        return False
    body = [state["body.weight"], state["body.bias"]]
    return holds(model, "body", body) and any("head.weight" in text for text in texts)


FEATURES = {
    "a renamed layer is declared once, and old and new state dicts load": renamed,
    "layers that became one are declared": joined,
    "the declaration leads back to the old state dict, bitwise": way_back,
    "plain modules declare, in any model that contains them": plain_module,
    "a state dict newer than the class is refused": newer,
    "a square weight of unknown layout is refused": undecided,
    "the state of an optimizer migrates, too": optimizer,
    "a load that takes nothing is not silent": nothing_loaded,
    "and its message names a prefix that is too much": cause,
    "layers that fit load, and others are named": fitting,
}


def outcome(feature, library):
    """Run one cell of the table."""
    return answer(FEATURES[feature], PEERS[library]())
