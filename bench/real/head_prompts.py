"""Prompts for training a draft head, one a line: questions as people ask them in a chat, in an order that mixes kinds.

    python -m bench.real.head_prompts [-n N] > prompts.txt
    python -m bench.real.head_prompts --summaries wiki.test.raw > summaries.txt     # to summarize its paragraphs
    tilebeam draft train --text prompts.txt --text summaries.txt --task gsm8k:gsm8k_train.jsonl ..

None of them is among those that bench.speculation asks. Forms and subjects stand in head_prompts.txt.
"""

from __future__ import annotations

import argparse
import random
from itertools import product
from pathlib import Path

from bench.lib.guessing_tasks import LEARNT, summaries


def prompts(seed: int = 1) -> list[str]:
    """Return all prompts, shuffled."""
    found = list[str]()
    for part in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n")[1:]:
        lines = part.splitlines()
        forms = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
        subjects = " ".join(lines[len(forms) :]).split("; ")
        found += [form.format(subject) for form, subject in product(forms, subjects)]
    random.Random(seed).shuffle(found)
    return found


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--summaries", type=Path, metavar="FILE", help="WikiText's raw text")
    p.add_argument("-n", type=int, help="so many prompts (default: all)")
    o = p.parse_args()
    print("\n".join((prompts() if o.summaries is None else summaries(o.summaries)[:LEARNT])[: o.n]))
