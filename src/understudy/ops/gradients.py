"""Take gradients of a classifier's loss, one record at a time, and compare them row by row.

PSG (Chen et al. 2022) matches the gradient of a synthetic set, which is public, to a noisy sum of
clipped gradients of records. Parameters are passed as plain dictionaries, as
``torch.func.functional_call`` takes them.

How the distance d of two gradients changes with the pictures takes a second derivative of the loss.
Either :func:`batch_gradient` makes the gradient g such that it can be differentiated again, or::

    grad of d(g) by the pictures = grad of <v, g> by the pictures,    v = grad of d by g, held fixed
    <v, g> = how fast the loss changes as the parameters go along v

where v is :func:`slopes_of_distance` and the second line :func:`loss_along`, which asks a network
for nothing but first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from understudy.ops.pieces import piece

__all__ = [
    "batch_gradient",
    "batch_loss",
    "gradient_of_one",
    "loss_along",
    "matched",
    "row_distance",
    "slopes_of_distance",
    "split",
]

Parameters = Mapping[str, Tensor]

FLOOR = 1e-6
"""Added to the product of two norms in a cosine: as in PSG's code, so a zero row has cosine 0."""

SHORTEST = 1e-18
"""A row that is shorter, as float32 sees it a row of zeros, pulls nowhere by its own direction."""


def matched(parameters: Parameters) -> tuple[str, ...]:
    """Name what :func:`row_distance` looks at: weights, of two dimensions or more."""
    return tuple(name for name, value in parameters.items() if value.dim() >= 2)


def gradient_of_one(
    net: nn.Module, parameters: Parameters, names: Sequence[str]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the map from ONE record to its gradient: what the gate sums (Algorithm 2, line 15).

    The gradient of the cross entropy with respect to the named parameters, as one vector in their
    order. The others are held fixed. Made for ``torch.func.vmap``: nothing here mixes records.
    """
    values = {name: value.detach() for name, value in parameters.items()}
    fixed = {name: value for name, value in values.items() if name not in names}

    def loss(moving: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = _called(net, {**moving, **fixed}, image[None])
        return F.cross_entropy(logits, label[None])

    slopes = grad(loss)

    def gradient(image: Tensor, label: Tensor) -> Tensor:
        parts = slopes({name: values[name] for name in names}, image, label)
        return torch.cat([parts[name].flatten() for name in names])

    return gradient


def split(vector: Tensor, parameters: Parameters, names: Sequence[str]) -> dict[str, Tensor]:
    """Cut a vector in the order of :func:`gradient_of_one` back into named tensors."""
    sizes = [parameters[name].numel() for name in names]
    parts = torch.split(vector, sizes)
    return {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}


def batch_gradient(
    net: nn.Module,
    parameters: Parameters,
    images: Tensor,
    labels: Tensor,
    names: Sequence[str],
    *,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return the gradient of the mean cross entropy of a batch, by name.

    With ``create_graph`` it can be differentiated again, by the images or whatever made them.
    """
    moving = {name: parameters[name].detach().requires_grad_() for name in names}
    loss = batch_loss(net, {**parameters, **moving}, images, labels)
    slopes = torch.autograd.grad(loss, list(moving.values()), create_graph=create_graph)
    return dict(zip(names, slopes, strict=True))


def batch_loss(net: nn.Module, parameters: Parameters, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a batch, on a CPU made a few images at a time."""
    pieces = torch.split(images, piece(images))
    logits = torch.cat([_called(net, dict(parameters), x) for x in pieces])
    return F.cross_entropy(logits, labels)


def loss_along(logits: Tensor, tangents: Tensor, labels: Tensor) -> Tensor:
    """Return how fast the mean cross entropy of a batch changes, where its logits do so fast."""
    expected = (logits.softmax(dim=1) * tangents).sum(dim=1).mean()
    return expected + F.nll_loss(tangents, labels)


def _called(net: nn.Module, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """Call a network with these parameters in place of its own.

    All of them are named, so none has to be found by being tied to another: torch's search for
    such takes longer than starting the network's operations.
    """
    logits: Tensor = functional_call(net, parameters, (images,), tie_weights=False)
    return logits


def row_distance(ours: Parameters, theirs: Parameters) -> Tensor:
    """Return PSG's distance of two gradients (supplement, Section B).

    ``sum over layers, sum over output rows of 1 - A_i . B_i / (||A_i|| ||B_i|| + 1e-6)``. Only
    tensors of two dimensions or more that both have count; a row is a tensor's first index. The
    distance does not change with the length of a row, up to the 1e-6.
    """
    return torch.stack([_layer(a, b) for a, b in _rows(ours, theirs).values()]).sum()


@torch.no_grad()
def slopes_of_distance(ours: Parameters, theirs: Parameters) -> dict[str, Tensor]:
    """Return the gradient of :func:`row_distance` by ours, held fixed.

    Written out, and for the rows of all layers together: autograd would start three times as many
    operations, hardly one of which keeps a GPU busy.
    """
    rows = _rows(ours, theirs)
    parts = zip(*(_products(a, b) for a, b in rows.values()), strict=True)
    length, other, product = (torch.cat(part) for part in parts)
    share = 1 / (length * other + FLOOR)
    along = product / length.clamp(min=SHORTEST) * other * share * share
    counts = [len(a) for a, _ in rows.values()]
    shares = [torch.split(value[:, None], counts) for value in (along, share)]
    return {
        name: torch.addcmul(for_ours * a, for_theirs, b, value=-1).view_as(ours[name])
        for (name, (a, b)), for_ours, for_theirs in zip(rows.items(), *shares, strict=True)
    }


def _rows(ours: Parameters, theirs: Parameters) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what is compared: tensors of two dimensions or more that both have, as rows."""
    return {
        name: (a.flatten(1), theirs[name].flatten(1))
        for name, a in ours.items()
        if a.dim() >= 2 and name in theirs
    }


def _layer(a: Tensor, b: Tensor) -> Tensor:
    length, other, product = _products(a, b)
    distance: Tensor = (1 - product / (length * other + FLOOR)).sum()
    return distance


def _products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lengths of rows and their inner products."""
    length, other = (torch.linalg.vector_norm(rows, dim=1) for rows in (a, b))
    return length, other, (a * b).sum(dim=1)
