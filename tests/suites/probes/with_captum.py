import torch
from captum.attr import (
    DeepLiftShap,
    FeatureAblation,
    GradientShap,
    InternalInfluence,
    KernelShap,
    LayerActivation,
    LayerConductance,
    LayerDeepLift,
    LayerGradCam,
    LayerIntegratedGradients,
    LayerLRP,
    NeuronConductance,
    NeuronGradient,
    NoiseTunnel,
    Occlusion,
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


def deep_lift_shap(nn):
    return DeepLiftShap(_net(nn)).attribute(_images(), torch.rand(3, 3, 10, 10), target=0)


def layer_lrp(nn):
    net = _net(nn)
    return LayerLRP(net, net.body[0]).attribute(_images(), target=1)


def layer_conductance(nn):
    net = _net(nn)
    return LayerConductance(net, net.body).attribute(_images(), target=1, n_steps=5)


def layer_grad_cam(nn):
    net = _net(nn)
    return LayerGradCam(net, net.conv).attribute(_images(), target=2)


def layer_activations(nn):
    net = _net(nn)
    return LayerActivation(net, [net.conv, net.relu, net.head]).attribute(_images())


def layer_integrated_gradients(nn):
    net = _net(nn)
    return LayerIntegratedGradients(net, net.pool).attribute(_images(), target=1, n_steps=5)


def internal_influence(nn):
    net = _net(nn)
    return InternalInfluence(net, net.bn).attribute(_images(), target=1, n_steps=5)


def neurons(nn):
    net, x = _net(nn), _images()
    where = (0, 1, 1)
    return (
        NeuronGradient(net, net.body[0]).attribute(x, where),
        NeuronConductance(net, net.body[0]).attribute(x, where, target=1, n_steps=5),
    )


def perturbations(nn):
    net, x = _net(nn), _images()
    mask = torch.arange(4).repeat_interleave(75).reshape(1, 3, 10, 10)
    return (
        Occlusion(net).attribute(x, sliding_window_shapes=(3, 5, 5), strides=5, target=1),
        FeatureAblation(net).attribute(x, feature_mask=mask, target=1),
    )


def sampled(nn):
    net, x = _net(nn), _images()
    mask = torch.arange(4).repeat_interleave(75).reshape(1, 3, 10, 10)
    return (
        GradientShap(net).attribute(x, torch.zeros(2, 3, 10, 10), target=1, n_samples=3),
        KernelShap(net).attribute(x[:1], target=1, feature_mask=mask, n_samples=8),
        NoiseTunnel(Saliency(net)).attribute(x, nt_samples=2, target=0),
    )


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
