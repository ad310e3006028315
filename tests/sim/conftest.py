"""Compiles the kernels of this folder's collected files in shared translation units, by means of
together.py."""

from pathlib import Path

from together import compile_together


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    compile_together({item.module for item in items if item.path.parent == folder})
