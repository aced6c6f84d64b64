"""What limits a process, faked and real: folders with the files of /proc and /sys that matter, and control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import process_kit
import pytest

V1 = "30 20 0:26 {root} {at} rw,nosuid shared:9 - cgroup cgroup rw,{controller}"
V2 = "31 20 0:27 {root} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


class Tree:
    """A folder with the files of /proc and /sys that matter."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, groups: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "\n".join(["20 1 0:2 / / rw - ext4 /dev/sda rw", *mounts, ""]))

    def cpus(self, allowed: str, present: str = "") -> None:
        """The affinity mask, and the CPUs that the machine has."""
        self.write("proc/self/status", f"Name:\ttest\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n")
        self.write("sys/devices/system/cpu/present", f"{present or allowed}\n")

    def cores(self, *siblings: str, name: str = "core_cpus_list") -> None:
        """Cores by the CPUs that each has, such as "0,4"."""
        for text in siblings:
            for cpu in text.replace("-", ",").split(","):
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", f"{text}\n")


@dataclass(frozen=True)
class Group:
    """A control group of this machine, of one controller."""

    folder: Path
    is_v2: bool

    def python(self, code: str, *args: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python code in the group to its end; its output as text."""
        enter = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", code, *map(str, args)]
        env = process_kit.environment()
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)

    def peak(self) -> int:
        """Most bytes that the group has had so far."""
        return int((self.folder / ("memory.peak" if self.is_v2 else "memory.max_usage_in_bytes")).read_text())


@contextmanager
def group(controller: str, v1: Mapping[str, int], v2: Mapping[str, str]) -> Iterator[Group]:
    """A new group with these files written, and a group inside, which is the one given: what limits it is its parent.

    Skips the test where the machine has no such controller, or this user may make no group.
    """
    outer, is_v2 = _place(controller) or pytest.skip(f"no control groups with the {controller} controller")
    outer /= f"tilebeam-{os.getpid()}-{uuid4().hex[:8]}"
    inner = outer / "inside"
    try:
        outer.mkdir()
        for name, value in (v2 if is_v2 else v1).items():
            (outer / name).write_text(str(value))
        if is_v2:
            (outer / "cgroup.subtree_control").write_text(f"+{controller}")
        inner.mkdir()
    except OSError as error:
        _remove(inner, outer)
        pytest.skip(f"cannot make a control group: {error}")
    try:
        yield Group(inner, is_v2)
    finally:
        _remove(inner, outer)


def _remove(*folders: Path) -> None:
    for folder in folders:
        for _ in range(50):  # processes that have ended leave it a moment later
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.1)
            else:
                break


def _place(controller: str) -> tuple[Path, bool] | None:
    """Where groups of a controller can be made, and whether that is version 2."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, behind = line.partition(" - ")
        mount, (kind, _, options, *_) = Path(fields.split()[4]), behind.split()
        if kind == "cgroup" and controller in options.split(","):
            return mount, False
        if kind == "cgroup2":
            try:
                if controller in (mount / "cgroup.subtree_control").read_text().split():
                    return mount, True
            except OSError:
                continue
    return None
