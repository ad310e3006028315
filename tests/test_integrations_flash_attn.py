"""Code written for flash_attn runs on flashcute.

Tests use small modules with the usual imports, and packages from PyPI where they are installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import flashcute
from flashcute import flash_attn_varlen
from flashcute.integrations import flash_attn as integration

ROOT = Path(flashcute.__file__).parents[1]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Restores finders and modules after each test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("flash_attn", "third_party"):
            del sys.modules[name]


@pytest.fixture
def provided():
    flashcute.provide_flash_attn()


THIRD_PARTY = """
import flash_attn
import flash_attn.flash_attn_interface as fa
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func

assert tuple(int(x) for x in flash_attn.__version__.split(".")[:2]) >= (2, 6)


def attend_padded(qkv, mask):
    batch, seqlen = mask.shape
    tokens, indices, cu, longest, *_ = unpad_input(qkv, mask)
    return pad_input(flash_attn_varlen_qkvpacked_func(tokens, cu, longest), indices, batch, seqlen)
"""


def test_a_module_of_the_usual_imports_runs(provided, tmp_path):
    (tmp_path / "third_party.py").write_text(THIRD_PARTY)
    sys.path.insert(0, str(tmp_path))
    third_party = importlib.import_module("third_party")
    assert third_party.flash_attn_func is flashcute.flash_attn_func
    assert third_party.fa.flash_attn_kvpacked_func is flashcute.flash_attn_kvpacked_func
    assert third_party.flash_attn_varlen_func is flash_attn_varlen.flash_attn_varlen_func
    qkv = torch.randn(2, 6, 3, 2, 16, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    out = third_party.attend_padded(qkv, mask)
    alone = flashcute.flash_attn_qkvpacked_func(qkv[:1, :4])
    torch.testing.assert_close(out[:1, :4], alone)
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    assert (out[0, 4:] == 0).all() and (gradient[0, 4:] == 0).all() and (gradient[1] != 0).any()


def test_libraries_that_look_for_it_find_it(provided):
    for name in ("flash_attn", "flash-attn", "Flash_Attn"):
        assert importlib.metadata.version(name) == integration.VERSION == "2.8.3"
    assert importlib.metadata.distribution("flash-attn").metadata["Name"] == "flash-attn"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
    assert names.count("flash-attn") == 1 and "torch" in names
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn-3")
    for name in integration._MODULES:
        assert importlib.util.find_spec(name) is not None
    for absent in ("flash_attn.cute", "flash_attn_interface", "flash_attn_2_cuda"):
        assert importlib.util.find_spec(absent) is None
    import flash_attn

    assert importlib.util.find_spec("flash_attn") is flash_attn.__spec__
    assert "flash_attn_func" in dir(flash_attn) and "flash_attn_func" in flash_attn.__all__
    for name in flash_attn.__all__:
        assert getattr(flash_attn, name) is getattr(flashcute, name)


def test_transformers_takes_it_for_flash_attn_2(provided, monkeypatch):
    utils = pytest.importorskip("transformers").utils.import_utils
    # transformers is told that it has a GPU, and has to forget what it found before.
    monkeypatch.setattr(utils, "is_torch_cuda_available", lambda: True)
    caches = utils.is_flash_attn_2_available, utils._package_distribution_mapping
    clear = [getattr(f, "cache_clear", None) or f.__wrapped__.cache_clear for f in caches]
    for forget in clear:
        forget()
    assert utils.is_flash_attn_2_available()
    for forget in clear:
        forget()


def test_names_that_are_not_there_say_so(provided):
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_attn\.modules'"):
        import flash_attn.modules.mha
    import flash_attn

    assert not hasattr(flash_attn, "RotaryEmbedding")
    with pytest.raises(AttributeError, match="which flashcute provides, has no attribute 'x'"):
        flash_attn.x  # noqa: B018


@pytest.mark.parametrize(
    "module, name, home",
    [
        ("flash_attn", "flash_attn_with_kvcache", "flashcute"),
        ("flash_attn.layers.rotary", "apply_rotary_emb", "flashcute.rotary"),
    ],
)
def test_caches_and_rotary_embeddings_are_there(provided, module, name, home):
    found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(home), name)


def test_rotary_embeddings_have_their_older_name_too(provided):
    from flash_attn.layers.rotary import apply_rotary_emb_func

    assert apply_rotary_emb_func is importlib.import_module("flashcute.rotary").apply_rotary_emb


def install(folder, *, package=True, metadata=True):
    """Puts another flash_attn on sys.path."""
    if package:
        (folder / "flash_attn").mkdir()
        (folder / "flash_attn" / "__init__.py").write_text("__version__ = '2.7.0'; other = True")
    if metadata:
        info = folder / "flash_attn-2.7.0.dist-info"
        info.mkdir()
        text = "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.7.0\n"
        (info / "METADATA").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    "package, metadata, where",
    [(True, True, "installed in"), (True, False, "installed in"), (False, True, "of version 2.7")],
)
def test_an_installed_flash_attn_is_refused(tmp_path, package, metadata, where):
    install(tmp_path, package=package, metadata=metadata)
    with pytest.raises(
        RuntimeError, match=rf"expected no flash_attn, got one {where}.*shadow=True"
    ):
        flashcute.provide_flash_attn()
    if package:
        assert importlib.import_module("flash_attn").other
        with pytest.raises(RuntimeError, match=r"got one imported from .*flash_attn.__init__"):
            flashcute.provide_flash_attn()


def test_an_installed_flash_attn_can_be_shadowed(tmp_path):
    install(tmp_path)
    old = importlib.import_module("flash_attn")
    flashcute.provide_flash_attn(shadow=True)
    flashcute.provide_flash_attn()  # a second call does nothing
    assert len([x for x in sys.meta_path if isinstance(x, integration._Finder)]) == 1
    new = importlib.import_module("flash_attn")
    assert new is not old and new.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
    assert new.flash_attn_func is flashcute.flash_attn_func


def test_a_namespace_package_is_refused(tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(RuntimeError, match="expected no flash_attn, got one installed in"):
        flashcute.provide_flash_attn()


def test_raw_functions_are_forward_and_backward_without_autograd(provided):
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward as backward
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward as forward

    q, k, v = (torch.randn(2, 9, 4, 32, requires_grad=True) for _ in range(3))
    window = 3, 0
    out, lse, mask, rng = forward(q, k, v, 0.0, 0.2, True, *window, 0.0, None, False)
    assert not out.requires_grad and mask.numel() == 0 and rng.shape == (2,)
    options = {"softmax_scale": 0.2, "causal": True, "window_size": window}
    expected, its_lse, _ = flashcute.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert torch.equal(out, expected) and torch.equal(lse, its_lse)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    options = 0.0, 0.2, True, *window
    args = dout, q, k, v, out, lse
    backward(*args, *grads, *options, 0.0, None, False, rng_state=rng)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    only_dk = torch.zeros_like(k)
    backward(*args, None, only_dk, None, *options, 0.0, None, False)
    assert torch.equal(only_dk, grads[1])
    with pytest.raises(NotImplementedError, match="expected no dropout"):
        backward(*args, *grads, 0.1, *options, 0.0, None, False)
    with pytest.raises(NotImplementedError, match=r"no dropout.*call flash_attn_func"):
        forward(q, k, v, 0.1, 0.2, True, -1, -1, 0.0, None, False)


@pytest.mark.parametrize("ragged", [False, True])
def test_raw_backward_of_some_keys_takes_whole_rows(provided, ragged):
    """Ring attention calls it for one block of keys after the other, with the output and the
    log-sum-exp of all keys."""
    import flash_attn.flash_attn_interface as fa

    torch.manual_seed(0)
    options = {"softmax_scale": 0.2, "softcap": 1.5, "alibi_slopes": None}
    q, k, v, dout = (torch.randn(1, 16, h, 32) for h in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flashcute.flash_attn_func(*leaves, return_attn_probs=True, **options)
    expected = torch.autograd.grad(out, leaves, dout)
    options |= {"dropout_p": 0.0, "causal": False, "deterministic": False}
    options |= {"window_size_left": -1, "window_size_right": -1}
    backward, rows = fa._flash_attn_backward, [dout, q, out.detach(), lse.detach()]
    if ragged:
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (16, 8))
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        lengths |= {"max_seqlen_q": cu_q.max(), "max_seqlen_k": cu_k.max()}
        backward, rows = fa._flash_attn_varlen_backward, [x[0] for x in rows]
        options |= lengths
        k, v = k[0], v[0]
    dout, q, out, lse = rows
    dq, others = torch.zeros_like(q), []
    for keys in zip(k.split(8, -3), v.split(8, -3), strict=True):
        grads = [torch.empty_like(x) for x in (q, *keys)]
        backward(dout, q, *keys, out, lse, *grads, **options)
        dq += grads[0]
        others.append(grads[1:])
    found = dq, *(torch.cat(parts, -3) for parts in zip(*others, strict=True))
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.view_as(exact), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "pattern"),
    [
        ({"q": "q"}, TypeError, "q to be a torch.Tensor, got q of type str"),
        ({"dout": None}, TypeError, "dout to be a torch.Tensor, got dout of type NoneType"),
        ({"softmax_lse": None}, TypeError, "softmax_lse to be a torch.Tensor, got .*NoneType"),
        ({"k": torch.ones(2, 9, 4, 32).to_sparse()}, TypeError, "k as a tensor of layout"),
        ({"q": torch.ones(9, 4, 32)}, ValueError, "expected q of shape"),
        ({"causal": "no"}, TypeError, "causal to be a bool, got causal='no'"),
        ({"deterministic": None}, TypeError, "deterministic to be a bool, got"),
        ({"window_size_left": 1.5}, TypeError, r"two ints \(left, right\), got .*\(1.5, -1\)"),
        ({"window_size_left": "a"}, TypeError, r"two ints .*got window_size=\('a', -1\)"),
        ({"softcap": None}, TypeError, "softcap to be a float, got softcap=None"),
        ({"dq": torch.ones(1, 1, 1, 1)}, ValueError, r"dq of shape \(2, 9, 4, 32\), got dq.shape="),
        ({"dv": 3}, TypeError, "dv to be a torch.Tensor, got dv of type int"),
    ],
)
def test_raw_backward_names_what_is_wrong(provided, change, error, pattern):
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward
    from flash_attn.flash_attn_interface import _flash_attn_forward as forward

    q = torch.ones(2, 9, 4, 32)
    out, lse, _, _ = forward(q, q, q, 0.0, 0.2, True, -1, -1, 0.0, None, False)
    given = {"dout": out, "q": q, "k": q, "v": q, "out": out, "softmax_lse": lse}
    given |= {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    given |= {"dropout_p": 0.0, "softmax_scale": 0.2, "causal": True, "window_size_left": -1}
    given |= {"window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    with pytest.raises(error, match=f"^(flashcute::bwd|_flash_attn_backward): .*{pattern}"):
        backward(**given | change)


def test_shadow_is_a_bool():
    with pytest.raises(TypeError, match="provide_flash_attn: expected shadow to be a bool, got"):
        flashcute.provide_flash_attn(shadow="no")


def test_raw_functions_of_ragged_batches(provided):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward as backward
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward as forward

    q, k, v = (torch.randn(9, 4, 32) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse, _, _ = forward(q, k, v, cu, cu, 5, 5, 0.0, 0.2, True)
    expected, its_lse, _ = flashcute.flash_attn_varlen_func(
        q, k, v, cu, cu, 5, 5, softmax_scale=0.2, causal=True, return_attn_probs=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, its_lse)
    with pytest.raises(NotImplementedError, match="expected block_table=None"):
        forward(q, k, v, cu, cu, 5, 5, 0.0, 0.2, True, block_table=cu)
    dout, grads = torch.randn_like(out), [torch.zeros_like(x) for x in (q, k, v)]
    slopes = torch.rand(4)
    with torch.no_grad():
        out, lse, _, _ = forward(
            q, k, v, cu, cu, 5, 5, 0.0, 0.2, True, softcap=1.5, alibi_slopes=slopes
        )
    lengths = cu, cu, 5, 5
    backward(
        *(dout, q, k, v, out, lse, *grads, *lengths),
        *(0.0, 0.2, True, -1, -1, 1.5, slopes, False),
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    again = flashcute.flash_attn_varlen_func(
        *leaves, *lengths, softmax_scale=0.2, causal=True, softcap=1.5, alibi_slopes=slopes
    )
    for ours, theirs in zip(grads, torch.autograd.grad(again, leaves, dout), strict=True):
        torch.testing.assert_close(ours, theirs)


def run(script):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    script = "import flashcute; flashcute.provide_flash_attn()\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(name):
    found = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not found, reason=f"the package {name} is not installed")


@installed("transformers")
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "Bert"])
def test_transformers_flash_attention_2_runs(family):
    """Padded and packed batches have the results and gradients of eager attention.

    The test runs on the CPU, which transformers is told is a device of flash_attn.
    """
    run(f"""
        import os

        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers
        from transformers import modeling_flash_attention_utils as flash

        transformers.utils.import_utils.is_torch_cuda_available = lambda: True
        devices = ((lambda: True, "cpu"),)
        flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = devices
        import test_integrations_transformers_families as models

        models.NAME = "flash_attention_2"
        ids = models.tokens(3, 12)
        mask = torch.ones_like(ids)
        mask[0, 7:], mask[2, 2:] = 0, 0
        for padding in (torch.ones_like(ids), mask, mask.flip(1)):
            pair = models.pair("{family}")
            models.assert_same(pair, padding.bool(), input_ids=ids, attention_mask=padding)
        assert flash._flash_varlen_fn is flashcute.flash_attn_varlen_func
        if "{family}" != "Bert":
            positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
            options = dict(position_ids=positions, use_cache=False)
            packed = pair[0](input_ids=ids[:1], **options).last_hidden_state[:, 5:]
            alone = pair[1](input_ids=ids[:1, 5:], use_cache=False).last_hidden_state
            torch.testing.assert_close(packed, alone, rtol=1e-4, atol=2e-5)
    """)


@installed("diffusers")
def test_diffusers_flash_backend_runs():
    run("""
        import torch
        from diffusers.utils.import_utils import is_flash_attn_available, is_flash_attn_version
        from diffusers.models import attention_dispatch as dispatch

        assert is_flash_attn_available() and is_flash_attn_version(">=", "2.6.3")
        assert dispatch._CAN_USE_FLASH_ATTN
        assert dispatch.flash_attn_func is flashcute.flash_attn_func
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 9, 4, 32, requires_grad=True) for _ in range(3))
        backends = "flash", "native"
        outs = [dispatch.dispatch_attention_fn(q, k, v, backend=name) for name in backends]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
        torch.testing.assert_close(*grads)
    """)


@installed("yunchang")
def test_yunchang_kernels_run():
    run("""
        import torch
        from yunchang.globals import HAS_FLASH_ATTN
        from yunchang.kernels import AttnType, select_flash_attn_impl

        assert HAS_FLASH_ATTN
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 9, 4, 32, requires_grad=True) for _ in range(3))
        options = dict(dropout_p=0.0, softmax_scale=0.2, causal=True, window_size=(-1, -1),
                       softcap=0.0, alibi_slopes=None)
        both = select_flash_attn_impl(AttnType.FA, stage="fwd-bwd")
        out = both(q, k, v, **options)
        forward = select_flash_attn_impl(AttnType.FA, stage="fwd-only")
        backward = select_flash_attn_impl(AttnType.FA, stage="bwd-only")
        alone, lse = forward(q, k, v, return_softmax=False, **options)
        torch.testing.assert_close(out, alone)
        dout, grads = torch.randn_like(out), [torch.empty_like(x) for x in (q, k, v)]
        saved = q, k, v, alone, lse
        backward(dout, *saved, *grads, 0.0, 0.2, True, (-1, -1), 0.0, None, False, None)
        torch.testing.assert_close(tuple(grads), torch.autograd.grad(out, (q, k, v), dout))
    """)


@installed("yunchang")
@pytest.mark.parametrize("kind", ["ring", "zigzag_ring", "stripe"])
def test_yunchang_rings_of_two_processes(kind, tmp_path):
    """The tensors are bfloat16: with float32 yunchang adds up gradients in a buffer that it also
    uses for the next ones."""
    run(f"""
        import torch
        import torch.distributed as dist
        from yunchang import ring

        function = ring.{kind}_flash_attn_func
        torch.manual_seed(0)
        tensors = [torch.randn(1, 16, 2, 32) for _ in range(4)]
        q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
        expected = flashcute.flash_attn_func(q, k, v, causal=True)
        expected = expected, *torch.autograd.grad(expected, (q, k, v), tensors[3])

        def part(x, rank):
            if "{kind}" == "stripe":
                return x[:, rank::2]
            blocks = x.chunk(4, 1)
            mine = (rank, 3 - rank) if "{kind}" == "zigzag_ring" else (2 * rank, 2 * rank + 1)
            return torch.cat([blocks[i] for i in mine], 1)

        def work(rank):
            store = "file://{tmp_path}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            *leaves, dout = (part(x, rank).bfloat16().contiguous() for x in tensors)
            leaves = [x.requires_grad_() for x in leaves]
            out = function(*leaves, causal=True)
            found = out, *torch.autograd.grad(out, leaves, dout)
            for x, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(x.float(), part(exact, rank), rtol=3e-2, atol=3e-2)

        torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
    """)
