"""Adapters that put flashcute under other libraries, which are imported only with them."""
