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
_CACHE = (
    "write new keys and values with an assignment, then call flash_attn_varlen_func with "
    "k_cache.flatten(0, 1), cu_seqlens_k in steps of k_cache.shape[1] and cache_seqlens as "
    f"seqused_k; {_CPU_ONLY}"
)
_PAGES = (
    "gather the pages of each sequence, as by cache[block_table].flatten(1, 2), and pass no "
    f"block_table; {_CPU_ONLY}"
)
_NO_GRADIENT = f"call it under torch.no_grad() or detach the inputs; {_CPU_ONLY}"

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
    Feature("k_cache", "KV cache", False, _CACHE),
    Feature("block_table", "paged KV cache", False, _PAGES),
    Feature("cu_seqlens with requires_grad", "backward of varlen", False, _NO_GRADIENT),
    Feature("softcap with requires_grad", "backward of softcap", False, _NO_GRADIENT),
    Feature("alibi_slopes with requires_grad", "backward of ALiBi", False, _NO_GRADIENT),
)
_FEATURE_OF = {feature.argument: feature for feature in FEATURES}


def no_gradient(argument: str) -> str:
    """:func:`not_on_cuda` of a gradient beside an ``argument`` that is right without one."""
    return not_on_cuda(f"{argument} with requires_grad", True)


def not_on_cuda(argument: str, value: object) -> str:
    """The reason and way out for an ``argument`` that asks the kernels for what they do not do."""
    feature = _FEATURE_OF[argument]
    return (
        f"expected no {feature.title} on CUDA, where it is not supported yet, "
        f"got {argument}={value}; {feature.way_out}"
    )
