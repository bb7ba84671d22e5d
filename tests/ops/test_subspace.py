from __future__ import annotations

import pytest
import torch

from understudy.ops.subspace import low_frequencies, principal, project, random_fields


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_principal_directions_are_those_of_the_full_decomposition() -> None:
    scale = 0.7 ** torch.arange(30.0, dtype=torch.float64)
    rows = torch.randn(200, 30, generator=generator(), dtype=torch.float64) * scale + 5
    found = principal(rows, 4, generator(1))
    exact = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[:4].T
    torch.testing.assert_close(found.mean, rows.mean(0))
    overlap = (found.components.T @ exact).abs()
    torch.testing.assert_close(overlap, torch.eye(4, dtype=torch.float64), atol=1e-2, rtol=0)
    gram = found.components.T @ found.components
    torch.testing.assert_close(gram, torch.eye(4, dtype=torch.float64))
    largest = found.components.abs().argmax(0)
    assert (found.components.gather(0, largest[None]) > 0).all()


def test_projection_never_lengthens_a_centred_vector() -> None:
    rows = torch.randn(50, 20, generator=generator())
    subspace = principal(rows, 5, generator())
    vectors = torch.randn(40, 20, generator=generator(2))
    short, long = project(vectors, subspace).norm(dim=1), (vectors - subspace.mean).norm(dim=1)
    assert (short <= long + 1e-5).all()


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    principal(torch.randn(9, 5, generator=generator()), 2, generator())
    random_fields((1, 8, 8), 3, generator())
    assert torch.equal(before, torch.get_rng_state())


def test_more_directions_than_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="do not span"):
        principal(torch.zeros(3, 10), 4, generator())


@pytest.mark.parametrize("shape", [(1, 6, 4), (3, 4, 4)])
def test_cosine_patterns_are_orthonormal_and_start_flat(shape: tuple[int, int, int]) -> None:
    size = shape[0] * shape[1] * shape[2]
    full = low_frequencies(shape, size)
    torch.testing.assert_close(full.T @ full, torch.eye(size), atol=1e-5, rtol=0)
    first = low_frequencies(shape, shape[0]).T.view(shape[0], *shape)
    for channel in range(shape[0]):
        assert first[channel, channel].std() < 1e-6
        assert first[channel].abs().sum() == first[channel, channel].abs().sum()


def test_random_fields_are_smooth_pictures_on_the_scale_of_records() -> None:
    fields = random_fields((3, 16, 16), 50, generator())
    assert fields.shape == (50, 3, 16, 16)
    assert fields.abs().max() <= 1
    assert fields.std() > 0.3
    step = (fields[..., 1:] - fields[..., :-1]).square().mean()
    assert step < fields.var()  # white noise would have twice the variance
