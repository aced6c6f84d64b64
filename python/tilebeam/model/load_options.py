"""The arguments of `tilebeam.load` with their defaults, and the checks that need no file.

Commands take their choices and defaults from here, so importing this needs neither numpy nor a native library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from tilebeam.checks import is_integer
from tilebeam.errors import TilebeamError
from tilebeam.native.npu_options import Executor

# Where a model can run: "npu" within the program, which people call "tilebeam", too; "auto" is what
# `tilebeam.model.device_choice` makes of the file.
Backend = Literal["npu", "cpu"]
Device = Literal["auto", "tilebeam", "cpu", "npu"]
KvType = Literal["f16", "f32", "q8_0", "q4_0"]
BACKENDS = ("tilebeam", "cpu")  # for people
DEVICES: tuple[Device, ...] = get_args(Device)
MAX_DEVICES = 15  # TILEBEAM_MAX_DEVICES of control.h
MAX_SEQUENCES = 256  # llama.cpp's limit
MAX_THREADS = 512
_ROWS_SEEN = 16  # of the batch that model/same_bits.py looks at, at least


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `tilebeam.load` besides the files, which says what they mean; the defaults are these."""

    device: Device = "auto"
    n_ctx: int = 4096
    n_seq_max: int = 16
    threads: int | None = None
    n_batch: int = 512
    n_ubatch: int | None = None
    executor: Executor | None = None
    flash_attn: bool = True
    type_k: KvType = "f16"
    type_v: KvType = "f16"
    n_gpu_layers: int = -1
    devices: int | None = None
    memory_limit: int | str | Sequence[int | str] | None = None
    cache_ram: int | str = 1024
    packed_cache: int | str | None = None
    swa_full: bool | None = None
    hidden_layer: int | None = None
    lookup: bool | None = None
    deterministic: bool = False
    verify: bool = False
    verbose: bool = False

    def checked(self) -> CheckedOptions:
        """Complete and check them.

        Raises:
            TilebeamError: an argument, or a variable that stands for it, is out of range; names it.
        """
        _one_of("device", self.device, DEVICES)
        _within("n_ctx", self.n_ctx, 1, 2**24)
        _within("n_seq_max", self.n_seq_max, 1, MAX_SEQUENCES)
        _within("threads", self.threads, 1, MAX_THREADS, none=True)
        _within("n_batch", self.n_batch, 1, 2**20)
        if self.n_batch < self.n_seq_max:
            raise TilebeamError(f"n_batch ({self.n_batch}) must be at least n_seq_max ({self.n_seq_max}).")
        _within("n_ubatch", self.n_ubatch, 1, self.n_batch, none=True)
        if self.executor is not None:
            _one_of("executor", self.executor, get_args(Executor))
        _one_of("type_k", self.type_k, get_args(KvType))
        _one_of("type_v", self.type_v, get_args(KvType))
        if self.type_v in ("q8_0", "q4_0") and not self.flash_attn:
            raise TilebeamError("A quantized V cache needs flash attention.")
        asked = os.environ.get("TILEBEAM_DETERMINISTIC") == "1" and self.device != "cpu"
        if deterministic := self.deterministic or asked:
            self._check_deterministic()
        _within("n_gpu_layers", self.n_gpu_layers, -1, 2**31 - 1)
        _within("devices", self.devices, 1, MAX_DEVICES, none=True)
        _within("hidden_layer", self.hidden_layer, 0, 2**31 - 1, none=True)
        if not isinstance(self.verify, bool):
            raise TilebeamError(f"verify must be True or False, not {self.verify!r}.")
        if not isinstance(self.swa_full, bool | None):
            raise TilebeamError(f"swa_full must be True, False or None, not {self.swa_full!r}.")
        complete = {
            "device": "npu" if self.device == "tilebeam" else self.device,
            "n_ctx": (self.n_ctx + 255) // 256 * 256,
            "threads": self.threads or default_threads(),
            "n_ubatch": self.n_ubatch or self.n_batch,
            "memory_limit": None if self.memory_limit is None else parse_limits(self.memory_limit),
            "cache_ram": _size("cache_ram", self.cache_ram, 'MiB, or a size such as "2GiB", 0 for none', unit="M"),
            "packed_cache": _room(self.packed_cache),
            "deterministic": deterministic,
        }
        return CheckedOptions(**(vars(self) | complete))

    def _check_deterministic(self) -> None:
        if self.device == "cpu":
            raise TilebeamError(
                "deterministic needs the NPU: the order in which llama.cpp's CPU backend adds up depends on the batch."
            )
        if not self.flash_attn:
            raise TilebeamError("deterministic needs flash attention: without it sums depend on where cells lie.")
        if self.n_batch < _ROWS_SEEN:
            raise TilebeamError(f"deterministic needs n_batch of at least {_ROWS_SEEN}, to see whether a model is.")
        if self.lookup:
            raise TilebeamError("deterministic and lookup exclude each other: guesses change the batch.")


@dataclass(frozen=True, kw_only=True)
class CheckedOptions(LoadOptions):
    """`LoadOptions` that can work: n_ctx a multiple of 256, defaults filled in, memory in bytes."""

    device: Backend | Literal["auto"]
    threads: int
    n_ubatch: int
    memory_limit: list[int] | None
    cache_ram: int
    packed_cache: int


def backends(text: str, option: str = "--device") -> tuple[Backend, ...]:
    """Read a list of backends as people call them: "cpu,tilebeam"; "npu" is Tilebeam, too.

    Raises:
        TilebeamError: one is unknown.
    """
    known: dict[str, Backend] = {BACKENDS[0]: "npu", "npu": "npu", BACKENDS[1]: "cpu"}
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise TilebeamError(f"{option}: the devices are {' and '.join(BACKENDS)}, not {unknown[0]!r}.")
    return tuple(known[name] for name in names)


def default_threads() -> int:
    """Return the threads where none are asked for: TILEBEAM_THREADS, or one per usable performance core.

    Raises:
        TilebeamError: the variable is no number of threads.
    """
    text = os.environ.get("TILEBEAM_THREADS")
    if not text:
        from tilebeam._ext import cpus

        return cpus.default_threads()
    if text.isdecimal() and 1 <= int(text) <= MAX_THREADS:
        return int(text)
    raise TilebeamError(f"TILEBEAM_THREADS must be a number from 1 to {MAX_THREADS}, not {text!r}.")


def parse_limits(given: int | str | Sequence[int | str]) -> list[int]:
    """Parse bytes from numbers or texts such as "2GiB", "512M", "0"; K, M and G are powers of 1024.

    Raises:
        TilebeamError: one of them is no size.
    """
    entries = [given] if isinstance(given, int | str) else given
    sizes = [_size("memory_limit", entry, 'bytes, or a size such as "2GiB"') for entry in entries]
    if not 1 <= len(sizes) <= MAX_DEVICES:
        raise TilebeamError(f"memory_limit must name between 1 and {MAX_DEVICES} sizes, not {len(sizes)}.")
    return sizes


def _room(given: int | str | None) -> int:
    """Return the bytes of a number or of a text such as "20GiB"; None: of TILEBEAM_PACKED_CACHE, or none."""
    kind, variable = 'bytes, or a size such as "20GiB", 0 for none', "TILEBEAM_PACKED_CACHE"
    if given is None:
        return _size(variable, os.environ.get(variable) or 0, kind)
    return _size("packed_cache", given, kind)


def _size(name: str, given: int | str, kind: str, unit: str = "B") -> int:
    """Return the bytes of an argument, which is a number of a unit, or a text that has its own; `TilebeamError`: it is
    neither, but has to be of this kind."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:([KMG])(?:iB|B)?|(B))?\s*", str(given), re.IGNORECASE)
    size = int(match[1]) << 10 * "BKMG".index((match[2] or match[3] or unit).upper()) if match else -1
    if not 0 <= size < 2**63:
        raise TilebeamError(f"{name} must be {kind}, not {given!r}.")
    return size


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise TilebeamError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def _within(name: str, value: object, low: int, high: int, *, none: bool = False) -> None:
    if none and value is None:
        return
    if not is_integer(value) or not low <= cast(int, value) <= high:
        raise TilebeamError(f"{name} must be a whole number from {low} to {high}, not {value!r}.")
