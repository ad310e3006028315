"""The varlen reference against another definition: dense attention under a block mask."""

from __future__ import annotations

import math

import pytest
import torch

from flashcute.reference import attention_ref, visible_keys
from flashcute.reference_varlen import attention_varlen_ref

F64 = torch.float64
LENGTHS_Q, LENGTHS_K = (5, 0, 1, 7, 4), (6, 3, 0, 3, 9)
TAIL_Q, TAIL_K = 2, 3  # tokens of no sequence


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


CU_Q, CU_K = cumulative(LENGTHS_Q), cumulative(LENGTHS_K)


def make(h: int = 4, h_k: int = 2, d: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    total_q, total_k = sum(LENGTHS_Q) + TAIL_Q, sum(LENGTHS_K) + TAIL_K
    shapes = ((total_q, h, d), (total_k, h_k, d), (total_k, h_k, d))
    return [torch.randn(s, dtype=F64, generator=generator) for s in shapes]


def block_mask(used_q, used_k, **mask) -> torch.Tensor:
    """Returns 0 where a token sees a key of its own sequence, else -inf: (total_q, total_k)."""
    bias = torch.full((sum(LENGTHS_Q) + TAIL_Q, sum(LENGTHS_K) + TAIL_K), -math.inf, dtype=F64)
    for start_q, n_q, start_k, n_k in zip(CU_Q, used_q, CU_K, used_k, strict=False):
        seen = visible_keys(n_q, n_k, **mask)
        bias[start_q : start_q + n_q, start_k : start_k + n_k].masked_fill_(seen, 0.0)
    return bias


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (0, -1)}], ids=str
)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "softmax_scale": 0.7}], ids=str)
def test_is_dense_attention_under_a_block_mask(used, mask, options):
    q, k, v = make()
    used_q, used_k = LENGTHS_Q, LENGTHS_K
    lengths = {}
    if used:
        used_q, used_k = (3, 0, 1, 7, 0), (6, 1, 0, 2, 9)
        lengths = {"seqused_q": torch.tensor(used_q), "seqused_k": torch.tensor(used_k)}
    out, lse, probs = attention_varlen_ref(q, k, v, CU_Q, CU_K, **lengths, **mask, **options)
    bias = block_mask(used_q, used_k, **mask)
    expected = attention_ref(q[None], k[None], v[None], attn_bias=bias, **options)
    torch.testing.assert_close(out, expected.out[0])
    torch.testing.assert_close(lse, expected.lse[0])
    assert probs is None


def test_alibi_is_aligned_to_each_sequence():
    q, k, v = make()
    slopes = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    bias = block_mask(LENGTHS_Q, LENGTHS_K).expand(4, -1, -1).clone()
    for i, (start_q, n_q, start_k, n_k) in enumerate(
        zip(CU_Q, LENGTHS_Q, CU_K, LENGTHS_K, strict=False)
    ):
        distance = (torch.arange(n_q)[:, None] + n_k - n_q - torch.arange(n_k)).abs()
        block = bias[:, start_q : start_q + n_q, start_k : start_k + n_k]
        block -= slopes[i, :, None, None] * distance
    expected = attention_ref(q[None], k[None], v[None], attn_bias=bias)
    got = attention_varlen_ref(q, k, v, CU_Q, CU_K, alibi_slopes=slopes)
    torch.testing.assert_close(got.out, expected.out[0])
    torch.testing.assert_close(got.lse, expected.lse[0])
    same = attention_varlen_ref(q, k, v, CU_Q, CU_K, alibi_slopes=slopes[0].expand(5, 4))
    one_for_all = attention_varlen_ref(q, k, v, CU_Q, CU_K, alibi_slopes=slopes[0])
    assert torch.equal(same.out, one_for_all.out)


def test_sinks_join_rows_of_sequences_only():
    q, k, v = make()
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=F64)
    out, lse, _ = attention_varlen_ref(q, k, v, CU_Q, CU_K, sinks=sinks)
    plain = attention_varlen_ref(q, k, v, CU_Q, CU_K)
    inside = torch.arange(q.shape[0]) < CU_Q[-1]
    expected = torch.logaddexp(plain.lse, sinks[:, None])
    torch.testing.assert_close(lse[:, inside], expected[:, inside])
    assert torch.equal(lse[:, ~inside], plain.lse[:, ~inside])
    assert torch.equal(lse[:, CU_Q[2]], sinks)  # the sequence without keys
    assert not out[~inside].any() and not out[CU_Q[2]].any()


def test_dropout_masks_and_probabilities_are_per_sequence():
    q, k, v = make()
    sizes = [(4, n, m) for n, m in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    masks = [torch.rand(s, generator=torch.Generator().manual_seed(2)) > 0.4 for s in sizes]
    out, _, probs = attention_varlen_ref(
        q, k, v, CU_Q, CU_K, dropout_p=0.4, dropout_mask=masks, return_probs=True
    )
    for i, (p, mask) in enumerate(zip(probs, masks, strict=True)):
        assert p.shape == sizes[i]
        values = v[CU_K[i] : CU_K[i + 1]].repeat_interleave(2, 1)
        weights = torch.where(mask, p, 0) / (1 - 0.4)
        expected = torch.einsum("hij,jhd->ihd", weights, values)
        torch.testing.assert_close(out[CU_Q[i] : CU_Q[i + 1]], expected)


def test_gradients():
    q, k, v = (x[:, :2, :2].clone().requires_grad_() for x in make(h=2, h_k=1))
    sinks = torch.tensor([0.5, -1.0], dtype=F64, requires_grad=True)
    slopes = torch.rand(5, 2, dtype=F64).requires_grad_()

    def attend(q, k, v, sinks, slopes):
        result = attention_varlen_ref(
            q, k, v, CU_Q, CU_K, sinks=sinks, alibi_slopes=slopes, causal=True
        )
        return result.out, result.lse[:, : CU_Q[-1]]

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks, slopes), fast_mode=True)
    out, _ = attend(q, k, v, sinks, slopes)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(g[-2:].any() for g in grads)  # of tokens of no sequence


@pytest.mark.parametrize("b", [0, 2])
def test_nothing(b):
    q, k, v = (x[:0] for x in make())
    zeros = torch.zeros(b + 1, dtype=torch.int64)
    out, lse, probs = attention_varlen_ref(q, k, v, zeros, zeros, return_probs=True)
    assert (out.shape, lse.shape, len(probs)) == ((0, 4, 6), (4, 0), b)


def test_dtypes():
    q, k, v = (x.half() for x in make())
    out, lse, _ = attention_varlen_ref(q, k, v, CU_Q, CU_K)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    out, lse, _ = attention_varlen_ref(q, k, v, CU_Q, CU_K, upcast=F64)
    assert (out.dtype, lse.dtype) == (F64, F64)


WRONG = [
    (ValueError, {"cu_seqlens_q": CU_Q + 1}, r"cu_seqlens_q from 0 up to at most 19 .*got \[1, 6"),
    (ValueError, {"cu_seqlens_q": CU_Q.flip(0)}, r"cu_seqlens_q from 0"),
    (ValueError, {"cu_seqlens_k": torch.tensor([0, 9, 6, 9, 12, 21])}, r"cu_seqlens_k from 0"),
    (ValueError, {"cu_seqlens_k": torch.tensor([0, 6, 9, 9, 12, 99])}, r"at most 24"),
    (ValueError, {"cu_seqlens_k": CU_K[:-1]}, r"of one length, got 6 and 5"),
    (ValueError, {"seqused_k": torch.tensor([7, 3, 0, 3, 9])}, r"seqused_k within, got .*\[7, 3"),
    (ValueError, {"seqused_q": torch.tensor([-1, 0, 1, 7, 4])}, r"seqused_q within, got .*\[-1, 0"),
    (ValueError, {"seqused_q": torch.tensor([5, 0, 1])}, r"seqused_q within"),
    (
        ValueError,
        {"seqused_q": torch.ones(5, 1).int()},
        r"seqused_q of shape \(b,\), got .*\(5, 1\); pass",
    ),
    (
        ValueError,
        {"cu_seqlens_k": CU_K[None]},
        r"cu_seqlens_k of shape \(b \+ 1,\), got .*\(1, 6\); pass",
    ),
    (
        ValueError,
        {"v": torch.ones(24, 2)},
        r"v of shape \(total, heads, head_dim\), got .*; reshape",
    ),
    (
        TypeError,
        {"cu_seqlens_q": CU_Q.tolist()},
        r"cu_seqlens_q to be a torch.Tensor, got .* type list; conv",
    ),
    (
        TypeError,
        {"cu_seqlens_k": CU_K.float()},
        r"cu_seqlens_k of dtype torch.int32 or .*float32; cast",
    ),
    (
        TypeError,
        {"seqused_q": [1] * 5},
        r"seqused_q to be a torch.Tensor, got .* type list; convert",
    ),
    (TypeError, {"seqused_k": torch.ones(5)}, r"seqused_k of dtype torch.int32 or .*float32; cast"),
    (TypeError, {"k": None}, r"k to be a torch.Tensor, got .* type NoneType; pass"),
]


@pytest.mark.parametrize(("error", "change", "pattern"), WRONG, ids=[p for *_, p in WRONG])
def test_lengths_that_do_not_fit(error, change, pattern):
    arguments = dict(zip("qkv", make(), strict=True))
    arguments |= {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **change}
    with pytest.raises(error, match=f"^attention_varlen_ref: expected .*{pattern}"):
        attention_varlen_ref(**arguments)
