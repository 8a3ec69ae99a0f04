import copy

import kornia
import torch
from kornia.augmentation import ColorJitter, ImageSequential, RandomAffine, RandomHorizontalFlip


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
