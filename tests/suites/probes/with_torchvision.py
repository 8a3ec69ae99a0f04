import torch
import torchvision
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names
from torchvision.ops import (
    FeaturePyramidNetwork,
)

from tests.integration.image_networks import image_net


def _images():
    return torch.randn(2, 3, 32, 32)


def _user_block(nn):
    class Block(nn.Module):
        expansion = 1

        def __init__(
            self,
            inplanes,
            planes,
            stride=1,
            downsample=None,
            groups=1,
            width=64,
            dilation=1,
            norm=None,
        ):
            super().__init__()
            self.conv = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
            self.norm = norm(planes)
            self.downsample = downsample

        def forward(self, x):
            rest = x if self.downsample is None else self.downsample(x)
            return torch.relu(self.norm(self.conv(x)) + rest)

    return Block


def _resnet(nn):
    return torchvision.models.ResNet(_user_block(nn), [1, 1, 1, 1], num_classes=3)


def user_block(nn):
    net = _resnet(nn)
    out = net(_images())
    out.sum().backward()
    return net, out, [p.grad for p in net.parameters()]


def user_norm_layer(nn):
    class Norm(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(channels, 1, 1))

        def forward(self, x):
            return x * self.scale

    net = torchvision.models.resnet18(norm_layer=Norm, num_classes=3)
    return net(_images()), [n for n, _ in net.named_parameters()]


def node_names(nn):
    return get_graph_node_names(_resnet(nn)), get_graph_node_names(image_net(nn))


def feature_extractor(nn):
    net = create_feature_extractor(_resnet(nn).eval(), {"layer1": "a", "layer3.0.norm": "b"})
    return net(_images()), net.code, [n for n, _ in net.named_modules()]


def pyramid(nn):
    class Extra(torchvision.ops.feature_pyramid_network.ExtraFPNBlock):
        def __init__(self):
            super().__init__()
            self.last = nn.Conv2d(4, 4, 1)

        def forward(self, results, x, names):
            return [*results, self.last(results[-1])], [*names, "extra"]

    fpn = FeaturePyramidNetwork([3, 6], 4, extra_blocks=Extra())
    return fpn({"a": torch.randn(1, 3, 8, 8), "b": torch.randn(1, 6, 4, 4)}), fpn


def transforms(nn):
    class Invert(nn.Module):
        def forward(self, image):
            return 1 - image

    steps = nn.Sequential(
        torchvision.transforms.RandomCrop(16),
        Invert(),
        torchvision.transforms.Normalize([0.5], [2.0]),
    )
    return steps(_images()), repr(steps)


def scripted(nn):
    net = torch.jit.script(_resnet(nn).eval())
    return net(_images()), net.code
