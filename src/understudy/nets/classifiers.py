"""The classifiers that judge a synthetic set, by name.

The evaluation networks of the condensation papers (MLP, LeNet, AlexNet, VGG11, ResNet18, with
instance norm where they normalise) and the small CNN of GS-WGAN, G-PATE and DataLens. None uses
batch statistics: a prediction depends on its own image only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.errors import BadConfiguration, UnknownName
from understudy.nets.convnet import ConvNet, instance_norm
from understudy.nets.draw import materialise

__all__ = ["MLP", "NETWORKS", "VGG11", "AlexNet", "DataLensCNN", "LeNet", "ResNet18", "build"]

Shape = tuple[int, ...]


def _image(name: str, shape: Shape) -> tuple[int, int, int]:
    """Return the shape as (channels, height, width), or say why it is not one we can take."""
    if len(shape) != 3:
        raise BadConfiguration(
            f"The network '{name}' takes images (channels, height, width), not shape "
            f"{tuple(shape)}. For a table use 'mlp'."
        )
    channels, height, width = shape
    if channels < 1 or min(height, width) < 8:
        raise BadConfiguration(
            f"The network '{name}' needs images of at least 8x8 pixels, not {height}x{width}; "
            "enlarge them, or use 'mlp'."
        )
    return channels, height, width


def _is_28(shape: tuple[int, int, int]) -> bool:
    """Tell whether pictures are 28x28: the papers' networks pad these to 32x32."""
    return shape[1:] == (28, 28)


def _flat_size(features: nn.Module, shape: Shape) -> int:
    """Return how many numbers `features` makes of one picture, without computing any."""
    probe = copy.deepcopy(features).to("meta")
    with torch.no_grad():
        return int(probe(torch.empty(1, *shape, device="meta")).numel())


class MLP(nn.Sequential):
    """Two hidden layers of 128. Takes pictures and tables alike."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(torch.Size(shape).numel(), 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


class LeNet(nn.Sequential):
    """LeNet-5 with ReLU and max pooling. Pictures under 28 pixels keep their borders by padding."""

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("lenet", shape)
        small = min(image[1:]) < 28
        features = nn.Sequential(
            nn.Conv2d(image[0], 6, 5, padding=2 if small or _is_28(image) else 0),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=2 if small else 0),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        super().__init__(
            features,
            nn.Linear(_flat_size(features, image), 120),
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),
            nn.ReLU(inplace=True),
            nn.Linear(84, classes),
        )


class AlexNet(nn.Sequential):
    """The condensation papers' AlexNet for small pictures: one linear layer, no norm."""

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("alexnet", shape)
        features = nn.Sequential(
            nn.Conv2d(image[0], 128, 5, padding=4 if _is_28(image) else 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(128, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 192, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(192, 192, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        super().__init__(features, nn.Linear(_flat_size(features, image), classes))


class VGG11(nn.Sequential):
    """VGG11 with instance norm and one linear layer on 512 features.

    A stage pools only while 2x2 pixels remain, the least an instance norm can work on; the last
    pooling takes the maximum of what is left (at 32x32 exactly the usual 2x2).
    """

    STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("vgg11", shape)
        before, side = image[0], min(image[1:])
        padding = 3 if _is_28(image) else 1
        side += 2 * (padding - 1)
        layers: list[nn.Module] = []
        for stage in self.STAGES:
            if layers and side >= 4:
                layers.append(nn.MaxPool2d(2))
                side //= 2
            for channels in stage:
                layers += [
                    nn.Conv2d(before, channels, 3, padding=padding),
                    instance_norm(channels),
                    nn.ReLU(inplace=True),
                ]
                before, padding = channels, 1
        super().__init__(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class _Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.first_norm = instance_norm(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = instance_norm(channels)
        self.shortcut = nn.Sequential()
        if before != channels or stride != 1:
            self.shortcut.append(nn.Conv2d(before, channels, 1, stride, bias=False))
            self.shortcut.append(instance_norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Sequential):
    """ResNet18 for small pictures (3x3 stem, no stem pooling), with instance norm.

    A stage halves the map only while 2x2 pixels remain; the map is averaged at the end.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("resnet18", shape)
        side, padding = min(image[1:]), 3 if _is_28(image) else 1
        side += 2 * (padding - 1)
        layers: list[nn.Module] = [
            nn.Conv2d(image[0], 64, 3, padding=padding, bias=False),
            instance_norm(64),
            nn.ReLU(inplace=True),
        ]
        before = 64
        for channels in (64, 128, 256, 512):
            stride = 2 if channels > 64 and side >= 4 else 1
            layers += [_Residual(before, channels, stride), _Residual(channels, channels, 1)]
            before, side = channels, side // stride
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Dropout(nn.Module):
    """Drop entries with a mask from a generator of its own, so that no global one is touched."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.seed = 0
        self._generator: torch.Generator | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """Return what masks on this device are drawn from."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        chance = torch.empty_like(x).uniform_(generator=self.generator(x.device))
        return x * (chance >= self.rate) / (1 - self.rate)


class DataLensCNN(nn.Sequential):
    """The classifier of GS-WGAN, G-PATE and DataLens.

    Departure: PyTorch's default initial weights, not Keras' (Glorot, zero bias).
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("datalens", shape)
        features = nn.Sequential(
            nn.Conv2d(image[0], 32, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            Dropout(0.2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(inplace=True),
            Dropout(0.25),
            nn.Flatten(),
        )
        size = _flat_size(features.eval(), image)
        super().__init__(
            features.train(), nn.Linear(size, 64), nn.ReLU(inplace=True), nn.Linear(64, classes)
        )


NETWORKS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "convnet": lambda shape, classes: ConvNet(_image("convnet", shape), classes),
    "mlp": MLP,
    "lenet": LeNet,
    "alexnet": AlexNet,
    "vgg11": VGG11,
    "resnet18": ResNet18,
    "datalens": DataLensCNN,
}


def build(
    name: str, shape: Shape, classes: int, seed: int, device: torch.device | str | None = None
) -> nn.Module:
    """Return the network `name` for records of `shape`, with the weights of `seed`.

    The same seed gives the same network on every device; global generators are not touched.
    """
    if name not in NETWORKS:
        raise UnknownName("network", name, NETWORKS)
    if classes < 2:
        raise BadConfiguration(f"A classifier needs two classes or more, not {classes}.")
    with torch.device("meta"):
        net = NETWORKS[name](tuple(shape), classes)
    for place, part in enumerate(net.modules()):
        if isinstance(part, Dropout):
            part.seed = (seed * 1000 + place) % 2**63
    return materialise(net, seed, device)
