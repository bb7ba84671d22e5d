from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from understudy.nets import build, random_convnet
from understudy.ops.gradients import (
    FLOOR,
    batch_gradient,
    gradient_of_one,
    loss_along,
    matched,
    row_distance,
    slopes_of_distance,
    split,
)


def records(count: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.arange(count) % classes


def network(kind: str) -> nn.Module:
    net: nn.Module = (
        random_convnet(4, (1, 8, 8), 3, width=5)
        if kind == "convnet"
        else build(kind, (1, 8, 8), 3, seed=4)
    )
    return net.double()


@pytest.mark.parametrize("kind", ["convnet", "mlp"])
@pytest.mark.parametrize("everything", [False, True])
def test_rows_are_autograds_gradients_one_by_one(kind: str, everything: bool) -> None:
    net, (images, labels) = network(kind), records()
    own = dict(net.named_parameters())
    names = tuple(own) if everything else matched(own)
    rows = torch.func.vmap(gradient_of_one(net, own, names))(images, labels)
    for row, image, label in zip(rows, images, labels, strict=True):
        net.zero_grad()
        F.cross_entropy(net(image[None]), label[None]).backward()
        expected = torch.cat([own[name].grad.flatten() for name in names])
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-12)


def test_one_record_cannot_see_another() -> None:
    net, (images, labels) = network("convnet"), records()
    own = dict(net.named_parameters())
    row = torch.func.vmap(gradient_of_one(net, own, matched(own)))
    other = images.clone()
    other[1:] = 7.0
    torch.testing.assert_close(row(images, labels)[0], row(other, labels)[0], rtol=1e-9, atol=0.0)


def test_the_gradient_of_a_set_is_the_mean_of_its_rows() -> None:
    net, (images, labels) = network("convnet"), records()
    own = dict(net.named_parameters())
    names = matched(own)
    rows = torch.func.vmap(gradient_of_one(net, own, names))(images, labels)
    mean = split(rows.mean(0), own, names)
    whole = batch_gradient(net, own, images, labels, names)
    assert list(whole) == list(names)
    for name in names:
        torch.testing.assert_close(whole[name], mean[name], rtol=1e-8, atol=1e-11)
        assert not whole[name].requires_grad


def test_the_distance_can_be_descended_by_the_images() -> None:
    net, (images, labels) = network("convnet"), records()
    own = dict(net.named_parameters())
    names = matched(own)
    real = batch_gradient(net, own, images.flip(0), labels, names)
    images.requires_grad_()

    def distance(at: Tensor) -> Tensor:
        return row_distance(batch_gradient(net, own, at, labels, names, create_graph=True), real)

    (slope,) = torch.autograd.grad(distance(images), images)
    step = 1e-6 * torch.randn(images.shape, generator=torch.Generator().manual_seed(2)).double()
    moved = distance(images + step) - distance(images - step)
    torch.testing.assert_close(moved, 2 * (slope * step).sum(), rtol=1e-4, atol=1e-12)


def test_the_distance_is_the_supplements_sum_over_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = {"conv": (4, 2, 3, 3), "scale": (4,), "linear": (3, 7)}
    ours, theirs = (
        {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
        for _ in range(2)
    )
    expected = 0.0
    for name in ("conv", "linear"):
        for a, b in zip(ours[name].tolist(), theirs[name].tolist(), strict=True):
            x, y = torch.tensor(a).flatten().tolist(), torch.tensor(b).flatten().tolist()
            dot = sum(p * q for p, q in zip(x, y, strict=True))
            norms = sum(p * p for p in x) ** 0.5 * sum(q * q for q in y) ** 0.5
            expected += 1 - dot / (norms + FLOOR)
    assert float(row_distance(ours, theirs)) == pytest.approx(expected, rel=1e-6)
    assert float(row_distance(ours, {k: 5 * v for k, v in ours.items()})) < 1e-5


def test_rows_of_zeros_count_one_and_pull_nowhere() -> None:
    zeros = torch.zeros(2, 3, requires_grad=True)
    distance = row_distance({"w": zeros}, {"w": torch.zeros(2, 3)})
    assert distance.item() == 2.0
    (slope,) = torch.autograd.grad(distance, zeros)
    assert torch.equal(slope, torch.zeros(2, 3))


def test_slopes_of_a_distance_are_its_gradient() -> None:
    torch.manual_seed(5)
    shapes = {"conv": (4, 2, 3, 3), "scale": (4,), "linear": (3, 7), "extra": (2, 2)}
    ours = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items()}
    theirs = {k: torch.randn(s, dtype=torch.float64) for k, s in shapes.items() if k != "extra"}
    ours["conv"][0] *= 1e-7
    ours["conv"][1] = ours["linear"][2] = theirs["linear"][2] = theirs["linear"][1] = 0
    moving = {k: value.clone().requires_grad_() for k, value in ours.items()}
    names = ["conv", "linear"]
    expected = torch.autograd.grad(row_distance(moving, theirs), [moving[k] for k in names])
    slopes = slopes_of_distance(ours, theirs)
    assert list(slopes) == names
    for slope, theirs_by_autograd in zip(slopes.values(), expected):
        torch.testing.assert_close(slope, theirs_by_autograd)
    single = slopes_of_distance({k: v.float() for k, v in ours.items()}, theirs)
    assert all(torch.isfinite(slope).all() for slope in single.values())


def test_a_loss_changes_as_its_logits_do() -> None:
    torch.manual_seed(6)
    logits, tangents = torch.randn(2, 5, 3).double().unbind()
    labels = torch.arange(5) % 3
    _, expected = torch.func.jvp(lambda x: F.cross_entropy(x, labels), (logits,), (tangents,))
    torch.testing.assert_close(loss_along(logits, tangents, labels), expected)
