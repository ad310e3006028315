"""A program of its own: calls over a cache as on CUDA, by the binding of ``host_binding.cpp``.

Prints what is wrong with them, one line each, and their number.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import pathlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

register = torch.library.Library.impl


def register_unless_cpu(library, name, function, key="", **options):
    """Where the binding's operators are."""
    if key != "CPU":
        register(library, name, function, key, **options)


torch.library.Library.impl = register_unless_cpu

from test_checks_kvcache import CASES  # noqa: E402
from test_checks_varlen import CASES as VARLEN_CASES  # noqa: E402

from flashcute import (  # noqa: E402
    KVCachePlan,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    heuristics,
    jit,
    ops,
    ops_kvcache,
)
from flashcute.config import BwdConfig  # noqa: E402
from flashcute.jit import abi  # noqa: E402

choose = ops._choose

# Of tensors that are made, or copied, anew in each call; those of lengths that an int stands for.
FRESH = {"o_ptr", "softmax_lse_ptr", "plan_ptr", "o_partial_ptr", "lse_partial_ptr", "q_ptr"}
FRESH |= {"sinks_ptr", "seqused_k_ptr"}


def load() -> ctypes.CDLL:
    """The binding, and kernels for all problems."""
    here = pathlib.Path(__file__).with_suffix(".cpp")
    unit = jit.binding.binding_unit(ops.NAMESPACE)
    unit = dataclasses.replace(unit, name="host_binding", source=here.read_text())
    unit = dataclasses.replace(
        unit, flags=(*unit.flags, *(f"-I{folder}" for folder in unit.project_dirs))
    )
    path = jit.build.build(unit, jit.toolchain.find_host_compiler()).artefact.path
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    for name in ("kernel", "params", "bwd_kernel", "bwd_params"):
        getattr(library, f"host_{name}").restype = ctypes.c_void_p
    ops.jit.load_binding = lambda: path
    ops._choose = lambda problem: (
        ops._Choice(library.host_bwd_kernel())
        if problem.backward
        else ops._Choice(library.host_kernel(), problem.cache, 3, 1, 8)
    )
    ops.load()
    torch.library.Library.impl = register
    base = torch._C.TensorBase.__dict__
    torch.Tensor.is_cuda, torch.Tensor.is_cpu = base["is_cpu"], base["is_meta"]
    return library


def refusals() -> list[str]:
    """Of odd inputs that are not odd because of their device, or of values on the device."""
    odd = [c for c in (*CASES, *VARLEN_CASES) if {"meta", "fake_cuda"} & set(c.on)]
    odd = [c for c in odd if not c.name.endswith("on the cpu") and c.name != "float64 for kernels"]
    odd += [c for c in (*CASES, *VARLEN_CASES) if c.name.endswith(("sparse", "nested"))]
    return [failure for case in odd if (failure := case.failure("cpu")) is not None]


def calls():
    """Arguments of calls that the kernels can take as they are."""

    def zeros(*shape: int, dtype=torch.float16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    paged = {n: zeros(7, 4, 2, 64) for n in ("k_cache", "v_cache")} | {"block_table": ints(3, 5)}
    entries = {n: zeros(4, 20, 2, 64) for n in ("k_cache", "v_cache")}
    heads_first = {n: zeros(4, 2, 20, 64).transpose(1, 2) for n in ("k_cache", "v_cache")}
    tables = {"rotary_cos": zeros(20, 8), "rotary_sin": zeros(20, 8), "rotary_interleaved": False}
    new = {"k": zeros(3, 2, 2, 64), "v": zeros(3, 2, 2, 64)}
    places = {"cache_batch_idx": ints(3), "cache_leftpad": ints(3)}
    options = {"softmax_scale": 0.25, "window_size": (3, 10**30), "num_splits": 7}
    options |= {"softcap": 30.0, "sinks": zeros(4), "alibi_slopes": torch.zeros(3, 4)}
    for cache, more, appended, lengths, asked, seqlen_q in itertools.product(
        (paged, entries, heads_first),
        ({}, places),
        ({}, new, new | tables),
        (ints(3), 11, 0, None),
        ({}, {"causal": True}, options, {"sinks": torch.zeros(4)}),
        (1, 5, 0),
    ):
        if (cache is paged and more) or (lengths is None and appended):
            continue
        q = {"q": zeros(3, seqlen_q, 4, 64)}
        yield q | cache | more | appended | asked | {"cache_seqlens": lengths}


def launched(library: ctypes.CDLL, backward: bool = False) -> dict:
    """The parameters of the last launch."""
    struct = abi.FlashBwdParams if backward else abi.FlashFwdParams
    address = library.host_bwd_params() if backward else library.host_params()
    params = ctypes.cast(address, ctypes.POINTER(struct)).contents
    fields = [name for base in struct.__mro__ for name, _ in vars(base).get("_fields_", ())]
    return {name: getattr(params, name) for name in fields}


def differences(library: ctypes.CDLL) -> list[str]:
    """Between launches with the checks in Python and without them."""
    launch, found = ops_kvcache.launch_unchecked, []

    def run(checked: bool, given: dict, **options) -> tuple[dict, list]:
        ops_kvcache.launch_unchecked = (lambda *args: None) if checked else launch
        out = flash_attn_with_kvcache(**given, **options)
        results = [(x.shape, x.stride(), x.dtype) for x in (out if options else (out,))]
        return launched(library), results

    for given in calls():
        expected, results = run(True, given, return_softmax_lse=True)
        if isinstance(given["cache_seqlens"], int):
            new = given["k"].shape[1] if "k" in given else 0
            expected["seqlen_k"] = given["cache_seqlens"] + new
        for options in ({}, {"return_softmax_lse": True}):
            params, got = run(False, given, **options)
            names = [n for n in expected if n not in FRESH and expected[n] != params[n]]
            has_lse = params["softmax_lse_ptr"] is not None or given["q"].numel() == 0
            if names or got != results[: len(got)] or not has_lse:
                wrong = [f"{n}={params[n]} and not {expected[n]}" for n in names]
                shapes = {n: list(getattr(x, "shape", [x])) for n, x in given.items()}
                found.append(f"{', '.join(wrong)}; {got} of {results}; {shapes}")
    return found


def ragged_calls():
    """Likewise, of packed queries."""

    def zeros(*shape: int, dtype=torch.float16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    starts = {"cu_seqlens_k": ints(4)}
    packed = {n: zeros(30, 2, 64) for n in "kv"} | starts
    apart = {n: zeros(30, 3, 2, 64)[:, 1] for n in "kv"} | starts
    pages = {n: zeros(7, 4, 2, 64) for n in "kv"} | {"block_table": ints(3, 5)}
    heads_first = {n: zeros(7, 2, 4, 64).transpose(1, 2) for n in "kv"} | {
        "block_table": ints(3, 7)[:, :5]
    }
    used = {"seqused_k": ints(3)}
    options = {"softmax_scale": 0.25, "window_size": (3, 10**30), "num_splits": 7}
    options |= {"softcap": 30.0, "sinks": torch.zeros(4), "alibi_slopes": torch.zeros(3, 4)}
    for keys, asked, total in itertools.product(
        (
            *(packed, apart, packed | used, pages | starts, pages | starts | used),
            *(pages | used | {"cu_seqlens_k": None}, heads_first | used | starts),
        ),
        (
            *({}, {"causal": True, "deterministic": True}, options, {"num_splits": 3}),
            *({"sinks": zeros(4)}, {"seqused_q": ints(3), "softmax_scale": 2}),
        ),
        (9, 0),
    ):
        q = {"q": zeros(total, 4, 64), "cu_seqlens_q": ints(4)}
        yield q | keys | asked | {"max_seqlen_q": 5, "max_seqlen_k": 11}


def differences_of_varlen(library: ctypes.CDLL) -> list[str]:
    """Between launches of a ragged batch with the checks in Python and without them."""
    launch, found = ops_kvcache.launch_varlen_unchecked, []

    def run(checked: bool, given: dict, **options) -> tuple[dict, list]:
        taken = []

        def remember(*args):
            taken.append(launch(*args))
            return taken[0]

        ops_kvcache.launch_varlen_unchecked = (lambda *args: None) if checked else remember
        out = flash_attn_varlen_func(**given, **options)
        if not checked and taken[0] is None:
            found.append(f"left to the checks in Python: {given.keys()}")
        results = [(x.shape, x.stride(), x.dtype) for x in (out if options else (out,))]
        return launched(library), results

    for given in ragged_calls():
        expected, results = run(True, given, return_attn_probs=True)
        for options in ({}, {"return_attn_probs": True}):
            params, got = run(False, given, **options)
            names = [n for n in expected if n not in FRESH and expected[n] != params[n]]
            has_lse = params["softmax_lse_ptr"] is not None or given["q"].numel() == 0
            if names or got != results[: len(got)] or not has_lse:
                wrong = [f"{n}={params[n]} and not {expected[n]}" for n in names]
                found.append(f"ragged: {', '.join(wrong)}; {got} of {results}; {given.keys()}")
    ops_kvcache.launch_varlen_unchecked = launch
    return found


def differences_of_plans(library: ctypes.CDLL) -> list[str]:
    """Between launches with a plan and without; plans that are not made where they must be, or are
    made where they must not; appends without a launch of their own."""
    found = []
    for given in calls():
        if isinstance(given["cache_seqlens"], int) or not (given["q"].numel() or "k" in given):
            continue
        names = [n for n in ("q", "k_cache", "v_cache", "k", "v") if n in given]
        layers = [[given[n].clone() for n in names] for _ in range(2)]
        options = {n: x for n, x in given.items() if n not in names}
        plan = KVCachePlan(**options)
        seen = []
        for tensors, renews in zip([*layers, layers[0]], (False, False, True), strict=True):
            if renews:
                plan.renew()
            before = library.host_plans(), library.host_appends()
            versions = [x._version + int("k" in given) for x in tensors[1:3]]
            out = plan(*tensors)
            made, appended = library.host_plans() - before[0], library.host_appends() - before[1]
            got = launched(library)
            if [x._version for x in tensors[1:3]] != versions:
                found.append("with a plan autograd is not told what was changed")
            expected_out = flash_attn_with_kvcache(*tensors, **options)
            expected = launched(library)
            differing = [n for n in expected if n not in FRESH and expected[n] != got[n]]
            if differing or any(x(out) != x(expected_out) for x in (Tensor.size, Tensor.stride)):
                found.append(f"with a plan {[(n, got[n], expected[n]) for n in differing]}")
            q = got["q_unrotated_ptr"] if "rotary_cos" in given else got["q_ptr"]
            if out.numel() and (q != tensors[0].data_ptr() or got["o_ptr"] != out.data_ptr()):
                found.append("with a plan other tensors")
            rotated = got["q_ptr"] if "rotary_cos" in given else 0
            memory = (got[n] for n in ("plan_ptr", "o_partial_ptr", "softmax_lse_ptr"))
            seen.append((made, appended, rotated, *memory))
        appends = [0, int("k" in given), 0]
        if [x[0] for x in seen] != [1, 0, 1] or [x[1] for x in seen] != appends:
            found.append(f"plans and appends launched: {[x[:2] for x in seen]}")
        if len({x[2:] for x in seen}) != 1:
            found.append(f"memory of a plan: {[x[2:] for x in seen]}")
        number = plan._number
        for other in (layers[0][:3], [*layers[0][:3], *[layers[0][0]] * 2]):
            run = ops_kvcache.planned()[1 + (len(other) == 5)]
            if len(other) != len(layers[0]) and run(*other, number) is not None:
                found.append("a plan is run with k and v, or without, as it was not made")
        del plan
        run = ops_kvcache.planned()[1 + ("k" in given)]
        if number == 0 or run(*layers[0], number) is not None:
            found.append(f"plan {number} is still there")
    return found


def choices_of_backwards(library: ctypes.CDLL) -> list[str]:
    """On Hopper, were ragged batches of long sequences computed by the sm90 class, whose sums of dQ
    have room for whole blocks of rows of each sequence."""
    configs, remembered = [], ops._choose
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)

    def build(config, target):
        configs.append(config)
        return SimpleNamespace(address=library.host_bwd_kernel())

    def config_of(lengths: list[int], bound: int) -> BwdConfig:
        total, x = sum(lengths), torch.zeros(sum(lengths), 1, 8, dtype=torch.float16)
        lse, cu = torch.zeros(1, total), torch.tensor([0, *lengths]).cumsum(0).int()
        lengths_of = cu, cu, None, None, bound, bound
        backward = torch.ops.flashcute.bwd_varlen.default
        backward(x, x, x, x, x, lse, None, *lengths_of, 0.5, True, -1, -1, None, 7)
        return configs[-1]

    found = []
    with (
        mock.patch.object(heuristics, "_SM90_BWD_RAGGED_FROM", 128),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: gpu),
        mock.patch.object(jit, "get_kernel", build),
        mock.patch.object(ops, "_choose", choose),
    ):
        for short, n, long, arch in (
            *((512, 4, 512, 90), (128, 9, 128, 90), (100, 9, 100, 80), (64, 8192, 8192, 80)),
            *((16, 4096, 4096, 80), (1, 600, 65536, 80), (1, 64, 65536, 90)),
        ):
            config = config_of([short] * n + [long], long)
            rows = launched(library, backward=True)["seqlen_q_rounded"]
            total = short * n + long
            if config.arch != arch or (arch == 90 and rows > 2.3 * total + 256):
                found.append(f"{n} of {short} and one of {long}: {config}, {rows} rows of {total}")
        mask = config_of([2, 1, 0], 2).mask
        if mask != "causal":  # although the mean length is 1
            found.append(f"of lengths 2, 1 and 0 the mask is {mask}")
    ops._choose = remembered
    return found


def failures_of_kernels(library: ctypes.CDLL) -> list[str]:
    """Which are not tried again with the checks in Python, as arguments are not at fault."""
    given, found = next(calls()), []
    library.host_fail(98)
    checks, ops_kvcache.launch = ops_kvcache.launch, None
    try:
        flash_attn_with_kvcache(**given)
    except RuntimeError as error:
        if "on_host failed to launch: an error" not in str(error):
            found.append(repr(error))
    else:
        found.append("expected an error of the launch, got none")
    library.host_fail(0)
    ops_kvcache.launch = checks
    return found


def main() -> None:
    library = load()
    found = refusals()
    with torch.no_grad():
        found += differences(library) + differences_of_varlen(library)
        found += differences_of_plans(library)
        found += choices_of_backwards(library)
        found += failures_of_kernels(library)
    print(*found[:20], f"{len(found)} are wrong", sep="\n")


if __name__ == "__main__":
    main()
