"""Which kernels are prebuilt: those of dense calls of every head dimension, mask and dtype, and
those that the commonest calls of public models use beside them.

A kernel takes seconds to compile (docs/facts.md), so not every combination of options ships. Any
other kernel is built when it is first used.
"""

from __future__ import annotations

import dataclasses

from .config import DTYPES, HEAD_DIMS, BwdConfig, FwdConfig
from .heuristics import (
    FwdProblem,
    bwd_configs_in_use,
    choose_bwd,
    choose_fwd,
    configs_in_use,
    shipped_bwd_configs,
    shipped_configs,
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a public model, in bfloat16: which kernel it uses depends on this alone.

    Attributes:
        problem: The call's shape and options.
        backward: Whether it is the backward of the call.
    """

    problem: FwdProblem
    backward: bool = False

    def config(self, capability: tuple[int, int], sms: int = 132) -> FwdConfig | BwdConfig:
        """Returns the kernel that the call uses; arguments as in :func:`heuristics.choose_fwd`."""
        choose = choose_bwd if self.backward else choose_fwd
        return choose(self.problem, capability, sms)


def _dense(
    h: int,
    h_k: int,
    d: int,
    *lengths: int,
    causal: bool = True,
    window: int = 0,
    backward: bool = False,
    **options: bool,
) -> tuple[Call, ...]:
    """Returns a prefill or training step of 16k tokens for each of ``lengths``. ``window`` is the
    number of keys that a query sees under a causal mask, its own included; 0 for no window."""
    sides = (window - 1, 0) if window else None
    causal = causal and not window
    problems = (
        FwdProblem("bf16", causal, max(2**14 // s, 1), s, s, h, h_k, d, window=sides, **options)
        for s in lengths
    )
    return tuple(Call(problem, backward) for problem in problems)


def _cache(
    h: int, h_k: int, d: int, *lengths: int, b: int = 64, page_size: int = 0, window: int = 0
) -> tuple[Call, ...]:
    """Returns a call for each number of new tokens in ``lengths``, with room for 8,192 keys."""
    sides = (window - 1, 0) if window else None
    of_cache = {"cache": True, "page_size": page_size, "num_splits": 0}
    problems = (
        FwdProblem("bf16", not window, b, s, 8192, h, h_k, d, window=sides, **of_cache)
        for s in lengths
    )
    return tuple(Call(problem) for problem in problems)


_LONG = 512, 2048, 8192
# New tokens: decoding; a step of decodes and few prompts, or of speculative tokens; prompt chunks.
_STEPS = 1, 16, 512
_ALONE = 1, 64  # new tokens of a lone sequence: decoding, and a short prompt behind others
_FEW = 1, 16  # with 64 columns few sequences have other kernels than many

CALLS: dict[str, tuple[Call, ...]] = {
    # Encoders and diffusion.
    "all-MiniLM-L6": _dense(12, 12, 32, 128, 256, 512, causal=False),
    "bert-base": _dense(12, 12, 64, 128, 256, 512, causal=False),
    "clip-vit-l-14": _dense(16, 16, 64, 257, 577, causal=False),
    "clip-vit-h-14": _dense(16, 16, 80, 257, causal=False),
    "flux-dev": _dense(24, 24, 128, 1536, 4608, causal=False),
    # Prefill.
    "gpt2": _dense(12, 12, 64, 256, 1024),
    "llama-3.2-1b": _dense(32, 8, 64, *_LONG),
    "llama-3-8b": _dense(32, 8, 128, *_LONG),
    "phi-3-mini": _dense(32, 32, 96, *_LONG),
    "gemma-2b": _dense(8, 1, 256, *_LONG),
    "gemma-2-9b, global": _dense(16, 8, 256, *_LONG, softcap=True),
    "gemma-2-9b, local": _dense(16, 8, 256, 8192, window=4096, softcap=True),
    "gemma-3-4b, local": _dense(8, 4, 256, 2048, 8192, window=1024),
    "mistral-7b-v0.1": _dense(32, 8, 128, 8192, window=4096),
    "gpt-oss-20b, local": _dense(64, 8, 64, *_LONG, window=128),
    # Serving.
    "llama-3-8b, decoding": _cache(32, 8, 128, 1) + _cache(32, 8, 128, *_ALONE, b=1),
    "llama-3-8b, pages": _cache(32, 8, 128, *_STEPS, page_size=16),
    "llama-3.2-1b, pages": _cache(32, 8, 64, *_STEPS, page_size=16)
    + _cache(32, 8, 64, *_FEW, b=1, page_size=16),
    "gpt-oss-20b, local, pages": _cache(64, 8, 64, *_STEPS, page_size=16, window=128),
    # Training.
    "gpt2, training": _dense(12, 12, 64, 1024, backward=True),
    "llama-3-8b, training": _dense(32, 8, 128, *_LONG, backward=True),
    "llama-3-8b, packed training": _dense(32, 8, 128, *_LONG, backward=True, varlen=True),
    "mistral-7b-v0.1, training": _dense(32, 8, 128, 8192, window=4096, backward=True),
}


def dense_configs(capability: tuple[int, int]) -> list[FwdConfig | BwdConfig]:
    """Returns the kernels of dense calls without options on one compute capability: forward, then
    backward, by head dimension, dtype and mask."""
    return [
        config
        for in_use in (configs_in_use, bwd_configs_in_use)
        for head_dim in HEAD_DIMS
        for dtype in DTYPES
        for causal in (False, True)
        for config in in_use(dtype, head_dim, causal, capability)
    ]


def configs_of_calls(capability: tuple[int, int]) -> list[FwdConfig | BwdConfig]:
    """Returns what :data:`CALLS` use on a compute capability beyond :func:`dense_configs`."""
    dense = set(dense_configs(capability))
    found = {call.config(capability): None for calls in CALLS.values() for call in calls}
    return [config for config in found if config not in dense]


def instantiations() -> dict[str, FwdConfig | BwdConfig]:
    """Returns the configurations that are committed as .cu files, by the file's stem: the name of
    the configuration, followed by the tile, and then the stages, where the stem is already taken.
    In the sm80 class dense calls have those of an H100 or H200, and others also those of an A100.
    """
    of_calls = configs_of_calls((9, 0)) + configs_of_calls((8, 0))
    found: dict[str, FwdConfig | BwdConfig] = {}
    for config in dict.fromkeys([*shipped_configs(), *shipped_bwd_configs(), *of_calls]):
        stem = config.name
        if stem in found:
            stem += f"_{config.tile_m}x{config.tile_n}"
        if stem in found:
            stem += f"_s{config.stages}"
        found[stem] = config
    return found
