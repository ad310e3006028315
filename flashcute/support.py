"""What works where: one table behind :func:`supports`, the errors' texts and README's matrix."""

from __future__ import annotations

import dataclasses

import torch

from .config import MAX_HEAD_DIM, MAX_SMEM_BYTES

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# mma.sync on bfloat16 and cp.async came with compute capability 8.0.
CAPABILITIES = tuple(sorted(MAX_SMEM_BYTES))

# A kernel takes 16 bytes at a time, 8 elements of the two supported dtypes.
HEAD_DIM_MULTIPLE = 8


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

# CPU tensors, computed by the reference, support every row.
FEATURES = (
    Feature("causal", "causal mask (bottom-right)", True),
    Feature("num_heads_k", "grouped and multi-query attention", True),
    Feature("return_attn_probs", "log-sum-exp output", True),
    Feature("deterministic", "deterministic forward", True),
    Feature(
        "requires_grad",
        "backward",
        False,
        f"call it under torch.no_grad() or detach the inputs; {_CPU_ONLY}",
    ),
    Feature("dropout_p", "dropout", False, f"pass dropout_p=0.0; {_CPU_ONLY}"),
    Feature("window_size", "sliding window", False, f"pass window_size=(-1, -1); {_CPU_ONLY}"),
    Feature("softcap", "softcap", False, f"pass softcap=0.0; {_CPU_ONLY}"),
    Feature("alibi_slopes", "ALiBi", False, f"pass alibi_slopes=None; {_CPU_ONLY}"),
)
_FEATURE_OF = {feature.argument: feature for feature in FEATURES}


def not_on_cuda(argument: str, value: object) -> str:
    """The reason and way out for an ``argument`` that asks the kernels for what they do not do."""
    feature = _FEATURE_OF[argument]
    return (
        f"expected no {feature.title} on CUDA, where it is not supported yet, "
        f"got {argument}={value}; {feature.way_out}"
    )


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of :func:`supports`: truthy when it works, else with every reason why not."""

    ok: bool
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.ok


def _invalid_options(dropout_p, window_size, softcap, softmax_scale) -> list[str]:
    """What the functions themselves would say of values that are wrong on every device."""
    from . import flash_attn_interface as interface

    reasons = []
    for check, *values in (
        (interface._check_dropout, dropout_p),
        (interface._check_window, window_size),
        (interface._check_softcap, softcap),
        (interface._check_scale, softmax_scale, 1),
    ):
        try:
            check("supports", *values)
        except (TypeError, ValueError) as error:
            reasons.append(str(error))
    return reasons


def supports(
    *,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    num_heads: int = 1,
    num_heads_k: int | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: object = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    requires_grad: bool = False,
    capability: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
) -> Support:
    """Whether :func:`flashcute.flash_attn_func` would compute this, without touching a GPU.

    Args:
        device: ``"cuda"`` or ``"cpu"``; an index is ignored, see ``capability``.
        dtype: Of q, k and v.
        head_dim: Last dimension of q, k and v.
        num_heads: Query heads.
        num_heads_k: Key and value heads; None means ``num_heads``.
        causal: As in :func:`flashcute.flash_attn_func`, and so for the arguments that follow.
        dropout_p: Probability.
        window_size: (left, right), -1 for unlimited.
        softcap: 0.0 for none.
        alibi_slopes: Anything but None asks for ALiBi.
        deterministic: Bitwise repeatable results.
        return_attn_probs: Also return the log-sum-exp.
        requires_grad: Whether a gradient is asked for.
        capability: Compute capability of the GPU, e.g. ``(9, 0)``; None does not check it.
        softmax_scale: Factor on the scores; None for 1/sqrt(head_dim).

    Returns:
        A :class:`Support`; ``reasons`` name each argument, its value and what is supported.
    """
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        return Support(False, (f"expected device 'cuda' or 'cpu', got device={str(device)!r}",))
    heads_k = num_heads if num_heads_k is None else num_heads_k
    reasons = []
    dtypes = CUDA_DTYPES if kind == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        reasons.append(f"expected dtype in {dtypes} on {kind}, got dtype={dtype}")
    if heads_k < 1 or num_heads < 1 or num_heads % heads_k:
        reasons.append(
            "expected num_heads divisible by num_heads_k, "
            f"got num_heads={num_heads} and num_heads_k={heads_k}"
        )
    if head_dim < 1:
        reasons.append(f"expected head_dim >= 1, got head_dim={head_dim}")
    invalid = _invalid_options(dropout_p, window_size, softcap, softmax_scale)
    reasons += invalid
    if kind == "cpu" or invalid:
        return Support(not reasons, tuple(reasons))
    if softmax_scale is not None and softmax_scale <= 0:
        reasons.append(f"expected softmax_scale > 0 on cuda, got softmax_scale={softmax_scale}")

    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        reasons.append(
            f"expected head_dim to be a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, "
            f"got head_dim={head_dim}"
        )
    if capability is not None and capability not in CAPABILITIES:
        reasons.append(f"expected capability in {CAPABILITIES}, got capability={capability}")
    asked = {
        "causal": (causal, causal),
        "num_heads_k": (heads_k != num_heads, heads_k),
        "return_attn_probs": (return_attn_probs, return_attn_probs),
        "deterministic": (deterministic, deterministic),
        "requires_grad": (requires_grad, requires_grad),
        "dropout_p": (dropout_p != 0.0, dropout_p),
        "window_size": (tuple(window_size) != (-1, -1), window_size),
        "softcap": (softcap != 0.0, softcap),
        "alibi_slopes": (alibi_slopes is not None, "(a tensor)"),
    }
    for feature in FEATURES:
        wanted, value = asked[feature.argument]
        if wanted and not feature.cuda:
            reasons.append(not_on_cuda(feature.argument, value))
    return Support(not reasons, tuple(reasons))


def support_matrix() -> str:
    """The Markdown table of README, generated from the same data as :func:`supports`."""

    def names(dtypes: tuple[torch.dtype, ...]) -> str:
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

    major, minor = CAPABILITIES[0]
    rows = [
        ("", "CUDA", "CPU (reference)"),
        ("---", "---", "---"),
        ("dtypes", names(CUDA_DTYPES), names(CPU_DTYPES)),
        ("head dimension", f"multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}", "any"),
        ("compute capability", f"{major}.{minor} and newer", "-"),
        *((feature.title, "yes" if feature.cuda else "not yet", "yes") for feature in FEATURES),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
