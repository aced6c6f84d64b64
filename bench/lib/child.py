"""A loaded model in a process of its own, which runs what it is asked to: what it takes from the machine is its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from bench.lib import ROOT


def answer(ready: Any, run: Callable[[Any], Any]) -> None:
    """Take the process' side: say that it is ready, then answer every line of JSON on stdin with one on stdout."""
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


class Child:
    """The other side; a context manager.

    Args:
        function: of the module, which calls `answer`.
        arguments: of the function.
        environment: variables that the process gets besides.

    Attributes:
        ready: what the process said first.

    Raises:
        RuntimeError: by `ask` too: the process ended; it said why on stderr.
    """

    def __init__(self, module: str, function: str, *arguments: Any, **environment: str) -> None:
        call = f"from {module} import {function}; {function}(*{arguments!r})"
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", call],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self.ready = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of one side ended with status {self._process.wait()}")
        return json.loads(line)

    def ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
