"""Dropout in the backward of the sm80 class: the forward's mask, drawn again."""

import dataclasses

import mutants_bwd_dropout
import pytest
import tiers
import torch
from backward import GRADIENTS, SHAPES, check, compare, make_problem, passed, same, with_mask
from mutants_bwd_dropout import DIVIDED, SPLIT, TOGETHER
from planted import build_mutants

from flashcute import heuristics, sim
from flashcute.config import DTYPES, HEAD_DIMS, MASKS
from flashcute.dropout import dropout_mask

EACH = (TOGETHER, SPLIT, DIVIDED)
CONFIGS = [with_mask(config, mask) for config in EACH[:2] for mask in MASKS] + [DIVIDED]
EVERY = mutants_bwd_dropout.MUTANTS
PLANTED = EVERY if tiers.everything else EVERY[:4]
COMPILED = [(config, "none") for config in CONFIGS]
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
STATE = torch.tensor([2**62 + 12345, -77])


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


def make(config, shape, dropout_p=0.3, **options):
    """Returns a problem whose options are those of the reference, the dropout mask among them."""
    problem = make_problem(config, shape, **options)
    b, seqlen_q, seqlen_k, h, _ = shape
    mask = dropout_mask(STATE, b, h, seqlen_q, seqlen_k, dropout_p)
    rounded = round(dropout_p * 2**16) / 2**16
    asked = {"dropout_p": rounded, "dropout_mask": mask}
    return dataclasses.replace(problem, options={**problem.options, **asked})


def run(problem, config, **options):
    dropout_p = problem.options["dropout_p"]
    return problem.run(config, rng_state=STATE, dropout_p=dropout_p, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.full_name)
def test_gradients(config, shape):
    """Gradients with sinks and a gradient of the log-sum-exp."""
    problem = make(config, shape, extras=True)
    check(problem, run(problem, config))


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.5, 0.98])
@pytest.mark.parametrize("config", EACH, ids=lambda c: c.full_name)
def test_probabilities(config, dropout_p):
    problem = make(config, SHAPES[1], dropout_p)
    check(problem, run(problem, config))


@pytest.mark.parametrize("config", EACH, ids=lambda c: c.full_name)
def test_every_bit_of_the_mask(config):
    """Scores are equal, and dO of query i is the unit vector i, so that column i of dV shows which
    keys query i keeps."""
    config = with_mask(config, "none") if config is TOGETHER else config
    seqlen_q, seqlen_k, h = config.head_dim, 150, 3
    problem = make(config, (2, seqlen_q, seqlen_k, h, h), 0.5)
    unit = torch.eye(seqlen_q)[None, :, None].expand(2, -1, h, -1)
    wide = torch.zeros(2, seqlen_k, h, seqlen_q)
    given = {"q": torch.zeros(unit.shape), "k": torch.ones(wide.shape), "v": wide, "dout": unit}
    given = {name: x.to(problem.q.dtype).contiguous() for name, x in given.items()}
    problem = dataclasses.replace(problem, **given)
    result = passed(run(problem, config))
    kept = problem.options["dropout_mask"]
    if problem.options["causal"]:
        kept = kept & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    assert torch.equal(result.outputs["dv"] != 0, kept.permute(0, 3, 1, 2))


@pytest.mark.parametrize("config", EACH, ids=lambda c: c.full_name)
def test_every_schedule_gives_the_same_bits(config):
    problem = make(config, (2, 70, 100, 2, 1), extras=True)
    first = passed(run(problem, config))
    again = passed(run(problem, config, seed=5, copy_mode="random", sms=2))
    assert same(first, again, (*GRADIENTS, "dsinks")) and first.counters == again.counters


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_are_silent(checker):
    problem = make(TOGETHER, (1, 70, 100, 2, 1), extras=True)
    check(problem, run(problem, TOGETHER, checker=checker))


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_use(dtype, head_dim):
    for mask in MASKS:
        for kind in (heuristics.bwd_config, heuristics.fused_bwd_config):
            config = heuristics.bwd_with_options(kind(dtype, head_dim, mask), dropout=True)
            problem = make(config, (1, 130, 150, 2, 1), extras=True)
            check(problem, run(problem, config))


def test_options_must_be_those_of_the_kernels():
    problem = make(TOGETHER, (1, 8, 8, 1, 1))
    with pytest.raises(ValueError, match=r"dropout_p=0.0 for a kernel with .*dropout=True"):
        problem.run(TOGETHER)


# Several batch entries, heads in groups, several tiles and blocks, and odd lengths.
MUTANT_SHAPE = (2, 150, 133, 4, 2)


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, planted):
    problem = make(mutant.config, MUTANT_SHAPE, extras=True)
    result = run(problem, mutant.config, kernel=planted[mutant.name], timeout=120)
    assert not all(report.ok for report in compare(problem, result).values())


@pytest.mark.parametrize("config", EACH, ids=lambda c: c.full_name)
def test_unmutated_kernels_pass_the_same_checks(config):
    problem = make(config, MUTANT_SHAPE, extras=True)
    check(problem, run(problem, config))
