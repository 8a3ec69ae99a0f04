import tempfile
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.integration.networks import NETWORKS, make_batch, make_net, train
from tests.suites.probes.user_files import imported


def _written(write):
    """Return the events that a function writes."""
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            write(writer)
        events = EventAccumulator(
            folder, size_guidance={"histograms": 0, "tensors": 0, "scalars": 0}
        )
        return events.Reload()


def _graph(net, *args, **options):
    """Return the nodes that `add_graph` writes, with their scopes, operators and shapes."""
    events = _written(
        lambda writer: writer.add_graph(net, args if len(args) > 1 else args[0], **options)
    )
    return [(node.name, node.op, [*node.input], str(node.attr)) for node in events.Graph().node]


def graphs(nn):
    # Not that of the transformer: torch traces a second graph in evaluation mode, and refuses it.
    names = [name for name in NETWORKS if name != "transformer"]
    return {name: _graph(make_net(nn, name).eval(), make_batch(name)) for name in names}


def graph_of_a_user_file(nn):
    with imported(nn) as users:
        return _graph(users.Net(users.Wide(4, 4)), torch.ones(1, 4))


def graph_with_hooks(nn):
    net, seen = make_net(nn, "nested"), []
    net.blocks[0].register_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__) or out * 2
    )
    return _graph(net, make_batch("nested")), seen


def histograms_of_weights_and_gradients(nn):
    net = make_net(nn, "nested")
    losses = train(net, make_batch("nested"))

    def write(writer):
        for step, loss in enumerate(losses):
            writer.add_scalar("loss", loss, step)
        for name, parameter in net.named_parameters():
            writer.add_histogram(name, parameter, 0)
            writer.add_histogram(f"{name}/grad", parameter.grad, 0)

    events = _written(write)
    values = {tag: events.Histograms(tag)[0].histogram_value for tag in events.Tags()["histograms"]}
    return {tag: str(value) for tag, value in values.items()}, [
        one.value for one in events.Scalars("loss")
    ]


def embedding(nn):
    net = make_net(nn, "lstm")
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_embedding(
                net.embed.weight, metadata=[str(n) for n in range(11)], tag="words"
            )
        return {
            str(file.relative_to(folder)): file.read_text() for file in Path(folder).rglob("*.tsv")
        }
