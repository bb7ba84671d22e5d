from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

from understudy.errors import BadConfiguration
from understudy.nets.diffusion import LEVELS, Denoiser

pytest.importorskip("diffusers")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def net() -> Denoiser:
    return Denoiser((1, 8, 8), 3, width=4)


def pictures(count: int, shape: tuple[int, ...] = (1, 8, 8)) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_weights_come_from_the_seed_alone(net: Denoiser) -> None:
    before = torch.get_rng_state()
    drawn, again, other = net.draw(1, CPU), net.draw(1, CPU), net.draw(2, CPU)
    assert torch.equal(before, torch.get_rng_state())
    assert list(drawn) == [name for name, _ in net.net.named_parameters()]
    for name, value in drawn.items():
        assert value.shape == net.net.get_parameter(name).shape
        assert torch.equal(value, again[name])
        if name.endswith("weight") and "norm" not in name:
            assert not torch.equal(value, other[name])
    first = drawn["conv_in.weight"]
    assert first.abs().max() <= 1 / math.sqrt(9)
    assert drawn["class_embedding.weight"].std() == pytest.approx(1.0, abs=0.2)


def test_the_loss_is_the_velocity_error_of_noisy_copies(net: Denoiser) -> None:
    """Restate it: a = the cosine schedule's signal share, x_a = sqrt(a) x + sqrt(1 - a) e,
    v = sqrt(a) e - sqrt(1 - a) x, mean of (net - v)^2 over K copies."""
    parameters, draws = net.draw(1, CPU), net.pool(5, 32, CPU)
    record, label = pictures(1)[0], torch.tensor(2)

    def share(t: int) -> float:
        return math.cos((t / LEVELS + 0.008) / 1.008 * math.pi / 2) ** 2

    signal = 1.0
    shares = []
    for t in range(LEVELS):
        signal *= 1 - min(1 - share(t + 1) / share(t), 0.999)
        shares.append(signal)
    noise, levels = draws.of_one(record, 4)
    expected = 0.0
    for e, level in zip(noise, levels.tolist(), strict=True):
        a = shares[level]
        noisy = math.sqrt(a) * record + math.sqrt(1 - a) * e
        velocity = math.sqrt(a) * e - math.sqrt(1 - a) * record
        guess = functional_call(
            net.net, parameters, (noisy[None], torch.tensor([level]), label[None])
        ).sample[0]
        expected += float((guess - velocity).square().mean()) / 4
    found = net.loss(parameters, record, label, draws, 4)
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_one_record_at_a_time_gives_the_gradients_of_the_batch(net: Denoiser) -> None:
    parameters, draws = net.draw(1, CPU), net.pool(5, 32, CPU)
    images, labels = pictures(5), torch.arange(5) % 3

    def loss(moving: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return net.loss(moving, image, label, draws, 3)

    rows = vmap(grad(loss), in_dims=(None, 0, 0), randomness="error")(parameters, images, labels)
    for j in range(5):
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        alone = torch.autograd.grad(loss(leaves, images[j], labels[j]), list(leaves.values()))
        for name, slope in zip(parameters, alone, strict=True):
            torch.testing.assert_close(rows[name][j], slope, atol=1e-5, rtol=1e-3)


def test_a_record_looks_at_noise_of_its_own_at_even_levels(net: Denoiser) -> None:
    draws = net.pool(5, 64, CPU)
    assert (draws.levels.diff() >= 0).all()
    assert draws.levels.max() < LEVELS
    images = pictures(200)
    places = [tuple(draws.of_one(image, 4)[1].tolist()) for image in images]
    assert places == [tuple(draws.of_one(image, 4)[1].tolist()) for image in images]
    assert len(set(places)) > 12  # of the 64 // 4 that tell records apart
    for levels in places:
        ordered = sorted(levels)
        gaps = [b - a for a, b in zip(ordered, [*ordered[1:], ordered[0] + LEVELS], strict=True)]
        assert max(gaps) < LEVELS / 4 + 2 * LEVELS / 64
    other = net.pool(6, 64, CPU)
    assert places != [tuple(other.of_one(image, 4)[1].tolist()) for image in images]


@pytest.mark.parametrize("pixel", [1e30, -3e38, math.inf, math.nan])
def test_a_hostile_record_stays_inside_the_pool(net: Denoiser, pixel: float) -> None:
    record = torch.full((1, 8, 8), pixel)
    noise, levels = vmap(lambda x: net.pool(5, 16, CPU).of_one(x, 3), randomness="same")(
        record[None]
    )
    assert noise.shape == (1, 3, 1, 8, 8)
    assert (levels >= 0).all() and (levels < LEVELS).all()


def test_sampling_is_ddim(net: Denoiser) -> None:
    """Restate Equation 12 with eta 0: from x_t and the guessed velocity, x_0 and e, then mix."""
    parameters, labels = net.draw(1, CPU), torch.arange(4) % 3
    made = net.sample(parameters, labels, 9, 5)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    shares = net._schedule.alphas_cumprod
    for level in (999, 799, 599, 399, 199):
        a = float(shares[level])
        b = float(shares[level - 200]) if level >= 200 else 1.0
        guess = functional_call(
            net.net, parameters, (x, torch.full((4,), level), labels)
        ).sample.detach()
        clean = (math.sqrt(a) * x - math.sqrt(1 - a) * guess).clamp(-1, 1)
        noise = math.sqrt(a) * guess + math.sqrt(1 - a) * x
        x = math.sqrt(b) * clean + math.sqrt(1 - b) * noise
    torch.testing.assert_close(made, x.clamp(-1, 1), atol=1e-4, rtol=1e-3)
    assert not torch.equal(made, net.sample(parameters, labels, 10, 5))


@pytest.mark.parametrize("shape", [(1, 9, 11), (3, 14, 14), (1, 17, 30)])
def test_any_sides_will_do(shape: tuple[int, int, int]) -> None:
    net = Denoiser(shape, 2, width=4)
    made = net.sample(net.draw(0, CPU), torch.tensor([0, 1]), 3, 2)
    assert made.shape == (2, *shape)
    assert made.abs().max() <= 1
    loss = net.loss(
        net.draw(0, CPU), pictures(1, shape)[0], torch.tensor(1), net.pool(1, 8, CPU), 2
    )
    assert torch.isfinite(loss)


def test_plain_training_learns_a_picture(net: Denoiser) -> None:
    """Two kinds of picture, left and right; after some steps the samples are of the kind asked."""
    images = torch.full((2, 1, 8, 8), -1.0)
    images[0, :, :, :4], images[1, :, :, 4:] = 1.0, 1.0
    small = Denoiser((1, 8, 8), 2, width=8)
    weights = {name: v.requires_grad_() for name, v in small.draw(0, CPU).items()}
    adam = torch.optim.Adam(weights.values(), lr=1e-2)
    for t in range(60):
        draws = small.pool(t, 16, CPU)
        loss = torch.stack(
            [small.loss(weights, images[c], torch.tensor(c), draws, 8) for c in range(2)]
        ).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    final = {name: value.detach() for name, value in weights.items()}
    made = small.sample(final, torch.arange(8) % 2, 4, 10)
    sides = made[..., :4].mean((1, 2, 3)) - made[..., 4:].mean((1, 2, 3))
    assert (sides[::2] > 0.5).all()
    assert (sides[1::2] < -0.5).all()


def test_without_diffusers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BadConfiguration, match=r"understudy\[diffusion\]"):
        Denoiser((1, 8, 8), 2)


def test_tables_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="pictures"):
        Denoiser((14,), 2)
