from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.gan import Discriminator, Generator, Weights, by_convolution, by_patches

GREY = (1, 28, 28)


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def one(weights: Weights, which: int) -> Weights:
    return {name: value[which] for name, value in weights.items()}


def doubled(weights: Weights) -> Weights:
    return {name: value.double() for name, value in weights.items()}


def shaken(weights: Weights) -> Weights:
    """Move every weight, so that zeros and ones test something."""
    stream = torch.Generator().manual_seed(1)
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=stream, dtype=value.dtype)
        for name, value in weights.items()
    }


def normed(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.batch_norm(
        x, None, None, w[f"{name}.scale"], w[f"{name}.shift"], training=True, eps=1e-5
    )


def joined(x: Tensor, told: Tensor) -> Tensor:
    planes = told[:, :, None, None].expand(-1, -1, *x.shape[2:])
    return torch.cat([x, planes], 1)


def plain_discriminator(w: Weights, images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Write the published layers down one by one (methods, section 6)."""
    told = F.one_hot(labels, classes).to(images.dtype)
    x = F.pad(joined(images, told), (1, 2, 1, 2))
    x = F.leaky_relu(F.conv2d(x, w["first.weight"], w["first.bias"], stride=2), 0.2)
    x = F.pad(joined(x, told), (1, 2, 1, 2))
    x = F.conv2d(x, w["second.weight"], w["second.bias"], stride=2)
    x = F.leaky_relu(normed(x, w, "second"), 0.2).flatten(1)
    x = F.linear(torch.cat([x, told], 1), w["third.weight"], w["third.bias"])
    x = F.leaky_relu(normed(x, w, "third"), 0.2)
    return F.linear(torch.cat([x, told], 1), w["last.weight"], w["last.bias"]).squeeze(1)


def plain_generator(w: Weights, z: Tensor, labels: Tensor, classes: int, side: int) -> Tensor:
    told = F.one_hot(labels, classes).to(z.dtype)
    x = F.linear(torch.cat([z, told], 1), w["first.weight"], w["first.bias"])
    x = torch.cat([F.relu(normed(x, w, "first")), told], 1)
    x = F.relu(normed(F.linear(x, w["second.weight"], w["second.bias"]), w, "second"))
    x = joined(x.reshape(len(z), -1, side // 4, side // 4), told)
    x = F.conv_transpose2d(x, w["third.weight"], w["third.bias"], 2, 2, 1)
    x = joined(F.relu(normed(x, w, "third")), told)
    return torch.sigmoid(F.conv_transpose2d(x, w["last.weight"], w["last.bias"], 2, 2, 1))


def batch(shape: tuple[int, int, int], classes: int, size: int = 7) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(2)
    images = torch.rand(size, *shape, generator=stream, dtype=torch.float64)
    return images, torch.randint(classes, (size,), generator=stream)


def test_the_papers_discriminator_has_555655_weights() -> None:
    assert count(Discriminator(GREY, 10).shapes) == 555_655


def test_the_papers_generator_has_the_papers_layers() -> None:
    shapes = Generator(GREY, 10).shapes
    assert shapes["first.weight"] == (1024, 60)
    assert shapes["second.weight"] == (6272, 1034)
    assert shapes["third.weight"] == (138, 128, 5, 5)
    assert shapes["last.weight"] == (138, 1, 5, 5)


@pytest.mark.parametrize(
    ("shape", "classes", "widths"),
    [
        (GREY, 10, None),
        ((3, 32, 32), 10, (5, 6, 7)),
        ((3, 64, 64), 2, (5, 6, 7)),
        ((1, 8, 8), 10, (5, 6, 7)),
    ],
)
def test_the_discriminator_is_its_plain_layers(
    shape: tuple[int, int, int], classes: int, widths: tuple[int, int, int] | None
) -> None:
    """The shortcut through the label planes and the patches change nothing."""
    teacher = Discriminator(shape, classes, widths=widths)
    w = shaken(doubled(one(teacher.draw([3]), 0)))
    images, labels = batch(shape, classes)
    expected = plain_discriminator(w, images, labels, classes)
    torch.testing.assert_close(teacher(w, images, labels), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "classes", "width"), [(GREY, 10, 64), ((3, 64, 64), 3, 4), ((1, 8, 8), 2, 4)]
)
def test_the_generator_is_its_plain_layers(
    shape: tuple[int, int, int], classes: int, width: int
) -> None:
    student = Generator(shape, classes, latent=6, hidden=9, width=width)
    w = shaken(doubled(student.draw(3)))
    labels = batch(shape, classes)[1]
    z = torch.rand(len(labels), 6, dtype=torch.float64) * 2 - 1
    made = student(w, z, labels)
    assert made.shape == (len(labels), *shape)
    assert made.min() >= 0 and made.max() <= 1
    expected = plain_generator(w, z, labels, classes, shape[1])
    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [GREY, (3, 8, 8)])
def test_a_stack_is_a_loop_over_its_members(shape: tuple[int, int, int]) -> None:
    """In float64: in float32 the sign flips of a leaky ReLU show."""
    teacher = Discriminator(shape, 10, widths=(4, 6, 8))
    stack = shaken(doubled(teacher.draw(range(3))))
    images, labels = batch(shape, 10)

    def loss(weights: Weights, images: Tensor) -> Tensor:
        return F.softplus(teacher(weights, images, labels)).mean()

    slopes, pulls = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None))(stack, images)
    for which in range(3):
        alone = {n: v.clone().requires_grad_() for n, v in one(stack, which).items()}
        moved = images.clone().requires_grad_()
        error = F.softplus(plain_discriminator(alone, moved, labels, 10)).mean()
        *expected, pull = torch.autograd.grad(error, [*alone.values(), moved])
        for name, slope in zip(alone, expected, strict=True):
            torch.testing.assert_close(slopes[name][which], slope, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(pulls[which], pull, rtol=1e-8, atol=1e-10)


def test_both_ways_to_convolve_are_one() -> None:
    stream = torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, 2, 12, 12, generator=stream, dtype=torch.float64)
    weight = torch.randn(3, 4, 2, 5, 5, generator=stream, dtype=torch.float64)

    def slopes(way: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return way(x, weight).pow(3).sum()

        found: tuple[Tensor, Tensor] = vmap(grad(loss, argnums=(0, 1)))(x, weight)
        return found

    for ours, theirs in zip(slopes(by_patches), slopes(by_convolution), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_batches_laid_end_to_end_do_not_mix() -> None:
    teacher = Discriminator(GREY, 10, widths=(4, 6, 8))
    w = shaken(doubled(one(teacher.draw([0]), 0)))
    images, labels = batch(GREY, 10, 12)
    together = teacher(w, images, labels, batches=2)
    apart = [teacher(w, images[half], labels[half]) for half in (slice(6), slice(6, 12))]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(together, teacher(w, images, labels))


def test_weights_are_a_function_of_the_seed_and_of_deviation_002() -> None:
    teacher = Discriminator(GREY, 10)
    stack = teacher.draw([5, 6])
    again = teacher.draw([6])
    assert all(torch.equal(stack[name][1], again[name][0]) for name in stack)
    drawn = stack["third.weight"]
    assert abs(float(drawn.std()) - 0.02) < 1e-4
    assert abs(float(drawn.mean())) < 1e-4
    assert not torch.equal(drawn[0], drawn[1])
    assert stack["second.scale"].eq(1).all() and stack["second.shift"].eq(0).all()
    assert {name: value.shape[1:] for name, value in stack.items()} == teacher.shapes


def test_fixed_statistics_make_a_picture_its_own_affair() -> None:
    student = Generator(GREY, 10, latent=6, hidden=9, width=4)
    w = shaken(doubled(student.draw(3)))
    labels = torch.arange(40) % 10
    z = torch.rand(40, 6, dtype=torch.float64)
    statistics = student.statistics(w, z, labels)
    fixed = student(w, z, labels, statistics=statistics)
    # On the very batch they were taken from they are the batch's own.
    torch.testing.assert_close(fixed, student(w, z, labels), rtol=1e-10, atol=1e-10)
    alone = student(w, z[:1], labels[:1], statistics=statistics)
    torch.testing.assert_close(alone, fixed[:1], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(student(w, z[:4], labels[:4]), fixed[:4])


@pytest.mark.parametrize("shape", [(1, 28, 32), (1, 30, 30), (1, 4, 4), (14,)])
def test_other_pictures_are_refused(shape: tuple[int, ...]) -> None:
    for network in (Discriminator, Generator):
        with pytest.raises(BadConfiguration, match="square"):
            network(shape, 10)  # type: ignore[arg-type]


def test_widths_are_positive() -> None:
    with pytest.raises(BadConfiguration, match="widths"):
        Discriminator(GREY, 10, widths=(0, 1, 1))
    with pytest.raises(BadConfiguration, match="latent"):
        Generator(GREY, 10, latent=0)
