"""What train_gpt.py trains: text, a small GPT on bytes, and the attention functions it takes."""

from __future__ import annotations

import math
import pathlib
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashcute
from flashcute import distributed as fd

VOCABULARY = 256  # bytes
HEAD_DIM = 64

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def flashcute_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes causal attention of ``(b, s, h, d)`` tensors by flashcute."""
    return flashcute.flash_attn_func(q, k, v, causal=True)


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes causal attention by PyTorch's SDPA, with its own choice of backend."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def other_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes causal attention by a PyTorch kernel that SDPA does not choose by itself."""
    backend = SDPBackend.EFFICIENT_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        return sdpa_attention(q, k, v)


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes causal ring attention of sequences split over all processes in zigzag order."""
    return fd.ring_flash_attn_func(q, k, v, causal=True)


def allgather_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes causal attention of sequences split in zigzag order, with gathered keys."""
    return fd.allgather_flash_attn_func(q, k, v, causal=True)


def read_text() -> torch.Tensor:
    """Returns the bytes of Python's help topics and standard library modules: uint8, ``(n)``."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    topics = pydoc_data.topics.topics
    parts = [topics[name].encode() for name in sorted(topics)]
    parts += [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a layer norm and beside a residual."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = HEAD_DIM * heads
        self.attention: Attention = sdpa_attention  # GPT.use() sets it
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        # No biases: the exact gradient of the keys' bias is 0, and what is computed of it is noise.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, HEAD_DIM))  # (b, s, 3, h, d)
        x = x + self.out(self.attention(*qkv.unbind(2)).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder of GPT-2's design without biases and dropout, on bytes."""

    def __init__(self, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        width = HEAD_DIM * heads
        self.split = False
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                inwards = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if inwards else 1))

    def use(self, attention: Attention, split: bool = False) -> GPT:
        """Sets the attention of all layers, and whether sequences are split over all processes."""
        self.split = split
        for block in self.blocks:
            block.attention = attention
        return self

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, in nats a byte, of predicting each token from those before it.

        ``batch`` is ``(b, s + 1)`` tokens. If sequences are split, the result is this process's
        part: the sum over all processes is the mean.
        """
        given, wanted = batch[:, :-1], batch[:, 1:]
        positions = torch.arange(given.shape[1], device=batch.device)
        world = 1
        if self.split:
            rank, world = dist.get_rank(), dist.get_world_size()
            positions = fd.zigzag_positions(len(positions), rank, world, device=batch.device)
            given, wanted = (fd.zigzag_split(x, rank, world) for x in (given, wanted))
        x = self.tokens(given) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        # In the weights' dtype, not autocast's.
        logits = self.head(self.norm(x)).to(self.norm.weight.dtype)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / world

    def sum_over_processes(self, found: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns the loss and the gradients of all tokens, from those of this process's tokens.

        All processes have the same weights, so a full gradient is the sum of the processes'
        gradients.
        """
        if not self.split:
            return found
        flat = torch.cat([x.flatten() for x in found])
        dist.all_reduce(flat)
        parts = flat.split([x.numel() for x in found])
        return [x.view_as(y) for x, y in zip(parts, found, strict=True)]
