from __future__ import annotations

import torch

from understudy.ops.bound import bound
from understudy.ops.match import class_sums, matching_loss


def test_the_loss_of_all_classes_is_the_papers_loop_over_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    expected = 0.0
    for c in range(3):
        total = torch.zeros(7, dtype=torch.float64)
        for j in range(5):
            total += features[c, j]
        expected += float(((50 / 5) * total - targets[c]).norm() ** 2)
    assert abs(float(matching_loss(features, targets, 50 / 5)) - expected) < 1e-9
    assert torch.equal(class_sums(features)[1], features[1].sum(0))


def test_bound_shortens_long_rows_only() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(bound(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_the_factor_is_a_constant_unless_asked_otherwise() -> None:
    row = torch.tensor([[3.0, 4.0]], requires_grad=True)
    (held,) = torch.autograd.grad(bound(row, 1.0)[0, 0], row)
    torch.testing.assert_close(held, torch.tensor([[0.2, 0.0]]))
    (full,) = torch.autograd.grad(bound(row, 1.0, detach=False).square().sum(), row)
    torch.testing.assert_close(full, torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_the_gradient_at_zero_is_finite() -> None:
    row = torch.zeros(1, 2, requires_grad=True)
    for detach in (True, False):
        (gradient,) = torch.autograd.grad(bound(row, 1.0, detach=detach).sum(), row)
        assert torch.isfinite(gradient).all()
