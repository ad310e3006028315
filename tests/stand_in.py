"""Kernels that record their launches and compute nothing."""

from __future__ import annotations

import ctypes

from flashcute import ops
from flashcute.jit import abi

Call = tuple[dict[str, float], int]  # the fields of a launch's parameters, and its stream


class StandIn:
    """A ``flash::Flash_kernel`` and a ``flash::Flash_bwd_kernel`` made of Python functions."""

    def __init__(self) -> None:
        self.plans: list[Call] = []
        self.launches: list[Call] = []
        self.backwards: list[Call] = []
        self.problems: list[dict[str, int]] = []
        self.result = 0
        self.pack_heads = False
        self.splits = 1, 1, 0
        self.kernel = self._describe(abi.FlashFwdParams, self.launches, self.plans)
        self.backward = self._describe(abi.FlashBwdParams, self.backwards, [])

    def _describe(self, struct, launches: list[Call], plans: list[Call]) -> abi.FlashKernel:
        types = dict(abi.FlashKernel._fields_)
        return abi.FlashKernel(
            abi_version=abi.ABI_VERSION,
            params_size=ctypes.sizeof(struct),
            name=b"stand_in",
            threads=128,
            smem_bytes=0,
            tile_m=64,
            launch=types["launch"](lambda *args: self._record(struct, launches, *args)),
            plan=types["plan"](lambda *args: self._record(struct, plans, *args)),
            error_string=types["error_string"](lambda error: b"error %d" % error),
        )

    def _record(self, struct, calls: list[Call], params, stream) -> int:
        given = ctypes.cast(params, ctypes.POINTER(struct)).contents
        fields = [name for base in struct.__mro__ for name, _ in vars(base).get("_fields_", ())]
        calls.append(({name: getattr(given, name) for name in fields}, stream or 0))
        return self.result

    def choose(self, problem) -> ops._Choice:
        """Records the problem and chooses a stand-in; replaces ``ops._choose``."""
        names = [name for name, _ in ops._Problem._fields_]
        self.problems.append({name: getattr(problem, name) for name in names})
        kernel = self.backward if problem.backward else self.kernel
        return ops._Choice(ctypes.addressof(kernel), self.pack_heads, *self.splits)
