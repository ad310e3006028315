"""Plans of transformers' masks against the dense masks, and masks that other code uses."""

from __future__ import annotations

import copy
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from flashcute.integrations import transformers as integration
from flashcute.integrations.transformers_masks import KernelMask, Pattern, mask_of_bounds, recognise
from flashcute.reference import attention_ref

CAUSAL = masking_utils.causal_mask_function
FULL = masking_utils.bidirectional_mask_function
FUNCTIONS = {
    "causal": CAUSAL,
    "full": FULL,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "wide window": masking_utils.sliding_window_causal_mask_function(100),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "one chunk": masking_utils.chunked_causal_mask_function(9, torch.zeros(2, dtype=torch.long)),
    "chunks": masking_utils.chunked_causal_mask_function(8, torch.tensor([4, 0])),
}
PADDING = {
    "none": None,
    "no padding": [[1] * 9, [1] * 9],
    "right": [[1] * 4 + [0] * 5, [1] * 9],
    "left": [[0] * 4 + [1] * 5, [1] * 9],
    "both sides": [[0] * 2 + [1] * 4 + [0] * 3, [0] * 8 + [1]],
    "holes": [[1, 1, 0, 1, 1, 0, 0, 1, 1], [1] * 9],
    "a row of nothing": [[0] * 9, [1] * 9],
}


@pytest.mark.parametrize(
    "sizes", [(9, 9, 0), (3, 9, 6), (1, 9, 8), (2, 9, 3), (9, 9, 2), (4, 9, 0)]
)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernels_do_what_the_dense_mask_says(name, padding, sizes):
    q_length, kv_length, offset = sizes
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool()
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": offset,
        "mask_function": FUNCTIONS[name], "attention_mask": mask,
        "allow_is_bidirectional_skip": True,
    }  # fmt: skip
    dense = masking_utils.sdpa_mask(
        **arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    found = integration.attention_mask(**arguments)
    is_causal = name not in ("full", "both sides")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, n, 8, generator=generator) for n in (q_length, kv_length, kv_length)
    )
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, found, is_causal=is_causal)
    bias = torch.where(dense, 0.0, -torch.inf)
    expected = attention_ref(*(x.transpose(1, 2) for x in (q, k, v)), attn_bias=bias).out
    rows = dense.any(-1)[:, 0]  # others hold anything, as do queries that are padding
    if mask is not None and name != "full" and offset + q_length <= kv_length:
        rows &= mask[:, offset : offset + q_length]
    torch.testing.assert_close(out[rows], expected[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "padding", "sizes"),
    [
        ("causal", "holes", (9, 9, 0)),
        ("causal", "left", (1, 9, 8)),
        ("causal", "none", (2, 9, 3)),
        ("full", "right", (4, 9, 0)),
        ("window", "none", (9, 9, 0)),
        ("window", "right", (9, 9, 0)),
        ("both sides", "left", (9, 9, 0)),
        ("one chunk", "none", (2, 9, 3)),
        ("one chunk", "no padding", (2, 9, 3)),
    ],
)
def test_these_need_no_dense_mask(monkeypatch, name, padding, sizes):
    monkeypatch.delattr(integration, "sdpa_mask")
    q_length, kv_length, offset = sizes
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool()
    found = integration.attention_mask(
        2, q_length, kv_length, offset, mask_function=FUNCTIONS[name], attention_mask=mask
    )
    assert type(found) is KernelMask and found.shape == (2, 1, q_length, kv_length)
    with torch._C.DisableTorchFunctionSubclass():
        assert found.untyped_storage().nbytes() == 1


@pytest.mark.parametrize("padding", ["right", "a row of nothing", "left", "both sides", "holes"])
@pytest.mark.parametrize(("name", "sizes"), [("full", (9, 9, 0)), ("causal", (9, 9, 0)),
                                             ("window", (4, 9, 2))])  # fmt: skip
def test_nothing_is_moved_where_no_padding_is_between_the_tokens(monkeypatch, name, padding, sizes):
    moved = []
    monkeypatch.setattr(
        integration,
        "index_first_axis",
        lambda x, rows: moved.append(rows) or x.index_select(0, rows),
    )
    q_length, kv_length, offset = sizes
    mask = integration.attention_mask(
        2, q_length, kv_length, offset, mask_function=FUNCTIONS[name],
        attention_mask=torch.tensor(PADDING[padding]).bool(),
    )  # fmt: skip
    q, k, v = (torch.randn(2, 2, n, 8) for n in (q_length, kv_length, kv_length))
    integration.attention_forward(torch.nn.Module(), q, k, v, mask)
    assert bool(moved) == (padding == "holes" and name != "window")


@pytest.mark.parametrize("sizes", [(9, 9, 0), (4, 9, 2)])
@pytest.mark.parametrize("padding", ["right", "left", "both sides", "holes", "a row of nothing"])
@pytest.mark.parametrize("name", ["causal", "full", "both sides"])
def test_gradients_of_padded_rows(name, padding, sizes):
    q_length, kv_length, offset = sizes
    if name == "both sides" and q_length < kv_length:
        offset = kv_length - q_length
    kept = torch.tensor(PADDING[padding]).bool()
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": offset,
        "mask_function": FUNCTIONS[name], "attention_mask": kept, "allow_is_causal_skip": False,
    }  # fmt: skip
    mask, dense = integration.attention_mask(**arguments), masking_utils.sdpa_mask(**arguments)
    rows = dense.any(-1)[:, 0]  # others hold anything, as do queries that are padding
    if name != "full":
        rows &= kept[:, offset : offset + q_length]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, n, 8, generator=generator, requires_grad=True)
        for n in (q_length, kv_length, kv_length)
    )
    gradient = torch.randn(2, q_length, 2, 8, generator=generator) * rows[:, :, None, None]
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask)
    bias = torch.where(dense, 0.0, -torch.inf)
    expected = attention_ref(*(x.transpose(1, 2) for x in (q, k, v)), attn_bias=bias).out
    found, right = (
        torch.autograd.grad(x, (q, k, v), gradient, materialize_grads=True) for x in (out, expected)
    )
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y.nan_to_num(), rtol=1e-5, atol=1e-5)


class Dispatched(TorchDispatchMode):
    """Records the names of torch's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("sizes", [(9, 9, 0), (1, 9, 8)])
@pytest.mark.parametrize("padding", ["right", "left", "both sides", "holes"])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_a_padding_mask_is_read_once_and_no_kernel_looks_at_it(monkeypatch, name, padding, sizes):
    reads, numpy = [], torch.Tensor.numpy
    monkeypatch.setattr(
        torch.Tensor, "numpy", lambda x, **options: reads.append(x) or numpy(x, **options)
    )
    q_length, kv_length, offset = sizes
    kept = torch.tensor(PADDING[padding]).bool()
    with Dispatched() as ran:
        mask = integration.attention_mask(
            2, q_length, kv_length, offset, mask_function=FUNCTIONS[name], attention_mask=kept
        )
    assert type(mask) is KernelMask and len(reads) == 1
    # Only views run, and the allocation of the returned mask's single byte.
    views = {"detach", "expand", "alias", "unbind", "slice", "lift_fresh"}
    assert set(ran.names) <= views | {"empty"} and len(ran.names) <= 10


def test_numbers_of_packed_sequences_are_read_once():
    packed = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]])
    of_sequences = masking_utils.packed_sequence_mask_function(packed)
    function = masking_utils.and_masks(CAUSAL, of_sequences)
    with Dispatched() as ran:
        mask = integration.attention_mask(2, 5, 5, mask_function=function)
    assert set(ran.names) <= {"detach", "empty", "expand", "alias", "lift_fresh"}
    ends_q, ends_k, *longest = mask.plan.lengths
    assert ends_q.tolist() == ends_k.tolist() == [0, 3, 5, 6, 7, 10] and longest == [3, 3]
    assert ends_q.dtype == torch.int32


@pytest.mark.parametrize("padding", ["right", "left"])
def test_a_layer_neither_asks_the_mask_nor_runs_more_than_views(monkeypatch, padding):
    mask = kernel_mask(padding)

    def asked(function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} of the mask")

    monkeypatch.setattr(KernelMask, "__torch_function__", asked)
    monkeypatch.setattr(integration, "flash_attn_varlen_func", lambda q, *args, **options: q)
    q = torch.randn(2, 9, 2, 8).transpose(1, 2)
    with Dispatched() as ran:
        out, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask)
    assert torch.equal(out, q.transpose(1, 2))
    assert sorted(ran.names) == ["transpose"] * 3 + ["view"] * 4


def test_windows_over_holes_and_unknown_functions_are_dense():
    holes = torch.tensor(PADDING["holes"]).bool()
    function = FUNCTIONS["window"]
    mask = integration.attention_mask(2, 9, 9, mask_function=function, attention_mask=holes)
    assert type(mask) is torch.Tensor
    either = masking_utils.or_masks(CAUSAL, FULL)
    for function in (either, lambda b, h, q, k: k <= q):
        assert recognise(function) is None
        assert type(integration.attention_mask(2, 9, 9, mask_function=function)) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "sizes", "kv_offset", "padding", "expected"),
    [
        ("one chunk", (9, 9, 0), 0, "none", type(None)),
        ("one chunk", (9, 9, 0), 0, "no padding", type(None)),
        ("one chunk", (4, 9, 0), 0, "no padding", KernelMask),
        ("one chunk", (9, 9, 0), 0, "left", torch.Tensor),
        ("one chunk", (4, 9, 0), 0, "right", KernelMask),
        ("one chunk", (5, 9, 0), 0, "right", torch.Tensor),
        ("chunks", (9, 9, 0), 0, "none", torch.Tensor),
        ("one chunk", (7, 7, 2), 2, "none", type(None)),
        ("chunks", (7, 7, 2), 2, "none", torch.Tensor),
    ],
)
def test_keys_of_one_chunk_are_causal(name, sizes, kv_offset, padding, expected):
    q_length, kv_length, offset = sizes
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool()
    found = integration.attention_mask(
        2, q_length, kv_length, offset, kv_offset, FUNCTIONS[name], mask
    )
    assert type(found) is expected


def test_patterns_are_read_from_transformers_functions():
    packed = torch.tensor([[0, 0, 1]])
    positions = torch.tensor([[0, 1, 0]])
    of_sequences = masking_utils.packed_sequence_mask_function(packed)
    function = masking_utils.and_masks(FUNCTIONS["window"], of_sequences)
    assert recognise(function) == Pattern(causal=True, window=(2, -1), packed=packed)
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):  # of transformers 5.17
        return
    function = masking_utils.packed_sequence_compatibility_function(
        FUNCTIONS["window"], positions, packed
    )
    assert recognise(function) == Pattern(causal=True, window=(2, -1), packed=packed)
    assert recognise(FUNCTIONS["both sides"]) == Pattern(window=(2, 2))
    # Chunks depend on positions, and positions of packed sequences may start at any number.
    function = masking_utils.packed_sequence_compatibility_function(
        FUNCTIONS["one chunk"], positions, packed
    )
    assert recognise(function) is None
    for name in ("window", "one chunk"):
        twice = masking_utils.and_masks(FUNCTIONS[name], FUNCTIONS[name])
        assert recognise(twice) is None


def kernel_mask(padding="right"):
    mask = torch.tensor(PADDING[padding]).bool()
    return integration.attention_mask(2, 9, 9, attention_mask=mask)


def test_a_mask_that_is_touched_is_the_dense_one():
    mask = kernel_mask()
    dense = mask.dense()
    assert type(dense) is torch.Tensor and dense.dtype == mask.dtype == torch.bool
    assert (mask.ndim, mask.size(-1), mask.device) == (4, 9, dense.device)
    for touch in (
        lambda m: m[:, :, :4, :5],
        lambda m: torch.cat([m, m], -1),
        lambda m: ~m,
        lambda m: m.to(torch.float32),
        lambda m: torch.where(m, 0.0, 1.0),
        lambda m: m.expand(2, 3, 9, 9),
        lambda m: m.clone(),
        copy.deepcopy,
    ):
        found = touch(mask)
        assert type(found) is torch.Tensor and torch.equal(found, touch(dense))
    assert mask.sum().item() == dense.sum().item()


def test_a_compiled_layer_takes_the_masks_of_an_eager_model():
    torch._dynamo.reset()
    q = torch.randn(2, 2, 9, 8)
    layer = torch.nn.Module()

    def attend(q, mask):
        return integration.attention_forward(layer, q, q, q, mask)[0] * 2

    compiled = torch.compile(attend, backend="eager")
    for padding in ("right", "left", "holes", "no padding"):
        mask = torch.tensor(PADDING[padding]).bool()
        for function in (CAUSAL, FULL):
            found = integration.attention_mask(2, 9, 9, mask_function=function, attention_mask=mask)
            torch.testing.assert_close(compiled(q, found), attend(q, found))


def token_after_a_static_cache(name, padding, offset):
    """Returns the arguments of attention_mask for one token and a static cache of 9 keys."""
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool()
    return {
        "batch_size": 2, "q_length": 1, "kv_length": 9, "q_offset": torch.tensor(offset),
        "mask_function": FUNCTIONS[name], "attention_mask": mask, "allow_is_causal_skip": False,
    }  # fmt: skip


@pytest.mark.parametrize("offset", [0, 3, 5, 8])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", ["causal", "window", "wide window"])
def test_a_token_after_a_static_cache_has_its_first_and_last_key(name, padding, offset):
    given = token_after_a_static_cache(name, padding, offset)
    dense = masking_utils.sdpa_mask(**given)
    found = integration.attention_mask(**given)
    visible = dense[:, 0, 0].int()  # (batch, keys)
    holes = ((visible.diff(dim=1) == 1).sum(1) + visible[:, 0]).max() > 1
    assert type(found) is torch.Tensor  # generate() compiles its user
    if holes:
        assert torch.equal(found, dense)
        return
    assert (found.shape, found.dtype) == ((2, 1, 1, 2), torch.int32)
    assert torch.equal(mask_of_bounds(found, 9), dense)
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((4, 1), (2, 9), (2, 9)))
    k[:, :, offset + 1 :] = v[:, :, offset + 1 :] = torch.nan  # the end that is still empty
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, found)
    expected, _ = integration.attention_forward(
        torch.nn.Module(), q, k.nan_to_num(), v.nan_to_num(), dense
    )
    rows = dense.any(-1)[:, 0, 0]
    torch.testing.assert_close(out[rows], expected[rows], rtol=1e-5, atol=1e-5)
    assert (out[~rows] == 0).all()


@pytest.mark.parametrize("padding", ["none", "no padding", "left", "right"])
@pytest.mark.parametrize("name", ["one chunk", "chunks"])
def test_a_token_after_a_static_cache_of_one_chunk(name, padding):
    given = token_after_a_static_cache(name, padding, 5)
    dense = masking_utils.sdpa_mask(**given)
    found = integration.attention_mask(**given)
    if name == "chunks" or padding in ("left", "right"):
        assert torch.equal(found, dense)
    else:
        assert found.tolist() == [[[[0, 6]]]] * 2 and torch.equal(mask_of_bounds(found, 9), dense)


def test_what_the_kernels_of_a_cache_do_not_compute_has_a_dense_mask(monkeypatch):
    found = integration.attention_mask(**token_after_a_static_cache("causal", "left", 5))
    dense = mask_of_bounds(found, 9)
    q, k, v = (torch.randn(2, 2, n, 8) for n in (1, 9, 9))
    monkeypatch.delattr(integration, "flash_attn_with_kvcache")
    bias = torch.randn(1, 2, 1, 9)
    for given in ({"position_bias": bias}, {"dropout": 0.5}):
        outs = []
        for mask in (found, dense):
            torch.manual_seed(0)
            outs += [integration.attention_forward(torch.nn.Module(), q, k, v, mask, **given)[0]]
        assert torch.equal(*outs)
    q.requires_grad_()
    grads = []
    for mask in (found, dense):
        out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask)
        grads += torch.autograd.grad(out.sum(), q)
    assert torch.equal(*grads)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_fallback_takes_first_and_last_keys_too(monkeypatch, softcap):
    found = integration.attention_mask(**token_after_a_static_cache("window", "left", 5))
    q, k, v = (torch.randn(2, 2, n, 8) for n in (1, 9, 9))
    expected, _ = integration.attention_forward(torch.nn.Module(), q, k, v, found, softcap=softcap)

    def refuses(*args, **kwargs):
        raise NotImplementedError("expected something else, got this")

    monkeypatch.setattr(integration, "flash_attn_with_kvcache", refuses)
    with pytest.warns(UserWarning, match="PyTorch computes"):
        out, _ = integration._Fallback()(torch.nn.Module(), q, k, v, found, softcap=softcap)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_that_a_model_joins_with_others_is_dense():
    # The model asks for a mask in any case, here for a token after a cache that grows.
    mask = integration.attention_mask(2, 1, 9, 8, allow_is_causal_skip=False)
    assert mask.dtype == torch.bool and mask.shape == (2, 1, 1, 9) and mask.all()


def test_a_mask_for_other_keys_is_not_the_kernels():
    q, k = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 10, 8)
    with pytest.raises((RuntimeError, ValueError)):
        integration.attention_forward(torch.nn.Module(), q, k, k, kernel_mask())


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_a_mask_may_be_moved_to_another_device(padding):
    kept = torch.tensor(PADDING[padding]).bool()
    mask = integration.attention_mask(2, 9, 9, attention_mask=kept)
    for same in (mask.to(mask.device, non_blocking=True), mask.to("cpu"), mask.cpu()):
        assert same is mask
    moved = mask.to("meta", torch.bool, non_blocking=True)
    assert type(moved) is KernelMask and moved.shape == mask.shape and moved.is_meta
    assert mask.contiguous() is mask  # generate() calls this with a static cache
    before, after = (
        [*x.plan.lengths[:2], *x.plan.used, x.plan.query_rows, x.plan.key_rows]
        for x in (mask, moved)
    )
    for old, new in zip(before, after, strict=True):
        assert (old is None) == (new is None)
        assert new is None or (new.is_meta and new.shape == old.shape and new.dtype == old.dtype)
    assert moved.plan.lengths[2:] == mask.plan.lengths[2:] and moved.plan.keys == mask.plan.keys
    assert moved.dense().is_meta and moved.dense().shape == mask.shape
    assert type(mask.to(torch.float32)) is torch.Tensor
    assert torch.equal(mask.to("cpu", torch.float32), mask.dense().float())


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.ones(2)}])
@pytest.mark.parametrize("sliding_window", [None, 3])
def test_the_fallback_is_pytorchs_with_one_warning(monkeypatch, options, sliding_window):
    def refuses(*args, **kwargs):
        raise NotImplementedError("not here")

    q, k, v = (torch.randn(2, h, 9, 8) for h in (4, 2, 2))
    if options.get("s_aux") is not None:
        options = {"s_aux": torch.ones(4)}
    function = FUNCTIONS["window" if sliding_window else "causal"]
    mask = integration.attention_mask(
        2, 9, 9, mask_function=function, attention_mask=torch.tensor(PADDING["right"]).bool()
    )
    arguments = torch.nn.Module(), q, k, v
    rows = torch.tensor(PADDING["right"]).bool()
    for given, compared in ((mask, rows), (None, slice(None))):
        calls = options | {"is_causal": True, "sliding_window": sliding_window}
        expected, _ = integration.attention_forward(*arguments, given, **calls)
        fallback = integration._Fallback()
        with pytest.MonkeyPatch.context() as context:
            context.setattr(integration, "_by_kernels", refuses)
            with pytest.raises(NotImplementedError, match="not here"):
                integration.attention_forward(*arguments, given, **calls)
            with pytest.warns(UserWarning, match="PyTorch computes .*: not here") as said:
                out, weights = fallback(*arguments, given, **calls)
                fallback(*arguments, given, **calls)
        assert len(said) == 1 and weights is None
        torch.testing.assert_close(out[compared], expected[compared], rtol=1e-5, atol=1e-5)


def test_the_fallback_says_each_reason_once_whatever_the_lengths():
    fallback = integration._Fallback()
    q = torch.empty(1, 2, 1, 8, device="meta", dtype=torch.float16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in range(5, 15):
            k = torch.empty(1, 2, length, 8, device="meta", dtype=torch.float16)
            mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device="meta")
            fallback(torch.nn.Module(), q, k, k, mask)
        assert len(said) == 1
        fallback(torch.nn.Module(), q, k, k, None, position_bias=mask.half())
    assert len(said) == 2 and "position_bias" in str(said[1].message)


def test_the_fallback_does_not_hide_what_has_no_mask():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        integration._Fallback()(torch.nn.Module(), q, q, q, None, output_attentions=True)


def test_register_says_which_choices_there_are():
    with pytest.raises(ValueError, match='expected unsupported="error" or "fallback"'):
        integration.register("cute_attn", unsupported="sdpa")


def test_ends_of_packed_sequences_are_asked_for_together():
    q = torch.randn(1, 2, 9, 8)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected cu_seq_lens_q, cu_seq_lens_k, max_length_q"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=ends)
