"""A program that compares the kernels that seeded cases of tests/cuda ask for with those built.

The binding of ``host_binding.cpp`` asks for them as on an H200, on CPU tensors. ``kernels_of()`` of
each family names those that are built for a case. The program prints each case with a difference,
and the numbers of such cases and of all.
"""

from __future__ import annotations

import host_binding  # first: it decides which operators flashcute registers  # isort: skip

from types import SimpleNamespace
from unittest import mock

import conditions
import fuzz_gpu
import torch
from asked import Gpu
from on_cpu import on_cpu

from flashcute import dropout, jit, ops, testing
from flashcute.config import BwdConfig, FwdConfig

SEEDS = range(fuzz_gpu.FIRST_SEED, fuzz_gpu.FIRST_SEED + 40)


# Values decide nothing here, and drawing them takes longest.
def zeros(*size, generator=None, **options):
    """Stands in for ``torch.randn``."""
    return torch.zeros(*size, **options)


def counted(counter, key):
    """Stands in for ``philox4x32``."""
    return torch.broadcast_tensors(*counter)


def main() -> None:
    library = host_binding.load()
    # Properties of Python's replace torch's getters, which would call the mode of on_cpu().
    torch.Tensor.is_cuda, torch.Tensor.is_cpu = (property(lambda _, x=x: x) for x in (True, False))
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    asked: set[FwdConfig | BwdConfig] = set()

    def get_kernel(config, _target):
        asked.add(config)
        backward = config.kind == "bwd"
        return SimpleNamespace(
            address=library.host_bwd_kernel() if backward else library.host_kernel()
        )

    wrong = count = 0
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: gpu),
        mock.patch.object(jit, "get_kernel", get_kernel),
        mock.patch.object(ops, "_choose", host_binding.choose),
        mock.patch.object(testing, "check_forward"),
        mock.patch.object(testing, "check_backward"),
        mock.patch.object(torch, "randn", zeros),
        mock.patch.object(dropout, "philox4x32", counted),
        on_cpu(),
    ):
        for name, family in fuzz_gpu.FAMILIES.items():
            make, check = family.function(family.make), family.function(family.check)
            kernels_of = family.function("kernels_of")
            for arch in family.classes:
                for seed in SEEDS:
                    case = make(seed)
                    asked.clear()
                    with conditions.class_of_kernels(arch):
                        check(case)
                        expected = kernels_of(case, Gpu())
                    count += 1
                    if asked != expected:
                        wrong += 1
                        differing = sorted(config.full_name for config in asked ^ expected)
                        print(name, arch, case, *differing)
    print(f"{wrong} of {count} are wrong")


if __name__ == "__main__":
    main()
