"""The tolerance rule of ragged batches: results of the CPU pass, and faults are caught."""

import pytest
import torch

from flashcute import flash_attn_varlen_func
from flashcute.testing_varlen import check_backward_varlen, expect_gradients_varlen

CU = torch.tensor([0, 5, 5, 21], dtype=torch.int32)


def problem(dtype, seed):
    """Returns gradients by name, and the further arguments of check_backward_varlen()."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(21, 2, 16, generator=generator, dtype=dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(*leaves, CU, CU, 16, 16, causal=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return named, (q, k, v, dout, (CU, CU, None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulated_rounding_is_allowed_in_32_and_64_bits(dtype):
    for seed in range(10):
        gradients, arguments = problem(dtype, seed)
        check_backward_varlen(gradients, *arguments, causal=True)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_one_element_that_is_off_by_more_is_found(name, given):
    gradients, arguments = problem(torch.float32, 0)
    options = {"causal": True, "dlse": torch.zeros(2, 21)}
    if given:
        options["expected"] = expect_gradients_varlen(*arguments, **options)
    check_backward_varlen(gradients, *arguments, **options)
    wrong = gradients[name].clone()
    wrong[7, 1, 3] += 1000 * torch.finfo(torch.float32).eps * wrong.abs().max()
    with pytest.raises(AssertionError, match=rf"sequence=2 (.|\n)*{name}: max error .*FAILED"):
        check_backward_varlen({**gradients, name: wrong}, *arguments, **options)


def test_what_is_expected_is_taken_as_it_is_given():
    gradients, arguments = problem(torch.float32, 0)
    of_another = expect_gradients_varlen(*problem(torch.float32, 1)[1], causal=True)
    with pytest.raises(AssertionError, match="sequence=0 "):
        check_backward_varlen(gradients, *arguments, causal=True, expected=of_another)


def test_what_is_no_gradient_is_refused():
    gradients, (q, *others) = problem(torch.float32, 0)
    fn = "check_backward_varlen: expected"
    with pytest.raises(TypeError, match=f"{fn} gradients to be a dict, got .* tuple; pass"):
        check_backward_varlen(tuple(gradients.values()), q, *others, causal=True)
    with pytest.raises(
        ValueError, match=rf"{fn} gradients\['dq'\] of shape \(21, 2, 16\) .*; pass"
    ):
        check_backward_varlen({**gradients, "dq": gradients["dq"][1:]}, q, *others, causal=True)
    with pytest.raises(ValueError, match=rf"{fn} dlse of shape \(2, 21\) .*; pass"):
        check_backward_varlen(gradients, q, *others, dlse=torch.zeros(21, 2), causal=True)
