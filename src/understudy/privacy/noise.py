"""Draw secret randomness: noise and sampling. No user seed reaches this file.

A :class:`Secret` is a 256-bit key from the operating system. Each query gets streams of its own,
AES-256 in counter mode under a key derived from the secret and the query's place, so no two draws
share a byte and nothing has to be stored. A test may fix the secret; the statement of whatever it
produces then says "not private".

Floating point (Mironov 2012; Casacuberta et al. 2022): contributions are truncated towards zero
onto a public grid of a power of two, about 2^-28 of the noise, so sums are exact integers times
the grid, in any order, and the noise is rounded onto the same grid. A released value is then the
rounding of a real Gaussian mechanism's answer; what is left is the sampler's own error inside a
cell, of the order of 2^-24 relative, and its cut at 12.1 standard deviations (mass 1e-32). Radii
come from 106 random bits: with 53, the numbers that can come out lie further apart than the grid
from six deviations on. See docs/sharp-edges.md.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

Floats = npt.NDArray[np.float64]

GRID_BITS = 28

CIPHER_BLOCK = 16
"""Bytes of an AES block."""

ZEROS = bytes(2**16)
"""What is encrypted: key stream is the cipher's answer to zeros."""


class Secret:
    """Hold the key all secret randomness of one run is derived from."""

    __slots__ = ("_key", "known")

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self.known = False

    @classmethod
    def for_testing(cls, seed: int) -> Secret:
        """Fix the key. Whatever is made with it is not private, and says so."""
        fixed = cls()
        fixed._key = hashlib.sha256(f"understudy test secret {seed}".encode()).digest()
        fixed.known = True
        return fixed

    def stream(self, *place: object) -> Stream:
        """Open the stream of one place: the same place under the same key repeats itself."""
        label = "/".join(map(str, place)).encode()
        return Stream(hmac.digest(self._key, label, "sha256"))

    def __repr__(self) -> str:
        return "Secret(known)" if self.known else "Secret()"

    def __reduce__(self) -> str:
        raise TypeError("A secret is never stored.")


class Stream:
    """Turn AES-256-CTR key stream into uniform and Gaussian numbers."""

    __slots__ = ("_cipher", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(b"\0" * 16)).encryptor()

    def bits(self, count: int) -> npt.NDArray[np.uint64]:
        """Return 64-bit words."""
        room = np.empty(8 * count + CIPHER_BLOCK, np.uint8)
        self._fill(room)
        words: npt.NDArray[np.uint64] = room[: 8 * count].view("<u8")
        return words

    def _words(self, count: int, device: torch.device) -> Tensor:
        """Return 64-bit words, as signed numbers, on the device."""
        room = torch.empty(
            8 * count + CIPHER_BLOCK, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._fill(room.numpy())
        return room[: 8 * count].view(torch.int64).to(device, non_blocking=True)

    def _fill(self, room: npt.NDArray[np.uint8]) -> None:
        """Write key stream over all but the last block, which the cipher wants to see free.

        Piece by piece, so that the zeros it is made of stay in the cache.
        """
        bytes_, end = room.data, len(room) - CIPHER_BLOCK
        for first in range(0, end, len(ZEROS)):
            size = min(len(ZEROS), end - first)
            self._cipher.update_into(ZEROS[:size], bytes_[first : first + size + CIPHER_BLOCK])

    def uniform(self, count: int) -> Floats:
        """Return numbers in [0, 1), each a multiple of 2^-53."""
        uniform: Floats = (self.bits(count) >> np.uint64(11)) * 2.0**-53
        return uniform

    def tosses(self, chances: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Toss a coin each. Chances are whole numbers of 2^-53, from :func:`chance`."""
        heads: npt.NDArray[np.bool_] = (self.bits(len(chances)) >> np.uint64(11)) < chances
        return heads

    def coins(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return float32 numbers in [0, 1), each a multiple of 2^-24, made on the device."""
        count = math.prod(shape)
        words = self._words((count + 1) // 2, device).view(torch.int32)[:count]
        return ((words >> 8) * 2.0**-24 + 0.5).reshape(shape)

    def normal(self, count: int, device: torch.device) -> Tensor:
        """Return standard normal numbers in float64, made on the device (Box and Muller 1958).

        Three words a pair: the radius takes a number in (0, 1] that is fine where it is small,
        which is where radii are long.
        """
        half = (count + 1) // 2
        words = self._words(3 * half, device)
        uniform = ((words >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
        radius, angle = radius_of(uniform[:half], uniform[half : 2 * half]), uniform[2 * half :]
        angle = angle * (2.0 * math.pi)
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]

    def keyed(self, data: bytes) -> int:
        """Return a 128-bit keyed hash of some bytes."""
        return int.from_bytes(hashlib.blake2b(data, digest_size=16, key=self._key).digest(), "big")


def radius_of(high: Tensor, low: Tensor) -> Tensor:
    """Return the length of a Gaussian vector in the plane for two uniform numbers of 53 bits."""
    return torch.log(high + low * 2.0**-53 + 2.0**-107).mul_(-2.0).sqrt_()


def chance(rates: Sequence[float]) -> npt.NDArray[np.uint64]:
    """Return probabilities as whole numbers of 2^-53: a uniform number lies below as often.

    Rounded down: what is priced is the rate that was asked for.
    """
    whole: npt.NDArray[np.uint64] = np.floor(np.array(rates) * 2.0**53).astype(np.uint64)
    return whole


def grid(bound: float, stddev: float, records: int) -> float:
    """Return the public grid sums and noise live on: a power of two.

    About 2^-28 of the noise (of the bound, where there is none); coarser where the exact sum of
    ``records`` contributions would not fit the 53 bits of a float64.
    """
    fine = math.floor(math.log2(stddev if stddev > 0 else bound)) - GRID_BITS
    fits = math.ceil(math.log2(bound * max(records, 1))) - 51
    return float(2.0 ** max(fine, fits))


def grid_noise(
    stream: Stream, count: int, stddev: float, step: float, device: torch.device
) -> Tensor:
    """Return Gaussian noise of the standard deviation, rounded to the grid, in float64."""
    return stream.normal(count, device).mul_(stddev / step).round_().mul_(step)
