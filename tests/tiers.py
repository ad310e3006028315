"""Says which shipped kernels, and which faults planted into kernels, a run of the tests covers.

``--all`` covers all of them. Without it:

- A forward of fp16 differs from that of bf16 in its conversions and in the range of P, which no
  tile size changes. So every bf16 forward is covered, and in each kernel class the fp16 forwards
  of two head dimensions, one with a causal mask and one without.
- A backward is several kernels, which compile for a minute. Two head dimensions of bf16 and one of
  fp16 are covered. In the sm80 class they have dK and dV in one kernel and in two, and one kernel
  for all gradients with two and with four warps on a step; in the sm90 class two main loops.
- One kernel of :data:`flashcute.shipped.CALLS` is covered, and every sm90 forward over pages, as
  five of these once spilled unseen; tests/sim runs more of the kernels that decode.
- Of the sm90 class's backward of ragged batches, a kernel of each main loop is covered.

tests/sim runs every covered kernel. As nvcc takes longer, it compiles fewer: of two bf16 forwards
that differ in the mask alone the causal one, which has the other's loop and one more; of fp16 the
forwards of one head dimension and the sm90 backwards; of sm80 bf16 forwards three head dimensions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from flashcute import heuristics, shipped, sim
from flashcute.config import BwdConfig, FwdConfig

everything = False  # set by conftest.py before tests are collected

_FP16 = {(64, "causal"), (128, "none")}
_NVCC = {(128, "none")}  # the forwards of _FP16 that nvcc compiles
_NVCC_SM80 = (64, 128, 256)  # head dimensions of forwards, whose tiles differ little

_BACKWARD = {("bf16", 128, "causal"), ("bf16", 192, "none"), ("fp16", 64, "causal")}

_OF_CALLS = {"flash_fwd_hdim256_bf16_local_softcap_sm90_128x64_s2_pp"}

# Backwards of the sm90 class for ragged batches and with options. Most kernels of this kind do not
# ship: they are built when they are first used.
_UNSHIPPED = {
    "flash_bwd_hdim96_bf16_causal_varlen_sm90_128x64_s2",
    "flash_bwd_hdim256_bf16_varlen_sm90_64x64_s2",
    "flash_bwd_hdim64_bf16_causal_softcap_sm90_128x128_s2",
    "flash_bwd_hdim96_bf16_causal_alibi_sm90_128x64_s2",
    "flash_bwd_hdim128_bf16_softcap_alibi_dropout_sm90_128x64_s2",
    "flash_bwd_hdim256_bf16_causal_softcap_sm90_64x64_s2",
}


def covers(config: FwdConfig | BwdConfig) -> bool:
    """Returns whether this run covers a kernel, which may be one that does not ship."""
    dense = {*heuristics.shipped_configs(), *heuristics.shipped_bwd_configs()}
    if config not in dense:
        pages_on_hopper = config.kind == "fwd" and config.paged and config.arch == 90
        return everything or pages_on_hopper or config.full_name in _OF_CALLS | _UNSHIPPED
    if config.kind == "bwd":
        return everything or (config.dtype, config.head_dim, config.mask) in _BACKWARD
    return everything or config.dtype == "bf16" or (config.head_dim, config.mask) in _FP16


def compiles(config: FwdConfig | BwdConfig) -> bool:
    """Returns whether this run compiles a kernel with nvcc."""
    if everything or not covers(config):
        return everything
    if config.dtype == "fp16":
        return (
            config.arch == 90 if config.kind == "bwd" else (config.head_dim, config.mask) in _NVCC
        )
    if config.kind == "bwd":
        return True
    if config.arch == 80 and config.head_dim not in _NVCC_SM80:
        return False
    if config.mask != "none":
        return True
    twin = dataclasses.replace(config, mask="causal")
    return twin not in shipped.instantiations().values()


def faults(planted: Sequence) -> tuple:
    """Returns the planted faults that this run covers.

    These are all faults that a checker finds, and of the others every second one of those in the
    same file with the same finder: each is a kernel to compile, and it shows what the tests find,
    not what the kernels do.
    """
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for fault in planted:
        kind = fault.file, fault.finder
        if everything or fault.finder in sim.CHECKERS or seen[kind] % 2 == 0:
            kept.append(fault)
        seen[kind] += 1
    return tuple(kept)


def shipped_configs(arch: int | None = None) -> list[FwdConfig]:
    """Returns the kernels of :func:`flashcute.heuristics.shipped_configs` that this run covers."""
    return [config for config in heuristics.shipped_configs(arch) if covers(config)]
