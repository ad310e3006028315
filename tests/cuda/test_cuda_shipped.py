"""The calls that decide which kernels are prebuilt, as users make them; none of them builds one."""

from __future__ import annotations

import pytest
import torch
from building import build

import flashcute
from flashcute import shipped


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    capability = torch.cuda.get_device_capability()
    build([*shipped.dense_configs(capability), *shipped.configs_of_calls(capability)])


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def run(call: shipped.Call) -> torch.Tensor:
    """Makes the call through the function of the public interface that has such a problem."""
    x = call.problem
    causal = x.causal or x.window is not None
    options = {"causal": causal, "softcap": 30.0 if x.softcap else 0.0}
    if x.window is not None:
        options["window_size"] = x.window
    q = made(x.b, x.seqlen_q, x.h, x.d)
    if x.cache:
        lengths = torch.full((x.b,), x.seqlen_q + 100, dtype=torch.int32, device="cuda")
        if not x.page_size:
            k, v = (made(x.b, x.seqlen_k, x.h_k, x.d) for _ in "kv")
            return flashcute.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
        pages = x.seqlen_k // x.page_size
        table = torch.arange(pages, dtype=torch.int32, device="cuda").expand(x.b, pages)
        k, v = (made(pages, x.page_size, x.h_k, x.d) for _ in "kv")
        return flashcute.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table.contiguous(), **options
        )
    k, v = (made(x.b, x.seqlen_k, x.h_k, x.d) for _ in "kv")
    tensors = [tensor.requires_grad_(call.backward) for tensor in (q, k, v)]
    if x.varlen:
        ends = torch.arange(x.b + 1, dtype=torch.int32, device="cuda") * x.seqlen_q
        packed = [tensor.flatten(0, 1) for tensor in tensors]
        sizes = (ends, ends, x.seqlen_q, x.seqlen_k)
        out = flashcute.flash_attn_varlen_func(*packed, *sizes, **options)
    else:
        out = flashcute.flash_attn_func(*tensors, **options)
    if call.backward:
        out.sum().backward()
    return out


@pytest.mark.parametrize("name", shipped.CALLS)
def test_builds_nothing(name, monkeypatch):
    monkeypatch.setenv("FLASHCUTE_NO_BUILD", "1")
    for call in shipped.CALLS[name]:
        assert torch.isfinite(run(call)).all()
