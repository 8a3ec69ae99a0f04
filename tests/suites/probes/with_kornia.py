import copy

import kornia
import torch
from kornia.augmentation import ColorJitter, ImageSequential, RandomAffine, RandomHorizontalFlip

from tests.integration.image_networks import image_net


def _image():
    return torch.rand(2, 3, 8, 8)


def _augmented(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.augment = kornia.augmentation.AugmentationSequential(
                RandomHorizontalFlip(p=0.5), RandomAffine(20.0, p=1.0), data_keys=["input", "mask"]
            )
            self.head = nn.Conv2d(3, 1, 1)

        def forward(self, x):
            image, mask = self.augment(x, x[:, :1])
            return self.head(image), mask

    return Net()


def augmentation_as_a_child(nn):
    return _augmented(nn)(_image())


def augmentation_is_copied(nn):
    net = _augmented(nn)
    return copy.deepcopy(net), net.state_dict()


def text(nn):
    return repr(_augmented(nn)), [n for n, _ in _augmented(nn).named_modules()]


def user_module_in_a_sequence(nn):
    class Brighter(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.tensor(0.1))

        def forward(self, x):
            return x + self.by

    steps = ImageSequential(ColorJitter(0.1, 0.1, p=1.0), Brighter(), RandomHorizontalFlip(p=1.0))
    out = steps(_image())
    out.sum().backward()
    return out, steps, [p.grad for p in steps.parameters()]


def user_module_in_patches(nn):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    steps = kornia.augmentation.PatchSequential(
        Half(), RandomHorizontalFlip(p=1.0), grid_size=(2, 2), patchwise_apply=False
    )
    return steps(_image())


def filters(nn):
    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.blur = kornia.filters.GaussianBlur2d((3, 3), (1.0, 1.0))
            self.sobel = kornia.filters.Sobel()

        def forward(self, x):
            return self.sobel(self.blur(x))

    return Edges()(_image()), Edges()


def losses(nn):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(
                [
                    kornia.losses.SSIMLoss(3),
                    kornia.losses.TotalVariation(),
                    kornia.losses.PSNRLoss(1.0),
                ]
            )

        def forward(self, x, y):
            first, second, third = self.parts
            return first(x, y) + second(x).mean() + third(x, y)

    x = _image().requires_grad_()
    loss = Loss()(x, _image())
    loss.backward()
    return loss, x.grad


def focal(nn):
    net, loss = image_net(nn), kornia.losses.FocalLoss(0.5, reduction="mean")
    value = loss(net(torch.rand(4, 3, 10, 10)), torch.randint(0, 3, (4,)))
    value.backward()
    return value, [p.grad for p in net.parameters()]


def classification_head(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convert = kornia.color.RgbToGrayscale()
            self.normalize = kornia.enhance.Normalize(torch.tensor([0.5]), torch.tensor([0.2]))
            self.body = nn.Linear(64, 3)

        def forward(self, x):
            return self.body(self.normalize(self.convert(x)).flatten(1))

    net = Net()
    return net(_image()), net, net.double()(_image().double())


def descriptor_network(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = kornia.feature.HardNet(pretrained=False)
            self.head = nn.Linear(128, 2)

        def forward(self, x):
            return self.head(self.patches(x))

    net = Net()
    return net(torch.rand(2, 1, 32, 32)), net.state_dict(), [n for n, _ in net.named_modules()]


def own_augmentation(nn):
    class Shift(kornia.augmentation.IntensityAugmentationBase2D):
        def __init__(self):
            super().__init__(p=1.0)
            self.by = nn.Parameter(torch.tensor(0.2))

        def apply_transform(self, image, params, flags, transform=None):
            return image + self.by

    steps = nn.Sequential(Shift(), nn.Identity())
    return steps(_image()), repr(steps), steps.state_dict()


def descriptor(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.sift = kornia.feature.SIFTDescriptor(16)
            self.scale = nn.Linear(128, 4)

        def forward(self, x):
            return self.scale(self.sift(x))

    return Net()(torch.rand(2, 1, 16, 16)), Net()
