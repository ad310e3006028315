"""The operator under torch's features: CUDA graphs, streams, devices, tracing, repeats, errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from bad_input import CASES, Case
from torch._subclasses import FakeTensorMode

import flashcute
from flashcute import ops
from flashcute.reference import attention_ref

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _random(*shape: int, seed: int = 0, device: str = "cuda", dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def _qkv(seed: int = 0, device: str = "cuda") -> list[torch.Tensor]:
    shapes = ((2, 200, 4, 64), (2, 333, 2, 64), (2, 333, 2, 64))
    return [_random(*shape, seed=3 * seed + i, device=device) for i, shape in enumerate(shapes)]


def _attend(q, k, v, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return flashcute.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[:2]


def _assert_equal(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e)


def test_graph_replays_with_changed_inputs() -> None:
    static = _qkv()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend(*static)
    for seed in (1, 2, 3):
        fresh = _qkv(seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        for output in captured:
            output.fill_(torch.nan)
        graph.replay()
        _assert_equal(captured, _attend(*fresh))


FIRST_CALL = """
import torch
import flashcute

q, k, v = torch.randn(3, 2, 300, 40, 64, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.no_grad():
    with torch.cuda.graph(graph):
        captured = flashcute.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]
    for output in captured:
        output.fill_(torch.nan)
    graph.replay()
    expected = flashcute.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]
print([torch.equal(*pair) for pair in zip(captured, expected)])
"""


def test_first_call_of_a_process_may_be_captured(request: pytest.FixtureRequest) -> None:
    # The call loads the kernel and, as it has more tiles than SMs, asks for its counters' address.
    # Drivers load modules while a stream is captured since CUDA 12.3
    # (https://nvidia.github.io/warp/api_reference/_generated/warp.capture_begin.html).
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "[True, True]\n", done.stderr


@pytest.mark.parametrize("causal", [False, True])
def test_calls_that_feed_each_other_keep_their_order(causal: bool) -> None:
    """On Hopper a kernel starts before the preceding one has ended. It must neither read that
    kernel's output too early nor overwrite its inputs, whose memory the allocator hands out
    again."""

    def chain(pause, q, k, v):
        for i in range(30):
            q, _ = _attend(q, k, v, causal)
            pause()
            if i % 5 == 4:  # somebody else's kernel in between
                k = k + q[:, :, :2]
                pause()
        return q, k

    inputs = [_random(4, 700, h, 64, seed=h) for h in (8, 2, 2)]
    expected = chain(torch.cuda.synchronize, *inputs)
    _assert_equal(chain(lambda: None, *inputs), expected)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        q, k, v = (x + 0 for x in inputs)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            v = v * 1
        torch.cuda.current_stream().wait_stream(side)  # the first kernel has two in front of it
        captured = chain(lambda: None, q, k, v)
    for _ in range(3):
        for tensor in captured:
            tensor.fill_(torch.nan)
        graph.replay()
        _assert_equal(captured, expected)


def test_runs_on_the_current_stream() -> None:
    fresh = _qkv()
    expected = _attend(*fresh)
    late = [torch.full_like(t, torch.nan) for t in fresh]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _attend(*fresh)  # leaves this stream memory to reuse: cudaMalloc would wait for the GPU
        torch.cuda._sleep(100_000_000)
        for old, new in zip(late, fresh, strict=True):
            old.copy_(new)
        # On any other stream this would read NaN.
        got = _attend(*late)
    assert not side.query(), "the call waited for the GPU"
    side.synchronize()
    _assert_equal(got, expected)


def test_no_synchronisation() -> None:
    args = _qkv()
    _attend(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _attend(*args)
        off_grid = torch.cat((args[0], args[0][..., :4]), -1)[..., :64]
        _attend(off_grid, *args[1:])  # copied
        flashcute.flash_attn_qkvpacked_func(torch.stack(args[1:] + args[1:2], 2), causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@two_gpus
def test_second_device() -> None:
    expected = _attend(*_qkv())
    args = [t.to("cuda:1") for t in _qkv()]
    assert torch.cuda.current_device() == 0
    got = _attend(*args)
    assert torch.cuda.current_device() == 0
    assert all(g.device == torch.device("cuda:1") for g in got)
    _assert_equal([g.to("cuda:0") for g in got], expected)
    with torch.cuda.device(1):
        _assert_equal(_attend(*_qkv(device="cuda:0")), expected)
        assert torch.cuda.current_device() == 1
    with pytest.raises(ValueError, match=r"k on cuda:0 as q, got k.device=cuda:1"):
        flashcute.flash_attn_func(_qkv()[0], *args[1:])
    with pytest.raises(RuntimeError, match=r"expected v on cuda:1 as q"):
        ops.fwd(*args[:2], _qkv()[2], 1.0, False)


def test_in_any_layout_the_result_is_the_same() -> None:
    q, k, v = _qkv()
    expected = _attend(q, k, v)
    for permutation in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)):
        inverse = [permutation.index(i) for i in range(4)]
        args = [t.permute(permutation).contiguous().permute(inverse) for t in (q, k, v)]
        out, lse = _attend(*args)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        assert out.stride() == torch.empty_like(args[0]).stride()
        assert lse.is_contiguous()


def test_packed_functions() -> None:
    k, v = _qkv()[1:]
    q = _random(2, 200, 4, 64)
    expected = _attend(q, k, v)
    with torch.no_grad():
        kv = torch.stack((k, v), 2)
        got = flashcute.flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
        _assert_equal(got[:2], expected)
        expected = _attend(v, k, v)
        qkv = torch.stack((v, k, v), 2)
        got = flashcute.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
        _assert_equal(got[:2], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool) -> None:
    q, k, v = _qkv()
    for args in (
        (q, k, v),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        tuple(t.half() for t in torch.stack((k, k, v), 2).unbind(2)),
        (q[:, :0], k, v),
        (q, k[:, :0], v[:, :0]),
        (q[:1].expand(2, -1, -1, -1), k, v),
    ):
        results = torch.library.opcheck(ops.load(), (*args, 0.125, causal))
        assert set(results.values()) == {"SUCCESS"} and len(results) >= 4


def test_fake_promises_what_the_kernel_returns() -> None:
    q, k, v = _qkv()
    for args in (
        (q, k, v),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        (q[..., :32], k[..., :32], v[..., :32]),
        (q[:, :1], k, v),
        (q[:1].expand(2, -1, -1, -1), k, v),
        (q[:, :0], k, v),
        (q[:0], k[:0], v[:0]),
    ):
        real = ops.fwd(*args, 0.125, True)
        with FakeTensorMode() as mode:
            fake = ops.fwd(*(mode.from_tensor(t) for t in args), 0.125, True)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device)
            # torch itself gives strides that are never used differently to fake tensors.
            used = [dim for dim in range(r.dim()) if r.shape[dim] > 1 and r.numel() > 0]
            assert [r.stride(dim) for dim in used] == [f.stride(dim) for dim in used]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    def block(q, k, v):
        out, lse, _ = flashcute.flash_attn_func(q * 2, k, v, causal=True, return_attn_probs=True)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seed, seqlen in ((0, 200), (1, 333)):
            q, k, v = _qkv(seed)
            q = _random(2, seqlen, 4, 64, seed=seed)
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                got = compiled(q, k, v)
            for g, e in zip(got, block(q, k, v), strict=True):
                torch.testing.assert_close(g, e)
                assert g.stride() == e.stride()


def test_export_round_trip(tmp_path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flashcute.flash_attn_func(q, k, v, causal=True)

    q, k, v = _qkv()
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {"q": {1: seqlen}, "k": None, "v": None}
    with torch.no_grad():
        program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / "attention.pt2")
        loaded = torch.export.load(tmp_path / "attention.pt2").module()
        q = _random(2, 77, 4, 64)
        assert torch.equal(loaded(q, k, v), _attend(q, k, v)[0])


def test_autocast_and_inference_mode_change_nothing() -> None:
    args = _qkv()
    expected = _attend(*args)
    with torch.autocast("cuda", torch.float16), torch.inference_mode():
        _assert_equal(_attend(*args), expected)


def test_nan_in_a_key_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = (t[:1, :129].clone() for t in _qkv())
    k[0, 100, 0, 3] = torch.nan
    out, lse = _attend(q, k, v)
    expected = attention_ref(q, k, v, causal=True, upcast=torch.float32)
    # NaN reaches the rows from 100 on, in the query heads 0 and 1 that share the key head.
    poisoned = torch.zeros_like(out, dtype=torch.bool)
    poisoned[:, 100:, :2] = True
    assert torch.equal(out.isnan(), poisoned)
    assert torch.equal(lse.isnan(), poisoned[..., 0].transpose(1, 2))
    difference = out[~poisoned].float() - expected.out[~poisoned]
    assert difference.abs().max() < 2e-2


RIGHT = [case for case in CASES if "cuda" in case.on and case.error is None]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_odd_input_that_is_right(case: Case) -> None:  # what is not: test_cuda_checks.py
    failure = case.failure("cuda")
    assert failure is None, failure
    # The context survived.
    torch.cuda.synchronize()


RAW = {
    "rank": (lambda q, k, v: (q[0], k, v), r"expected q of rank 4, got rank 3"),
    "rank_0": (lambda q, k, v: (q, k, v.sum()), r"expected v of rank 4, got rank 0"),
    "fp32": (lambda q, k, v: (q.float(), k, v), r"expected q of dtype float16 or bfloat16"),
    "k_dtype": (lambda q, k, v: (q, k.half(), v), r"expected k of the dtype of q"),
    "v_dtype": (lambda q, k, v: (q, k, v.float()), r"expected v of the dtype of q"),
    "k_cpu": (lambda q, k, v: (q, k.cpu(), v), r"expected k on cuda:0 as q"),
    "v_cpu": (lambda q, k, v: (q, k, v.cpu()), r"expected v on cuda:0 as q"),
    "batch": (lambda q, k, v: (q[:1], k, v), r"expected k of q's batch size 1 .*got 2"),
    "k_dim": (lambda q, k, v: (q, k[..., :32], v), r"head dimension 64, got 2 and 32"),
    "v_dim": (lambda q, k, v: (q, k, v[..., :32]), r"expected v of the shape of k"),
    "v_len": (lambda q, k, v: (q, k, v[:, :9]), r"expected v of the shape of k"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), r"divisible .*got 3 and 2"),
    "no_heads": (lambda q, k, v: (q[:, :, :0], k, v), r"divisible .*got 0 and 2"),
    "no_k_heads": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), r"divisible .*got 4 and 0"),
    "d_0": (lambda *t: tuple(x[..., :0] for x in t), r"head dimension in 8.*got 0"),
    "d_20": (lambda *t: tuple(x[..., :20] for x in t), r"head dimension in 8.*got 20"),
    "d_320": (lambda *t: tuple(x.repeat(1, 1, 1, 5) for x in t), r"head dimension in 8.*got 320"),
    "last_stride": (lambda q, k, v: (q, k.mT.contiguous().mT, v), r"k\.stride\(-1\) == 1, got 2"),
    "grid": (
        lambda q, k, v: (q, k, torch.cat((v, v), -1)[..., :68].contiguous()[..., :64]),
        r"strides of v that are multiples of 8 elements, got \(45288, 136, 68, 1\)",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_bad_input_to_the_operator_itself(name: str) -> None:
    change, message = RAW[name]
    args = change(*_qkv())
    with pytest.raises(RuntimeError, match=rf"flashcute::fwd: .*{message}"):
        ops.fwd(*args, 0.125, True)
    torch.cuda.synchronize()


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers with the same strides, starting one element into a storage."""
    storage = tensor.new_zeros(tensor.numel() + 1)
    return storage[1:].view_as(tensor).copy_(tensor)


@pytest.mark.parametrize("which", range(1, 8))
@pytest.mark.parametrize("compiled", [False, True])
def test_misaligned_starts(which: int, compiled: bool) -> None:
    # A traced program can see a misaligned start only when it runs; it is traced with aligned
    # tensors here.
    q, k, v = _qkv()
    expected = _attend(q, k, v)
    attend = torch.compile(_attend, backend="aot_eager", fullgraph=True) if compiled else _attend
    _assert_equal(attend(q, k, v), expected)
    shifted = [_shifted(t) if which >> i & 1 else t for i, t in enumerate((q, k, v))]
    _assert_equal(attend(*shifted), expected)
    _assert_equal(ops.fwd(*shifted, 0.125, True), expected)
    # With rows that are further apart, the copy closes the gaps.
    gaps = [torch.cat((t, t), -1)[..., :64] for t in shifted]
    offset = [torch.cat((t, t), -1)[..., 1:65].copy_(t) for t in (q, k, v)]
    _assert_equal(attend(*gaps), expected)
    _assert_equal(ops.fwd(*offset, 0.125, True), expected)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -1.0, 1e-40, 1e39])
def test_bad_scale_to_the_operator_itself(scale: float) -> None:
    with pytest.raises(RuntimeError, match=r"expected a finite softmax_scale > 0"):
        ops.fwd(*_qkv(), scale, True)
