"""The folder of the native files: the installed package, or a build folder named by ``TILEBEAM_LIB_DIR``."""

from __future__ import annotations

import os
from pathlib import Path

from tilebeam._ext import native_file

PACKAGE = Path(__file__).resolve().parent.parent
SOURCE = PACKAGE.parent.parent  # the repository, when the package is used from a checkout


def native(name: str) -> Path:
    """Return the path of a native file of this package, e.g. ``libtilebeam_npu.so`` or ``tilebeam-npud``.

    Raises:
        FileNotFoundError: the package was built without it, or ``TILEBEAM_LIB_DIR`` names a folder that lacks it.
    """
    path = native_file(name)
    if not path.is_file():
        named = "TILEBEAM_LIB_DIR" in os.environ
        hint = "TILEBEAM_LIB_DIR names that folder" if named else "reinstall tilebeam (pip install .)"
        raise FileNotFoundError(f"{path} is missing: {hint}")
    return path


def header(source: str) -> Path:
    """Return the path of a C header: the installed copy, or the ``source`` in the repository.

    Raises:
        FileNotFoundError: neither exists.
    """
    name = source.rpartition("/")[2]
    for path in (PACKAGE / "include" / name, SOURCE / source):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{name} is missing from the package: reinstall tilebeam (pip install .)")
