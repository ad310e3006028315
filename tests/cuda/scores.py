"""Draws softcap, ALiBi and dropout for the seeded cases, makes their arguments, and lists the
kernels they need."""

from __future__ import annotations

import dataclasses
import random

import torch

from flashcute import heuristics
from flashcute.config import MAX_HEAD_DIM, FwdConfig
from flashcute.dropout import draw_state, dropout_mask

# (softcap, alibi, dropout) that cases of a dtype may ask for. Every choice needs a set of kernels
# that is compiled for the tests alone, so bf16 has one option at a time and fp16 several.
_NONE = (False, False, False)
ASKED = {
    torch.float16: (_NONE, (True, True, False), (True, True, True)),
    torch.bfloat16: (_NONE, (True, False, False), (False, True, False), (False, False, True)),
}
HEAD_DIMS = {torch.float16: (64, 128, 256), torch.bfloat16: (64, 128)}  # of the kernels above
FUZZED = 100_000  # seeds from here on are of tools/fuzz_gpu.py, which builds the kernels it draws
_SOFTCAPS = (0.01, 2.0, 50.0, 50.0, 1e6)
_SIZES = (0.1, 0.5, 30.0)  # of the ALiBi slopes
_PROBABILITIES = (2.0**-16, 0.1, 0.3, 0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a case asks for.

    Attributes:
        softcap: The cap; 0.0 for none.
        slopes: Size of the ALiBi slopes; 0.0 for none.
        of_each: Whether each batch entry has its own slopes, (b, h); else all share them, (h,).
        factor: Factor on the default softmax_scale.
        dropout_p: Dropout probability; 0.0 for none.
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
        """Whether the cap is so small that all scores are about +softcap or -softcap: weights then
        have only two values, whose roundings do not average out. FlashAttention's formula in
        float64, with P in bf16 relative to a maximum that is 0.7 off, breaks the rule of drift in
        33 of 60 draws with such a cap, and in none with a cap of 1.5.
        """
        return 0 < self.softcap < 0.1

    def options(self, b: int, h: int, d: int, generator: torch.Generator) -> dict[str, object]:
        """Returns softmax_scale, softcap and alibi_slopes of a call. Slopes have both signs; some
        are 0."""
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
        """Returns the reference's dropout_p and dropout_mask for a call that comes directly after
        ``manual_seed(seed)``."""
        if self.dropout_p == 0.0:
            return {}
        torch.manual_seed(seed)
        state = draw_state(torch.device("cuda"))
        mask = dropout_mask(state, b, h, seqlen_q, seqlen_k, self.dropout_p)
        return {"dropout_p": round(self.dropout_p * 2**16) / 2**16, "dropout_mask": mask}


def head_dims(seed: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the head dimensions from which a case with softcap, ALiBi or dropout draws."""
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
    """Returns the forwards of all cases with softcap, ALiBi or dropout, of both classes and all
    masks."""
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
