from __future__ import annotations

import argparse
import errno
import os
import resource
import signal

import pytest
import torch

from flashcute import arguments


@pytest.mark.parametrize("text", ["", "-1", "0.5", "x", "1e3", "2147483648", "9" * 5000])
def test_whole_numbers_refuse(text):
    for kind in (arguments.natural, arguments.positive):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number from"):
            kind(text)


def test_whole_numbers():
    assert (arguments.natural("0"), arguments.positive("2147483647")) == (0, 2147483647)
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 2147483647, got '0'"):
        arguments.positive("0")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Storage size calculation overflowed with sizes=[4]"), True),
        (RuntimeError("flashcute::fwd: failed to allocate 8 bytes on cuda:0"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_errors_of_missing_memory(error, expected):
    assert arguments.is_out_of_memory(error) == expected


@pytest.mark.parametrize("text", ["", "-1", "0", "nan", "inf", "x"])
def test_seconds_refuse(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a number of seconds above 0, got"):
        arguments.seconds(text)


def test_seconds():
    assert arguments.seconds("0.5") == 0.5


def test_places_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for text in ("new", "a/b/c", str(tmp_path / "x" / "y")):
        assert str(arguments.output_file(text)) == text
        assert str(arguments.output_folder(text)) == text
    assert str(arguments.output_file("file")) == "file"
    assert str(arguments.output_file(os.devnull)) == os.devnull
    assert str(arguments.output_folder(".")) == "."


def test_places_that_cannot(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    refused = {
        arguments.output_folder: {"": "empty", "file": "is no folder", "file/x": "is no folder"},
        arguments.output_file: {"": "empty", ".": "is a folder", "file/x": "is no folder"},
    }
    monkeypatch.chdir(tmp_path)
    for kind, cases in refused.items():
        for text, reason in cases.items():
            with pytest.raises(argparse.ArgumentTypeError, match=f"for results, got .*{reason}"):
                kind(text)
    assert os.listdir() == ["file"]


@pytest.mark.parametrize("kind", [arguments.output_file, arguments.output_folder])
@pytest.mark.parametrize("text", ["/proc/x", "/proc/x/y", "new/" + "x" * 300])
def test_places_that_refuse_whoever_asks(kind, text, tmp_path, monkeypatch):
    # For root os.access() reports that all of these paths can be written.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError, match=r"got .*: it cannot be written \("):
        kind(text)
    assert not os.listdir()


def test_a_device_or_pipe_that_may_not_be_written(monkeypatch):
    monkeypatch.setattr(arguments.os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        arguments.output_file(os.devnull)


@pytest.mark.parametrize("kind", [arguments.output_file, arguments.output_folder])
def test_a_full_disk_is_noticed(kind, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))  # write() fails then, too
    try:
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            kind(str(tmp_path / "a" / "b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not os.listdir(tmp_path)


def test_trying_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "old"
    old.write_text("x")
    os.utime(old, (1, 1))
    os.mkfifo("pipe")
    for text in ("old", "pipe", "new", "a/b/c"):
        arguments.output_file(text)
    for text in (".", "folder", "a/b/c"):
        arguments.output_folder(text)
    assert (old.read_text(), old.stat().st_mtime) == ("x", 1)
    assert sorted(os.listdir()) == ["old", "pipe"]


def test_failures_are_messages_and_the_other_files_are_written(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    (message,) = arguments.failures(
        "bench", (tmp_path / "a", full), (tmp_path / "b", (tmp_path / "b").touch)
    )
    assert message.startswith(f"flashcute bench: expected to write {tmp_path / 'a'}, got: No space")
    assert (tmp_path / "b").exists()

    def broken():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        arguments.failures("bench", (tmp_path, broken))
