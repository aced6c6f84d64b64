"""fork(): a child's copy of a model is of no use and does no harm, whatever the parent's threads were doing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ggml_kit as kit
import numpy as np
import pytest
import tilebeam
from npu_kit import OK, Outcome, Session, SharedArray, Vec, scale
from tilebeam.engine import matcher
from tilebeam.native import register
from tilebeam.native.control import control

from bench.lib import synth

HANG_S = 60
N = 1 << 18


def exit_code(child_does: Callable[[], bool]) -> int:
    """Of a forked child: 0 if it returns true, SIGALRM (negative) if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        try:
            os._exit(0 if child_does() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_every_call_of_a_child_fails_at_once(process: bool) -> None:
    """A thread of the parent holds the session's lock nearly all the time; the child's copy of it stays taken."""
    memory = SharedArray(N)
    graph = [scale(Vec(0, N), Vec(0, N), 1.0)] * 50
    with Session(process, n_threads=2) as s:
        s.map(memory)
        done: list[Outcome] = []
        ending = threading.Event()

        def compute() -> None:
            while not ending.is_set():
                done.append(s.compute(graph, 1))

        def all_fail() -> bool:
            outcomes = [s.noop(), s.map_fd(memory.fd, 4096)[0], s.unmap(0), s.compute(graph, 1), s.set_threads(1)]
            told = all(o.name == "TB_E_DEAD" and "forked this one: load the model again" in o.why for o in outcomes)
            counted = s.counters.requests > 0
            s.stop()
            return told and counted

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            while not done:
                time.sleep(0.001)
            assert [exit_code(all_fail) for _ in range(10)] == [0] * 10
            assert exit_code(lambda: not s.alive) == 0
        finally:
            ending.set()
            thread.join()
        assert all(o.status == OK for o in done)
    memory.close()


@pytest.mark.parametrize("tiled", [False, True])
def test_a_child_does_not_reach_a_buffer(tiled: bool) -> None:
    """By ggml's calls a child changes, reads and computes nothing; what it maps in the buffer's place stays there."""
    rng = np.random.default_rng(1)
    with kit.Context() as c:
        weights = c.tensor(kit.Q8_0, 64, 64) if tiled else c.tensor(kit.F32, 64, 64)
        buffer = c.allocate(c.device.tiled if tiled else c.device.plain)
        kit.put(weights, rng.integers(0, 100, kit.lib.ggml_nbytes(weights)).astype(np.uint8))
        size = int(kit.lib.ggml_backend_buft_get_alloc_size(c.device.tiled, weights))
        bytes_ = np.frombuffer(kit.ffi.buffer(kit.lib.ggml_backend_buffer_get_base(buffer), size), np.uint8)
        before = bytes_.copy()
        x = c.tensor(kit.F32, 64, 2)
        product = kit.lib.ggml_mul_mat(c.ctx, weights, x) if tiled else kit.lib.ggml_add(c.ctx, x, x)
        c.allocate(c.device.plain)

        def write() -> bool:
            kit.lib.ggml_backend_buffer_clear(buffer, 7)
            kit.lib.ggml_backend_tensor_memset(weights, 7, 0, 64)
            kit.put(weights, np.zeros(kit.lib.ggml_nbytes(weights), np.uint8))
            return True

        def read() -> bool:
            told = kit.get(weights)
            return not told.any() and "forked this one" in c.device.control.last_error()

        def compute() -> bool:
            return c.compute(product) == kit.FAILED and "forked this one" in c.device.control.last_error()

        assert exit_code(write) == 0
        assert exit_code(compute) == 0
        assert exit_code(read) == 0
        assert np.array_equal(bytes_, before)


@pytest.mark.parametrize(
    ("lock", "call"),
    [
        (matcher._known_lock, lambda: not matcher.is_known("root ::= [a]", Mock())),
        (register._lock, lambda: bool(tilebeam.register().devices())),
    ],
    ids=["grammars", "register"],
)
def test_locks_of_the_program_are_free_in_a_child(lock: threading.Lock, call: Callable[[], bool]) -> None:
    tilebeam.register()
    with lock:
        assert exit_code(call) == 0


def test_a_child_made_while_the_engine_is_held_frees_nothing(tmp_path: Path) -> None:
    path = synth.write_model(tmp_path / "model.gguf", synth.preset("tiny", n_layer=1))
    with tilebeam.load(path, "npu", n_ctx=256, n_seq_max=2, threads=1) as lm, ExitStack() as held:
        held.enter_context(lm.raw_decode())

        def leave() -> bool:
            held.close()
            return not lm._dispatcher.close()

        assert exit_code(leave) == 0


@pytest.mark.parametrize(("device", "executor"), [("npu", "thread"), ("npu", "process"), ("cpu", None)])
def test_a_loaded_lm_stays_with_its_process(device: str, executor: str | None, tmp_path: Path) -> None:
    """While threads of the parent generate, load and trace, a child is refused every call on its copy; what it loads
    works."""
    path = synth.write_model(tmp_path / "model.gguf", synth.preset("tiny", n_layer=1))
    params = tilebeam.SamplingParams(temperature=0, max_tokens=20)
    options: dict[str, Any] = {"device": device, "n_ctx": 256, "n_seq_max": 4, "threads": 1, "executor": executor}
    with tilebeam.load(path, **options) as lm:
        want = lm.generate("a b c", params)[0].outputs[0].text
        texts: list[str] = []
        ending = threading.Event()

        def generate() -> None:
            while not ending.is_set():
                texts.append(lm.generate("a b c", params)[0].outputs[0].text)

        def load_others() -> None:
            while not ending.is_set():
                control().trace_start(1000)
                tilebeam.load(path, **options).close()
                control().trace_stop()

        def refused(call: Callable[[], object]) -> bool:
            with pytest.raises(tilebeam.TilebeamError, match="belongs to the process that forked this one; load it"):
                call()
            return True

        def all_refused() -> bool:
            calls: list[Callable[[], object]] = [
                lambda: lm.generate("a", params),
                lambda: list(lm.stream("a", params)),
                lambda: lm.logits([5, 6]),
                lambda: lm.read(["a"], [[0]]),
                lambda: lm.tokenize("a"),
                lambda: lm.detokenize([5]),
                lambda: lm.raw_decode().__enter__(),
            ]
            told = all(refused(call) for call in calls)
            lm.close()
            return told

        def load() -> bool:
            with tilebeam.load(path, **options) as mine:
                return mine.generate("a b c", params)[0].outputs[0].text == want

        with ThreadPoolExecutor() as pool:
            others = [pool.submit(generate), *([pool.submit(load_others)] if device == "npu" else [])]
            try:
                while not texts:
                    time.sleep(0.001)
                assert [exit_code(all_refused) for _ in range(5)] == [0] * 5
                if device == "npu":  # OpenMP's threads, which a child lacks, are not ours
                    assert [exit_code(load) for _ in range(4)] == [0] * 4
            finally:
                ending.set()
            for other in others:
                other.result()
        assert set(texts) == {want}
