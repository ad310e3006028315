"""FlashAttention's Python interface, with flash-attn 2's names, signatures and layouts.

CUDA tensors go to the kernels, meta and fake tensors to the operator's fake, CPU tensors to
:mod:`flashcute.cpu`, which takes every argument. All are differentiable. Whatever is not supported
raises an error that names the argument, its value, what is supported and a way out: the checks are
those of :mod:`flashcute.checks`; the binding repeats only what memory safety needs.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from . import cpu, cpu_operator, cpu_ops, env, ops
from .autograd import check_slopes
from .checks import (
    UNLIMITED,
    bounded_window,
    check_alibi,
    check_dropout,
    check_dtype,
    check_flag,
    check_for_kernels,
    check_kernel_scores,
    check_no_tangent,
    check_packed,
    check_scale,
    check_sinks,
    check_softcap,
    check_tensors,
    check_window,
)
from .features import CPU_DTYPES, VECTOR
from .flash_attn_kvcache import flash_attn_with_kvcache  # noqa: F401 - flash-attn has it here
from .flash_attn_varlen import (  # noqa: F401 - flash-attn has them here
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .loading import in_place, loadable, padded, regular

env.read()  # a wrong variable is an error, also where nothing is built


def _launch(
    q, k, v, scale, causal, window_size, sinks, *options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and log-sum-exp of tensors that kernels can read; options as in ops.attend."""
    if sinks is not None:
        sinks = sinks.float().contiguous()
    return ops.attend(q, k, v, scale, causal, bounded_window(window_size), sinks, *options)


def _attend(
    fn: str,
    names: tuple[str, str, str],
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    deterministic,
    return_attn_probs,
    sinks,
):
    d = check_tensors(fn, names, q, k, v)
    scale = check_scale(fn, softmax_scale, d)
    # The identity tests are a fast path for the values that nearly every call passes.
    if causal is not False and causal is not True:
        causal = check_flag(fn, "causal", causal)
    if deterministic is not False:
        deterministic = check_flag(fn, "deterministic", deterministic)
    if return_attn_probs is not False:
        return_attn_probs = check_flag(fn, "return_attn_probs", return_attn_probs)
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = check_dropout(fn, dropout_p)
    if type(softcap) is not float or softcap != 0.0:
        softcap = check_softcap(fn, softcap)
    if window_size is not UNLIMITED:
        window_size = check_window(fn, window_size)
    if alibi_slopes is not None:
        check_alibi(fn, alibi_slopes, q, q.shape[0])
    if sinks is not None:
        check_sinks(fn, sinks, q)

    if q.is_cpu:
        if q.dtype not in CPU_DTYPES:
            check_dtype(fn, f"{names[0]}.dtype", q.dtype, q.device)
        if not q.is_contiguous() and (d % VECTOR or not regular(q)):
            q = q.contiguous()  # out is laid out as q: it must be as on CUDA
        if (
            dropout_p == softcap == 0.0
            and alibi_slopes is None
            and return_attn_probs is False
            and not cpu_operator.is_traced(q)
        ):
            if causal is False and window_size is UNLIMITED and sinks is None:
                out = cpu.attend_few_scores(q, k, v, scale)
                if out is not None:
                    return out
            flash = cpu.attend_by_flash(q, k, v, scale, causal, window_size, sinks)
            if flash is not None:
                return flash[0]
        outputs = cpu_ops.attend(
            q, k, v, softmax_scale=scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
            return_dmask=return_attn_probs,
        )  # fmt: skip
        return outputs if return_attn_probs else outputs[0]

    check_for_kernels(fn, names[0], q, d, scale)
    if forward_ad._current_level >= 0:
        check_no_tangent(fn, (*names, "sinks", "alibi_slopes"), q, k, v, sinks, alibi_slopes)
    if softcap != 0.0 or alibi_slopes is not None:
        check_kernel_scores(fn, scale, softcap, alibi_slopes is not None)
        if alibi_slopes is not None:
            check_slopes(fn, alibi_slopes)
            alibi_slopes = alibi_slopes.contiguous()
    rng_state = cpu_operator.draw_state(q) if dropout_p != 0.0 else None
    if d % VECTOR:
        q, k, v = (padded(fn, *pair) for pair in zip(names, (q, k, v), strict=True))
    elif not in_place(q, k, v):
        q, k, v = (loadable(fn, *pair) for pair in zip(names, (q, k, v), strict=True))
    if (
        dropout_p == softcap == 0.0
        and sinks is None
        and alibi_slopes is None
        and not deterministic
        and window_size == UNLIMITED
    ):
        out, lse = ops.fwd(q, k, v, scale, causal)
    else:
        options = window_size, sinks, softcap, alibi_slopes, deterministic, rng_state, dropout_p
        out, lse = _launch(q, k, v, scale, causal, *options)
    if d % VECTOR:
        out = out[..., :d].clone(memory_format=torch.contiguous_format)
    if not return_attn_probs:
        return out
    dmask = q.new_empty(0)
    if dropout_p != 0.0:  # the reference computes dmask: kernels never hold all weights
        _, _, dmask = cpu_ops.attend(
            q, k, v, softmax_scale=scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, rng_state=rng_state,
            return_dmask=True,
        )  # fmt: skip
    return out, lse, dmask


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes exact attention, softmax(q k^T * softmax_scale) v, without storing the scores.

    Grouped-query attention: query head i attends to key and value head i // (h // h_k). Masks are
    aligned to the bottom-right corner: query i sees key j if j <= i + seqlen_k - seqlen_q. A row
    that sees no key has output 0 and log-sum-exp -inf.

    Dropout draws anew in each call, from torch's default generator of the device: torch.manual_seed
    makes it repeatable, and a captured CUDA graph draws anew in each replay. It leaves the
    log-sum-exp as it is.

    On CUDA: float16 or bfloat16, float32 accumulation, head_dim up to 256. Out and the log-sum-exp
    have first derivatives with respect to q, k, v and sinks; alibi_slopes have no gradient. Results
    and the gradients of k and v are bitwise repeatable on GPUs with equally many SMs, the gradient
    of q only with ``deterministic=True``.

    Scores on CUDA: outputs are right for all finite scores, within what float32 resolves. Gradients
    lose accuracy where scores are large, as weights are computed again from the log-sum-exp L in
    float32: a weight of the backward is off by a factor of at most exp(4e-7 * abs(L)), 0.4 % where
    L is 1e4, 4 % at 1e5. From 1e7 on gradients may be Inf or NaN.

    Memory of a backward on CUDA, in addition to the gradients: 2 floats for each row of each query
    head, and float32 accumulators of dq, b * h * seqlen_q * head_dim elements, with lengths rounded
    up to 128 and head dimensions to 32, 64, 96, 128, 192 or 256. The sm80 class has no accumulators
    for gradients of q alone, or of k and v alone, nor above head dimension 128 on GPUs with less
    than 163 KB of shared memory. The sm90 class has up to 17 MB more for parts of gradients of k
    and v of long queries without a mask. Where few key heads have many query heads, the query heads
    are divided into parts, so that all SMs have work. The parts' float32 gradients of k and v take
    at most 8 KB * head_dim per SM, which is 138 MB on an H100 at head dimension 128, and twice that
    in the sm80 class up to head dimension 64. The number of parts, and with it the last bits of the
    sums, depends on shapes and SMs.

    The CPU supports every argument and computes in float32 (float64 for float64 inputs). Eager
    calls are differentiable to any order by torch.autograd; under torch.func, torch.compile and
    torch.export there is one derivative, and a derivative of a gradient raises NotImplementedError
    or torch's own error. PyTorch's flash attention computes calls with no more than a scale, a
    window and sinks; a plain PyTorch reference, which is slower and stores scores, computes the
    others. Calls of one batch entry without a gradient also store up to 2**16 scores, as that is
    faster.

    Any strides are allowed. The kernels read a tensor in place if its head_dim is a multiple of 8,
    its last stride 1, its other strides multiples of 8 elements, and its start a multiple of 16
    bytes. Any other tensor is copied once in each call, a head_dim padded with zeros. The logger
    ``flashcute`` says at level DEBUG what is copied, and why; a compiled function copies silently.

    Args:
        q: (b, seqlen_q, h, head_dim).
        k: (b, seqlen_k, h_k, head_dim), of q's dtype and device; h is a multiple of h_k.
        v: As k.
        dropout_p: Probability with which an attention weight is dropped, from 0 to 1 - 2**-16; it
            is rounded to a multiple of 2**-16. What is kept is divided by 1 - dropout_p.
        softmax_scale: Factor on the scores; None for 1 / sqrt(head_dim).
        causal: Whether to mask keys after the query. A numpy scalar counts as the Python bool or
            number that it holds, here and in the other options.
        window_size: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1 for unlimited.
        softcap: Scores become softcap * tanh(scores / softcap); 0.0 for none.
        alibi_slopes: float32 (h,) or (b, h): adds -slope * |i + seqlen_k - seqlen_q - j|.
        deterministic: Ask for bitwise repeatable gradients, as
            ``torch.use_deterministic_algorithms(True)`` does, too. Without it dq is summed
            up in an order that varies. With it a backward on an H100 has 0.96 of its speed on
            average from 2048 tokens on, under a causal mask 0.89 to 1.00; in the sm80 class, on an
            H200, 0.95, with softcap, ALiBi or dropout 0.71 to 0.94. Results are repeatable in any
            case.
        return_attn_probs: Also return the log-sum-exp and the dropout pattern.
        sinks: float32 or of q's dtype, (h,): for each query head one more logit, in units of the
            scaled scores, that joins the softmax's denominator and has no value; learnable. With L
            the log-sum-exp of a row's scores, its output is that without a sink times
            exp(L) / (exp(L) + exp(sink)), and its log-sum-exp is log(exp(L) + exp(sink)). A row
            that sees no key has output 0 and log-sum-exp sink; a sink of -inf is none.

    Returns:
        out: Like q; on every device contiguous where the kernels would copy q for its head_dim or
        strides. With ``return_attn_probs`` also ``softmax_lse``, float32 (b, h, seqlen_q), the
        natural log-sum-exp of each row's scores, and ``S_dmask``: the attention weights with a
        minus sign where dropped, (b, h, seqlen_q, seqlen_k), or of shape (0,) without dropout. It
        is for tests, as it costs a further computation in plain PyTorch.

    Raises:
        TypeError: for a wrong type or dtype, and for a tensor that is not dense.
        ValueError: for a wrong value, shape or device.
        NotImplementedError: for what is not supported on the tensors' device yet.

    Source: Dao, FlashAttention-2, arXiv:2307.08691.
    """
    return _attend(
        "flash_attn_func",
        ("q", "k", "v"),
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`flash_attn_func` of k and v stored together, read in place, without a copy.

    Args:
        q: (b, seqlen_q, h, head_dim).
        kv: (b, seqlen_k, 2, h_k, head_dim), k first.

    The other arguments, the result and the errors are those of :func:`flash_attn_func`.
    """
    fn = "flash_attn_kvpacked_func"
    k, v = _unpack(fn, "kv", kv, 2)
    return _attend(
        fn,
        ("q", "kv[:, :, 0]", "kv[:, :, 1]"),
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`flash_attn_func` of q, k and v stored together and read in place, uncopied.

    Args:
        qkv: (b, seqlen, 3, h, head_dim), in the order q, k, v.

    The other arguments, the result and the errors are those of :func:`flash_attn_func`.
    """
    fn = "flash_attn_qkvpacked_func"
    q, k, v = _unpack(fn, "qkv", qkv, 3)
    return _attend(
        fn,
        ("qkv[:, :, 0]", "qkv[:, :, 1]", "qkv[:, :, 2]"),
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        sinks,
    )


def _unpack(fn: str, name: str, packed, count: int) -> tuple[torch.Tensor, ...]:
    check_packed(fn, name, packed, count)
    return packed.unbind(2)
