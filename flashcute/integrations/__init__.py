"""Adapters that put flashcute under other libraries. Each imports its library only when imported."""
