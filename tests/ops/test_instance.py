from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from understudy.ops.instance import FLOOR, largest_norm, simplified_instance_norm


def hostile(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Maps of every kind that might grow long."""
    stream = torch.Generator().manual_seed(1)
    normal = torch.randn(shape, generator=stream)
    spike = torch.zeros(shape)
    spike[..., 0, 0] = 1.0
    one_flat = normal.clone()
    one_flat[..., 0, :, :] = 7.0
    signs = torch.where(normal > 0, 1.0, -1.0)
    return {
        "normal": normal,
        "heavy tails": normal**15,
        "spike": spike,
        "huge spike": spike * 1e30,
        "signs": signs,
        "huge": normal * 1e18,
        "tiny": normal * 1e-20,
        "denormal": normal * 1e-42,
        "nearly constant": 1000 + normal * 1e-4,
        "constant": torch.full(shape, 3.7),
        "zero": torch.zeros(shape),
        "one constant map": one_flat,
    }


@pytest.mark.parametrize("shape", [(1, 2, 2), (16, 4, 4), (8, 7, 7), (3, 5, 9)])
@pytest.mark.parametrize("kind", hostile((1, 2, 2)))
def test_no_record_is_longer_than_sqrt_m_times_p(shape: tuple[int, int, int], kind: str) -> None:
    maps = hostile((50, *shape))[kind]
    norms = simplified_instance_norm(maps).flatten(1).double().norm(dim=1)
    assert torch.isfinite(norms).all()
    assert norms.max() <= largest_norm(*shape) * (1 + 1e-6)


def test_the_bound_is_sqrt_m_times_p_and_is_reached() -> None:
    assert largest_norm(16, 7, 7) == pytest.approx(math.sqrt(16) * 7)
    signs = torch.ones(16, 6, 6)
    signs[:, ::2] = -1.0
    reached = simplified_instance_norm(signs).norm()
    assert float(reached) == pytest.approx(largest_norm(16, 6, 6), rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e6])
def test_a_constant_map_becomes_zero(value: float) -> None:
    """Up to the rounding of its mean, which is not blown up to features of size one."""
    made = simplified_instance_norm(torch.full((2, 4, 4), value))
    assert made.abs().max() < 0.01


def test_each_map_is_standardised_by_itself() -> None:
    """Against the definition, written out with loops in float64."""
    maps = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(2)).double()
    made = simplified_instance_norm(maps)
    for record, ours in zip(maps, made, strict=True):
        for one, own in zip(record, ours, strict=True):
            values = one.flatten().tolist()
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / len(values)
            expected = torch.tensor([(v - mean) / math.sqrt(variance + FLOOR) for v in values])
            torch.testing.assert_close(own.flatten(), expected.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made[:1], simplified_instance_norm(maps[:1]))
    torch.testing.assert_close(made, vmap(simplified_instance_norm)(maps))


def test_no_record_moves_the_sum_by_more_than_the_bound() -> None:
    """All neighbours of a set with hostile records in it, by removing and by exchanging."""
    records = torch.cat([kind[:2] for kind in hostile((2, 6, 4, 4)).values()])
    features = simplified_instance_norm(records).double().flatten(1)
    bound, total = largest_norm(6, 4, 4), features.sum(dim=0)
    for left_out in range(len(records)):
        rest = torch.cat([features[:left_out], features[left_out + 1 :]]).sum(dim=0)
        assert (total - rest).norm() <= bound * (1 + 1e-6)
        for other in features:
            assert (other - features[left_out]).norm() <= 2 * bound * (1 + 1e-6)


def test_records_that_are_not_numbers_are_left_to_the_gate() -> None:
    maps = torch.randn(2, 3, 4, 4)
    maps[0, 1, 0, 0] = float("nan")
    made = simplified_instance_norm(maps)
    assert torch.isnan(made[0, 1]).all()
    assert torch.isfinite(made[0, 0]).all() and torch.isfinite(made[1]).all()


def test_slopes_at_a_constant_map_are_finite() -> None:
    slope = grad(lambda x: simplified_instance_norm(x).square().sum())(torch.full((2, 4, 4), 2.0))
    assert torch.isfinite(slope).all()
