"""Count what a step asks of the device: operations, arithmetic, bytes, and waits for an answer.

Counted where torch hands operations to the device, below autograd and ``vmap``, so what these make
is counted too. On a GPU an operation is about one kernel launch.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from understudy.evaluation import classify
from understudy.methods import gradient_matching, optimisation
from understudy.nets import convnet
from understudy.ops import pieces
from understudy.privacy import clipping, gate

WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select",
                   "aten::equal", "aten::is_nonzero", "aten::unique_dim", "aten::_unique2"})  # fmt: skip
"""Operations whose answer Python or the allocator needs at once, so a GPU's queue runs dry.

``.item()``, ``.tolist()`` of a single number and ``bool(tensor)`` are ``_local_scalar_dense``.
"""

ALLOCATES = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided",
                       "aten::new_empty", "aten::new_empty_strided"})  # fmt: skip


class Counter(TorchDispatchMode):
    """Count operations while active. Views and allocations are no operations.

    ``moved`` adds up the bytes of all tensors read and written, operation by operation, as they
    are run: fusing operations would lower it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.flop = self.moved = self.synchronising = 0.0
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count it."""
        out = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        if _is_view(operation) or name in ALLOCATES:
            return out
        self.operations += 1
        self.names[name] += 1
        formula = flop_registry.get(operation._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **(kwargs or {}), out_val=out)
        self.moved += sum(_size(leaf) for leaf in tree_leaves((args, kwargs, out)))
        masks = any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:])
        )
        to_host = name == "aten::_to_copy" and _leaves_the_device(args[0], out)
        if name in WAITS or to_host or (name == "aten::index" and masks):
            self.synchronising += 1
        return out

    def less(self, other: Counter, *, steps: int) -> Counter:
        """Return what one of so many further steps took."""
        each = Counter()
        each.operations = (self.operations - other.operations) / steps
        each.flop = (self.flop - other.flop) / steps
        each.moved = (self.moved - other.moved) / steps
        each.synchronising = (self.synchronising - other.synchronising) / steps
        each.names.update({n: (k - other.names[n]) // steps for n, k in self.names.items()})
        return each


def _is_view(operation: Any) -> bool:
    """Tell whether the result is the argument under another shape: nothing runs."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in operation._schema.returns
    )


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def _leaves_the_device(before: Tensor, after: Tensor) -> bool:
    return before.device.type == "cuda" and after.device.type == "cpu"


PIECES: tuple[tuple[ModuleType, str, Any], ...] = (
    (pieces, "PIXELS", 10**12),
    (clipping, "CACHED_NUMBERS", 10**12),
    (convnet, "halve", lambda x: F.avg_pool2d(x, 2)),
    *(
        (module, "captured", lambda step, *_: step)
        for module in (gate, gradient_matching, optimisation, classify)
    ),
)
"""What a CPU does otherwise, for its cache's sake, and what a GPU is given instead.

A recorded step is counted as it is recorded: operation by operation.
"""


@contextmanager
def whole_batches() -> Iterator[None]:
    """Hand batches over as on a GPU, for a while."""
    before = [getattr(module, name) for module, name, _ in PIECES]
    for module, name, value in PIECES:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(PIECES, before, strict=True):
            setattr(module, name, value)
