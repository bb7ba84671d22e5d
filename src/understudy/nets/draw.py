"""Draw network weights from a seed: the same weights on every device, without global state.

A release stores seeds, not networks, and may be measured on one machine and synthesised on another.
`torch.Generator` gives other numbers on a GPU than on a CPU, so the numbers here come from
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): integer arithmetic, hence equal to the last bit
everywhere, made where it is needed, and for many seeds at once.

This is PUBLIC randomness. It is not, and need not be, cryptographic. Noise comes from elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from understudy.engine import captured

__all__ = ["Drawing", "draw_parameters", "materialise", "public_seed", "uniforms"]

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
    words = _steps(count, device) + _starts(seeds, device)[:, None]
    # The top 24 bits of a signed word, scaled: exact in float32, so no rounding can differ.
    return (_mixed(words) >> 40).to(torch.float32).mul_(_UNIT)


_UNIT = 2.0**-23


def _starts(seeds: Sequence[int], device: torch.device | str | None) -> Tensor:
    """Return the word each sequence starts at."""
    starts = [_signed(_scramble(seed)) for seed in seeds]
    if len(starts) == 1:  # a number is handed over with the operation, a tensor is waited for
        return torch.full((1,), starts[0], dtype=torch.int64, device=device)
    return torch.tensor(starts, dtype=torch.int64, device=device)


def _steps(count: int, device: torch.device | str | None) -> Tensor:
    """Return how far from its start each word of a sequence lies."""
    return torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GAMMA)


def _mixed(words: Tensor) -> Tensor:
    """Scramble words in place. torch shifts arithmetically; the masks make the shifts logical."""
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(_FIRST))
    return words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_SECOND))


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


class Drawing:
    """Draw sets of parameters for one kind of module, each as one row of numbers.

    `module` is only read for its shapes and may live on the meta device. With `recorded`, drawing
    a single row on a GPU is recorded once and replayed: worth it for many draws.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str | None = None, *, recorded: bool = False
    ) -> None:
        layout = list(_bounds(module))
        drawn = [(name, p, bound) for name, p, bound in layout if bound is not None]
        given = [(name, p) for name, p, bound in layout if bound is None]
        self._named = [(name, p.shape) for name, p, _ in drawn] + [(n, p.shape) for n, p in given]
        self._order = [name for name, _, _ in layout]
        self._steps = _steps(sum(p.numel() for _, p, _ in drawn), device)
        bounds = [torch.full((p.numel(),), bound) for _, p, bound in drawn]
        self._scale = torch.cat([*bounds, torch.zeros(0)]).mul_(_UNIT).to(device)
        constants = [torch.full((p.numel(),), float(n.endswith("weight"))) for n, p in given]
        self._constants = torch.cat([*constants, torch.zeros(0)]).to(device)
        self._recorded = recorded
        self._device = self._scale.device

    @property
    def count(self) -> int:
        """Count the numbers of a row."""
        return len(self._scale) + len(self._constants)

    def rows(self, seeds: Sequence[int]) -> Tensor:
        """Return one row for each seed."""
        if self._recorded and len(seeds) == 1 and self._device.type == "cuda":
            return self._replayed(_signed(_scramble(seeds[0])))
        return self._of(_starts(seeds, self._device))

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the parameters in a row, or in rows, as `torch.func.functional_call` takes them."""
        pieces = torch.split(rows, [shape.numel() for _, shape in self._named], dim=-1)
        views = {
            name: piece.view(*rows.shape[:-1], *shape)
            for (name, shape), piece in zip(self._named, pieces)
        }
        return {name: views[name] for name in self._order}

    def _of(self, starts: Tensor) -> Tensor:
        words = _mixed(self._steps + starts[:, None])
        drawn = (words >> 40).to(torch.float32).mul_(self._scale)
        return torch.cat([drawn, self._constants.expand(len(starts), -1)], dim=1)

    def _replayed(self, start: int) -> Tensor:
        first, row, go = self._recording
        first.fill_(start)
        go()
        return row.clone()

    @functools.cached_property
    def _recording(self) -> tuple[Tensor, Tensor, Callable[[], None]]:
        first = torch.zeros(1, dtype=torch.int64, device=self._device)
        row = torch.zeros(1, self.count, device=self._device)

        def draw() -> None:
            row.copy_(self._of(first))

        return first, row, captured(draw, self._device)


def draw_parameters(
    module: nn.Module, seeds: int | Sequence[int], *, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Return fresh parameters for `module`, as `torch.func.functional_call` takes them.

    One seed gives one set. A sequence of seeds gives stacked parameters with a leading dimension,
    for `torch.func.vmap`; row i equals what seeds[i] gives alone.
    """
    drawing = Drawing(module, device)
    if isinstance(seeds, int):
        return drawing.split(drawing.rows([seeds])[0])
    return drawing.split(drawing.rows(seeds))


def materialise(module: M, seed: int, device: torch.device | str | None) -> M:
    """Give a module built on the meta device its seeded parameters, on `device`."""
    module.load_state_dict(draw_parameters(module, seed, device=device or "cpu"), assign=True)
    return module
