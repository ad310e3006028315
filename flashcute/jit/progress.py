"""Shows builds while they run: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from .build import BuildResult, Unit

_STILL = 30  # seconds between lines that say what is still being compiled


def _describe(unit: Unit) -> str:
    return f"{unit.name} for {unit.target}"


class Progress:
    """A display on standard error, for the callbacks of :func:`flashcute.jit.build.build_many`.

    ``with Progress(total) as shown:`` pass ``shown.finished`` and ``shown.running``.

    Args:
        total: How many units are built.
        terminal: Whether to draw a bar; None finds out.
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
        # When each compiler that runs was last written of, by its unit.
        self._told: dict[Unit, float] = {}
        if terminal is None:
            terminal = sys.stderr is not None and sys.stderr.isatty()
        if terminal:
            from tqdm import tqdm

            # No estimate of the time that is left: a dozen files tell too little.
            form = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=total, desc="build", bar_format=form, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _say(self, text: str) -> None:
        print(f"build {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def finished(self, result: BuildResult) -> None:
        """One unit is built, cannot be built, or was there, which no line is written of."""
        self._done += 1
        self._told.pop(result.unit, None)
        if self._bar is not None:
            if result.error is not None:
                self._bar.write(result.error, file=sys.stderr)
            self._bar.set_postfix_str("", refresh=False)
            self._bar.update()
        elif result.error is not None:
            self._say(f"failed: {result.error}")
        elif result.seconds > 0:
            self._say(f"{_describe(result.unit)}, {result.seconds:.0f} s")

    def running(self, compiling: Sequence[tuple[Unit, float]]) -> None:
        """What is being compiled now, and for how many seconds each."""
        if self._bar is not None:
            parts = [f"{_describe(unit)} {seconds:.0f} s" for unit, seconds in compiling]
            self._bar.set_postfix_str("; ".join(parts))
            return
        for unit, seconds in compiling:
            told = self._told.get(unit)
            if told is None:
                self._say(f"compiling {_describe(unit)}")
            elif self._now() - told >= _STILL:
                self._say(f"still compiling {_describe(unit)}, {seconds:.0f} s")
            else:
                continue
            self._told[unit] = self._now()
