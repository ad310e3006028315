"""Options of the tests: ``--backend`` says where the forward kernels of backend-neutral tests run,
``--all`` covers every shipped kernel and planted fault."""

from __future__ import annotations

import pytest
import reporting
import tiers
import torch

from flashcute import heuristics, shipped


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        choices=("sim", "cuda"),
        default="sim",
        help="run the kernels in the simulator (default) or on a GPU",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="cover every shipped kernel and planted fault, and not only those of tests/tiers.py",
    )


def pytest_configure(config):
    tiers.everything = config.getoption("--all")
    config.pluginmanager.register(reporting)


# These files compile for minutes, and all tests of a file run in one worker. Started last, one of
# them would keep one worker busy while the others are idle.
_FIRST = ("test_ladder.py", "test_shipped_kernels.py", "test_wheel.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in _FIRST)


def pytest_terminal_summary(terminalreporter):
    if not tiers.everything:
        configs = shipped.instantiations().values()
        left = sum(not tiers.compiles(config) for config in configs)
        terminalreporter.write_line(
            f"{left} of {len(configs)} shipped kernels NOT COMPILED, and every other fault that no "
            "checker finds NOT PLANTED: `make test-all` does both",
            yellow=True,
        )


def _forward_sim(q, k, v, *, causal, seed):
    from flashcute import sim

    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}[q.dtype]
    head_dim = heuristics.instantiated_head_dim(q.shape[3])
    config = heuristics.fwd_config(dtype, head_dim, causal, (9, 0))
    copy_mode = sim.COPY_MODES[seed % len(sim.COPY_MODES)]
    result = sim.run_fwd(q, k, v, config, seed=seed, copy_mode=copy_mode)
    assert result.verdict == "pass", result.message
    return result.out, result.lse


def _forward_cuda(q, k, v, *, causal, seed):
    from flashcute import flash_attn_func

    # The whole buffers are copied, so that what lies in gaps between rows is copied, too.
    on_gpu = [
        x._base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        if x._base is not None
        else x.cuda()
        for x in (q, k, v)
    ]
    out, lse, _ = flash_attn_func(*on_gpu, causal=causal, return_attn_probs=True)
    return out.cpu(), lse.cpu()


@pytest.fixture(scope="session")
def forward(request):
    """Returns ``forward(q, k, v, *, causal, seed) -> (out, lse)`` of the chosen backend.

    All tensors are on the CPU.
    """
    if request.config.getoption("--backend") == "cuda":
        return _forward_cuda
    from flashcute import sim

    sim.build_runners(["none"])
    sim.build_kernels([(config, "none") for config in heuristics.shipped_configs(80)])
    return _forward_sim
