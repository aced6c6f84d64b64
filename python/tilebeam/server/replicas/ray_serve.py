"""The server as a Ray Serve application (the extra `replicas`): several replicas of a model behind one address.

Ray's HTTP proxies -> Ingress (one process: access, routing) -> RayReplica (N processes with a model each)
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tilebeam.errors import TilebeamError
from tilebeam.ray_cluster import Place, connect, last_line
from tilebeam.server.replicas import replica
from tilebeam.server.replicas.ingress import RemoteAnswer, create_ingress
from tilebeam.server.replicas.routing import Routing, Ticket
from tilebeam.server.security import MOST_REQUESTS
from tilebeam.server.served_model import ServedModel
from tilebeam.server.settings import Settings

APP = "tilebeam"
# Seconds between two looks at a replica, and after which one that does not answer is replaced.
_LOOK_SECONDS, _HANG_SECONDS = 2.0, 60.0
# Loads that may fail before the application is given up.
_LOADS = 2
# Seconds beyond their deadline that requests have to tell their clients.
_LAST_WORDS = 5.0
# Seconds that Ray's HTTP proxies have to find a new application.
_PROXY_SECONDS = 60.0
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


class Router(RequestRouter):  # type: ignore[misc]
    """Sends each request where `Routing` says. Runs in the ingress's process."""

    def initialize_state(self, slots: int, cells: int) -> None:
        """Make the `Routing`; called by Ray."""
        self._routing: Routing[str] = Routing(slots, cells)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in groups, the best first; Ray takes the first one that accepts the request."""
        by_name = {candidate.replica_id.unique_id: candidate for candidate in candidate_replicas}
        ticket = _ticket(pending_request)
        return [[by_name[name]] for name in self._routing.choose(ticket, by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has the request."""
        del result
        self._routing.moved(_ticket(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that went; called when some came or went."""
        super().update_replicas(replicas)
        self._routing.keep(found.replica_id.unique_id for found in replicas)


def _ticket(request: PendingRequest | None) -> Ticket:
    given = next(iter(request.args), None) if request is not None else None
    return given if isinstance(given, Ticket) else Ticket()


class RayReplica(replica.Replica):
    """Asked by `Ingress`."""

    async def about(self, method: str, *args: Any) -> tuple[str, Any]:
        """Return this replica's name and what a method returns."""
        return serve.get_replica_context().replica_tag, await getattr(self, method)(*args)

    async def __del__(self) -> None:
        """Close the models; called by Ray before the process ends."""
        if hasattr(self, "_models"):
            await self.close()


class _Replicas:
    """`RayReplica` through Ray's handle; see `tilebeam.server.replicas.ingress.Replicas`."""

    lost: tuple[type[Exception], ...] = (RayActorError, RayServeException)

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._answers = handle.options(method_name="answer", stream=True)

    def ask(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> RemoteAnswer:
        """Have one of them answer."""
        answer: RemoteAnswer = self._answers.remote(ticket, scope, body)
        return answer

    async def all(self, method: str, patience: float) -> dict[str, Any]:
        """Return what a method of each returns."""
        try:
            answers = self._handle.broadcast("about", method)
            # In a thread: only this form has the others' answers where one replica hangs.
            told = await asyncio.to_thread(answers.results, timeout_s=patience, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return {}
        return dict(answer for answer in told if not isinstance(answer, BaseException))


@serve.ingress()
class Ingress:
    """`tilebeam.server.replicas.ingress` as Ray runs it."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas = replicas
        self._settings = settings

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Make the application; called by Ray once the process is there."""
        return create_ingress(_Replicas(self._replicas), self._settings)


@dataclass(frozen=True)
class Size:
    """How much of a cluster is used.

    Attributes:
        replicas: processes with the model.
        cpus: of the cluster's CPUs, what each takes.
        slots, cells: of each; see `Routing`.
    """

    replicas: int
    cpus: int
    slots: int
    cells: int


def application(served: Sequence[ServedModel], settings: Settings, size: Size) -> Any:
    """Return the application for `serve.run`."""
    common: dict[str, Any] = {
        "logging_config": _QUIET,
        "max_ongoing_requests": MOST_REQUESTS + 64,  # the application refuses by itself what is too much
        "health_check_period_s": _LOOK_SECONDS,
        "health_check_timeout_s": _HANG_SECONDS,
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": _LOADS,
    }
    models = serve.deployment(RayReplica).options(
        name="Replica",
        num_replicas=size.replicas,
        ray_actor_options={"num_cpus": size.cpus},
        request_router_config=RequestRouterConfig(
            request_router_class=Router, request_router_kwargs={"slots": size.slots, "cells": size.cells}
        ),
        **common,
    )
    # One: it knows what each replica has read and is doing.
    ingress = serve.deployment(Ingress).options(
        name="Ingress", num_replicas=1, ray_actor_options={"num_cpus": 0}, **common
    )
    return ingress.bind(models.bind(served, settings, Place.here()), settings)


def serve_replicas(
    served: Sequence[ServedModel], settings: Settings, size: Size, address: str, *, ready: Callable[[str], None]
) -> None:
    """Serve with replicas on a Ray cluster until a signal comes.

    Args:
        served: the models.
        settings: how to serve.
        size: the replicas.
        address: of the cluster; see `tilebeam.ray_cluster.connect`.
        ready: called with the API's URL, once requests are accepted.

    Raises:
        TilebeamError: there is no cluster, it is too small or serves already, or the model cannot be loaded.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    connect(ray, address)
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        _check_room(size)
        wait_for_signal = _signalled()
        _start(settings, stack)
        try:
            stack.callback(_delete)
            serve.run(application(served, settings, size), name=APP, route_prefix="/")
        except (RuntimeError, RayError, RayServeException) as error:
            raise TilebeamError(f"The replicas did not start: {_why() or last_line(error)}") from error
        _wait_for(f"http://{_bracketed(_reachable(settings.host))}:{settings.port}/health")
        ready(f"http://{_bracketed(settings.host)}:{settings.port}")
        wait_for_signal()
        _drain(settings.shutdown_seconds)


def _check_room(size: Size) -> None:
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < size.replicas * size.cpus:
        raise TilebeamError(
            f"The Ray cluster has {there} CPUs; {size.replicas} replicas with {size.cpus} each need "
            f"{size.replicas * size.cpus}: use --replicas or -t."
        )


def _start(settings: Settings, stack: ExitStack) -> None:
    """Start Ray Serve, where it does not run."""
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port}, logging_config=_QUIET)
    except RayError as error:
        raise TilebeamError(f"Ray Serve's HTTP proxy did not start: {last_line(error)}") from error
    if APP in serve.status().applications:
        raise TilebeamError(f"This cluster's Ray Serve runs {APP!r} already: end it first, or `serve shutdown`.")
    # Ray tells on stdout that it ended its own process.
    stack.enter_context(redirect_stdout(None))


def _drain(seconds: float) -> None:
    """Let running requests end, and tell the others why they do not."""
    replicas = serve.get_deployment_handle("Replica", APP)
    with suppress(TimeoutError, RayError, RayServeException):  # whatever is left ends with its process
        replicas.broadcast("about", "drain", seconds).results(timeout_s=seconds + _LAST_WORDS, return_exceptions=True)
    time.sleep(_LAST_WORDS / 10)  # their answers are on the way


def _delete() -> None:
    """End the application, and Ray Serve if it runs no other."""
    serve.delete(APP)
    if not serve.status().applications:
        serve.shutdown()  # the next server may want another port


def _why() -> str:
    """Return what a replica said that could not start; empty: nothing that is ours."""
    application = serve.status().applications.get(APP)
    told = [found.message for found in application.deployments.values()] if application is not None else []
    found = re.findall(r"^tilebeam\.errors\.\w+: (.+)$", "\n".join(told), re.MULTILINE)
    return str(found[-1]) if found else ""


def _signalled() -> Callable[[], object]:
    """Have SIGINT and SIGTERM end a wait, which is returned; the second signal does not wait for what that begins."""
    # A pipe: an event's lock could be held by the very wait that the handler interrupts.
    ended, end = os.pipe()
    came: list[int] = []

    def come(number: int, _: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        os.write(end, b"\0")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, come)
    return partial(os.read, ended, 1)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reachable(host: str) -> str:
    """Return an address of this machine for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _wait_for(url: str) -> None:
    """Wait until Ray's HTTP proxy knows the application.

    Raises:
        TilebeamError: it does not answer.
    """
    deadline = time.monotonic() + _PROXY_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.HTTPError) as error:
            if time.monotonic() > deadline:
                raise TilebeamError(
                    f"Ray Serve's HTTP proxy does not answer at {url}: {error}. If Ray Serve runs on this cluster "
                    "already, it keeps the address that it was started with."
                ) from None
        time.sleep(0.1)
