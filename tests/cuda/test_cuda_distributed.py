"""Attention over two GPUs and NCCL, beside that of one; what the CPU tests do over gloo.

Tests that need two GPUs are deselected, and said so, where there are fewer.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashcute import distributed as fd
from flashcute import testing

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, got {torch.cuda.device_count()}"
)

WORLD = 2
SCHEMES = ("ring", "allgather")
# seqlen, heads, key heads, d, causal, window, order
CASES = [
    (1024, 4, 4, 128, True, (-1, -1), "zigzag"),
    (1000, 8, 2, 64, True, (-1, -1), "zigzag"),
    (768, 4, 1, 128, False, (-1, -1), "zigzag"),
    (1024, 4, 2, 128, True, (-1, -1), "contiguous"),
    (1024, 4, 2, 64, True, (200, -1), "zigzag"),
    (1024, 4, 2, 64, False, (100, 300), "contiguous"),
    (512, 2, 2, 40, True, (-1, -1), "zigzag"),
    (512, 2, 2, 20, True, (-1, -1), "zigzag"),
]


def _start(rank: int, store: str, timeout: float | None = None) -> torch.device:
    torch.cuda.set_device(rank)
    options = {} if timeout is None else {"timeout": datetime.timedelta(seconds=timeout)}
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=WORLD, **options
    )
    return torch.device("cuda", rank)


def _part(x: torch.Tensor, rank: int, order: str) -> torch.Tensor:
    if order == "zigzag":
        return fd.zigzag_split(x, rank, WORLD)
    return x.chunk(WORLD, 1)[rank].contiguous()


def _whole(x: torch.Tensor, order: str) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return fd.zigzag_merge(parts) if order == "zigzag" else torch.cat(parts, 1)


def _compute(scheme: str, case, rank: int, tensors, deterministic: bool = False):
    """This rank's out, lse as (b, s, h), dq, dk, dv."""
    _, _, _, _, causal, window, order = case
    q, k, v, dout, dlse = (_part(x, rank, order) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = getattr(fd, f"{scheme}_flash_attn_func")(
        q, k, v, causal=causal, window_size=window, order=order, deterministic=deterministic,
        return_lse=True,
    )  # fmt: skip
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.transpose(1, 2)))
    return [out.detach(), lse.detach().transpose(1, 2), *gradients]


def _inputs(case, device):
    s, h, h_k, d = case[:4]
    generator = torch.Generator(device).manual_seed(3)
    make = functools.partial(torch.randn, generator=generator, device=device)
    q, k, v, dout = (make((2, s, n, d), dtype=torch.bfloat16) for n in (h, h_k, h_k, h))
    return q, k, v, dout, make((2, s, h))


def _check_cases(rank: int, store: str) -> None:
    device = _start(rank, store)
    for scheme in SCHEMES:
        for case in CASES:
            tensors = _inputs(case, device)
            found = _compute(scheme, case, rank, tensors)
            out, lse, dq, dk, dv = (_whole(x, case[-1]) for x in found)
            q, k, v, dout, dlse = tensors
            options = {"causal": case[4], "window_size": case[5]}
            lse, dlse = lse.transpose(1, 2), dlse.transpose(1, 2)
            testing.check_forward(out, lse, q, k, v, **options)
            gradients = {"dq": dq, "dk": dk, "dv": dv}
            testing.check_backward(gradients, q, k, v, dout, dlse=dlse, **options)
    dist.destroy_process_group()


@needs_two_gpus
def test_it_is_attention_of_the_whole_sequence(tmp_path, backward_kernels):
    mp.spawn(_check_cases, (str(tmp_path / "store"),), WORLD)


def _check_repeats(rank: int, store: str) -> None:
    device = _start(rank, store)
    for scheme in SCHEMES:
        tensors = _inputs((4096, *CASES[1][1:]), device)
        first = _compute(scheme, CASES[1], rank, tensors, True)
        for _ in range(5):
            # Other work beside it, for transfers to end at other times.
            noise = torch.randn(4096, 4096, device=device)
            (noise @ noise).sum()
            again = _compute(scheme, CASES[1], rank, tensors, True)
            assert all(map(torch.equal, first, again)), scheme
    dist.destroy_process_group()


@needs_two_gpus
def test_deterministic_gradients_repeat_bit_for_bit(tmp_path, backward_kernels):
    mp.spawn(_check_repeats, (str(tmp_path / "store"),), WORLD)


def _check_packed(rank: int, store: str) -> None:
    """Packed sequences are what each of them is alone, bit for bit: the same calls."""
    device = _start(rank, store)
    lengths = (512, 1024)
    ends = [0, lengths[0] // WORLD, sum(lengths) // WORLD]
    for scheme in SCHEMES:
        alone = []
        for i, s in enumerate(lengths):
            case = (s, 4, 2, 64, True, (-1, -1), "zigzag")
            tensors = [x[i : i + 1] for x in _inputs(case, device)]
            alone.append((tensors, _compute(scheme, case, rank, tensors, True)))
        parts = [[_part(x, rank, "zigzag")[0] for x in tensors] for tensors, _ in alone]
        q, k, v, dout, dlse = (torch.cat(x) for x in zip(*parts, strict=True))
        for x in (q, k, v):
            x.requires_grad_()
        out, lse = getattr(fd, f"{scheme}_flash_attn_varlen_func")(
            q, k, v, ends, causal=True, deterministic=True, return_lse=True
        )
        gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.T))
        for whole, *each in zip((out, lse.T, *gradients), *(x for _, x in alone), strict=True):
            assert torch.equal(whole, torch.cat([x[0] for x in each])), scheme
    dist.destroy_process_group()


@needs_two_gpus
def test_packed_sequences(tmp_path, backward_kernels):
    mp.spawn(_check_packed, (str(tmp_path / "store"),), WORLD)


def _check_memory(rank: int, store: str) -> None:
    """Both schemes with 32k tokens: the scores of a head alone would be 2 GiB in bf16."""
    device = _start(rank, store)
    case = (32768, 8, 8, 64, True, (-1, -1), "zigzag")
    s, h, _, d = case[:4]
    parts = [torch.randn(1, s // WORLD, h, d, dtype=torch.bfloat16, device=device) for _ in "qkv"]
    one = parts[0].numel() * 4  # bytes of one tensor of a rank in float32
    for scheme in SCHEMES:
        q, k, v = (x.clone().requires_grad_() for x in parts)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(fd, f"{scheme}_flash_attn_func")(q, k, v, causal=True).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 40 * one, f"{scheme}: {peak / one:.1f} float32 tensors of a rank"
    dist.destroy_process_group()


@needs_two_gpus
def test_memory_is_linear(tmp_path, backward_kernels):
    mp.spawn(_check_memory, (str(tmp_path / "store"),), WORLD)


def _check_refusal(rank: int, store: str) -> None:
    device = _start(rank, store)
    x = torch.zeros(1, 64 * (1 + rank), 2, 64, dtype=torch.bfloat16, device=device)
    for scheme in SCHEMES:
        with pytest.raises(ValueError, match="expected the same number of tokens on a rank"):
            getattr(fd, f"{scheme}_flash_attn_func")(x, x, x, causal=True)
    dist.barrier()
    dist.destroy_process_group()


@needs_two_gpus
def test_other_shapes_are_refused(tmp_path):
    mp.spawn(_check_refusal, (str(tmp_path / "store"),), WORLD)


TIMEOUT = 20.0


def lose(rank: int, store: str) -> None:
    """Rank 1 is killed between forward and backward."""
    device = _start(rank, store, TIMEOUT)
    x = torch.randn(1, 512, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = fd.ring_flash_attn_func(x, x, x, causal=True)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.sum().backward()
    torch.cuda.synchronize()


@needs_two_gpus
def test_a_killed_rank_is_named(tmp_path, backward_kernels):
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_cuda_distributed import lose
        lose(int(sys.argv[1]), sys.argv[2])
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        _, said = processes[0].communicate(timeout=10 * TIMEOUT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, None)
    assert "lost rank 1" in said, said
