"""The server as a Ray Serve application (the extra `replicas`): several replicas of a model behind one address.

Ray's HTTP proxies -> Ingress (one process: access, routing) -> Replica (N processes with a model each)
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message

from tilebeam.errors import TilebeamError
from tilebeam.model.load_options import default_threads
from tilebeam.ray_cluster import Place, connect, last_line
from tilebeam.server.app import create_app
from tilebeam.server.model_host import decoding_first
from tilebeam.server.replicas.ingress import ReplicaLost, create_ingress
from tilebeam.server.replicas.routing import Routing, Ticket
from tilebeam.server.security import MOST_REQUESTS
from tilebeam.server.served_model import ServedModel, models_of
from tilebeam.server.settings import Settings

APP = "tilebeam"
# Seconds between two looks at a replica, and after which one that does not answer is replaced.
_LOOK_SECONDS, _HANG_SECONDS = 2.0, 60.0
# Seconds that a replica has to tell how it is.
_PATIENCE = 5.0
# Loads that may fail before the application is given up.
_LOADS = 2
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
log = logging.getLogger("tilebeam.server")


class _Router(RequestRouter):  # type: ignore[misc]
    """Sends each request where `Routing` says. Runs in the ingress's process."""

    def initialize_state(self) -> None:
        """Make the `Routing`; called by Ray."""
        self._routing = Routing()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in groups, the best first; Ray takes the first one that accepts the request."""
        assert pending_request is not None
        by_name = {candidate.replica_id.unique_id: candidate for candidate in candidate_replicas}
        return [[by_name[name]] for name in self._routing.choose(pending_request.args[0], by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has the request."""
        del result
        self._routing.moved(pending_request.args[0], replica_id.unique_id)


class _Replica:
    """The application with models of its own; who may ask is not looked at again."""

    def __init__(self, served: Sequence[ServedModel], settings: Settings, place: Place) -> None:
        place.enter()
        # The host of a server that anybody may reach: the names of hosts were checked.
        settings = replace(settings, api_keys=(), cors_origins=(), host="0.0.0.0")
        self._models, _ = models_of(served, settings)
        self._app = create_app(self._models)
        self._running: set[asyncio.Task[None]] = set()
        self._counts_idle_seconds = False
        decoding_first()

    async def answer(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the application's answer to a request: its ASGI messages, those that are there together in one list."""
        del ticket  # for the router
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if request:
                return request.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except Exception:
                log.exception("%s %s failed", scope["method"], scope["path"])
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        self._running.add(task)  # it ends by itself, also after its client has left
        task.add_done_callback(self._running.discard)
        try:
            found: list[Message | None] = []
            while None not in found:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                if told := [message for message in found if message is not None]:
                    yield told
        finally:
            left.set()

    async def health(self) -> tuple[str, tuple[int, dict[str, Any]]]:
        """Return this replica's name, and status and body of /health with the number of its requests."""
        status, body = self._models.health()
        return serve.get_replica_context().replica_tag, (status, body | {"requests": self._models.requests})

    async def check_health(self) -> None:
        """Answer Ray now and then. RuntimeError: this replica cannot go on, and another must take its place."""
        if not self._counts_idle_seconds:
            self._counts_idle_seconds = True
            self._models.start()  # the event loop runs
        hosts = [service.host for service in self._models.services]
        for host in hosts:
            host.look()
        if all(host.state == "failed" for host in hosts):
            raise RuntimeError(hosts[0].reason)

    async def __del__(self) -> None:
        """Close the models; called by Ray before the process ends."""
        if hasattr(self, "_models"):
            await self._models.close()


@serve.ingress()
class _Ingress:
    """`tilebeam.server.replicas.ingress` as Ray runs it, with its handle of the replicas."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas = replicas
        self._settings = settings

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Make the application; called by Ray once the process is there."""
        return create_ingress(self._ask, self._ask_all, self._settings)

    async def _ask(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        answer = self._replicas.options(method_name="answer", stream=True).remote(ticket, scope, body)
        try:
            async for messages in answer:
                yield messages
        except (RayActorError, RayServeException) as error:
            raise ReplicaLost(str(error)) from error
        finally:
            answer.cancel()  # does nothing to one that is complete

    async def _ask_all(self) -> dict[str, tuple[int, dict[str, Any]]]:
        try:
            answers = self._replicas.broadcast("health")
            # In a thread: only this form has the others' answers where one replica hangs.
            told = await asyncio.to_thread(answers.results, timeout_s=_PATIENCE, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return {}
        return dict(answer for answer in told if not isinstance(answer, BaseException))


def _application(served: Sequence[ServedModel], settings: Settings, replicas: int, cpus: int) -> Any:
    common: dict[str, Any] = {
        "logging_config": _QUIET,
        "max_ongoing_requests": MOST_REQUESTS + 64,  # the application refuses by itself what is too much
        "health_check_period_s": _LOOK_SECONDS,
        "health_check_timeout_s": _HANG_SECONDS,
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": _LOADS,
    }
    models = serve.deployment(_Replica).options(
        name="Replica",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=_Router),
        **common,
    )
    # One: it knows what each replica has read and is doing.
    ingress = serve.deployment(_Ingress).options(
        name="Ingress", num_replicas=1, ray_actor_options={"num_cpus": 0}, **common
    )
    return ingress.bind(models.bind(served, settings, Place.here()), settings)


def serve_replicas(
    served: Sequence[ServedModel], settings: Settings, replicas: int, address: str, *, ready: Callable[[str], None]
) -> None:
    """Serve with replicas on a Ray cluster until a signal comes.

    Args:
        served: the models.
        settings: how to serve.
        replicas: processes with the models; each takes as many of the cluster's CPUs as the models have threads.
        address: of the cluster; see `tilebeam.ray_cluster.connect`.
        ready: called with the API's URL, once requests are accepted.

    Raises:
        TilebeamError: there is no cluster, it is too small or serves already, or the model cannot be loaded.
        KeyboardInterrupt: a signal came before, or a second one.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    connect(ray, address)
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        cpus = served[0].load["threads"] or default_threads()
        _check(replicas, cpus)
        stack.callback(serve.shutdown)
        # Ray tells on stdout that it ended its own process.
        stack.enter_context(redirect_stdout(None))
        try:
            serve.start(http_options={"host": settings.host, "port": settings.port}, logging_config=_QUIET)
            serve.run(_application(served, settings, replicas, cpus), name=APP, route_prefix="/")
        except (RuntimeError, TimeoutError, RayError, RayServeException) as error:
            raise TilebeamError(f"The replicas did not start: {_why() or last_line(error)}") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        with suppress(KeyboardInterrupt):
            ready(f"http://{host}:{settings.port}")
            signal.pause()


def _check(replicas: int, cpus: int) -> None:
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < replicas * cpus:
        raise TilebeamError(
            f"The Ray cluster has {there} CPUs; {replicas} replicas with {cpus} each need {replicas * cpus}: use "
            "--replicas or -t."
        )
    if serve.status().proxies:
        raise TilebeamError("Ray Serve runs on this cluster already: end it first, with `serve shutdown`.")


def _why() -> str:
    """Return what a replica said that could not start; empty: nothing that is ours."""
    application = serve.status().applications.get(APP)
    told = [found.message for found in application.deployments.values()] if application is not None else []
    found = re.findall(r"^tilebeam\.errors\.\w+: (.+)$", "\n".join(told), re.MULTILINE)
    return str(found[-1]) if found else ""
