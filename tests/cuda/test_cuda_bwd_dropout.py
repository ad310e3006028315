"""Gradients with dropout on a GPU against float64, with the mask as a tensor."""

from __future__ import annotations

import pytest
import torch
from building import build
from conditions import sm80_backwards

from flashcute import flash_attn_func, heuristics, testing
from flashcute.dropout import draw_state, dropout_mask

# (b, seqlen_q, seqlen_k, h, h_k): odd lengths, heads in groups, rows that see no key.
SHAPES = ((2, 129, 200, 4, 2), (1, 333, 257, 6, 2), (3, 1, 77, 2, 1), (1, 1030, 1100, 8, 8))
HEAD_DIMS = (64, 96, 128, 256)
MASKS = ({"causal": True}, {"causal": False}, {"window_size": (100, 20)})
DTYPE_OF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def _dropout_kernels() -> None:
    of_hopper = torch.cuda.get_device_capability() == (9, 0)
    build(
        heuristics.bwd_with_options(config, dropout=True)
        for dtype in DTYPE_OF
        for head_dim in HEAD_DIMS
        for mask in ("none", "causal", "local")
        for config in (
            sm80_backwards(dtype, head_dim, mask)[-1],
            *([heuristics.sm90_bwd_config(dtype, head_dim, mask)] * of_hopper),
        )
    )


def make(shape: tuple[int, ...], d: int, dtype: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns q, k, v and sinks, which require gradients, and dout."""
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((b, seqlen_q, h, d), *((b, seqlen_k, h_k, d),) * 2, (b, seqlen_q, h, d), (h,))
    q, k, v, dout, sinks = (torch.randn(size, device="cuda", generator=generator) for size in sizes)
    inputs = [x.to(DTYPE_OF[dtype]) for x in (q, k, v)]
    return [x.requires_grad_() for x in (*inputs, sinks)], dout.to(DTYPE_OF[dtype])


def gradients(inputs, dout, dropout_p: float, seed: int, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    q, k, v, sinks = inputs
    out = flash_attn_func(q, k, v, dropout_p, sinks=sinks, **options)
    found = torch.autograd.grad(out, inputs, dout)
    return dict(zip(("dq", "dk", "dv", "dsinks"), found, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPE_OF)
def test_gradients(dtype, head_dim, options, shape, kernel_class, poisoned_outputs) -> None:
    b, seqlen_q, seqlen_k, h, _ = shape
    inputs, dout = make(shape, head_dim - 8, dtype)
    found = gradients(inputs, dout, 0.25, 3, **options)
    torch.manual_seed(3)
    mask = dropout_mask(draw_state(dout.device), b, h, seqlen_q, seqlen_k, 0.25)
    q, k, v, sinks = (x.detach() for x in inputs)
    dropped = {"dropout_p": 0.25, "dropout_mask": mask}
    testing.check_backward(found, q, k, v, dout, sinks=sinks, **dropped, **options)
    again = gradients(inputs, dout, 0.25, 3, **options)
    assert all(torch.equal(x, again[name]) for name, x in found.items() if name != "dq")
    other = gradients(inputs, dout, 0.25, 4, **options)
    assert not torch.equal(found["dv"], other["dv"])


def test_a_probability_that_rounds_to_zero_equals_none(kernel_class) -> None:
    inputs, dout = make(SHAPES[0], 64, "bf16")
    none = gradients(inputs, dout, 0.0, 1, causal=True, deterministic=True)
    found = gradients(inputs, dout, 2.0**-18, 1, causal=True, deterministic=True)
    assert all(torch.equal(x, found[name]) for name, x in none.items())


def test_a_training_step_in_a_graph_draws_anew_in_each_replay(kernel_class) -> None:
    """The gradients use the dropout mask that the output was computed with."""
    inputs, dout = make(SHAPES[0], 64, "fp16")
    q, k, v, _ = (x.detach().requires_grad_() for x in inputs)

    def step() -> list[torch.Tensor]:
        out, _, dmask = flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
        return [dmask.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    masks = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        dmask, *found = captured
        masks.append(~torch.signbit(dmask))
        dropped = {"dropout_p": 0.5, "dropout_mask": masks[-1]}
        named = dict(zip(("dq", "dk", "dv"), found, strict=True))
        testing.check_backward(named, q.detach(), k.detach(), v.detach(), dout, **dropped)
    assert not torch.equal(*masks)
