"""Which replica a request goes to: one that has read the beginning of its prompt, unless others have less to do.

A replica keeps the KV cells of what it read (`LM.keep_prefixes`), so a prompt that begins alike costs it only the rest.
Texts are compared by blocks of characters, each hashed with all that goes before; no tokenizer is needed.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

ReplicaKey = TypeVar("ReplicaKey", bound=Hashable)

# Characters of a block: a shared beginning that is shorter is not worth a detour.
_BLOCK = 64
# Blocks that are looked at: what begins alike for so long will be alike enough.
_MOST_BLOCKS = 2048
# A sample that a replica decodes already weighs as much as so many characters that need not be read again: a few
# hundred tokens of a prompt take about as long as one more sample slows the others down.
_CHARACTERS_PER_SAMPLE = 1024
_CHARACTERS_PER_TOKEN = 4


class Ticket:
    """A request on its way.

    Args:
        blocks: of its prompt; see `blocks_of`.
        samples: it decodes together, which is what it counts for.

    Attributes:
        replica: where it went, None: nowhere yet.
    """

    def __init__(self, blocks: Sequence[int] = (), samples: int = 1) -> None:
        self.blocks = blocks
        self.samples = samples
        self.replica: Any = None
        self.routing: Routing[Any] | None = None
        self.closed = False

    def __reduce__(self) -> tuple[type[Ticket], tuple[()]]:
        """Leave out what it says: the replica has no use for it."""
        return Ticket, ()

    def close(self) -> None:
        """Note that the request is done: the replica has less to do; who still looks for one for it changes nothing."""
        self.closed = True
        if self.routing is not None:
            self.routing.leave(self)


class Routing(Generic[ReplicaKey]):
    """Knows what each replica has read and what it is doing. Thread-safe.

    Args:
        slots: samples that a replica decodes together. A replica is preferred for what it read as long as it has at
            most so many samples more than the others.
        cells: tokens that a replica keeps.
    """

    def __init__(self, slots: int, cells: int) -> None:
        self._most_read = slots * _CHARACTERS_PER_SAMPLE
        self._room = max(1, cells * _CHARACTERS_PER_TOKEN // _BLOCK)
        self._read: dict[ReplicaKey, OrderedDict[int, None]] = {}
        self._load: dict[ReplicaKey, int] = {}
        self._turn: dict[ReplicaKey, int] = {}  # when it was last chosen
        self._turns = 0
        self._lock = threading.Lock()

    def choose(self, ticket: Ticket, replicas: Iterable[ReplicaKey]) -> list[ReplicaKey]:
        """Return the replicas, the best for this request first. The request counts for that one from now on."""
        with self._lock:
            ranked = sorted(replicas, key=lambda replica: self._costs(ticket, replica))
            if ranked:
                self._enter(ticket, ranked[0])
            return ranked

    def moved(self, ticket: Ticket, replica: ReplicaKey) -> None:
        """Note that the request went there, whatever was chosen."""
        with self._lock:
            self._enter(ticket, replica)

    def leave(self, ticket: Ticket) -> None:
        """Note that the request is done; see `Ticket.close`."""
        with self._lock:
            self._withdraw(ticket)
            ticket.routing = None

    def keep(self, replicas: Iterable[ReplicaKey]) -> None:
        """Forget what others than these have read: they are gone."""
        with self._lock:
            alive = set(replicas)
            for table in (self._read, self._load, self._turn):
                for replica in table.keys() - alive:
                    del table[replica]

    def _costs(self, ticket: Ticket, replica: ReplicaKey) -> tuple[int, int]:
        known = self._read.get(replica, ())
        read = 0
        for block in ticket.blocks:
            if block not in known:
                break
            read += _BLOCK
        load = self._load.get(replica, 0) - (ticket.samples if ticket.replica == replica else 0)
        # Of equal ones the one whose turn is longest ago.
        return load * _CHARACTERS_PER_SAMPLE - min(read, self._most_read), self._turn.get(replica, 0)

    def _enter(self, ticket: Ticket, replica: ReplicaKey) -> None:
        self._withdraw(ticket)
        if ticket.closed:
            return
        ticket.replica, ticket.routing = replica, self
        self._load[replica] = self._load.get(replica, 0) + ticket.samples
        self._turns += 1
        self._turn[replica] = self._turns
        known = self._read.setdefault(replica, OrderedDict())
        for block in ticket.blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._room:
            known.popitem(last=False)

    def _withdraw(self, ticket: Ticket) -> None:
        if ticket.routing is self and ticket.replica in self._load:
            self._load[ticket.replica] -= ticket.samples


def ticket_for(body: bytes) -> Ticket:
    """Return the ticket of a request with this body; one without a prompt if nothing can be made of it: the replica
    will say what is wrong."""
    try:
        given = json.loads(body)
        if isinstance(given, dict):
            return Ticket(blocks_of(_texts(given)), _samples(given))
    except (ValueError, RecursionError):
        pass
    return Ticket()


def blocks_of(texts: Iterable[str]) -> list[int]:
    """Return hashes of a text's beginnings: each of a block and all before it. Good for this process only.

    Args:
        texts: its parts.
    """
    blocks: list[int] = []
    before, rest = 0, ""
    for text in texts:
        rest += text[: _MOST_BLOCKS * _BLOCK]
        whole = len(rest) - len(rest) % _BLOCK
        for start in range(0, whole, _BLOCK):
            before = hash((before, rest[start : start + _BLOCK]))
            blocks.append(before)
        rest = rest[whole:]
        if len(blocks) >= _MOST_BLOCKS:
            return blocks[:_MOST_BLOCKS]
    if rest:  # the end counts too: the very same prompt may come again
        blocks.append(hash((before, rest)))
    return blocks


def _texts(given: dict[str, Any]) -> Iterator[str]:
    """Yield what a request has the model read, in the order in which the model reads it."""
    for name in ("model", "tools", "system", "instructions", "input_extra", "input_prefix"):
        if name in given:
            yield json.dumps(given[name])
    for name in ("messages", "input", "prompt", "content", "query"):
        value = given.get(name)
        if isinstance(value, list):
            yield from map(_text, value)
        elif value is not None:
            yield _text(value)


def _text(part: Any) -> str:
    """Return a text as it is; of messages role and content alone, so that a conversation's next turn begins alike."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and "content" in part:
        content = part["content"]
        parts = content if isinstance(content, list) else [content]
        return f"\n{part.get('role')}: " + "".join(map(_text, parts))
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(part) + " "


def _samples(given: dict[str, Any]) -> int:
    search = given.get("search")
    budget = search.get("budget") if isinstance(search, dict) else None
    asked = [value for value in (given.get("n"), given.get("best_of"), budget) if type(value) is int]
    prompt = given.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return min(max([1, *asked]) * prompts, 1024)
