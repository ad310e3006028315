"""What works where, as data: behind :func:`flashcute.supports`, the errors and README's matrix."""

from __future__ import annotations

import dataclasses

import torch

from .config import MAX_SMEM_BYTES

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# mma.sync on bfloat16 and cp.async came with compute capability 8.0.
CAPABILITIES = tuple(sorted(MAX_SMEM_BYTES))

# A kernel takes 16 bytes at a time, 8 elements of the two supported dtypes. Head dimensions are
# padded to it, and tensors with other strides than multiples of it are copied.
VECTOR = 8


@dataclasses.dataclass(frozen=True)
class Feature:
    """One optional part of the interface.

    Attributes:
        argument: The argument, or property of an argument, that asks for it.
        title: The row's name in README's matrix.
        cuda: Whether the kernels do it.
        way_out: What to do where the kernels do not.
    """

    argument: str
    title: str
    cuda: bool
    way_out: str = ""


_CPU_ONLY = "CPU tensors support it"
_NO_GRADIENT = f"call it under torch.no_grad() or pass alibi_slopes.detach(); {_CPU_ONLY}"
_NO_GRADIENT_OF_PAGES = (
    f"call it under torch.no_grad() or gather the pages of each sequence into k and v; {_CPU_ONLY}"
)

# CPU tensors support every row.
FEATURES = (
    Feature("causal", "causal mask (bottom-right)", True),
    Feature("num_heads_k", "grouped and multi-query attention", True),
    Feature("return_attn_probs", "log-sum-exp output", True),
    Feature("deterministic", "deterministic results", True),
    Feature("requires_grad", "backward", True),
    Feature("dropout_p", "dropout", True),
    Feature("window_size", "sliding window", True),
    Feature("softcap", "softcap", True),
    Feature("alibi_slopes", "ALiBi", True),
    Feature("sinks", "attention sinks", True),
    Feature("cu_seqlens", "sequences of different lengths (varlen)", True),
    Feature("k_cache", "KV cache", True),
    Feature("block_table", "paged KV cache", True),
    Feature(
        "block_table with requires_grad",
        "backward of keys in pages",
        False,
        _NO_GRADIENT_OF_PAGES,
    ),
    Feature("alibi_slopes with requires_grad", "gradient of ALiBi slopes", False, _NO_GRADIENT),
)
_FEATURE_OF = {feature.argument: feature for feature in FEATURES}


def no_gradient(argument: str) -> str:
    """Returns the text of :func:`not_on_cuda` for an ``argument`` that only lacks a gradient."""
    return not_on_cuda(f"{argument} with requires_grad", True)


def not_on_cuda(argument: str, value: object) -> str:
    """Returns the reason and way out for an ``argument`` that asks for what kernels do not do."""
    feature = _FEATURE_OF[argument]
    return (
        f"expected no {feature.title} on CUDA, where it is not supported yet, "
        f"got {argument}={value}; {feature.way_out}"
    )
