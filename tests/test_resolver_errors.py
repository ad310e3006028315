"""The exception of a failed choice of a kernel reaches the caller through an operator, which passes
only text on."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashcute import ops, resolver_errors


def _fail_with(exception: BaseException):
    """Returns an operator whose choice of a kernel fails with ``exception``."""

    def op(*args):
        text = f"{type(exception).__name__}: {exception}"
        resolver_errors.remember(exception, text)
        raise RuntimeError(f"flashcute::fwd: {text}")

    return op


def test_a_result_is_passed_on() -> None:
    assert resolver_errors.call(lambda *args: args, 1, 2) == (1, 2)


@pytest.mark.parametrize("exception", [KeyError("no kernel"), KeyboardInterrupt()])
def test_what_was_raised_arrives_as_itself(exception: BaseException) -> None:
    with pytest.raises(type(exception)) as caught:
        resolver_errors.call(_fail_with(exception))
    assert caught.value is exception


def test_another_error_is_not_taken_for_one_of_an_earlier_call() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        _fail_with(KeyError("no kernel"))()  # the KeyError stays remembered

    def op():
        raise RuntimeError("flashcute::fwd: expected q on cuda")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected q on cuda"):
            resolver_errors.call(op)


@pytest.mark.parametrize("is_free", [False, True])
def test_missing_memory_is_torchs_own_error(is_free: bool, monkeypatch) -> None:
    """torch's error says how much memory there is, unless the memory has become free meanwhile."""

    def op():
        raise RuntimeError("flashcute::fwd: failed to allocate 4096 bytes on cuda:3")

    def empty(size, *, dtype, device):
        if not is_free:
            raise torch.OutOfMemoryError(f"{size} of {dtype} on {device}")

    monkeypatch.setattr(torch, "empty", empty)
    text = "flashcute::fwd: .* 4096 bytes" if is_free else "^4096 of torch.uint8 on cuda:3$"
    with pytest.raises(torch.OutOfMemoryError, match=text) as caught:
        resolver_errors.call(op)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("message", ["no kernel", "", "a\0b", "\udc80", "e" * 99, "\xe9" * 99])
def test_the_binding_gets_a_text_that_names_it(message: str, monkeypatch) -> None:
    """This holds for any message, however short the binding's buffer is."""
    exception = ValueError(message)

    def fail(problem):
        raise exception

    monkeypatch.setattr(ops, "_choose", fail)
    problem, choice, error = ops._Problem(), ops._Choice(), ctypes.create_string_buffer(64)
    assert ops._resolve(problem, choice, ctypes.addressof(error), len(error)) == 1

    def op():
        raise RuntimeError(f"flashcute::fwd: {error.value.decode()}")

    with pytest.raises(ValueError) as caught:
        resolver_errors.call(op)
    assert caught.value is exception
