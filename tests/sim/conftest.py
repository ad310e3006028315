"""Compiles together what the collected files of this folder compile: together.py."""

from pathlib import Path

from together import compile_together


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    compile_together({item.module for item in items if item.path.parent == folder})
