"""Which of the shipped kernels, and of the faults planted into kernels, a run of the tests covers:
all with ``--all``, else enough of them.

A kernel of fp16 differs from that of bf16 in its conversions and in the range of P, which no tile
size changes. So every kernel of bf16 is covered, and of fp16 those of two head dimensions, one with
a causal mask and one without, in each kernel class. A backward is several kernels, which compile
for a minute: two head dimensions of bf16 are covered, in the sm80 class dK and dV in one kernel and
apart, and one kernel for all with two and four warps on a step, in the sm90 class two main loops,
and one of fp16. Of the kernels of
:data:`flashcute.shipped.CALLS` one is, and every forward over pages in the sm90 class, as five of
these once spilled unseen; tests/sim runs more of those that decode. Of the backward of ragged
batches in the sm90 class, a kernel of each main loop is covered.

tests/sim runs what is covered. nvcc takes longer: of two forwards of bf16 that differ in the mask
alone, it compiles the causal one, which has the other's loop and one more; of fp16 forwards of one
head dimension, and backwards of the sm90 class; of the sm80 class's forwards three head dimensions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from flashcute import heuristics, shipped, sim
from flashcute.config import BwdConfig, FwdConfig

everything = False  # set by conftest.py before tests are collected

_FP16 = {(64, "causal"), (128, "none")}
_NVCC = {(128, "none")}  # of these
_NVCC_SM80 = (64, 128, 256)  # forwards, whose tiles differ in little

_BACKWARD = {("bf16", 128, "causal"), ("bf16", 192, "none"), ("fp16", 64, "causal")}

_OF_CALLS = {"flash_fwd_hdim256_bf16_local_softcap_sm90_128x64_s2_pp"}

# Of the sm90 class's backward of ragged batches, and with options, most of which is built when it
# is first used.
_UNSHIPPED = {
    "flash_bwd_hdim96_bf16_causal_varlen_sm90_128x64_s2",
    "flash_bwd_hdim256_bf16_varlen_sm90_64x64_s2",
    "flash_bwd_hdim64_bf16_causal_softcap_sm90_128x128_s2",
    "flash_bwd_hdim96_bf16_causal_alibi_sm90_128x64_s2",
    "flash_bwd_hdim128_bf16_softcap_alibi_dropout_sm90_128x64_s2",
    "flash_bwd_hdim256_bf16_causal_softcap_sm90_64x64_s2",
}


def covers(config: FwdConfig | BwdConfig) -> bool:
    """Whether this run covers a kernel that ships or may ship."""
    dense = {*heuristics.shipped_configs(), *heuristics.shipped_bwd_configs()}
    if config not in dense:
        pages_on_hopper = config.kind == "fwd" and config.paged and config.arch == 90
        return everything or pages_on_hopper or config.full_name in _OF_CALLS | _UNSHIPPED
    if config.kind == "bwd":
        return everything or (config.dtype, config.head_dim, config.mask) in _BACKWARD
    return everything or config.dtype == "bf16" or (config.head_dim, config.mask) in _FP16


def compiles(config: FwdConfig | BwdConfig) -> bool:
    """Whether this run compiles a kernel with nvcc."""
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
    """Of the faults planted into kernels those that a checker finds, and every other one of those
    in one file that are found in one way: each is a kernel to compile, and says what the tests
    find, not what the kernels do."""
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for fault in planted:
        kind = fault.file, fault.finder
        if everything or fault.finder in sim.CHECKERS or seen[kind] % 2 == 0:
            kept.append(fault)
        seen[kind] += 1
    return tuple(kept)


def shipped_configs(arch: int | None = None) -> list[FwdConfig]:
    """Those of :func:`flashcute.heuristics.shipped_configs` that this run covers."""
    return [config for config in heuristics.shipped_configs(arch) if covers(config)]
