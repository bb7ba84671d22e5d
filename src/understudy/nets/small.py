"""Small networks for training under noise: few weights, bounded activations, no batch statistics.

The noise on a gradient grows with the number of weights, so what can be fixed in public is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.nets.classifiers import Shape, _flat_size, _image

__all__ = ["SMALL", "EdgeLinear", "Linear", "TanhCNN"]


class Linear(nn.Sequential):
    """Logistic regression on the numbers of a record. Takes pictures and tables alike."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))


class TanhCNN(nn.Sequential):
    """The end-to-end CNN of Papernot et al. 2021 and Tramer and Boneh 2021 for 28x28.

    Convolutions of 16 filters 8x8 and 32 filters 4x4, stride 2, each with tanh and a 2x2 maximum
    of stride 1, then a hidden layer of 32: 26,010 weights for ten classes. Tanh keeps gradients
    short, so that clipping changes their direction less (Papernot et al., "tempered sigmoids").

    Departure: pictures under 16 pixels start with 4x4 filters of stride 1, or nothing would be left.
    """

    def __init__(self, shape: Shape, classes: int) -> None:
        image = _image("tanh", shape)
        kernel, stride = (8, 2) if min(image[1:]) >= 16 else (4, 1)
        features = nn.Sequential(
            nn.Conv2d(image[0], 16, kernel, stride, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, 2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
        )
        super().__init__(
            features,
            nn.Linear(_flat_size(features, image), 32),
            nn.Tanh(),
            nn.Linear(32, classes),
        )


class EdgeLinear(nn.Module):
    """Logistic regression on histograms of edge directions: fixed filters, one trained layer.

    Tramer and Boneh 2021 show that under a small epsilon handcrafted features with a linear layer
    beat trained ones, which the noise spoils; they take a scattering transform, here it is its
    simplest relative, histograms of oriented gradients (Dalal and Triggs 2005). The slope of the
    slightly blurred picture is compared with eight directions, ``max(0, slope . direction)^2``, and
    averaged over cells of about a seventh of the side; then the whole vector gets mean zero and
    variance one. For 28x28 that is 8 x 7 x 7 = 392 numbers and, for ten classes, 3,930 weights.
    Colours are averaged first.
    """

    DIRECTIONS = 8
    BLUR = 1.0  # standard deviation in pixels: about the width of a pen's edge at 28x28
    FLAT = 0.01  # slopes a pixel below which a picture counts as blank, on values in [-1, 1]

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        image = _image("edges", shape)
        self.cell = max(2, min(image[1:]) // 7)
        cells = (image[1] // self.cell) * (image[2] // self.cell)
        self.filters: Tensor
        self.register_buffer("filters", _slopes(self.DIRECTIONS, self.BLUR), persistent=False)
        self.classifier = nn.Linear(self.DIRECTIONS * cells, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the features (n, directions x cells): no weights are involved."""
        filters = self.filters.to(x)
        margin = filters.shape[-1] // 2
        gray = F.pad(x.mean(dim=1, keepdim=True), (margin,) * 4, mode="replicate")
        strength = F.relu(F.conv2d(gray, filters)).square()
        features = F.avg_pool2d(strength, self.cell).flatten(1)
        return F.layer_norm(features, features.shape[1:], eps=self.FLAT**4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.embed(x))
        return logits


def _slopes(directions: int, blur: float) -> Tensor:
    """Return derivatives of a Gaussian in evenly spaced directions (directions, 1, side, side)."""
    # On the CPU even while a network's weights are laid out on the meta device.
    reach = math.ceil(3 * blur)
    place = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    bell = torch.exp(-(place**2) / (2 * blur**2))
    bell = bell / bell.sum()
    slope = place * bell / (place**2 * bell).sum()  # answers 1 to a ramp that rises 1 a pixel
    across, down = torch.outer(bell, slope), torch.outer(slope, bell)
    angles = [2 * math.pi * turn / directions for turn in range(directions)]
    turned = [math.cos(angle) * across + math.sin(angle) * down for angle in angles]
    return torch.stack(turned)[:, None].float()


SMALL: dict[str, Callable[[Shape, int], nn.Module]] = {
    "linear": Linear,
    "tanh": TanhCNN,
    "edges": EdgeLinear,
}
