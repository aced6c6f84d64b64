"""Prompts of bench/speculation.py, sixteen different ones of each task and more: what they ask for stands in the prompt
(edit, extract, quotes), or does not (chat, talk, gsm8k, humaneval, summaries), or is noise."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from bench.lib import ROOT

_NAMES = ["TextReader", "Decoder", "Speller", "Writer", "PieceJoiner", "Unfolder", "Printer", "Scribe"]
_ORDERS = (
    ("Ines Faber", "Utrecht", "desk lamps"),
    ("Tomasz Wilk", "Gdansk", "bicycle bells"),
    ("Aoife Brennan", "Galway", "wool blankets"),
    ("Marcus Lindqvist", "Uppsala", "garden chairs"),
    ("Chiara Conti", "Verona", "coffee cups"),
    ("Hanna Virtanen", "Turku", "picture frames"),
)
_QUESTIONS = (
    "What does the CPU side do when the NPU fails",
    "How are messages checked before they are used",
    "How do both sides wait for each other",
    "Which memory do both sides share",
)
_TOPICS = (
    "make a vegetable soup",
    "repair a flat bicycle tyre",
    "plan a week of meals",
    "choose a first camera",
    "start running in winter",
    "learn the names of the stars",
    "write a letter of complaint",
    "look after a sourdough starter",
)
_CHATS = (
    "Why does bread go stale, and what can I do about it?",
    "Write an e-mail that asks my landlord to repair the heating before the weekend.",
    "Compare trains and buses for a commute of 20 km. Which would you take?",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "What is the difference between a virus and a bacterium?",
    "Plan three days in Lisbon for two people who like music and walking.",
    "Explain recursion to somebody who has just learnt what a function is.",
    "My team misses its deadlines. Which questions should I ask first?",
    "Give me ten names for a small bakery, and say what you like about the best one.",
    "How do I remove a red wine stain from a cotton shirt?",
    "Write a poem of eight lines about the first frost.",
    "Should a small company write its own invoices program or buy one?",
    "What happens to the money that a bank lends?",
    "Describe a kitchen to a painter who has never seen one.",
    "Which exercises strengthen the back if I have ten minutes a day?",
    "Play a tourist guide who shows me the Roman Forum. Begin the tour.",
    "Write a Python function that tells whether two strings are anagrams, and explain it.",
    "A train leaves at 14:10 and arrives at 17:45 with a stop of 25 minutes. How long does it move?",
    "What are the arguments for and against school uniforms?",
    "Summarize what a good night's sleep does for memory in one paragraph.",
)
LEARNT = 150  # texts to summarize that draft heads learn from; others are asked
_MARKS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": ".", " ,": ",", " .": "."}
_PAGE = 4000  # characters of a text to quote from: about 1000 tokens

REPEATING = ("edit", "extract", "quotes")
OTHER = ("chat", "talk")


def own(task: str, i: int) -> str:
    if task == "edit":
        code = (ROOT / "python" / "tilebeam" / "engine" / "detokenizer.py").read_text(encoding="utf-8")
        name = _NAMES[i % len(_NAMES)] + ("" if i < len(_NAMES) else str(i))
        return f"Write this Python file again, with the class Detokenizer renamed to {name} everywhere:\n\n{code}"
    if task == "extract":
        lines = [
            f"Order {1000 + 7 * (i + k)}: {who} from {town} bought {3 * k + 2} {what} for {12 * k + i} euros "
            f"on March {k + 3}."
            for k, (who, town, what) in enumerate(_ORDERS)
        ]
        text = "\n".join(lines)
        return f"{text}\n\nList all orders as JSON: order, customer, town, item, count, price, day."
    if task == "quotes":
        page = (ROOT / "docs" / "channel.md").read_text(encoding="utf-8")[100 * i :][:_PAGE]
        question = _QUESTIONS[i % len(_QUESTIONS)]
        return f"{page}\n\n{question}? Answer with all sentences of this text that say it, word for word."
    if task == "talk":
        return _CHATS[i % len(_CHATS)]
    topic = _TOPICS[i % len(_TOPICS)]
    whom = "a friend who never did it" if i < len(_TOPICS) else f"a child of {i} years"
    return f"Explain to {whom} how to {topic}, and why each step is needed."


def summaries(path: Path) -> list[str]:
    """Return requests to summarize the paragraphs of WikiText's raw text, shuffled."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if 400 < len(line) < 1100 and not line.startswith("=")]
    random.Random(3).shuffle(found)
    for mark, plain in _MARKS.items():
        found = [line.replace(mark, plain) for line in found]
    return [f"Summarize this text in two or three sentences: {line}" for line in found]


def from_file(path: Path) -> list[str]:
    """Read the questions of GSM8K's lines, or the prompts of HumanEval's (also packed with gzip), or make some of a
    raw text."""
    if path.suffix not in (".jsonl", ".gz"):
        return summaries(path)[LEARNT:]
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    items = [json.loads(line) for line in text.splitlines()]
    complete = "Complete this Python function:\n\n"
    return [item["question"] if "question" in item else complete + item["prompt"] for item in items]
