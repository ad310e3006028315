"""Builds, loads and calls the kernel of a rung: ``attention("08_swizzle", q, k, v)``."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence

import torch

from flashcute import heuristics, jit
from flashcute.jit import abi, build, sources, toolchain
from flashcute.jit.launch import Call
from flashcute.jit.toolchain import BuildError

from . import rungs
from .rungs import Rung

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_ELEMENTS = {"fp16": "__half", "bf16": "__nv_bfloat16"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel of a rung, by its template arguments.

    Attributes:
        rung: The rung.
        dtype: The problem's, ``"fp16"`` or ``"bf16"``; an fp32 rung gets converted inputs.
        head_dim: 64 or 128.
        causal: Mask aligned to the bottom-right corner.
    """

    rung: Rung
    dtype: str
    head_dim: int
    causal: bool

    @property
    def element(self) -> str:
        return "float" if self.rung.fp32 else _ELEMENTS[self.dtype]

    @property
    def name(self) -> str:
        dtype = "fp32" if self.rung.fp32 else self.dtype
        mask = "_causal" if self.causal else ""
        return f"ladder_{self.rung.name}_hdim{self.head_dim}_{dtype}{mask}"

    @property
    def describe(self) -> str:
        """The C++ expression for its ``const flash::Flash_kernel *``."""
        causal = "true" if self.causal else "false"
        arguments = f"{self.element}, {self.head_dim}, {causal}"
        kernel = f"ladder::Rung{self.rung.number:02d}<{arguments}>"
        return f'ladder::describe<{kernel}>("{self.name}")'


def variants(rung: Rung) -> list[Variant]:
    """Returns all kernels of a rung."""
    dtypes = rungs.DTYPES[:1] if rung.fp32 else rungs.DTYPES
    return [
        Variant(rung, dtype, head_dim, causal)
        for dtype in dtypes
        for head_dim in rungs.HEAD_DIMS
        for causal in (False, True)
    ]


def half(variant: Variant) -> list[Variant]:
    """Returns half of a rung's kernels: ``variant`` and others, with all pairs of two arguments."""

    def place(other: Variant) -> int:
        dtype, head_dim = rungs.DTYPES.index(other.dtype), rungs.HEAD_DIMS.index(other.head_dim)
        return (dtype + head_dim + other.causal) % 2

    return [other for other in variants(variant.rung) if place(other) == place(variant)]


def source(wanted: Sequence[Variant]) -> str:
    """Returns a translation unit of one rung's kernels, each exported by a function of its name."""
    entries = "\n".join(
        'extern "C" __attribute__((visibility("default"))) const flash::Flash_kernel *\n'
        f"{variant.name}() {{ return {variant.describe}; }}"
        for variant in wanted
    )
    return f'#include "{wanted[0].rung.stem}.h"\n\n{entries}\n'


def unit(rung: Rung, target: str, wanted: Sequence[Variant] | None = None) -> build.Unit:
    """Returns the unit that builds a rung for the GPU with sm number ``target``, e.g. ``"90"``.

    The shared object has the kernels ``wanted``, by default all of the rung's.
    """
    # wgmma and setmaxnreg need the target sm_90a.
    code = f"{target}a" if rung.arch == 90 else target
    return build.Unit(
        name=f"ladder_{rung.name}",
        target=f"sm_{code}",
        source=source(wanted or variants(rung)),
        suffix=".cu",
        flags=(*toolchain.NVCC_FLAGS, f"-gencode=arch=compute_{code},code=sm_{code}"),
        project_dirs=(rungs.KERNELS, rungs.KERNELS / "gpu", sources.kernel_include_dir()),
        external_dirs=(sources.cutlass_include_dir(),),
        external=(f"cutlass {sources.cutlass_version()}",),
    )


def build_rungs(
    wanted: Sequence[Rung], target: str, jobs: int | None = None, progress=None
) -> dict[Rung, build.BuildResult]:
    """Builds rungs into the user's cache, in parallel; a failure is reported in its result."""
    units = [unit(rung, target) for rung in wanted]
    results = build.build_many(units, toolchain.find_nvcc(), jobs, progress)
    return dict(zip(wanted, results, strict=True))


@functools.cache
def _library(rung: Rung, target: str) -> ctypes.CDLL:
    result = build_rungs([rung], target)[rung]
    if result.artefact is None:
        raise BuildError(result.error)
    return ctypes.CDLL(str(result.artefact.path))


@functools.cache
def load(variant: Variant, target: str) -> abi.FlashKernel:
    """Loads a kernel for the life of the process; builds it if the user's cache lacks it.

    Raises:
        BuildError: if it cannot be built or does not fit this package.
    """
    entry = getattr(_library(variant.rung, target), variant.name)
    entry.restype = ctypes.POINTER(abi.FlashKernel)
    kernel = entry().contents
    found = (kernel.abi_version, kernel.params_size, kernel.name)
    expected = (abi.ABI_VERSION, ctypes.sizeof(abi.FlashFwdParams), variant.name.encode())
    if found != expected:
        raise BuildError(f"ladder: expected a kernel that says {expected}, got {found}")
    return kernel


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    def require(ok: bool, condition: str, got: object) -> None:
        if not ok:
            raise ValueError(f"ladder.attention: expected {condition}, got {got}")

    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise TypeError(
                f"ladder.attention: expected q, k and v all in float16 or all in bfloat16, got "
                f"{name}.dtype={x.dtype}"
            )
        require(x.dim() == 4, f"{name} of shape (b, seqlen, heads, d)", tuple(x.shape))
        require(x.is_cuda and x.device == q.device, "tensors on one GPU", f"{name} on {x.device}")
        aligned = x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3])
        aligned = aligned and x.data_ptr() % 16 == 0
        require(aligned, f"rows of {name} that begin at 16 bytes", f"{name}.stride()={x.stride()}")
    b, _, h, d = q.shape
    require(d in rungs.HEAD_DIMS, f"a head dimension in {rungs.HEAD_DIMS}", d)
    require(k.shape == v.shape, "k and v of one shape", (tuple(k.shape), tuple(v.shape)))
    fits = k.shape[0] == b and k.shape[3] == d and k.shape[2] > 0 and h % k.shape[2] == 0
    require(fits, "k that fits q", (tuple(q.shape), tuple(k.shape)))


def _target(q: torch.Tensor) -> str:
    return "".join(map(str, torch.cuda.get_device_capability(q.device)))


def prepare(
    rung: Rung,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None = None,
) -> Call:
    """Prepares a call of a rung; arguments and errors are those of :func:`attention`."""
    _check(q, k, v)
    kernel = load(Variant(rung, _DTYPES[q.dtype], q.shape[3], causal), _target(q))
    if rung.fp32:
        q, k, v = q.float(), k.float(), v.float()
    return Call(kernel, q, k, v, softmax_scale)


def prepare_library_sm80(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """Prepares a call of the library's sm80 kernel, which the heuristics do not choose on sm90."""
    _check(q, k, v)
    capability = torch.cuda.get_device_capability(q.device)
    config = heuristics.fwd_config(_DTYPES[q.dtype], q.shape[3], causal, capability)
    kernel = jit.get_kernel(config, _target(q))
    return Call(abi.FlashKernel.from_address(kernel.address), q, k, v)


def attention(
    rung: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention by one rung of the ladder, on a GPU.

    Args:
        rung: Its number or name, e.g. ``"8"`` or ``"08_swizzle"``.
        q: (b, seqlen_q, h, d), float16 or bfloat16; d is 64 or 128.
        k: (b, seqlen_k, h_k, d), in q's dtype; h_k divides h.
        v: (b, seqlen_k, h_k, d), in q's dtype.
        causal: Mask aligned to the bottom-right corner.
        softmax_scale: Factor on the scores; 1 / sqrt(d) by default.

    Returns:
        The output, (b, seqlen_q, h, d) in q's dtype, and the log-sum-exp, (b, h, seqlen_q), fp32.

    Raises:
        TypeError, ValueError: for tensors that no rung takes.
        BuildError: if the kernel cannot be built.
        RuntimeError: if the launch fails.
    """
    out, lse = prepare(rungs.find(rung), q, k, v, causal, softmax_scale)()
    return out.to(q.dtype), lse
