"""Children that fork() leaves while the parent's threads decode, load and trace. tests/session/test_fork.py runs this.

A program of its own, so that a hang is seen from outside. One thread decodes a prompt again and again and compares
all logits with the first ones, bit for bit; another loads and frees the model; the main thread forks at random moments.
In turn, a child

    decode   decodes another prompt in the parent's context: an error
    context  makes a context of its own on the parent's model and decodes there: an error
    free     frees the parent's contexts and model
    load     loads the model again and decodes: the parent's logits

and none of it may hang or change a bit of what the parent computes. Prints one JSON object.

    PYTHONPATH=.:tests/kits python tests/session/fork_rounds.py thread --rounds 100
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from tilebeam.native import plugin
from tilebeam.native.control import control

from bench.lib import synth

FORKED = "the NPU belongs to the process that forked this one: load the model again here"
HANG_S = 60  # far longer than any child takes, however busy the machine
CELLS = 256
PROMPT = [(7 * i) % 900 + 5 for i in range(200)]


class Loaded:
    """A model on the NPU and a context, as llama.cpp's own functions make them."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 99
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, "the model did not load"
        self.context = self.new_context()

    def new_context(self) -> ctypes.c_void_p:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = CELLS
        params.n_threads = params.n_threads_batch = 2
        context = llama_cpp.llama_init_from_model(self.model, params)
        assert context, "no context"
        return context

    def decode(self, tokens: list[int], context: ctypes.c_void_p | None = None) -> NDArray[np.float32] | None:
        """Logits behind the last of the tokens, in an empty context; None: an error."""
        context = context or self.context
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            return None
        n = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (n,)).copy()

    def free(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


class Children:
    """What a child does; each returns whether it went as it should."""

    def __init__(self, path: Path, parent: Loaded, idle: Loaded, right: NDArray[np.float32]) -> None:
        self.path, self.parent, self.idle, self.right = path, parent, idle, right

    def refused(self, context: ctypes.c_void_p | None = None) -> bool:
        return self.parent.decode([9] * 200, context) is None and FORKED in control().last_error()

    def decode(self) -> bool:
        return self.refused()

    def context(self) -> bool:
        return self.refused(self.parent.new_context())

    def free(self) -> bool:
        self.idle.free()
        return True

    def load(self) -> bool:
        got = Loaded(self.path).decode(PROMPT)
        return got is not None and np.array_equal(got, self.right)

    def kinds(self) -> list[Callable[[], bool]]:
        return [self.decode, self.context, self.free, self.load]


def in_child(work: Callable[[], bool]) -> str:
    """Do something in a forked child: "right", "wrong" or "hung"."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        try:
            os._exit(0 if work() else 1)
        except BaseException as error:
            print(f"{work.__name__}: {error!r}", file=sys.stderr)
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "right", -signal.SIGALRM: "hung"}.get(code, "wrong")


def rounds(path: Path, n: int, seed: int) -> dict[str, object]:
    """Fork `n` times; what became of the children, and of the parent's logits."""
    plugin.register()
    log = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(log, None)
    control()  # its first call takes locks of cffi, which a child could find taken
    parent, idle = Loaded(path), Loaded(path)
    ending = threading.Event()
    decoded: list[bool] = []
    loads = Counter[str]()
    first: list[NDArray[np.float32]] = []

    def decode() -> None:
        right = parent.decode(PROMPT)
        assert right is not None
        first.append(right)
        while not ending.is_set():
            got = parent.decode(PROMPT)
            decoded.append(got is not None and np.array_equal(got, right))

    def load() -> None:
        while not ending.is_set():
            control().trace_start(1000)
            Loaded(path).free()
            control().trace_stop()
            loads["done"] += 1

    threads = [threading.Thread(target=decode), threading.Thread(target=load)]
    threads[0].start()
    while not first:
        time.sleep(0.001)
    threads[1].start()
    children = Children(path, parent, idle, first[0])
    rng = random.Random(seed)
    became: dict[str, Counter[str]] = {}
    for i in range(n):
        time.sleep(rng.uniform(0, 0.03))
        work = children.kinds()[i % len(children.kinds())]
        became.setdefault(work.__name__, Counter())[in_child(work)] += 1
    ending.set()
    for thread in threads:
        thread.join()
    return {
        "children": became,
        "parent": {"right": sum(decoded), "wrong": len(decoded) - sum(decoded)},
        "loads": loads["done"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executor", choices=["thread", "process"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    os.environ["TILEBEAM_NPU"] = args.executor
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or synth.write_model(Path(folder) / "model.gguf", synth.preset("tiny", n_layer=2))
        print(json.dumps(rounds(path, args.rounds, args.seed)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
