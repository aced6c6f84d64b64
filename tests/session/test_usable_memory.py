"""Memory that a process can have: the machine's, or what control groups of either version leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import limits_kit
import pytest
from limits_kit import V1, V2
from tilebeam.native.executor import usable_memory

MACHINE = (64 << 30, 48 << 30)


class Tree(limits_kit.Tree):
    """A machine with so much memory."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        total, available = (n >> 10 for n in MACHINE)
        self.write("proc/meminfo", f"MemTotal:  {total} kB\nMemFree:  1 kB\nMemAvailable:   {available} kB\n")

    def v2(self, folder: str, limit: int | str, used: int, stat: str = "") -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, folder: str, limit: int, used: int, stat: str = "") -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", stat)

    def usable(self) -> tuple[int, int]:
        return usable_memory(str(self.root))[:2]

    def with_swap(self) -> int:
        return usable_memory(str(self.root)).with_swap


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_groups_it_is_the_machines(tree: Tree) -> None:
    assert tree.usable() == MACHINE
    tree.process("0::/user.slice\n")  # no hierarchy is mounted
    assert tree.usable() == MACHINE


def test_of_this_machine() -> None:
    total, available, with_swap = usable_memory()
    assert 0 < available <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    assert with_swap >= available


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


def test_swap_counts_apart(tree: Tree) -> None:
    total, available = (n >> 10 for n in MACHINE)
    tree.write("proc/meminfo", f"MemTotal: {total} kB\nMemAvailable: {available} kB\nSwapFree: {8 << 20} kB\n")
    assert (tree.usable(), tree.with_swap()) == (MACHINE, MACHINE[1] + (8 << 30))
    tree.process("0::/\n", V2.format(root="/", at="/sys/fs/cgroup"))
    tree.v2("sys/fs/cgroup", 4 << 30, 1 << 30)
    assert (tree.usable(), tree.with_swap()) == ((4 << 30, 3 << 30), 11 << 30)
    for limit, used, swap in ((2 << 30, 1 << 30, 1 << 30), (0, 0, 0), ("max", 0, 8 << 30)):
        tree.write("sys/fs/cgroup/memory.swap.max", f"{limit}\n")
        tree.write("sys/fs/cgroup/memory.swap.current", f"{used}\n")
        assert tree.with_swap() == (3 << 30) + swap
    tree.process("4:memory:/\n", V1.format(root="/", at="/sys/fs/cgroup/memory", controller="memory"))
    tree.v1("sys/fs/cgroup/memory", 4 << 30, 2 << 30, f"total_inactive_file {1 << 30}\n")
    for limit, used, swap in ((6 << 30, 3 << 30, 1 << 30), (4 << 30, 2 << 30, 0), (1 << 62, 2 << 30, 8 << 30)):
        tree.write("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", f"{limit}\n")  # of both together
        tree.write("sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", f"{used}\n")
        assert tree.with_swap() == (3 << 30) + swap
