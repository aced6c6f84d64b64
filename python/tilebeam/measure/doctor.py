"""`tilebeam doctor`: look at everything that must fit together, try it, and say what to do about what does not.

Each check stands alone: a broken one is reported, the others still run. A model is loaded if one is named.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tilebeam._version import __version__
from tilebeam.errors import PlacementWarning, TilebeamError
from tilebeam.measure.machine import cpu_features, cpu_info
from tilebeam.native import environment

_PACKAGES = ("llama-cpp-python", "gguf", "numpy", "cffi", "typer", "rich")
_NATIVE = ("libggml-tilebeam.so", "libtilebeam_npu.so", "tilebeam-npud")
# What kernels look for, by the names of /proc/cpuinfo; on aarch64 the line is called Features.
_FEATURES = {
    "x86_64": (
        *("f16c", "fma", "avx2", "avx_vnni"),
        *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_int8"),
    ),
    "aarch64": ("asimd", "asimdhp", "asimddp", "i8mm", "sve"),
}
_NOOPS = 200
# What enum tb_guard shuts a process in with, by names without TB_GUARD_.
_GUARDS = {
    "syscalls": "no files, network or programs",
    "private": "closed to other processes",
    "parent": "serves its parent only",
}
# Kernel sets whose speed was never measured, as no such CPU was at hand.
_UNTIMED = ("avxvnni", "neon", "i8mm", "hvx")


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what.
        ok: whether it is as it should be.
        detail: what was found, for people.
        advice: when not ok, a sentence that says what to do.
    """

    name: str
    ok: bool
    detail: str
    advice: str = ""


@dataclass
class DoctorReport:
    """All checks, and the facts behind them (for --json and bug reports)."""

    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Return whether every check passed."""
        return all(c.ok for c in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: {"healthy", "checks": [{"name", "ok", "detail", "advice"}], and the facts}."""
        return {"healthy": self.healthy, "checks": [asdict(c) for c in self.checks], **self.facts}

    def attempt(self, name: str, advice: str, examination: Callable[[DoctorReport], str]) -> None:
        """Run one examination: it returns the detail, or raises with the reason."""
        try:
            self.checks.append(Check(name, True, examination(self)))
        except Exception as error:  # a doctor must survive whatever the patient does
            if os.environ.get("TILEBEAM_DEBUG"):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            self.checks.append(Check(name, False, text, advice))


def examine(model: str | os.PathLike[str] | None = None) -> DoctorReport:
    """Run all checks.

    Args:
        model: a GGUF file to load: whether that can be done, and where its matrices run.
    """
    report = DoctorReport()
    reinstall = "Reinstall Tilebeam (`pip install --force-reinstall --no-deps .`, or `make setup`)"
    reinstall += f", or unset TILEBEAM_LIB_DIR ({own})." if (own := os.environ.get("TILEBEAM_LIB_DIR")) else "."
    fit = "Install the llama-cpp-python that this Tilebeam was built for; the detail names it."
    report.attempt("machine", "Tilebeam runs on Linux on x86-64 and aarch64.", _machine)
    report.attempt("environment", "Correct the name of the variable, or unset it.", _environment)
    report.attempt("native files", reinstall, _native)
    report.attempt("limits", reinstall, _limits)
    report.attempt("versions", fit, _versions)
    report.attempt("plugin and ABI", fit + " Otherwise: " + reinstall, _plugin)
    report.attempt(
        "llama.cpp's CPU backend",
        "Compile llama-cpp-python anew, with a GCC that is not older than 11.5, 12.4 or 13.3, or without AMX: "
        "CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON' pip install --force-reinstall "
        "--no-cache-dir --no-deps llama-cpp-python==VERSION. Tilebeam's own device does not need it.",
        _stock,
    )
    report.attempt("one build", reinstall, _builds)
    report.attempt("device", "Correct or unset the variables named in the detail.", _device)
    for executor in ("thread", "process"):
        report.attempt(
            f"executor: {executor}",
            "Check that the system allows shared memory (memfd) and new processes; else use the other executor, with "
            f"TILEBEAM_NPU={'thread' if executor == 'process' else 'process'}.",
            lambda r, e=executor: _executor(r, e),  # type: ignore[misc]
        )
    report.attempt("executor: qemu-hexagon", "The other executors do not need it.", _hexagon)
    report.attempt(
        "kernels",
        "Do not trust results of this build: set TILEBEAM_ISA=portable, and report this with `tilebeam doctor --json`.",
        _kernels,
    )
    if model is not None:
        advice = "`tilebeam.load` says the same of this file. If it is damaged, download or make it again."
        report.attempt("model", advice, lambda r: _model(r, model))
    return report


# --- the checks -------------------------------------------------------------------------------------------------------


def _versions(report: DoctorReport) -> str:
    found: dict[str, str | None] = {"tilebeam": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    report.facts["versions"] = found
    report.facts["abi"] = {"match": False}  # until the plugin has been loaded
    from tilebeam import _ext as ggml_ext
    from tilebeam.native.plugin import ggml

    report.facts["layout_version"] = ggml_ext.LAYOUT_VERSION
    report.facts["tiled_types"] = [t.label for t in ggml_ext.Type if ggml_ext.is_tiled(t)]
    lib = ggml()  # refuses another llama-cpp-python
    found["ggml"] = lib.ggml_version().decode()
    found["ggml_commit"] = lib.ggml_commit().decode()
    return (
        f"tilebeam {__version__}, llama-cpp-python {found['llama-cpp-python']}, ggml {found['ggml']} "
        f"(commit {found['ggml_commit']}), Python {found['python']}"
    )


def _machine(report: DoctorReport) -> str:
    machine = platform.machine()
    present = cpu_features()
    features = {name: name in present for name in _FEATURES.get(machine, ())}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.facts["machine"] = {
        "system": platform.platform(),
        "architecture": machine,
        "cpu": cpu_info(),
        "memory_bytes": memory,
        "cpu_features": features,
    }
    having = " ".join(name for name, here in features.items() if here) or "none known"
    return f"{cpu_info()}, {machine}, {memory / 2**30:.1f} GiB; features: {having}"


def _limits(report: DoctorReport) -> str:
    """Say what of the machine this process may use, such as "2 CPUs, quota of 1.0 CPU: 1 thread".

    "24 CPUs on 16 cores, 8 of them performance cores: 8 threads" is a machine where -t 16 may gain.
    """
    from tilebeam._ext.cpus import usable_cpus
    from tilebeam.native.executor import usable_memory

    def count(n: float, what: str) -> str:
        return f"{n} {what}{'' if n == 1 else 's'}"

    usable, memory = usable_cpus(), usable_memory()
    report.facts["limits"] = {**asdict(usable), "memory": memory._asdict()}
    cores = "" if usable.cores == usable.cpus else f" on {count(usable.cores, 'core')}"
    if usable.performance_cores < usable.cores:
        cores += f", {usable.performance_cores} of {'them' if cores else 'their cores'} performance cores"
    quota = "" if usable.quota is None else f", quota of {count(round(usable.quota, 2), 'CPU')}"
    return (
        f"{count(usable.cpus, 'CPU')}{cores}{quota}: {count(usable.threads, 'thread')}; "
        f"{f'{usable.nodes} memory nodes; ' if usable.nodes > 1 else ''}"
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory available"
    )


def _environment(report: DoctorReport) -> str:
    """Say which of Tilebeam's variables are set; one whose name is a slip is an error, other unknown ones are told."""
    report.facts["environment"] = environment.settings()
    unread = report.facts["environment_unread"] = environment.unread()
    slips = [f"{name} is not read by anything: {meant} is" for name, meant in unread.items() if meant]
    if slips:
        raise TilebeamError("; ".join(slips))
    said = [f"set: {', '.join(report.facts['environment']) or 'nothing'}"]
    if unread:
        said.append(f"not read by anything: {', '.join(unread)}")
    return "; ".join(said)


def _native(report: DoctorReport) -> str:
    from tilebeam.native import paths as _paths

    found: dict[str, str | None] = {}
    missing = []
    for name in _NATIVE:
        try:
            found[name] = str(_paths.native(name))
        except FileNotFoundError as error:
            found[name] = None
            missing.append(str(error))
    report.facts["files"] = found
    if missing:
        raise TilebeamError("; ".join(missing))
    return f"{', '.join(_NATIVE)} in {Path(str(found[_NATIVE[0]])).parent}"


def _plugin(report: DoctorReport) -> str:
    from tilebeam.native.control import control
    from tilebeam.native.plugin import ggml, register

    registry = register()
    status = control().status()
    lib = ggml()
    loaded = f"{lib.ggml_version().decode()} ({lib.ggml_commit().decode()})"
    built = f"{status['ggml_version']} ({status['ggml_commit']})"
    # The plugin compares version and commit itself when it is loaded: that it is there means that they fit.
    report.facts["abi"] = {"plugin": registry.path, "ggml_loaded": loaded, "ggml_built_for": built, "match": True}
    return f"built for ggml {built}; this process has {loaded}, which fits"


def _stock(report: DoctorReport) -> str:
    """Multiply on it, in a process of its own: one that is miscompiled ends with a signal (stock_product.py)."""
    command = [sys.executable, "-m", "tilebeam.measure.stock_product"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode < 0:
        raise TilebeamError(f"its product of quantized weights ends with {signal.Signals(-run.returncode).name}")
    if run.returncode:
        raise TilebeamError(run.stderr.strip().splitlines()[-1])
    report.facts["stock_products"] = run.stdout.strip()
    return f"products of {run.stdout.strip()}"


def _device(report: DoctorReport) -> str:
    from tilebeam.model.load_options import default_threads
    from tilebeam.native.control import control
    from tilebeam.native.plugin import register

    names = register().device_names()
    if not names:
        raise TilebeamError("the plugin offers no device")
    status, options = control().status(), control().options()
    devices = control().devices()
    report.facts["devices"] = devices
    report.facts["options"] = options
    report.facts["status"] = status
    if complaints := register().complaints:
        raise TilebeamError("; ".join(complaints))
    threads = options["n_threads"] or default_threads()
    limits = [f"{limit / 2**30:.1f} GiB" if limit else "none" for limit in dict.fromkeys(options["memory_limit"])]
    memory = [f"{d['name']} {d['memory_total'] / 2**30:.1f} GiB" for d in devices]
    # the thread executor computes on the caller's thread: nobody could end an op that hangs
    deadline = "" if options["executor"] == "thread" else f"deadline {options['deadline_ms'] / 1000:g} s per op, "
    return (
        f"{', '.join(memory)} ({status['description']}); "
        f"{options['executor']} executor, threads: {threads}, {deadline}"
        f"memory limit: {', '.join(limits)}, numerics: {options['numerics']}, softmax: {options['softmax']}"
    )


def _builds(report: DoctorReport) -> str:
    """Check that the three native files come from the same sources: the NPU side refuses another build's program."""
    from tilebeam.native import executor as _npu
    from tilebeam.native import paths as _paths
    from tilebeam.native.control import control

    ffi, lib = _npu.load()
    told = subprocess.run(
        [_paths.native("tilebeam-npud"), "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout.split()
    builds = {
        "libtilebeam_npu.so": ffi.string(lib.tb_session_build_id()).decode(),
        "tilebeam-npud": told[-1] if "build" in told else "unknown",
        "libggml-tilebeam.so": control().status()["build_id"],
    }
    report.facts["builds"] = builds
    if len(set(builds.values())) > 1:
        raise TilebeamError("native files of different builds: " + ", ".join(f"{k} {v}" for k, v in builds.items()))
    return f"{builds['tilebeam-npud']}: program, plugin and NPU process have the same sources"


def _executor(report: DoctorReport, kind: str) -> str:
    """Start a session of its own, send no-ops, stop it."""
    from tilebeam import _ext as ggml_ext
    from tilebeam.native import executor as _npu
    from tilebeam.native import paths as _paths

    ffi, lib = _npu.load()
    number, program = {
        "thread": (0, "tilebeam-npud"),
        "process": (1, "tilebeam-npud"),
        "qemu-hexagon": (2, "tilebeam-npud-hexagon"),
    }[kind]
    options = ffi.new("tb_session_options *", {"process": number, "n_threads": 1, "deadline_ms": 10000})
    path = ffi.new("char[]", os.fsencode(_paths.native(program)))
    options.npud_path = path
    wanted = ffi.new("char[]", b"hvx" if kind == "qemu-hexagon" else os.environ.get("TILEBEAM_ISA", "").encode())
    options.isa = wanted
    result = ffi.new("tb_session_result *")
    session = lib.tb_session_start(options, result)
    if session == ffi.NULL:
        raise TilebeamError(_words(ffi, result) or "it does not start")
    try:
        times = ffi.new("int64_t[]", _NOOPS)
        if lib.tb_session_time_noop(session, _NOOPS, times, result) != 0:
            raise TilebeamError(_words(ffi, result))
        count = ffi.new("tb_session_counters *")
        lib.tb_session_count(session, count)
        bits = int(lib.tb_session_guards(session))
        fact = {
            "isa": ffi.string(lib.tb_session_isa(session)).decode(),
            "noop_microseconds": sorted(t / 1000 for t in times)[_NOOPS // 2],
            "pid": int(lib.tb_session_pid(session)),
            "threads": int(lib.tb_session_n_threads(session)),
            "guards": {name: bool(bits & getattr(ggml_ext.lib, f"TB_GUARD_{name.upper()}")) for name in _GUARDS},
            "requests": count.requests,
            "answers_while_spinning": count.spun,
        }
    finally:
        lib.tb_session_stop(session)
    own = fact["own_process"] = fact["pid"] != os.getpid()
    report.facts.setdefault("executors", {})[kind] = fact
    guards = sorted(fact["guards"].items(), key=lambda guard: not guard[1])  # those that it lacks come last
    shut_in = ", ".join(_GUARDS[name] if has else f"NOT: {_GUARDS[name]}" for name, has in guards)
    where = f"{program} (pid {fact['pid']}; {shut_in})" if own else "threads of this process"
    return (
        f"{where}, kernel set {fact['isa']}, answers in {fact['noop_microseconds']:.1f} us "
        f"({count.spun} of {count.requests} while spinning for it)"
    )


def _hexagon(report: DoctorReport) -> str:
    """Run the emulated executor where it is there; nothing is wrong where it is not."""
    from tilebeam.native import paths as _paths

    try:
        _paths.native("tilebeam-npud-hexagon")
    except FileNotFoundError:
        return "not built (optional): install the packages clang-19, lld-19 and libc++-19-dev, and build again"
    if shutil.which("qemu-hexagon") is None:
        return "qemu-hexagon was not found (optional): install the package qemu-user"
    return _executor(report, "qemu-hexagon")


def _words(ffi: Any, result: Any) -> str:
    return str(ffi.string(result.why).decode("utf-8", "replace"))


def _kernels(report: DoctorReport) -> str:
    from tilebeam.measure import selftest

    results = selftest.run()
    isas = list(dict.fromkeys(r.isa for r in results))
    report.facts["kernel_sets"] = isas
    used = report.facts["kernel_set_in_use"] = os.environ.get("TILEBEAM_ISA") or isas[0]
    report.facts["untimed_kernel_sets"] = [isa for isa in isas if isa in _UNTIMED]
    report.facts["nmse_limit"] = selftest.NMSE_LIMIT
    report.facts["kernels"] = [
        asdict(r) | {"ok": r.ok, "nmse": r.nmse if math.isfinite(r.nmse) else None} for r in results
    ]
    bad = [r for r in results if not r.ok]
    if bad:
        first = bad[0]
        raise TilebeamError(
            f"{len(bad)} of {len(results)} kernel tests differ from the reference, first {first.op} on {first.isa}: "
            f"{first.why or f'squared error {first.nmse:.1e}'}"
        )
    worst = max(results, key=lambda r: r.nmse)
    untimed = " (untimed: its speed has never been measured)" if used in _UNTIMED else ""
    return (
        f"in use: {used}{untimed}; all {len(results)} tests of {', '.join(isas)} agree with "
        f"numpy (largest squared error {worst.nmse:.1e}, limit {selftest.NMSE_LIMIT:.0e})"
    )


def _model(report: DoctorReport, path: str | os.PathLike[str]) -> str:
    """Load it as `tilebeam.load` does, and tell where it runs and which of its matrices the device multiplies by."""
    from tilebeam.gguf import device_share
    from tilebeam.model import device_choice
    from tilebeam.model.loader import load

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlacementWarning)
        with load(path, lookup=False) as lm:
            info = lm.info
            snapshot = lm.snapshot_bytes() if info.generates else 0
    said = None
    for w in told:
        if issubclass(w.category, PlacementWarning):
            said = said or str(w.message)
        else:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    report.facts["model"] = {
        "path": info.path,
        "architecture": info.architecture,
        "repacked": info.repacked,
        "device": info.device,
        "choice": info.choice,
        "device_share": device_share(info.matrices),
        "matrices": [asdict(group) for group in info.matrices],
        "warning": said,
        "snapshot_bytes": snapshot,
        "window": info.window,
        "window_cells": info.window_cells,
    }
    about = f"{info.architecture}, runs on {info.device} ({info.choice}), {device_choice.summary(info.matrices)}"
    if snapshot:
        room = f"{info.cache_ram // snapshot} in a cache_ram of {info.cache_ram / 2**20:.0f} MiB"
        about += f", {snapshot / 2**20:.1f} MiB for a snapshot of a text's state ({room})"
    if info.window:
        full = "" if info.window_cells < info.n_ctx else ", as many as other layers"
        about += f", windows of {info.window} tokens in {info.window_cells} KV cells{full}"
    return about
