"""Dropout in both kernel classes, dense and ragged, against the mask in plain PyTorch."""

import dataclasses
import re

import mutants_dropout
import pytest
import ragged
import serving
import tiers
import torch
from mutants import ONE_STAGE
from mutants_dropout import SM80, SM90
from mutants_sm90 import ASKING, STRIDING
from planted import build_mutants
from problems import DTYPES

from flashcute import sim
from flashcute.dropout import dropout_mask
from flashcute.reference import visible_keys
from flashcute.testing import check_forward

replace = dataclasses.replace
CAUSAL = replace(ONE_STAGE, dropout=True)
CONFIGS = (SM80, SM90, CAUSAL)
if tiers.everything:
    CONFIGS += (replace(STRIDING, dropout=True), replace(ASKING, dropout=True))
    CONFIGS += tuple(replace(c, softcap=True, alibi=True) for c in (SM80, SM90))
PAGED = replace(SM80, paged=True)  # dropout over pages always takes the sm80 class
PLANTED = mutants_dropout.MUTANTS if tiers.everything else mutants_dropout.OF_SM80
CHECKERS = [checker for checker in sim.CHECKERS if checker != "none"]
COMPILED = [(config, "none") for config in (*CONFIGS, PAGED, ONE_STAGE)]
WINDOW = (150, 60)
# (b, seqlen_q, seqlen_k, h, h_k): several tiles and blocks; rows that see no key; one query.
SHAPES = ((2, 150, 200, 4, 2), (1, 200, 63, 2, 2), (1, 1, 300, 2, 1))
BATCH = ((130, 1, 0, 64, 200), (130, 77, 50, 0, 33))
STATE = torch.tensor([2**62 + 12345, -77])


def ids(config):
    return config.full_name


both = pytest.mark.parametrize("config", (SM80, SM90), ids=ids)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    sim.build_runners(["none"])
    return sim.build_kernels(COMPILED)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    return build_mutants(PLANTED, tmp_path_factory.mktemp("mutants"))


def options_of(config, b: int, h: int) -> dict[str, object]:
    options: dict[str, object] = {"window_size": WINDOW} if config.mask == "local" else {}
    if config.softcap:
        options["softcap"] = 1.5
    if config.alibi:
        options["alibi_slopes"] = torch.arange(1, b * h + 1).view(b, h) / 16
    return options


def of_reference(dropout_p, *sizes, state=STATE):
    mask = dropout_mask(state, *sizes, dropout_p)
    return {"dropout_p": round(dropout_p * 2**16) / 2**16, "dropout_mask": mask}


def make_qkv(config, shape, d=None):
    b, seqlen_q, seqlen_k, h, h_k = shape
    generator = torch.Generator().manual_seed(0)
    d = config.head_dim - 8 if d is None else d
    sizes = ((b, seqlen_q, h, d), (b, seqlen_k, h_k, d), (b, seqlen_k, h_k, d))
    return [torch.randn(size, generator=generator).to(DTYPES[config.dtype]) for size in sizes]


def check(config, shape, dropout_p=0.3, state=STATE, **simulator):
    """Runs a dense batch, and compares it with the reference."""
    qkv, options = make_qkv(config, shape), options_of(config, shape[0], shape[3])
    result = sim.run_fwd(
        *qkv, config, sms=2, rng_state=state, dropout_p=dropout_p, **options, **simulator
    )
    assert result.verdict == "pass", result.message
    b, seqlen_q, seqlen_k, h, _ = shape
    options |= of_reference(dropout_p, b, h, seqlen_q, seqlen_k, state=state)
    check_forward(result.out, result.lse, *qkv, causal=config.mask == "causal", **options)


def check_ragged(config, dropout_p=0.3, used=None, **simulator):
    qkv, options = ragged.make_qkv(config, BATCH), options_of(config, len(BATCH[0]), 4)
    if used is not None:
        lengths = (torch.tensor(x, dtype=torch.int32) for x in used)
        simulator |= dict(zip(("seqused_q", "seqused_k"), lengths, strict=True))
    result = ragged.run(
        config, qkv, BATCH, rng_state=STATE, dropout_p=dropout_p, **options, **simulator
    )
    options |= of_reference(dropout_p, len(BATCH[0]), 4, *map(max, BATCH))
    ragged.check(result, config, qkv, BATCH, used=used, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_results(config, shape):
    check(config, shape)


@pytest.mark.parametrize("dropout_p", [2.0**-16, 0.002, 0.5, 0.9, 1 - 2.0**-16])
@both
def test_probabilities(config, dropout_p):
    check(config, SHAPES[0], dropout_p)


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_ragged_batches(config):
    check_ragged(config)
    check_ragged(config, used=((100, 1, 0, 33, 170), (130, 60, 0, 0, 20)))


@pytest.mark.parametrize("page_size", [4, 64])
def test_keys_in_pages(page_size):
    problem = serving.paged(PAGED, BATCH, page_size)
    options = options_of(PAGED, len(BATCH[0]), 4)
    result = serving.run(PAGED, problem, rng_state=STATE, dropout_p=0.3, **options)
    options |= of_reference(0.3, len(BATCH[0]), 4, *map(max, BATCH))
    serving.check(result, PAGED, problem, **options)


@pytest.mark.parametrize("state", [(0, 0), (-1, -1), (2**63 - 1, 2**31), (1 << 32, 1)], ids=str)
@pytest.mark.parametrize("config", (SM80, SM90, CAUSAL), ids=ids)
def test_every_bit_of_the_mask(config, state):
    """Scores are equal, and head n's values are the unit vectors of the keys from n * d on."""
    d, seqlen_q, seqlen_k, state = config.head_dim, 140, 150, torch.tensor(state)
    h = -(-seqlen_k // d)
    q = torch.zeros(2, seqlen_q, h, d, dtype=DTYPES[config.dtype])
    k = torch.ones(2, seqlen_k, h, d, dtype=q.dtype)
    v = torch.nn.functional.pad(torch.eye(seqlen_k), (0, h * d - seqlen_k))
    v = v.view(1, seqlen_k, h, d).expand(2, -1, -1, -1).to(q.dtype).contiguous()
    options = options_of(config, 2, h)
    result = sim.run_fwd(q, k, v, config, sms=2, rng_state=state, dropout_p=0.5, **options)
    assert result.verdict == "pass", result.message
    causal = config.mask == "causal"
    seen = visible_keys(seqlen_q, seqlen_k, causal, options.get("window_size", (-1, -1)))
    kept = dropout_mask(state, 2, h, seqlen_q, seqlen_k, 0.5) & seen
    kept = torch.nn.functional.pad(kept, (0, h * d - seqlen_k)).unflatten(3, (h, d))
    expected = kept.diagonal(dim1=1, dim2=3).permute(0, 1, 3, 2)  # (b, seqlen_q, h, d)
    assert torch.equal(result.out != 0, expected)


def test_a_probability_that_rounds_to_zero_equals_none():
    """Bit for bit."""
    qkv = make_qkv(CAUSAL, (1, 200, 150, 2, 1))
    plain = sim.run_fwd(*qkv, ONE_STAGE, sms=2)
    result = sim.run_fwd(*qkv, CAUSAL, sms=2, rng_state=STATE, dropout_p=2.0**-18)
    assert torch.equal(result.out, plain.out) and torch.equal(result.lse, plain.lse)


@both
def test_no_lengths_are_followed_beyond_the_tensors(config):
    large, small = 2**31 - 1, -(2**31)
    options = options_of(config, 1, 2) | {"rng_state": STATE, "dropout_p": 0.5}
    for lengths in ((0,), (0, 150, 30, 90), (small, large, small, large), (5, -5, large, 7)):
        qkv = ragged.make_qkv(config, ((200,), (200,)), h=2, h_k=1, more=0)
        cu = torch.tensor(lengths, dtype=torch.int32)
        result = sim.run_varlen(*qkv, cu, cu.flip(0), config, max_seqlen_q=large, **options)
        assert result.verdict == "pass", result.message


@pytest.mark.skipif(not tiers.everything, reason="compiles for minutes: needs --all")
@pytest.mark.parametrize("checker", CHECKERS)
@both
def test_checkers_are_silent(config, checker):
    check(config, (1, 130, 150, 2, 1), checker=checker)
    check_ragged(config, checker=checker)


def test_options_must_be_those_of_the_kernel():
    qkv = make_qkv(CAUSAL, (1, 8, 8, 1, 1))
    with pytest.raises(ValueError, match=r"got softcap=0.0.* and dropout_p=0.0 for .*dropout=True"):
        sim.run_fwd(*qkv, CAUSAL)
    for wrong in ({}, {"rng_state": STATE, "pack_heads": True}):
        with pytest.raises(ValueError, match="expected rng_state and pack_heads=False"):
            sim.run_fwd(*qkv, CAUSAL, dropout_p=0.5, **wrong)


def find_fault(config, kernel):
    """Returns the report of a run, "numerics" if results are wrong, or None."""
    try:
        for dropout_p in (0.3, 0.98):
            check(config, SHAPES[0], dropout_p, kernel=kernel, timeout=120)
        check_ragged(config, kernel=kernel, timeout=120)
    except AssertionError as error:
        return "numerics" if "attention is wrong" in str(error) else str(error)
    return None


@pytest.mark.parametrize("mutant", PLANTED, ids=lambda m: m.name)
def test_mutant_is_found(mutant, mutants):
    found = find_fault(mutant.config, mutants[mutant.name])
    assert found and re.search(mutant.report or "^numerics$", found), f"{mutant.name}: {found}"


@both
def test_unmutated_kernels_pass_the_same_checks(config):
    assert find_fault(config, None) is None
