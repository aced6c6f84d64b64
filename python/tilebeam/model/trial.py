"""A trial of both backends on a model's first layers, and a folder that remembers how it ended.

The trial is a process of its own (measure/trial_worker.py), because llama.cpp aborts on files that it does not expect:
whatever happens to it, the model is loaded, on the backend that the rule says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilebeam._version import __version__
from tilebeam.errors import TilebeamError
from tilebeam.model.file_check import CheckedFile
from tilebeam.model.first_layers import write_first_layers
from tilebeam.model.load_options import CheckedOptions
from tilebeam.model.packed_cache import cache_folder
from tilebeam.native.executor import usable_memory

ROWS = (1, 4, 16)  # sequences that decode together
_SECONDS = 20.0  # for a trial, most of which are loading on a machine that has other work
_COPIES = 3  # of the layers that a trial has in memory: file, tiles, the CPU backend's
# Share of the CPUs that others may use. llama.cpp's threads spin for each other, and look far slower than they are
# where others want the same CPUs.
_BUSY = 0.1
_BUSY_QUEUE = 1.5  # or so many programs for each CPU that no trial is begun
_FORMAT = 1
# Variables that a step's time depends on.
_VARIABLES = ("TILEBEAM_NPU", "TILEBEAM_ISA", "TILEBEAM_NUMERICS", "TILEBEAM_SOFTMAX", "TILEBEAM_FUSE")


@dataclass(frozen=True)
class Trial:
    """How a trial ended.

    Attributes:
        ratios: how many times as fast as the CPU backend the device is: "prompt", and "1", "4", "16" sequences, as
            many as the model is loaded for.
        failure: why there are no ratios.
        again: another trial may end in another way.
        remembered: it was read from the folder.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    again: bool = False
    remembered: bool = False


def try_both(file: CheckedFile, options: CheckedOptions) -> Trial:
    """Return how both backends do on the model's first layers: what is remembered of a model with these types and
    shapes, else by trying, which takes a second or two. Raises nothing."""
    from tilebeam.gguf import GGUFError, open_gguf

    try:
        with open_gguf(file.path) as f:
            rows = sorted({min(n, options.n_seq_max) for n in ROWS})
            request = {
                "rows": rows,
                "threads": options.threads,
                "flash_attn": options.flash_attn,
                "type_k": options.type_k,
                "type_v": options.type_v,
            }
            shapes = [(t.name, int(t.type), t.ne) for t in f.tensors.values()]
            shape = [kv.raw.hex() for key, kv in f.kv.items() if key.startswith(f"{file.architecture}.")]
            path = _folder() / f"{_digest([request, shapes, shape, _surroundings()])}.json"
            if (known := _read(path, rows)) is not None:
                return known
            trial = _run(f, request)
    # RuntimeError: no home folder.
    except (TilebeamError, GGUFError, OSError, ValueError, OverflowError, RuntimeError) as error:
        return Trial(failure=str(error))
    if not trial.again:
        _keep(path, trial)
    return trial


def _run(f: Any, request: dict[str, Any]) -> Trial:
    if os.getloadavg()[0] > _BUSY_QUEUE * len(os.sched_getaffinity(0)):
        return Trial(failure="other programs use the CPUs", again=True)
    if not sys.executable:
        return Trial(failure="it is not known which Python this is", again=True)
    # A file in memory goes with its last descriptor, even if this process is killed.
    descriptor = os.memfd_create("tilebeam-trial", os.MFD_CLOEXEC)
    try:
        try:
            write_first_layers(f, descriptor, int(usable_memory().available / _COPIES))
        except MemoryError:
            return Trial(failure="the memory is too small", again=True)
        except TilebeamError as error:
            return Trial(failure=str(error))
        request = request | {"model": f"/proc/self/fd/{descriptor}"}
        done = subprocess.run(
            [sys.executable, "-m", "tilebeam.measure.trial_worker"],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GGML_NO_BACKTRACE": "1"},
            pass_fds=(descriptor,),
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trial(failure=f"it had not ended after {_SECONDS:.0f} s", again=True)
    finally:
        os.close(descriptor)
    if done.returncode:
        ended = done.returncode in (-signal.SIGKILL, -signal.SIGTERM)  # by the system, where memory is short, or a user
        return Trial(failure=f"its process ended with status {done.returncode}", again=ended)
    said = json.loads(done.stdout)
    if said.get("others", 0) > _BUSY:
        return Trial(failure=f"other programs used {said['others']:.0%} of the CPUs meanwhile", again=True)
    return (
        Trial(failure=said["failure"], again="of memory" in said["failure"])
        if "failure" in said
        else Trial(_ratios(said["ratios"], request["rows"]))
    )


def _ratios(found: Any, rows: list[int]) -> dict[str, float]:
    """Check ratios.

    Raises:
        ValueError: they are none.
    """
    names = {"prompt", *map(str, rows)}
    if not isinstance(found, dict) or set(found) != names:
        raise ValueError("no ratios")
    ratios = {name: float(found[name]) for name in names}
    if not all(math.isfinite(r) and r > 0 for r in ratios.values()):
        raise ValueError("no ratios")
    return ratios


def _folder() -> Path:
    return cache_folder() / "trials"


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _surroundings() -> list[Any]:
    """Return what a step's time depends on beside the model: machine, versions, the very libraries."""
    from tilebeam.native import releases
    from tilebeam.native.paths import native

    library = native("libtilebeam_npu.so").stat()
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    kind = [line for line in cpus.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))]
    variables = [os.environ.get(name, "") for name in _VARIABLES]
    versions = [_FORMAT, __version__, releases.installed(), library.st_size, library.st_mtime_ns]
    return [kind, len(os.sched_getaffinity(0)), variables, versions]


def _read(path: Path, rows: list[int]) -> Trial | None:
    """Read what is remembered; None: nothing, or the file is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "failure" in found:
            return Trial(failure=str(found["failure"]), remembered=True)
        return Trial(_ratios(found["ratios"], rows), remembered=True)
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None


def _keep(path: Path, trial: Trial) -> None:
    """Remember a trial, if the folder can be written."""
    from tilebeam.gguf.whole_file import whole_file

    text = json.dumps({"failure": trial.failure} if trial.failure else {"ratios": trial.ratios})
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
