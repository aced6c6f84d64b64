"""Searches: algorithms that spend more compute on a prompt. The classes in `__init__.pyi` can be
imported from here.

contract   what an algorithm is, what it asks of a model, what it returns
sampled    over whole candidates: Best-of-N, self-consistency
beam       by steps: beam search, DVTS; steps: how texts grow step by step
tool_reasoning   samples whose programs run; tool_forms: how a model is asked for these
adaptive   votes that stop once they are settled
algorithms   all of them by name, with options by keyword
limits     how long candidates get, and which may win or vote
events     what happens in a search, told while it runs
tree       the steps that a search drew, those that texts share once
"""

from __future__ import annotations

from tilebeam.gguf.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals())
