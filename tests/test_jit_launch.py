"""The parameters that a call prepared by hand gives the kernel; GPU tests check its results."""

from __future__ import annotations

import contextlib
import math
import types

import pytest
import torch
from stand_in import StandIn

from flashcute.jit.launch import Call

STREAM = 0x5EA


@pytest.fixture
def stand_in(monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return StandIn()


def make_qkv():
    q = torch.empty(2, 70, 4, 64, dtype=torch.float16)
    k = torch.empty(2, 33, 3, 2, 64, dtype=torch.float16)
    return q.transpose(1, 2).contiguous().transpose(1, 2), k[:, :, 0], k[:, :, 1]


def test_arguments(stand_in):
    q, k, v = make_qkv()
    call = Call(stand_in.kernel, q, k, v)
    out, lse = call()
    assert out is call.out and lse is call.lse
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 70) and lse.dtype == torch.float32
    ((params, stream),) = stand_in.launches
    assert stream == STREAM
    tensors = {"q": q, "k": k, "v": v, "o": out}
    expected = {f"{name}_ptr": x.data_ptr() for name, x in tensors.items()}
    for name, x in tensors.items():
        for dim, stride in zip(("batch", "row", "head"), x.stride(), strict=False):
            expected[f"{name}_{dim}_stride"] = stride
    expected |= {"b": 2, "seqlen_q": 70, "seqlen_k": 33, "h": 4, "h_k": 2, "d": 64}
    expected |= {"softmax_lse_batch_stride": 280, "softmax_lse_head_stride": 70}
    expected |= {"softmax_lse_ptr": lse.data_ptr(), "sinks_ptr": None, "pack_shift": 0}
    expected |= {"window_left": 0, "window_right": 0}
    expected |= {"alibi_slopes_ptr": None, "alibi_slopes_batch_stride": 0}
    expected |= {
        "rng_state_ptr": None,
        "dropout_bound": 0xFC00FC00,
        "dropout_flip": 0,
        "dropout_scale": 1.0,
    }
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "plan")
    expected |= {f"{name}_ptr": None for name in lengths}
    expected |= {"total_q": 0, "total_k": 0, "plan_capacity": 0, "plan_in_order": 0}
    of_cache = ("cache_batch_idx", "leftpad_k", "block_table", "o_partial", "lse_partial")
    new = ("k_new", "v_new", "q_unrotated")
    pointers = (*of_cache, *new, "rotary_cos", "rotary_sin")
    expected |= {f"{name}_ptr": None for name in pointers}
    sizes = ("block_table_batch_stride", "b_k", "num_pages", "page_size", "partial_rows")
    sizes += ("num_splits", "split_blocks", "split_ctas", "is_cache", "seqlen_new")
    sizes += ("seqlen_rotary", "rotary_dim", "rotary_q_step", "rotary_interleaved")
    strides = (f"{name}_{dim}_stride" for name in new for dim in ("batch", "row", "head"))
    expected |= dict.fromkeys((*sizes, *strides), 0)
    expected |= {"h_h_k_ratio": 2, "scale_softmax": 0.125, "scale_softcap": 1.0, "alibi_scale": 8.0}
    log2 = params.pop("scale_softmax_log2")
    assert params == expected
    assert log2 == pytest.approx(0.125 * math.log2(math.e), rel=1e-7)


@pytest.mark.parametrize(("h", "shift"), [(2, 0), (4, 1), (6, 2), (8, 2), (10, 3), (142, 7)])
def test_packed_heads(stand_in, h, shift):
    q = torch.empty(2, 3, h, 64, dtype=torch.float16)
    k = torch.empty(2, 33, 2, 64, dtype=torch.float16)
    Call(stand_in.kernel, q, k, k, pack_heads=True)()
    ((params, _),) = stand_in.launches
    assert (params["h_h_k_ratio"], params["pack_shift"]) == (h // 2, shift)


def test_given_outputs_and_scale(stand_in):
    q, k, v = make_qkv()
    outputs = torch.empty(3, 80, 5, 72, dtype=q.dtype)[:2, :70, :4, :64], torch.empty(2, 4, 70)
    out, lse = Call(stand_in.kernel, q, k, v, 0.5, outputs)()
    assert out is outputs[0] and lse is outputs[1]
    ((params, _),) = stand_in.launches
    assert params["o_ptr"] == out.data_ptr() and params["softmax_lse_ptr"] == lse.data_ptr()
    assert (params["o_batch_stride"], params["o_row_stride"]) == (80 * 5 * 72, 5 * 72)
    assert params["scale_softmax"] == 0.5


def test_no_query_no_launch(stand_in):
    q, k, v = make_qkv()
    out, lse = Call(stand_in.kernel, q[:, :0], k, v)()
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)
    assert not stand_in.launches


@pytest.mark.filterwarnings("ignore:memory leak in callback function")  # the message, once
def test_a_failed_launch_is_an_error(stand_in):
    stand_in.result = 98
    with pytest.raises(RuntimeError, match=r"stand_in failed to launch: error 98"):
        Call(stand_in.kernel, *make_qkv())()
