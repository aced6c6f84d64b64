"""Units of an evaluation on a Ray cluster (optional extra `ray`).

Every worker is a process of its own with its own models; it gets one unit after the other. A unit begins with clean
caches and its record depends on the setting alone, so it does not matter which worker does it: on machines with the
same instruction set the results are those of a local run, byte for byte. (Kernels of another instruction set add up in
another order.) Model files, task files and checkers must be found under the same paths on all machines, and Tilebeam
must be installed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.config import Unit
from tilebeam.evaluation.log import Record
from tilebeam.evaluation.worker import Job, Workbench
from tilebeam.ray_cluster import Place, connect, last_line, package

_ATTEMPTS = 3  # of a unit whose worker died


class Worker:
    """Does units in a process of the cluster."""

    def __init__(self, job: Job, place: Place) -> None:
        place.enter()
        self._bench = Workbench(job)

    def run(self, unit: Unit) -> Record:
        """The unit's record."""
        return self._bench.run(unit)


class RayExecutor:
    """Spreads units over a Ray cluster; see `tilebeam.evaluation.runner.Executor`.

    Args:
        address: of the cluster; "auto": the one that this machine belongs to. One that this process is connected to
            already is used as it is.
        workers: processes; None: as many as the cluster's CPUs allow with the setting's threads each.

    Raises:
        TilebeamError: Ray is missing.
    """

    def __init__(self, address: str = "auto", workers: int | None = None) -> None:
        self._ray: Any = package("ray", "--ray", "ray")
        self._address = address
        self._workers = workers

    def run(self, job: Job, todo: Sequence[Unit]) -> Iterator[tuple[Unit, Record]]:
        """See `Executor`.

        Raises:
            TilebeamError: there is no cluster, a unit failed, or its workers died three times.
        """
        ours = not self._ray.is_initialized()
        if ours:
            connect(self._ray, self._address)
        try:
            yield from self._spread(job, todo)
        finally:
            if ours:
                self._ray.shutdown()

    def _spread(self, job: Job, todo: Sequence[Unit]) -> Iterator[tuple[Unit, Record]]:
        ray = self._ray
        threads = job.setting.threads
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < threads:
            raise TilebeamError(f"The Ray cluster has {cpus} CPUs, a worker needs {threads}: use -t.")
        count = min(self._workers or cpus // threads, len(todo))
        kind = ray.remote(num_cpus=threads)(Worker)
        place, waiting, failures = Place.here(), list(reversed(todo)), Counter[str]()
        workers: list[Any] = []
        running: dict[Any, tuple[Any, Unit]] = {}
        try:
            workers = [kind.remote(job, place) for _ in range(count)]
            for worker in workers:
                unit = waiting.pop()
                running[worker.run.remote(unit)] = worker, unit
            while running:
                [ready], _ = ray.wait(list(running), num_returns=1)
                worker, unit = running.pop(ready)
                try:
                    yield unit, ray.get(ready)
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause or error
                    raise TilebeamError(f"{unit.key}: {cause}") from error
                except ray.exceptions.RayActorError as error:
                    if isinstance(error, ray.exceptions.ActorDiedError) and "creation task" in str(error):
                        raise TilebeamError(f"A worker could not start: {last_line(error)}") from error
                    failures[unit.key] += 1
                    if failures[unit.key] == _ATTEMPTS:
                        raise TilebeamError(f"{unit.key}: its worker died {_ATTEMPTS} times: {error}") from error
                    waiting.append(unit)
                    workers.remove(worker)
                    worker = kind.remote(job, place)
                    workers.append(worker)
                if waiting:
                    unit = waiting.pop()
                    running[worker.run.remote(unit)] = worker, unit
        finally:
            for worker in workers:
                ray.kill(worker)
