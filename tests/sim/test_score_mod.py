"""Softcap and ALiBi in both kernel classes, dense and ragged."""

import dataclasses
import re

import mutants_score
import pytest
import ragged
import tiers
import torch
from mutants import ONE_STAGE, TWO_STAGES
from mutants_score import CAPPING, SM80, SM90
from mutants_sm90 import ASKING, STRIDING
from planted import build_mutants
from problems import DTYPES

from flashcute import sim
from flashcute.config import FwdConfig
from flashcute.testing import check_forward

replace = dataclasses.replace
UNMASKED = replace(STRIDING, softcap=True, alibi=True)
SLOPED = (replace(ONE_STAGE, alibi=True), replace(ASKING, alibi=True))
CONFIGS = (SM80, SM90, UNMASKED, CAPPING, *SLOPED)
if tiers.everything:
    CONFIGS += (replace(TWO_STAGES, softcap=True), replace(STRIDING, softcap=True))
    CONFIGS += (replace(ONE_STAGE, mask="none", softcap=True, alibi=True),)
PLANTED = mutants_score.MUTANTS if tiers.everything else mutants_score.OF_SM80
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
COMPILED = [(config, "none") for config in (*CONFIGS, ONE_STAGE, ASKING)]
WINDOW = (150, 60)
# (b, seqlen_q, seqlen_k, h, h_k): several tiles and blocks; distances that are all large, or rows
# that see no key; one query.
SHAPES = ((2, 150, 200, 4, 2), (1, 200, 63, 2, 2), (1, 1, 300, 2, 1))
BATCH = ((130, 1, 0, 64, 200), (130, 77, 50, 0, 33))


def ids(config):
    return config.full_name


both = pytest.mark.parametrize("config", (SM80, SM90), ids=ids)
every = pytest.mark.parametrize("config", (SM80, SM90, CAPPING), ids=ids)
capped = pytest.mark.parametrize("config", (SM80, UNMASKED, CAPPING), ids=ids)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


def options_of(config: FwdConfig, b: int, h: int) -> dict[str, object]:
    """Returns options for which scores exceed the cap; each batch entry and head has its own
    slope."""
    options: dict[str, object] = {}
    if config.softcap:
        options["softcap"] = 1.5
    if config.alibi:
        options["alibi_slopes"] = torch.arange(1, b * h + 1).view(b, h) / 16
    if config.mask == "local":
        options["window_size"] = WINDOW
    return options


def no_slopes(config) -> dict[str, torch.Tensor]:
    return {"alibi_slopes": torch.zeros(1, 2)} if config.alibi else {}


def make_qkv(config, shape, factor=1.0):
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator().manual_seed(0)
    d = config.head_dim - 8
    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return [x.to(DTYPES[config.dtype]) for x in (factor * q, k, v)]


def check(config, qkv, simulator=None, check_drift=True, **options):
    """Runs a dense batch, and compares it with the reference."""
    result = sim.run_fwd(*qkv, config, sms=2, **options, **simulator or {})
    assert result.verdict == "pass", result.message
    causal = config.mask == "causal"
    check_forward(result.out, result.lse, *qkv, causal=causal, check_drift=check_drift, **options)
    return result


@pytest.mark.parametrize("packed", [False, True], ids=("", "packed"))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_results(config, shape, packed):
    options = options_of(config, shape[0], shape[3])
    check(config, make_qkv(config, shape), {"pack_heads": packed}, **options)


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_ragged_batches(config):
    """Each sequence has its own slopes, and rows behind the sequences are NaN."""
    qkv = ragged.make_qkv(config, BATCH)
    options = options_of(config, len(BATCH[0]), 4)
    ragged.check(ragged.run(config, qkv, BATCH, **options), config, qkv, BATCH, **options)


@both
def test_ragged_batches_of_packed_heads_with_sinks(config):
    """Three packed heads take four rows. Sinks are neither capped nor lowered by slopes."""
    qkv = ragged.make_qkv(config, BATCH, h=6)
    options = options_of(config, len(BATCH[0]), 6)
    options["sinks"] = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -1.0])
    result = ragged.run(config, qkv, BATCH, pack_heads=True, **options)
    ragged.check(result, config, qkv, BATCH, **options)


@pytest.mark.parametrize("base", [ONE_STAGE, ASKING], ids=ids)
def test_slopes_of_zero_equal_none(base):
    """Bit for bit."""
    qkv = make_qkv(base, (1, 200, 150, 2, 1), 4)
    plain = sim.run_fwd(*qkv, base, sms=2)
    slopes = torch.zeros(1, 2)
    result = sim.run_fwd(*qkv, replace(base, alibi=True), alibi_slopes=slopes, sms=2)
    assert torch.equal(result.out, plain.out) and torch.equal(result.lse, plain.lse)


@pytest.mark.parametrize("cap", [1e6, 1e15])
@capped
def test_a_cap_far_beyond_the_scores_equals_none(config, cap):
    qkv = make_qkv(config, (1, 200, 150, 2, 1))
    options = options_of(config, 1, 2) | {"softcap": cap}
    result = sim.run_fwd(*qkv, config, sms=2, **options)
    assert result.verdict == "pass", result.message
    check_forward(result.out, result.lse, *qkv, **options | {"softcap": 0.0})


@pytest.mark.parametrize("cap", [8.0, 50.0, 1e4])
@capped
def test_scores_below_the_cap(config, cap):
    """All scores are below 0.28 of the cap, or some are beyond that."""
    options = options_of(config, 1, 2) | {"softcap": cap, **no_slopes(config)}
    check(config, make_qkv(config, (1, 200, 300, 2, 1)), **options)


@pytest.mark.parametrize("large", [slice(0, 40), slice(260, 300)], ids=("first", "last"))
@capped
def test_small_scores_and_large_ones_of_a_tile(config, large):
    q, k, v = make_qkv(config, (1, 200, 300, 2, 1))
    k[:, large] *= 12
    check(config, (q, k, v), **options_of(config, 1, 2) | {"softcap": 50.0})


def check_entries_alone(simulator=None):
    """Asserts that large scores of a batch entry change no bit of the entry that the CTA computes
    next."""
    q, k, v = make_qkv(CAPPING, (3, 100, 200, 2, 1))
    options = {"softcap": 50.0, "window_size": WINDOW}
    large = q.clone()
    large[::2] *= 40
    plain, mixed = (
        sim.run_fwd(x, k, v, CAPPING, sms=1, **options, **simulator or {}) for x in (q, large)
    )
    assert torch.equal(plain.out[1], mixed.out[1]) and torch.equal(plain.lse[1], mixed.lse[1])
    assert not torch.equal(plain.lse[0], mixed.lse[0])


def test_small_scores_of_an_entry_do_not_depend_on_others():
    check_entries_alone()


@pytest.mark.parametrize("config", (SM90, CAPPING), ids=ids)
def test_scores_of_other_sequences_have_no_say_in_the_cap(config):
    """Results are equal bit for bit, although blocks of keys and tiles of queries reach into the
    next sequence."""
    batch = (70, 90), (75, 101)
    q, k, v = ragged.make_qkv(config, batch)
    options = options_of(config, 2, 4) | {"softcap": 50.0}
    plain = ragged.run(config, (q, k, v), batch, **options)
    q[70:160] *= 20
    k[75:176] *= 20
    other = ragged.run(config, (q, k, v), batch, **options)
    assert torch.equal(plain.out[:70], other.out[:70])
    assert torch.equal(plain.lse[:, :70], other.lse[:, :70])
    assert not torch.equal(plain.lse[:, 70:160], other.lse[:, 70:160])


@pytest.mark.parametrize("cap", [1e-30, 0.01, 50.0, 1000.0])
@capped
def test_scores_far_beyond_the_cap(config, cap):
    """Most scores become the cap or its negative, but for the largest cap; there are no slopes."""
    options = options_of(config, 1, 2) | {"softcap": cap, **no_slopes(config)}
    check(config, make_qkv(config, (1, 200, 150, 2, 1), 300), **options)


def check_neighbours(config, simulator=None):
    """Asserts that rows beyond the cap change no bit of others. None of these is small, and their
    warp then computes them by both forms of tanh. The cap is too low for a warp to raise its
    references."""
    q, k, v = make_qkv(config, (1, 150, 200, 2, 1))
    options = options_of(config, 1, 2) | {"softcap": 5.0, **no_slopes(config)}
    beyond = torch.arange(150) % 16 == 5
    larger = torch.where(beyond[:, None, None], 1000 * q, q)
    plain, mixed = (
        sim.run_fwd(x, k, v, config, sms=2, **options, **simulator or {}) for x in (q, larger)
    )
    assert torch.equal(plain.out[:, ~beyond], mixed.out[:, ~beyond])
    assert torch.equal(plain.lse[:, :, ~beyond], mixed.lse[:, :, ~beyond])
    assert not torch.equal(plain.lse[:, :, beyond], mixed.lse[:, :, beyond])


@pytest.mark.parametrize("config", (SM80, UNMASKED), ids=ids)
def test_rows_beyond_the_cap_leave_their_neighbours_alone(config):
    check_neighbours(config)


@pytest.mark.parametrize("config", (UNMASKED, CAPPING), ids=ids)
def test_infinite_products_are_capped(config):
    _, _, v = make_qkv(config, (1, 130, 150, 2, 1))
    huge = torch.finfo(v.dtype).max  # products of float16 are finite, those of bfloat16 not
    q = torch.full((1, 130, 2, v.shape[3]), huge, dtype=v.dtype)
    k = torch.full_like(v, huge) * torch.where(torch.arange(150) % 3 == 0, -1, 1)[:, None, None]
    options = options_of(config, 1, 2) | {"softcap": 2.0, **no_slopes(config)}
    check(config, (q, k, v), check_drift=False, **options)


@capped
def test_nan_of_a_row_stays_in_it(config):
    """The other rows of its warp are right, with either form of the softcap."""
    q, k, v = make_qkv(config, (1, 150, 200, 2, 1))
    options = options_of(config, 1, 2) | {"softcap": 50.0, **no_slopes(config)}
    wrong = q.clone()
    wrong[0, 37, 1, 5] = torch.nan
    result = sim.run_fwd(wrong, k, v, config, sms=2, **options)
    plain = sim.run_fwd(q, k, v, config, sms=2, **options)
    assert result.out[0, 37, 1].isnan().all() and result.lse[0, 1, 37].isnan()
    result.out[0, 37, 1], result.lse[0, 1, 37] = plain.out[0, 37, 1], plain.lse[0, 1, 37]
    check_forward(result.out, result.lse, q, k, v, causal=config.mask == "causal", **options)


@pytest.mark.parametrize("slope", [3.0, 100.0, 1e6])
@pytest.mark.parametrize("shape", [(1, 140, 300, 2, 1), (1, 260, 70, 2, 1)], ids=str)
@pytest.mark.parametrize("config", (*SLOPED, UNMASKED), ids=ids)
def test_steep_slopes(config, shape, slope):
    """References rise from block to block. In the second shape each row's best score is far from
    0."""
    options = options_of(config, 1, 2) | {"alibi_slopes": torch.tensor([[slope, -slope / 100]])}
    check(config, make_qkv(config, shape), **options)


@pytest.mark.parametrize("config", SLOPED, ids=ids)
def test_slopes_that_all_entries_share(config):
    """Slopes with a batch stride of 0 give the bits of separate equal slopes, dense and ragged."""
    slopes = torch.tensor([0.5, 0.25]).expand(3, 2)
    batch = (70,) * 3, (90,) * 3
    q, k, v = ragged.make_qkv(config, batch, h=2, h_k=1, more=0)
    dense = q.view(3, 70, 2, -1), k.view(3, 90, 1, -1), v.view(3, 90, 1, -1)
    expected = sim.run_fwd(*dense, config, alibi_slopes=slopes.contiguous(), sms=2)
    shared = sim.run_fwd(*dense, config, alibi_slopes=slopes, sms=2)
    assert torch.equal(shared.out, expected.out) and torch.equal(shared.lse, expected.lse)
    for x in (slopes, slopes.contiguous()):
        result = ragged.run(config, (q, k, v), batch, alibi_slopes=x)
        assert torch.equal(result.out.view_as(expected.out), expected.out)
        assert torch.equal(result.lse.view(2, 3, 70).transpose(0, 1), expected.lse)


@both
def test_no_lengths_reach_beyond_the_slopes(config):
    """This holds for a batch of no sequence, and for lengths without meaning."""
    large, small = 2**31 - 1, -(2**31)
    for lengths in ((0,), (0, 150, 30, 90), (small, large, small, large), (5, -5, large, 7)):
        qkv = ragged.make_qkv(config, ((200,), (200,)), h=2, h_k=1, more=0)
        cu = torch.tensor(lengths, dtype=torch.int32)
        options = options_of(config, len(lengths) - 1, 2)
        result = sim.run_varlen(*qkv, cu, cu.flip(0), config, max_seqlen_q=large, **options)
        assert result.verdict == "pass", result.message


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
@both
def test_checkers_are_silent(config, checker):
    options = options_of(config, 1, 3)
    simulator = {"checker": checker, "pack_heads": True}
    check(config, make_qkv(config, (1, 130, 150, 3, 1)), simulator, **options)
    qkv = ragged.make_qkv(config, BATCH, h=3, h_k=1)
    options = options_of(config, len(BATCH[0]), 3)
    result = ragged.run(config, qkv, BATCH, checker=checker, **options)
    ragged.check(result, config, qkv, BATCH, **options)


@pytest.mark.parametrize("config", (SM80, SLOPED[0]), ids=ids)
def test_options_must_be_those_of_the_kernel(config):
    qkv = make_qkv(config, (1, 8, 8, 1, 1))
    with pytest.raises(ValueError, match=f"a kernel with softcap={config.softcap}, alibi=True"):
        sim.run_fwd(*qkv, config)


def find_fault(config, kernel):
    """Returns the report of a run, "numerics" if results are wrong, or None."""
    simulator = {"kernel": kernel, "timeout": 120}
    shape = SHAPES[0]
    options = options_of(config, shape[0], shape[3])
    cases = [(options, packed) for packed in (False, True)]
    cases += [(options | {"softcap": cap}, False) for cap in (8.0, 50.0, 1e6)]
    try:
        for asked, packed in cases:
            check(config, make_qkv(config, shape), simulator | {"pack_heads": packed}, **asked)
        if config == CAPPING:
            check_entries_alone(simulator)
        else:
            check_neighbours(config, simulator)
        qkv = ragged.make_qkv(config, BATCH)
        options = options_of(config, len(BATCH[0]), 4)
        result = ragged.run(config, qkv, BATCH, **simulator, **options)
        ragged.check(result, config, qkv, BATCH, **options)
    except AssertionError:
        return "numerics"
    result = ragged.run(config, qkv, ((), ()), **simulator, **options_of(config, 0, 4))
    return result.message or None


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    found = find_fault(mutant.config, mutants[mutant.name])
    assert found and re.search(mutant.report or "^numerics$", found), f"{mutant.name}: {found}"


@every
def test_unmutated_kernels_pass_the_same_checks(config):
    assert find_fault(config, None) is None
