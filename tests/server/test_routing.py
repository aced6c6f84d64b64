"""Where requests go that begin alike, and where they go when that replica is busy."""

from __future__ import annotations

import json

import pytest
from tilebeam.server.replicas import routing as module
from tilebeam.server.replicas.routing import Routing, Ticket, blocks_of, ticket_for

LONG = "x".join(str(i) for i in range(2000))  # nearly 9000 characters
SHORT = LONG[:256]


def placed(routing: Routing[str], text: str, samples: int = 1) -> Ticket:
    ticket = Ticket(blocks_of(text), samples)
    routing.choose(ticket, ["a", "b"])
    return ticket


def test_what_begins_alike_goes_to_one_replica() -> None:
    routing = Routing()
    first = placed(routing, LONG)
    first.close()
    for end in ("one", "two", "three"):
        ticket = placed(routing, LONG + end)
        assert ticket.replica == first.replica
        ticket.close()


def test_others_go_to_all() -> None:
    routing = Routing()
    seen = set()
    for i in range(40):
        ticket = placed(routing, f"{i}{LONG}")
        seen.add(ticket.replica)
        ticket.close()
    assert seen == {"a", "b"}


def test_a_longer_beginning_bears_more_load() -> None:
    def first(text: str) -> int:
        """How many requests go to one replica before one goes to the other."""
        routing = Routing()
        names = [placed(routing, text).replica for _ in range(20)]
        return names.index("b" if names[0] == "a" else "a")

    assert first(SHORT) == 1  # not worth a sample more
    assert first(LONG[:4032]) in (4, 5)  # of equal ones any
    assert first(LONG) in (8, 9)  # all that counts


def test_samples_count_not_requests() -> None:
    routing = Routing()
    many = placed(routing, "0" + LONG, samples=8)
    few = [placed(routing, f"{i + 1}{LONG}") for i in range(8)]
    assert {t.replica for t in few} == {"a", "b"} - {many.replica}
    many.close()
    assert placed(routing, "9" + LONG).replica == many.replica


def test_a_request_that_went_elsewhere_counts_there() -> None:
    routing = Routing()
    ticket = placed(routing, LONG, samples=4)
    chosen, other = ticket.replica, ({"a", "b"} - {ticket.replica}).pop()
    routing.moved(ticket, other)
    assert ticket.replica == other
    assert placed(routing, "?").replica == chosen
    ticket.close()
    ticket.close()
    assert placed(routing, "??").replica == other


def test_a_request_that_is_done_counts_nowhere() -> None:
    """Its routing may still go on."""
    routing = Routing()
    late = placed(routing, LONG, samples=8)
    late.close()
    routing.moved(late, "a")
    routing.choose(late, ["b"])
    assert {known.load for known in routing._known.values()} == {0}


def test_a_body_that_nests_too_deep_has_no_prompt() -> None:
    deep = '{"content":' * 100_000 + '""' + "}" * 100_000
    assert list(ticket_for(f'{{"messages":[{deep}]}}'.encode()).blocks) == []


def test_only_as_much_is_remembered_as_a_replica_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 4)
    routing = Routing()
    placed(routing, SHORT).close()
    (known,) = (known for known in routing._known.values() if known.read)
    routing.moved(Ticket(blocks_of("?" + LONG)), placed(routing, SHORT).replica or "")
    assert len(known.read) == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"prompt": LONG}, {"prompt": LONG + "more"}),
        ({"prompt": list(range(999))}, {"prompt": [*range(999), 7]}),
        (
            {"messages": [{"role": "user", "content": LONG}]},
            {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}], "n": 2},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
            {"messages": [{"content": [{"text": LONG, "type": "text"}], "role": "user"}]},
        ),
        ({"instructions": "be brief", "input": LONG}, {"instructions": "be brief", "input": LONG, "temperature": 0}),
    ],
)
def test_requests_that_begin_alike(before: dict[str, object], after: dict[str, object]) -> None:
    first, second = (ticket_for(json.dumps(body).encode()).blocks for body in (before, after))
    assert len(first) > 10
    assert first[:-1] == second[: len(first) - 1]


def test_functions_are_read_before_messages() -> None:
    body = {"messages": [{"role": "user", "content": LONG}]}
    other = ticket_for(json.dumps(body | {"tools": [{"type": "function"}]}).encode())
    assert other.blocks[0] != ticket_for(json.dumps(body).encode()).blocks[0]


@pytest.mark.parametrize(
    ("body", "samples"),
    [
        (b"", 1),
        (b"[" * 100_000, 1),
        (b'{"n": "many", "prompt": {"text": 1}, "messages": 3}', 1),
        (b'{"n": 4}', 4),
        (b'{"search": {"budget": 16}}', 16),
        (b'{"prompt": ["a", "b"], "n": 3}', 6),
        (b'{"prompt": [1, 2, 3]}', 1),
        (b'{"n": 1000000000}', 1024),
    ],
)
def test_samples_of_a_request(body: bytes, samples: int) -> None:
    assert ticket_for(body).samples == samples
