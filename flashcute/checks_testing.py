"""The checks of what :mod:`flashcute.testing` compares: results, gradients and their inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .checks import check_gradient, check_kind, check_rank


def check_result(out, lse, q, k, v) -> None:
    """Checks output and log-sum-exp, which may be None, against q, k and v of four dimensions."""
    fn = "check_forward"
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_kind(fn, name, x)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(fn, name, x, "(b, seqlen, heads, head_dim)")
    b, seqlen_q, h, _ = q.shape
    if out.dtype != q.dtype:
        raise TypeError(
            f"{fn}: expected out in q's dtype {q.dtype}, got out.dtype={out.dtype}; "
            "compare what was computed, uncast"
        )
    if tuple(out.shape) != (b, seqlen_q, h, v.shape[3]):
        raise ValueError(
            f"{fn}: expected out of shape {(b, seqlen_q, h, v.shape[3])}, "
            f"got out.shape={tuple(out.shape)}; the layout is (b, seqlen_q, h, d_v)"
        )
    if lse is None:
        return
    check_kind(fn, "lse", lse)
    if tuple(lse.shape) != (b, h, seqlen_q):
        raise ValueError(
            f"{fn}: expected lse of shape {(b, h, seqlen_q)}, "
            f"got lse.shape={tuple(lse.shape)}; the layout is (b, h, seqlen_q)"
        )


def check_gradients(
    fn: str,
    gradients: Mapping[str, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Checks gradients by name, dense or of packed tokens, and the tensors they come from.

    Args:
        gradients: ``"dq"``, ``"dk"``, ``"dv"`` like q, k and v; ``"dsinks"`` where there are sinks.
        qkv: (b, seqlen, heads, d) or (total, heads, d).
        dout: Like q, but for the head dimension of v.
        dlse: (b, h, seqlen_q) or (h, total_q).
        sinks: (h,).
    """
    for name, x in zip("qkv", qkv, strict=True):
        check_kind(fn, name, x)
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"{fn}: expected gradients to be a dict, got gradients of type "
            f"{type(gradients).__name__}; pass {{'dq': dq, 'dk': dk, 'dv': dv}}"
        )
    wanted = dict(zip(("dq", "dk", "dv"), qkv, strict=True))
    if sinks is not None:
        check_kind(fn, "sinks", sinks)
        wanted["dsinks"] = sinks
    for name, x in wanted.items():
        if name not in gradients:
            raise ValueError(
                f"{fn}: expected gradients of {', '.join(wanted)}, got gradients of "
                f"{', '.join(map(str, gradients)) or 'nothing'}; add {name}"
            )
        # The gradient of the sinks may be float32 or in their dtype: any dtype passes.
        dtype = getattr(gradients[name], "dtype", None) if name == "dsinks" else x.dtype
        check_gradient(fn, f"gradients[{name!r}]", gradients[name], x.shape, dtype, x.device)
    q, _, v = qkv
    of_lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, x, shape in (
        ("dout", dout, (*q.shape[:-1], v.shape[-1])),
        ("dlse", dlse, of_lse),
    ):
        if x is not None or name == "dout":
            check_gradient(fn, name, x, shape, getattr(x, "dtype", None), q.device)
