"""A progress bar for programs and notebooks, as a progress hook."""

from __future__ import annotations

from typing import Any

from tilebeam.outputs import Progress


class ProgressBar:
    """Draws a bar of samples with tokens per second: a widget in a notebook (with ipywidgets), else a line on stderr.

        lm.generate(prompts, max_tokens=64, progress=tilebeam.ProgressBar())

    For `LM.generate` and searches, one call after the other.

    Args:
        description: what stands in front of it.
    """

    def __init__(self, description: str = "") -> None:
        self._description = description
        self._bar: Any = None

    def __call__(self, state: Progress) -> None:
        """Show how far the call is."""
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=self._description or None, unit="sample")
        self._bar.total = state.total
        self._bar.update(state.finished - self._bar.n)
        self._bar.set_postfix_str(f"{state.tokens / max(state.seconds, 1e-9):.0f} tokens/s")
        if state.finished >= state.total:
            self._bar.close()
            self._bar = None
