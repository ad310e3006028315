"""Attention over 2 and 4 gloo processes is that of one: output, log-sum-exp and gradients."""

from __future__ import annotations

import functools
import itertools
import traceback
from typing import NamedTuple
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist

from flashcute import distributed as fd
from flashcute import flash_attn_func, testing
from flashcute.distributed import allgather


class Case(NamedTuple):
    """A call of one of the functions.

    Attributes:
        lengths: Tokens of each sequence on a rank; one length for a dense batch of ``b``.
        window: The argument window_size.
        grouped: Whether key heads are gathered in several groups, as for long sequences.
    """

    scheme: str
    lengths: tuple[int, ...] = (24,)
    b: int = 1
    heads: tuple[int, int] = (4, 2)
    d: int = 32
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    order: str = "zigzag"
    grouped: bool = False

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = "+".join(map(str, self.lengths))
        window = "{}_{}".format(*self.window)
        dtype = str(self.dtype).removeprefix("torch.")
        heads = "{}over{}".format(*self.heads)
        scheme = self.scheme + "-grouped" * self.grouped
        return f"{scheme}-{mask}-{window}-{self.order}-{lengths}-b{self.b}-{heads}-{dtype}"


CASES = [
    Case(scheme, **options)
    for scheme in ("ring", "allgather")
    for options in (
        {},
        {"order": "contiguous"},
        {"causal": False},
        {"b": 2, "heads": (6, 1)},
        {"heads": (4, 4), "dtype": torch.float16, "d": 20},
        {"dtype": torch.float32},
        {"window": (10, -1)},
        {"window": (10, 0), "order": "contiguous"},
        {"window": (40, 17), "causal": False},
        {"window": (0, 30), "causal": False, "order": "contiguous", "b": 2},
        {"lengths": (8, 2, 0, 14)},
        {"lengths": (9, 3), "order": "contiguous", "window": (11, 4), "causal": False},
    )
]
CASES += [
    Case("allgather", grouped=True, **options)
    for options in (
        {},
        {"heads": (8, 4), "b": 2, "window": (10, 0), "order": "contiguous"},
        {"heads": (6, 3), "dtype": torch.float32},
        {"lengths": (8, 2, 0, 14), "causal": False},
    )
]


def call(case: Case):
    """Returns the function of a case with its options."""
    name = f"{case.scheme}_flash_attn_varlen_func" if case.packed else None
    function = getattr(fd, name or f"{case.scheme}_flash_attn_func")
    options = {"causal": case.causal, "window_size": case.window, "order": case.order}
    if case.packed:
        ends = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
        options["cu_seqlens"] = torch.tensor(ends)
    return functools.partial(function, **options, return_lse=True)


def inputs(case: Case, world: int) -> list[torch.Tensor]:
    """Returns q, k, v, dout (b, s, heads, d) and dlse (b, s, h) of the whole sequences.

    dlse is float32, the others have the case's dtype.
    """
    generator = torch.Generator().manual_seed(7)
    s = sum(case.lengths) * world
    h, h_k = case.heads
    shapes = [(case.b, s, n, case.d) for n in (h, h_k, h_k, h)] + [(case.b, s, h)]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(case.dtype) for x in found[:4]] + [found[4]]


def split(case: Case, x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    starts = [world * sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    if case.order == "zigzag":
        return fd.zigzag_split(x, rank, world, cu_seqlens=starts)
    cut = [
        x[:, a + n * rank : a + n * (rank + 1)] for a, n in zip(starts, case.lengths, strict=False)
    ]
    return torch.cat(cut, 1)


def merge(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    world = len(parts)
    starts = [world * sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    if case.order == "zigzag":
        return fd.zigzag_merge(parts, cu_seqlens=starts)
    rows = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    cuts = [x[:, a:b] for a, b in itertools.pairwise(rows) for x in parts]
    return torch.cat(cuts, 1)


def compute(case: Case, rank: int, world: int, deterministic: bool = False) -> list[torch.Tensor]:
    """Returns this rank's out, lse as (b, s, h), dq, dk and dv."""
    q, k, v, dout, dlse = (split(case, x, rank, world) for x in inputs(case, world))
    if case.packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    least = 1 if case.grouped else allgather._GROUP_BYTES
    with mock.patch.object(allgather, "_GROUP_BYTES", least):
        out, lse = call(case)(q, k, v, deterministic=deterministic)
        rows = lse[None].transpose(1, 2) if case.packed else lse.transpose(1, 2)
        seen = rows.isfinite()
        loss = (out.float() * dout.float()).sum() + (rows[seen] * dlse[seen]).sum()
        loss.backward()
    found = [x[None] if case.packed else x for x in (out, q.grad, k.grad, v.grad)]
    return [found[0].detach(), rows.detach(), *found[1:]]


def gather(case: Case, rank: int, world: int, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the whole tensors, on every rank."""
    whole = []
    for x in found:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        whole.append(merge(case, parts))
    return whole


def check(case: Case, world: int, whole: list[torch.Tensor]) -> None:
    """Checks each sequence by the tolerance rule, against the reference of the whole sequence."""
    start = 0
    for length in case.lengths:
        rows = slice(start, start + length * world)
        start = rows.stop
        out, lse, dq, dk, dv = (x[:, rows] for x in whole)
        q, k, v, dout, dlse = (x[:, rows] for x in inputs(case, world))
        options = {"causal": case.causal, "window_size": case.window}
        if length:
            lse, dlse = lse.transpose(1, 2), dlse.transpose(1, 2)
            testing.check_forward(out, lse, q, k, v, **options)
            gradients = {"dq": dq, "dk": dk, "dv": dv}
            testing.check_backward(gradients, q, k, v, dout, dlse=dlse, **options)


def all_cases(rank: int, world: int) -> dict[str, str]:
    """Returns what is wrong with each case. All ranks run the cases in the same order."""
    wrong = {}
    for case in CASES:
        whole = gather(case, rank, world, compute(case, rank, world))
        try:
            if rank == 0:
                check(case, world, whole)
            wrong[str(case)] = ""
        except AssertionError:
            wrong[str(case)] = traceback.format_exc()
    return wrong


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns what is wrong, by the number of processes and the case."""
    found = {}
    for world in (2, 4):
        outcomes = ranks.run(all_cases, world, tmp_path_factory.mktemp("store"))
        for outcome in outcomes:
            assert not outcome.error, outcome.error
            assert outcome.exitcode == 0
        found[world] = outcomes[0].value
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_it_is_attention_of_the_whole_sequence(results, world, case):
    assert not results[world][str(case)], results[world][str(case)]


def other_ways(rank: int, world: int) -> dict[str, object]:
    """Returns results of two processes that are not compared with the reference."""
    found: dict[str, object] = {}
    alone = [dist.new_group([r]) for r in range(world)][rank]
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for scheme in ("ring", "allgather"):
        case = Case(scheme, (128,))
        first, second = (compute(case, rank, world, True) for _ in range(2))
        found[f"{scheme} repeats"] = all(map(torch.equal, first, second))
        q, k, v = (split(case, x, rank, world) for x in inputs(case, world)[:3])
        function = getattr(fd, f"{scheme}_flash_attn_func")
        for name, group in {"mesh": mesh, "its dimension": mesh["cp"], "world": None}.items():
            out = function(q, k, v, causal=True, group=group)
            found[f"{scheme} of the {name}"] = torch.equal(out, first[0])
        out = function(q, k, v, causal=True, group=alone)
        expected = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[0]
        found[f"{scheme} alone"] = torch.equal(out, expected)
        compiled = torch.compile(lambda *x, f=function: f(*x, causal=True) + 1, backend="eager")
        found[f"{scheme} compiled"] = torch.equal(compiled(q, k, v), first[0] + 1)
        found[f"{scheme} errors"] = errors(function, q, k, v, rank)
        found[f"{scheme} after them"] = torch.equal(function(q, k, v, causal=True), first[0])
    return found


def errors(function, q, k, v, rank: int) -> list[str]:
    """Returns the messages of calls that differ between the ranks."""

    def message(*args, **options) -> str:
        try:
            function(*args, **options)
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    short = [x[:, : x.shape[1] - 2 * rank] for x in (q, k, v)]
    few = [x[:, :, : x.shape[2] // (1 + rank)] for x in (q, k, v)]
    with_gradient = q.clone().requires_grad_(rank == 1)
    return [
        message(*short),
        message(*few, causal=True),
        message(*(x.to((torch.bfloat16, torch.float16)[rank]) for x in (q, k, v))),
        message(q, k, v, causal=rank == 0),
        message(q, k, v, window_size=(3 + rank, 0)),
        message(q, k, v, softmax_scale=(0.5, 0.25)[rank]),
        message(q, k, v, causal=True, order=("zigzag", "contiguous")[rank]),
        message(with_gradient, k, v),
    ]


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    outcomes = ranks.run(other_ways, 2, tmp_path_factory.mktemp("store"))
    for outcome in outcomes:
        assert not outcome.error, outcome.error
    return [outcome.value for outcome in outcomes]


SAME = ["repeats", "of the mesh", "of the its dimension", "of the world", "alone", "compiled"]


@pytest.mark.parametrize("way", [*SAME, "after them"])
@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_the_same_bits(ways, scheme, way):
    assert [found[f"{scheme} {way}"] for found in ways] == [True, True]


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_calls_that_differ_are_refused_on_all_ranks(ways, scheme):
    messages = [found[f"{scheme} errors"] for found in ways]
    assert messages[0] == messages[1]
    for message, (name, here, there) in zip(
        messages[0],
        [
            ("number of tokens on a rank", "128", "126"),
            ("query heads", "4", "2"),
            ("dtype", "bfloat16", "float16"),
            ("causal", "True", "False"),
            ("left side of the window", "3", "4"),
            ("softmax_scale", "0.5", "0.25"),
            ("choice of the zigzag order", "True", "False"),
            ("need of a gradient", "False", "True"),
        ],
        strict=True,
    ):
        assert message.startswith(
            f"{scheme}_flash_attn_func: expected the same {name} on all ranks of the group, got "
            f"{here} on rank 0, {there} on rank 1; "
        ), message


def in_a_mesh(rank: int, world: int) -> list[bool]:
    """Returns whether each dimension of a 2-D mesh computes its own sequence, for both schemes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found = []
    for name, other in (("dp", "cp"), ("cp", "dp")):
        place, sequence = mesh.get_local_rank(name), mesh.get_local_rank(other)
        generator = torch.Generator().manual_seed(sequence)
        q, dout = (torch.randn(1, 64, 2, 16, generator=generator) for _ in range(2))
        whole = q.clone().requires_grad_()
        expected = flash_attn_func(whole, whole, whole, causal=True)
        (gradient,) = torch.autograd.grad(expected, whole, dout)
        for scheme in ("ring", "allgather"):
            x = fd.zigzag_split(q, place, 2).requires_grad_()
            out = getattr(fd, f"{scheme}_flash_attn_func")(x, x, x, causal=True, group=mesh[name])
            ours = out, *torch.autograd.grad(out, x, fd.zigzag_split(dout, place, 2))
            theirs = (fd.zigzag_split(y.detach(), place, 2) for y in (expected, gradient))
            pairs = zip(ours, theirs, strict=True)
            found.append(all(torch.allclose(a, b, atol=1e-5) for a, b in pairs))
    return found


def test_each_dimension_of_a_mesh_is_a_group(tmp_path):
    for outcome in ranks.run(in_a_mesh, 4, tmp_path):
        assert outcome.value == [True] * 4, outcome.error


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


X = torch.zeros(1, 6, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X[:, :4], X[:, :4]), {}, ValueError, "expected as many keys as queries on a rank"),
        ((X, X, X), {"order": "striped"}, ValueError, "zigzag, contiguous, got order='striped'"),
        ((X[:, :5],) * 3, {"causal": True}, ValueError, "even number of tokens"),
        ((X, X, X), {"group": 3}, TypeError, "a DeviceMesh or None, got group of type int"),
        ((X, X, X), {"causal": 1}, TypeError, "expected causal to be a bool, got causal=1"),
        ((X, X, X), {"return_lse": 1}, TypeError, "expected return_lse to be a bool"),
        ((X, X, X), {"deterministic": None}, TypeError, "expected deterministic to be a bool"),
        ((X, X, X), {"window_size": (-2, 0)}, ValueError, "expected window_size of two ints"),
        ((X.long(),) * 3, {}, TypeError, "expected q.dtype"),
        ((X.to("meta"),) * 3, {}, NotImplementedError, "on the CPU or on CUDA, got q.device=meta"),
        ((X[0],) * 3, {}, ValueError, "expected q of shape"),
    ],
)
@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_wrong_arguments(one_process, scheme, arguments, options, error, message):
    function = getattr(fd, f"{scheme}_flash_attn_func")
    with pytest.raises(error, match=f"^{scheme}_flash_attn_func: .*{message}"):
        function(*arguments, **options)


@pytest.mark.parametrize("cu_seqlens", [[0], [1, 6], [0, 4], [0, 5, 4, 6], [0, 7]])
@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_wrong_lengths(one_process, scheme, cu_seqlens):
    function = getattr(fd, f"{scheme}_flash_attn_varlen_func")
    with pytest.raises(
        ValueError, match=f"^{scheme}_flash_attn_varlen_func: expected .*cu_seqlens"
    ):
        function(X[0], X[0], X[0], cu_seqlens)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (None, "cu_seqlens to be .*, got cu_seqlens of type NoneType"),
        (6, "cu_seqlens to be .*, got cu_seqlens of type int"),
        ([0, 6.0], r"cu_seqlens\[1\] to be an int, got cu_seqlens\[1\]=6.0"),
        ([0, None], r"cu_seqlens\[1\] to be an int, got cu_seqlens\[1\]=None"),
        ([0, True, 6], r"cu_seqlens\[1\] to be an int, got cu_seqlens\[1\]=True"),
        (torch.tensor(6), "got cu_seqlens of type Tensor"),
        (torch.tensor([0.0, 6.0]), r"cu_seqlens\[0\] to be an int, got cu_seqlens\[0\]=0.0"),
        (torch.tensor([0, 6], device="meta"), "got cu_seqlens of type Tensor"),
        (torch.tensor([0, 6]).to_sparse(), "got cu_seqlens as a tensor of layout"),
    ],
)
@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_lengths_of_another_kind(one_process, scheme, cu_seqlens, message):
    function = getattr(fd, f"{scheme}_flash_attn_varlen_func")
    with pytest.raises(TypeError, match=f"^{scheme}_flash_attn_varlen_func: expected .*{message}"):
        function(X[0], X[0], X[0], cu_seqlens)


@pytest.mark.parametrize("transform", [torch.func.vjp, torch.func.linearize, torch.vmap])
@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_transforms_are_refused(one_process, scheme, transform):
    function = getattr(fd, f"{scheme}_flash_attn_func")
    with pytest.raises(NotImplementedError, match=f"^{scheme}_flash_attn_func: expected no trans"):
        if transform is torch.vmap:
            transform(lambda q: function(q, X, X))(X[None])
        else:
            transform(lambda q: function(q, X, X), X)


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_a_graph_in_one_piece_says_why_it_breaks(one_process, scheme):
    function = getattr(fd, f"{scheme}_flash_attn_func")
    compiled = torch.compile(lambda x: function(x, x, x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=rf"{scheme}_flash_attn_func[^\n]*compares shapes"
    ):
        compiled(X)


def test_a_mesh_of_two_dimensions_is_refused(one_process):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    with pytest.raises(TypeError, match=r"got one of 2, \('dp', 'cp'\); pass one dimension"):
        fd.ring_flash_attn_func(X, X, X, group=mesh)


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group"):
        fd.ring_flash_attn_func(X, X, X)


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_a_second_derivative_is_refused(one_process, scheme):
    q = X.clone().requires_grad_()
    out = getattr(fd, f"{scheme}_flash_attn_func")(q, X, X)
    message = f"^{scheme}_flash_attn_func: expected first derivatives, .* create_graph=True"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("scheme", ["ring", "allgather"])
def test_empty_tensors(one_process, scheme):
    q = torch.zeros(1, 0, 2, 8, requires_grad=True)
    out, lse = getattr(fd, f"{scheme}_flash_attn_func")(q, q, q, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (1, 2, 0)
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    ("h_k", "size", "count"),
    [(8, 2**26, 1), (8, 2**27 - 1, 1), (8, 2**27, 2), (8, 2**29, 4), (1, 2**30, 1), (3, 2**27, 1),
     (3, 2**30, 3), (5, 2**30, 1), (6, 2**28, 3)],
)  # fmt: skip
def test_groups_of_heads_have_bytes_enough(h_k, size, count):
    groups = allgather.head_groups(4 * h_k, h_k, size)
    assert len(groups) == count
    for i, heads in enumerate(zip(*groups, strict=True)):
        h = (4 * h_k, h_k)[i]
        assert [n for x in heads for n in range(x.start, x.stop)] == list(range(h))
