"""A program that makes calls over a KV cache, and of ragged batches, as if on CUDA.

The binding of ``host_binding.cpp`` runs them on CPU tensors. The program prints what is wrong with
them, one line each, and the number of these lines.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import pathlib
import re
import resource
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

register = torch.library.Library.impl


def register_unless_cpu(library, name, function, key="", **options):
    """Registers an implementation in Python, but not for the CPU: there the binding has its own."""
    if key != "CPU":
        register(library, name, function, key, **options)


torch.library.Library.impl = register_unless_cpu

from test_checks_kvcache import CASES  # noqa: E402
from test_checks_varlen import CASES as VARLEN_CASES  # noqa: E402

from flashcute import (  # noqa: E402
    KVCachePlan,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    jit,
    loading,
    ops,
    ops_kvcache,
)
from flashcute.config import BwdConfig  # noqa: E402
from flashcute.jit import abi  # noqa: E402

choose = ops._choose

# Pointers that differ between two equal calls. They point to tensors that each call allocates or
# copies, and to the tensor of lengths that replaces an int.
FRESH = {"o_ptr", "softmax_lse_ptr", "plan_ptr", "o_partial_ptr", "lse_partial_ptr", "q_ptr"}
FRESH |= {"sinks_ptr", "seqused_k_ptr"}


def load() -> ctypes.CDLL:
    """Builds and loads the binding; lets it find a kernel of the host for each problem."""
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
    """Returns what is wrong with the errors of odd calls.

    Cases whose error is due to the device of a tensor, or to values on the device, are left out.
    """
    odd = [c for c in (*CASES, *VARLEN_CASES) if {"meta", "fake_cuda"} & set(c.on)]
    odd = [c for c in odd if not c.name.endswith("on the cpu") and c.name != "float64 for kernels"]
    odd += [c for c in (*CASES, *VARLEN_CASES) if c.name.endswith(("sparse", "nested"))]
    return [failure for case in odd if (failure := case.failure("cpu")) is not None]


def calls():
    """Yields arguments of calls over a cache that the kernels can take without a copy."""

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
    """Returns the parameters of the last launch."""
    struct = abi.FlashBwdParams if backward else abi.FlashFwdParams
    address = library.host_bwd_params() if backward else library.host_params()
    params = ctypes.cast(address, ctypes.POINTER(struct)).contents
    fields = [name for base in struct.__mro__ for name, _ in vars(base).get("_fields_", ())]
    return {name: getattr(params, name) for name in fields}


def differences(library: ctypes.CDLL) -> list[str]:
    """Returns how launches over a cache differ with and without the checks in Python."""
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
    """Yields arguments of varlen calls that the kernels can take without a copy."""

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
    """Returns how launches of ragged batches differ with and without the checks in Python."""
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
    """Returns how launches with a KVCachePlan differ from those without one.

    Also returns plans that were not laid out where they had to be, or were where they must not be,
    and wrong numbers of launches that only append.
    """
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
    """Returns wrong choices of Hopper's backward kernels for ragged batches.

    The sm90 class must compute only batches whose sequences are long on average: its sums of dQ
    have room for whole blocks of rows of each sequence, for short ones many more than it has rows.
    """
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
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: gpu),
        mock.patch.object(jit, "get_kernel", build),
        mock.patch.object(ops, "_choose", choose),
    ):
        for short, n, long, arch in (
            *((512, 4, 512, 90), (256, 9, 256, 90), (128, 9, 128, 80), (64, 8192, 8192, 80)),
            *((16, 4096, 4096, 80), (1, 600, 65536, 80), (1, 64, 65536, 90)),
        ):
            config = config_of([short] * n + [long], long)
            rows = launched(library, backward=True)["seqlen_q_rounded"]
            total = short * n + long
            if config.arch != arch or (arch == 90 and rows > 2.3 * total + 256):
                found.append(f"{n} of {short} and one of {long}: {config}, {rows} rows of {total}")
        mask = config_of([2, 1, 0], 2).mask
        if mask != "causal":  # a mean length of 1 must not drop it
            found.append(f"of lengths 2, 1 and 0 the mask is {mask}")
    ops._choose = remembered
    return found


def failures_of_kernels(library: ctypes.CDLL) -> list[str]:
    """Returns what is wrong with the error of a launch that fails.

    The call must not be tried again with the checks in Python, as its arguments are not at fault.
    """
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


def kernels_of_batches() -> list[str]:
    """Returns calls with num_splits whose choice of a kernel depends on sizes that it must not.

    These are the number of tokens in a ragged batch and the room in a cache.
    """
    choose, problems, found = ops._choose, [], []

    def remember(problem):
        problems.append(bytes(problem))
        return choose(problem)

    def ragged(total: int, **options) -> None:
        q, k = torch.zeros(total, 4, 64).half(), torch.zeros(total, 2, 64).half()
        starts = torch.tensor([0, total]).int()
        flash_attn_varlen_func(q, k, k, starts, starts, total, total, **options)

    def cached(room: int, **options) -> None:
        q, cache = torch.zeros(1, 50, 4, 64).half(), torch.zeros(1, room, 2, 64).half()
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=50, **options)

    ops._choose = remember
    windows = (4000, 0), (-1, 200), (200, 60), (5, -1), (10**6, 10**6), (-1, -1)
    for call, window, causal in itertools.product((ragged, cached), windows, (False, True)):
        ops._keep_alive[0].flashcute_set_resolver(ops._resolve)  # forgets the kernels it knows
        problems.clear()
        for size in (50, 300, 10000):
            call(size, window_size=window, causal=causal, num_splits=1)
        if len(problems) != 1:  # the first call's choice serves all
            found.append(f"{call.__name__}: kernels for {len(problems)} problems, {window=}")
    ops._choose = choose
    return found


def checks_of_operators() -> list[str]:
    """Returns what directly called operators take although the checks in Python refuse it."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    op, none = torch.ops.flashcute, (None,) * 3
    q, new = zeros(3, 2, 4, 64), zeros(3, 1, 2, 64)
    cache, values = zeros(3, 8, 2, 64), zeros(3, 8, 2, 64)
    lengths, starts = torch.zeros(3).int(), torch.zeros(4).int()
    ragged = q[0], cache[0], cache[0], starts, starts, None, None, 2, 8, 0.1, False, -1, -1, None

    def read(left: int = -1, right: int = -1, num_splits: int = 0) -> None:
        args = 0.1, False, left, right, None, 0.0, None, num_splits
        op.attend_kvcache(q, cache, values, None, *none, *args)

    def append(k, v, values=values, cache=cache, table=None) -> None:
        args = lengths, None, None, table, 0.1, False, -1, -1, None, 0.0, None, 0
        op.append_attend_kvcache(q, cache, values, k, v, None, None, False, *args)

    found = []
    for num_splits in (-2, 129, 40000, 2**32 + 1, -(2**62)):
        pattern = f"^flashcute::\\w+: expected 0 <= num_splits <= 128, got {num_splits}\\b"
        found += raised(lambda n=num_splits: read(num_splits=n), pattern)
        args = *ragged, 0.0, None, None, 0.0, None, num_splits
        found += raised(lambda args=args: op.attend_varlen(*args), pattern)
    for window in ((-2, -1), (-1, -2), (3, -(2**40))):
        pattern = f"expected a window of two sides >= -1, got {window[0]} and {window[1]}"
        found += raised(lambda window=window: read(*window), pattern)
        found += raised(lambda x=window: op.attend(q, cache, cache, 0.1, False, *x, None), pattern)
    pattern = "^flashcute::append_attend_kvcache: expected k and v that are not in the cache"
    found += raised(lambda: append(cache[:, 3:4], new), pattern)
    found += raised(lambda: append(new, values[:, 3:4]), pattern)
    pattern = "expected k_cache and v_cache in places of their own"
    found += raised(lambda: append(new, new, values=cache.view(cache.shape)), pattern)
    # k and v without tokens may overlap the cache, as nothing is written. Caches without elements
    # are all at the same address, so they must not count as overlapping.
    append(cache[:, 3:3], values[:, 3:3])
    append(new, new, cache[:0], values[:0], torch.zeros(3, 2).int())
    return found


def starts_that_are_copied(library: ctypes.CDLL) -> list[str]:
    """Returns what is wrong with calls of tensors that do not start at a multiple of 16 bytes.

    Operators must copy them, as a compiled function does not know where tensors start. Eager calls
    must also log which tensor they copy.
    """
    ops, found = torch.ops.flashcute, []
    shapes = {"q": (3, 2, 4, 64), "k": (3, 1, 2, 64), "v": (3, 1, 2, 64)}
    tensors = {n: torch.zeros(3, 8, 2, 64).half() for n in ("k_cache", "v_cache")}
    tensors |= {n: torch.zeros(shape).half() for n, shape in shapes.items()}
    lengths, starts, table = torch.zeros(3).int(), torch.zeros(4).int(), torch.zeros(3, 2).int()
    options = 0.1, False, -1, -1, None, 0.0, None

    def read(q, k_cache, v_cache, k, v):
        return ops.attend_kvcache(q, k_cache, v_cache, lengths, *(None,) * 3, *options, 0)

    def ragged(q, k_cache, v_cache, k, v):
        args = starts, starts, None, lengths, 2, 8, *options, None, 0.0, table
        return ops.attend_varlen(q[0], k_cache, v_cache, *args)

    def append(q, k_cache, v_cache, k, v):
        args = None, None, False, lengths, *(None,) * 3, *options, 0
        return ops.append_attend_kvcache(q, k_cache, v_cache, k, v, *args)

    log_copy, logged = loading._log_copy, []
    loading._log_copy = lambda fn, name, why: logged.append(name)
    for name, functions, pointer in (
        ("q", (read, ragged, append), "q_ptr"),
        ("k_cache", (read, ragged), "k_ptr"),
        ("v_cache", (read, ragged), "v_ptr"),
        ("k", (append,), "k_new_ptr"),
        ("v", (append,), "v_new_ptr"),
    ):
        odd = torch.zeros(tensors[name].numel() + 1).half()[1:].view_as(tensors[name])
        for function in functions:
            try:
                function(**tensors | {name: odd})
            except RuntimeError as error:
                found.append(f"{function.__name__}: {error}")
            if (launched(library)[pointer] or 1) % 16:
                found.append(f"{function.__name__}: {name} is not copied")
        if name.endswith("_cache"):  # append() writes to it
            pattern = f"expected {name[0]} aligned to 16 bytes"
            found += raised(lambda x=tensors | {name: odd}: append(**x), pattern)
        if name in ("q", "k_cache"):
            given = tensors | {name: odd, "k": None, "v": None}
            logged.clear()
            flash_attn_with_kvcache(**given)
            if logged != [name]:
                found.append(f"logged copies of {logged} and not of {name}")
    loading._log_copy = log_copy
    return found


def raised(call, pattern: str, error: type[Exception] = RuntimeError) -> list[str]:
    """Calls ``call``; returns what is wrong with how it fails."""
    try:
        call()
    except Exception as exception:
        right = type(exception) is error and re.search(pattern, str(exception))
        return [] if right else [f"expected {pattern}, got {exception!r}"]
    return [f"expected {pattern}, got a result"]


def memory_is_missing() -> list[str]:
    """Returns what is wrong with errors where torch has no memory for what the binding needs.

    An error must say how many bytes were asked for. Functions must raise torch's OutOfMemoryError.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**36, limits[1]))
    empty, checks = torch.empty, ops_kvcache.launch
    op, found = torch.ops.flashcute, []
    # Tensors of 128 GiB by their shapes, expanded from a single row in memory.
    row = torch.zeros(257).half()
    q, odd = (x.expand(1, 2**22, 64, 256) for x in (row[:-1], row[1:]))
    grads = q, q, q, q, q, torch.zeros(2**22).expand(1, 64, 2**22), None, 0.1, False, -1, -1, None
    entries = torch.zeros(1, 8, 1, 256).half().expand(2**16, 8, 512, 256)
    cache = torch.zeros(1, 1, 64, 256).half()
    few = q[:, :1], cache, cache
    none, missing = (None,) * 4, r"failed to allocate 137438953472 bytes on cuda:-1"
    options = 0.1, False, -1, -1, None, 0.0, None, 0
    places = entries[:, :1, :1], entries[:, :1, :1]
    for name, call in (
        ("fwd", lambda: op.attend(q, q, q, *options[:5])),
        ("fwd", lambda: op.attend(odd, q, q, *options[:5])),
        ("bwd", lambda: op.bwd(*grads, 1)),
        ("attend_kvcache", lambda: op.attend_kvcache(entries, *places, *none, *options)),
        ("attend_kvcache", lambda: op.attend_kvcache(q, cache, cache, *none, *options)),
    ):
        found += raised(call, f"^flashcute::{name}: {missing}")

    def exhausted(size: int, **options):
        raise torch.OutOfMemoryError(f"tried to allocate {size} bytes on {options['device']}")

    torch.empty, ops_kvcache.launch = exhausted, None  # only raising the error calls torch.empty
    plan, out_of_memory = KVCachePlan(), torch.OutOfMemoryError
    pattern = "^tried to allocate 137438953472 bytes on cuda:-1$"
    for call in (flash_attn_with_kvcache, plan):
        found += raised(lambda call=call: call(q, cache, cache), pattern, out_of_memory)
    torch.empty, ops_kvcache.launch = lambda size, **options: None, checks
    pattern = f"^flashcute::attend_kvcache: {missing}"
    found += raised(lambda: flash_attn_with_kvcache(q, cache, cache), pattern, out_of_memory)
    torch.empty = empty
    plan(*few)
    found += [] if plan._number else ["a plan is not made where there was no memory before"]
    resource.setrlimit(resource.RLIMIT_AS, limits)
    return found


def main() -> None:
    library = load()
    found = refusals()
    with torch.no_grad():
        found += differences(library) + differences_of_varlen(library)
        found += differences_of_plans(library)
        found += choices_of_backwards(library)
        found += failures_of_kernels(library)
        found += kernels_of_batches()
        found += checks_of_operators() + starts_that_are_copied(library)
        found += memory_is_missing()
    print(*found[:20], f"{len(found)} are wrong", sep="\n")


if __name__ == "__main__":
    main()
