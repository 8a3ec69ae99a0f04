import torch
from captum.attr import (
    LayerDeepLift,
    LayerIntegratedGradients,
    LayerLRP,
    Saliency,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)

from tests.integration.image_networks import image_net
from tests.integration.networks import lstm_net


def _net(nn):
    return image_net(nn).eval()


def _images():
    return torch.rand(2, 3, 10, 10)


def layer_deep_lift(nn):
    net = _net(nn)
    return LayerDeepLift(net, net.conv).attribute(
        _images(), target=1, return_convergence_delta=True
    )


def layer_lrp(nn):
    net = _net(nn)
    return LayerLRP(net, net.body[0]).attribute(_images(), target=1)


def layer_integrated_gradients(nn):
    net = _net(nn)
    return LayerIntegratedGradients(net, net.pool).attribute(_images(), target=1, n_steps=5)


def interpretable_embedding(nn):
    net, tokens = lstm_net(nn).eval(), torch.randint(0, 11, (2, 4))
    layer = configure_interpretable_embedding_layer(net, "embed")
    embedded = layer.indices_to_embeddings(tokens)
    attributed = Saliency(net).attribute(embedded, target=1)
    remove_interpretable_embedding_layer(net, layer)
    return attributed, net(tokens), net


def nothing_is_left(nn):
    net = _net(nn)
    LayerDeepLift(net, net.conv).attribute(_images(), target=1)
    return [(len(m._forward_hooks), len(m._backward_hooks)) for m in net.modules()]
