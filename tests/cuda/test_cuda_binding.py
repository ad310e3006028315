"""What the binding hands to a kernel, seen by a stand-in that records it and computes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from stand_in import StandIn

from flashcute import heuristics, ops
from flashcute.config import MASKS
from flashcute.jit import abi
from flashcute.jit.abi import dropout_bound
from flashcute.problem import rounded, rounded_length


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    kernel = StandIn()
    ops.load()
    set_resolver = ops._keep_alive[0].flashcute_set_resolver
    monkeypatch.setattr(ops, "_choose", kernel.choose)
    set_resolver(ops._resolve)  # forgets the kernels it knows
    yield kernel
    set_resolver(ops._resolve)


def _qkv(dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.empty(2, 70, 4, 64, device="cuda", dtype=dtype)
    k = torch.empty(2, 33, 3, 2, 64, device="cuda", dtype=dtype)
    return q, k[:, :, 0], k[:, :, 1]


def test_outputs_are_poisoned_by_the_fixture(stand_in, poisoned_outputs) -> None:
    # The stand-in writes nothing, so the fixture's NaN shows. Tests with this fixture therefore
    # read only what their kernel wrote.
    q, k, v = _qkv()
    for args in ((q, k, v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)):
        out, lse = ops.fwd(*args, 0.125, False)
        assert out.isnan().all() and lse.isnan().all()
    assert len(stand_in.launches) == 2


def test_parameters(stand_in) -> None:
    q, k, v = _qkv()
    out, lse = ops.fwd(q, k, v, 0.125, True)
    ((params, stream),) = stand_in.launches
    assert stream == torch.cuda.current_stream().cuda_stream
    pointers = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": out, "softmax_lse_ptr": lse}
    for name, tensor in pointers.items():
        assert params[name] == tensor.data_ptr(), name
    for name, tensor in {"q": q, "k": k, "v": v, "o": out}.items():
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "row", "head"))
        assert got == tensor.stride()[:3], name
    sizes = {"b": 2, "seqlen_q": 70, "seqlen_k": 33, "h": 4, "h_k": 2, "d": 64, "h_h_k_ratio": 2}
    assert {name: params[name] for name in sizes} == sizes
    assert (params["softmax_lse_batch_stride"], params["softmax_lse_head_stride"]) == (280, 70)
    unused = "sinks_ptr", "pack_shift", "window_left", "window_right"
    assert not any(params[name] for name in unused)
    assert params["scale_softmax"] == 0.125
    assert params["scale_softmax_log2"] == pytest.approx(0.125 * math.log2(math.e), rel=1e-7)


@pytest.mark.parametrize(("h", "shift"), [(2, 0), (4, 1), (6, 2), (10, 3)])
def test_packed_heads(stand_in, h: int, shift: int) -> None:
    stand_in.pack_heads = True
    q, k, v = _qkv()
    ops.fwd(q[:, :, :1].expand(-1, -1, h, -1), k, v, 0.125, True)
    ((params, _),) = stand_in.launches
    assert (params["h_h_k_ratio"], params["pack_shift"]) == (h // 2, shift)


# For seqlen_q = 70 and seqlen_k = 33: of the equivalent masks the one that does the least work.
@pytest.mark.parametrize(
    ("causal", "window", "mask", "sides"),
    [
        (False, (-1, -1), "none", (0, 0)),
        (True, (-1, -1), "causal", (0, 0)),
        (False, (-1, 0), "causal", (0, 0)),
        (True, (-1, 5), "causal", (0, 0)),
        (True, (32, 100), "causal", (0, 0)),
        (False, (32, 69), "none", (0, 0)),
        (False, (2**40, 2**40), "none", (0, 0)),
        (False, (31, 69), "local", (31, 70)),
        (False, (32, 68), "local", (33, 68)),
        (True, (31, 5), "local", (31, 0)),
        (False, (0, 0), "local", (0, 0)),
    ],
)
def test_masks(stand_in, causal: bool, window, mask: str, sides) -> None:
    ops.attend(*_qkv(), 0.125, causal, window, None)
    ((params, _),) = stand_in.launches
    (problem,) = stand_in.problems
    assert MASKS[problem["mask"]] == mask
    rounded = tuple(rounded_length(min(*pair)) for pair in zip(sides, (33, 70), strict=True))
    assert (problem["window_left"], problem["window_right"]) == rounded
    assert (params["window_left"], params["window_right"]) == sides


def test_sinks(stand_in) -> None:
    sinks = torch.zeros(4, device="cuda")
    ops.attend(*_qkv(), 0.125, True, (-1, -1), sinks)
    ((params, _),) = stand_in.launches
    assert params["sinks_ptr"] == sinks.data_ptr()


@pytest.mark.parametrize("wrong", ["device", "dtype", "size", "stride"])
def test_sinks_that_kernels_cannot_read_are_refused(stand_in, wrong: str) -> None:
    """The binding itself refuses them, below the checks in Python."""
    sinks = {
        "device": torch.zeros(4),
        "dtype": torch.zeros(4, device="cuda", dtype=torch.bfloat16),
        "size": torch.zeros(3, device="cuda"),
        "stride": torch.zeros(8, device="cuda")[::2],
    }[wrong]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"flashcute::fwd: expected.* sinks"):
        torch.ops.flashcute.attend(*_qkv(), 0.125, True, -1, -1, sinks)
    assert not stand_in.launches


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_softcap_and_slopes(stand_in, shape) -> None:
    slopes = torch.rand(shape, device="cuda")
    for softcap, alibi_slopes in ((0.0, slopes), (32.0, None), (32.0, slopes)):
        ops.attend(*_qkv(), 0.125, True, (-1, -1), None, softcap, alibi_slopes)
        params, problem = stand_in.launches[-1][0], stand_in.problems[-1]
        given = alibi_slopes is not None
        assert (problem["softcap"], problem["alibi"]) == (softcap > 0, given)
        assert params["alibi_slopes_ptr"] == (slopes.data_ptr() if given else None)
        assert params["alibi_slopes_batch_stride"] == (4 if given and len(shape) == 2 else 0)
        unit = softcap or 0.125
        assert (params["scale_softmax"], params["alibi_scale"]) == (0.125, 1 / unit)
        assert params["scale_softcap"] == 0.125 / unit
        assert params["scale_softmax_log2"] == pytest.approx(unit * math.log2(math.e), rel=1e-7)
    assert len(stand_in.problems) == 3


@pytest.mark.parametrize("wrong", ["device", "dtype", "size", "batch", "rank", "stride"])
def test_slopes_that_kernels_cannot_read_are_refused(stand_in, wrong: str) -> None:
    """The binding itself refuses them, below the checks in Python."""
    slopes = {
        "device": torch.zeros(4),
        "dtype": torch.zeros(4, device="cuda", dtype=torch.bfloat16),
        "size": torch.zeros(3, device="cuda"),
        "batch": torch.zeros(3, 4, device="cuda"),
        "rank": torch.zeros((), device="cuda"),
        "stride": torch.zeros(4, 2, device="cuda").mT,
    }[wrong]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"flashcute::fwd: expected.* alibi_sl"):
        torch.ops.flashcute.attend(*_qkv(), 0.125, True, -1, -1, None, 0.0, slopes)
    assert not stand_in.launches


def test_dropout(stand_in) -> None:
    stand_in.pack_heads = False
    state = torch.tensor([1, 2], device="cuda")
    for dropout_p, threshold in ((0.1, 6554), (0.5, 32768), (1 - 2.0**-16, 65535), (2.0**-18, 0)):
        ops.attend(*_qkv(), 0.125, True, (-1, -1), None, 0.0, None, False, state, dropout_p)
        params, problem = stand_in.launches[-1][0], stand_in.problems[-1]
        assert problem["dropout"] == (threshold > 0)
        assert params["rng_state_ptr"] == (state.data_ptr() if threshold else None)
        bound, flips = dropout_bound(threshold)
        assert (params["dropout_bound"], params["dropout_flip"]) == (
            bound * 0x10001,
            -flips % 2**32,
        )
        if threshold:
            assert params["dropout_scale"] * (1 - threshold / 2**16) == pytest.approx(1, rel=1e-7)


@pytest.mark.parametrize("wrong", ["none", "device", "dtype", "size", "rank", "stride"])
def test_states_that_kernels_cannot_read_are_refused(stand_in, wrong: str) -> None:
    """The binding itself refuses them, below the checks in Python."""
    state = {
        "none": None,
        "device": torch.zeros(2, dtype=torch.int64),
        "dtype": torch.zeros(2, device="cuda", dtype=torch.int32),
        "size": torch.zeros(1, device="cuda", dtype=torch.int64),
        "rank": torch.zeros(2, 1, device="cuda", dtype=torch.int64),
        "stride": torch.zeros(4, device="cuda", dtype=torch.int64)[::2],
    }[wrong]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"flashcute::fwd: expected.* rng_stat"):
        torch.ops.flashcute.attend(*_qkv(), 0.125, True, -1, -1, None, 0.0, None, False, state, 0.5)
    assert not stand_in.launches


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 0.99999, math.nan])
def test_probabilities_that_kernels_cannot_draw_are_refused(stand_in, dropout_p: float) -> None:
    state = torch.zeros(2, device="cuda", dtype=torch.int64)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"expected 0 <= dropout_p <= 1 - 2"):
        torch.ops.flashcute.attend(
            *_qkv(), 0.125, True, -1, -1, None, 0.0, None, False, state, dropout_p
        )
    assert not stand_in.launches


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan, 1e38])
def test_softcap_that_kernels_cannot_apply_is_refused(stand_in, softcap: float) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"flashcute::fwd: expected softcap 0"):
        torch.ops.flashcute.attend(*_qkv(), 0.125, True, -1, -1, None, softcap)
    assert not stand_in.launches


def test_current_stream_of_the_device(stand_in) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.fwd(*_qkv(), 0.125, True)
    assert stand_in.launches[0][1] == stream.cuda_stream


def test_strides_of_size_1_dimensions_are_zero(stand_in) -> None:
    q = torch.empty(64, device="cuda", dtype=torch.float16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    ops.fwd(q, q, q, 1.0, False)
    ((params, _),) = stand_in.launches
    assert not any(params[f"{t}_{dim}_stride"] for t in "qkvo" for dim in ("batch", "row", "head"))


def test_python_is_asked_once_per_problem(stand_in) -> None:
    q, k, v = _qkv()
    for _ in range(3):
        ops.fwd(q, k, v, 0.125, True)
    assert len(stand_in.problems) == 1 and len(stand_in.launches) == 3
    assert stand_in.problems[0] == {
        "device": 0,
        "dtype": 1,
        "mask": MASKS.index("causal"),
        "b": 2,
        "seqlen_q": 80,
        "seqlen_k": 48,
        "h": 4,
        "h_k": 2,
        "d": 64,
        "window_left": 0,
        "window_right": 0,
        "softcap": 0,
        "alibi": 0,
        "backward": 0,
        "cache": 0,
        "dropout": 0,
        "num_splits": -1,
        "page_size": 0,
        "varlen": 0,
    }
    ops.fwd(q, k, v, 0.125, False)
    ops.fwd(q[:1], k[:1], v[:1], 0.125, True)
    ops.fwd(q[:, :64], k, v, 0.125, True)
    ops.fwd(q, k[:, :32], v[:, :32], 0.125, True)
    ops.fwd(q[:, :, :2], k, v, 0.125, True)
    ops.fwd(q, k[:, :, :1], v[:, :, :1], 0.125, True)
    ops.fwd(*(t[..., :32] for t in (q, k, v)), 0.125, True)
    ops.fwd(*(t.half() for t in (q, k, v)), 0.125, True)
    assert len(stand_in.problems) == 9


def test_lengths_are_rounded_as_in_heuristics(stand_in) -> None:
    one = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    lengths = *range(1, 2001), 4095, 4096, 4097, 100_000, 2**30 + 1
    for seqlen in lengths:
        q = one.expand(1, seqlen, 1, 8)
        ops.fwd(one, q, q, 1.0, False)
        ((params, _),) = stand_in.launches
        stand_in.launches.clear()
        assert params["seqlen_k"] == seqlen
    asked = [problem["seqlen_k"] for problem in stand_in.problems]
    assert asked == list(dict.fromkeys(map(rounded_length, lengths)))
    assert len(asked) < 0.05 * len(lengths)

    q = one.expand(1, 1001, 1, 8)
    ops.attend(q, q, q, 1.0, False, (130, 17), None)
    last = stand_in.problems[-1]
    problem = heuristics.FwdProblem("fp16", False, 1, 1001, 1001, 1, 1, 8, window=(130, 17))
    assert (last["window_left"], last["window_right"]) == rounded(problem).window
    assert last["seqlen_q"] == rounded_length(1001)
    ((params, _),) = stand_in.launches
    assert (params["window_left"], params["window_right"]) == (130, 17)


def test_table_of_kernels_is_bounded(stand_in) -> None:
    one = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
    for b in (*range(1, 4098), 1):
        q = one.expand(b, 1, 1, 8)
        ops.fwd(q, q, q, 1.0, False)
    # The table is full after 4096 problems and then cleared, so the first is asked about again.
    assert len(stand_in.problems) == 4098


def test_nothing_to_do_launches_nothing(stand_in) -> None:
    q, k, v = _qkv()
    ops.fwd(q[:, :0], k, v, 0.125, True)
    ops.fwd(q[:0], k[:0], v[:0], 0.125, True)
    assert not stand_in.launches
    ops.fwd(q, k[:, :0], v[:, :0], 0.125, True)  # has zeros to write
    assert len(stand_in.launches) == 1


def test_a_failed_launch_is_an_error(stand_in) -> None:
    stand_in.result = 98
    with pytest.raises(RuntimeError, match=r"flashcute::fwd: stand_in failed to launch: error 98"):
        ops.fwd(*_qkv(), 0.125, True)


@pytest.mark.parametrize("field", ["abi_version", "params_size"])
def test_a_kernel_of_another_abi_is_refused(stand_in, field: str) -> None:
    setattr(stand_in.kernel, field, 77)
    with pytest.raises(RuntimeError, match=rf"expected a kernel of ABI version {abi.ABI_VERSION}"):
        ops.fwd(*_qkv(), 0.125, True)
    assert not stand_in.launches


def test_resolver_errors_arrive_as_themselves(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem):
        raise NotImplementedError("no kernel for that")

    monkeypatch.setattr(ops, "_choose", fail)
    with pytest.raises(NotImplementedError, match="no kernel for that"):
        ops.fwd(*_qkv(), 0.125, True)
    # Through the operator itself only the error's message can arrive, not its type.
    with pytest.raises(RuntimeError, match=r"flashcute::fwd: NotImplementedError: no kernel"):
        ops.load()(*_qkv(), 0.125, True)


def _lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def _varlen(**change) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x[0] for x in _qkv())
    given = {
        "lengths": (_lengths(0, 30, 70), _lengths(0, 3, 33), None, _lengths(2, 20)),
        "bounds": (40, 30),
        "scale": 0.125,
        "causal": False,
        "window": (-1, -1),
        "sinks": None,
    } | change
    return ops.attend_varlen(q, k, v, *given.values())


def test_parameters_of_a_ragged_batch(stand_in) -> None:
    q, k, v = (x[0] for x in _qkv())
    lengths = (_lengths(0, 30, 70), _lengths(0, 3, 33), None, _lengths(2, 20))
    out, lse = ops.attend_varlen(q, k, v, lengths, (40, 10), 0.125, True, (-1, -1), None)
    assert out.shape == (70, 4, 64) and out.is_contiguous() and lse.shape == (4, 70)
    ((planned, _),), ((params, stream),) = stand_in.plans, stand_in.launches
    assert planned == params and stream == torch.cuda.current_stream().cuda_stream
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    for name, x in zip(names, lengths, strict=True):
        assert params[f"{name}_ptr"] == (None if x is None else x.data_ptr()), name
    for name, x in {"q": q, "k": k, "v": v, "o": out}.items():
        assert params[f"{name}_ptr"] == x.data_ptr()
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "row", "head"))
        assert got == (0, *x.stride()[:2]), name
    capacity = abi.plan_capacity(70, 2, stand_in.kernel.tile_m)
    sizes = {"b": 2, "seqlen_q": 40, "total_q": 70, "total_k": 33, "plan_capacity": capacity}
    assert {name: params[name] for name in sizes} == sizes
    assert params["plan_ptr"] and params["softmax_lse_head_stride"] == 70
    (problem,) = stand_in.problems
    assert (problem["b"], problem["seqlen_q"], problem["seqlen_k"]) == (2, 48, 10)


def test_windows_of_a_ragged_batch_are_of_all_keys(stand_in) -> None:
    """max_seqlen_k is a hint: a sequence may be longer, and the window must not be lost."""
    _varlen(bounds=(40, 3), window=(10, 50))
    ((params, _),) = stand_in.launches
    assert (params["window_left"], params["window_right"]) == (10, 40)
    assert MASKS[stand_in.problems[0]["mask"]] == "local"


def test_packed_heads_of_a_ragged_batch(stand_in) -> None:
    stand_in.pack_heads = True
    _varlen()
    ((params, _),) = stand_in.launches
    assert params["pack_shift"] == 1
    assert params["plan_capacity"] == abi.plan_capacity(140, 2, stand_in.kernel.tile_m)


@pytest.mark.parametrize("wrong", ["dtype", "stride"])
def test_lengths_that_kernels_cannot_read_are_refused(stand_in, wrong: str) -> None:
    """The binding itself refuses them: the checks in Python accept both, and the functions convert
    them."""
    cu = _lengths(0, 30, 70)
    given = {"dtype": cu.long(), "stride": cu.repeat_interleave(2)[::2]}[wrong]
    q, k, v = (x[0] for x in _qkv())
    op = torch.ops.flashcute.attend_varlen
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="contiguous cu_seqlens_k of dtype int32"),
    ):
        op(q, k, v, cu, given, None, None, 40, 30, 0.125, False, -1, -1, None)
    assert not stand_in.launches


def test_a_ragged_batch_without_queries_launches_nothing(stand_in) -> None:
    q, k, v = (x[0] for x in _qkv())
    none = _lengths(0, 0)
    lengths = none, _lengths(0, 33), None, None
    out, lse = ops.attend_varlen(q[:0], k, v, lengths, (0, 33), 0.125, False, (-1, -1), None)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0) and not stand_in.launches
    ops.attend_varlen(q, k[:0], v[:0], (none, none, None, None), (0, 0), 1.0, True, (3, 3), None)
    assert len(stand_in.launches) == len(stand_in.plans) == 1  # has zeros to write
