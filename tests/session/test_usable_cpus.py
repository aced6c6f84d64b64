"""CPUs that a process may use, and how many threads that makes: affinity, cpusets, cores, quotas of control groups."""

from __future__ import annotations

import json
import os
from pathlib import Path

import limits_kit
import native_kit
import pytest
from limits_kit import V1, V2, Tree
from tilebeam._ext.cpus import Cpus, default_threads, usable_cpus

V1_CPU = V1.format(root="/", at="/sys/fs/cgroup/cpu", controller="cpu,cpuacct")
V2_ROOT = V2.format(root="/", at="/sys/fs/cgroup")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Eight CPUs, and nothing else that is known."""
    made = Tree(tmp_path)
    made.cpus("0-7")
    return made


def cpus(cpus: int, cores: int, quota: float | None, threads: int) -> Cpus:
    """What a process may use of a machine whose cores are alike, and of whose memory nothing is known."""
    return Cpus(cpus, cores, cores, 0, threads, quota)


def usable(tree: Tree) -> Cpus:
    return usable_cpus(str(tree.root))


def threads(tree: Tree) -> int:
    return usable(tree).threads


def v1(tree: Tree, folder: str, quota: object, period: object = 100000) -> None:
    tree.write(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
    tree.write(f"{folder}/cpu.cfs_period_us", f"{period}\n")


def test_of_this_machine() -> None:
    found = usable_cpus()
    assert 1 <= found.threads <= found.performance_cores <= found.cores <= found.cpus <= len(os.sched_getaffinity(0))
    assert found.threads == default_threads()


def test_the_affinity_mask() -> None:
    """As taskset sets it, of a program that runs already."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus().cpus == default_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_without_groups_and_topology_each_cpu_counts(tree: Tree) -> None:
    assert usable(tree) == cpus(8, 8, None, 8)


@pytest.mark.parametrize("folder", ["job/step", "job", ""])
def test_a_quota_of_version_1(tree: Tree, folder: str) -> None:
    """Of the process's own group, of its parent, of the one above."""
    tree.process("5:cpu,cpuacct:/job/step\n4:memory:/other\n", V1_CPU)
    for other in ("job/step", "job", ""):
        v1(tree, f"sys/fs/cgroup/cpu/{other}", -1)
    assert usable(tree) == cpus(8, 8, None, 8)
    v1(tree, f"sys/fs/cgroup/cpu/{folder}", 250000)
    assert usable(tree) == cpus(8, 8, 2.5, 3)


@pytest.mark.parametrize("folder", ["a.slice/b.service", "a.slice", ""])
def test_a_quota_of_version_2(tree: Tree, folder: str) -> None:
    tree.process("0::/a.slice/b.service\n", V2_ROOT)
    for other in ("a.slice/b.service", "a.slice"):
        tree.write(f"sys/fs/cgroup/{other}/cpu.max", "max 100000\n")
    assert usable(tree).quota is None
    tree.write(f"sys/fs/cgroup/{folder}/cpu.max", "100000 50000\n")
    assert usable(tree) == cpus(8, 8, 2.0, 2)


def test_the_tightest_quota_counts(tree: Tree) -> None:
    tree.process("0::/a/b\n", V2_ROOT)
    tree.write("sys/fs/cgroup/a/cpu.max", "300000 100000\n")
    tree.write("sys/fs/cgroup/a/b/cpu.max", "600000 100000\n")
    assert threads(tree) == 3
    tree.write("sys/fs/cgroup/a/b/cpu.max", "150000 100000\n")
    assert threads(tree) == 2


@pytest.mark.parametrize(("quota", "expected"), [(1000, 1), (50000, 1), (100000, 1), (100001, 2), (10**9, 8)])
def test_a_part_of_a_cpu_is_a_thread(tree: Tree, quota: int, expected: int) -> None:
    tree.process("0::/\n", V2_ROOT)
    tree.write("sys/fs/cgroup/cpu.max", f"{quota} 100000\n")
    assert threads(tree) == expected


def test_both_versions_at_a_time(tree: Tree) -> None:
    """As systemd's hybrid hierarchy: controllers in version 1, version 2 mounted beside them without any."""
    tree.process(
        "5:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job\n",
        V1.format(root="/", at="/sys/fs/cgroup/systemd", controller="name=systemd"),
        V1_CPU,
        V2.format(root="/", at="/sys/fs/cgroup/unified"),
    )
    tree.write("sys/fs/cgroup/unified/job/cgroup.procs", "1\n")
    v1(tree, "sys/fs/cgroup/systemd/job", 100000)  # another hierarchy's, which says nothing
    assert threads(tree) == 8
    v1(tree, "sys/fs/cgroup/cpu/job", 200000)
    assert threads(tree) == 2


@pytest.mark.parametrize("path", ["/docker/0a1b", "/docker/0a1b/../../elsewhere", "/", "/docker/0a1bc"])
def test_a_container_that_does_not_show_the_process_group(tree: Tree, path: str) -> None:
    """The path is the host's, what is mounted is the container's group."""
    tree.process(f"5:cpu:{path}\n", V1.format(root="/docker/0a1b", at="/sys/fs/cgroup/cpu", controller="cpu"))
    v1(tree, "sys/fs/cgroup/cpu", 100000)
    assert threads(tree) == 1


def test_files_that_are_missing_or_garbage(tree: Tree) -> None:
    for text in ("", "five", "\0\0", "-5 100000", "100000", "100000 0", "0 100000", "nan inf", "100000 -1"):
        tree.process("0::/\n", V2_ROOT)
        tree.write("sys/fs/cgroup/cpu.max", text)
        assert usable(tree) == cpus(8, 8, None, 8), text
    tree.process("0:\n:::\n12\n5:cpu:\n0::/gone\n", "31 20", "- cgroup2", V2_ROOT, V1_CPU)
    assert threads(tree) == 8
    for text in ("", "x", "3-", "-3", "7-3", "0-99999999999", "0,,1"):
        tree.write("sys/devices/system/cpu/cpu0/topology/core_cpus_list", text)
        tree.write("sys/fs/cgroup/cpuset.cpus.effective", text)
        assert threads(tree) == 8, text
    tree.write("sys/devices/system/cpu/present", "some")
    assert threads(tree) == 8
    tree.write("proc/self/status", "Cpus_allowed_list:\tnone\n")
    assert usable(tree) == cpus(1, 1, None, 1)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cpuset_narrower_than_the_affinity_mask(tree: Tree, version: int) -> None:
    if version == 1:
        tree.process("3:cpuset:/job\n", V1.format(root="/", at="/sys/fs/cgroup/cpuset", controller="cpuset"))
        tree.write("sys/fs/cgroup/cpuset/cpuset.cpus", "0-7\n")
        tree.write("sys/fs/cgroup/cpuset/job/cpuset.cpus", "2-3,12\n")
    else:
        tree.process("0::/job/step\n", V2_ROOT)
        tree.write("sys/fs/cgroup/cpuset.cpus.effective", "0-7\n")
        tree.write("sys/fs/cgroup/job/step/cpuset.cpus", "\n")  # not set: as the parent's
        tree.write("sys/fs/cgroup/job/cpuset.cpus.effective", "2-3\n")
    assert usable(tree) == cpus(2, 2, None, 2)
    tree.cpus("4-7", "0-7")  # nothing in common: the mask is right, whatever the files are
    assert usable(tree).cpus == 4


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_count_as_one_core(tree: Tree, name: str) -> None:
    tree.cores("0,4", "1,5", "2,6", "3,7", name=name)
    assert usable(tree) == cpus(8, 4, None, 4)
    tree.cpus("0-1,4-5", "0-7")
    assert usable(tree) == cpus(4, 2, None, 2)
    tree.cpus("0-3", "0-7")  # one of each
    assert usable(tree) == cpus(4, 4, None, 4)
    tree.process("0::/\n", V2_ROOT)
    tree.write("sys/fs/cgroup/cpu.max", "300000 100000\n")
    assert usable(tree) == cpus(4, 4, 3.0, 3)


# ---- performance and efficiency cores


def hybrid(tree: Tree) -> None:
    """Two cores with two CPUs each, and four efficiency cores, as Linux tells of Intel's."""
    tree.cores("0-1", "2-3", "4", "5", "6", "7")
    tree.write("sys/devices/cpu_core/cpus", "0-3\n")
    tree.write("sys/devices/cpu_atom/cpus", "4-7\n")


def test_efficiency_cores_get_no_threads(tree: Tree) -> None:
    hybrid(tree)
    assert usable(tree) == Cpus(8, 6, 2, 0, 2, None)
    tree.cpus("1,4-7", "0-7")
    assert usable(tree) == Cpus(5, 5, 1, 0, 1, None)
    tree.cpus("5-7", "0-7")  # nothing else may be used
    assert usable(tree) == Cpus(3, 3, 3, 0, 3, None)


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
@pytest.mark.parametrize(
    ("speeds", "threads"),
    [
        ("1024 850 850 850 446 446 446 446", 4),  # a phone: one, three and four; the middle ones work with the largest
        ("1024 1024 1024 1024 512 512 512 512", 8),
        ("5100 5100 3300 3300 3300 3300 - -", 8),  # the same cores with lower clocks; nothing is known of two
        ("some 1000 400 -5 0 1000 1000 1000", 7),
        ("1 1 1 1 1 1 1 1", 8),
    ],
)
def test_cores_less_than_half_as_fast_are_efficiency_cores(tree: Tree, file: str, speeds: str, threads: int) -> None:
    for cpu, speed in enumerate(speeds.split()):
        if speed != "-":
            tree.write(f"sys/devices/system/cpu/cpu{cpu}/{file}", f"{speed}\n")
    assert usable(tree) == Cpus(8, 8, threads, 0, threads, None)


# ---- memory nodes


@pytest.mark.parametrize(
    ("allowed", "memory", "count"),
    [
        ("0-7", "0-1", 2),
        ("0-3", "0-1", 1),  # numactl -N 0: all threads run there
        ("0-7", "1", 1),  # numactl -m 1
        ("0-7", "0-2", 2),  # the third has no CPU, as memory behind CXL has not
        ("2-5", "0-1,7", 2),
        ("0-7", "none", 0),
    ],
)
def test_memory_nodes_within_masks(tree: Tree, allowed: str, memory: str, count: int) -> None:
    tree.cpus(allowed, "0-7")
    tree.write("proc/self/status", f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t{memory}\n")
    for node, of in ((0, "0-3"), (1, "4-7"), (2, "")):
        tree.write(f"sys/devices/system/node/node{node}/cpulist", f"{of}\n")
    assert usable(tree).nodes == count


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = ["base/cpus.cpp", "base/control_groups.cpp", "base/numa.cpp"]
    return native_kit.build("numa_pages.cpp", sources, tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("nodes", ["0", "0 1"])
def test_pages_of_shared_memory_are_interleaved(pages: Path, nodes: str) -> None:
    """Of nodes that the machine does not have the system takes no notice, as long as it has one of them."""
    done = native_kit.run(pages, *nodes.split())
    if "refused" in done.stdout:
        pytest.skip("this system has no mbind")
    assert (done.returncode, done.stdout) == (0, "default\nspread\ninterleave, page on node 0\n")


def test_a_policy_that_the_process_was_started_with_holds(tree: Tree, pages: Path) -> None:
    """As numactl sets one."""
    tree.write("proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n")
    for node, of in ((0, "0-3"), (1, "4-7")):
        tree.write(f"sys/devices/system/node/node{node}/cpulist", f"{of}\n")
    assert native_kit.run(pages, "under", str(tree.root)).stdout == "0 1 \nwith a policy: \n"


def test_no_pages_are_spread_over_nodes_that_are_not_there(pages: Path) -> None:
    assert native_kit.run(pages, "1023").stdout == native_kit.run(pages, "1024").stdout == "default\nrefused\n"


# ---- threads on cores


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = ["base/cpus.cpp", "base/control_groups.cpp"]
    return native_kit.build("cores_apart.cpp", sources, tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize(
    ("running_on", "own", "goes_to"),
    [
        ("0 1 2", 1, ""),  # all on cores of their own
        ("0 1 0", 2, "2 3 6 7"),  # two on one CPU: to a core that is free
        ("0 1 4", 2, "2 3 6 7"),  # two on one core
        ("0 4 2", 0, ""),  # of two on one core the first stays
        ("0 1 2 3 4", 4, ""),  # no core is free, but nobody shares a CPU
        ("0 1 2 3 0", 4, "4 5 6 7"),  # no core is free, but CPUs are
        ("0 1 2 3 4 5 6 7 0", 8, ""),
        ("-1 4 -1", 1, ""),  # nothing is known of the others
    ],
)
def test_a_worker_goes_to_a_free_core(tree: Tree, apart: Path, running_on: str, own: int, goes_to: str) -> None:
    tree.cores("0,4", "1,5", "2,6", "3,7")
    done = native_kit.run(apart, str(tree.root), str(own), *running_on.split())
    assert (done.returncode, done.stdout.strip()) == (0, goes_to)


def test_a_worker_stays_within_the_affinity_mask(tree: Tree, apart: Path) -> None:
    tree.cpus("0-1,4-6", "0-7")
    tree.cores("0,4", "1,5", "2,6", "3,7")
    assert native_kit.run(apart, str(tree.root), "1", "0", "4").stdout.split() == ["1", "5", "6"]
    assert native_kit.run(apart, str(tree.root), "3", "0", "1", "6", "4").stdout.split() == []


@pytest.mark.parametrize(
    ("running_on", "own", "goes_to"),
    [
        ("0 5", 1, "2 3"),  # from an efficiency core to a core that is free
        ("0 5 2", 1, ""),  # which there is none of
        ("0 1", 1, "2 3"),  # two on one core: to one of the fast ones
        ("0 2 1", 2, "4 5 6 7"),  # which there is none of: to any that is free
    ],
)
def test_a_worker_goes_to_a_performance_core(tree: Tree, apart: Path, running_on: str, own: int, goes_to: str) -> None:
    hybrid(tree)
    assert native_kit.run(apart, str(tree.root), str(own), *running_on.split()).stdout.strip() == goes_to


# ---- a real quota

IN_A_GROUP = """
import json, sys
from tilebeam.gguf import stream
from tilebeam.measure import doctor
from tilebeam.model.load_options import LoadOptions
from tilebeam.native import executor

report = doctor.DoctorReport()
ffi, lib = executor.load()
found = {"said": doctor._limits(report), "facts": report.facts["limits"], "load": LoadOptions().checked().threads}
found["repack"] = stream.default_threads()
npu = lib.tb_npu_create(0, ffi.NULL)
found["npu"] = lib.tb_npu_n_threads(npu)
lib.tb_npu_free(npu)
result = ffi.new("tb_session_result *")
path = ffi.new("char[]", sys.argv[1].encode())
options = ffi.new("tb_session_options *", {"process": 1, "deadline_ms": 20000, "npud_path": path})
session = lib.tb_session_start(options, result)
found["npud"] = lib.tb_session_n_threads(session)
lib.tb_session_stop(session)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("quota", "words", "most"), [(1.0, "1.0 CPU: 1 thread;", 1), (1.5, "1.5 CPUs: ", 2)])
def test_a_quota_reaches_everything_that_counts_cpus(
    monkeypatch: pytest.MonkeyPatch, quota: float, words: str, most: int
) -> None:
    from tilebeam.native import paths

    monkeypatch.delenv("TILEBEAM_THREADS", raising=False)
    time = round(quota * 100000)
    wanted = {"cpu.cfs_period_us": 100000, "cpu.cfs_quota_us": time}, {"cpu.max": f"{time} 100000"}
    with limits_kit.group("cpu", *wanted) as group:
        done = group.python(IN_A_GROUP, paths.native("tilebeam-npud"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    threads = min(most, usable_cpus().cores)
    assert f"quota of {words}" in found["said"]
    assert (found["facts"]["quota"], found["facts"]["threads"]) == (quota, threads)
    assert [found[what] for what in ("load", "repack", "npu", "npud")] == [threads] * 4
