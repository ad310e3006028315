"""Every kernel that ships compiles for an H100/H200, without spills and arrays in local memory, and
a Hopper kernel compiles into the instructions that it was written for. The tests also cover kernels
of Hopper's backward that do not ship. Most of these have not run on a GPU yet, where some faults
would show as a hang.

With ``--all`` each kernel is compiled as it is committed. Without it, kernels of one pass, class
and head dimension are compiled together: they share nearly all of the work of the compiler's front
end, so that the first forward takes 37 s and each other one 8 s. The host's code, which describes
and launches a kernel and takes a quarter of the time, is compiled for some of them only."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re

import pytest
import tiers
from machine_code import without_host_code

from flashcute import jit, shipped
from flashcute.config import DTYPES, HEAD_DIMS, MASKS, MAX_SMEM_BYTES
from flashcute.heuristics import (
    bwd_config,
    bwd_with_options,
    choose_fwd,
    fused_bwd_config,
    sm90_bwd_config,
)
from flashcute.jit import build, kernels, sources, toolchain
from flashcute.jit.abi import FlashKernel
from flashcute.jit.sources import kernel_include_dir
from flashcute.problem import FwdProblem
from flashcute.profiling.disassembly import read_binaries
from flashcute.sim.build import entry

TARGET = "90"
FILES = shipped.instantiations()
SM90_BACKWARDS = [
    bwd_with_options(sm90_bwd_config(dtype, head_dim, mask), varlen=varlen)
    for dtype, head_dim, mask in itertools.product(DTYPES, HEAD_DIMS, MASKS)
    for varlen in (False, True)
]
SM90_BACKWARDS = [
    dataclasses.replace(config, softcap=softcap, alibi=alibi, dropout=dropout)
    for config in SM90_BACKWARDS
    for softcap, alibi, dropout in itertools.product((False, True), repeat=3)
]
KERNELS = FILES | {c.full_name: c for c in SM90_BACKWARDS if c not in FILES.values()}
COVERED = {stem: config for stem, config in KERNELS.items() if tiers.compiles(config)}
SM90 = [stem for stem, config in COVERED.items() if config.arch == 90]
SM80_FORWARDS = [stem for stem, x in COVERED.items() if x.arch == 80 and x.kind == "fwd"]
# griddepcontrol.wait and griddepcontrol.launch_dependents in machine code.
WAIT, TRIGGER = "ACQBULK", "PREEXIT"


def config_of_cache(head_dim, seqlen_q, page_size):
    heads = (64, 8) if head_dim == 64 else (8, 1)
    shape = (32, seqlen_q, 4096, *heads, head_dim)
    problem = FwdProblem("bf16", True, *shape, cache=True, page_size=page_size, num_splits=0)
    config = choose_fwd(problem, (9, 0))
    assert config.paged == (page_size > 0)
    return config


# (head dimension, queries, page size) of kernels that do not ship and whose merge of parts has
# spilled, because two CTAs share an SM or O takes the registers.
CACHES = [(64, 4, 0), (256, 1, 0)] + [(64, 1, 0), (192, 1, 16), (96, 1, 16)] * tiers.everything
CACHES = [config_of_cache(*cache) for cache in CACHES]


def ragged_with_options(fused, dtype, head_dim, mask, *options):
    config = fused_bwd_config(dtype, head_dim, mask, (9, 0))
    config = config if fused else bwd_config(dtype, head_dim, mask)
    return bwd_with_options(config, *options, varlen=True)


# Seven ragged backwards with options that have spilled; none of them ships. The arguments are
# fused, dtype, head dimension, mask, softcap, ALiBi and dropout.
OF_OPTIONS = [
    ragged_with_options(False, "bf16", 64, "causal", True, True, True),
    ragged_with_options(True, "fp16", 256, "local", False, False, False),
    ragged_with_options(True, "bf16", 64, "local", True, True, True),
    ragged_with_options(True, "bf16", 96, "local", True, True, True),
    ragged_with_options(True, "bf16", 256, "causal", False, False, False),
    ragged_with_options(False, "bf16", 32, "causal", False, True, True),
    ragged_with_options(False, "bf16", 192, "local", True, False, True),
]
OF_OPTIONS = OF_OPTIONS if tiers.everything else OF_OPTIONS[:2]


@pytest.fixture(scope="module")
def compiler():
    try:
        return toolchain.find_nvcc()
    except jit.BuildError as error:
        pytest.skip(f"no CUDA compiler: {error}")


# The (pass, class, head dimension) whose kernels are compiled with the host's code: one for each
# pass and class, and a second one where two CTAs share a tile of keys.
WITH_HOST_CODE = (
    *(("fwd", 80, 64), ("fwd", 90, 64), ("bwd", 80, 128)),
    *(("bwd", 90, 64), ("bwd", 90, 256)),
)


def has_host_code(config):
    return tiers.everything or (config.kind, config.arch, config.head_dim) in WITH_HOST_CODE


def unit_of(configs):
    """Returns the unit of a kernel as it ships, or one unit for several kernels."""
    unit = kernels.kernel_unit(configs[0], TARGET)
    unit = unit if has_host_code(configs[0]) else without_host_code(unit)
    if len(configs) == 1:
        return unit
    include = next(line for line in unit.source.splitlines() if line.startswith("#include"))
    entries = "\n".join(entry(config, config.full_name) for config in configs)
    name = f"flash_{configs[0].kind}_hdim{configs[0].head_dim}_sm{configs[0].arch}"
    return dataclasses.replace(unit, name=name, source=f"{include}\n\n{entries}\n")


@pytest.fixture(scope="module")
def built(compiler):
    """Returns, for each kernel, the result of its build and the function that describes it.

    The cache keeps kernels that have not changed.
    """
    groups = {}
    for config in dict.fromkeys((*COVERED.values(), *CACHES, *OF_OPTIONS)):
        alike = (config.kind, config.arch, config.head_dim)
        groups.setdefault(config if tiers.everything else alike, []).append(config)
    sources.require_cutlass()
    units = [unit_of(group) for group in groups.values()]
    results = build.build_many(units, compiler)
    return {
        config: (result, config.full_name if len(group) > 1 else sources.entry_point(config))
        for group, result in zip(groups.values(), results, strict=True)
        for config in group
    }


# Enumerators and truth values of a configuration as they are in mangled names.
_NUMBERS = {
    **{"DType::fp16": "0", "DType::bf16": "1", "false": "0", "true": "1"},
    **{"MaskKind::none": "0", "MaskKind::causal": "1", "MaskKind::local": "2"},
}


def numbers_of(config):
    """Returns a configuration's members in their order, as they are in mangled names."""
    found = re.findall(r"= (?:flash::)?((?:DType|MaskKind)::\w+|\w+)", config.to_cpp())
    return [_NUMBERS.get(value, value) for value in found]


def numbers_in(mangled):
    """Returns the numbers among a kernel's template arguments, those of its configuration first."""
    return re.findall(r"L(?:[a-z]|N\w+?E|S\w?_)(\d+)E", mangled)


@pytest.fixture(scope="module")
def kernels_of(built):
    """Returns a function that returns the machine code of all kernels of a configuration."""
    read = {}

    def of(config):
        result, _ = built[config]
        assert result.error is None, result.error
        path = result.artefact.path
        if path not in read:
            read[path] = [(numbers_in(x.function.name), x) for x in read_binaries(path)]
        wanted = numbers_of(config)
        found = [x for numbers, x in read[path] if numbers[: len(wanted)] == wanted]
        assert found, f"no kernel of {path} has the template arguments {wanted}"
        return found

    return of


@pytest.fixture(scope="module")
def main_kernel(kernels_of):
    """Returns a function that returns the configuration's kernel with the most products."""
    return lambda stem: max(kernels_of(COVERED[stem]), key=lambda kernel: kernel.mmas)


def launch_bounds(config):
    """Returns (threads, CTAs per SM) of each attention kernel of a configuration."""
    if config.kind == "fwd":
        return [(config.threads, config.min_ctas)]
    if config.arch == 90:
        return [(config.threads, 1)]
    return [(32 * tile.warps, tile.min_ctas) for tile in (config.dq, config.dkv)]


def merges(config):
    """Returns whether a shipped kernel's CTAs merge the parts of a tile: MergeParts::kCan."""
    few = config.kind == "fwd" and config.warps == 4 and config.min_ctas <= 2
    return few and config.mask != "local"


@pytest.mark.parametrize("stem", COVERED)
def test_compiles_without_spills(built, kernels_of, stem):
    config = COVERED[stem]
    result, _ = built[config]
    assert result.error is None, result.error
    assert result.artefact.meta["stack_bytes"] == 0
    # As many CTAs as the configuration promises must fit into an SM's registers and shared memory.
    main = f"flash_{config.kind}_kernel_sm{config.arch}"
    registers = max(x.registers for x in kernels_of(config) if main in x.function.name)
    for threads, min_ctas in launch_bounds(config):
        assert 0 < registers * threads * min_ctas <= 65536
        assert config.smem_bytes * min_ctas <= MAX_SMEM_BYTES[9, 0]


@pytest.mark.parametrize(
    "config",
    (FILES["flash_fwd_hdim64_bf16_causal_sm80"], fused_bwd_config("bf16", 128, "causal", (8, 0))),
    ids=lambda c: c.full_name,
)
def test_the_sm80_class_compiles_for_the_first_gpus_of_its_kind(config, compiler):
    """The sm80 class needs no later GPU, although its other kernels here are compiled for Hopper.

    On these GPUs a backward has its own code and tile, as dQ is summed up word by word.
    """
    unit = kernels.kernel_unit(config, "80")
    unit = unit if tiers.everything else without_host_code(unit)
    (result,) = build.build_many([unit], compiler)
    assert result.error is None, result.error
    assert result.artefact.meta["stack_bytes"] == 0
    codes = [kernel.function.instructions for kernel in read_binaries(result.artefact.path)]
    assert codes and not {WAIT, TRIGGER} & {x.name for code in codes for x in code}


@pytest.mark.parametrize("config", OF_OPTIONS, ids=lambda config: config.full_name)
def test_ragged_backwards_with_options_do_not_spill(config, built):
    result, _ = built[config]
    assert result.error is None, result.error
    assert result.artefact.meta["stack_bytes"] == 0


def test_shared_memory_that_the_host_lays_out_otherwise_is_refused(compiler, tmp_path):
    """An empty member that is aligned to more than its surroundings is an error.

    nvcc pads for it and the host's compiler does not, but a launch asks for the host's size. The
    simulator has the host's layout, too.
    """
    old = "alignas(128) [[no_unique_address]] cute::array<float, kWide ? 0"
    for header in kernel_include_dir().glob("*.h"):
        text = header.read_text()
        if header.name == "kernel_traits_bwd_sm90.h":
            assert text.count(old) == 1
            text = text.replace(old, old.replace("128", "1024"))
        (tmp_path / header.name).write_text(text)
    unit = kernels.kernel_unit(sm90_bwd_config("bf16", 192), TARGET)
    unit = dataclasses.replace(unit, project_dirs=(tmp_path,))
    (result,) = build.build_many([unit], compiler, 1)
    assert re.search(r"kernel_traits_bwd_sm90\.h.*static assertion failed", result.error)


@pytest.mark.parametrize("config", CACHES, ids=lambda config: config.full_name)
def test_a_cache_does_not_spill(config, built):
    assert merges(config)
    assert config.min_ctas == (2 if config.head_dim <= 96 else 1)
    result, _ = built[config]
    assert result.error is None, result.error
    assert result.artefact.meta["stack_bytes"] == 0


@pytest.mark.parametrize("stem", filter(lambda stem: has_host_code(COVERED[stem]), COVERED))
def test_says_of_itself_what_the_configuration_says(built, stem):
    """Threads, shared memory and tiles that Python planned are those of the compiled traits."""
    config = COVERED[stem]
    result, function = built[config]
    assert result.error is None, result.error
    describe = getattr(ctypes.CDLL(str(result.artefact.path)), function)
    describe.restype = ctypes.POINTER(FlashKernel)
    kernels.check_description(describe().contents, config, result.artefact.path)


@pytest.mark.parametrize("stem", FILES)
def test_the_committed_file_is_what_is_compiled(stem):
    committed = kernel_include_dir() / "instantiations" / f"{stem}.cu"
    assert committed.read_text(encoding="utf-8") == jit.source_text(FILES[stem])


@pytest.mark.parametrize("stem", SM80_FORWARDS)
def test_the_sm80_class_waits_for_the_previous_kernel_on_hopper(main_kernel, stem):
    """The host launches it early by the same constant, which the simulator cannot check."""
    code = [x.name for x in main_kernel(stem).function.instructions]
    accesses = {"LDG", "LDGSTS", "LD", "STG", "ST", "ATOMG", "ATOM", "RED"}
    assert code.index(WAIT) < next(i for i, name in enumerate(code) if name in accesses)


@pytest.mark.parametrize("stem", SM90)
def test_ptxas_gives_nothing_up(built, stem):
    """ptxas reports with C75xx that it serialises wgmma or ignores setmaxnreg."""
    result, _ = built[COVERED[stem]]
    assert result.error is None, result.error
    log = result.artefact.meta["log"]
    assert "Used" in log  # the log has ptxas' output
    assert not re.findall(r".*(?:\(C7\d{3}\)|wgmma|setmaxnreg|warning).*", log, re.IGNORECASE)


@pytest.mark.parametrize("stem", SM90)
def test_registers_are_dealt_anew(main_kernel, stem):
    config, kernel = COVERED[stem], main_kernel(stem)
    found = [x for x in kernel.function.instructions if x.opcode.startswith("USETMAXREG")]
    amounts = {x.opcode.split(".")[1]: int(x.operands.split(",")[-1], 16) for x in found}
    assert len(found) == 2 and amounts.keys() == {"DEALLOC", "TRY_ALLOC"}, found
    # The traits and the simulator assume as many registers as fit into an SM, at most 240. They are
    # read from the kernel, as the record of a shared object has the most of all its kernels.
    at_launch = kernel.registers
    ((threads, min_ctas),) = launch_bounds(config)
    assert at_launch == min(65536 // (threads * min_ctas) // 8 * 8, 240)
    # To raise the registers to fewer than at launch is undefined, and to more than are left hangs.
    assert amounts["DEALLOC"] < at_launch <= amounts["TRY_ALLOC"]
    given = amounts["TRY_ALLOC"] * (threads - 128) + amounts["DEALLOC"] * 128
    assert given <= at_launch * threads


def wgmma_runs(kernel):
    """Returns the runs of wgmma instructions that have no wait between them."""
    code = kernel.function.instructions
    steps = [x for x in code if x.mma_shape or x.opcode.startswith("WARPGROUP.DEPBAR")]
    runs = itertools.groupby(steps, lambda x: x.mma_shape is None)
    return [list(run) for waits, run in runs if not waits]


def products(kernel):
    """Returns (where A is, M, N, K) of each wgmma of :func:`wgmma_runs`."""
    return [
        [("smem" if x.reads_a_from_smem else "registers", *x.mma_shape) for x in run]
        for run in wgmma_runs(kernel)
    ]


@pytest.mark.parametrize("stem", [stem for stem in SM90 if COVERED[stem].kind == "bwd"])
def test_products_of_a_backward_are_those_intended_and_never_serialised(main_kernel, stem):
    config = COVERED[stem]
    rows, step, d = config.dkv.rows, config.dkv.step, config.head_dim
    # K Q^T and V dO^T read the first steps of K and V from registers: kernel_traits_bwd_sm90.h.
    kept = {32: (2, 2), 64: (2, 0), 96: (4, 4), 192: (12, 8)}.get(d, (0, 0))
    kept = (0, 0) if config.dropout or (config.softcap and config.alibi) else kept
    scores = [
        [("registers", 64, step, 16)] * n + [("smem", 64, step, 16)] * (d // 16 - n) for n in kept
    ]
    gradient = [("registers", 64, d, 16)] * (step // 16)  # P^T dO and dS^T Q
    # P^T dO is in two parts in mainloop_bwd_64_sm90.h.
    in_parts = d <= 64 and not (config.softcap or config.dropout)
    parts = [gradient[:2], gradient[2:]] if in_parts else []
    # In dS K each warpgroup has 64 rows and all columns, or all rows and half of the columns, in
    # whole pages of columns. Above d = 128 this is half of a CTA's half (at d = 192 32 and 64 of
    # 96), for the CTA's own keys and then for the other CTA's.
    columns = {96: (64,), 128: (64,), 192: (32, 64), 256: (64,)}.get(d, (d,))
    dq = [[("smem", 64, n, 16)] * (rows // 16) for n in columns]
    # At d = 96 dS K is 8 instructions that are equal to the 6 of a product of scores, so longer
    # products are matched first.
    by_length = sorted((*scores, gradient, *dq, *parts), key=len, reverse=True)
    found = []
    for run in products(main_kernel(stem)):
        rest = run
        while rest:
            whole = [x for x in by_length if rest[: len(x)] == x]
            assert whole, f"a product is interrupted: {run}"
            found += whole
            rest = rest[len(whole[0]) :]
    assert all(product in found for product in (*scores, gradient, *dq, *parts))


@pytest.mark.parametrize("stem", [stem for stem in SM90 if COVERED[stem].kind == "fwd"])
def test_products_are_those_intended_and_never_serialised(main_kernel, stem):
    config = COVERED[stem]
    # A product is a list of instructions with K = 16. S = Q K^T reads Q's first steps from
    # registers and the others from shared memory. O += P V reads P from registers.
    kept = config.q_in_regs
    qk = [("registers", 64, config.tile_n, 16)] * kept
    qk += [("smem", 64, config.tile_n, 16)] * (config.head_dim // 16 - kept)
    pv = [("registers", 64, config.head_dim, 16)] * (config.tile_n // 16)
    runs = products(main_kernel(stem))
    # A tile's first Q K^T and last P V are outside the loop, in which one follows the other. A
    # causal kernel has one copy of the loop with the mask and one without.
    for run in runs:
        assert run in (qk, pv, qk + pv), f"a product is interrupted: {run}"
    assert qk in runs and pv in runs and qk + pv in runs


@pytest.mark.parametrize("stem", [stem for stem in SM90 if COVERED[stem].kind == "fwd"])
def test_warps_in_different_loops_issue_the_same_wgmma(main_kernel, stem):
    """Warps of a warpgroup may be in two loops at a time: the one that seeks the maximum and the
    other. PTX demands that all four execute the same wgmma; here it is two equal instructions."""
    runs = wgmma_runs(main_kernel(stem))
    runs = [[(x.guard, x.opcode, x.operands) for x in run] for run in runs]
    most = max(map(len, runs))
    first, *others = [run for run in runs if len(run) == most]  # Q K^T and P V
    assert len(others) == 1 and others[0] == first


@pytest.mark.parametrize("stem", [stem for stem in SM90 if merges(COVERED[stem])])
def test_parts_are_stored_before_they_are_counted_and_read_behind(main_kernel, stem):
    """The simulator does not model weak memory order, so the instructions are checked.

    add_acq_rel() is a fence of the whole GPU, the addition, and an invalidation of L1, which may
    hold lines of other CTAs.
    """
    code = main_kernel(stem).function.instructions
    code = [x.opcode for x in code if x.opcode.startswith(("MEMBAR.", "ATOMG.", "CCTL."))]
    at = code.index("MEMBAR.ALL.GPU")
    assert code[at + 1].startswith("ATOMG.E.ADD.STRONG.GPU"), code
    assert code[at + 2] == "CCTL.IVALL", code
    assert code.count("MEMBAR.ALL.GPU") == 1 and "MEMBAR.SC.GPU" not in code
