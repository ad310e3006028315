"""Benchmarks of flashcute beside the installed peers, over a sweep and named shapes."""
