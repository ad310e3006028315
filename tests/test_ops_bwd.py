"""The operator of the gradients: schema, fake, CPU implementation, checks, choice of a kernel."""

from __future__ import annotations

import pytest
import torch

from flashcute import ops
from flashcute.dropout import dropout_mask
from flashcute.reference import attention_ref

# Never edit an old entry: a saved program or a caller may hold to it. New arguments go to the end,
# with defaults.
FROZEN_SCHEMAS = (
    "flashcute::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dlse, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, int wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    "flashcute::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dlse, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, int wanted, Tensor? rng_state=None, float dropout_p=0.) ->"
    " (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    "flashcute::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
    " Tensor? dlse, float softmax_scale, bool causal, int window_left, int window_right,"
    " Tensor? sinks, int wanted, Tensor? rng_state=None, float dropout_p=0., float softcap=0.,"
    " Tensor? alibi_slopes=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
)


def _op():
    ops.load()
    return torch.ops.flashcute.bwd.default


def _arguments(**change) -> dict:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, sinks = draw(2, 9, 4, 16), draw(2, 11, 2, 16), draw(2, 11, 2, 16), draw(4)
    out, lse, _ = attention_ref(q, k, v, softmax_scale=0.25, causal=True, sinks=sinks)
    given = {
        **{"dout": draw(2, 9, 4, 16), "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse},
        **{"dlse": draw(2, 4, 9), "softmax_scale": 0.25, "causal": True, "window_left": -1},
        **{"window_right": -1, "sinks": sinks, "wanted": 15},
    }
    return given | change


def test_schema_is_the_frozen_one() -> None:
    for frozen in map(torch._C.parse_schema, FROZEN_SCHEMAS):
        assert _op()._schema.is_backward_compatible_with(frozen)
    assert str(_op()._schema) == str(frozen), "compatible, but add the new schema to the frozen"


@pytest.mark.parametrize("wanted", range(32))
def test_cpu_implementation(wanted: int) -> None:
    given = _arguments(wanted=wanted)
    leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
    out, lse, _ = attention_ref(*leaves[:3], softmax_scale=0.25, causal=True, sinks=leaves[3])
    expected = torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"]))
    for bit, (got, e) in enumerate(zip(_op()(**given), expected, strict=True)):
        if wanted >> bit & 1:
            torch.testing.assert_close(got, e)
        else:
            assert got.shape == (0,)


@pytest.mark.parametrize("slopes", [(4,), (2, 4)], ids=str)
def test_softcap_and_slopes_on_the_cpu(slopes: tuple[int, ...]) -> None:
    scores = {"softcap": 1.5, "alibi_slopes": torch.rand(slopes)}
    given = _arguments(**scores)
    leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
    out, lse, _ = attention_ref(
        *leaves[:3], softmax_scale=0.25, causal=True, sinks=leaves[3], **scores
    )
    expected = torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"]))
    for got, e in zip(_op()(**given), expected, strict=True):
        torch.testing.assert_close(got, e)


def test_dropout_on_the_cpu() -> None:
    dropout = {"rng_state": torch.tensor([5, 7]), "dropout_p": 0.25}
    given = _arguments(**dropout)
    leaves = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks")]
    mask = dropout_mask(dropout["rng_state"], 2, 4, 9, 11, 0.25)
    out, lse, _ = attention_ref(
        *leaves[:3], softmax_scale=0.25, causal=True, sinks=leaves[3], dropout_p=0.25,
        dropout_mask=mask,
    )  # fmt: skip
    expected = torch.autograd.grad((out, lse), leaves, (given["dout"], given["dlse"]))
    for got, e in zip(_op()(**given), expected, strict=True):
        torch.testing.assert_close(got, e)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"wanted": 5},
        {"sinks": None, "wanted": 7, "dlse": None},
        {"causal": False, "window_left": 3, "window_right": 2},
        {"dout": torch.randn(2, 4, 9, 16).transpose(1, 2)},
        {"rng_state": torch.tensor([5, 7]), "dropout_p": 0.25},
        {"rng_state": None, "dropout_p": 0.0, "softcap": 1.5, "alibi_slopes": torch.rand(2, 4)},
    ],
)
def test_opcheck(change) -> None:
    results = torch.library.opcheck(_op(), tuple(_arguments(**change).values()))
    assert set(results.values()) == {"SUCCESS"} and len(results) >= 4


def test_fake_has_the_strides_of_the_inputs() -> None:
    given = _arguments()
    given = {n: x.half().to("meta") if getattr(x, "dim", None) else x for n, x in given.items()}
    given |= {n: given[n].float() for n in ("softmax_lse", "dlse", "sinks")}
    given["k"] = given["k"].transpose(1, 2).contiguous().transpose(1, 2)
    for x, grad in zip((given[n] for n in ("q", "k", "v", "sinks")), _op()(**given), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize(
    ("change", "error", "pattern"),
    [
        ({"dout": torch.zeros(2, 9, 4, 8)}, ValueError, r"dout of shape \(2, 9, 4, 16\)"),
        ({"dout": torch.zeros(2, 9, 4, 16).half()}, ValueError, r"dout of .*torch.float32"),
        ({"out": torch.zeros(2, 11, 4, 16)}, ValueError, "out of shape"),
        ({"softmax_lse": torch.zeros(2, 9, 4)}, ValueError, r"softmax_lse of shape \(2, 4, 9\)"),
        ({"dlse": torch.zeros(2, 4, 9).half()}, ValueError, r"dlse of .*got .*torch.float16"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks of shape"),
        ({"sinks": None}, ValueError, "bit 3 only with sinks, got wanted=15"),
        ({"wanted": 32}, ValueError, "got wanted=32"),
        ({"wanted": -1}, ValueError, "got wanted=-1"),
        ({"window_left": -2}, ValueError, r"window_size .*\(-2, -1\)"),
        ({"softmax_scale": float("nan")}, ValueError, "got softmax_scale=nan"),
        ({"v": torch.zeros(2, 3, 2, 16)}, ValueError, "v of k's shape"),
        ({"dropout_p": 0.5}, ValueError, "rng_state with dropout_p > 0"),
        ({"dropout_p": 1.0}, ValueError, "0 <= dropout_p <= 1 - "),
        ({"softcap": -1.0}, ValueError, "a finite softcap"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes of shape"),
    ],
)
def test_wrong_arguments_are_refused(change, error, pattern) -> None:
    with pytest.raises(error, match=rf"^flashcute::bwd: expected .*{pattern}"):
        _op()(**_arguments(**change))


def test_cuda_operator_rejects_what_is_not_cuda() -> None:
    # The call reaches the operator's CUDA kernel through its dispatch key, as one with tensors on
    # several devices would.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    given = _arguments()
    with pytest.raises(RuntimeError, match=r"^flashcute::bwd: expected q of dtype float16"):
        _op().redispatch(keys, **given)
    given |= {name: given[name].half() for name in ("dout", "q", "k", "v", "out")}
    with pytest.raises(RuntimeError, match=r"^flashcute::bwd: expected q on cuda"):
        _op().redispatch(keys, **given)


def test_resolver_chooses_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashcute import heuristics, jit

    asked = {}

    class Kernel:
        address = 4096

    def get_kernel(config, target):
        asked.update(config=config, target=target)
        return Kernel

    gpu = type("Gpu", (), {"major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.delenv("FLASHCUTE_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    for backward in (1, 2):  # the second asks for gradients of one side alone
        # The problem is causal, with few rows and four query heads a key head.
        problem = ops._Problem(0, 1, 1, 2, 3, 4, 8, 2, 64, backward=backward)
        choice = ops._choose(problem)
        expected = heuristics.sm90_bwd_config("bf16", 64, "causal")
        assert asked == {"config": expected, "target": "90"}
        assert (choice.kernel, choice.pack_heads) == (4096, 0)
    problem.backward = problem.dropout = 1
    ops._choose(problem)
    assert asked["config"].name == "flash_bwd_hdim64_bf16_causal_dropout_sm90"
    problem.softcap = 1
    ops._choose(problem)
    assert asked["config"].name == "flash_bwd_hdim64_bf16_causal_softcap_dropout_sm90"
    gpu.major = 8
    ops._choose(problem)
    assert asked["config"].name == "flash_bwd_hdim64_bf16_causal_softcap_dropout_fused_sm80"
    problem.backward = 2
    ops._choose(problem)
    assert asked["config"].name == "flash_bwd_hdim64_bf16_causal_softcap_dropout_sm80"
    gpu.major = 9
    problem.dropout, problem.softcap, problem.alibi, problem.varlen = 0, 1, 1, 1
    ops._choose(problem)
    assert asked["config"].name == "flash_bwd_hdim64_bf16_causal_softcap_alibi_varlen_sm80"
    gpu.major = 7
    with pytest.raises(NotImplementedError, match=r"^flashcute::bwd: expected a GPU of compute"):
        ops._choose(problem)
