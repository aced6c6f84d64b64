"""What both sides do while a model runs: a timeline in Chrome's trace format, and a table per kind of op.

The NPU side stamps its messages and each worker's part of each op into shared memory, the plugin and the channel their
own work (``tilebeam/trace.h``), and the engine the phases of its steps (``engine/observer.py``). All stamps are of
CLOCK_MONOTONIC, one clock for all processes. While no `Tracer` is entered nothing is stamped: a graph pays one
comparison for it, an op another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam import _ext as ggml_ext
from tilebeam.engine.observer import Phase
from tilebeam.errors import TilebeamError
from tilebeam.model.lm import LM
from tilebeam.native.control import control

_MOST_RECORDS = 2_000_000  # 150 bytes each

Records = npt.NDArray[Any]


def _enum(name: str) -> dict[str, int]:
    return dict(ggml_ext.ffi.typeof(f"enum {name}").relements)


_SPAN = {name.removeprefix("TB_SPAN_"): code for name, code in _enum("tb_span").items()}
_OP_NAMES = {code: name.removeprefix("TB_OP_") for name, code in _enum("tb_op_code").items()}
_TYPE_NAMES = {code: name.removeprefix("TB_") for name, code in _enum("tb_type").items()}
_REQUESTS = {code: name.removeprefix("TB_REQ_").lower() for name, code in _enum("tb_request_kind").items()}
# Names in the timeline; (op) and (message) get theirs from the record.
_CPU_SPANS = {
    _SPAN["GRAPH"]: "graph",
    _SPAN["LOWER"]: "lower",
    _SPAN["SEND"]: "send",
    _SPAN["WAIT"]: "wait for the NPU",
    _SPAN["RECEIVE"]: "check the reply",
}
_PHASES: dict[Phase, str] = {
    "step": "step",
    "plan": "build the batch",
    "decode": "llama_decode",
    "sample": "sampling",
    "draft": "guess ahead",
    "verify": "check guesses",
}


def record_type() -> np.dtype[Any]:
    """Return numpy's view of tb_trace_record, made from the C declaration."""
    names, formats, offsets = [], [], []
    for name, field in ggml_ext.ffi.typeof("tb_trace_record").fields:
        size = ggml_ext.ffi.sizeof(field.type)
        names.append(name)
        formats.append(f"S{size}" if field.type.kind == "array" else f"<u{size}")
        offsets.append(field.offset)
    size = ggml_ext.ffi.sizeof("tb_trace_record")
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


@dataclass(frozen=True)
class OpRow:
    """All ops of one kind, as a line of the table.

    Attributes:
        op: e.g. "MUL_MAT"; weights: type of the weights of matrix products and of K in attention, else "".
        kernel: the kernel that ran, "" if the op has none of its own.
        count: ops, with those that were fused into another and took no time of their own; seconds: all workers'
            time, divided by their number (ops that need not wait for each other run side by side).
        share: of the time in which the NPU worked on messages, 0 to 1.
        bytes: operands and results, each counted once per op; gbs: 10^9 of them per second.
        gops: 10^9 operations per second of products, multiply and add counted apart; 0 for other ops. Bytes and
            operations of attention are those of all cells, whatever the mask hides.
    """

    op: str
    weights: str
    kernel: str
    count: int
    seconds: float
    share: float
    bytes: int
    gbs: float
    gops: float


@dataclass(frozen=True)
class Summary:
    """A trace in numbers.

    Attributes:
        ops: by time, longest first.
        seconds: time of each kind of span of the CPU side, nested ones counted in their parents too.
        busy_seconds: time in which the NPU worked on graphs; between_seconds: of it, what no op was running.
        graphs: messages with graphs.
        lost: records there was no room for; damaged: stamps of the NPU side that cannot be true.
    """

    ops: list[OpRow]
    seconds: dict[str, float]
    busy_seconds: float
    between_seconds: float
    graphs: int
    lost: int
    damaged: int


class Tracer:
    """Traces everything that a model on the NPU does while the context is entered.

    One at a time in a program: the plugin has one collection for all models.
    """

    _entered = threading.Lock()

    def __init__(self, lm: LM) -> None:
        if lm.info.device != "npu":
            raise TilebeamError("Only a model on the NPU can be traced: load it with device='npu'.")
        self._lm = lm
        self._calls: list[tuple[str, int, int, int]] = []  # of llama.cpp and the engine: name, begin, end, thread
        self.records: Records = np.zeros(0, record_type())
        self.lost = 0
        self.damaged = 0

    def __enter__(self) -> Tracer:
        if not Tracer._entered.acquire(blocking=False):
            raise TilebeamError("Another trace is being taken in this program.")
        self._lm.observe(self)
        control().trace_start(_MOST_RECORDS)
        return self

    def __exit__(self, *_: object) -> None:
        control().trace_stop()
        self._lm.observe(None)
        raw, self.lost, self.damaged = control().trace_take()
        self.records = np.frombuffer(raw, record_type())
        Tracer._entered.release()

    def phase(self, name: Phase, begin_ns: int, end_ns: int) -> None:
        """Record what the engine did."""
        self._calls.append((_PHASES[name], begin_ns, end_ns, threading.get_native_id()))

    # --- what it tells ----------------------------------------------------------------------------------------------

    def timeline(self) -> dict[str, Any]:
        """Return the trace for chrome://tracing and ui.perfetto.dev: the program is one process, each NPU another."""
        events: list[dict[str, Any]] = [_label("process_name", 1, 0, "CPU side")]
        begins = [begin for _, begin, _, _ in self._calls] + self.records["begin_ns"].tolist()
        origin = min(begins, default=0)

        def span(name: str, pid: int, tid: int, begin: int, end: int, args: Mapping[str, Any]) -> None:
            ts, duration = (begin - origin) / 1e3, (end - begin) / 1e3
            events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration, "args": args})

        for name, begin, end, thread in self._calls:
            span(name, 1, thread, begin, end, {})
        lanes = set()
        for r in self.records:
            kind, code, lane, pid = int(r["span"]), int(r["code"]), int(r["lane"]), 1 + int(r["session"])
            about = {"message": int(r["seq"]), "ops": int(r["index"])} if r["seq"] else {"nodes": int(r["index"])}
            if kind in _CPU_SPANS:
                name, pid = _CPU_SPANS[kind], 1
            elif kind == _SPAN["NOTES"]:
                name = "write the trace"
            elif kind == _SPAN["MESSAGE"]:
                name = _REQUESTS[code]
            else:
                name, about = _OP_NAMES[code], _about_op(r)
            if pid > 1:
                lanes.add((pid, lane))
            span(name, pid, lane, int(r["begin_ns"]), int(r["end_ns"]), about)
        for pid, lane in sorted(lanes):
            events.append(_label("process_name", pid, 0, f"NPU {pid - 1}"))
            events.append(_label("thread_name", pid, lane, f"worker {lane}"))
        about_all = {"model": self._lm.description, "lost": self.lost, "damaged": self.damaged}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_all}

    def summary(self) -> Summary:
        """Return the table."""
        messages = spans_of(self.records, "MESSAGE")
        graphs = messages[np.isin(messages["code"], [k for k, v in _REQUESTS.items() if v in ("compute", "patch")])]
        busy = float(_durations(graphs).sum()) / 1e9
        rows = _op_rows(spans_of(self.records, "OP"), busy)
        of = self.records["span"]
        seconds = {name: float(_durations(self.records[of == kind]).sum()) / 1e9 for kind, name in _CPU_SPANS.items()}
        for name, begin, end, _ in self._calls:
            seconds[name] = seconds.get(name, 0.0) + (end - begin) / 1e9
        between = busy - sum(row.seconds for row in rows)
        return Summary(rows, seconds, busy, between, len(graphs), self.lost, self.damaged)


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _about_op(r: Any) -> dict[str, Any]:
    about = {
        "tensor": r["name"].decode("utf-8", "replace"),
        "index": int(r["index"]),
        "message": int(r["seq"]),
        "type": _TYPE_NAMES.get(int(r["type"]), "?"),
        "bytes": int(r["bytes"]),
    }
    if r["work"]:
        about |= {"rows": int(r["rows"]), "operations": int(r["work"])}
    if r["kernel"]:
        about["kernel"] = r["kernel"].decode("utf-8", "replace")
    return about


def _durations(records: Records) -> npt.NDArray[np.int64]:
    """Return nanoseconds of each record."""
    durations: npt.NDArray[np.int64] = (records["end_ns"] - records["begin_ns"]).astype(np.int64)
    return durations


def spans_of(records: Records, kind: str) -> Records:
    """Return the records of one kind of span, by its name in tilebeam/trace.h without TB_SPAN_."""
    found: Records = records[records["span"] == _SPAN[kind]]
    return found


def whole_ops(parts: Records) -> tuple[Records, npt.NDArray[np.float64]]:
    """Return one record per op from those of its workers: begin of the first, end of the last.

    Returns:
        the records, and for each the workers' time in ns, divided by the number of workers that its session has.
    """
    if not len(parts):
        return parts, np.zeros(0)
    order = np.lexsort((parts["index"], parts["seq"], parts["session"]))
    parts = parts[order]
    keys = np.stack([parts["session"], parts["seq"], parts["index"]])
    first = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
    whole = parts[first].copy()
    whole["begin_ns"] = np.minimum.reduceat(parts["begin_ns"], first)
    whole["end_ns"] = np.maximum.reduceat(parts["end_ns"], first)
    time = _durations(parts).astype(np.float64)
    for session in np.unique(parts["session"]):
        of = parts["session"] == session
        time[of] /= len(np.unique(parts["lane"][of]))
    return whole, np.add.reduceat(time, first)


def _op_rows(parts: Records, busy_seconds: float) -> list[OpRow]:
    ops, times = whole_ops(parts)
    groups: dict[tuple[int, int, bytes], list[int]] = {}
    for i, op in enumerate(ops):
        key = (int(op["code"]), int(op["type"]) if op["work"] else -1, bytes(op["kernel"]))
        groups.setdefault(key, []).append(i)
    rows = []
    for (code, weights_type, kernel), members in groups.items():
        chosen = ops[members]
        seconds = float(times[members].sum()) / 1e9
        n_bytes, work = int(chosen["bytes"].sum()), int(chosen["work"].sum())
        per_second = 1e-9 / seconds if seconds > 0 else 0.0
        rows.append(
            OpRow(
                op=_OP_NAMES[code],
                weights=_TYPE_NAMES.get(weights_type, ""),
                kernel=kernel.decode("utf-8", "replace"),
                count=len(members),
                seconds=seconds,
                share=seconds / busy_seconds if busy_seconds > 0 else 0.0,
                bytes=n_bytes,
                gbs=n_bytes * per_second,
                gops=work * per_second,
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)
