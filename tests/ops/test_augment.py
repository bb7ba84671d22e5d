from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap

from understudy.errors import UnknownName
from understudy.ops.augment import FAMILIES, Augmentation, AugmentParams, apply

ALL = Augmentation("color_crop_cutout_flip_scale_rotate")
SIZE = (12, 10)


def pictures(n: int = 40, channels: int = 3, size: tuple[int, int] = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, channels, *size, generator=generator, dtype=torch.float64)


def row(params: AugmentParams, i: int) -> AugmentParams:
    return AugmentParams(*(part[i] for part in params))


@pytest.mark.parametrize("strategy", ["", "none", "None"])
def test_no_strategy_is_the_identity(strategy: str) -> None:
    augmentation, x = Augmentation(strategy), pictures()
    draws = augmentation.draw(0, len(x), SIZE)
    assert augmentation.apply(x, draws) is x
    assert apply(x, draws) is x


def test_neutral_draws_change_nothing_even_when_computed() -> None:
    x = pictures()
    neutral = Augmentation("").draw(0, len(x), SIZE)
    torch.testing.assert_close(vmap(apply)(x, neutral), x)


def test_draws_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (ALL.draw(seed, 20, SIZE) for seed in (3, 3, 4))
    from_generator = ALL.draw(torch.Generator().manual_seed(3), 20, SIZE)
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one, same, from_generator, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.equal(one.color, other.color) or not torch.equal(one.hole, other.hole)


def test_a_generator_moves_on() -> None:
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(
        ALL.draw(generator, 30, SIZE).family, ALL.draw(generator, 30, SIZE).family
    )


def test_families_are_equally_likely_and_never_combined() -> None:
    params = ALL.draw(0, 12_000, SIZE)
    counts = torch.bincount(params.family, minlength=len(FAMILIES))
    assert counts[0] == 0
    assert (counts[1:] - 2000).abs().max() < 5 * math.sqrt(2000)
    colored = (params.color != torch.tensor([0.0, 1.0, 1.0])).any(1)
    moved = (params.affine != torch.eye(2, 3)).flatten(1).any(1)
    holed = (params.hole != 0).any(1)
    assert ((colored.int() + moved.int() + holed.int()) <= 1).all()
    assert (colored == (params.family == FAMILIES.index("color"))).all()
    assert (holed == (params.family == FAMILIES.index("cutout"))).all()


def test_one_family_for_a_batch_with_parameters_of_their_own() -> None:
    seen = set()
    for seed in range(30):
        params = ALL.draw(seed, 8, SIZE, one_family=True)
        assert len(set(params.family.tolist())) == 1
        seen.add(int(params.family[0]))
        if FAMILIES[int(params.family[0])] == "color":
            assert len(set(params.color[:, 0].tolist())) == 8
    assert seen == set(range(1, 7))


def test_parameter_ranges() -> None:
    n, side = 5000, 32

    def draw(family: str) -> AugmentParams:
        return Augmentation(family).draw(1, n, (side, side))

    color = draw("color").color
    for column, (low, high) in enumerate([(-0.5, 0.5), (0.0, 2.0), (0.5, 1.5)]):
        assert low <= color[:, column].min() < low + 0.01
        assert high - 0.01 < color[:, column].max() <= high
    shifts = (draw("crop").affine[:, :, 2] * (side - 1) / 2).round()
    assert sorted(set(shifts.flatten().tolist())) == [float(s) for s in range(-4, 5)]
    scales = draw("scale").affine.diagonal(dim1=1, dim2=2)
    assert 1 / 1.2 - 1e-6 <= scales.min() < 0.84
    assert 1.19 < scales.max() <= 1.2 + 1e-6
    angle = torch.atan2(draw("rotate").affine[:, 1, 0], draw("rotate").affine[:, 0, 0]).rad2deg()
    assert 14.9 < angle.max() < 15.001
    assert -15.001 < angle.min() < -14.9
    flipped = draw("flip").affine[:, 0, 0] == -1
    assert abs(flipped.double().mean() - 0.5) < 0.03
    top, bottom, left, right = draw("cutout").hole.unbind(1)
    assert (bottom - top == 16).all()
    assert (right - left == 16).all()
    assert (top.min(), top.max()) == (-8, 24)  # centres 0 to 32


def test_flip_flips() -> None:
    x, flip = pictures(), Augmentation("flip")
    params = flip.draw(0, len(x), SIZE)
    mirrored = params.affine[:, 0, 0] == -1
    assert 0 < mirrored.sum() < len(x)
    expected = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    torch.testing.assert_close(apply(x, params), expected)


def test_crop_shifts_whole_pixels_and_brings_in_zeros() -> None:
    x = pictures(1, size=(16, 16)).expand(60, -1, -1, -1)
    params = Augmentation("crop").draw(0, 60, (16, 16))
    shifts = (params.affine[:, :, 2] * 15 / 2).round().int().tolist()
    assert {abs(s) for pair in shifts for s in pair} == {0, 1, 2}
    padded = torch.nn.functional.pad(x[0], (2, 2, 2, 2))
    for result, (dx, dy) in zip(apply(x, params), shifts, strict=True):
        expected = padded[:, 2 + dy : 18 + dy, 2 + dx : 18 + dx]
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_cutout_clears_its_hole_only() -> None:
    x = torch.ones(50, 2, *SIZE)
    params = Augmentation("cutout").draw(0, 50, SIZE)
    for result, hole in zip(apply(x, params), params.hole.int().tolist(), strict=True):
        expected = torch.ones(2, *SIZE)
        top, bottom, left, right = (max(0, edge) for edge in hole)
        expected[:, top:bottom, left:right] = 0
        assert expected.mean() < 1
        assert torch.equal(result, expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_color_is_brightness_then_saturation_then_contrast(channels: int) -> None:
    x = pictures(channels=channels)
    params = Augmentation("color").draw(0, len(x), SIZE)
    brightness, saturation, contrast = params.color.double()[:, :, None, None, None].unbind(1)
    y = x + brightness
    mean = y.mean(1, keepdim=True)
    y = (y - mean) * saturation + mean
    mean = y.mean((1, 2, 3), keepdim=True)
    y = (y - mean) * contrast + mean
    torch.testing.assert_close(apply(x, params), y)


@pytest.mark.parametrize("family", ["scale", "rotate"])
def test_resampling_follows_torchs_affine_grid(family: str) -> None:
    x = pictures(size=(12, 12))
    params = Augmentation(family).draw(0, len(x), (12, 12))
    grid = torch.nn.functional.affine_grid(params.affine.double(), x.shape, align_corners=True)
    expected = torch.nn.functional.grid_sample(x, grid, align_corners=True)
    torch.testing.assert_close(apply(x, params), expected)


def test_rotation_of_an_oblong_picture_keeps_right_angles() -> None:
    affine = Augmentation("rotate").draw(0, 1, (9, 17)).affine[0, :, :2].double()
    pixels = torch.diag(torch.tensor([8.0, 4.0], dtype=torch.float64))  # half sides: x, y
    in_pixels = pixels @ affine @ pixels.inverse()
    torch.testing.assert_close(
        in_pixels @ in_pixels.T, torch.eye(2, dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_one_image_form_equals_the_batch() -> None:
    x = pictures()
    params = ALL.draw(0, len(x), SIZE)
    assert len(set(params.family.tolist())) == 6
    batch = ALL.apply(x, params)
    torch.testing.assert_close(vmap(ALL.apply)(x, params), batch)
    torch.testing.assert_close(
        torch.stack([apply(x[i], row(params, i)) for i in range(len(x))]), batch
    )


@pytest.mark.parametrize("seed", range(12))
def test_siamese_draw_is_shared(seed: int) -> None:
    x = pictures(8)
    params = ALL.draw(seed, 1, SIZE)
    copies = AugmentParams(*(part.expand(8, *part.shape[1:]) for part in params))
    shared = apply(x, params)
    torch.testing.assert_close(shared, apply(x, copies))
    torch.testing.assert_close(shared, vmap(apply, in_dims=(0, None))(x, params))
    torch.testing.assert_close(shared, vmap(lambda image: apply(image, row(params, 0)))(x))


def test_no_picture_sees_another() -> None:
    x, params = pictures(), ALL.draw(0, 40, SIZE)
    changed = x.clone()
    changed[0] = 1e6
    assert torch.equal(apply(changed, params)[1:], apply(x, params)[1:])


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gradients_flow(family: str) -> None:
    x = pictures(3, size=(8, 8)).requires_grad_()
    params = Augmentation(family).draw(2, 3, (8, 8))
    assert torch.autograd.gradcheck(lambda images: apply(images, params), (x,), fast_mode=True)


def test_per_record_gradients_by_vmap() -> None:
    x, params = pictures(), ALL.draw(0, 40, SIZE)
    each = vmap(grad(lambda image, draw: apply(image, draw).square().sum()))(x, params)
    x.requires_grad_()
    apply(x, params).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(each, x.grad)


def test_refusals_help() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cutout'"):
        Augmentation("color_cutut")
    with pytest.raises(ValueError, match="twice"):
        Augmentation("flip_flip")
    with pytest.raises(ValueError, match="3 draws for 5 pictures"):
        apply(pictures(5), ALL.draw(0, 3, SIZE))


def test_batches_drawn_in_one_go_are_those_drawn_one_by_one() -> None:
    augmentation, counts = Augmentation("color_crop_cutout_flip_scale_rotate"), [3, 3, 2]
    together = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    alone = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    for one_family in (True, False):
        drawn = augmentation.draw_batches(together, counts, (8, 10), one_family=one_family)
        for which, generator in enumerate(alone):
            each = [
                augmentation.draw(generator, count, (8, 10), one_family=one_family)
                for count in counts
            ]
            for part, expected in zip(drawn, map(torch.cat, zip(*each))):
                assert torch.equal(part[which], expected)


def test_packed_draws_are_the_draws() -> None:
    draws = Augmentation("color_crop_cutout_flip_scale_rotate").draw(0, 30, (8, 8))
    back = AugmentParams.unpacked(draws.packed())
    for part, expected in zip(back, draws):
        assert torch.equal(part, expected.float())
    images = torch.randn(30, 1, 8, 8)
    assert torch.equal(apply(images, back), apply(images, draws))
