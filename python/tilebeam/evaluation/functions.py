"""Functions named on the command line, "FILE.py:function", and what their source was."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tilebeam.errors import TilebeamError


def is_function_name(spec: str) -> bool:
    """Tell whether a text names a function rather than something else: "x/y.py:f"."""
    file, _, name = spec.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def load_function(spec: str, option: str) -> Callable[..., Any]:
    """Load the function of that name. Importing its file runs the file's code.

    Args:
        spec: "FILE.py:function".
        option: how the user said it, for errors.

    Raises:
        TilebeamError: the file cannot be imported, or has no such function.
    """
    if not is_function_name(spec):
        raise TilebeamError(f'{option} {spec!r} names no function: write "FILE.py:function".')
    file, _, name = spec.rpartition(":")
    try:
        module = _from_file(Path(file))
    except Exception as error:  # the file's own code may raise anything
        raise TilebeamError(f"{option} {spec!r}: {file} cannot be imported: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TilebeamError(f"{option} {spec!r}: {file} has no function {name}.")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    """Import the file as a module of its own, once per process."""
    name = f"_tilebeam_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def source_digest(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the file that a function comes from, "" if it has none."""
    try:
        path = inspect.getsourcefile(function)
    except TypeError:  # built in, or an object with __call__
        path = None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
