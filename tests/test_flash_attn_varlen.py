"""The varlen functions: oracles, the reference, gradients, and what the arguments mean."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import flashcute
from flashcute import bert_padding, cpu, flash_attn_interface, flash_attn_varlen_func
from flashcute.reference_varlen import attention_varlen_ref
from flashcute.testing import check_forward

F64 = torch.float64
LENGTHS_Q, LENGTHS_K = (5, 0, 1, 17, 4), (6, 3, 0, 9, 12)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "left": {"window_size": (2, -1)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi_b": {"alibi_slopes": SLOPES * torch.arange(5.0)[:, None], "causal": True},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 9.0, -math.inf])},
    "causal_sinks": {"sinks": torch.tensor([0.5, -3.0, 9.0, 0.0]), "causal": True},
}
each_option = pytest.mark.parametrize("name", OPTIONS)


def cumulative(lengths, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def make(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, *, tail=0, dtype=torch.float32, h=4, h_k=2, d=8):
    """Returns q, k, v that require gradients, and the four arguments of lengths."""
    generator = torch.Generator().manual_seed(sum(lengths_q) + 7)
    total_q, total_k = sum(lengths_q) + tail, sum(lengths_k) + tail
    shapes = ((total_q, h, d), (total_k, h_k, d), (total_k, h_k, d))
    tensors = [
        torch.randn(s, dtype=F64, generator=generator).to(dtype).requires_grad_() for s in shapes
    ]
    bounds = max(lengths_q, default=0), max(lengths_k, default=0)
    return tensors, (cumulative(lengths_q), cumulative(lengths_k), *bounds)


def call(tensors, lengths, **options):
    return flash_attn_varlen_func(*tensors, *lengths, return_attn_probs=True, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
@each_option
def test_is_the_reference(name, dtype):
    tensors, lengths = make(tail=2, dtype=dtype)
    out, lse, dmask = call(tensors, lengths, **OPTIONS[name])
    exact = attention_varlen_ref(*tensors, *lengths[:2], upcast=F64, **OPTIONS[name])
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, tensors[0].shape, True)
    assert (lse.dtype, lse.shape, dmask.shape) == (torch.float32, (4, tensors[0].shape[0]), (0,))
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, F64: 1e-12}.get(dtype, 1e-5)
    torch.testing.assert_close(out.double(), exact.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, tensors, grad)
    for g, e in zip(got, torch.autograd.grad(exact.out, tensors, grad.double()), strict=True):
        torch.testing.assert_close(g, e, atol=tolerance, rtol=tolerance)


@each_option
def test_each_sequence_passes_the_tolerance_rule(name):
    (q, k, v), lengths = make(dtype=torch.bfloat16)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse, _ = call((q, k, v), lengths, **OPTIONS[name])
    for i, (start_q, end_q) in enumerate(zip(lengths[0][:-1], lengths[0][1:], strict=True)):
        start_k, end_k = lengths[1][i], lengths[1][i + 1]
        options = dict(OPTIONS[name])
        if name == "alibi_b":
            options["alibi_slopes"] = options["alibi_slopes"][i : i + 1]
        check_forward(
            out[None, start_q:end_q], lse[None, :, start_q:end_q], q[None, start_q:end_q],
            k[None, start_k:end_k], v[None, start_k:end_k], check_drift=False, **options,
        )  # fmt: skip


@each_option
def test_equal_lengths_are_a_dense_batch(name):
    tensors, lengths = make([9] * 5, [12] * 5)
    out, lse, _ = call(tensors, lengths, **OPTIONS[name])
    dense = [x.view(5, -1, *x.shape[1:]) for x in tensors]
    expected = flashcute.flash_attn_func(*dense, return_attn_probs=True, **OPTIONS[name])
    # PyTorch's kernel gives the same bits for both. With a sink a sigmoid follows, whose last bit
    # depends on the place in the tensor. The products of the reference depend on the batch size.
    tolerance = 0.0 if name in ("plain", "causal", "window", "left") else 1e-6
    rounding = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(out.view(5, 9, 4, 8), expected[0], **rounding)
    torch.testing.assert_close(lse.view(4, 5, 9).transpose(0, 1), expected[1], **rounding)
    got = torch.autograd.grad(out.square().sum(), tensors)
    for g, e in zip(got, torch.autograd.grad(expected[0].square().sum(), tensors), strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_longest_lengths_may_be_tensors(dtype):
    """flash_attn's operators take tensors, and transformers passes ``cu_seqlens.diff().max()``."""
    (q, k, v), (cu_q, cu_k, *longest) = make()
    expected = flashcute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)
    longest = [torch.tensor(n, dtype=dtype) for n in longest]
    assert torch.equal(flashcute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest), expected)
    for x in (longest[1], longest[1][None]):
        traced = torch.compile(flashcute.flash_attn_varlen_func, backend="eager")
        assert torch.equal(traced(q, k, v, cu_q, cu_k, longest[0], x), expected)


def test_splits_with_dropout_are_refused_with_the_probability_that_was_passed():
    (q, k, v), lengths = make()
    with pytest.raises(NotImplementedError, match=r"got num_splits=2 and dropout_p=0\.1; leave"):
        flashcute.flash_attn_varlen_func(q, k, v, *lengths, dropout_p=0.1, num_splits=2)


@each_option
def test_order_of_sequences_does_not_matter(name):
    (q, k, v), lengths = make(d=16)
    order = [3, 0, 4, 2, 1]
    parts_q, parts_k, parts_v = (
        x.detach().split(list(n)) for x, n in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))
    )
    permuted = [torch.cat([parts[i] for i in order]) for parts in (parts_q, parts_k, parts_v)]
    options = dict(OPTIONS[name])
    out, lse, _ = call((q.detach(), k.detach(), v.detach()), lengths, **options)
    if name == "alibi_b":
        options["alibi_slopes"] = options["alibi_slopes"][order]
    cu = [cumulative([n[i] for i in order]) for n in (LENGTHS_Q, LENGTHS_K)]
    got, got_lse, _ = call(permuted, (*cu, *lengths[2:]), **options)
    parts, lses = out.split(list(LENGTHS_Q)), lse.split(list(LENGTHS_Q), 1)
    assert torch.equal(got, torch.cat([parts[i] for i in order]))
    assert torch.equal(got_lse, torch.cat([lses[i] for i in order], 1))


NONE = {
    "window": {"window_size": (17, 17)},
    "endless_window": {"window_size": (2**70, 2**70)},
    "alibi": {"alibi_slopes": torch.zeros(4)},
    "sinks": {"sinks": torch.full((4,), -math.inf)},
    "dropout": {"dropout_p": 0.0},
    "softcap": {"softcap": 0.0},
    "deterministic": {"deterministic": True},
    "larger_max_seqlen": {"max_seqlen_q": 10**9, "max_seqlen_k": 10**9},
}


@pytest.mark.parametrize("name", NONE)
def test_options_that_are_none(name):
    tensors, lengths = make(tail=1)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = dict(zip(names, lengths, strict=True)) | NONE[name]
    got = flash_attn_varlen_func(*tensors, return_attn_probs=True, **given)
    expected = call(tensors, lengths)
    if name == "alibi":  # the reference computes ALiBi
        torch.testing.assert_close(got, expected)
    else:
        assert all(map(torch.equal, got, expected))


def test_a_huge_softcap_is_none():
    tensors, lengths = make(dtype=F64)
    got, expected = call(tensors, lengths, softcap=1e8), call(tensors, lengths)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_and_strides_of_lengths(dtype):
    tensors, lengths = make()
    expected = call(tensors, lengths)
    strided = [x.to(dtype).repeat_interleave(2)[::2] for x in lengths[:2]]
    assert all(map(torch.equal, call(tensors, (*strided, *lengths[2:])), expected))
    mixed = (lengths[0].long(), lengths[1].int(), *lengths[2:])
    assert all(map(torch.equal, call(tensors, mixed), expected))


@each_option
def test_seqused_is_slicing(name):
    (q, k, v), lengths = make(tail=1)
    used_q, used_k = (3, 0, 1, 17, 0), (6, 1, 0, 4, 12)
    used = {"seqused_q": torch.tensor(used_q).int(), "seqused_k": torch.tensor(used_k).int()}
    out, lse, _ = call((q, k, v), lengths, **used, **OPTIONS[name])
    pick_q, pick_k = (
        torch.cat([torch.arange(start, start + n) for start, n in zip(cu, counts, strict=False)])
        for cu, counts in ((lengths[0].tolist(), used_q), (lengths[1].tolist(), used_k))
    )
    sliced = (cumulative(used_q), cumulative(used_k), 17, 12)
    expected = call((q[pick_q], k[pick_k], v[pick_k]), sliced, **OPTIONS[name])
    assert torch.equal(out[pick_q], expected[0]) and torch.equal(lse[:, pick_q], expected[1])
    rest = torch.ones(q.shape[0], dtype=torch.bool).index_fill(0, pick_q, False)
    assert rest.sum() == 7 and not out[rest].any() and (lse[:, rest] == -math.inf).all()
    with torch.no_grad():  # unused rows may hold anything
        q[rest] = math.nan
        hidden = torch.ones(k.shape[0], dtype=torch.bool).index_fill(0, pick_k, False)
        k[hidden], v[hidden] = math.nan, math.inf
    again = call((q, k, v), lengths, **used, **OPTIONS[name])
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    for grad in torch.autograd.grad(again[0].sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["plain", "causal_sinks", "softcap", "alibi_b"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [((), ()), ((0, 0), (0, 0)), ((3, 2), (0, 0)), ((0, 0), (3, 2)), ((0,), (0,))],
    ids=str,
)
@pytest.mark.parametrize("tail", [0, 2])
def test_nothing_to_compute(name, lengths_q, lengths_k, tail):
    tensors, lengths = make(lengths_q, lengths_k, tail=tail)
    options = dict(OPTIONS[name])
    if name == "alibi_b":
        options["alibi_slopes"] = torch.ones(len(lengths_q), 4)
    out, lse, _ = call(tensors, lengths, **options)
    assert not out.any() and out.shape == tensors[0].shape
    sinks = options.get("sinks", torch.full((4,), -math.inf))
    computed = torch.arange(out.shape[0]) < sum(lengths_q)
    assert torch.equal(lse, torch.where(computed, sinks[:, None], -math.inf))
    for x, grad in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_gradcheck():
    tensors, lengths = make((2, 0, 3), (3, 1, 2), tail=1, dtype=F64, h=2, h_k=1, d=2)
    sinks = torch.tensor([0.5, -1.0], dtype=F64, requires_grad=True)
    for options in ({"causal": True}, {"window_size": (1, 1), "softcap": 2.0}):

        def attend(q, k, v, sinks, options=options):
            return flash_attn_varlen_func(q, k, v, *lengths, sinks=sinks, **options)

        assert torch.autograd.gradcheck(attend, (*tensors, sinks), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, (*tensors, sinks))


@each_option
def test_gradients_of_every_tensor_and_of_lse(name):
    tensors, lengths = make(dtype=F64)
    options = dict(OPTIONS[name])
    inputs = list(tensors)
    for argument in ("alibi_slopes", "sinks"):
        if argument in options:
            options[argument] = options[argument].clone().requires_grad_()
            inputs.append(options[argument])
    out, lse, _ = call(tensors, lengths, **options)
    exact = attention_varlen_ref(*tensors, *lengths[:2], **options)
    got, expected = (
        torch.autograd.grad((x.square().sum(), torch.where(y > -math.inf, y, 0).sum()), inputs)
        for x, y in ((out, lse), (exact.out, exact.lse))
    )
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=1e-5, rtol=1e-5)


def test_dropout_pattern_is_the_one_used():
    (q, k, v), lengths = make(h_k=4)
    torch.manual_seed(1)
    out, _, dmask = call((q, k, v), lengths, dropout_p=0.375)
    assert dmask.shape == (5, 4, 17, 12)
    kept = ~torch.signbit(dmask)
    share = []
    for i, (n_q, n_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        rows, keys = (slice(cu[i], cu[i] + n) for cu, n in ((lengths[0], n_q), (lengths[1], n_k)))
        weights = torch.where(kept[i], dmask[i], 0)[:, :n_q, :n_k] / (1 - 0.375)
        torch.testing.assert_close(out[rows], torch.einsum("hij,jhd->ihd", weights, v[keys]))
        share.append(kept[i, :, :n_q, :n_k].flatten())
        beyond = dmask[i].clone()
        beyond[:, :n_q, :n_k] = 0
        assert torch.equal(beyond, torch.zeros_like(beyond)) and not torch.signbit(beyond).any()
    assert 0.5 < torch.cat(share).double().mean() < 0.7
    plain = attention_varlen_ref(q, k, v, *lengths[:2], return_probs=True)
    torch.testing.assert_close(dmask[3, :, :17, :9].abs(), plain.probs[3])
    torch.manual_seed(1)
    assert torch.equal(flash_attn_varlen_func(q, k, v, *lengths, 0.375), out)
    assert not torch.equal(flash_attn_varlen_func(q, k, v, *lengths, 0.375), out)


def test_sequences_draw_dropout_of_their_own():
    (q, k, v), lengths = make((30, 30), (30, 30), h_k=4)
    dmask = call((q, k, v), lengths, dropout_p=0.5)[2]
    assert not torch.equal(torch.signbit(dmask[0]), torch.signbit(dmask[1]))


@each_option
def test_packed_functions_read_in_place(name):
    (q, k, v), lengths = make(h_k=4)
    kv = torch.stack((k, v), 1).detach()
    got = flashcute.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **OPTIONS[name])
    assert torch.equal(got, flash_attn_varlen_func(q, k, v, *lengths, **OPTIONS[name]))
    qkv = torch.stack((k, v, k), 1).detach().requires_grad_()
    cu, longest = lengths[1], lengths[3]
    got = flashcute.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, **OPTIONS[name])
    expected = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, longest, longest, **OPTIONS[name])
    assert torch.equal(got, expected)
    got.sum().backward()
    assert qkv.grad.shape == qkv.shape and qkv.grad.isfinite().all()


def test_options_reach_the_packed_functions_by_position():
    (q, k, v), lengths = make(h_k=4)
    options = (0.0, 0.3, True, (4, 0), 1.5, SLOPES, False, True)
    expected = flash_attn_varlen_func(q, k, v, *lengths, *options)
    kv = torch.stack((k, v), 1)
    got = flashcute.flash_attn_varlen_kvpacked_func(q, kv, *lengths, *options)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("causal", [False, True])
def test_plain_sequences_go_to_pytorchs_kernel(causal, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("went to the reference")

    tensors, lengths = make((5, 17), (6, 12))
    monkeypatch.setattr(cpu, "attention_ref", fail)
    flash_attn_varlen_func(*tensors, *lengths, causal=causal).sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


def test_nan_stays_in_its_sequence():
    (q, k, v), lengths = make()
    expected = call((q, k, v), lengths)
    with torch.no_grad():
        k[7], v[12] = math.nan, math.inf  # of sequences 1 and 3
    out, lse, _ = call((q, k, v), lengths)
    others = torch.ones(q.shape[0], dtype=torch.bool)
    others[6:23] = False
    assert torch.equal(out[others], expected[0][others])
    assert torch.equal(lse[:, others], expected[1][:, others])
    assert not out[6:23].isfinite().all()


def test_round_trip_of_a_padded_batch():
    # coming_from_flash_attn.md has this recipe: unpad, attend, pad.
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 7, 3, 4, 8, generator=generator)
    lengths = torch.tensor([7, 2, 5])
    mask = torch.arange(7) < lengths[:, None]
    qkv, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(x, mask)
    out = flashcute.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest, causal=True)
    padded = bert_padding.pad_input(out, indices, 3, 7)
    assert not padded[~mask].any()
    for i, n in enumerate(lengths):
        expected = flashcute.flash_attn_qkvpacked_func(x[i : i + 1, :n], causal=True)
        assert torch.equal(padded[i, :n], expected[0])


def test_jagged_nested_tensors():
    # The docstring has this recipe: pass values and offsets, and lengths where there are holes.
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(n, 4, 8, generator=generator) for n in (3, 6, 1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    offsets = nested.offsets()
    longest = int(offsets.diff().max())

    def attend(x):
        return flash_attn_varlen_func(x, x, x, offsets, offsets, longest, longest, causal=True)

    def attend_dense(x):
        return flashcute.flash_attn_func(x[None], x[None], x[None], causal=True)[0]

    out = torch.nested.nested_tensor_from_jagged(attend(nested.values()), offsets)
    for got, part in zip(out.unbind(), parts, strict=True):
        assert torch.equal(got, attend_dense(part))
    out.values().sum().backward()
    assert nested.grad.values().isfinite().all()

    rows = torch.randn(2, 6, 4, 8, generator=generator)
    starts, lengths = torch.tensor([1, 0]), torch.tensor([3, 5])
    holes = torch.nested.narrow(rows, 1, starts, lengths, layout=torch.jagged)
    assert holes.lengths() is not None
    packed = holes.contiguous()
    offsets, longest = packed.offsets(), 5
    got = attend(packed.values())
    expected = torch.cat([attend_dense(rows[0, 1:4]), attend_dense(rows[1, :5])])
    assert torch.equal(got, expected)


def test_signatures_are_flash_attns():
    options = [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
    ]
    lengths_and_sinks = [("seqused_q", None), ("seqused_k", None), ("sinks", None)]
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    for name, inputs, more in (
        ("flash_attn_varlen_func", ("q", "k", "v", *lengths), [("block_table", None)]),
        ("flash_attn_varlen_kvpacked_func", ("q", "kv", *lengths), []),
        ("flash_attn_varlen_qkvpacked_func", ("qkv", "cu_seqlens", "max_seqlen"), []),
    ):
        function = getattr(flashcute, name)
        assert getattr(flash_attn_interface, name) is function
        parameters = list(inspect.signature(function).parameters.values())
        required = inspect.Parameter.empty
        own = lengths_and_sinks + ([("num_splits", 0)] if more else [])
        flash_attns = [*((n, required) for n in inputs), *options, *more]
        assert [(p.name, p.default) for p in parameters] == flash_attns + own
        kinds = [p.kind for p in parameters]
        assert set(kinds[: -len(own)]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        assert set(kinds[-len(own) :]) == {inspect.Parameter.KEYWORD_ONLY}
