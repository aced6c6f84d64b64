"""The NPU side alone: these tests play the CPU side and send what a sane one would not."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_kit import FFI, LIB, OK, REQUEST, STATUS, Outcome, SharedArray, Vec, graph, scale

SLACK_S = 20.0  # machines that build and test at the same time; a hang would be forever


@pytest.fixture
def memory() -> Iterator[SharedArray]:
    array = SharedArray(1 << 16)
    array.floats[:] = 1
    yield array
    array.close()


class Peer:
    """A control region and a served NPU in a thread of this process; requests are written by hand."""

    def __init__(self, **header: int) -> None:
        self.size = 1 << 20
        self.fd = os.memfd_create("tilebeam-test", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._map = mmap.mmap(self.fd, self.size)
        self.channel = FFI.from_buffer("tb_channel *", self._map)
        c, hello = self.channel, FFI.addressof(self.channel, "cpu")
        LIB.tb_service_hello(hello, self.size)
        hello.n_threads = 1
        for name, value in header.items():
            if name == "build_id":
                hello.build_id[0] ^= value
            else:
                setattr(hello, name, value)
        if "check" not in header:
            hello.check = LIB.tb_service_hello_check(hello)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        end = time.monotonic() + SLACK_S
        while c.npu_ready == 0 and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.001)

    def _serve(self) -> None:
        self.code = LIB.tb_service_serve(self.fd, self.theirs.fileno())

    def send(
        self,
        kind: int,
        payload: bytes = b"",
        fd: int | None = None,
        *,
        flip: int | None = None,
        toggle: tuple[str, int] | None = None,
        **wrong: int,
    ) -> Outcome:
        """One request and its reply. `wrong` fields get the right digest unless they are it; after the digest is made,
        `flip` changes a byte of the payload and `toggle` a bit of a field."""
        c, seq = self.channel, (self.channel.req_seq + 1) & 0xFFFFFFFF
        r = c.request
        r.kind, r.payload_offset, r.payload_size = kind, 4096, len(payload)
        self._map[4096 : 4096 + len(payload)] = payload
        for name, value in wrong.items():
            setattr(r, name, value)
        if "check" not in wrong and r.payload_size <= len(payload):
            r.check = LIB.tb_service_check(seq, FFI.addressof(r), FFI.from_buffer(self._map) + 4096)
        if flip is not None:
            self._map[4096 + flip] ^= 0x40
        if toggle is not None:
            setattr(r, toggle[0], getattr(r, toggle[0]) ^ (1 << toggle[1]))
        if fd is not None:
            socket.send_fds(self.ours, [seq.to_bytes(4, sys.byteorder)], [fd])
        c.req_seq = seq
        end = time.monotonic() + SLACK_S
        while c.rep_seq != seq:
            assert time.monotonic() < end, "no reply"
            LIB.tb_service_wake(FFI.addressof(c, "req_seq"))
        return Outcome(c.reply.status, c.reply.op_index, FFI.string(c.reply.why).decode())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.close()
        self._thread.join(SLACK_S)
        assert not self._thread.is_alive()
        self.theirs.close()
        self.channel = None
        self._map.close()
        os.close(self.fd)


def test_damaged_messages_are_refused_whole(memory: SharedArray) -> None:
    """Every word of a request and of its payload, changed between the two sides: nothing runs, and the NPU says so."""
    ops = graph([scale(Vec(0, 8), Vec(0, 8), 2.0)])
    head = FFI.new("tb_graph *", {"slot": 0, "n_ops": 1, "serial": 1})
    payload = bytes(FFI.buffer(head)) + bytes(FFI.buffer(ops))
    mapping = FFI.new("tb_map *", {"buffer": 0, "writable": 1, "offset": 0, "size": memory.size})
    with Peer() as p:
        assert p.send(REQUEST["TB_REQ_MAP"], bytes(FFI.buffer(mapping)), fd=memory.fd).status == OK
        assert p.send(REQUEST["TB_REQ_COMPUTE"], payload).status == OK
        for at in range(0, len(payload), 4):
            r = p.send(REQUEST["TB_REQ_COMPUTE"], payload, flip=at)
            assert (r.name, "damaged" in r.why) == ("TB_E_PROTOCOL", True)
        for name in ("kind", "payload_offset", "payload_size", "check"):
            for bit in (0, 7, 31):
                r = p.send(REQUEST["TB_REQ_COMPUTE"], payload, toggle=(name, bit))
                assert (r.name, "damaged" in r.why) == ("TB_E_PROTOCOL", True)
        assert p.send(REQUEST["TB_REQ_COMPUTE"], payload).status == OK
    assert np.all(memory.floats[:8] == 4)
    assert np.all(memory.floats[8:] == 1)


@pytest.mark.parametrize(
    ("header", "status", "text"),
    [
        ({"magic": 1}, "TB_E_PROTOCOL", "magic"),
        ({"protocol_version": 1}, "TB_E_VERSION", "protocol version 1 of the CPU side is not the NPU's 5"),
        ({"layout_version": 9}, "TB_E_VERSION", "layout version 9"),
        ({"abi_bytes": 5}, "TB_E_VERSION", "message size"),
        ({"build_id": 1}, "TB_E_VERSION", "built from other sources"),
        ({"check": 1}, "TB_E_PROTOCOL", "damaged"),
        ({"region_size": 4096}, "TB_E_VERSION", "region size"),
        ({"n_threads": 100000}, "TB_E_PROTOCOL", "threads"),
    ],
)
def test_handshake_is_refused(header: dict[str, int], status: str, text: str) -> None:
    with Peer(**header) as p:
        assert p.channel.npu_ready == 2
        assert p.channel.reply.status == STATUS[status]
        assert text in FFI.string(p.channel.reply.why).decode()
    assert p.code == 1


def test_region_too_small() -> None:
    fd = os.memfd_create("tilebeam-test")
    os.ftruncate(fd, 64)
    a, b = socket.socketpair()
    assert LIB.tb_service_serve(fd, b.fileno()) == 1
    os.close(fd)
    a.close()
    b.close()


def test_malformed_requests(memory: SharedArray) -> None:
    def head(slot: int, n: int, serial: int) -> bytes:
        return bytes(FFI.buffer(FFI.new("tb_graph *", {"slot": slot, "n_ops": n, "serial": serial})))

    def patch(index: int, op: Any) -> bytes:
        return bytes(FFI.buffer(FFI.new("tb_patch *", {"index": index, "op": op})))

    ops = graph([scale(Vec(0, 8), Vec(0, 8), 2.0)])
    one = bytes(FFI.buffer(ops))
    mapping = FFI.new("tb_map *", {"buffer": 0, "writable": 1, "offset": 0, "size": memory.size})
    with Peer() as p:
        assert p.channel.npu_ready == 1
        bad = "TB_E_PROTOCOL"
        assert p.send(REQUEST["TB_REQ_MAP"], bytes(FFI.buffer(mapping))).name == bad  # no descriptor
        assert p.send(REQUEST["TB_REQ_MAP"], b"short", fd=memory.fd).name == bad
        assert p.send(REQUEST["TB_REQ_MAP"], bytes(FFI.buffer(mapping)), fd=memory.fd).status == OK
        for kind in (0, 8, 4000000000):
            assert p.send(kind).name == bad
        noop, compute, patched = (REQUEST[f"TB_REQ_{k}"] for k in ("NOOP", "COMPUTE", "PATCH"))
        assert p.send(noop).status == OK
        assert p.send(noop, check=12345).name == bad
        assert p.send(noop, payload_offset=0).name == bad
        assert p.send(noop, payload_offset=2**64 - 1).name == bad
        assert p.send(noop, payload_size=2**64 - 1).name == bad
        assert p.send(noop, payload_offset=p.size, payload_size=1).name == bad
        assert p.send(compute, b"").name == bad
        assert p.send(compute, head(0, 2, 1) + one).name == bad
        assert p.send(compute, head(0, 2**32 - 1, 1) + one).name == bad
        assert p.send(compute, head(16, 1, 1) + one).name == bad
        assert p.send(patched, head(0, 0, 1)).name == bad  # nothing kept yet
        assert p.send(compute, head(0, 1, 7) + one).status == OK
        assert p.send(patched, head(0, 0, 0)).name == bad
        assert p.send(patched, head(1, 0, 7)).name == bad
        assert p.send(patched, head(0, 1, 7) + patch(1, ops[0])).name == bad
        assert p.send(patched, head(0, 2, 7) + patch(0, ops[0])).name == bad
        assert np.all(memory.floats[:8] == 2)
        assert p.send(patched, head(0, 1, 7) + patch(0, ops[0])).status == OK
        assert p.send(patched, head(0, 0, 7)).status == OK
        assert np.all(memory.floats[:8] == 8)
        assert p.send(REQUEST["TB_REQ_THREADS"], b"").name == bad
        assert p.send(REQUEST["TB_REQ_THREADS"], head(0, 1000, 0)).name == bad
        assert p.send(REQUEST["TB_REQ_UNMAP"], b"").name == bad
        assert p.send(REQUEST["TB_REQ_STOP"]).status == OK
    assert p.code == 0


@pytest.fixture(scope="module")
def mutated() -> Iterator[tuple[Peer, SharedArray]]:
    """One NPU for all examples: the middle pages of an array are its buffer 0."""
    array = SharedArray(4096)
    array.floats[:] = 1
    page = os.sysconf("SC_PAGESIZE")
    m = FFI.new("tb_map *", {"buffer": 0, "writable": 1, "offset": page, "size": array.size - 2 * page})
    with Peer() as peer:
        assert peer.send(REQUEST["TB_REQ_MAP"], bytes(FFI.buffer(m)), fd=array.fd).status == OK
        yield peer, array
    array.close()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_messages(mutated: tuple[Peer, SharedArray], data: st.DataObject) -> None:
    """Valid graphs with random bytes changed (and the digest made right again): refused, or run inside the buffer."""
    peer, array = mutated
    n = data.draw(st.integers(1, 4))
    ops = graph([scale(Vec(0, 8), Vec(0, 8), 1.0)] * n)
    payload = bytearray(bytes(FFI.buffer(FFI.new("tb_graph *", {"n_ops": n, "serial": 1}))) + bytes(FFI.buffer(ops)))
    interesting = [at for i in range(n) for at in range(16 + 512 * i, 16 + 512 * i + 208)]
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.sampled_from(interesting)) if data.draw(st.booleans()) else data.draw(st.integers(0, 15))
        payload[at] = data.draw(st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 128, 255]))
    peer.send(REQUEST["TB_REQ_COMPUTE"], bytes(payload))
    peer.send(REQUEST["TB_REQ_PATCH"], bytes(payload))
    assert peer.send(REQUEST["TB_REQ_NOOP"]).status == OK
    assert np.all(array.floats[:512] == 1)
    assert np.all(array.floats[-512:] == 1)
