"""The C structs of ``flash.h`` in ctypes. A kernel's shared object is checked against them.

``tests/test_jit_abi.py`` compares sizes and offsets with those of a C++ compiler.
"""

from __future__ import annotations

import ctypes

ABI_VERSION = 2  # flash::kAbiVersion

_STRIDES = [
    (f"{tensor}_{dim}_stride", ctypes.c_int64)
    for tensor in "qkvo"
    for dim in ("batch", "row", "head")
]
_SIZES = [
    (name, ctypes.c_int32) for name in ("b", "seqlen_q", "seqlen_k", "h", "h_k", "d", "h_h_k_ratio")
]


class FlashFwdParams(ctypes.Structure):
    """``flash::Flash_fwd_params``."""

    _fields_ = [
        ("q_ptr", ctypes.c_void_p),
        ("k_ptr", ctypes.c_void_p),
        ("v_ptr", ctypes.c_void_p),
        ("o_ptr", ctypes.c_void_p),
        ("softmax_lse_ptr", ctypes.c_void_p),
        *_STRIDES,
        *_SIZES,
        ("scale_softmax", ctypes.c_float),
        ("scale_softmax_log2", ctypes.c_float),
    ]


class FlashKernel(ctypes.Structure):
    """``flash::Flash_kernel``."""

    _fields_ = [
        ("abi_version", ctypes.c_int32),
        ("params_size", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("tile_m", ctypes.c_int32),
        (
            "launch",
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(FlashFwdParams), ctypes.c_void_p),
        ),
        ("error_string", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int32)),
    ]
