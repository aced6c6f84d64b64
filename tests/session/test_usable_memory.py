"""Memory that a process can have: the machine's, or what control groups of either version leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tilebeam
from tilebeam.model import loader
from tilebeam.native.executor import usable_memory

from bench.lib import synth

MACHINE = (64 << 30, 48 << 30)
V1 = "30 20 0:26 {root} {at} rw,nosuid shared:9 - cgroup cgroup rw,{controller}"
V2 = "31 20 0:27 {root} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


class Tree:
    """A folder with the files of /proc and /sys that matter."""

    def __init__(self, root: Path) -> None:
        self.root = root
        total, available = (n >> 10 for n in MACHINE)
        self.write("proc/meminfo", f"MemTotal:  {total} kB\nMemFree:  1 kB\nMemAvailable:   {available} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, groups: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", "\n".join(["20 1 0:2 / / rw - ext4 /dev/sda rw", *mounts, ""]))

    def v2(self, folder: str, limit: int | str, used: int, stat: str = "") -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, folder: str, limit: int, used: int, stat: str = "") -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", stat)

    def usable(self) -> tuple[int, int]:
        return usable_memory(str(self.root))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_groups_it_is_the_machines(tree: Tree) -> None:
    assert tree.usable() == MACHINE
    tree.process("0::/user.slice\n")  # no hierarchy is mounted
    assert tree.usable() == MACHINE


def test_of_this_machine() -> None:
    total, available = usable_memory()
    assert 0 < available <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def test_a_container_with_its_own_view_of_groups(tree: Tree) -> None:
    """As Docker's on version 2: the group is the root of what it sees."""
    tree.process("0::/\n", V2.format(root="/", at="/sys/fs/cgroup"))
    tree.v2("sys/fs/cgroup", 4 << 30, 1 << 30)
    assert tree.usable() == (4 << 30, 3 << 30)


def test_the_tightest_of_all_groups_above_counts(tree: Tree) -> None:
    tree.process("0::/a.slice/b.service\n", V2.format(root="/", at="/sys/fs/cgroup"))
    tree.v2("sys/fs/cgroup/a.slice/b.service", "max", 100)
    assert tree.usable() == MACHINE
    tree.v2("sys/fs/cgroup/a.slice", 8 << 30, 7 << 30)
    assert tree.usable() == (8 << 30, 1 << 30)
    tree.v2("sys/fs/cgroup/a.slice/b.service", 2 << 30, 256 << 20)
    assert tree.usable() == (2 << 30, 1 << 30)
    tree.v2("sys/fs/cgroup/a.slice/b.service", 2 << 30, 3 << 30)
    assert tree.usable() == (2 << 30, 0)


def test_file_pages_can_be_had_back(tree: Tree) -> None:
    """A model that was read fills the page cache of the group, which is no reason to refuse it memory."""
    tree.process("0::/\n", V2.format(root="/", at="/sys/fs/cgroup"))
    stat = f"anon {1 << 30}\nfile {3 << 30}\nshmem {1 << 30}\ninactive_file {1 << 30}\nactive_file {1 << 30}\n"
    tree.v2("sys/fs/cgroup", 4 << 30, 4 << 30, stat)
    assert tree.usable() == (4 << 30, 2 << 30)


def test_groups_of_version_1(tree: Tree) -> None:
    tree.process(
        "5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n",
        V1.format(root="/", at="/sys/fs/cgroup/cpu", controller="cpu,cpuacct"),
        V1.format(root="/", at="/sys/fs/cgroup/memory", controller="memory"),
        V2.format(root="/", at="/sys/fs/cgroup/unified"),
    )
    unlimited = 0x7FFFFFFFFFFFF000
    tree.v1("sys/fs/cgroup/memory", unlimited, 9 << 30)
    tree.v1("sys/fs/cgroup/memory/job/step", unlimited, 1 << 30)
    tree.v1("sys/fs/cgroup/cpu/job", 1, 1)
    assert tree.usable() == MACHINE
    tree.v1("sys/fs/cgroup/memory/job", 6 << 30, 5 << 30, f"total_inactive_file {1 << 30}\ntotal_active_file 0\n")
    assert tree.usable() == (6 << 30, 2 << 30)


@pytest.mark.parametrize("path", ["/docker/0a1b", "/../elsewhere"])
def test_a_container_that_sees_only_its_own_group(tree: Tree, path: str) -> None:
    """As Docker's on version 1: the process's path is the host's, and what is mounted is the group itself."""
    mount = V1.format(root="/docker/0a1b", at="/sys/fs/cgroup/memory", controller="memory")
    tree.process(f"4:memory:{path}\n", mount)
    tree.v1("sys/fs/cgroup/memory", 1 << 30, 0)
    assert tree.usable() == (1 << 30, 1 << 30)


def test_a_cache_larger_than_the_containers_memory_is_refused(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp would clear it, and the system end the process."""
    tree.process("0::/\n", V2.format(root="/", at="/sys/fs/cgroup"))
    tree.v2("sys/fs/cgroup", 100 << 20, 80 << 20)
    monkeypatch.setattr(loader, "usable_memory", tree.usable)
    model = synth.write_model(tmp_path / "model.gguf", synth.preset("tiny", n_layer=2))
    with pytest.raises(tilebeam.TilebeamError, match=r"there are 0\.0 GiB of free memory: choose a smaller n_ctx"):
        tilebeam.load(model, n_ctx=1 << 17)
    tilebeam.load(model, n_ctx=256).close()
