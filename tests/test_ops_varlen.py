"""The operator of ragged batches: schema, fake, CPU implementation and gradient."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashcute
from flashcute import ops
from flashcute.dropout import dropout_mask
from flashcute.reference_varlen import attention_varlen_ref

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMAS = (
    "flashcute::attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks) -> (Tensor out, Tensor softmax_lse)",
    "flashcute::attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, float softcap=0., Tensor? alibi_slopes=None) ->"
    " (Tensor out, Tensor softmax_lse)",
    "flashcute::attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, float softcap=0., Tensor? alibi_slopes=None, Tensor? rng_state=None,"
    " float dropout_p=0.) -> (Tensor out, Tensor softmax_lse)",
    "flashcute::attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, float softcap=0., Tensor? alibi_slopes=None, Tensor? rng_state=None,"
    " float dropout_p=0., Tensor? block_table=None, int num_splits=0) ->"
    " (Tensor out, Tensor softmax_lse)",
    "flashcute::attend_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, float softcap=0., Tensor? alibi_slopes=None, Tensor? rng_state=None,"
    " float dropout_p=0., Tensor? block_table=None, int num_splits=0,"
    " bool deterministic=False) -> (Tensor out, Tensor softmax_lse)",
)
CU_Q, CU_K = [0, 4, 4, 7], [0, 5, 7, 7]


def _op():
    ops.load()
    return torch.ops.flashcute.attend_varlen.default


def _arguments(dtype=torch.float32, device="cpu", d=16, index=torch.int32, **change) -> dict:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    given = {
        "q": random(8, 4, d),
        "k": random(8, 2, d),
        "v": random(8, 2, d),
        "cu_seqlens_q": torch.tensor(CU_Q, device=device, dtype=index),
        "cu_seqlens_k": torch.tensor(CU_K, device=device, dtype=index),
        "seqused_q": None,
        "seqused_k": None,
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
        "softmax_scale": 0.25,
        "causal": True,
        "window_left": 3,
        "window_right": -1,
        "sinks": random(4).float(),
        "softcap": 1.5,
        "alibi_slopes": random(3, 4).float(),
        "rng_state": torch.tensor([5, 7], device=device),
        "dropout_p": 0.25,
    }
    return given | change


def _expected(given: dict):
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"
    mask = dropout_mask(given["rng_state"], 3, 4, 4, 5, given["dropout_p"])
    lengths = zip(torch.tensor(CU_Q).diff(), torch.tensor(CU_K).diff(), strict=True)
    return attention_varlen_ref(
        *(given[name] for name in names),
        softmax_scale=given["softmax_scale"],
        causal=given["causal"],
        window_size=(given["window_left"], given["window_right"]),
        sinks=given["sinks"],
        softcap=given["softcap"],
        alibi_slopes=given["alibi_slopes"],
        dropout_p=given["dropout_p"],
        dropout_mask=[mask[i, :, :n, :m] for i, (n, m) in enumerate(lengths)],
    )


def test_schema_is_the_frozen_one() -> None:
    for frozen in map(torch._C.parse_schema, FROZEN_SCHEMAS):
        assert _op()._schema.is_backward_compatible_with(frozen)
    assert str(_op()._schema) == str(frozen), "compatible, but add the new schema to the frozen"


def test_cpu_implementation() -> None:
    given = _arguments()
    out, lse = _op()(**given)
    expected = _expected(given)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


def test_opcheck() -> None:
    given = _arguments()
    assert set(torch.library.opcheck(_op(), tuple(given.values())).values()) == {"SUCCESS"}


def test_gradient_on_the_cpu() -> None:
    given = _arguments()
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "sinks", "alibi_slopes")]
    out, lse = _op()(**given)
    expected = _expected(given)
    wanted = torch.autograd.grad(
        expected.out.square().sum() + expected.lse[:, :7].sin().sum(), leaves
    )
    got = torch.autograd.grad(out.square().sum() + lse[:, :7].sin().sum(), leaves)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w)


def test_gradient_of_slopes_is_refused_on_cuda() -> None:
    op = _op()
    with FakeTensorMode():
        given = _arguments(torch.half, "cuda")
        given["alibi_slopes"].requires_grad_()
        with pytest.raises(NotImplementedError, match=r"attend_varlen: .*requires_grad=True"):
            op(**given)
        with torch.no_grad():
            out, lse = op(**given)
        assert out.shape == (8, 4, 16) and lse.shape == (4, 8)


@pytest.mark.parametrize(
    ("change", "error", "pattern"),
    [
        ({"window_left": -2}, ValueError, r"expected window_size .*\(-2, -1\)"),
        ({"sinks": torch.zeros(3)}, ValueError, r"expected sinks of shape"),
        ({"softcap": -1.0}, ValueError, r"expected a finite softcap"),
        ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, r"expected alibi_slopes of shape"),
        ({"rng_state": None}, ValueError, r"expected rng_state with dropout_p > 0"),
        ({"max_seqlen_q": -1}, ValueError, r"expected 0 <= max_seqlen_q"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, r"expected cu_seqlens_q of dtype"),
        ({"v": torch.zeros(8, 3, 16)}, ValueError, r"expected v of k's shape"),
    ],
)
def test_wrong_arguments_are_refused(change, error, pattern) -> None:
    with pytest.raises(error, match=rf"^flashcute::attend_varlen: {pattern}"):
        _op()(**_arguments(**change))


def _call(**change) -> object:
    given = _arguments(torch.half, "cuda", index=torch.int64)
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return flashcute.flash_attn_varlen_func(*(given[name] for name in names), **change)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"softcap": 1e38}, r"got softcap=1e\+38 with softmax_scale=0\.25; pass softcap=0"),
        (
            {"alibi_slopes": lambda: torch.zeros(4, device="cuda", requires_grad=True)},
            r"got alibi_slopes with requires_grad=True",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_function_refuses_on_cuda(change, pattern) -> None:
    with FakeTensorMode():
        change = {name: x() if callable(x) else x for name, x in change.items()}
        with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen_func: .*{pattern}"):
            _call(**change)


def test_what_the_function_hands_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it gets loadable tensors, padded or not, int32 lengths, float32 sinks and a window
    whose sides are at most 2**31."""
    calls = []

    def attend_varlen(q, *args):
        calls.append((q, *args))
        return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0])

    monkeypatch.setattr(ops, "attend_varlen", attend_varlen)
    with FakeTensorMode(), torch.no_grad():
        sinks = torch.zeros(4, device="cuda", dtype=torch.half)
        slopes = torch.zeros(3, 4, device="cuda")
        for d in (16, 20):
            given = _arguments(torch.half, "cuda", d, torch.int64)
            out, lse, dmask = flashcute.flash_attn_varlen_func(
                *list(given.values())[:5],
                2**62,
                5,
                window_size=(10**30, 3),
                sinks=sinks,
                softcap=30,
                alibi_slopes=slopes,
                seqused_k=torch.zeros(3, device="cuda", dtype=torch.int32),
                return_attn_probs=True,
            )
            assert out.shape == given["q"].shape and out.is_contiguous()
            assert lse.shape == (4, 8) and dmask.shape == (0,)
        flashcute.flash_attn_varlen_qkvpacked_func(
            torch.zeros(8, 3, 2, 64, device="cuda", dtype=torch.half),
            torch.zeros(3, device="cuda", dtype=torch.int32),
            4,
        )
        flashcute.flash_attn_varlen_func(
            *list(given.values())[:5], 4, 5, dropout_p=0.1, deterministic=True
        )
    for q, k, v, lengths, bounds, scale, _, window, given_sinks, *others in calls[:2]:
        assert q.shape[2] == k.shape[2] == v.shape[2] in (16, 24)
        assert [None if x is None else x.dtype for x in lengths] == [
            *(torch.int32, torch.int32),
            *(None, torch.int32),
        ]
        assert bounds == (2**62, 5) and window == (2**31, 3)
        assert given_sinks.dtype == torch.float32
        assert others[0] == 30.0 and others[1].shape == (3, 4)
        assert others[2:] == [None, 0.0, None, 0, False]
        assert scale in (16**-0.5, 20**-0.5)
    assert calls[2][0].stride() == (384, 64, 1)  # read in place
    state, dropout_p, *_, deterministic = calls[3][-5:]
    assert deterministic is True
    assert state.shape == (2,) and state.device.type == "cuda" and dropout_p == 6554 / 2**16
