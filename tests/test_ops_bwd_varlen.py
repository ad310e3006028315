"""The operator of the gradients of ragged batches, and the autograd function that calls it."""

from __future__ import annotations

import pytest
import torch

from flashcute import autograd, cpu_varlen, flash_attn_varlen, ops
from flashcute.checks_varlen import Names
from flashcute.dropout import dropout_mask
from flashcute.reference_varlen import attention_varlen_ref

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMAS = (
    "flashcute::bwd_varlen(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor softmax_lse, Tensor? dlse, Tensor cu_seqlens_q, Tensor cu_seqlens_k,"
    " Tensor? seqused_q, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " float softmax_scale, bool causal, int window_left, int window_right, Tensor? sinks,"
    " int wanted, Tensor? rng_state=None, float dropout_p=0., float softcap=0.,"
    " Tensor? alibi_slopes=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
)
CU_Q, CU_K = torch.tensor([0, 4, 4, 7]).int(), torch.tensor([0, 5, 7, 7]).int()
STATE = torch.tensor([5, 7])
LEAVES = ("q", "k", "v", "sinks")
_ARGUMENTS = tuple(x.name for x in torch._C.parse_schema(FROZEN_SCHEMAS[0]).arguments)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    ops.load()
    torch._dynamo.reset()


def _op():
    return torch.ops.flashcute.bwd_varlen.default


def _options(**change) -> dict:
    """Returns options of the reference for three sequences with 4 heads."""
    generator = torch.Generator().manual_seed(1)
    slopes = torch.rand(3, 4, generator=generator)
    return {"softmax_scale": 0.25, "causal": True, "softcap": 1.5, "alibi_slopes": slopes} | change


def _leaves() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (8, 4, 16), "k": (8, 2, 16), "v": (8, 2, 16), "sinks": (4,)}
    return {
        name: torch.randn(size, generator=generator).requires_grad_()
        for name, size in sizes.items()
    }


def _reference(leaves: dict[str, torch.Tensor], dropout_p: float = 0.0, **options):
    q, k, v, sinks = leaves.values()
    if dropout_p:
        mask = dropout_mask(STATE, 3, 4, 4, 5, dropout_p)
        sizes = zip(CU_Q.diff().tolist(), CU_K.diff().tolist(), strict=True)
        masks = [mask[i, :, :n, :m] for i, (n, m) in enumerate(sizes)]
        options |= {"dropout_p": dropout_p, "dropout_mask": masks}
    return attention_varlen_ref(q, k, v, CU_Q, CU_K, sinks=sinks, **options)[:2]


def _arguments(**change) -> dict:
    """Returns arguments of the operator, in which rows of no sequence have a dout, too."""
    leaves = {name: x.detach() for name, x in _leaves().items()}
    options = _options()
    out, lse = _reference(leaves, **options)
    generator = torch.Generator().manual_seed(2)
    q, k, v, sinks = leaves.values()
    given = {
        **{"dout": torch.randn(out.shape, generator=generator), "q": q, "k": k, "v": v},
        **{"out": out, "softmax_lse": lse, "dlse": torch.randn(lse.shape, generator=generator)},
        **{"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "seqused_q": None, "seqused_k": None},
        **{"max_seqlen_q": 4, "max_seqlen_k": 5, "softmax_scale": 0.25, "causal": True},
        **{"window_left": -1, "window_right": -1, "sinks": sinks, "wanted": 15},
        **{"rng_state": None, "dropout_p": 0.0, "softcap": 1.5},
        **{"alibi_slopes": options["alibi_slopes"]},
    }
    return given | change


def test_schema_is_the_frozen_one() -> None:
    for frozen in map(torch._C.parse_schema, FROZEN_SCHEMAS):
        assert _op()._schema.is_backward_compatible_with(frozen)
    assert str(_op()._schema) == str(frozen), "compatible, but add the new schema to the frozen"


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("wanted", [0, 1, 6, 8, 15, 31])
def test_cpu_implementation(wanted: int, dropout_p: float) -> None:
    dropout = {"rng_state": STATE, "dropout_p": dropout_p}
    given = _arguments(wanted=wanted, **dropout)
    leaves = _leaves()
    out, lse = _reference(leaves, dropout_p, **_options())
    used = torch.where(lse.isfinite(), lse, 0)
    grads = given["dout"], torch.where(lse.isfinite(), given["dlse"], 0)
    expected = torch.autograd.grad((out, used), list(leaves.values()), grads)
    for bit, (got, e) in enumerate(zip(_op()(**given), expected, strict=True)):
        if wanted >> bit & 1:
            torch.testing.assert_close(got, e)
        else:
            assert got.shape == (0,)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"wanted": 5, "softcap": 0.0, "alibi_slopes": None},
        {"sinks": None, "wanted": 7, "dlse": None, "rng_state": STATE, "dropout_p": 0.25},
        {"causal": False, "window_left": 3, "seqused_k": torch.tensor([3, 2, 0]).int()},
    ],
)
def test_opcheck(change) -> None:
    results = torch.library.opcheck(_op(), tuple(_arguments(**change).values()))
    assert set(results.values()) == {"SUCCESS"} and len(results) >= 4


@pytest.mark.parametrize(
    ("change", "error", "pattern"),
    [
        ({"dout": torch.zeros(8, 4, 8)}, ValueError, r"dout of shape \(8, 4, 16\)"),
        ({"softmax_lse": torch.zeros(8, 4)}, ValueError, r"softmax_lse of shape \(4, 8\)"),
        ({"dlse": torch.zeros(4, 8).half()}, ValueError, r"dlse of .*got .*torch.float16"),
        ({"sinks": None}, ValueError, "bit 3 only with sinks, got wanted=15"),
        ({"wanted": 32}, ValueError, "got wanted=32"),
        ({"cu_seqlens_k": torch.zeros(3).int()}, ValueError, "cu_seqlens_k of cu_seqlens_q"),
        ({"seqused_q": torch.zeros(2).int()}, ValueError, r"seqused_q of shape \(3,\)"),
        ({"max_seqlen_q": -1}, ValueError, "0 <= max_seqlen_q"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q >= "),
        ({"seqused_q": torch.tensor([9, 1, 1]).int()}, ValueError, r"seqused_q\[0\]"),
        ({"v": torch.zeros(8, 3, 16)}, ValueError, "v of k's shape"),
        ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, "alibi_slopes of shape"),
        ({"dropout_p": 0.5}, ValueError, "rng_state with dropout_p > 0"),
    ],
)
def test_wrong_arguments_are_refused(change, error, pattern) -> None:
    with pytest.raises(error, match=rf"^flashcute::bwd_varlen: expected .*{pattern}"):
        _op()(**_arguments(**change))


def test_cuda_operator_rejects_what_is_not_cuda() -> None:
    # The call reaches the operator's CUDA kernel through its dispatch key, as one with tensors on
    # several devices would.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    given = _arguments()
    with pytest.raises(RuntimeError, match=r"^flashcute::bwd_varlen: expected q of dtype float16"):
        _op().redispatch(keys, **given)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients(of: str, dropout_p: float, eager: bool) -> None:
    """The autograd function of CUDA tensors has these gradients, here with CPU tensors."""
    attend = autograd.attend_varlen_eagerly if eager else autograd.attend_varlen
    leaves = _leaves()
    q, k, v, sinks = leaves.values()
    options = _options()
    scores = options["softcap"], options["alibi_slopes"]
    found = attend(
        *(q, k, v, CU_Q, CU_K, None, None, 4, 5, 0.25, True, -1, -1, sinks),
        *(*scores, STATE if dropout_p else None, dropout_p),
    )
    expected = _reference(leaves, dropout_p, **options)

    def loss(out, lse):
        parts = {"out": out.square().sum(), "lse": lse[:, :7].sin().sum()}
        return sum(parts.values()) if of == "both" else parts[of]

    grads = [
        torch.autograd.grad(loss(*x), list(leaves.values()), materialize_grads=True)
        for x in (found, expected)
    ]
    for got, e in zip(*grads, strict=True):
        torch.testing.assert_close(got, e)


def test_trailing_defaults_may_be_left_out() -> None:
    leaves = _leaves()
    q, k, v, sinks = leaves.values()
    out, _ = autograd.attend_varlen(
        q, k, v, CU_Q, CU_K, None, None, 4, 5, 0.25, True, -1, -1, sinks
    )
    expected, _ = _reference(leaves, softmax_scale=0.25, causal=True)
    for got, e in zip(
        torch.autograd.grad(out.sum(), list(leaves.values())),
        torch.autograd.grad(expected.sum(), list(leaves.values())),
        strict=True,
    ):
        torch.testing.assert_close(got, e)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("how", ["not", "argument", "torch"])
def test_repeatable_gradients_are_asked_for(how: str, eager: bool, monkeypatch) -> None:
    attend = autograd.attend_varlen_eagerly if eager else autograd.attend_varlen
    q, k, v, sinks = _leaves().values()
    rest = 1.5, None, None, 0.0, None, 0, how == "argument"
    out, _ = attend(*(q, k, v, CU_Q, CU_K, None, None, 4, 5, 0.25, True, -1, -1, sinks), *rest)
    wanted, gradients = [], autograd._gradients

    def seen(name, needs, args):
        wanted.append(args[_ARGUMENTS.index("wanted")])
        return gradients(name, needs, args)

    monkeypatch.setattr(autograd, "_gradients", seen)
    torch.use_deterministic_algorithms(how == "torch")
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert wanted == [15 if how == "not" else 31]


def _meta(*shape: int, dtype: torch.dtype = torch.half, learns: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learns)


@pytest.mark.parametrize("d", [16, 20])
def test_the_way_of_cuda_tensors_has_a_gradient(d: int) -> None:
    """The path of CUDA tensors has gradients for any head dimension, with all options.

    The tensors are meta tensors, for which the public function itself has a shorter path.
    """
    q, k, v, sinks = _meta(8, 4, d), _meta(8, 2, d), _meta(8, 2, d), _meta(4)
    cu = _meta(4, dtype=torch.int64, learns=False)
    slopes = _meta(3, 4, dtype=torch.float32, learns=False)
    state = _meta(2, dtype=torch.int64, learns=False)
    tensors = cpu_varlen.Tensors(q, k, v, slopes, sinks, cu, cu, None, None, state)
    options = cpu_varlen.Options(4, 5, 0.25, True, -1, -1, 30.0, 0.25)
    out, lse = flash_attn_varlen._launch(Names("flash_attn_varlen_func"), tensors, options, 0, True)
    leaves = q, k, v, sinks
    grads = torch.autograd.grad((out, lse), leaves, (out.detach(), lse.detach()))
    for grad, x in zip(grads, leaves, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)


@pytest.mark.parametrize("way", ["eager", "operator"])
def test_keys_in_pages_have_no_gradient(way: str) -> None:
    q, k, v = _meta(8, 4, 64), _meta(6, 16, 2, 64), _meta(6, 16, 2, 64, learns=False)
    cu, used, table = (_meta(*s, dtype=torch.int32, learns=False) for s in ((4,), (3,), (3, 2)))

    def attend():
        options = 0.25, True, (-1, -1), None, 0.0, None, None, 0.0, table
        if way == "eager":
            return ops.attend_varlen(q, k, v, (cu, cu, None, used), (4, 5), *options)
        ops.load()
        options = *options[:2], *options[2], *options[3:]
        return torch.ops.flashcute.attend_varlen(q, k, v, cu, cu, None, used, 4, 5, *options)

    with torch.no_grad():
        assert attend()[0].shape == q.shape
    with pytest.raises(NotImplementedError, match="attend_varlen: expected no backward of keys in"):
        attend()


def test_compiled_operator_has_a_gradient() -> None:
    q, k, v = _meta(8, 4, 64), _meta(8, 2, 64), _meta(8, 2, 64)
    cu = _meta(4, dtype=torch.int32, learns=False)

    def attend(q, k, v):
        lengths, bounds = (cu, cu, None, None), (4, 5)
        options = 0.25, True, (-1, -1), None, 2.0
        return ops.attend_varlen(q, k, v, lengths, bounds, *options)[0]

    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        q.grad = None
        function(q, k, v).sum().backward()
        assert q.grad.shape == q.shape


def test_second_derivatives_are_refused_when_they_are_asked_for() -> None:
    leaves = _leaves()
    q, k, v, sinks = leaves.values()
    out, _ = autograd.attend_varlen(
        q, k, v, CU_Q, CU_K, None, None, 4, 5, 0.25, True, -1, -1, sinks
    )
    (dq,) = torch.autograd.grad(out.square().sum(), [q], create_graph=True)
    expected = r"^flashcute::bwd_varlen: expected first derivatives"
    with pytest.raises(NotImplementedError, match=expected):
        torch.autograd.grad(dq.sum(), [q])
