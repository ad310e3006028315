"""The contenders: flashcute and what it is compared with, each as one call on the same tensors.

Peers are called through their ops with views made beforehand, so that neither a transpose nor a
backend context manager is counted against them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

import flashcute

NAMES = ("flashcute", "fa2", "cudnn", "fa3")
aten = torch.ops.aten


def _flashcute(q, k, v, causal):
    return lambda: flashcute.flash_attn_func(q, k, v, causal=causal)


def _fa2(q, k, v, causal):
    """FlashAttention-2 as PyTorch ships it: the flash backend of SDPA, (b, h, s, d) views."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    op = aten._scaled_dot_product_flash_attention.default
    return lambda: op(q, k, v, 0.0, causal)[0].transpose(1, 2)


def _cudnn(q, k, v, causal):
    """cuDNN as PyTorch ships it, without the log-sum-exp, as SDPA calls it for inference."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    op = aten._scaled_dot_product_cudnn_attention.default
    return lambda: op(q, k, v, None, False, 0.0, causal)[0].transpose(1, 2)


def _fa3(q, k, v, causal):
    """FlashAttention-3 from the wheel fa3-fwd, which is built for bf16 only."""
    from fa3_fwd_interface import flash_attn_func

    return lambda: flash_attn_func(q, k, v, causal=causal)


_MAKERS = {"flashcute": _flashcute, "fa2": _fa2, "cudnn": _cudnn, "fa3": _fa3}


def make(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, names: tuple[str, ...] = NAMES
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """Calls that return ``(b, s, h, d)`` output, by name, and why a peer is missing, by name.

    Each call is tried once, so that a peer without this head dim, dtype or GPU drops out with its
    own words instead of ending the sweep. flashcute itself is never dropped.
    """
    calls, missing = {}, {}
    for name in names:
        if name == "fa3" and importlib.util.find_spec("fa3_fwd_interface") is None:
            missing[name] = "fa3_fwd_interface is not importable"
            continue
        call = _MAKERS[name](q, k, v, causal)
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if name == "flashcute":
                raise
            missing[name] = str(error).splitlines()[0]
            continue
        calls[name] = call
    return calls, missing
