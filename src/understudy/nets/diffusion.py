"""A small class-conditional diffusion model, on Hugging Face's diffusers.

The U-Net and the noise schedule are theirs (``UNet2DModel``, ``DDIMScheduler``): a maintained
network without batch statistics, which ``torch.func.vmap`` takes as it is. diffusers is an optional
dependency, imported where a denoiser is built and nowhere else.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from understudy.errors import BadConfiguration
from understudy.nets.draw import draw_parameters, uniforms

__all__ = ["GROUPS", "Denoiser", "Draws"]

GROUPS = 4
"""Groups of each group norm: diffusers' default of 32 asks for more channels than a small net has."""

LEVELS = 1000
"""Noise levels of the schedule, from hardly any to nothing else (Ho et al. 2020, Section 4)."""

_PICTURES_AT_ONCE = 256

Parameters = Mapping[str, Tensor]


class Draws(NamedTuple):
    """Hold a pool of public noise: pictures (n, C, H, W), levels (n,), and keys (C H W,)."""

    noise: Tensor
    levels: Tensor
    keys: Tensor

    def of_one(self, record: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` draws for ONE record, their levels evenly apart.

        Where it begins in the pool is a hash of the record's own pixels, so records of a batch
        look at different noise although none can see the others. Keys change the hash.
        """
        size = len(self.levels)
        pixels = (record.flatten() * 127.5).round().long()
        place = (pixels * self.keys).sum() >> 32  # the high bits of a multiplicative hash
        steps = torch.arange(count, device=record.device) * size // count
        places = torch.remainder(place + steps, size)
        return self.noise[places], self.levels[places]


class Denoiser:
    """Tell pictures from noise: a U-Net that predicts the velocity of a noisy picture.

    Channels width, 2 width, 2 width at the full, half and quarter size (pictures under 16 pixels:
    the first two), one residual block each, no attention. Sides are padded to what halves evenly.
    The schedule is the cosine one (Nichol and Dhariwal 2021), the target the velocity (Salimans
    and Ho 2022), whose loss is as large at every level. ``parameters`` travel apart, as
    ``torch.func.functional_call`` takes them.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 32) -> None:
        if len(shape) != 3:
            raise BadConfiguration(
                f"A diffusion model makes pictures, not records of shape {tuple(shape)}."
            )
        channels, *sides = shape
        widths = (width, 2 * width, 2 * width) if min(sides) >= 16 else (width, 2 * width)
        self.shape, self.classes = tuple(shape), classes
        self._padding = tuple(-side % 2 ** (len(widths) - 1) for side in sides)
        library = _diffusers()
        with torch.device("meta"):
            self.net: nn.Module = library.UNet2DModel(
                in_channels=channels,
                out_channels=channels,
                layers_per_block=1,
                block_out_channels=widths,
                down_block_types=("DownBlock2D",) * len(widths),
                up_block_types=("UpBlock2D",) * len(widths),
                add_attention=False,
                norm_num_groups=GROUPS,
                num_class_embeds=classes,
            )
        self._schedule: Any = library.DDIMScheduler(
            num_train_timesteps=LEVELS,
            beta_schedule="squaredcos_cap_v2",
            prediction_type="v_prediction",
            timestep_spacing="trailing",  # begin at the level that is all noise (Lin et al. 2023)
            clip_sample=True,  # pixels lie in [-1, 1]
        )

    def draw(self, seed: int, device: torch.device) -> dict[str, Tensor]:
        """Draw weights: PyTorch's defaults, and standard deviation one for what tells classes."""
        rest = {name: part for name, part in self.net.named_children() if name != _EMBEDDING}
        drawn = draw_parameters(nn.ModuleDict(rest), seed, device=device)
        table = dict(self.net.named_parameters())[f"{_EMBEDDING}.weight"]
        # Another stream than draw_parameters(seed): its seed has the next bit set.
        rows = uniforms([seed | 1 << 63], table.numel(), device=device)
        drawn[f"{_EMBEDDING}.weight"] = rows.view(table.shape) * math.sqrt(3.0)
        return {name: drawn[name] for name, _ in self.net.named_parameters()}

    def pool(self, seed: int, count: int, device: torch.device) -> Draws:
        """Draw public noise from the seed; levels rise evenly through the pool, each jittered."""
        # Where the schedule looks for it while records are mapped over.
        self._schedule.alphas_cumprod = self._schedule.alphas_cumprod.to(device)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(count, *self.shape, generator=generator)
        even = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        keys = torch.randint(2**62, (math.prod(self.shape),), generator=generator)
        levels = (even * LEVELS).long().clamp_max(LEVELS - 1)
        return Draws(noise.to(device), levels.to(device), keys.to(device))

    def loss(
        self, parameters: Parameters, record: Tensor, label: Tensor, draws: Draws, count: int
    ) -> Tensor:
        """Return the mean squared error on ``count`` noisy versions of ONE record."""
        noise, levels = draws.of_one(record, count)
        clean = record.expand(count, *record.shape)
        noisy = self._schedule.add_noise(clean, noise, levels)
        truth = self._schedule.get_velocity(clean, noise, levels)
        guess = self._guess(parameters, noisy, levels, label.expand(count))
        return F.mse_loss(guess, truth)

    @torch.no_grad()
    def sample(self, parameters: Parameters, labels: Tensor, seed: int, steps: int) -> Tensor:
        """Make a picture of each label by DDIM (Song et al. 2021, Equation 12, eta 0)."""
        device = next(iter(parameters.values())).device
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(len(labels), *self.shape, generator=generator)
        self._schedule.set_timesteps(steps)
        made = []
        for x, wanted in zip(
            torch.split(noise, _PICTURES_AT_ONCE),
            torch.split(labels, _PICTURES_AT_ONCE),
            strict=True,
        ):
            x, wanted = x.to(device), wanted.to(device)
            for level in self._schedule.timesteps.tolist():
                at = torch.full((len(x),), level, device=device)
                guess = self._guess(parameters, x, at, wanted)
                x = self._schedule.step(guess, level, x, eta=0.0).prev_sample
            made.append(x.clamp(-1, 1))
        return torch.cat(made)

    def _guess(self, parameters: Parameters, x: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """Run the network on pictures padded at the right and at the bottom."""
        height, width = x.shape[-2:]
        down, right = self._padding
        padded = F.pad(x, (0, right, 0, down))
        guess: Tensor = functional_call(self.net, dict(parameters), (padded, levels, labels)).sample
        return guess[..., :height, :width]


_EMBEDDING = "class_embedding"


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as missing:
        raise BadConfiguration(
            "A generator of auxiliary pictures is built on the package 'diffusers', which is not "
            "installed: pip install 'understudy[diffusion]', then run again. A run that had begun "
            "is taken up where it stopped and pays nothing more."
        ) from missing
