"""What the binding hands to a backward's kernels, seen by a stand-in that computes nothing."""

from __future__ import annotations

import ctypes

import pytest
import torch
from stand_in import StandIn

import flashcute
from flashcute import ops
from flashcute.config import MASKS, ROW_STATS_MULTIPLE
from flashcute.jit import abi
from flashcute.jit.abi import dropout_bound


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    kernels = StandIn()
    ops.load()
    set_resolver = ops._keep_alive[0].flashcute_set_resolver
    monkeypatch.setattr(ops, "_choose", kernels.choose)
    set_resolver(ops._resolve)  # forgets the kernels it knows
    yield kernels
    set_resolver(ops._resolve)


def _given(**change) -> dict:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device="cuda", dtype=dtype)

    kv = empty(2, 33, 3, 2, 64)
    given = {
        **{"dout": empty(2, 4, 70, 64).transpose(1, 2), "q": empty(2, 70, 4, 64)},
        **{"k": kv[:, :, 0], "v": kv[:, :, 1], "out": empty(2, 70, 4, 64)},
        "softmax_lse": empty(2, 4, 70, dtype=torch.float32),
        "dlse": empty(4, 2, 70, dtype=torch.float32).transpose(0, 1),
        **{"softmax_scale": 0.125, "causal": True, "window_left": -1, "window_right": -1},
        **{"sinks": empty(4, dtype=torch.float32), "wanted": 15},
    }
    return given | change


def _bwd(**change) -> tuple[torch.Tensor, ...]:
    return torch.ops.flashcute.bwd.default(**_given(**change))


def test_gradients_are_poisoned_by_the_fixture(stand_in, poisoned_outputs) -> None:
    # The stand-in writes nothing, so the fixture's NaN shows. Tests with this fixture therefore
    # read only what a kernel wrote.
    assert all(x.isnan().all() for x in _bwd())


def test_parameters(stand_in) -> None:
    given = _given()
    dq, dk, dv, dsinks = torch.ops.flashcute.bwd.default(**given)
    ((params, stream),) = stand_in.backwards
    assert stream == torch.cuda.current_stream().cuda_stream
    tensors = {
        **{name: given[name] for name in ("q", "k", "v", "softmax_lse", "dlse", "sinks")},
        **{"o": given["out"], "do": given["dout"]},
        **{"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks},
    }
    for name, x in tensors.items():
        assert params[f"{name}_ptr"] == x.data_ptr(), name
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "row", "head"))
        assert got == tensors[name].stride()[:3], name
    for name in ("softmax_lse", "dlse"):
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "head"))
        assert got == tensors[name].stride()[:2], name
    sizes = {"b": 2, "seqlen_q": 70, "seqlen_k": 33, "h": 4, "h_k": 2, "d": 64, "h_h_k_ratio": 2}
    sizes |= {"pack_shift": 0, "seqlen_q_rounded": ROW_STATS_MULTIPLE}
    assert {name: params[name] for name in sizes} == sizes
    assert params["row_stats_ptr"] % 16 == 0 and params["row_stats_ptr"]
    assert params["scale_softmax"] == 0.125
    assert [x.shape for x in (dq, dk, dv)] == [given[name].shape for name in "qkv"]
    assert dsinks.shape == (4,) and dsinks.dtype == torch.float32


def _ragged(**change) -> dict:
    """Returns the arguments of a ragged batch of three sequences with 70 queries and 33 keys."""
    given = _given()
    packed = {name: given[name][0] for name in ("dout", "q", "k", "v", "out")}
    rows = {name: given[name][0].contiguous() for name in ("softmax_lse", "dlse")}
    cu = torch.tensor([0, 30, 30, 33], device="cuda", dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu.clone(), "seqused_q": None}
    lengths |= {"seqused_k": cu[1:].contiguous(), "max_seqlen_q": 40, "max_seqlen_k": 10**6}
    slopes = torch.rand(3, 4, device="cuda")
    return given | packed | rows | lengths | {"softcap": 2.0, "alibi_slopes": slopes} | change


def test_parameters_of_a_ragged_batch(stand_in) -> None:
    given = _ragged()
    dq, dk, dv, _ = torch.ops.flashcute.bwd_varlen.default(**given)
    ((params, _),) = stand_in.backwards
    names = ("q", "k", "v", "softmax_lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    for name in (*names, "alibi_slopes"):
        assert params[f"{name}_ptr"] == given[name].data_ptr(), name
    assert not params["seqused_q_ptr"] and params["plan_ptr"] % 16 == 0 and params["plan_ptr"]
    for name, x in (("q", given["q"]), ("do", given["dout"]), ("dk", dk), ("v", given["v"])):
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "row", "head"))
        assert got == (0, *x.stride()[:2]), name
    for name in ("softmax_lse", "dlse"):
        got = tuple(params[f"{name}_{dim}_stride"] for dim in ("batch", "head"))
        assert got == (0, 70), name
    sizes = {"b": 3, "seqlen_q": 40, "total_q": 70, "total_k": 33, "pack_shift": 0}
    sizes |= {"seqlen_q_rounded": abi.row_stats_rows(70, 3), "alibi_slopes_batch_stride": 4}
    assert {name: params[name] for name in sizes} == sizes
    assert params["scale_softcap"] == 0.125 / 2.0
    assert [x.shape for x in (dq, dk, dv)] == [given[name].shape for name in "qkv"]
    (problem,) = stand_in.problems
    asked = {"varlen": 1, "softcap": 1, "alibi": 1, "dropout": 0, "backward": 1}
    assert {name: problem[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"softmax_lse": torch.Size((70, 4))}, r"softmax_lse of shape \(4, 70\), got \(70, 4\)"),
        ({"dlse": torch.Size((1, 4, 70))}, "dlse of dtype float32 and rank 2, got rank 3"),
        ({"alibi_slopes": torch.Size((2, 4))}, r"contiguous alibi_slopes of .* \(4\) or \(3, 4\)"),
    ],
)
def test_wrong_tensors_of_a_ragged_batch(stand_in, change, pattern: str) -> None:
    change = {name: torch.zeros(shape, device="cuda") for name, shape in change.items()}
    given = _ragged(**change)
    with pytest.raises(RuntimeError, match=rf"^flashcute::bwd_varlen: expected {pattern}"):
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        torch.ops.flashcute.bwd_varlen.default.redispatch(keys, **given)


def test_no_sequence_or_no_query_has_gradients_of_zero(stand_in, poisoned_outputs) -> None:
    none = torch.zeros(1, device="cuda", dtype=torch.int32)
    given = _ragged(cu_seqlens_q=none, cu_seqlens_k=none.clone(), seqused_k=None, alibi_slopes=None)
    assert not any(x.any() for x in torch.ops.flashcute.bwd_varlen.default(**given))
    assert stand_in.backwards == []


@pytest.mark.parametrize("columns", [0, 64])
def test_sums_of_dq_have_the_room_that_the_kernel_asks_for(stand_in, columns: int) -> None:
    stand_in.backward.dq_accum = columns
    _bwd()
    ((params, _),) = stand_in.backwards
    address = params["dq_accum_ptr"] or 0
    assert bool(address) == bool(columns) and address % 16 == 0
    rows = 2 * 4 * ROW_STATS_MULTIPLE
    # The sums lie behind the two float32 statistics of each row.
    assert not columns or address >= params["row_stats_ptr"] + rows * 2 * 4
    semaphores = params["dq_semaphore_ptr"] or 0
    assert semaphores == (address + rows * columns * 4 if columns else 0)


@pytest.mark.parametrize("floats", [None, 0, 1000, 2**26])
def test_sums_that_ctas_leave_to_others_have_the_room_that_the_kernel_asks_for(
    stand_in, floats: int | None
) -> None:
    asked = []

    def room(params) -> int:
        """Records what the kernel is asked with, which is all that the launch depends on, too."""
        given = ctypes.cast(params, ctypes.POINTER(abi.FlashBwdParams)).contents
        sizes = given.b, given.h, given.h_k, given.seqlen_q_rounded, given.head_parts
        asked.append((*sizes, bool(given.dk_ptr), bool(given.dq_semaphore_ptr)))
        return floats

    stand_in.backward.dq_accum = 64
    if floats is not None:
        types = dict(abi.FlashKernel._fields_)
        stand_in.backward.head_parts = types["head_parts"](lambda params: 2)
        stand_in.backward.dkv_partial = types["dkv_partial"](room)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _bwd()
    ((params, _),) = stand_in.backwards
    address = params["dkv_partial_ptr"] or 0
    parts = 1 if floats is None else 2
    assert asked == [(2, 4, 2, ROW_STATS_MULTIPLE, parts, True, True)] * (parts - 1)
    assert params["head_parts"] == parts
    assert bool(address) == bool(floats) and address % 16 == 0
    assert torch.cuda.max_memory_allocated() - before >= 4 * (floats or 0)


@pytest.mark.parametrize("wanted", [7, 15, 31, 1, 6, 8, 17, 22])
def test_gradients_of_one_side_are_a_problem_of_their_own(stand_in, wanted: int) -> None:
    """Deterministic gradients are the same problem as others."""
    _bwd(wanted=wanted)
    assert [problem["backward"] for problem in stand_in.problems] == [1 if wanted & 7 == 7 else 2]
    assert [params["deterministic"] for params, _ in stand_in.backwards] == [wanted >> 4]


@pytest.mark.parametrize("wanted", range(16))
def test_what_is_not_wanted_has_no_address(stand_in, wanted: int) -> None:
    found = _bwd(wanted=wanted)
    assert [x.shape == (0,) for x in found] == [not wanted >> bit & 1 for bit in range(4)]
    assert len(stand_in.backwards) == (wanted != 0)
    for params, _ in stand_in.backwards:
        assert bool(params["dq_ptr"]) == bool(wanted & 1)
        assert bool(params["dk_ptr"]) == bool(params["dv_ptr"]) == bool(wanted & 6)
        assert bool(params["dsinks_ptr"]) == bool(wanted & 8)


def test_optional_tensors(stand_in) -> None:
    _bwd(dlse=None, sinks=None, wanted=7)
    ((params, _),) = stand_in.backwards
    assert not any(params[name] for name in ("dlse_ptr", "sinks_ptr", "dsinks_ptr"))


@pytest.mark.parametrize(
    ("change", "mask", "sides"),
    [
        ({}, "causal", (0, 0)),
        ({"causal": False}, "none", (0, 0)),
        ({"window_left": 5}, "local", (5, 0)),
        ({"causal": False, "window_left": 5, "window_right": 200}, "local", (5, 70)),
    ],
)
def test_masks(stand_in, change, mask: str, sides) -> None:
    _bwd(**change)
    ((params, _),) = stand_in.backwards
    (problem,) = stand_in.problems
    assert (MASKS[problem["mask"]], problem["backward"]) == (mask, 1)
    assert (params["window_left"], params["window_right"]) == sides


def test_dropout(stand_in) -> None:
    state = torch.tensor([1, 2], device="cuda")
    for dropout_p, threshold in ((0.1, 6554), (1 - 2.0**-16, 65535), (2.0**-18, 0)):
        _bwd(rng_state=state, dropout_p=dropout_p)
        params, problem = stand_in.backwards[-1][0], stand_in.problems[-1]
        assert problem["dropout"] == (threshold > 0)
        assert params["rng_state_ptr"] == (state.data_ptr() if threshold else None)
        bound, flips = dropout_bound(threshold)
        assert (params["dropout_bound"], params["dropout_flip"]) == (
            bound * 0x10001,
            -flips % 2**32,
        )
    with pytest.raises(RuntimeError, match=r"flashcute::bwd: expected rng_state with dropout_p"):
        _bwd(dropout_p=0.5)


def test_python_is_asked_once_per_problem_and_apart_from_the_forward(stand_in) -> None:
    given = _given()
    for _ in range(3):
        ops.fwd(given["q"], given["k"], given["v"], 0.125, True)
        torch.ops.flashcute.bwd.default(**given)
    assert [problem["backward"] for problem in stand_in.problems] == [0, 1]
    assert len(stand_in.launches) == len(stand_in.backwards) == 3


def test_no_queries_give_zeros_without_a_launch(stand_in) -> None:
    given = _given()
    for part in (slice(0), slice(None)):
        some = {n: given[n][part] for n in ("q", "k", "v", "out", "dout", "softmax_lse", "dlse")}
        if part == slice(None):
            some |= {n: some[n][:, :0] for n in ("q", "out", "dout")}
            some |= {n: some[n][:, :, :0] for n in ("softmax_lse", "dlse")}
        dq, dk, dv, dsinks = _bwd(**some)
        assert dq.numel() == 0 and not any(x.any() for x in (dk, dv, dsinks))
    assert not stand_in.backwards
    _bwd(k=given["k"][:, :0], v=given["v"][:, :0])  # a sink still has a gradient
    assert len(stand_in.backwards) == 1


def test_current_stream_and_device_of_the_tensors(stand_in) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _bwd()
    assert stand_in.backwards[0][1] == stream.cuda_stream


def test_autograd_asks_for_what_is_wanted(stand_in) -> None:
    given = _given()
    q, k, v = (given[name] for name in "qkv")
    q.requires_grad_()
    out = flashcute.flash_attn_func(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    ((params, _),) = stand_in.backwards
    assert params["dq_ptr"] == dq.data_ptr() and not params["dk_ptr"]
    assert not params["dlse_ptr"] and params["o_ptr"] == out.data_ptr()
    # An expanded gradient of the output is copied, and kernels can read the copy in place.
    assert params["do_row_stride"] % 8 == 0 and params["do_row_stride"] > 0


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_a_misaligned_start_is_copied(stand_in, name: str) -> None:
    given = _given()
    x = given[name]
    storage = x.new_zeros(x.numel() + 1)
    torch.ops.flashcute.bwd.default(**given | {name: storage[1:].view(x.shape)})
    ((params, _),) = stand_in.backwards
    pointer = {"out": "o", "dout": "do"}.get(name, name)
    assert params[f"{pointer}_ptr"] % 16 == 0


WRONG = {
    "dout_dtype": ({"dout": lambda x: x.half()}, "expected dout of the dtype of q"),
    "dout_device": ({"dout": lambda x: x.cpu()}, "expected dout on cuda:0"),
    "dout_shape": ({"dout": lambda x: x[:, :69]}, "expected dout of the shape of q"),
    "dout_rank": ({"dout": lambda x: x[0]}, "expected dout of rank 4, got rank 3"),
    "dout_grid": (
        {"dout": lambda x: torch.cat((x, x), -1)[..., :68].contiguous()[..., :64]},
        "strides of dout that are multiples of 8",
    ),
    "dout_last": ({"dout": lambda x: x.mT.contiguous().mT}, r"dout.stride\(-1\) == 1"),
    "out_shape": ({"out": lambda x: x[:, :, :2]}, "expected out of the shape of q"),
    "out_device": ({"out": lambda x: x.cpu()}, "expected out on cuda:0"),
    "lse_dtype": ({"softmax_lse": lambda x: x.half()}, "softmax_lse of dtype float32 and rank 3"),
    "lse_rank": ({"softmax_lse": lambda x: x[0]}, "softmax_lse of dtype float32 and rank 3"),
    "lse_shape": (
        {"softmax_lse": lambda x: x.mT.contiguous()},
        r"softmax_lse of shape \(2, 4, 70\), got \(2, 70, 4\)",
    ),
    "lse_device": ({"softmax_lse": lambda x: x.cpu()}, "expected softmax_lse on cuda:0"),
    "lse_stride": (
        {"softmax_lse": lambda x: x.repeat_interleave(2, -1)[..., ::2]},
        r"softmax_lse.stride\(-1\) == 1, got 2",
    ),
    "dlse_shape": ({"dlse": lambda x: x[:, :, :69]}, r"dlse of shape \(2, 4, 70\)"),
    "dlse_device": ({"dlse": lambda x: x.cpu()}, "expected dlse on cuda:0"),
    "k_dtype": ({"k": lambda x: x.half()}, "expected k of the dtype of q"),
    "v_shape": ({"v": lambda x: x[:, :9]}, "expected v of the shape of k"),
    "sinks_size": ({"sinks": lambda x: x[:3]}, "contiguous sinks of dtype float32"),
    "no_sinks": ({"sinks": lambda x: None}, "expected wanted in 0 ... 31, and with bit 3 sinks"),
    "wanted": ({"wanted": lambda x: 32}, "expected wanted in 0 ... 31, .* got 32"),
    "scale": ({"softmax_scale": lambda x: 0.0}, "expected a finite softmax_scale > 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_kernels_cannot_read_is_refused(stand_in, name: str) -> None:
    """The binding itself refuses it, below the checks in Python."""
    change, message = WRONG[name]
    given = _given()
    given |= {argument: f(given[argument]) for argument, f in change.items()}
    with pytest.raises(RuntimeError, match=rf"flashcute::bwd: .*{message}"):
        torch.ops.flashcute.bwd.default(**given)
    assert not stand_in.backwards


def test_a_failed_launch_is_an_error(stand_in) -> None:
    stand_in.result = 98
    with pytest.raises(RuntimeError, match=r"flashcute::bwd: stand_in failed to launch: error 98"):
        _bwd()


@pytest.mark.parametrize("field", ["abi_version", "params_size"])
def test_a_kernel_of_another_abi_is_refused(stand_in, field: str) -> None:
    setattr(stand_in.backward, field, 77)
    with pytest.raises(RuntimeError, match=rf"expected a kernel of ABI version {abi.ABI_VERSION}"):
        _bwd()
    assert not stand_in.backwards


def test_resolver_errors_arrive_as_themselves(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors come through autograd, whose engine runs the backward in a thread of its own."""
    given = _given()
    q, k, v = (given[name] for name in "qkv")
    out = flashcute.flash_attn_func(q.requires_grad_(), k, v)

    def fail(problem):
        raise KeyError("no kernel for that")

    monkeypatch.setattr(ops, "_choose", fail)
    with pytest.raises(KeyError, match="no kernel for that"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match=r"flashcute::bwd: KeyError: 'no kernel for that'"):
        _bwd(causal=False)
