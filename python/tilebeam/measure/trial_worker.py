"""The process that tries both backends on a small model: `python -m tilebeam.measure.trial_worker`, a request on stdin,
ratios on stdout, both as JSON (model/trial.py)."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.measure.machine import OtherLoad
from tilebeam.measure.throughput import Case, Runner
from tilebeam.model.loader import load as load_model

_N_PROMPT, _N_STEPS = 64, 4
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 12
_SECONDS = 0.12  # of each case, unless its rounds are few by then
_PAUSE = 0.02  # the CPU backend's threads spin for some time after a step, and would take CPUs from the other


def main() -> None:
    """Answer one request."""
    asked = json.loads(sys.stdin.read())
    warnings.simplefilter("ignore")
    answer: dict[str, Any]
    try:
        with OtherLoad() as load:
            ratios = _ratios(asked)
        answer = {"ratios": ratios, "others": load.share}
    except TilebeamError as error:
        answer = {"failure": str(error)}
    print(json.dumps(answer))


def _ratios(asked: dict[str, Any]) -> dict[str, float]:
    rows = [int(n) for n in asked["rows"]]
    options = {name: asked[name] for name in ("threads", "flash_attn", "type_k", "type_v")}
    room = max(_N_PROMPT, _N_STEPS * rows[-1])
    # A few layers that nobody loads again: no packed file of them, whatever the environment says.
    options |= {"lookup": False, "cache_ram": 0, "packed_cache": 0}
    device, cpu = (Runner(load_model(asked["model"], name, room, rows[-1], **options)) for name in ("npu", "cpu"))
    cases = {"prompt": Case(_N_PROMPT)} | {str(n): Case(0, _N_STEPS, n) for n in rows}
    return {name: _ratio(device, cpu, case) for name, case in cases.items()}


def _ratio(device: Runner, cpu: Runner, case: Case) -> float:
    """Return how many times as fast the device is, by the fastest of rounds in turn."""
    best = [float("inf"), float("inf")]
    for runner in (device, cpu):
        runner.warm_up(case)
    began, rounds = time.perf_counter(), 0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.perf_counter() - began < _SECONDS):
        time.sleep(_PAUSE)
        best = [min(old, runner.run(case).seconds) for old, runner in zip(best, (device, cpu), strict=True)]
        rounds += 1
    return best[1] / best[0]


if __name__ == "__main__":
    main()
