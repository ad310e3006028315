"""Runs seeded cases of tests/cuda on the CPU: code that asks for a GPU gets the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def _there(x):
    is_place = isinstance(x, (str, torch.device)) and str(x).startswith("cuda")
    return torch.device("cpu") if is_place else x


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _there(x) for name, x in (kwargs or {}).items()}
        return func(*map(_there, args), **kwargs)


class _Generator(torch.Generator):
    def __new__(cls, _device="cpu"):
        return super().__new__(cls, "cpu")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Makes torch use the CPU for the device cuda, with an H200's compute capability."""
    with (
        _Mode(),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        yield
