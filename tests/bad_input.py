"""Calls that must fail, each with the error they must fail with.

One table for three runs: on the meta device, where the checks of CUDA tensors run without a GPU; in
a ``python -O`` process, which would strip asserts; and on CUDA.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import torch

import flashcute


@dataclasses.dataclass(frozen=True)
class BadInput:
    """``call(device)`` must raise ``error`` with a message that ``pattern`` matches."""

    name: str
    error: type[Exception]
    pattern: str
    call: Callable[[str], object]

    def failure(self, device: str) -> str | None:
        """What is wrong with the way the call fails; None if it fails as it must."""
        try:
            result = self.call(device)
        except Exception as exception:
            if type(exception) is not self.error:
                return f"{self.name}: expected {self.error.__name__}, got {exception!r}"
            if not re.search(self.pattern, str(exception)):
                return f"{self.name}: expected a message like {self.pattern!r}, got {exception}"
            if not re.search(r"^flash_attn_\w*func: expected .*, got .*; .+", str(exception)):
                return f"{self.name}: not '<op>: expected ..., got ...; <way out>': {exception}"
            return None
        return f"{self.name}: expected {self.error.__name__}, got the result {type(result)}"


def tensors(
    device: str,
    b: int = 2,
    seqlen_q: int = 9,
    seqlen_k: int = 11,
    h: int = 4,
    h_k: int = 2,
    d: int = 64,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of zeros."""
    q = torch.zeros(b, seqlen_q, h, d, device=device, dtype=dtype)
    k = torch.zeros(b, seqlen_k, h_k, d, device=device, dtype=dtype)
    return q, k, torch.zeros_like(k)


def _with(**kwargs) -> Callable[[str], object]:
    """flash_attn_func of good tensors and these arguments."""
    return lambda device: flashcute.flash_attn_func(*tensors(device), **kwargs)


def _sized(**kwargs) -> Callable[[str], object]:
    """flash_attn_func of tensors of these sizes and dtype."""
    return lambda device: flashcute.flash_attn_func(*tensors(device, **kwargs))


def _changed(
    index: int, change: Callable[[torch.Tensor], object], **kwargs
) -> Callable[[str], object]:
    """flash_attn_func with one of q, k, v changed."""

    def call(device: str) -> object:
        args = list(tensors(device, **kwargs))
        args[index] = change(args[index])
        return flashcute.flash_attn_func(*args)

    return call


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, starting one element into its storage."""
    storage = tensor.new_zeros(tensor.numel() + 8)
    return storage[1 : 1 + tensor.numel()].view_as(tensor)


def _slopes(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> object:
    slopes = torch.zeros(*shape, device=device, dtype=dtype)
    return flashcute.flash_attn_func(*tensors(device), alibi_slopes=slopes)


def _packed(function: str, *shape: int) -> Callable[[str], object]:
    def call(device: str) -> object:
        packed = torch.zeros(*shape, device=device, dtype=torch.float16)
        first = (tensors(device)[0],) if "kvpacked" in function and "qkv" not in function else ()
        return getattr(flashcute, function)(*first, packed)

    return call


_NAN = float("nan")
_INF = float("inf")

BAD_INPUTS = (
    # types and dtypes
    BadInput(
        "q_none",
        TypeError,
        r"q to be a torch.Tensor, got q of type NoneType",
        _changed(0, lambda t: None),
    ),
    BadInput(
        "k_numpy",
        TypeError,
        r"k to be a torch.Tensor, got k of type ndarray",
        _changed(1, lambda t: np.zeros(t.shape)),
    ),
    BadInput("v_list", TypeError, r"got v of type list", _changed(2, lambda t: [1])),
    BadInput(
        "fp32",
        TypeError,
        r"float16 or torch.bfloat16 .*q.dtype=torch.float32; cast",
        _sized(dtype=torch.float32),
    ),
    BadInput("fp64", TypeError, r"q.dtype=torch.float64", _sized(dtype=torch.float64)),
    BadInput("int8", TypeError, r"q.dtype=torch.int8", _sized(dtype=torch.int8)),
    BadInput("complex", TypeError, r"q.dtype=torch.complex64", _sized(dtype=torch.complex64)),
    BadInput("fp8", TypeError, r"q.dtype=torch.float8_e4m3fn", _sized(dtype=torch.float8_e4m3fn)),
    BadInput(
        "k_dtype",
        TypeError,
        r"k of q's dtype torch.float16, got k.dtype=torch.bfloat16",
        _changed(1, lambda t: t.bfloat16()),
    ),
    BadInput(
        "v_dtype",
        TypeError,
        r"v of q's dtype torch.float16, got v.dtype=torch.float32",
        _changed(2, lambda t: t.float()),
    ),
    # ranks and shapes
    BadInput(
        "q_1d",
        ValueError,
        r"q of shape \(batch, seqlen, heads, head_dim\), got q.shape=\(4608,\)",
        _changed(0, torch.flatten),
    ),
    BadInput("q_3d", ValueError, r"got q.shape=\(9, 4, 64\)", _changed(0, lambda t: t[0])),
    BadInput("k_3d", ValueError, r"got k.shape=\(11, 2, 64\)", _changed(1, lambda t: t[0])),
    BadInput(
        "v_5d", ValueError, r"got v.shape=\(1, 2, 11, 2, 64\)", _changed(2, lambda t: t[None])
    ),
    BadInput("q_0d", ValueError, r"got q.shape=\(\)", _changed(0, lambda t: t[0, 0, 0, 0])),
    BadInput(
        "k_batch",
        ValueError,
        r"k of q's batch size 2, got k.shape=\(1,",
        _changed(1, lambda t: t[:1]),
    ),
    BadInput(
        "v_batch", ValueError, r"v of k's shape .*got v.shape=\(1,", _changed(2, lambda t: t[:1])
    ),
    BadInput(
        "v_seqlen",
        ValueError,
        r"v of k's shape .*got v.shape=\(2, 10,",
        _changed(2, lambda t: t[:, :10]),
    ),
    BadInput(
        "v_heads",
        ValueError,
        r"v of k's shape .*got v.shape=\(2, 11, 1,",
        _changed(2, lambda t: t[:, :, :1]),
    ),
    BadInput(
        "k_head_dim",
        ValueError,
        r"k of q's head_dim 64, got k.shape=\(2, 11, 2, 32\)",
        _changed(1, lambda t: t[..., :32]),
    ),
    BadInput(
        "v_head_dim",
        NotImplementedError,
        r"v of k's head_dim 64, got v.shape=\(2, 11, 2, 32\)",
        _changed(2, lambda t: t[..., :32]),
    ),
    BadInput(
        "heads_3_2",
        ValueError,
        r"positive multiple .*q.shape=\(2, 9, 3, 64\) and k.shape=\(2, 11, 2, 64\)",
        _sized(h=3),
    ),
    BadInput("heads_1_2", ValueError, r"positive multiple .*q.shape=\(2, 9, 1, 64\)", _sized(h=1)),
    BadInput("heads_0_2", ValueError, r"positive multiple .*q.shape=\(2, 9, 0, 64\)", _sized(h=0)),
    BadInput(
        "heads_4_0", ValueError, r"positive multiple .*k.shape=\(2, 11, 0, 64\)", _sized(h_k=0)
    ),
    BadInput("head_dim_0", ValueError, r"head_dim >= 1, got q.shape=\(2, 9, 4, 0\)", _sized(d=0)),
    BadInput("head_dim_1", ValueError, r"multiple of 8, got head_dim=1; pad", _sized(d=1)),
    BadInput("head_dim_68", ValueError, r"multiple of 8, got head_dim=68; pad", _sized(d=68)),
    BadInput("head_dim_257", ValueError, r"multiple of 8, got head_dim=257", _sized(d=257)),
    BadInput(
        "head_dim_264", NotImplementedError, r"head_dim <= 256, got head_dim=264", _sized(d=264)
    ),
    # devices
    BadInput(
        "k_cpu",
        ValueError,
        r"k on \w+(:0)? as q, got k.device=cpu; move it with .to",
        _changed(1, lambda t: torch.zeros(t.shape, dtype=t.dtype)),
    ),
    BadInput(
        "v_cpu",
        ValueError,
        r"v on \w+(:0)? as q, got v.device=cpu",
        _changed(2, lambda t: torch.zeros(t.shape, dtype=t.dtype)),
    ),
    BadInput(
        "q_cpu",
        ValueError,
        r"k on cpu as q, got k.device=",
        _changed(0, lambda t: torch.zeros(t.shape, dtype=t.dtype)),
    ),
    # memory layouts
    BadInput(
        "q_last_stride",
        ValueError,
        r"q.stride\(-1\) == 1, got q.stride\(\)=.*contiguous",
        _changed(0, lambda t: t.mT.contiguous().mT),
    ),
    BadInput(
        "k_last_stride",
        ValueError,
        r"k.stride\(-1\) == 1, got k.stride",
        _changed(1, lambda t: t.repeat(1, 1, 1, 2)[..., ::2]),
    ),
    BadInput(
        "v_last_stride",
        ValueError,
        r"v.stride\(-1\) == 1, got v.stride\(\)=.*0\)",
        _changed(2, lambda t: t[..., :1].expand(t.shape)),
    ),
    BadInput(
        "q_misaligned",
        ValueError,
        r"q to start at a multiple of 16 bytes, got q.storage_offset\(\)=1",
        _changed(0, _shifted),
    ),
    BadInput(
        "k_misaligned",
        ValueError,
        r"got k.storage_offset\(\)=1 elements; call .clone",
        _changed(1, _shifted),
    ),
    BadInput(
        "v_misaligned", ValueError, r"got v.storage_offset\(\)=1 elements", _changed(2, _shifted)
    ),
    # options: types and values
    BadInput(
        "scale_nan",
        ValueError,
        r"finite softmax_scale, got softmax_scale=nan",
        _with(softmax_scale=_NAN),
    ),
    BadInput(
        "scale_inf",
        ValueError,
        r"finite softmax_scale, got softmax_scale=inf",
        _with(softmax_scale=_INF),
    ),
    BadInput("scale_minus_inf", ValueError, r"got softmax_scale=-inf", _with(softmax_scale=-_INF)),
    BadInput(
        "scale_text",
        TypeError,
        r"softmax_scale to be a float, got softmax_scale='1'",
        _with(softmax_scale="1"),
    ),
    BadInput(
        "scale_bool",
        TypeError,
        r"softmax_scale to be a float, got softmax_scale=True",
        _with(softmax_scale=True),
    ),
    BadInput(
        "scale_tensor",
        TypeError,
        r"softmax_scale to be a float, got softmax_scale=tensor",
        _with(softmax_scale=torch.tensor(1.0)),
    ),
    BadInput(
        "scale_zero",
        NotImplementedError,
        r"softmax_scale > 0 .*got softmax_scale=0.0",
        _with(softmax_scale=0.0),
    ),
    BadInput(
        "scale_negative",
        NotImplementedError,
        r"softmax_scale > 0 .*got softmax_scale=-0.5",
        _with(softmax_scale=-0.5),
    ),
    BadInput(
        "scale_subnormal",
        NotImplementedError,
        r"got softmax_scale=1e-40",
        _with(softmax_scale=1e-40),
    ),
    BadInput(
        "scale_huge", NotImplementedError, r"got softmax_scale=3e\+38", _with(softmax_scale=3e38)
    ),
    BadInput("causal_int", TypeError, r"causal to be a bool, got causal=1", _with(causal=1)),
    BadInput("causal_none", TypeError, r"causal to be a bool, got causal=None", _with(causal=None)),
    BadInput(
        "deterministic_text",
        TypeError,
        r"deterministic to be a bool, got deterministic='no'",
        _with(deterministic="no"),
    ),
    BadInput(
        "return_probs_int",
        TypeError,
        r"return_attn_probs to be a bool, got return_attn_probs=0",
        _with(return_attn_probs=0),
    ),
    BadInput(
        "dropout_negative",
        ValueError,
        r"0 <= dropout_p < 1, got dropout_p=-0.1",
        _with(dropout_p=-0.1),
    ),
    BadInput(
        "dropout_one", ValueError, r"0 <= dropout_p < 1, got dropout_p=1.0", _with(dropout_p=1.0)
    ),
    BadInput(
        "dropout_nan", ValueError, r"0 <= dropout_p < 1, got dropout_p=nan", _with(dropout_p=_NAN)
    ),
    BadInput(
        "dropout_none",
        TypeError,
        r"dropout_p to be a float, got dropout_p=None",
        _with(dropout_p=None),
    ),
    BadInput(
        "softcap_negative",
        ValueError,
        r"finite softcap >= 0, got softcap=-1.0",
        _with(softcap=-1.0),
    ),
    BadInput(
        "softcap_nan", ValueError, r"finite softcap >= 0, got softcap=nan", _with(softcap=_NAN)
    ),
    BadInput(
        "softcap_inf", ValueError, r"finite softcap >= 0, got softcap=inf", _with(softcap=_INF)
    ),
    BadInput(
        "softcap_text", TypeError, r"softcap to be a float, got softcap='x'", _with(softcap="x")
    ),
    BadInput(
        "window_left",
        ValueError,
        r"two ints >= -1, got window_size=\(-2, 0\)",
        _with(window_size=(-2, 0)),
    ),
    BadInput(
        "window_right",
        ValueError,
        r"two ints >= -1, got window_size=\(0, -7\)",
        _with(window_size=[0, -7]),
    ),
    BadInput(
        "window_int",
        TypeError,
        r"two ints \(left, right\), got window_size=3;",
        _with(window_size=3),
    ),
    BadInput(
        "window_three", TypeError, r"got window_size=\(1, 2, 3\)", _with(window_size=(1, 2, 3))
    ),
    BadInput("window_float", TypeError, r"got window_size=\(1.0, 2\)", _with(window_size=(1.0, 2))),
    BadInput("window_none", TypeError, r"got window_size=None", _with(window_size=None)),
    BadInput(
        "alibi_list",
        TypeError,
        r"alibi_slopes to be a torch.Tensor, got .* of type list",
        _with(alibi_slopes=[0.5] * 4),
    ),
    BadInput(
        "alibi_dtype",
        TypeError,
        r"alibi_slopes of dtype torch.float32, got alibi_slopes.dtype=torch.float16",
        lambda device: _slopes(device, 4, dtype=torch.float16),
    ),
    BadInput(
        "alibi_shape",
        ValueError,
        r"shape \(4,\) or \(2, 4\), got alibi_slopes.shape=\(2,\)",
        lambda device: _slopes(device, 2),
    ),
    BadInput(
        "alibi_device",
        ValueError,
        r"alibi_slopes on \w+(:0)?, got alibi_slopes.device=cpu",
        _with(alibi_slopes=torch.zeros(4)),
    ),
    # what the kernels do not do yet
    BadInput(
        "dropout",
        NotImplementedError,
        r"no dropout on CUDA.*got dropout_p=0.1; pass",
        _with(dropout_p=0.1),
    ),
    BadInput(
        "softcap",
        NotImplementedError,
        r"no softcap on CUDA.*got softcap=30.0; pass",
        _with(softcap=30.0),
    ),
    BadInput(
        "window",
        NotImplementedError,
        r"no sliding window on CUDA.*got window_size=\(4, 0\); pass",
        _with(window_size=(4, 0)),
    ),
    BadInput(
        "alibi",
        NotImplementedError,
        r"no ALiBi on CUDA.*got alibi_slopes=",
        lambda device: _slopes(device, 4),
    ),
    BadInput(
        "backward_q",
        NotImplementedError,
        r"no backward on CUDA.*requires_grad=True; call it under torch.no_grad",
        _changed(0, lambda t: t.requires_grad_()),
    ),
    BadInput(
        "backward_v",
        NotImplementedError,
        r"no backward on CUDA",
        _changed(2, lambda t: t.requires_grad_()),
    ),
    # packed inputs
    BadInput(
        "qkv_4d",
        ValueError,
        r"^flash_attn_qkvpacked_func: expected qkv of shape .*got qkv.shape=\(2, 3, 4, 64\)",
        _packed("flash_attn_qkvpacked_func", 2, 3, 4, 64),
    ),
    BadInput(
        "qkv_2",
        ValueError,
        r"got qkv.shape=\(2, 5, 2, 4, 64\)",
        _packed("flash_attn_qkvpacked_func", 2, 5, 2, 4, 64),
    ),
    BadInput(
        "qkv_head_dim",
        ValueError,
        r"^flash_attn_qkvpacked_func: .*got head_dim=20",
        _packed("flash_attn_qkvpacked_func", 2, 5, 3, 4, 20),
    ),
    BadInput(
        "kv_3",
        ValueError,
        r"^flash_attn_kvpacked_func: expected kv of shape .*got kv.shape=\(2, 5, 3, 4, 64\)",
        _packed("flash_attn_kvpacked_func", 2, 5, 3, 4, 64),
    ),
    BadInput(
        "kv_heads",
        ValueError,
        r"heads of q .* those of kv\[:, :, 0\], got",
        _packed("flash_attn_kvpacked_func", 2, 5, 2, 3, 64),
    ),
    BadInput(
        "kv_text",
        TypeError,
        r"^flash_attn_kvpacked_func: expected kv to be a torch.Tensor, got kv of type str",
        lambda device: flashcute.flash_attn_kvpacked_func(tensors(device)[0], "kv"),
    ),
)
