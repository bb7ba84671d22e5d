"""Compare the features of a synthetic set with noisy class sums (DPDC Algorithm 2, Dosser Eq. 5).

Synthetic images are kept class by class, the same number M for each: a tensor with leading
dimensions (classes, M). Sums over a class are then sums over one dimension: every class at once,
and the same result at every run, which a scattered sum on a GPU does not promise.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["class_sums", "matching_loss"]


def class_sums(features: Tensor) -> Tensor:
    """Add up (classes, M, features) over the images of each class."""
    return features.sum(dim=1)


def matching_loss(features: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Return sum over classes of ||scale x class sum - target||^2.

    With scale L / M and targets the noisy sums this is the loss of DPDC Algorithm 2; with scale
    1 / M and targets the noisy means it is Dosser's Equation 5 (and DM's, without noise).
    """
    return (scale * class_sums(features) - targets).square().sum()
