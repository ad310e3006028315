"""Attention shapes of public models, without decoding one token at a time.

Sizes are those of the configuration that each line names. The batch is a usual one for serving, or
gives about 16k query tokens. Only the shape is the model's: softcap, windows, sinks and biases are
left out.
"""

from __future__ import annotations

import dataclasses

from ..benchmarking import Shape
from . import options


def _full(b: int, s: int, h: int, d: int) -> Shape:
    return Shape(b, s, s, h, h, d, causal=False)


def _causal(b: int, s: int, h: int, h_k: int, d: int) -> Shape:
    return Shape(b, s, s, h, h_k, d, causal=True)


MODELS: dict[str, Shape] = {
    # Vision encoders: patches of an image and, where the model has one, a class token.
    "vit-b-16": _full(84, 197, 12, 64),  # google/vit-base-patch16-224
    "vit-l-14": _full(64, 257, 16, 64),  # openai/clip-vit-large-patch14
    "vit-h-14": _full(64, 257, 16, 80),  # laion/CLIP-ViT-H-14-laion2B-s32B-b79K
    "siglip-so400m": _full(22, 729, 16, 72),  # google/siglip-so400m-patch14-384
    "dinov2-g": _full(12, 1370, 24, 64),  # facebook/dinov2-giant, 518 pixels
    "internvit-6b": _full(16, 1025, 25, 128),  # OpenGVLab/InternViT-6B-448px-V1-5
    # Text encoders.
    "bert-base-128": _full(128, 128, 12, 64),  # google-bert/bert-base-uncased
    "bert-base-256": _full(64, 256, 12, 64),
    "bert-base-512": _full(32, 512, 12, 64),
    "minilm-128": _full(128, 128, 12, 32),  # sentence-transformers/all-MiniLM-L6-v2
    "minilm-256": _full(64, 256, 12, 32),
    "modernbert-1k": _full(16, 1024, 12, 64),  # answerdotai/ModernBERT-base, its global layers
    "modernbert-8k": _full(2, 8192, 12, 64),
    # Speech: 30 s of audio.
    "whisper-large": _full(11, 1500, 20, 64),  # openai/whisper-large-v3, encoder
    # Diffusion: 512 pixels (SD 1.5) or 1024, keys of a cross attention are 77 tokens of text.
    "sd15-4096": _full(4, 4096, 8, 40),  # stable-diffusion-v1-5, its UNet's three resolutions
    "sd15-1024": _full(16, 1024, 8, 80),
    "sd15-256": _full(64, 256, 8, 160),
    "sdxl-4096": _full(4, 4096, 10, 64),  # stabilityai/stable-diffusion-xl-base-1.0
    "sdxl-1024": _full(16, 1024, 20, 64),
    "sdxl-cross": Shape(4, 4096, 77, 10, 10, 64, causal=False),
    "sd3-medium": _full(4, 4096 + 333, 24, 64),  # stabilityai/stable-diffusion-3-medium
    "flux-dev": _full(1, 4096 + 512, 24, 128),  # black-forest-labs/FLUX.1-dev
    "cogvideox-2b": _full(1, 17550 + 226, 30, 64),  # THUDM/CogVideoX-2b: 480 x 720, 49 frames
    # Decoders, prefill or training.
    "gpt2-1k": _causal(16, 1024, 12, 12, 64),  # openai-community/gpt2
    "llama-3-8b-2k": _causal(8, 2048, 32, 8, 128),  # meta-llama/Meta-Llama-3-8B
    "llama-3-8b-8k": _causal(2, 8192, 32, 8, 128),
    "llama-3-70b-4k": _causal(4, 4096, 64, 8, 128),  # meta-llama/Meta-Llama-3-70B
    "llama-3.2-1b-8k": _causal(2, 8192, 32, 8, 64),  # meta-llama/Llama-3.2-1B
    "mistral-7b-4k": _causal(4, 4096, 32, 8, 128),  # mistralai/Mistral-7B-v0.3
    "qwen2.5-7b-4k": _causal(4, 4096, 28, 4, 128),  # Qwen/Qwen2.5-7B
    "qwen3-14b-4k": _causal(4, 4096, 40, 8, 128),  # Qwen/Qwen3-14B
    "gemma-2b-2k": _causal(8, 2048, 8, 1, 256),  # google/gemma-2b
    "gemma-2-9b-4k": _causal(4, 4096, 16, 8, 256),  # google/gemma-2-9b
    "8-heads-of-256": _full(4, 4096, 8, 256),  # the widest heads without a mask or a group
    "phi-2-2k": _causal(8, 2048, 32, 32, 80),  # microsoft/phi-2
    "phi-3-mini-4k": _causal(4, 4096, 32, 32, 96),  # microsoft/Phi-3-mini-4k-instruct
    "falcon-7b-2k": _causal(8, 2048, 71, 1, 64),  # tiiuae/falcon-7b
    "gpt-oss-20b-4k": _causal(4, 4096, 64, 8, 64),  # openai/gpt-oss-20b, its full layers
    "stablelm-2-1.6b-4k": _causal(4, 4096, 32, 32, 64),  # stabilityai/stablelm-2-1_6b
    "stablelm-3b-4k": _causal(4, 4096, 32, 32, 80),  # stabilityai/stablelm-3b-4e1t
    # Chunked prefill, 2048 tokens a step, as serving engines do, in the middle of a prompt.
    "chunk-256-of-4k": Shape(8, 256, 4096, 32, 8, 128, causal=True),  # Llama-3-8B's heads
    "chunk-512-of-8k": Shape(4, 512, 8192, 32, 8, 128, causal=True),
    "chunk-2k-of-32k": Shape(1, 2048, 32768, 32, 8, 128, causal=True),
    # A few tokens at once, as speculative decoding verifies them.
    "verify-4-of-4k": Shape(16, 4, 4096, 32, 8, 128, causal=True),
    "verify-8-of-8k": Shape(16, 8, 8192, 32, 8, 128, causal=True),
}


def select(names: list[str]) -> dict[str, Shape]:
    """Returns the models and options whose names contain one of ``names``.

    ``"models"`` and ``"options"`` each select all of theirs.

    Raises:
        ValueError: if one of ``names`` is part of no name.
    """
    every, groups = MODELS | options.OPTIONS, {"models": MODELS, "options": options.OPTIONS}
    chosen = {
        name: [x for x in groups.get(name, every) if name in groups or name in x] for name in names
    }
    for name, found in chosen.items():
        if not found:
            raise ValueError(
                "flashcute bench: expected --shapes sweep, models, options or part of the name of "
                f"one of these, got {name!r}; the models are {', '.join(MODELS)}; the options are "
                f"{', '.join(options.OPTIONS)}"
            )
    wanted = {x for found in chosen.values() for x in found}
    return {name: shape for name, shape in every.items() if name in wanted}


def shrink(shape: Shape, tokens: int) -> Shape:
    """Returns the shape with lengths and total query tokens of at most ``tokens``, for a CPU.

    Heads, head dimension, mask and, where possible, the ratio of the lengths stay.
    """
    if isinstance(shape, options.Option):
        return options.shrink(shape, tokens)
    part = min(1.0, tokens / max(shape.seqlen_q, shape.seqlen_k))
    seqlen_q = max(min(4, shape.seqlen_q), int(part * shape.seqlen_q))
    seqlen_k = max(min(4, shape.seqlen_k), int(part * shape.seqlen_k))
    b = max(1, min(shape.b, tokens // seqlen_q))
    return dataclasses.replace(shape, b=b, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
