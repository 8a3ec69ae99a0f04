import contextlib
import io
import logging
import warnings
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import torch

from tests.integration.networks import NETWORKS, make_batch, make_net
from tests.suites.probes.user_files import imported


def _exported(net, args, **options):
    """Export a network with dynamo, and return the program and the bytes of the model."""
    for logger in ("onnxscript", "torch.onnx"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    hidden = io.StringIO()
    with (
        contextlib.redirect_stdout(hidden),
        contextlib.redirect_stderr(hidden),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(net, args, dynamo=True, verbose=False, **options)
    return program, program.model_proto.SerializeToString()


def _run(model, *args):
    """Return what onnxruntime computes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feed = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
    return [
        torch.from_numpy(out) if isinstance(out, np.ndarray) else out
        for out in session.run(None, feed)
    ]


def _graph(program):
    """Return the names of a model: operators, inputs, weights, scopes and classes of modules."""
    model = program.model_proto
    nodes = [(node.op_type, [*node.input], [*node.output]) for node in model.graph.node]
    scopes = [
        {
            p.key: p.value
            for p in node.metadata_props
            if p.key.startswith("pkg.torch.onnx.") and "trace" not in p.key
        }
        for node in model.graph.node
    ]
    return (
        nodes,
        [one.name for one in model.graph.initializer],
        [str(one) for one in model.graph.input],
        scopes,
    )


def _compared(nn, name):
    net, batch = make_net(nn, name), make_batch(name)
    with torch.no_grad():
        expected = net.eval()(batch)
    net = make_net(nn, name)
    program, model = _exported(net.eval(), (batch,))
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    outputs = _run(model, batch)
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-5)
    return outputs, _graph(program)


def lstm(nn):
    return _compared(nn, "lstm")


def transformer(nn):
    return _compared(nn, "transformer")


def dynamic_batch(nn):
    net = make_net(nn, "nested").eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program, model = _exported(net, (make_batch("nested"),), dynamic_shapes=({0: batch},))
    return [_run(model, torch.ones(size, 6)) for size in (1, 3, 7)], _graph(program)


def tied_and_shared(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.block = nn.Linear(3, 3)
            self.again = self.block

        def forward(self, x):
            return self.head(self.again(self.block(self.embed(x))))

    program, model = _exported(Net().eval(), (torch.tensor([[1, 2]]),))
    return _run(model, torch.tensor([[1, 2]])), _graph(program)


def user_file(nn):
    with imported(nn) as users:
        program, model = _exported(users.Net(users.Wide(4, 4)).eval(), (torch.ones(2, 4),))
        return _run(model, torch.ones(2, 4)), _graph(program)


def exported_program(nn):
    exported = torch.export.export(make_net(nn, "nested").eval(), (make_batch("nested"),))
    program, model = _exported(exported.module(), (make_batch("nested"),))
    return _run(model, make_batch("nested")), _graph(program)


def scripted_exporter(nn):
    found = []
    for name in NETWORKS:
        file, batch = io.BytesIO(), make_batch(name)
        net = make_net(nn, name).eval()
        torch.onnx.export(net, (batch,), file, dynamo=False, input_names=["x"])
        model = onnx.load_from_string(file.getvalue())
        nodes = Counter(node.name for node in model.graph.node)
        found.append(
            (nodes, [one.name for one in model.graph.initializer], _run(file.getvalue(), batch))
        )
    return found
