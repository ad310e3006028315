"""flash-attn's padding helpers: what they return, and that padding undoes unpadding."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashcute import bert_padding
from flashcute.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

# Sequences of 3 and 1 tokens, an empty one, and one whose tokens do not start at the left.
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])


def hidden(*trailing: int, dtype: torch.dtype = torch.float32, b: int = 4) -> torch.Tensor:
    shape = (b, 4, *trailing)
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_and_pad(trailing, dtype, mask_dtype):
    x = hidden(*trailing, dtype=dtype)
    tokens, indices, cu_seqlens, longest, seqused = unpad_input(x, MASK.to(mask_dtype))
    assert torch.equal(tokens, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 4, 13, 15] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 4, 4, 6] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and type(longest) is int
    assert seqused.tolist() == [3, 1, 0, 2] and seqused.dtype == torch.int32
    padded = pad_input(tokens, indices, 4, 4)
    assert padded.shape == x.shape and padded.dtype == x.dtype
    assert torch.equal(padded, torch.where(MASK.bool().view(4, 4, *[1] * len(trailing)), x, 0))


def test_unused_tokens_are_kept_and_not_counted():
    unused = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
    tokens, indices, cu_seqlens, longest, seqused = unpad_input(hidden(2), MASK, unused)
    assert torch.equal(tokens, hidden(2)[(MASK + unused).bool()])
    assert indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 13, 14, 15]
    assert cu_seqlens.tolist() == [0, 4, 7, 7, 10]
    assert (longest, seqused.tolist()) == (4, [3, 1, 0, 2])
    both = unpad_input(hidden(2), MASK.bool(), unused.bool())
    assert torch.equal(both[1], indices) and torch.equal(both[2], cu_seqlens)


def test_concatenated_sequences():
    # This is flash-attn's own example: rows with sequences of 2 + 3, 3 + 2 and 6 tokens.
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(18.0).view(3, 6, 1)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and type(longest) is int
    kept = torch.arange(6) < torch.tensor([[5], [5], [6]])
    assert torch.equal(pad_input(tokens, indices, 3, 6), torch.where(kept[..., None], x, 0))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)], ids=str)
def test_nothing_to_unpad(shape):
    x = torch.ones(*shape, 2)
    mask = torch.zeros(shape, dtype=torch.int32)
    tokens, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)
    assert (tokens.shape, indices.shape, longest) == ((0, 2), (0,), 0)
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and seqused.tolist() == [0] * shape[0]
    assert torch.equal(pad_input(tokens, indices, *shape), torch.zeros_like(x))
    *_, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, mask)
    assert (cu_seqlens.tolist(), longest) == ([0], 0)


def test_gradients():
    x = torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True)
    indices = MASK.flatten().nonzero().flatten()
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, MASK)[0], x)
    assert torch.autograd.gradcheck(lambda v: pad_input(v, indices, 4, 4), values)
    assert torch.autograd.gradgradcheck(lambda v: pad_input(v, indices, 4, 4), values)
    repeated = torch.tensor([3, 0, 3], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, repeated), x)
    got = index_put_first_axis(values, indices.int(), 16)
    assert torch.equal(index_first_axis(got, indices), values) and got.shape == (16, 2)


def test_compiled_index_and_pad():
    torch._dynamo.reset()
    indices, values = torch.tensor([0, 5, 2]), torch.randn(3, 2, requires_grad=True)

    def round_trip(values, indices):
        return index_first_axis(pad_input(values, indices, 2, 3).flatten(0, 1), indices)

    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True, dynamic=True)
    out = compiled(values, indices)
    assert torch.equal(out, values)
    out.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def test_signatures_are_flash_attns():
    expected = {
        "unpad_input": "hidden_states attention_mask unused_mask",
        "unpad_input_for_concatenated_sequences": "hidden_states attention_mask_in_length",
        "pad_input": "hidden_states indices batch seqlen",
        "index_first_axis": "input indices",
        "index_put_first_axis": "values indices first_axis_dim",
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(bert_padding, name)).parameters) == parameters.split()


X, INDICES = torch.zeros(4, 4, 2), torch.arange(3)
WRONG = [
    (unpad_input, ([1], MASK), TypeError, r"hidden_states to be a torch.Tensor, got .*list"),
    (unpad_input, (X, None), TypeError, r"attention_mask to be a torch.Tensor, got .*NoneType"),
    (unpad_input, (X, MASK.float()), TypeError, r"bool or int, got .*=torch.float32; compare"),
    (unpad_input, (X, MASK, MASK.half()), TypeError, r"got unused_mask.dtype=torch.float16"),
    (unpad_input, (X, MASK[:3]), ValueError, r"got attention_mask.shape=\(3, 4\) and hidden"),
    (unpad_input, (X, MASK, MASK[:, :3]), ValueError, r"got unused_mask.shape=\(4, 3\) and"),
    (unpad_input, (X, MASK[..., None]), ValueError, r"got attention_mask.shape=\(4, 4, 1\)"),
    (unpad_input, (X[0, 0], MASK), ValueError, r"hidden_states.shape=\(2,\); pass one"),
    (unpad_input, (X, MASK.to("meta")), ValueError, r"attention_mask on cpu .*device=meta"),
    (
        unpad_input_for_concatenated_sequences,
        (X, MASK.double()),
        TypeError,
        r"attention_mask_in_length of bool or int, got .*float64",
    ),
    (
        unpad_input_for_concatenated_sequences,
        (X, MASK != 0),
        TypeError,
        r"attention_mask_in_length of int, got attention_mask_in_length.dtype=torch.bool; pass",
    ),
    (index_first_axis, (3, INDICES), TypeError, r"input to be a torch.Tensor, got .*int"),
    (index_first_axis, (X, [0]), TypeError, r"indices to be a torch.Tensor, got .*list"),
    (index_first_axis, (X, INDICES.float()), TypeError, r"got indices.dtype=torch.float32; take"),
    (index_first_axis, (X, INDICES > 0), TypeError, r"got indices.dtype=torch.bool; take"),
    (index_first_axis, (X, INDICES[None]), ValueError, r"got indices.shape=\(1, 3\); flatten"),
    (index_first_axis, (X[0, 0, 0], INDICES), ValueError, r"got input.shape=\(\); give"),
    (index_first_axis, (X, INDICES.to("meta")), ValueError, r"on cpu as input, got .*meta"),
    (index_put_first_axis, (X, INDICES, 9), ValueError, r"3 indices, got values.shape=\(4,"),
    (index_put_first_axis, (X[:3], INDICES, 9.0), TypeError, r"to be an int, got first_axis.*=9.0"),
    (index_put_first_axis, (X[:3], INDICES, -1), ValueError, r"got first_axis_dim=-1;"),
    (
        index_first_axis,
        (X, INDICES + 2),
        ValueError,
        r"0 <= indices < 4, .*input, got a largest of 4;",
    ),
    (index_first_axis, (X, INDICES - 1), ValueError, r"0 <= indices < 4, .*, got a least of -1;"),
    (index_put_first_axis, (X[:3], INDICES, 2), ValueError, r"0 <= indices < 2, .* of 2;"),
    (index_put_first_axis, (X[:3], INDICES - 1, 3), ValueError, r"0 <= indices < 3, .* of -1;"),
    (pad_input, (X[:3], INDICES * 9, 4, 4), ValueError, r"0 <= indices < 16, .* of 18;"),
    (pad_input, (X[:3], INDICES, 2**40, 2**40), ValueError, r"batch \* seqlen < 2\*\*63, got 12"),
    (
        unpad_input_for_concatenated_sequences,
        (X, torch.tensor([[3, 3, 0, 0]] * 4)),
        ValueError,
        r"at most 4 tokens in a row of attention_mask_in_length, got 6 in row 0",
    ),
    (
        unpad_input_for_concatenated_sequences,
        (X, torch.tensor([[2, 0, 0, 0], [3, -1, 0, 0]] * 2)),
        ValueError,
        r"attention_mask_in_length of lengths from 0 on, got a least of -1",
    ),
    (pad_input, (X, INDICES, 4, 4), ValueError, r"3 indices, got hidden_states.shape=\(4,"),
    (pad_input, (X[:3], INDICES, True, 4), TypeError, r"batch to be an int, got batch=True"),
    (pad_input, (X[:3], INDICES, 4, -2), ValueError, r"0 <= seqlen .*, got seqlen=-2"),
    (pad_input, (X[:3], INDICES, 4, torch.tensor(4)), TypeError, r"got seqlen=tensor\(4\)"),
]


@pytest.mark.parametrize(("function", "args", "error", "pattern"), WRONG)
def test_wrong_input(function, args, error, pattern):
    with pytest.raises(error, match=rf"^{function.__name__}: expected .*{pattern}") as raised:
        function(*args)
    assert "; " in str(raised.value)
