"""Units of an evaluation on a Ray cluster (optional extra `ray`).

Every worker is a process of its own with its own models; it gets one unit after the other. A unit begins with clean
caches and its record depends on the setting alone, so it does not matter which worker does it: on machines with the
same instruction set the results are those of a local run, byte for byte. (Kernels of another instruction set add up in
another order.) Model files, task files and checkers must be found under the same paths on all machines, and Tilebeam
must be installed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.config import Unit
from tilebeam.evaluation.log import Record
from tilebeam.evaluation.worker import EvalJob, Workbench
from tilebeam.ray_cluster import Place, connect, last_line, package

_ATTEMPTS = 3  # of a unit whose worker died
_RESTARTS = 10  # of a worker, whichever units it died of


class Worker:
    """Does units in a process of the cluster."""

    def __init__(self, job: EvalJob, place: Place) -> None:
        place.enter()
        self._bench = Workbench(job)

    def run(self, unit: Unit) -> tuple[Unit, Record]:
        """Do a unit.

        Raises:
            TilebeamError: it failed; names the unit.
        """
        try:
            return unit, self._bench.run(unit)
        except Exception as error:  # a checker may raise anything
            raise TilebeamError(f"{unit.key}: {error}") from error


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

    def run(self, job: EvalJob, todo: Sequence[Unit]) -> Iterator[tuple[Unit, Record]]:
        """Do units as `Executor` says. Ray starts a worker that died again and repeats its unit.

        Raises:
            TilebeamError: there is no cluster, a unit failed, or a worker died too often.
        """
        ray = self._ray
        ours = not ray.is_initialized()
        if ours:
            connect(ray, self._address)
        workers: list[Any] = []
        try:
            workers += self._started(job, len(todo))
            pool = ray.util.ActorPool(workers)
            yield from pool.map_unordered(lambda worker, unit: worker.run.remote(unit), todo)
        except ray.exceptions.RayTaskError as error:
            raise TilebeamError(str(error.cause or error)) from error
        except ray.exceptions.RayActorError as error:
            if "creation task" in str(error):
                raise TilebeamError(f"A worker could not start: {last_line(error)}") from error
            raise TilebeamError(f"A worker died {_ATTEMPTS} times in one unit: {last_line(error)}") from error
        finally:
            for worker in workers:
                ray.kill(worker)
            if ours:
                ray.shutdown()

    def _started(self, job: EvalJob, most: int) -> list[Any]:
        """Start workers, as many as there is work and room for."""
        threads = job.setting.threads
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < threads:
            raise TilebeamError(f"The Ray cluster has {cpus} CPUs, a worker needs {threads}: use -t.")
        actor = self._ray.remote(num_cpus=threads, max_restarts=_RESTARTS, max_task_retries=_ATTEMPTS - 1)(Worker)
        return [actor.remote(job, Place.here()) for _ in range(min(self._workers or cpus // threads, most))]
