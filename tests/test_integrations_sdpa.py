"""PyTorch's attention functions on flashcute's kernels.

Tests register the same kernels for CPU tensors, so that they need no GPU: the operators of
PyTorch's FlashAttention backend have no CPU kernel. Calls then run our kernels below PyTorch's
autograd, meta and tracing of these operators.
"""

from __future__ import annotations

import inspect
import math
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental import _attention as context_parallel
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.utils.checkpoint import checkpoint

import flashcute
from flashcute import distributed as fd
from flashcute import flash_attn_varlen_func
from flashcute.distributed.local import backward_on_cpu
from flashcute.distributed.zigzag import Piece
from flashcute.integrations import raw, sdpa

ROOT = pathlib.Path(flashcute.__file__).parents[1]
OPERATORS = [name for name in sdpa._KERNELS if hasattr(torch.ops.aten, name)]
# varlen_attn of torch 2.11 takes grouped heads without the argument enable_gqa.
VARLEN = inspect.signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN else {}
attend = torch.ops.aten._scaled_dot_product_flash_attention
CUDNN, FLASH, MATH = (
    int(x) for x in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
)


def dispatch_tables():
    return [torch._C._dispatch_dump(f"aten::{name}") for name in (*OPERATORS, *sdpa._OTHERS)]


@pytest.fixture
def on_cpu():
    """Registers our kernels for CPU tensors."""
    before = dispatch_tables()
    handle = sdpa._Handle("CPU")
    yield handle
    handle.remove()
    assert dispatch_tables() == before


@pytest.fixture(params=["in Python", "by the binding"])
def both_ways(request, on_cpu):
    """Runs SDPA by the kernels in Python alone, and with the binding's kernels above them.

    The binding's kernels hand tensors that are not on CUDA to those in Python.
    """
    if request.param == "by the binding":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            on_cpu._bypass_python("CPU")
        for name in (sdpa._FORWARD, sdpa._BACKWARD):
            assert "flash_api_sdpa.h" in torch._C._dispatch_dump(f"aten::{name}")
    return on_cpu


class Own:
    """Stand-ins for PyTorch's kernels of CPU tensors, which count their calls."""

    def __init__(self):
        self.calls = []
        self.library = torch.library.Library("aten", "IMPL")
        for name in OPERATORS:
            self.library.impl(name, self.kernel(name), "CPU")

    def kernel(self, name):
        def run(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            if name.endswith("backward"):
                return tuple(torch.full_like(x, 7.0) for x in args[1:4])
            q = args[0]
            rng = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
            lse, mask = q.new_zeros(q.shape[:-1]), q.new_empty(0)
            if name.startswith("_scaled"):
                return torch.full_like(q, 7.0), lse, None, None, 1, 1, *rng, mask
            return torch.full_like(q, 7.0), lse, *rng, mask

        return run


@pytest.fixture
def own():
    found = Own()
    yield found
    found.library._destroy()


def inputs(b=2, h=4, h_k=4, s=16, s_k=None, d=32, requires_grad=True):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, length):
        x = torch.randn((b, heads, length, d), generator=generator)
        return x.requires_grad_(requires_grad)

    return draw(h, s), draw(h_k, s_k or s), draw(h_k, s_k or s)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("h_k", [4, 2, 1])
def test_outputs_and_gradients_are_pytorchs(both_ways, is_causal, h_k):
    qkv = inputs(h_k=h_k)
    out, lse, *_, max_q, max_k, _, _, _ = attend(*qkv, 0.0, is_causal, scale=0.3)
    wide = (qkv[0].double(), *(x.double().repeat_interleave(4 // h_k, 1) for x in qkv[1:]))
    expected = F.scaled_dot_product_attention(*wide, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    scores = wide[0] @ wide[1].mT * 0.3
    if is_causal:
        scores = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert (max_q, max_k) == (16, 16)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, dout)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, qkv, dout.double()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def layouts():
    packed = torch.randn(2, 16, 3, 4, 32)
    yield "contiguous", inputs(requires_grad=False)
    yield "transposed", tuple(x.mT.contiguous().mT for x in inputs(requires_grad=False))
    yield "heads inside", tuple(x.transpose(1, 2) for x in packed.contiguous().unbind(2))
    odd = torch.randn(2, 4, 16, 35)
    yield "odd rows", (odd[..., :32], odd[..., :32], odd[..., :32])
    yield "misaligned", (odd.flatten()[1 : 1 + 2 * 4 * 16 * 32].view(2, 4, 16, 32),) * 3
    yield "expanded", tuple(x.expand(2, 4, 16, 32) for x in torch.randn(3, 1, 1, 16, 32))
    yield "head_dim 20", inputs(d=20, requires_grad=False)


@pytest.mark.parametrize("name, qkv", list(layouts()), ids=lambda x: x if type(x) is str else "")
def test_results_are_laid_out_as_the_meta_kernels_promise(both_ways, name, qkv):
    promised = attend(*(x.to("meta") for x in qkv))
    found = attend(*qkv)
    kinds = [type(x) for x in found]
    assert kinds == [type(x) for x in promised]
    for ours, theirs in zip(found, promised, strict=True):
        if isinstance(ours, torch.Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert found[0].stride() == torch.empty_like(qkv[0]).stride()
    if qkv[0].shape[-1] % 8 == 0:
        args = *found[:2], None, None, 16, 16, 0.0, False, *found[6:8]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(found[0], *qkv, *args)
        for grad, x in zip(grads, qkv, strict=True):
            assert grad.stride() == torch.empty_like(x).stride()


def test_compiled_and_checkpointed_calls_are_the_eager_ones(both_ways):
    qkv = inputs()

    def model(*qkv):
        return attend(*(x * 1.5 for x in qkv), 0.0, True)[0].sin()

    expected = model(*qkv)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, qkv, dout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for variant in (compiled, lambda *x: checkpoint(model, *x, use_reentrant=False)):
        out = variant(*qkv)
        assert torch.equal(out, expected)
        for ours, theirs in zip(torch.autograd.grad(out, qkv, dout), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def ragged(lengths=(5, 0, 11), h=4, h_k=4, d=32):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn((total, heads, d), generator=generator) for heads in (h, h_k, h_k))
    return q, k, v, torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 2)])
@pytest.mark.parametrize("h_k", [4, 2])
def test_varlen_attn_runs_on_ours(on_cpu, window, h_k):
    q, k, v, cu = ragged(h_k=h_k)
    out, lse = varlen_attn(
        q, k, v, cu, cu, 11, 11, window_size=window, scale=0.25, **GROUPED,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    expected, theirs, _ = flashcute.flash_attn_varlen_func(
        q, k, v, cu, cu, 11, 11, softmax_scale=0.25, window_size=window, return_attn_probs=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, theirs)
    last = slice(int(cu[2]), int(cu[3]))
    alone = flashcute.flash_attn_func(
        *(x[None, last] for x in (q, k, v)), softmax_scale=0.25, window_size=window
    )
    torch.testing.assert_close(out[last], alone[0], rtol=1e-5, atol=1e-5)
    if "seqused_k" not in VARLEN:  # torch 2.11
        return
    used = torch.tensor([2, 0, 4], dtype=torch.int32)
    short = varlen_attn(q, k, v, cu, cu, 11, 11, seqused_k=used, **GROUPED)
    assert not torch.equal(short, varlen_attn(q, k, v, cu, cu, 11, 11, **GROUPED))


def test_varlen_attn_compiles(on_cpu):
    q, k, v, cu = ragged()
    compiled = torch.compile(
        lambda *x: varlen_attn(*x, cu, cu, 11, 11) * 2, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), 2 * varlen_attn(q, k, v, cu, cu, 11, 11))


def test_what_we_do_not_compute_falls_through_with_one_warning_a_reason(own):
    q, k, v = inputs()
    handle = sdpa._Handle("CPU")
    try:
        expected = r"PyTorch's own kernel.*no dropout.*dropout_p=0.5; call flashcute"
        with pytest.warns(UserWarning, match=expected):
            out = attend(q, k, v, 0.5)[0]
        assert (out == 7.0).all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend(q, k, v, 0.5)
            assert len(own.calls) == 2
            ours = attend(q, k, v)[0]
        assert len(own.calls) == 2 and not (ours == 7.0).any()
        with pytest.warns(UserWarning, match="return_debug_mask"):
            attend(q, k, v, 0.0, False, True)
        name, args, kwargs = own.calls[-1]
        assert name == "_scaled_dot_product_flash_attention"
        assert torch.equal(args[0], q) and args[3:] == (0.0, False, True) and kwargs == {}
        with pytest.warns(UserWarning, match="softmax_scale=nan"):  # our checks refuse it
            attend(q, k, v, scale=float("nan"))
        assert math.isnan(own.calls[-1][2]["scale"])
    finally:
        handle.remove()


def test_the_backward_of_dropout_is_pytorchs_and_that_of_varlen_is_not(own):
    handle = sdpa._Handle("CPU")
    try:
        q, k, v = inputs()
        with pytest.warns(UserWarning) as said:
            out = attend(q, k, v, 0.5)[0]
            grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert len(said) == 1  # forward and backward warn once
        assert [name for name, *_ in own.calls] == OPERATORS[:2]
        assert all((grad == 7.0).all() for grad in grads)

        q, k, v, cu = ragged()
        out = varlen_attn(q.requires_grad_(), k, v, cu, cu, 11, 11, window_size=(-1, 0))
        out.square().sum().backward()
        assert len(own.calls) == 2 and not (out == 7.0).any()
        leaf = q.detach().clone().requires_grad_()
        expected = flash_attn_varlen_func(leaf, k, v, cu, cu, 11, 11, causal=True)
        expected.square().sum().backward()
        torch.testing.assert_close(q.grad, leaf.grad)
    finally:
        handle.remove()


def test_pages_and_arguments_of_a_later_torch_fall_through(own):
    q, k, v, cu = ragged()
    args = q, k, v, cu, cu, 11, 11, 0.0, False, False
    compute = sdpa._Handle._with_fallback
    calls = []

    class Kernel:
        def call_boxed(self, keyset, *args, **kwargs):
            calls.append(kwargs)
            return "own"

    handle = sdpa._Handle("CPU")
    try:
        kernel = compute(handle, "_flash_attention_forward", sdpa._forward, Kernel())
        for later in ({"block_table": cu}, {"page_order": 1}):
            with pytest.warns(UserWarning, match=next(iter(later))):
                assert kernel(None, *args, **later) == "own"
            assert calls[-1] == later
    finally:
        handle.remove()


def test_without_a_kernel_of_pytorch_the_reason_is_the_error(both_ways):
    # The binding turns every error into a RuntimeError; NotImplementedError is a subclass of it.
    with pytest.raises(RuntimeError, match=r"PyTorch has no kernel.*no dropout"):
        attend(*inputs(), 0.5)


@pytest.mark.parametrize("name", [sdpa._FORWARD, sdpa._BACKWARD])
def test_another_schema_of_a_later_torch_stays_in_python(on_cpu, monkeypatch, name):
    before = dispatch_tables()
    schema = sdpa._SCHEMAS[name].replace("float? scale=None", "float scale")
    monkeypatch.setitem(sdpa._SCHEMAS, name, schema)
    on_cpu._bypass_python("CPU")
    assert dispatch_tables() == before


@pytest.mark.skipif(shutil.which("g++") is None, reason="the binding needs g++")
def test_the_binding_launches_what_python_does_and_hands_it_the_rest() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).parent / "host_sdpa.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "0 are wrong", run.stdout


def test_a_binding_that_cannot_be_built_leaves_the_kernel_in_python(order, monkeypatch):
    def load():
        raise sdpa.jit.BuildError("no compiler")

    late, _ = order
    monkeypatch.setattr(sdpa.ops, "load", load)
    with flashcute.enabled():
        before = dispatch_tables()
        late[0]()
        assert dispatch_tables() == before


def test_enable_and_disable_change_the_cuda_kernels_and_restore_them():
    before = dispatch_tables()
    assert not sdpa.is_enabled()
    flashcute.disable()  # does nothing, as it is not enabled
    flashcute.enable()
    flashcute.enable()
    assert sdpa.is_enabled() and attention.current_flash_attention_impl() == "flashcute"
    during = dispatch_tables()
    changed = [a != b for a, b in zip(before, during, strict=True)]
    assert all(changed[: len(OPERATORS)])
    # Only those other backends change that this torch has. The math backend needs no CUDA.
    keys = {name: f"{functionality}CUDA" for name, (functionality, *_) in sdpa._OTHERS.items()}
    here = [sdpa._own_kernel(name, key) is not None for name, key in keys.items()]
    assert changed[len(OPERATORS) :] == here and here[-1]
    assert all("CUDA: registered at" in table for table in during[: len(OPERATORS)])
    flashcute.disable()
    assert dispatch_tables() == before and not sdpa.is_enabled()


def test_the_context_manager_nests_and_ends_on_errors():
    before = dispatch_tables()
    with flashcute.enabled():
        with flashcute.enabled():
            pass
        assert sdpa.is_enabled()
    assert not sdpa.is_enabled()
    with pytest.raises(KeyError), flashcute.enabled():
        raise KeyError
    flashcute.enable()
    with flashcute.enabled():
        pass
    assert sdpa.is_enabled()  # as it was before the block
    flashcute.disable()
    assert dispatch_tables() == before


def test_blocks_that_overlap_as_of_two_threads_end_with_the_last():
    before = dispatch_tables()
    first, second = flashcute.enabled(), flashcute.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sdpa.is_enabled()
    second.__exit__(None, None, None)
    assert dispatch_tables() == before and not sdpa.is_enabled()


class Other:
    active = 0

    def __init__(self):
        Other.active += 1

    def remove(self):
        Other.active -= 1


@pytest.fixture
def other():
    attention.register_flash_attention_impl("other", register_fn=Other)
    yield
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    assert Other.active == 0
    from torch.nn.attention import _registry

    _registry._FLASH_ATTENTION_IMPLS.pop("other", None)


def test_another_implementation_is_active_again_afterwards(other):
    attention.activate_flash_attention_impl("other")
    with flashcute.enabled():
        assert Other.active == 0
    assert Other.active == 1 and attention.current_flash_attention_impl() == "other"


def test_an_implementation_activated_since_stays(other):
    before = dispatch_tables()
    with flashcute.enabled():
        attention.activate_flash_attention_impl("other")
        assert dispatch_tables() == before
    assert attention.current_flash_attention_impl() == "other"


@pytest.mark.parametrize("name", sdpa._NEEDED)
def test_an_old_torch_is_refused_by_name(monkeypatch, name):
    monkeypatch.delattr(attention, name)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    expected = rf"expected torch 2\.11 or later, got torch 2\.10\.1, which has no {name}"
    with pytest.raises(RuntimeError, match=expected):
        flashcute.enable()
    flashcute.disable()  # there is nothing to undo


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cu132", "3.0.0a0+git1"])
def test_a_torch_that_was_not_tested_is_named(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning) as said:
        flashcute.enable()
        flashcute.enable()
    assert sdpa.is_enabled()
    flashcute.disable()
    assert [f"torch {version} was not tested, the last was 2.15;" in str(x.message) for x in said]
    assert len(said) == 1


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0", "2.14.1", "2.15.0+cpu"])
def test_a_torch_that_was_tested_needs_no_warning(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashcute.enable()
    flashcute.disable()


def test_a_torch_for_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(RuntimeError, match=r"for ROCm 7\.1"):
        flashcute.enable()


@pytest.fixture
def order(monkeypatch):
    """Makes torch prefer cuDNN, as on some GPUs: it sets the order when it first chooses."""
    before = torch._C._get_sdp_priority_order()
    late = []
    preferred = [CUDNN, *(x for x in before if x != CUDNN)]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_call", late.append)
    monkeypatch.setattr(sdpa.torch, "empty", lambda *args, **kwargs: None)
    choose = lambda *qkv: torch._C._set_sdp_priority_order(preferred)  # noqa: E731
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    yield late, preferred
    torch._C._set_sdp_priority_order(before)


def test_flash_attention_comes_before_cudnn_while_enabled(order):
    late, preferred = order
    with flashcute.enabled():
        (when_cuda_starts,) = late
        when_cuda_starts()
        assert "flash_api_sdpa.h" in torch._C._dispatch_dump(f"aten::{sdpa._FORWARD}")
        found = torch._C._get_sdp_priority_order()
        assert found[0] == FLASH and found[1] == CUDNN and sorted(found) == sorted(preferred)
    assert torch._C._get_sdp_priority_order() == preferred


def test_an_order_that_was_set_since_stays(order):
    late, preferred = order
    chosen = [MATH, *(x for x in preferred if x != MATH)]
    with flashcute.enabled():
        late[0]()
        torch._C._set_sdp_priority_order(chosen)
    assert torch._C._get_sdp_priority_order() == chosen
    late[0]()  # CUDA starts after disable()
    assert torch._C._get_sdp_priority_order() == chosen


def by_pieces(dout, q, k, v, out, lse, causal, scale):
    """Replaces ``raw.backward`` for rows that also see keys of other ranks.

    On the CPU the operator would compute the forward again from the keys that it is given.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    whole = Piece(slice(0, q.shape[1]), slice(0, k.shape[1]), causal, (-1, -1))
    found = backward_on_cpu(whole, dout, q, k, v, out, lse, None, scale)
    return [x.to(q.dtype) for x in found]


def context_parallel_calls(rank, world):
    """Returns (method, causal, key heads, forwards, backwards, largest error) of each case."""
    counts = []
    forward = raw.forward
    raw.forward = lambda *args: counts.append("forward") or forward(*args)
    raw.backward = lambda *args: counts.append("backward") or by_pieces(*args)
    handle = sdpa._Handle("CPU")

    def scaled_dot_product_attention(q, k, v, is_causal):
        return attend(q, k, v, 0.0, is_causal)[0]

    # PyTorch's function calls another operator for CPU tensors.
    F.scaled_dot_product_attention = scaled_dot_product_attention
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    found = []
    for method, causal, h_k in (
        ("allgather", True, 4),
        ("alltoall", True, 2),
        ("alltoall", False, 4),
    ):
        qkv = inputs(b=1, h_k=h_k, s=8 * world)
        dout = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1))
        out = attend(*qkv, 0.0, causal)[0]
        expected = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
        buffers = [x.detach().clone() for x in (*qkv, dout, *expected)]
        context_parallel.set_rotate_method(method)
        context_parallel._cp_options.enable_load_balance = causal
        counts.clear()
        with context_parallel.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)
        ):
            *split, dout = (x.clone() for x in buffers[:4])
            if causal:  # PyTorch's order is our zigzag order
                assert torch.equal(split[0], fd.zigzag_split(qkv[0], rank, world, dim=2))
            split = [x.requires_grad_() for x in split]
            out = F.scaled_dot_product_attention(*split, is_causal=causal)
            ours = [out, *torch.autograd.grad(out, split, dout)]
            pairs = zip(ours, buffers[4:], strict=True)
            error = max((x - y).abs().max().item() for x, y in pairs)
        found.append(
            (method, causal, h_k, counts.count("forward"), counts.count("backward"), error)
        )
    handle.remove()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_context_parallel_of_pytorch_runs_on_the_kernels(tmp_path, world):
    for process in ranks.run(context_parallel_calls, world, tmp_path):
        assert not process.error, process.error
        for *case, forwards, backwards, error in process.value:
            assert (forwards, backwards) == (world, world), case
            assert error < 1e-5, case
