from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from understudy.ops.expand import PARTS, expand


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (6, 10)])
def test_quadrants_are_enlarged_as_interpolate_does(size: tuple[int, int]) -> None:
    height, width = size
    images = torch.randn(3, 2, height, width, dtype=torch.float64)
    out = expand(images)
    assert out.shape == (12, 2, height, width)
    up = torch.nn.Upsample(size=size, mode="bilinear")
    for i in range(3):
        top, bottom = images[i : i + 1, :, : height // 2], images[i : i + 1, :, height // 2 :]
        expected = [half[..., : width // 2] for half in (top, bottom)]
        expected += [half[..., width // 2 :] for half in (top, bottom)]
        for part, quadrant in enumerate(expected):
            torch.testing.assert_close(out[PARTS * i + part : PARTS * i + part + 1], up(quadrant))


def test_odd_sides_share_their_middle_line() -> None:
    image = torch.arange(25.0).view(1, 1, 5, 5)
    out = expand(image)
    corners = [out[k, 0, y, x] for k, (y, x) in enumerate([(0, 0), (-1, 0), (0, -1), (-1, -1)])]
    assert [float(c) for c in corners] == [0.0, 20.0, 4.0, 24.0]
    expected = F.interpolate(image[..., :3, :3], size=(5, 5), mode="bilinear")
    torch.testing.assert_close(out[:1], expected)


def test_it_is_differentiable() -> None:
    images = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(expand, images)
