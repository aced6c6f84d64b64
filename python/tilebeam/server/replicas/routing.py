"""Which replica a request goes to: one that has read the beginning of its prompt, unless others have less to do.

A replica keeps the KV cells of what it read (`LM.keep_prefixes`), so a prompt that begins alike costs it only the rest.
Texts are compared by blocks of characters, each hashed with all that goes before; no tokenizer is needed.
"""

from __future__ import annotations

import json
import random
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Characters of a block: a shared beginning that is shorter is not worth a detour.
_BLOCK = 64
# Blocks that are looked at: what begins alike for so long will be alike enough.
_MOST_BLOCKS = 2048
# Blocks that a replica is taken to keep: those of about 32768 tokens.
_ROOM = 2048
# A sample that a replica decodes already weighs as much as so many characters that need not be read again: a few
# hundred tokens of a prompt take about as long as one more sample slows the others down.
_CHARACTERS_PER_SAMPLE = 1024
# What counts of a beginning: with it a replica may have so many samples more than the others.
_MOST_READ = 8 * _CHARACTERS_PER_SAMPLE
# What a model reads of a request, in the order in which it does.
_READ = ("model", "tools", "system", "instructions", "messages", "input", "prompt", "content", "query")
# Ray routes in another thread than that of the application.
_lock = threading.Lock()


@dataclass(eq=False)
class _Known:
    """What is known of a replica: the blocks that it has read, and the samples that it decodes."""

    read: OrderedDict[int, None] = field(default_factory=OrderedDict)
    load: int = 0


class Ticket:
    """A request on its way.

    Args:
        blocks: of its prompt; see `blocks_of`.
        samples: it decodes together, which is what it counts for.

    Attributes:
        replica: where it went, None: nowhere yet.
        known: of the replica that it counts for.
        closed: the request is done; who still looks for a replica for it changes nothing.
    """

    def __init__(self, blocks: Sequence[int] = (), samples: int = 1) -> None:
        self.blocks = blocks
        self.samples = samples
        self.replica: str | None = None
        self.known: _Known | None = None
        self.closed = False

    def __reduce__(self) -> tuple[type[Ticket], tuple[()]]:
        """Leave out what it says: the replica has no use for it."""
        return Ticket, ()

    def close(self) -> None:
        """Note that the request is done: the replica has less to do."""
        with _lock:
            self.closed = True
            self.count_for(None)

    def count_for(self, known: _Known | None) -> None:
        """Count for this replica, and for no other any more."""
        for one, sign in ((self.known, -1), (known, 1)):
            if one is not None:
                one.load += sign * self.samples
        self.known = known


class Routing:
    """Knows what each replica has read and what it is doing."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def choose(self, ticket: Ticket, replicas: Iterable[str]) -> list[str]:
        """Return the replicas, the best for this request first. The request counts for that one from now on."""
        with _lock:
            ranked = sorted(replicas, key=lambda replica: self._costs(ticket, replica))
        if ranked:
            self.moved(ticket, ranked[0])
        return ranked

    def moved(self, ticket: Ticket, replica: str) -> None:
        """Note that the request went there, whatever was chosen."""
        with _lock:
            if ticket.closed:
                return
            known = self._known.setdefault(replica, _Known())
            ticket.replica = replica
            ticket.count_for(known)
            for block in ticket.blocks:
                known.read[block] = None
                known.read.move_to_end(block)
            while len(known.read) > _ROOM:
                known.read.popitem(last=False)

    def _costs(self, ticket: Ticket, replica: str) -> tuple[int, float]:
        known = self._known.setdefault(replica, _Known())
        read = next((i for i, block in enumerate(ticket.blocks) if block not in known.read), len(ticket.blocks))
        load = known.load - ticket.samples * (known is ticket.known)
        return load * _CHARACTERS_PER_SAMPLE - min(read * _BLOCK, _MOST_READ), random.random()


def ticket_for(body: bytes) -> Ticket:
    """Return the ticket of a request with this body; one without a prompt if nothing can be made of it: the replica
    will say what is wrong."""
    try:
        given = json.loads(body)
        if isinstance(given, dict):
            read = [given[name] for name in _READ if name in given]
            return Ticket(blocks_of(json.dumps(read, sort_keys=True, ensure_ascii=False)), _samples(given))
    except (ValueError, RecursionError):
        pass
    return Ticket()


def blocks_of(text: str) -> list[int]:
    """Return hashes of a text's beginnings: each of a block and all before it. Good for this process only."""
    blocks = [0]
    # The end counts too: the very same prompt may come again.
    for start in range(0, min(len(text), _BLOCK * _MOST_BLOCKS), _BLOCK):
        blocks.append(hash((blocks[-1], text[start : start + _BLOCK])))
    return blocks[1:]


def _samples(given: dict[str, Any]) -> int:
    search, prompt = given.get("search"), given.get("prompt")
    asked = [given.get("n"), search.get("budget") if isinstance(search, dict) else None]
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(max([1, *(value for value in asked if type(value) is int)]) * prompts, 1024)
