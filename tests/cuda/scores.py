"""Softcap and ALiBi of the seeded cases: drawn, made, and the kernels that they need."""

from __future__ import annotations

import dataclasses
import random

import torch

from flashcute import heuristics
from flashcute.config import FwdConfig

# What cases of a dtype ask for. Every choice is a set of kernels, compiled for the tests alone, so
# bf16 has one option at a time and fp16 both.
_ASKED = {torch.float16: ("", "both"), torch.bfloat16: ("", "softcap", "alibi")}
HEAD_DIMS = {torch.float16: (64, 128, 256), torch.bfloat16: (64, 128)}  # of their kernels
_SOFTCAPS = (0.01, 2.0, 50.0, 50.0, 1e6)
_SIZES = (0.1, 0.5, 30.0)  # of slopes


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a case asks for.

    Attributes:
        softcap: 0.0: none.
        slopes: Their size; 0.0: none.
        of_each: Slopes (b, h), of each entry; else (h,).
        factor: On the softmax_scale.
    """

    softcap: float = 0.0
    slopes: float = 0.0
    of_each: bool = False
    factor: float = 1.0

    @property
    def any(self) -> bool:
        return self.softcap > 0 or self.slopes > 0

    def options(self, b: int, h: int, d: int, generator: torch.Generator) -> dict[str, object]:
        """softmax_scale, softcap and alibi_slopes of a call. Slopes have both signs; some are 0."""
        slopes = None
        if self.slopes > 0:
            shape = (b, h) if self.of_each else (h,)
            slopes = self.slopes * torch.rand(shape, device="cuda", generator=generator)
            index = torch.arange(slopes.numel(), device="cuda").view(shape)
            slopes = torch.where(index % 3 == 2, -0.01 * slopes, slopes)
            slopes = torch.where(index % 4 == 1, 0, slopes)
        scale = self.factor * d**-0.5
        return {"softmax_scale": scale, "softcap": self.softcap, "alibi_slopes": slopes}


def draw(rng: random.Random, dtype: torch.dtype) -> Scores:
    asked = rng.choice(_ASKED[dtype])
    return Scores(
        softcap=rng.choice(_SOFTCAPS) if asked in ("softcap", "both") else 0.0,
        slopes=rng.choice(_SIZES) if asked in ("alibi", "both") else 0.0,
        of_each=rng.random() < 0.5,
        factor=rng.choice((1.0, 8.0)),
    )


def kernels(capability: tuple[int, int]) -> list[FwdConfig]:
    """Those of all cases that ask for anything, of both classes and all masks."""
    found = []
    for dtype, asked in _ASKED.items():
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        for head_dim in HEAD_DIMS[dtype]:
            tiles = [
                config
                for causal in (False, True)
                for config in (
                    heuristics.fwd_config(name, head_dim, causal, capability),
                    *(
                        config
                        for config in heuristics.sm90_configs(name, head_dim, causal)
                        if capability == (9, 0) and config.min_ctas == 1
                    ),
                )
            ]
            tiles += [dataclasses.replace(c, mask="local") for c in tiles if c.mask == "none"]
            for option in asked[1:]:
                softcap, alibi = option != "alibi", option != "softcap"
                found += [heuristics.with_score_options(c, softcap, alibi) for c in tiles]
    return found
