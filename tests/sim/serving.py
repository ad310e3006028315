"""Makes queries over a KV cache, runs them in the simulator and checks all rows."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from problems import DTYPES, outweigh
from ragged import starts

from flashcute import sim
from flashcute.jit.abi import NOT_SPLIT
from flashcute.testing import check_forward

MAX_INT = 2**31 - 1


@dataclasses.dataclass
class Problem:
    """Queries, and a cache that is NaN wherever it holds no key or value of a sequence.

    Attributes:
        tensors: The tensors that ``run_serving`` takes by name.
        keys, values: (n, h_k, d) of each sequence.
        lengths: Number of queries of each sequence.
    """

    tensors: dict[str, torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: tuple[int, ...]

    @property
    def q(self) -> torch.Tensor:
        return self.tensors["q"]


def _tokens(config, lengths, h, h_k, seed, scale, nats=None):
    generator = torch.Generator().manual_seed(seed)
    d = config.head_dim - 8
    sizes = [(sum(lengths[0]), h, d), *((n, h_k, d) for n in lengths[1] for _ in "kv")]
    q, *rest = (torch.randn(x, generator=generator).to(DTYPES[config.dtype]) for x in sizes)
    if nats is not None:
        for k, v in zip(rest[::2], rest[1::2], strict=True):
            outweigh(q, k, v, nats)
    return generator, scale * q, rest[::2], rest[1::2]


def _problem(config, lengths, q, keys, values, cache, used, **more):
    tensors = {"q": q, **dict(zip("kv", cache, strict=True)), "cu_seqlens_q": starts(lengths[0])}
    tensors["seqused_k"] = torch.tensor(used, dtype=torch.int32)
    return Problem(tensors | more, keys, values, lengths[0])


def paged(
    config,
    lengths,
    page_size,
    h=4,
    h_k=2,
    seed=0,
    scale=1.0,
    columns=2,
    heads_first=False,
    nats=None,
):
    """Returns a problem with a cache in pages, in random order. The table has ``columns`` more
    columns than the longest sequence has pages; entries behind a sequence's last page are random
    numbers. ``heads_first``: pages are laid out as (h_k, page_size, d). ``nats``: as for
    :func:`outweigh`."""
    generator, q, keys, values = _tokens(config, lengths, h, h_k, seed, scale, nats)
    used = [-(-n // page_size) for n in lengths[1]]
    shape = sum(used) + 2, page_size, h_k, q.shape[2]
    if heads_first:
        shape = shape[0], h_k, page_size, shape[3]
    cache = [q.new_full(shape, torch.nan) for _ in "kv"]
    if heads_first:
        cache = [x.transpose(1, 2) for x in cache]
    numbers = iter(torch.randperm(shape[0], generator=generator).tolist())
    size = len(used), max(used) + columns
    table = torch.randint(-MAX_INT - 1, MAX_INT, size, generator=generator, dtype=torch.int32)
    for i, j in ((i, j) for i, n in enumerate(used) for j in range(n)):
        table[i, j] = page = next(numbers)
        for x, tokens in zip(cache, (keys[i], values[i]), strict=True):
            piece = tokens[j * page_size : (j + 1) * page_size]
            x[page, : len(piece)] = piece
    return _problem(config, lengths, q, keys, values, cache, lengths[1], block_table=table)


def contiguous(config, lengths, h=4, h_k=2, seed=0, scale=1.0, leftpad=None, nats=None):
    """Returns a problem with a contiguous cache, some of whose entries belong to no sequence; the
    sequences' entries are in reverse order."""
    _, q, keys, values = _tokens(config, lengths, h, h_k, seed, scale, nats)
    b = len(keys)
    pads = leftpad or (0,) * b
    used = [pad + n for pad, n in zip(pads, lengths[1], strict=True)]
    cache = [q.new_full((b + 2, max(used) + 7, h_k, q.shape[2]), torch.nan) for _ in "kv"]
    entries = torch.tensor([b + 1 - i for i in range(b)], dtype=torch.int32)
    for i, entry in enumerate(entries):
        for x, tokens in zip(cache, (keys[i], values[i]), strict=True):
            x[entry, pads[i] : used[i]] = tokens
    more = {"cache_batch_idx": entries}
    if leftpad is not None:
        more["leftpad_k"] = torch.tensor(leftpad, dtype=torch.int32)
    return _problem(config, lengths, q, keys, values, cache, used, **more)


def run(config, problem, splits=NOT_SPLIT, **options):
    options = {"max_seqlen_q": max(problem.lengths), "sms": 2} | options
    return sim.run_serving(config=config, splits=splits, **problem.tensors, **options)


def check(result, config, problem, **options):
    """Compares each sequence with the reference. ``alibi_slopes``: (b, h). ``dropout_mask``: (b, h,
    rows, keys), as long as the longest sequence or longer."""
    assert result.verdict == "pass", result.message
    slopes, mask = (options.pop(name, None) for name in ("alibi_slopes", "dropout_mask"))
    bounds = itertools.pairwise(starts(problem.lengths).tolist())
    for i, (begin, end) in enumerate(bounds):
        if end > begin:
            of_one = options if slopes is None else options | {"alibi_slopes": slopes[i]}
            out, lse = result.out[begin:end][None], result.lse[:, begin:end][None]
            one = problem.q[begin:end][None], problem.keys[i][None], problem.values[i][None]
            if mask is not None:
                n, m = end - begin, len(problem.keys[i])
                of_one = of_one | {"dropout_mask": mask[i, :, :n, :m]}
            check_forward(out, lse, *one, causal=config.mask == "causal", **of_one)


def planned(result):
    """Returns (block, row_q, row_k, seqlen_q, seqlen_k, entry, part, parts, partial row) of each
    tile of the plan, and the number of positions that are split."""
    plan = result.outputs["plan"]
    tiles = plan[4 : 4 + 8 * int(plan[0])].view(-1, 8).tolist()
    return [(*t[:6], t[6] // 2**16, t[6] % 2**16, t[7]) for t in tiles], int(plan[1])


def garbage(shape, seed):
    """Returns random integers, some of which are valid lengths, entries or pages."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-MAX_INT - 1, MAX_INT, shape, generator=generator, dtype=torch.int32)
    x.view(-1)[::3] %= 9
    x.view(-1)[1::7] = MAX_INT
    return x
