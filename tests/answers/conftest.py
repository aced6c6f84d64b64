"""Under a sanitizer (make test SANITIZE=1) the process for mathematical answers runs without it: nothing native of
Tilebeam is in it, and its limit of memory has no room for a sanitizer's shadow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_preload() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TILEBEAM_SANITIZE"):
            patch.delenv("LD_PRELOAD", raising=False)
        yield
