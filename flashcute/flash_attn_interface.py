"""FlashAttention's Python interface, with flash-attn 2's names, signatures and layouts.

CUDA tensors go to the kernels, meta and fake tensors to the operator's fake, CPU tensors to the
reference, which takes every argument and is differentiable. Whatever is not supported raises an
error that names the argument, its value, what is supported and a way out. This module is where the
precise errors live; the binding repeats only what memory safety needs.
"""

from __future__ import annotations

import math
import reprlib

import torch
from torch._subclasses import FakeTensor

from . import env, ops
from .config import MAX_HEAD_DIM
from .reference import attention_ref
from .support import CPU_DTYPES, CUDA_DTYPES, HEAD_DIM_MULTIPLE, not_on_cuda

# Normal float32 range of softmax_scale and softmax_scale * log2(e), which the kernels compute with.
_MIN_SCALE = 1.1754944e-38
_MAX_SCALE = 2.3e38

_UNLIMITED = (-1, -1)

env.read()  # a wrong variable is an error, also where nothing is built


def _check_tensors(fn: str, names: tuple[str, str, str], q, k, v) -> None:
    """Type, rank, shape, device and dtype: what holds on every device.

    Written flat, and each property read once: this is a fifth of a call's time on the host.
    """
    q_name, k_name, v_name = names
    _check_rank(fn, q_name, q)
    _check_rank(fn, k_name, k)
    _check_rank(fn, v_name, v)
    b, _, h, d = q_shape = q.shape
    b_k, _, h_k, d_k = k_shape = k.shape
    if b_k != b:
        raise ValueError(
            f"{fn}: expected {k_name} of {q_name}'s batch size {b}, "
            f"got {k_name}.shape={tuple(k_shape)}; expand it to the same batch"
        )
    if d_k != d:
        raise ValueError(
            f"{fn}: expected {k_name} of {q_name}'s head_dim {d}, "
            f"got {k_name}.shape={tuple(k_shape)}; pad the smaller one with zeros"
        )
    if v.shape != k_shape:
        if v.shape[:3] == k_shape[:3]:
            raise NotImplementedError(
                f"{fn}: expected {v_name} of {k_name}'s head_dim {d}, "
                f"got {v_name}.shape={tuple(v.shape)}; pad the smaller one with zeros"
            )
        raise ValueError(
            f"{fn}: expected {v_name} of {k_name}'s shape {tuple(k_shape)}, "
            f"got {v_name}.shape={tuple(v.shape)}; pass one value per key"
        )
    if h < 1 or h_k < 1 or h % h_k:
        raise ValueError(
            f"{fn}: expected the heads of {q_name} to be a positive multiple of those of {k_name}, "
            f"got {q_name}.shape={tuple(q_shape)} and {k_name}.shape={tuple(k_shape)}; "
            "repeat or drop heads"
        )
    if d < 1:
        raise ValueError(
            f"{fn}: expected head_dim >= 1, got {q_name}.shape={tuple(q_shape)}; "
            "a score needs at least one element"
        )
    dtype = q.dtype
    device = q.device
    if k.dtype != dtype or v.dtype != dtype or k.device != device or v.device != device:
        _raise_mismatch(fn, names, q, k, v)


def _check_rank(fn: str, name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{fn}: expected {name} to be a torch.Tensor, got {name} of type "
            f"{type(tensor).__name__}; convert it with torch.as_tensor"
        )
    if tensor.dim() != 4:
        raise ValueError(
            f"{fn}: expected {name} of shape (batch, seqlen, heads, head_dim), "
            f"got {name}.shape={tuple(tensor.shape)}; reshape it to four dimensions"
        )


def _raise_mismatch(fn: str, names: tuple[str, str, str], q, k, v) -> None:
    name, tensor = (names[1], k) if (k.dtype, k.device) != (q.dtype, q.device) else (names[2], v)
    if tensor.device != q.device:
        raise ValueError(
            f"{fn}: expected {name} on {q.device} as {names[0]}, "
            f"got {name}.device={tensor.device}; move it with .to({str(q.device)!r})"
        )
    raise TypeError(
        f"{fn}: expected {name} of {names[0]}'s dtype {q.dtype}, "
        f"got {name}.dtype={tensor.dtype}; cast one of them"
    )


def _check_scale(fn: str, softmax_scale, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    _check_real(fn, "softmax_scale", softmax_scale)
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(
            f"{fn}: expected a finite softmax_scale, got softmax_scale={softmax_scale}; "
            "pass None for 1/sqrt(head_dim)"
        )
    return float(softmax_scale)


def _check_real(fn: str, name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat)):
        raise TypeError(
            f"{fn}: expected {name} to be a float, got {name}={reprlib.repr(value)} of type "
            f"{type(value).__name__}; a tensor would have to be read back with .item()"
        )


def _check_bool(fn: str, name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"{fn}: expected {name} to be a bool, got {name}={reprlib.repr(value)}; pass bool(...)"
        )


def _check_dropout(fn: str, dropout_p) -> None:
    _check_real(fn, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(
            f"{fn}: expected 0 <= dropout_p < 1, got dropout_p={dropout_p}; pass 0.0 for none"
        )


def _check_softcap(fn: str, softcap) -> None:
    _check_real(fn, "softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(
            f"{fn}: expected a finite softcap >= 0, got softcap={softcap}; pass 0.0 for none"
        )


def _check_window(fn: str, window_size) -> tuple[int, int]:
    if not (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) for side in window_size)
    ):
        raise TypeError(
            f"{fn}: expected window_size to be two ints (left, right), "
            f"got window_size={reprlib.repr(window_size)}; pass (-1, -1) for no window"
        )
    if min(window_size) < -1:
        raise ValueError(
            f"{fn}: expected window_size of two ints >= -1, "
            f"got window_size={tuple(window_size)}; -1 stands for unlimited"
        )
    return tuple(window_size)


def _check_alibi(fn: str, alibi_slopes, q: torch.Tensor) -> None:
    if not isinstance(alibi_slopes, torch.Tensor):
        raise TypeError(
            f"{fn}: expected alibi_slopes to be a torch.Tensor, got alibi_slopes of type "
            f"{type(alibi_slopes).__name__}; pass None for none"
        )
    b, _, h, _ = q.shape
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(
            f"{fn}: expected alibi_slopes of dtype torch.float32, "
            f"got alibi_slopes.dtype={alibi_slopes.dtype}; cast it with .float()"
        )
    if alibi_slopes.shape not in ((h,), (b, h)):
        raise ValueError(
            f"{fn}: expected alibi_slopes of shape ({h},) or ({b}, {h}), "
            f"got alibi_slopes.shape={tuple(alibi_slopes.shape)}; pass one slope per query head"
        )
    if alibi_slopes.device != q.device:
        raise ValueError(
            f"{fn}: expected alibi_slopes on {q.device}, "
            f"got alibi_slopes.device={alibi_slopes.device}; move it there"
        )


def _check_for_kernels(fn: str, q_name: str, q: torch.Tensor, scale: float) -> None:
    """What the kernels, but not the reference, ask of q's device, dtype and shape."""
    if not (q.is_cuda or q.is_meta):
        raise NotImplementedError(
            f"{fn}: expected {q_name} on cuda or cpu, got {q_name}.device={q.device}; "
            "move the tensors there"
        )
    if q.dtype not in CUDA_DTYPES:
        raise TypeError(
            f"{fn}: expected {q_name} of dtype torch.float16 or torch.bfloat16 on {q.device}, "
            f"got {q_name}.dtype={q.dtype}; cast the inputs, e.g. with .to(torch.bfloat16)"
        )
    d = q.shape[3]
    if d % HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"{fn}: expected head_dim to be a multiple of {HEAD_DIM_MULTIPLE}, got head_dim={d}; "
            "pad q, k and v with zeros, pass softmax_scale, and slice the output"
        )
    if d > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{fn}: expected head_dim <= {MAX_HEAD_DIM}, got head_dim={d}; CPU tensors support it"
        )
    if not _MIN_SCALE <= scale <= _MAX_SCALE:
        raise NotImplementedError(
            f"{fn}: expected softmax_scale > 0 within float32's range on CUDA, "
            f"got softmax_scale={scale}; scale q instead"
        )


def _vectorised(fn: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a contiguous copy where the kernels could not load 16 bytes at a time."""
    s0, s1, s2, s3 = tensor.stride()
    if s3 != 1:
        raise ValueError(
            f"{fn}: expected {name}.stride(-1) == 1, got {name}.stride()={tensor.stride()}; "
            "call .contiguous() on it"
        )
    if s0 % 8 or s1 % 8 or s2 % 8:
        n0, n1, n2, _ = tensor.shape
        # Strides of dimensions of size 0 or 1 are arbitrary and never used.
        if (n0 > 1 and s0 % 8) or (n1 > 1 and s1 % 8) or (n2 > 1 and s2 % 8):
            return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _check_aligned(fn: str, name: str, tensor: torch.Tensor) -> None:
    # Allocators align storages to more than 16 bytes, so it is the offset that misaligns; unlike
    # data_ptr() it can be asked of fake tensors. The binding checks the address itself.
    if tensor.storage_offset() % 8:
        raise ValueError(
            f"{fn}: expected {name} to start at a multiple of 16 bytes, "
            f"got {name}.storage_offset()={tensor.storage_offset()} elements; call .clone() on it"
        )


def _wants_gradient(q, k, v) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _attend_on_cpu(
    fn, q, k, v, dropout_p, scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
):
    if q.dtype not in CPU_DTYPES:
        raise TypeError(
            f"{fn}: expected a dtype in {CPU_DTYPES} on cpu, got q.dtype={q.dtype}; cast the inputs"
        )
    plain = (
        dropout_p == 0.0 and softcap == 0.0 and window_size == _UNLIMITED and alibi_slopes is None
    )
    traced = torch.compiler.is_compiling() or isinstance(q, FakeTensor)
    if plain and traced and not _wants_gradient(q, k, v):
        # The reference looks at values, for NaN and Inf in masked keys, which tracers cannot: where
        # the operator can stand for it, it does.
        out, lse = ops.fwd(q, k, v, scale, causal)
        return (out, lse, q.new_empty(0)) if return_attn_probs else out
    keep = None
    if dropout_p > 0.0:
        b, seqlen_q, h, _ = q.shape
        keep = torch.rand(b, h, seqlen_q, k.shape[1]) >= dropout_p
    # Autocast would take the reference's matrix products back to 16 bits.
    with torch.autocast("cpu", enabled=False):
        out, lse, probs = attention_ref(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            dropout_mask=keep,
            upcast=torch.float64 if q.dtype == torch.float64 else torch.float32,
            return_probs=return_attn_probs and keep is not None,
        )
    out = torch.empty_like(q).copy_(out)  # in q's layout and dtype, as the operator returns it
    if not return_attn_probs:
        return out
    if keep is None:
        return out, lse.float(), q.new_empty(0)
    return out, lse.float(), torch.where(keep, probs, -probs).to(q.dtype)


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
):
    _check_tensors(fn, names, q, k, v)
    scale = _check_scale(fn, softmax_scale, q.shape[3])
    # The identity test is the quick way through for what nearly every call passes.
    if causal is not False and causal is not True:
        _check_bool(fn, "causal", causal)
    if deterministic is not False:
        _check_bool(fn, "deterministic", deterministic)
    if return_attn_probs is not False:
        _check_bool(fn, "return_attn_probs", return_attn_probs)
    if type(dropout_p) is not float or dropout_p != 0.0:
        _check_dropout(fn, dropout_p)
    if type(softcap) is not float or softcap != 0.0:
        _check_softcap(fn, softcap)
    if type(window_size) is not tuple or window_size != _UNLIMITED:
        window_size = _check_window(fn, window_size)
    if alibi_slopes is not None:
        _check_alibi(fn, alibi_slopes, q)

    if q.is_cpu:
        return _attend_on_cpu(
            fn, q, k, v, dropout_p, scale, causal, window_size, softcap, alibi_slopes,
            return_attn_probs,
        )  # fmt: skip

    _check_for_kernels(fn, names[0], q, scale)
    if dropout_p != 0.0:
        raise NotImplementedError(f"{fn}: {not_on_cuda('dropout_p', dropout_p)}")
    if softcap != 0.0:
        raise NotImplementedError(f"{fn}: {not_on_cuda('softcap', softcap)}")
    if window_size != _UNLIMITED:
        raise NotImplementedError(f"{fn}: {not_on_cuda('window_size', window_size)}")
    if alibi_slopes is not None:
        raise NotImplementedError(f"{fn}: {not_on_cuda('alibi_slopes', '(a tensor)')}")
    if _wants_gradient(q, k, v):
        raise NotImplementedError(f"{fn}: {not_on_cuda('requires_grad', True)}")
    q = _vectorised(fn, names[0], q)
    k = _vectorised(fn, names[1], k)
    v = _vectorised(fn, names[2], v)
    if not torch.compiler.is_compiling():  # which cannot trace storage_offset()
        _check_aligned(fn, names[0], q)
        _check_aligned(fn, names[1], k)
        _check_aligned(fn, names[2], v)
    out, lse = ops.fwd(q, k, v, scale, causal)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(q k^T * softmax_scale) v, without storing the score matrix.

    Grouped-query attention: query head i attends to key and value head i // (h // h_k). Masks are
    aligned to the bottom-right corner: query i sees key j if j <= i + seqlen_k - seqlen_q. A row
    that sees no key has output 0 and log-sum-exp -inf.

    On CUDA: float16 or bfloat16, float32 accumulation, head_dim a multiple of 8 up to 256, no
    gradient yet; any strides with the last dimension contiguous, where a tensor whose other strides
    are not multiples of 8 elements is copied once. On the CPU: a plain PyTorch reference in float32
    (float64 for float64 inputs) that takes every argument and is differentiable.

    Args:
        q: (b, seqlen_q, h, head_dim).
        k: (b, seqlen_k, h_k, head_dim), of q's dtype and device; h is a multiple of h_k.
        v: As k.
        dropout_p: Probability with which an attention weight is dropped, in [0, 1).
        softmax_scale: Factor on the scores; None for 1 / sqrt(head_dim).
        causal: Whether to mask keys after the query.
        window_size: (left, right): query i sees keys in [i + seqlen_k - seqlen_q - left,
            i + seqlen_k - seqlen_q + right]; -1 for unlimited.
        softcap: Scores become softcap * tanh(scores / softcap); 0.0 for none.
        alibi_slopes: float32 (h,) or (b, h): adds -slope * |i + seqlen_k - seqlen_q - j|.
        deterministic: Ask for bitwise repeatable results, which the forward always gives.
        return_attn_probs: Also return the log-sum-exp and the dropout pattern.

    Returns:
        out: Like q. With ``return_attn_probs`` also ``softmax_lse``, float32 (b, h, seqlen_q), the
        natural log-sum-exp of each row's scores, and ``S_dmask``: the attention weights with a
        minus sign where dropped, (b, h, seqlen_q, seqlen_k), or of shape (0,) without dropout.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong value, shape, device or memory layout.
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
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_func` of k and v stored together; they are read in place, without a copy.

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
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`flash_attn_func` of q, k and v stored together, read in place, without a copy.

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
    )


def _unpack(fn: str, name: str, packed, count: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor):
        raise TypeError(
            f"{fn}: expected {name} to be a torch.Tensor, got {name} of type "
            f"{type(packed).__name__}; convert it with torch.as_tensor"
        )
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(
            f"{fn}: expected {name} of shape (batch, seqlen, {count}, heads, head_dim), "
            f"got {name}.shape={tuple(packed.shape)}; stack the tensors with torch.stack(dim=2)"
        )
    return packed.unbind(2)
