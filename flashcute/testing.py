"""When a result counts as correct.

A fixed tolerance is too loose for one problem and too tight for the next. The rule here compares
with two references of :mod:`flashcute.reference`: one in float64, taken as the truth, and one in
the inputs' own dtype, whose error says what that dtype costs for just these inputs
(FlashAttention-2's tests). With ``round`` for rounding to that dtype and ``ulp`` for its spacing,

    max  |out - ref| <= 2   max  |low - ref| + max(2 |(round(ref) + 0.3 - 0.3) - round(ref)|, ulp)
    mean |out - ref| <= 1.5 mean |low - ref| + mean ulp(ref) / 4
    |drift|          <= 2 |drift of low| + mean ulp(ref) / 16 + 4 sigma
    |lse - ref lse|  <= 1e-4 + 1e-6 |ref lse|

and NaN, Inf, -inf and the zeros of fully masked rows have to be exactly where the truth has them.
The maximum finds what is grossly wrong somewhere, the mean what is slightly wrong in many places.
A quarter of an ulp is what rounding costs on average. The rounding error of ref itself would say
the same for values anywhere between two neighbours, but nothing where every ref is representable,
as with rows of V all alike, where the baseline's error vanishes, too. Such inputs are also why the
maximum is allowed an ulp where the term with 0.3 happens to be 0.
Drift is the mean of (out - ref) sign(ref), growth of the output's magnitude: correct rounding
averages out, truncation and rounding always to one side do not. Its sigma is the standard error
over rows.

The gradients of q, k and v have the bounds of max and mean above, each against autograd of the two
references. The low one uses D = rowsum(dO * O) of the rounded output, as a backward does that keeps
O and not P. Gradients are exactly 0 for queries that see no key and keys that no query sees. The
gradient of a sink is a sum over all rows in fp32, to which each row adds the rounding of its output
and of its P. It is allowed four times the standard deviation of this sum's error. Where no query
sees more than one key, dS is 0 and both references are exact, so the gradients of q and k are
allowed the rounding of dP - D in fp32, in 64 bits for inputs of these.

For inputs of 32 bits the low reference is as exact as the result, for inputs of 64 bits also as the
truth. The errors are the accumulated rounding of sums in one order or another, and may be equal in
both references. So the maximum is allowed (32 + sqrt(n)) eps times the largest magnitude of the
reference in addition, with n the longer sequence: terms are up to sqrt(n) times as large as their
sum where signs are random, and dP and D cancel. Correct results of 4 to 2,048 tokens were seen to
need 22 eps, and a twentieth of that for the mean. Where no query sees more than three keys, dS may
be smaller than the rounding of dP - D, which the gradients of q and k are then allowed, too. The
mean is allowed an eighth of the addition; the drift, which averages out, that eighth over the root
of the rows. 16-bit inputs have none of it.

Works on any device: the references are computed where the tensors are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks_testing import check_gradients, check_result
from .reference import attention_ref, visible_keys

# Elements of Q, K and V that are compared at a time; several float64 copies of them are held.
_MAX_PIECE_ELEMENTS = 2**26

_MISPLACED = """: NaN or infinite where the reference is finite or the other way round, and then in
            none of the errors above, or not 0 where nothing is seen"""

LSE_ATOL = 1e-4
LSE_RTOL = 1e-6  # eight float32 ulps, for scores too large for an absolute bound


@dataclasses.dataclass(frozen=True)
class Bound:
    """A measured error and what was allowed."""

    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """error / allowed: at most 1 if all is well."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else math.inf

    @property
    def ok(self) -> bool:
        return self.ratio <= 1  # False for NaN

    def __str__(self) -> str:
        mark = "" if self.ok else "  <-- FAILED"
        return f"{self.error:.3e} of {self.allowed:.3e} allowed, ratio {self.ratio:.3f}{mark}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`compare_forward` found.

    Attributes:
        max: The largest error of the output.
        mean: Its mean absolute error.
        drift: Its mean growth in magnitude, see the module's docstring.
        lse: The largest error of the log-sum-exp, at the element with the worst ratio.
        misplaced: Elements of the output that are NaN or Inf where the truth is finite or the other
            way round, or not 0 in a row that sees no key.
        lse_misplaced: Elements of the log-sum-exp that are NaN or infinite and should not be, or
            the other way round.
        worst: Index (b, seqlen_q, h, d) of a misplaced element if there is any, else of the largest
            error.
    """

    max: Bound
    mean: Bound
    drift: Bound
    lse: Bound
    misplaced: int
    lse_misplaced: int
    worst: tuple[int, int, int, int]

    @property
    def ok(self) -> bool:
        bounds = (self.max, self.mean, self.drift, self.lse)
        return self.misplaced == self.lse_misplaced == 0 and all(bound.ok for bound in bounds)

    def __str__(self) -> str:
        why = _MISPLACED if self.misplaced or self.lse_misplaced else ""
        return "\n".join(
            (
                f"max error   {self.max}",
                f"mean error  {self.mean}",
                f"drift       {self.drift}",
                f"lse error   {self.lse}",
                f"misplaced   {self.misplaced} in out, {self.lse_misplaced} in lse{why}",
                f"worst       out{list(self.worst)}",
            )
        )


def check_forward(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Report:
    """Does :func:`compare_forward`; raises AssertionError with the report if a bound is broken."""
    report = compare_forward(out, lse, q, k, v, **options)
    if not report.ok:
        shapes = f"q={tuple(q.shape)} k={tuple(k.shape)} v={tuple(v.shape)} {q.dtype}"
        raise AssertionError(f"attention is wrong for {shapes} {_brief(options)}\n{report}")
    return report


def compare_forward(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    check_drift: bool = True,
    **options: Any,
) -> Report:
    """Measures a forward result against the rule in the module's docstring.

    Args:
        out: (b, seqlen_q, h, d_v), in q's dtype.
        lse: (b, h, seqlen_q), natural logarithm; None where there is none to compare.
        q: (b, seqlen_q, h, d), with k and v the inputs that gave ``out``.
        check_drift: Pass False for inputs with few distinct values, where every row rounds alike
            and nothing averages out.
        options: Of :func:`flashcute.reference.attention_ref`: softmax_scale, causal, window_size,
            ...

    Raises:
        TypeError: what should be a tensor is not, or dtypes of out and q differ.
        ValueError: a shape is not as above.
    """
    check_result(out, lse, q, k, v)
    pieces = []
    for cut in _pieces(q, k):
        with torch.no_grad():
            pieces.append(_measure(cut, out, lse, (q, k, v), options))
    # The only synchronisation with the device, except where the reference looks for NaN and Inf.
    stats = [_Stats(*row) for row in torch.stack(pieces).tolist()]

    n = max(out.numel(), 1)
    total = {field: sum(getattr(s, field) for s in stats) for field in _Stats._fields}
    largest = {field: max(getattr(s, field) for s in stats) for field in _Stats._fields}
    mean_rounding = total["sum_rounding"] / n
    sigma = math.sqrt(total["sum_square_low"] / n / max(_independent_rows(q), 1))
    drift_allowed = 2 * abs(total["drift_low"]) / n + mean_rounding / 4 + 4 * sigma
    noise = _accumulation_noise(q, k) * largest["max_ref"]
    drift_allowed += noise / 8 / math.sqrt(max(_independent_rows(q), 1))
    lse_worst = max(stats, key=lambda s: s.lse_ratio)
    place = max(range(len(stats)), key=lambda i: (stats[i].misplaced > 0, stats[i].max_error))
    return Report(
        max=Bound(largest["max_error"], 2 * largest["max_low"] + 2 * largest["max_ulp"] + noise),
        mean=Bound(total["sum_error"] / n, 1.5 * total["sum_low"] / n + mean_rounding + noise / 8),
        drift=Bound(abs(total["drift"]) / n if check_drift else 0.0, drift_allowed),
        lse=Bound(lse_worst.lse_error, lse_worst.lse_allowed),
        misplaced=int(total["misplaced"]),
        lse_misplaced=int(total["lse_misplaced"]),
        worst=_worst_index(list(_pieces(q, k))[place], int(stats[place].location), out),
    )


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """What :func:`compare_backward` found of one gradient.

    Attributes:
        max: The largest error; for the sinks' gradient that of the head with the worst ratio.
        mean: The mean absolute error; 0 for the sinks.
        misplaced: Elements that are NaN or Inf where the truth is finite or the other way round, or
            not 0 for a query that sees no key or a key that no query sees.
    """

    max: Bound
    mean: Bound
    misplaced: int

    @property
    def ok(self) -> bool:
        return self.misplaced == 0 and self.max.ok and self.mean.ok

    def __str__(self) -> str:
        why = _MISPLACED if self.misplaced else ""
        return f"max error {self.max}\nmean error {self.mean}\nmisplaced {self.misplaced}{why}"


def check_backward(
    gradients: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> dict[str, GradientReport]:
    """Does :func:`compare_backward`; raises AssertionError with the reports that are not ok."""
    reports = compare_backward(gradients, q, k, v, dout, **options)
    options.pop("expected", None)
    raise_where_wrong(reports, q, k, v, options)
    return reports


def raise_where_wrong(
    reports: Mapping[str, GradientReport], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> None:
    """Raises AssertionError with the reports that are not ok, if there are any."""
    wrong = [f"{name}: {report}" for name, report in reports.items() if not report.ok]
    if wrong:
        shapes = f"q={tuple(q.shape)} k={tuple(k.shape)} v={tuple(v.shape)} {q.dtype}"
        text = "\n".join(wrong)
        raise AssertionError(f"gradients are wrong for {shapes} {_brief(options)}\n{text}")


class ExpectedGradients(NamedTuple):
    """What gradients are compared with.

    Attributes:
        truth: Gradients by name, float64.
        low: Gradients by name, of a backward in the inputs' dtype.
        out, lse: Results of the forward in float64.
        rounding: (b, h, seqlen_q), the error of D = rowsum(dO * O) where O is rounded.
    """

    truth: Mapping[str, Tensor]
    low: Mapping[str, Tensor]
    out: Tensor
    lse: Tensor
    rounding: Tensor


def compare_backward(
    gradients: Mapping[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    dlse: Tensor | None = None,
    expected: ExpectedGradients | None = None,
    **options: Any,
) -> dict[str, GradientReport]:
    """Measures gradients against the rule in the module's docstring, all heads at once.

    Args:
        gradients: ``"dq"``, ``"dk"``, ``"dv"`` in the shapes and dtype of q, k and v; with
            ``sinks`` among the options ``"dsinks"``, (h,) float32. Others are ignored.
        q: (b, seqlen_q, h, d), with k and v the inputs of the forward.
        dout: (b, seqlen_q, h, d_v), the gradient of the output.
        dlse: (b, h, seqlen_q), float32, the gradient of the log-sum-exp; zeros by default. Without
            effect where the log-sum-exp is -inf.
        expected: What :func:`expect_gradients` returned for the other arguments, which takes nearly
            all of the time; computed by default.
        options: Of :func:`flashcute.reference.attention_ref`: softmax_scale, causal, window_size,
            sinks, ...

    Raises:
        TypeError: the gradients are no dict, or what should be a tensor is not.
        ValueError: a gradient is missing, or a shape, dtype or device is not as above.
    """
    check_gradients("check_backward", gradients, (q, k, v), dout, dlse, options.get("sinks"))
    reports, of_sinks = compare_qkv(gradients, (q, k, v), dout, dlse, options, expected)
    if of_sinks is not None:
        reports["dsinks"] = compare_sinks(gradients["dsinks"], *of_sinks)
    return reports


def compare_sinks(got: Tensor, ref: Tensor, variance: Tensor) -> GradientReport:
    """Measures the sinks' gradient against ``ref`` (h,), whose rounding has this variance."""
    error = (got.double() - ref).abs()
    allowed = 4 * variance.sqrt() + 1e-5 * ref.abs() + 1e-6
    worst = int((error / allowed).nan_to_num(math.inf).argmax())
    bound = Bound(float(error[worst]), float(allowed[worst]))
    return GradientReport(bound, Bound(0.0, 0.0), int((~got.isfinite()).sum()))


def expect_gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    options: Mapping[str, Any],
) -> ExpectedGradients:
    """Computes both references' gradients; arguments as in :func:`compare_backward`."""
    truth, out, lse = _gradients(*qkv, dout, dlse, options, torch.float64)
    # A backward that keeps O instead of P reads rounded O: D = rowsum(dO * O) then has this error,
    # which acts as a gradient of the log-sum-exp.
    rounding = ((out.to(qkv[0].dtype).double() - out) * dout.double()).sum(-1).transpose(1, 2)
    given = -rounding if dlse is None else dlse - rounding  # (b, h, seqlen_q)
    low, *_ = _gradients(*qkv, dout, given, options, None)
    return ExpectedGradients(truth, low, out, lse, rounding)


def compare_qkv(
    gradients: Mapping[str, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
    expected: ExpectedGradients | None = None,
) -> tuple[dict[str, GradientReport], tuple[Tensor, Tensor] | None]:
    """Does :func:`compare_backward` but for sinks; for them returns what compare_sinks() takes."""
    q, k, _ = qkv
    truth, low, out, lse, rounding = expected or expect_gradients(qkv, dout, dlse, options)
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    visible = visible_keys(q.shape[1], k.shape[1], causal, window, device=q.device)
    hidden = {"dq": ~visible.any(1), "dk": ~visible.any(0), "dv": ~visible.any(0)}
    measured = []
    for name in ("dq", "dk", "dv"):
        got, ref = gradients[name].double(), truth[name]
        rounded = ref.to(q.dtype)
        spacing = _spacing(rounded.double(), q.dtype)
        floor = torch.maximum(((rounded + 0.3 - 0.3) - rounded).double().abs(), spacing / 2)
        nonzero = hidden[name][None, :, None, None] & (got != 0)
        error = torch.where(got.isfinite(), got - ref, 0).abs()
        low_error = (low[name].double() - ref).abs()
        stats = (
            *(_max(error), error.sum()),
            *(_max(low_error) + _max(floor), 1.5 * low_error.sum() + spacing.sum() / 4),
            *(((got.isfinite() != rounded.isfinite()) | nonzero).sum(), ref.any()),
            _max(torch.where(ref.isfinite(), ref, 0).abs()),
        )
        measured.append(torch.stack([x.double() for x in stats]))
    few = q.dtype.itemsize >= 4 and bool((visible.sum(1) <= 3).all())
    reports = {}
    # One synchronisation with the device for all of them; _rounding_of_ds() has its own.
    for name, stats in zip(("dq", "dk", "dv"), torch.stack(measured).tolist(), strict=True):
        error, total, largest, allowed, misplaced, any_ref, max_ref = stats
        n = max(truth[name].numel(), 1)
        noise = _accumulation_noise(q, k) * max_ref
        if name != "dv" and (few or not any_ref):
            noise += _rounding_of_ds(name, qkv, dout, visible, options)
        of_mean = Bound(total / n, allowed / n + noise / (8 if any_ref else 1))
        reports[name] = GradientReport(Bound(error, 2 * largest + noise), of_mean, int(misplaced))
    if options.get("sinks") is None:
        return reports, None
    share = torch.exp(options["sinks"].double()[:, None] - lse)  # (b, h, seqlen_q)
    share = torch.where(lse == -torch.inf, 0, share)
    elements = share.transpose(1, 2)[..., None] * dout.double() * out
    variance = torch.finfo(q.dtype).eps ** 2 / 12 * elements.square().sum((0, 1, 3))  # (h)
    # Equal rows are rounded alike: their errors add up instead of averaging out. The errors of O
    # are known; those of P are as large in P V where V is random.
    in_step = (share * rounding).sum((0, 2)).square() / 4  # (h)
    strides = zip(q.shape[:2], q.stride(), dout.stride(), strict=False)
    equal = math.prod(size for size, *both in strides if not any(both))
    of_both = torch.maximum(variance, in_step) + equal * variance
    rows = elements.sum(-1).transpose(1, 2)  # (b, h, seqlen_q), what is summed up in float32
    rows = rows if dlse is None else rows - share * dlse
    in_fp32 = torch.finfo(torch.float32).eps ** 2 * rows.square().sum((0, 2))  # (h)
    return reports, (truth["dsinks"], of_both + in_fp32)


def _accumulation_noise(q: Tensor, k: Tensor) -> float:
    """Returns what accumulated rounding adds to a maximum's bound, relative to the largest ref."""
    eps = torch.finfo(q.dtype).eps if q.dtype.itemsize >= 4 else 0.0
    return (32 + math.sqrt(max(q.shape[1], k.shape[1]))) * eps


def _rounding_of_ds(name: str, qkv: tuple, dout: Tensor, visible: Tensor, options: dict) -> float:
    """Returns what dP and D, sums over d, add to dQ or dK where they should cancel; P <= 1."""
    sides = visible.any(1), visible.any(0), visible.any(0), visible.any(1)
    q, k, v, dout = (
        torch.where(seen[:, None, None] & x.isfinite(), x, 0).double()
        for x, seen in zip((*qkv, dout), sides, strict=True)
    )
    scale = abs(options.get("softmax_scale") or q.shape[3] ** -0.5)
    rows = q.shape[1] * q.shape[2] // k.shape[2] if name == "dk" else 1  # summed rows
    dp = _max(dout.norm(dim=-1)) * _max(v.norm(dim=-1))
    other = _max((q if name == "dk" else k).abs())
    eps = torch.finfo(torch.promote_types(qkv[0].dtype, torch.float32)).eps
    return 4 * eps * float(dp * other) * scale * math.sqrt(rows)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    options: Mapping[str, Any],
    upcast: torch.dtype | None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns gradients by name, by autograd of the reference, its output and log-sum-exp."""
    inputs = {f"d{name}": x.detach().clone() for name, x in (("q", q), ("k", k), ("v", v))}
    if options.get("sinks") is not None:
        inputs["dsinks"] = options["sinks"].detach().clone()
    if upcast is not None:
        inputs = {name: x.to(upcast) for name, x in inputs.items()}
    for x in inputs.values():
        x.requires_grad_()
    options = {**options, "sinks": inputs.get("dsinks")}
    qkv = inputs["dq"], inputs["dk"], inputs["dv"]
    out, lse, _ = attention_ref(*qkv, upcast=upcast, reorder_ops=upcast is None, **options)
    outputs, given = [out], [dout.to(out.dtype)]
    if dlse is not None:
        outputs.append(torch.where(lse.isfinite(), lse, 0))
        given.append(torch.where(lse.isfinite(), dlse, 0).to(lse.dtype))
    found = torch.autograd.grad(outputs, list(inputs.values()), given)
    return dict(zip(inputs, found, strict=True)), out.detach(), lse.detach()


class _Stats(NamedTuple):
    """What one piece contributes; every field is a float64 scalar on the device until the end."""

    max_error: Any
    sum_error: Any
    max_low: Any
    sum_low: Any
    sum_square_low: Any
    max_ulp: Any
    max_ref: Any
    sum_rounding: Any
    drift: Any
    drift_low: Any
    misplaced: Any
    location: Any
    lse_ratio: Any
    lse_error: Any
    lse_allowed: Any
    lse_misplaced: Any


class _Cut(NamedTuple):
    """A piece of the problem: some batch entries and some key heads with their query heads."""

    batch: slice
    kv_heads: slice
    heads: slice


def _pieces(q: Tensor, k: Tensor) -> Iterator[_Cut]:
    """Yields pieces that bound the memory for float64 copies: only huge tensors have several."""
    b, seqlen_q, h, d = q.shape
    seqlen_k, h_k = k.shape[1:3]
    group = h // h_k
    per_kv_head = max((seqlen_q * group + 2 * seqlen_k) * d, 1)
    kv_step = min(max(_MAX_PIECE_ELEMENTS // per_kv_head, 1), h_k)
    batch_step = min(max(_MAX_PIECE_ELEMENTS // (per_kv_head * h_k), 1), max(b, 1))
    for start in range(0, max(b, 1), batch_step):
        for head in range(0, h_k, kv_step):
            stop = min(head + kv_step, h_k)
            yield _Cut(
                slice(start, start + batch_step),
                slice(head, stop),
                slice(head * group, stop * group),
            )


def _cut_options(options: dict[str, Any], cut: _Cut) -> dict[str, Any]:
    """Returns the options with tensors per head or batch entry cut to the piece."""
    options = dict(options)
    slopes, sinks = options.get("alibi_slopes"), options.get("sinks")
    if slopes is not None:
        options["alibi_slopes"] = (
            slopes[cut.heads] if slopes.dim() == 1 else slopes[cut.batch, cut.heads]
        )
    if sinks is not None:
        options["sinks"] = sinks[cut.heads]
    for name in ("attn_bias", "dropout_mask"):
        x = options.get(name)
        if x is not None:
            x = x[(None,) * (4 - x.dim())]
            x = x if x.shape[0] == 1 else x[cut.batch]
            options[name] = x if x.shape[1] == 1 else x[:, cut.heads]
    return options


def _spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance of neighbours of x in ``dtype``; 0 for 0, as masked rows are exact."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x).exponent
    spacing = torch.ldexp(torch.full_like(x, info.eps), exponent - 1)
    return torch.where(x == 0, 0, spacing.clamp(min=info.tiny * info.eps))


def _measure(
    cut: _Cut, out: Tensor, lse: Tensor | None, qkv: tuple[Tensor, ...], options: dict[str, Any]
) -> Tensor:
    """Returns the statistics of one piece, (len(_Stats._fields),) float64."""
    q, k, v = (
        x[cut.batch, :, heads]
        for x, heads in zip(qkv, (cut.heads, cut.kv_heads, cut.kv_heads), strict=True)
    )
    out = out[cut.batch, :, cut.heads].double()
    options = _cut_options(options, cut)
    ref, ref_lse, _ = attention_ref(q, k, v, upcast=torch.float64, **options)
    low = attention_ref(q, k, v, reorder_ops=True, **options).out
    rounded = ref.to(q.dtype)
    # Scores beyond float16's range break the baseline, not a kernel, which keeps them in float32.
    low = torch.where(low.isfinite(), low, rounded).double()
    ulp = ((rounded + 0.3 - 0.3) - rounded).double()
    rounded = rounded.double()

    finite = rounded.isfinite()
    masked = (ref_lse == -torch.inf).transpose(1, 2)[..., None]  # (b, seqlen_q, h, 1)
    misplaced = (out.isfinite() != finite) | (masked & (out != 0))
    comparable = finite & out.isfinite()
    error = torch.where(comparable, out - ref, 0)
    low_error = torch.where(finite, low - ref, 0)
    sign = torch.where(finite, ref.sign(), 0)
    spacing = _spacing(rounded, q.dtype)
    rounding = torch.where(finite, spacing / 4, 0)
    stats = _Stats(
        max_error=_max(error.abs()),
        sum_error=error.abs().sum(),
        max_low=_max(low_error.abs()),
        sum_low=low_error.abs().sum(),
        sum_square_low=low_error.square().sum(),
        max_ulp=_max(torch.where(finite, torch.maximum(ulp.abs(), spacing / 2), 0)),
        max_ref=_max(torch.where(finite, ref, 0).abs()),
        sum_rounding=rounding.sum(),
        drift=(error * sign).sum(),
        drift_low=(low_error * sign).sum(),
        misplaced=misplaced.sum(),
        location=_argmax(torch.where(misplaced, torch.inf, error.abs())),
        **_measure_lse(ref_lse, None if lse is None else lse[cut.batch, cut.heads].double()),
    )
    return torch.stack([x.double() for x in stats])


def _measure_lse(ref: Tensor, lse: Tensor | None) -> dict[str, Tensor]:
    """Returns the log-sum-exp's part of the statistics."""
    if lse is None:
        names = ("lse_ratio", "lse_error", "lse_allowed", "lse_misplaced")
        return dict.fromkeys(names, ref.new_zeros(()))
    finite = ref.isfinite()
    infinite = torch.where(ref.isnan(), ~lse.isfinite(), lse == ref)
    misplaced = ~torch.where(finite, lse.isfinite(), infinite)
    error = torch.where(finite & lse.isfinite(), lse - ref, 0).abs().flatten()
    allowed = (LSE_ATOL + LSE_RTOL * torch.where(finite, ref, 0).abs()).flatten()
    worst = _argmax(error / allowed)
    empty = error.numel() == 0
    return {
        "lse_ratio": ref.new_zeros(()) if empty else (error / allowed)[worst],
        "lse_error": ref.new_zeros(()) if empty else error[worst],
        "lse_allowed": ref.new_full((), LSE_ATOL) if empty else allowed[worst],
        "lse_misplaced": misplaced.sum(),
    }


def _max(x: Tensor) -> Tensor:
    return x.amax() if x.numel() > 0 else x.new_zeros(())


def _argmax(x: Tensor) -> Tensor:
    empty = x.numel() == 0
    return torch.zeros((), dtype=torch.int64, device=x.device) if empty else x.argmax()


def _independent_rows(q: Tensor) -> int:
    """Counts rows of Q that round independently: an expanded dimension repeats its rows."""
    sizes = zip(q.shape[:3], q.stride()[:3], strict=True)
    return math.prod(1 if stride == 0 else size for size, stride in sizes)


def _worst_index(cut: _Cut, location: int, out: Tensor) -> tuple[int, int, int, int]:
    """Returns the index into ``out`` of a flat index into a piece of it."""
    if out.numel() == 0:
        return (0, 0, 0, 0)
    heads = cut.heads.stop - cut.heads.start
    location, d = divmod(location, out.shape[3])
    location, head = divmod(location, heads)
    b, row = divmod(location, out.shape[1])
    return (cut.batch.start + b, row, cut.heads.start + head, d)


def _brief(options: dict[str, Any]) -> str:
    """Returns the text of options for a message: tensors by their shapes."""
    parts = (
        f"{name}={tuple(x.shape) if isinstance(x, Tensor) else x}" for name, x in options.items()
    )
    return " ".join(parts)
