"""Shows the progress of builds: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from .build import BuildResult, Unit

_REPEAT = 30  # seconds between lines about a unit that is still being compiled


def _describe(unit: Unit) -> str:
    return f"{unit.name} for {unit.target}"


class Progress:
    """A display on standard error, for the callbacks of :func:`flashcute.jit.build.build_many`.

    ``with Progress(total) as shown:`` pass ``shown.finished`` and ``shown.running``.

    Args:
        total: Number of units to build.
        terminal: Whether to draw a bar; by default if standard error is a terminal.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        total: int,
        terminal: bool | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._now = now
        self._done = 0
        self._bar = None
        # Time of the last line about each unit being compiled.
        self._last_line: dict[Unit, float] = {}
        if terminal is None:
            terminal = sys.stderr is not None and sys.stderr.isatty()
        if terminal:
            from tqdm import tqdm

            # No estimate of the remaining time: a dozen units are too few for one.
            form = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=total, desc="build", bar_format=form, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        print(f"build {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def finished(self, result: BuildResult) -> None:
        """Counts a unit that was built, failed, or was in the cache, which alone prints no line."""
        self._done += 1
        self._last_line.pop(result.unit, None)
        if self._bar is not None:
            if result.error is not None:
                self._bar.write(result.error, file=sys.stderr)
            self._bar.set_postfix_str("", refresh=False)
            self._bar.update()
        elif result.error is not None:
            self._print(f"failed: {result.error}")
        elif result.seconds > 0:
            self._print(f"{_describe(result.unit)}, {result.seconds:.0f} s")

    def running(self, compiling: Sequence[tuple[Unit, float]]) -> None:
        """Shows the units being compiled, with the seconds of each."""
        if self._bar is not None:
            parts = [f"{_describe(unit)} {seconds:.0f} s" for unit, seconds in compiling]
            self._bar.set_postfix_str("; ".join(parts))
            return
        for unit, seconds in compiling:
            last = self._last_line.get(unit)
            if last is None:
                self._print(f"compiling {_describe(unit)}")
            elif self._now() - last >= _REPEAT:
                self._print(f"still compiling {_describe(unit)}, {seconds:.0f} s")
            else:
                continue
            self._last_line[unit] = self._now()
