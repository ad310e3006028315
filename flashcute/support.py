"""What works where, asked without a tensor: :func:`supports`, and README's matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from . import checks
from .checks_kvcache import check_table, no_gradient
from .checks_varlen import check_cu_seqlens
from .config import MAX_HEAD_DIM
from .features import CAPABILITIES, CPU_DTYPES, CUDA_DTYPES, FEATURES, VECTOR, not_on_cuda


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of :func:`supports`: truthy when it works, else with every reason why not."""

    ok: bool
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.ok


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
    sinks: object = None,
    cu_seqlens: object = None,
    k_cache: object = None,
    block_table: object = None,
) -> Support:
    """Returns whether :func:`flashcute.flash_attn_func` would compute this; touches no GPU.

    Args:
        device: ``"cuda"`` or ``"cpu"``; an index is ignored, see ``capability``.
        dtype: Of q, k and v.
        head_dim: Last dimension of q, k and v.
        num_heads: Query heads.
        num_heads_k: Key and value heads; None means ``num_heads``.
        causal: As in :func:`flashcute.flash_attn_func`, as are the arguments that follow.
        dropout_p: Probability.
        window_size: (left, right), -1 for unlimited.
        softcap: 0.0 for none.
        alibi_slopes: A tensor of shape (num_heads,) or (batch, num_heads), or True for any, asks
            for ALiBi.
        deterministic: Bitwise repeatable results.
        return_attn_probs: Also return the log-sum-exp.
        requires_grad: Whether a gradient is asked for.
        capability: Compute capability of the GPU, e.g. ``(9, 0)``; None does not check it. On the
            CPU any will do.
        softmax_scale: Factor on the scores; None for 1/sqrt(head_dim).
        sinks: A tensor or True asks for attention sinks.
        cu_seqlens: A tensor or True asks about :func:`flashcute.flash_attn_varlen_func`.
        k_cache: A tensor or True asks about :func:`flashcute.flash_attn_with_kvcache`.
        block_table: A tensor or True asks for keys and values in pages, of either function.

    Returns:
        A :class:`Support`; ``reasons`` name each argument, its value and what is supported, in
        the words of the error that the call would raise. A value of a wrong type is a reason, too,
        not an exception.
    """
    reasons: list[str] = []

    def passes(check: Callable[..., object], *args: object) -> object:
        """Returns what ``check`` returns, or None after noting what it objects to."""
        try:
            return check("supports", *args)
        except (TypeError, ValueError, NotImplementedError) as error:
            reasons.append(str(error).removeprefix("supports: "))
            return None

    place = passes(checks.check_device, device)
    if place is not None:
        passes(checks.check_dtype, "dtype", dtype, place)
    d = passes(checks.check_size, "head_dim", head_dim)
    h = passes(checks.check_size, "num_heads", num_heads)
    h_k = h if num_heads_k is None else passes(checks.check_size, "num_heads_k", num_heads_k)
    if h is not None and h_k is not None and h % h_k:
        reasons.append(
            "expected num_heads divisible by num_heads_k, "
            f"got num_heads={h} and num_heads_k={h_k}; repeat or drop heads"
        )
    flags = {
        "causal": causal,
        "deterministic": deterministic,
        "return_attn_probs": return_attn_probs,
        "requires_grad": requires_grad,
    }
    asked = {name: passes(checks.check_flag, name, value) for name, value in flags.items()}
    asked["num_heads_k"] = h_k != h
    given_dropout, dropout_p = dropout_p, passes(checks.check_dropout, dropout_p)
    softcap = passes(checks.check_softcap, softcap)
    window_size = passes(checks.check_window, window_size)
    scale = passes(checks.check_scale, softmax_scale, d or 1)
    if capability is not None:
        on_cpu = place is not None and place.type == "cpu"
        passes(checks.check_capability, capability, None if on_cpu else CAPABILITIES)
    given = {"alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens": cu_seqlens}
    given |= {"k_cache": k_cache, "block_table": block_table}
    for name, tensor in given.items():
        wrong = len(reasons)
        if tensor is not None and tensor is not True:
            passes(_check_tensor, name, tensor, h, dtype)
        asked[name] = tensor is not None and len(reasons) == wrong and "(a tensor)"
    if asked["k_cache"]:
        reasons += _beside_a_cache(asked, given_dropout if dropout_p else dropout_p)
        if isinstance(k_cache, torch.Tensor):
            reasons += _of_the_cache(k_cache, d, h_k, dtype)
    if place is None or place.type == "cpu":
        return Support(not reasons, tuple(reasons))

    if d is not None:
        passes(checks.check_kernel_head_dim, d)
    if scale is not None:
        passes(checks.check_kernel_scale, scale)
        if softcap is not None:
            passes(checks.check_kernel_scores, scale, softcap, asked["alibi_slopes"])
    asked["dropout_p"] = dropout_p
    asked["softcap"] = softcap
    asked["window_size"] = window_size not in (None, (-1, -1)) and window_size
    wants_slopes = getattr(alibi_slopes, "requires_grad", False)
    asked["alibi_slopes with requires_grad"] = bool(asked["alibi_slopes"]) and wants_slopes
    in_pages = bool(asked["block_table"]) and not asked["k_cache"]  # a cache has its reason above
    asked["block_table with requires_grad"] = in_pages and asked["requires_grad"]
    for feature in FEATURES:
        value = asked[feature.argument]
        if value and not feature.cuda:
            reasons.append(not_on_cuda(feature.argument, value))
    return Support(not reasons, tuple(reasons))


def _of_the_cache(k_cache: torch.Tensor, d: int | None, h_k: int | None, dtype) -> list[str]:
    """Returns the reasons why a cache is not for these heads."""
    *_, heads, head_dim = k_cache.shape
    properties = (
        ("head_dim", d, head_dim),
        ("num_heads_k", h_k, heads),
        ("dtype", dtype, k_cache.dtype),
    )
    return [
        f"expected k_cache of {name} {asked}, got {found}; ask for what the cache has"
        for name, asked, found in properties
        if asked is not None and asked != found
    ]


def _beside_a_cache(asked: dict[str, object], dropout_p) -> list[str]:
    """Returns reasons for what flash_attn_with_kvcache has no argument for, or refuses."""
    reasons = [no_gradient("requires_grad=True")] if asked["requires_grad"] else []
    others = ("cu_seqlens", "deterministic", "return_attn_probs")
    for name, value in (("dropout_p", dropout_p), *((name, asked[name]) for name in others)):
        if value:
            reasons.append(
                f"expected no {name} with k_cache, which flash_attn_with_kvcache does not take, "
                f"got {name}={value}; leave it out"
            )
    return reasons


def _check_tensor(fn: str, name: str, tensor, h: int | None, dtype) -> None:
    """Checks what the calls require of a tensor for any q, with h query heads if h is known."""
    checks.check_kind(fn, name, tensor)
    if name == "cu_seqlens":
        check_cu_seqlens(fn, name, tensor)
    elif name == "k_cache":
        checks.check_rank(fn, name, tensor, "(batch_cache, seqlen_cache, heads, head_dim)")
    elif name == "block_table":
        check_table(fn, tensor, tensor, tensor.shape[0] if tensor.dim() == 2 else "batch")
    elif h is not None and name == "alibi_slopes":
        checks.check_slopes(fn, tensor, h)
    elif h is not None:
        checks.check_logits(fn, tensor, h, dtype)


def support_matrix() -> str:
    """Returns README's Markdown table, generated from the same data as :func:`supports`."""

    def names(dtypes: tuple[torch.dtype, ...]) -> str:
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)

    capabilities = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
    rows = [
        ("", "CUDA", "CPU"),
        ("---", "---", "---"),
        ("dtypes", names(CUDA_DTYPES), names(CPU_DTYPES)),
        ("head dimension", f"up to {MAX_HEAD_DIM} (padded to a multiple of {VECTOR})", "any"),
        ("compute capability", capabilities, "-"),
        *((feature.title, "yes" if feature.cuda else "not yet", "yes") for feature in FEATURES),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
