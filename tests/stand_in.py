"""A kernel that records its launches and computes nothing."""

from __future__ import annotations

import ctypes

from flashcute import ops
from flashcute.jit import abi


class StandIn:
    """A ``flash::Flash_kernel`` made of Python functions."""

    def __init__(self) -> None:
        self.plans: list[tuple[dict[str, float], int]] = []
        self.launches: list[tuple[dict[str, float], int]] = []
        self.problems: list[dict[str, int]] = []
        self.result = 0
        self.pack_heads = False
        types = dict(abi.FlashKernel._fields_)
        self.kernel = abi.FlashKernel(
            abi_version=abi.ABI_VERSION,
            params_size=ctypes.sizeof(abi.FlashFwdParams),
            name=b"stand_in",
            threads=128,
            smem_bytes=0,
            tile_m=64,
            launch=types["launch"](lambda *args: self._record(self.launches, *args)),
            plan=types["plan"](lambda *args: self._record(self.plans, *args)),
            error_string=types["error_string"](lambda error: b"error %d" % error),
        )

    def _record(self, calls, params, stream) -> int:
        fields = [name for name, _ in abi.FlashFwdParams._fields_]
        values = {name: getattr(params.contents, name) for name in fields}
        calls.append((values, stream or 0))
        return self.result

    def choose(self, problem) -> ops._Choice:
        """In place of ``ops._choose``."""
        names = [name for name, _ in ops._Problem._fields_]
        self.problems.append({name: getattr(problem, name) for name in names})
        return ops._Choice(ctypes.addressof(self.kernel), self.pack_heads)
