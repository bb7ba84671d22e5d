"""Draw network weights from a seed: the same weights on every device, without global state.

A release stores seeds, not networks, and may be measured on one machine and synthesised on another.
`torch.Generator` gives other numbers on a GPU than on a CPU, so the numbers here come from
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): integer arithmetic, hence equal to the last bit
everywhere, made where it is needed, and for many seeds at once.

This is PUBLIC randomness. It is not, and need not be, cryptographic. Noise comes from elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["draw_parameters", "materialise", "public_seed", "uniforms"]

# SplitMix64's increment and multipliers.
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64

M = TypeVar("M", bound=nn.Module)


def public_seed(*place: object) -> int:
    """Derive a 63-bit seed for one place from a method's seed. Public, never for noise."""
    label = "/".join(map(str, place)).encode()
    return int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "big") >> 1


def _signed(word: int) -> int:
    """Read a 64-bit word as two's complement, the only 64-bit integer torch multiplies."""
    word %= _WORD
    return word - _WORD if word >= _WORD >> 1 else word


def _scramble(word: int) -> int:
    """Mix one word, so that neighbouring seeds start far apart in the sequence."""
    word = (word + _GAMMA) % _WORD
    word = (word ^ word >> 30) * _FIRST % _WORD
    word = (word ^ word >> 27) * _SECOND % _WORD
    return word ^ word >> 31


def uniforms(
    seeds: Sequence[int], count: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return float32 uniforms on [-1, 1), one row of `count` numbers per seed."""
    starts = [_signed(_scramble(seed)) for seed in seeds]
    if len(starts) == 1:  # a number is handed over with the operation, a tensor is waited for
        first = torch.full((1,), starts[0], dtype=torch.int64, device=device)
    else:
        first = torch.tensor(starts, dtype=torch.int64, device=device)
    words = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)
    words = words + first[:, None]
    # torch shifts arithmetically; the masks make the shifts logical.
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_FIRST))
    words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_SECOND))
    # The top 24 bits of a signed word, scaled: exact in float32, so no rounding can differ.
    return (words >> 40).to(torch.float32).mul_(2.0**-23)


def _bounds(module: nn.Module) -> Iterator[tuple[str, Tensor, float | None]]:
    """Yield each parameter's name, itself and the bound of its uniform (None: a norm's constant).

    PyTorch's defaults: kaiming_uniform(a=sqrt(5)) is U(-b, b) with b = 1/sqrt(fan_in), for the
    weight and the bias of a linear or convolutional layer; scale one and shift zero for a norm.
    """
    for prefix, part in module.named_modules():
        own = list(part.named_parameters(recurse=False))
        if not own:
            continue
        if isinstance(part, nn.Linear | nn.Conv2d):
            bound = 1 / math.sqrt(part.weight[0].numel())
        elif isinstance(part, nn.GroupNorm):
            bound = None
        else:
            raise TypeError(f"No initial distribution is known for {type(part).__name__}.")
        for name, parameter in own:
            yield f"{prefix}.{name}" if prefix else name, parameter, bound


def draw_parameters(
    module: nn.Module, seeds: int | Sequence[int], *, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Return fresh parameters for `module`, as `torch.func.functional_call` takes them.

    One seed gives one set. A sequence of seeds gives stacked parameters with a leading dimension,
    for `torch.func.vmap`; row i equals what seeds[i] gives alone. `module` itself is only read for
    its shapes and may live on the meta device.
    """
    rows = [seeds] if isinstance(seeds, int) else list(seeds)
    stack = () if isinstance(seeds, int) else (len(rows),)
    layout = list(_bounds(module))
    sizes = [parameter.numel() for _, parameter, bound in layout if bound is not None]
    pieces = iter(torch.split(uniforms(rows, sum(sizes), device=device), sizes, dim=1))
    drawn: dict[str, Tensor] = {}
    for name, parameter, bound in layout:
        shape = (*stack, *parameter.shape)
        if bound is not None:
            drawn[name] = (next(pieces) * bound).view(shape)
        else:
            value = 1.0 if name.endswith("weight") else 0.0
            drawn[name] = torch.full(shape, value, device=device)
    return drawn


def materialise(module: M, seed: int, device: torch.device | str | None) -> M:
    """Give a module built on the meta device its seeded parameters, on `device`."""
    module.load_state_dict(draw_parameters(module, seed, device=device or "cpu"), assign=True)
    return module
