from __future__ import annotations

import argparse
import os

import pytest

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
        arguments.output_folder: {"": "empty", "file": "is a file", "file/x": "is no folder"},
        arguments.output_file: {"": "empty", ".": "is a folder", "file/x": "is no folder"},
    }
    monkeypatch.chdir(tmp_path)
    for kind, cases in refused.items():
        for text, reason in cases.items():
            with pytest.raises(argparse.ArgumentTypeError, match=f"for results, got .*{reason}"):
                kind(text)
    monkeypatch.setattr(arguments.os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        arguments.output_file("new")
