"""FlashAttention for NVIDIA GPUs in CUTLASS/CuTe C++, with a PyTorch interface."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import env

if TYPE_CHECKING:
    from .flash_attn_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
    )
    from .flash_attn_kvcache import flash_attn_with_kvcache
    from .flash_attn_varlen import (
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from .integrations.flash_attn import provide_flash_attn
    from .integrations.sdpa import disable, enable, enabled
    from .kvcache_plan import KVCachePlan
    from .support import Support, support_matrix, supports

__version__ = "0.1.0"
__all__ = [
    "KVCachePlan",
    "Support",
    "disable",
    "enable",
    "enabled",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "provide_flash_attn",
    "support_matrix",
    "supports",
]

_HOMES = {
    "flash_attn_func": "flash_attn_interface",
    "flash_attn_kvpacked_func": "flash_attn_interface",
    "flash_attn_qkvpacked_func": "flash_attn_interface",
    "flash_attn_varlen_func": "flash_attn_varlen",
    "flash_attn_varlen_kvpacked_func": "flash_attn_varlen",
    "flash_attn_varlen_qkvpacked_func": "flash_attn_varlen",
    "flash_attn_with_kvcache": "flash_attn_kvcache",
    "KVCachePlan": "kvcache_plan",
    "disable": "integrations.sdpa",
    "enable": "integrations.sdpa",
    "enabled": "integrations.sdpa",
    "provide_flash_attn": "integrations.flash_attn",
    "Support": "support",
    "support_matrix": "support",
    "supports": "support",
}


def __getattr__(name: str) -> object:
    # Lazy, so that the command line, which may only want to build, starts without importing torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    env.read()  # a wrong variable is an error, also where nothing is built
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
