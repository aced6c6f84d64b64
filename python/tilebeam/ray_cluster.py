"""A Ray cluster (the extra `replicas`): how a program gets to it, and what its processes there need to know.

This module imports Ray only when it is asked for."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install


@dataclass(frozen=True)
class Place:
    """The driver's folder and module path, so that its processes on other machines find what it finds.

    Attributes:
        folder: relative paths start here.
        path: its module search path.
    """

    folder: str
    path: tuple[str, ...]

    @staticmethod
    def here() -> Place:
        """Return this process's."""
        return Place(os.getcwd(), tuple(os.path.abspath(p) for p in sys.path))

    def enter(self) -> None:
        """Make it this process's place."""
        os.chdir(self.folder)
        sys.path += [p for p in self.path if p not in sys.path]


def need_serve() -> None:
    """Raise `TilebeamError` if Ray Serve is missing."""
    try:
        import_module("ray.serve")
    except ImportError as error:
        raise TilebeamError(f"--ray needs Ray Serve ({error}): {how_to_install('replicas')}") from None


def connect(ray: Any, address: str) -> None:
    """Connect this process to a cluster.

    Args:
        ray: the package.
        address: of the cluster; "auto": the one that this machine belongs to.

    Raises:
        TilebeamError: no cluster answers.
    """
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError) as error:
        raise TilebeamError(
            f"No connection to a Ray cluster at {address}: {error}. Start one with `ray start --head`; one that wants "
            "a token needs RAY_AUTH_MODE=token here, too."
        ) from None


def last_line(error: BaseException) -> str:
    """Find what went wrong in an error that Ray tells with the other process's traceback."""
    return str(error).strip().splitlines()[-1]
