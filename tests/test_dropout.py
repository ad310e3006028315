"""Dropout masks: the generator, the definition of a mask, and the masks of CPU calls."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashcute import flash_attn_func, flash_attn_varlen_func, ops
from flashcute.dropout import draw_state, dropout_mask, philox4x32
from flashcute.jit.abi import dropout_bound
from flashcute.reference import attention_ref

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# (rounds, counter, key, result) of Random123, the library of the authors of the Philox paper.
KNOWN_ANSWERS = (
    (7, (0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)
STATE = torch.tensor([2**62 + 12345, -77])


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN_ANSWERS)
def test_generator_gives_the_known_answers(rounds, counter, key, expected):
    words = (tuple(map(torch.tensor, x)) for x in (counter, key))
    assert tuple(x.item() for x in philox4x32(*words, rounds=rounds)) == expected


def kept(state, entry_head: int, query: int, key: int, dropout_p: float) -> bool:
    """Returns whether a weight is kept, computed in Python's integers."""
    words = [query // 16 * 8 + query % 8, key // 16 * 4 + key % 8 // 2, entry_head]
    words.append(state[1] % 2**32)
    k0, k1 = state[0] % 2**32, state[0] % 2**64 >> 32
    for _ in range(7):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ k0, b % 2**32, a >> 32 ^ words[3] ^ k1, a % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    word = words[query % 16 // 8 + key % 16 // 8 * 2]
    bits, flips = dropout_bound(round(dropout_p * 2**16))
    bound, half = (rank(x) for x in (bits, word >> 16 if key % 2 else word % 2**16))
    return (half is None or half >= bound) != flips


def rank(bits: int) -> int | None:
    """Returns the place of a float16, given as bits, in the order of all; None for NaN."""
    magnitude = bits % 2**15
    return None if magnitude > 0x7C00 else -magnitude if bits >> 15 else magnitude


def test_as_many_patterns_drop_a_weight_as_asked():
    every = torch.arange(2**16).to(torch.int16).view(torch.float16)
    in_order = every[~every.isnan()].sort().values
    for threshold in range(2**16):
        bits, flips = dropout_bound(threshold)
        bound = torch.tensor(bits, dtype=torch.uint16).view(torch.float16)
        less = int(torch.searchsorted(in_order, bound))
        assert threshold == (2**16 - less if flips else less)


@pytest.mark.parametrize("state", [(5, 3), (-1, -1), (2**63 - 1, -(2**63))], ids=str)
@pytest.mark.parametrize("dropout_p", [0.4, 0.5, 0.99])
def test_mask_is_the_defined_one(state, dropout_p):
    b, h, seqlen_q, seqlen_k = 2, 3, 19, 35
    mask = dropout_mask(torch.tensor(state), b, h, seqlen_q, seqlen_k, dropout_p)
    expected = [
        [[kept(state, x, i, j, dropout_p) for j in range(seqlen_k)] for i in range(seqlen_q)]
        for x in range(b * h)
    ]
    assert torch.equal(mask, torch.tensor(expected).view(b, h, seqlen_q, seqlen_k))


def test_a_part_is_the_same_part_of_the_mask():
    whole = dropout_mask(STATE, 3, 2, 50, 40, 0.5)
    part = dropout_mask(STATE, 3, 2, 50, 40, 0.5, batch=slice(1, 3), rows=slice(21, 33))
    assert torch.equal(part, whole[1:3, :, 21:33])
    assert torch.equal(dropout_mask(STATE, 1, 2, 20, 17, 0.5), whole[:1, :, :20, :17])
    for sizes in ((0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        assert dropout_mask(STATE, *sizes, 0.5).shape == sizes


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.002, 0.1, 0.5, 0.9, 1 - 2.0**-16])
def test_weights_are_dropped_as_often_as_asked(dropout_p):
    mask = dropout_mask(STATE, 2, 4, 512, 512, dropout_p)
    p = round(dropout_p * 2**16) / 2**16
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs((~mask).double().mean() - p) < 4 * sigma


def test_weights_are_independent():
    """They are independent of neighbours and of other entries, heads, seeds and offsets."""
    states = [STATE, STATE + torch.tensor([1, 0]), STATE + torch.tensor([0, 1])]
    states.append(STATE + torch.tensor([2**32, 0]))
    masks = torch.stack([dropout_mask(x, 2, 2, 256, 256, 0.5) for x in states]).double() * 2 - 1
    pairs = {
        "state": [(masks[0], x) for x in masks[1:]],
        "entry": [(masks[:, 0], masks[:, 1])],
        "head": [(masks[:, :, 0], masks[:, :, 1])],
        "query": [(masks[..., n:, :], masks[..., :-n, :]) for n in (1, 2, 8, 16, 64)],
        "key": [(masks[..., n:], masks[..., :-n]) for n in (1, 2, 8, 16, 64)],
        "both": [(masks[..., 8:, 8:], masks[..., :-8, :-8]), (masks, masks.mT)],
    }
    for name, of_name in pairs.items():
        for x, y in of_name:
            assert abs((x * y).mean()) < 5 / math.sqrt(x.numel() / 2), name


def test_states_are_drawn_from_the_default_generator():
    torch.manual_seed(3)
    first, second = draw_state("cpu"), draw_state("cpu")
    torch.manual_seed(3)
    assert torch.equal(draw_state("cpu"), first) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,)
    assert torch.stack([draw_state("cpu") for _ in range(8)]).max() > 2**40


def test_the_operator_on_the_cpu_drops_what_the_mask_says():
    q, k, v = (torch.randn(2, 37, 4, 16) for _ in range(3))
    dropout_p = 0.3
    out, lse = ops.attend(q, k, v, 0.25, True, (-1, -1), None, 0.0, None, False, STATE, dropout_p)
    expected = attention_ref(
        *(q, k, v),
        softmax_scale=0.25,
        causal=True,
        dropout_p=round(dropout_p * 2**16) / 2**16,
        dropout_mask=dropout_mask(STATE, 2, 4, 37, 37, dropout_p),
    )
    assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)
    plain = ops.attend(q, k, v, 0.25, True, (-1, -1), None)
    torch.testing.assert_close(lse, plain[1])
    for p in (0.0, 2.0**-18):
        out, lse = ops.attend(q, k, v, 0.25, True, (-1, -1), None, 0.0, None, False, STATE, p)
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_sequences_of_a_ragged_batch_are_entries():
    """Empty sequences count as entries. A mask does not depend on where a sequence's tokens are."""
    lengths = (5, 0, 17, 30)
    q, k, v = (torch.randn(sum(lengths) + 2, 4, 16) for _ in range(3))
    cu = torch.tensor([0, 5, 5, 22, 52], dtype=torch.int32)
    torch.manual_seed(4)
    dmask = flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, 0.3, return_attn_probs=True)[2]
    torch.manual_seed(4)
    mask = dropout_mask(draw_state("cpu"), 4, 4, 30, 30, 0.3)
    for i, n in enumerate(lengths):
        assert torch.equal(~torch.signbit(dmask[i, :, :n, :n]), mask[i, :, :n, :n])
    torch.manual_seed(4)
    dense = flash_attn_func(*(x.view(4, 13, 4, 16)[:1] for x in (q[:52], k[:52], v[:52])), 0.3)
    torch.manual_seed(4)
    ragged = flash_attn_varlen_func(q[:13], k[:13], v[:13], cu[:1].new_tensor([0, 13]),
                                    cu[:1].new_tensor([0, 13]), 13, 13, 0.3)  # fmt: skip
    assert torch.equal(dense[0], ragged)


def fake_qkv(device: str) -> list[torch.Tensor]:
    return [torch.empty(2, 9, 4, 24, device=device, dtype=torch.half) for _ in range(3)]


def test_what_the_function_hands_to_the_operator_on_cuda(monkeypatch):
    """The operator gets a state on the device and the rounded probability, or neither."""
    calls = []

    def attend(q, *args):
        calls.append(args)
        return torch.empty_like(q), q.new_empty(2, 4, 9, dtype=torch.float32)

    monkeypatch.setattr(ops, "attend", attend)
    with FakeTensorMode(), torch.no_grad():
        out, lse, dmask = flash_attn_func(*fake_qkv("cuda"), 0.1, return_attn_probs=True)
        assert (out.shape, lse.shape, dmask.shape) == ((2, 9, 4, 24), (2, 4, 9), (2, 4, 9, 9))
        flash_attn_func(*fake_qkv("cuda"), 2.0**-18, softcap=1.0)
    state, dropout_p = calls[0][-2:]
    assert state.shape == (2,) and state.dtype == torch.int64 and state.device.type == "cuda"
    assert dropout_p == 6554 / 2**16
    assert calls[1][-2:] == (None, 0.0)


@pytest.mark.parametrize("probs", [False, True])
def test_calls_for_kernels_compile_into_one_graph(probs):
    torch._dynamo.reset()
    attend = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    results = attend(*fake_qkv("meta"), 0.1, return_attn_probs=probs)
    shapes = [x.shape for x in (results if probs else (results,))]
    assert shapes == [(2, 9, 4, 24), (2, 4, 9), (2, 4, 9, 9)][: len(shapes)]
