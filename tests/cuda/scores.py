"""Softcap, ALiBi and dropout of the seeded cases: drawn, made, and the kernels they need."""

from __future__ import annotations

import dataclasses
import random

import torch

from flashcute import heuristics
from flashcute.config import MAX_HEAD_DIM, FwdConfig
from flashcute.dropout import draw_state, dropout_mask

# What cases of a dtype ask for: softcap, alibi, dropout. Every choice is a set of kernels, compiled
# for the tests alone, so bf16 has one option at a time and fp16 several.
_NONE = (False, False, False)
ASKED = {
    torch.float16: (_NONE, (True, True, False), (True, True, True)),
    torch.bfloat16: (_NONE, (True, False, False), (False, True, False), (False, False, True)),
}
HEAD_DIMS = {torch.float16: (64, 128, 256), torch.bfloat16: (64, 128)}  # of their kernels
FUZZED = 100_000  # from this seed on, those of tools/fuzz_gpu.py, which builds what it draws
_SOFTCAPS = (0.01, 2.0, 50.0, 50.0, 1e6)
_SIZES = (0.1, 0.5, 30.0)  # of slopes
_PROBABILITIES = (2.0**-16, 0.1, 0.3, 0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a case asks for.

    Attributes:
        softcap: 0.0: none.
        slopes: Their size; 0.0: none.
        of_each: Slopes (b, h), of each entry; else (h,).
        factor: On the softmax_scale.
        dropout_p: 0.0: none.
    """

    softcap: float = 0.0
    slopes: float = 0.0
    of_each: bool = False
    factor: float = 1.0
    dropout_p: float = 0.0

    @property
    def asked(self) -> tuple[bool, bool, bool]:
        return self.softcap > 0, self.slopes > 0, self.dropout_p > 0

    @property
    def any(self) -> bool:
        return any(self.asked)

    @property
    def alike(self) -> bool:
        """Whether the cap is so small that scores are +-softcap, and weights have two values: their
        rounding does not average out. FlashAttention's formula in float64, with P in bf16 beside a
        maximum 0.7 off, then breaks the rule of drift in 33 of 60 draws, with a cap of 1.5 in none.
        """
        return 0 < self.softcap < 0.1

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

    def dropout(self, seed: int, b: int, h: int, seqlen_q: int, seqlen_k: int) -> dict[str, object]:
        """dropout_p and dropout_mask, for the reference, of a call after ``manual_seed(seed)``."""
        if self.dropout_p == 0.0:
            return {}
        torch.manual_seed(seed)
        state = draw_state(torch.device("cuda"))
        mask = dropout_mask(state, b, h, seqlen_q, seqlen_k, self.dropout_p)
        return {"dropout_p": round(self.dropout_p * 2**16) / 2**16, "dropout_mask": mask}


def head_dims(seed: int, dtype: torch.dtype) -> tuple[int, ...]:
    """What a case that asks for anything draws from."""
    return tuple(range(8, MAX_HEAD_DIM + 1, 8)) if seed >= FUZZED else (40, *HEAD_DIMS[dtype])


def draw(rng: random.Random, dtype: torch.dtype) -> Scores:
    softcap, alibi, dropout = rng.choice(ASKED[dtype])
    return Scores(
        softcap=rng.choice(_SOFTCAPS) if softcap else 0.0,
        slopes=rng.choice(_SIZES) if alibi else 0.0,
        of_each=rng.random() < 0.5,
        factor=rng.choice((1.0, 8.0)),
        dropout_p=rng.choice(_PROBABILITIES) if dropout else 0.0,
    )


def kernels(capability: tuple[int, int]) -> list[FwdConfig]:
    """Those of all cases that ask for anything, of both classes and all masks."""
    found = []
    for dtype, asked in ASKED.items():
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
            for options in asked[1:]:
                found += [heuristics.with_options(c, *options) for c in tiles]
    return found
