"""Softcap, ALiBi and dropout in the backward of the sm90 class, dense and ragged."""

import dataclasses
import functools
import itertools
import re

import mutants_bwd_options_sm90
import pytest
import tiers
import torch
from backward import SHAPES, check, compare, passed, same
from backward_options import (
    BATCHES,
    DROPOUT_P,
    HOSTILE,
    STATE,
    asking,
    check_shared_slopes,
    check_slopes_of_zero,
    check_that_infinity_stays,
    make_dense,
    make_hostile,
    make_ragged,
    run_dense,
)
from bwd_checks import ASCENDING, check_short_tiles_of_long_heads
from mutants_bwd_options_sm90 import (
    CAPPED,
    CAPPED_WIDE,
    DROPPED,
    DROPPED_64,
    DROPPED_AND_CAPPED,
    DROPPED_WIDE,
    SLOPED,
    SLOPED_AND_CAPPED,
)
from mutants_bwd_sm90 import COLUMNS, NARROWEST, ROWS, UNEVEN
from mutants_bwd_wide_sm90 import WIDE
from planted import build_mutants

from flashcute import sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS
from flashcute.dropout import dropout_mask
from flashcute.heuristics import bwd_with_options, sm90_bwd_config

OPTIONS = ("softcap", "alibi", "dropout")
SOME = [some for n in (1, 2, 3) for some in itertools.combinations(OPTIONS, n)]
# Each main loop with each option, and with several; with some of them CTAs share tiles, whose sums
# of dV are rescaled.
DENSE = (
    *(asking(ROWS, "local", *OPTIONS), SLOPED, DROPPED_64, asking(NARROWEST, "none", "softcap")),
    *(CAPPED, SLOPED_AND_CAPPED, DROPPED, asking(UNEVEN, "none", "dropout")),
    *(CAPPED_WIDE, asking(WIDE, "none", "alibi"), DROPPED_AND_CAPPED, DROPPED_WIDE),
)
RAGGED = (
    *(asking(ROWS, "causal", "softcap", "varlen"), asking(WIDE, "none", *OPTIONS, "varlen")),
    *(asking(COLUMNS, "local", "alibi", "varlen"), asking(WIDE, "causal", "alibi", "varlen")),
    *(asking(ROWS, "none", "dropout", "varlen"), asking(COLUMNS, "causal", *OPTIONS, "varlen")),
)
# All options at once under a causal mask, up to d = 128: above it no tile begins at the diagonal.
SEVERAL = (asking(COLUMNS, "causal", *OPTIONS), asking(ROWS, "causal", *OPTIONS))
# The kernel without options, with which others are compared.
PLAIN = dataclasses.replace(SLOPED, alibi=False)
OF_RAGGED = [dataclasses.replace(config, varlen=False) for config in RAGGED]
COMPILED = [(config, "none") for config in (*DENSE, *RAGGED, *OF_RAGGED, *SEVERAL, PLAIN)]
DROPPING = [config for config in DENSE if config.dropout]
CAPPING = [config for config in DENSE if config.softcap]
EVERY = mutants_bwd_options_sm90.MUTANTS
PLANTED = tiers.faults(EVERY)
MUTANT_SHAPE = (2, 150, 133, 4, 2)

each = pytest.mark.parametrize("config", DENSE, ids=lambda c: c.full_name)
each_ragged = pytest.mark.parametrize("config", RAGGED, ids=lambda c: c.full_name)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@each
def test_gradients(config, shape):
    """Gradients with sinks and a gradient of the log-sum-exp."""
    problem = make_dense(config, shape)
    check(problem, run_dense(problem, config, copy_mode="random"))


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: "-".join(map(str, b[0])) or "none")
@each_ragged
def test_gradients_of_ragged_batches(config, batch):
    problem = make_ragged(config, batch)
    problem.check(problem.run(config, copy_mode="random"))


@pytest.mark.parametrize("parts", [1, 2])
@each_ragged
def test_gradients_of_ragged_batches_are_repeatable(config, parts):
    """Some sequences have several tiles of keys. With two parts a key head's query heads are
    divided."""
    problem = make_ragged(config, ((140, 300, 1), (300, 260, 70)))
    ordered = functools.partial(problem.run, config, deterministic=True, head_parts=parts)
    result = ordered(sms=4)
    problem.check(result)
    again = ordered(sms=2, copy_mode="eager", seed=3)
    assert same(passed(again), result, ("dq", "dk", "dv"))


@pytest.mark.parametrize("deterministic", [False, True])
@each
def test_several_tiles_of_keys(config, deterministic):
    """Query heads and CTAs share the tiles of keys; sums of dQ have a fixed order or none."""
    problem = make_dense(config, (1, 300, 400, 4, 2))
    result = run_dense(problem, config, deterministic=deterministic, sms=4)
    check(problem, result)
    if deterministic:
        again = run_dense(problem, config, deterministic=True, sms=2, copy_mode="eager", seed=3)
        assert same(passed(again), result, ("dq",))


@pytest.mark.parametrize("config", SEVERAL, ids=lambda c: c.full_name)
def test_short_tiles_of_long_heads_begin_at_the_diagonal(config):
    problem = make_dense(config, ASCENDING)
    run = functools.partial(run_dense, problem, config)
    check_short_tiles_of_long_heads(config, problem, run)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    "config", [CAPPED, DROPPED, SLOPED, DROPPED_WIDE, *SEVERAL], ids=lambda c: c.full_name
)
def test_query_heads_in_parts(config, parts):
    """Each head keeps its own slope and its own dropout mask; sums of dV are rescaled as dV is."""
    problem = make_dense(config, (2, 100, 150, 8, 2))
    check(problem, run_dense(problem, config, head_parts=parts))


@pytest.mark.parametrize("cap", [0.01, 5.0, 50.0])
@pytest.mark.parametrize("config", CAPPING, ids=lambda c: c.full_name)
def test_scores_far_beyond_the_cap(config, cap):
    """Scores far beyond the cap have a derivative of nearly 0."""
    problem = make_dense(config, (1, 100, 150, 2, 1), softcap=cap)
    problem = dataclasses.replace(problem, q=30 * problem.q)
    check(problem, run_dense(problem, config))


@pytest.mark.parametrize("config", CAPPING, ids=lambda c: c.full_name)
def test_softcap_far_beyond_the_scores_is_none(config):
    problem = make_dense(config, (2, 100, 150, 4, 2), softcap=1e6)
    result = run_dense(problem, config)
    without = {name: x for name, x in problem.options.items() if name != "softcap"}
    check(dataclasses.replace(problem, options=without), result)


def test_slopes_of_zero_equal_none():
    check_slopes_of_zero(SLOPED)


def test_slopes_that_all_entries_share():
    check_shared_slopes(SLOPED)


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.5, 0.98])
@pytest.mark.parametrize("config", DROPPING, ids=lambda c: c.full_name)
def test_probabilities(config, dropout_p):
    problem = make_dense(config, (2, 100, 150, 4, 2), **dropped(dropout_p, 2, 4, 100, 150))
    check(problem, run_dense(problem, config, dropout_p=dropout_p))


def dropped(dropout_p, *sizes):
    mask = dropout_mask(STATE, *sizes, dropout_p)
    return {"dropout_p": round(dropout_p * 2**16) / 2**16, "dropout_mask": mask}


@pytest.mark.parametrize("config", DROPPING, ids=lambda c: c.full_name)
def test_every_bit_of_the_mask(config):
    """Scores are equal. dO of d queries at a time is the unit vector of the query's number, and 0
    for all other queries, so that the columns of dV show which keys these queries keep."""
    d, seqlen_k, h = config.head_dim, 300, 3
    n = max(d, config.dkv.step)
    problem = make_dense(config, (2, n, seqlen_k, h, h), **dropped(DROPOUT_P, 2, h, n, seqlen_k))
    wide = torch.zeros(2, seqlen_k, h, d)
    given = {"q": torch.zeros(2, n, h, d), "k": torch.ones(wide.shape), "v": wide}
    kept = problem.options["dropout_mask"]
    if config.mask != "none":
        left, right = problem.options["window_size"]
        diagonal = torch.arange(n)[:, None] + seqlen_k - n
        keys = torch.arange(seqlen_k)
        kept = kept & (keys <= diagonal + max(right, 0))
        if left >= 0:
            kept = kept & (keys >= diagonal - left)
    for first in range(0, n, d):
        given["dout"] = torch.zeros(2, n, h, d)
        given["dout"][:, first : first + d] = torch.eye(d)[None, :, None]
        of_dtype = {name: x.to(problem.q.dtype) for name, x in given.items()}
        result = passed(run_dense(dataclasses.replace(problem, **of_dtype), config))
        expected = kept[:, :, first : first + d].permute(0, 3, 1, 2)
        assert torch.equal(result.outputs["dv"] != 0, expected), first


@each_ragged
def test_equal_lengths_equal_a_dense_batch(config):
    """dK and dV, whose sums have one order, are equal bit for bit, all else within tolerance."""
    batch = ((200, 200), (300, 300))
    ragged = make_ragged(config, batch, h=4, h_k=2, more=0)
    result = ragged.run(config)
    ragged.check(result)
    dense = dataclasses.replace(config, varlen=False)
    problem = make_dense(dense, (2, 200, 300, 4, 2))
    options = {**problem.options, **ragged.options}
    tensors = {
        name: getattr(ragged, name).unflatten(0, (2, -1)) for name in ("q", "k", "v", "dout")
    }
    dlse = ragged.dlse.unflatten(1, (2, -1)).transpose(0, 1).contiguous()
    problem = dataclasses.replace(problem, **tensors, dlse=dlse, options=options)
    expected = passed(run_dense(problem, dense))
    for name in ("dk", "dv"):
        assert torch.equal(result.outputs[name], expected.outputs[name].flatten(0, 1)), name


@pytest.mark.parametrize("lengths", HOSTILE)
@pytest.mark.parametrize("config", RAGGED[::2], ids=lambda c: c.full_name)
def test_values_that_are_no_lengths(config, lengths):
    passed(make_hostile(config, lengths).run(config))


@each_ragged
def test_infinity_stays_in_its_sequence(config):
    check_that_infinity_stays(config)


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("options", SOME, ids="-".join)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim, options):
    for mask in MASKS:
        asked = dict.fromkeys(options, True)
        config = bwd_with_options(sm90_bwd_config(dtype, head_dim, mask), **asked)
        problem = make_dense(config, (1, 130, 150, 2, 1))
        check(problem, run_dense(problem, config))


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    problem = make_dense(mutant.config, MUTANT_SHAPE)
    result = run_dense(problem, mutant.config, kernel=planted[mutant.name], timeout=120)
    if mutant.finder == "simulator":
        assert result.verdict != "pass" and re.search(mutant.report, result.message)
    else:
        assert not all(report.ok for report in compare(problem, passed(result)).values())


@pytest.mark.parametrize(
    "config",
    sorted({mutant.config for mutant in EVERY}, key=lambda config: config.full_name),
    ids=lambda c: c.full_name,
)
def test_unmutated_kernels_pass_the_same_checks(config):
    problem = make_dense(config, MUTANT_SHAPE)
    check(problem, run_dense(problem, config))
