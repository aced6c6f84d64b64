"""gguf-repack when things go wrong: killed at any moment, no space, a source that changes, files larger than memory."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import gguf_fuzz
import pytest
from gguf_kit import blocks, only_files, with_metadata, write_gguf, write_raw, writer
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import GGUFError, contents, gguf_write, stream, whole_file
from tilebeam.gguf.gguf_write import kv_text, kv_u32

Q = gguf.GGMLQuantizationType
MIB = 1 << 20


def medium(path: Path, matrices: int = 24) -> Path:
    """A model whose packing takes long enough to be interrupted anywhere."""
    with writer(path) as w:
        w.add_block_count(matrices)
        data = blocks(Q.Q8_0, 256, 1024, 1)
        for i in range(matrices):
            w.add_tensor(f"blk.{i}.attn_q.weight", data, raw_dtype=Q.Q8_0)
    return path


# Forks children that pack, and kills each after a random time: one start of the interpreter for all of them.
KILLER = """
import os, random, signal, sys, time
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write
source, out, count, named = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "named"
if named:  # as on a file system without O_TMPFILE
    real = os.path.isdir
    os.path.isdir = lambda p: p != "/proc/self/fd" and real(p)
random.seed(5)

def pack():
    child = os.fork()
    if child == 0:
        try:
            gguf_tools.pack(source, out, threads=2, overwrite=True)
        finally:
            os._exit(0)
    return child

gguf_tools.pack, gguf_tools.verify  # imported here, not in every child
os.waitpid(pack(), 0)  # the first run is slower than those that follow
begin = time.monotonic()
os.waitpid(pack(), 0)
whole = time.monotonic() - begin
os.unlink(out)
old = b"old"
killed = 0
for i in range(count):
    if i % 2:
        open(out, "wb").write(old)
    before = {p: os.stat(p).st_ino for p in (out,) if os.path.exists(p)}
    child = pack()
    time.sleep(random.uniform(0, 1.2) * whole)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed += os.WIFSIGNALED(status)
    if os.path.exists(out):
        data = open(out, "rb").read()
        if data != old:
            assert gguf_tools.verify(out, threads=1).unpacks  # complete, or not there at all
        else:
            assert i % 2
        os.unlink(out)
    else:
        assert i % 2 == 0, "the old file is gone"
print(killed)
"""


@pytest.mark.parametrize("named", ["nameless", "named"])
def test_killed_at_any_moment(tmp_path: Path, named: str) -> None:
    count = 60
    source, out = medium(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(source), str(out), str(count), named],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > count / 4  # the others were done before
    left = [p.name for p in tmp_path.iterdir() if p.name.endswith(whole_file.SUFFIX)]
    assert len(left) <= 1  # of the last one killed: every run removes what earlier ones left
    gguf_tools.pack(source, out, overwrite=True)
    only_files(tmp_path, "m.gguf", "out.gguf")
    assert gguf_tools.verify(out, against=source).exact == 24


def test_leftovers_of_killed_runs_are_removed_and_those_in_use_kept(tmp_path: Path) -> None:
    source, out = write_gguf(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    dead, used = tmp_path / ".out.gguf.00c0ffee.part", tmp_path / ".out.gguf.0badcafe.part"
    others = [tmp_path / name for name in (".out2.gguf.00c0ffee.part", "out.gguf.00c0ffee.part", ".out.gguf.part")]
    for p in (dead, used, *others):
        p.write_bytes(b"x")
    with used.open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        gguf_tools.pack(source, out)
        only_files(tmp_path, "m.gguf", "out.gguf", used.name, *(p.name for p in others))
    gguf_tools.pack(source, out, overwrite=True)
    only_files(tmp_path, "m.gguf", "out.gguf", *(p.name for p in others))


def test_two_runs_for_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's file for a leftover; the last one wins."""
    monkeypatch.setattr(os.path, "isdir", lambda p, real=os.path.isdir: p != "/proc/self/fd" and real(p))
    a, b, out = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", big=128), tmp_path / "out.gguf"
    started = False

    def progress(done: int, _total: int) -> None:
        nonlocal started
        if done and not started:
            started = True
            gguf_tools.pack(b, out, overwrite=True)

    gguf_tools.pack(a, out, progress=progress, overwrite=True)
    assert started
    assert gguf_tools.verify(out, against=a).unpacks is False
    only_files(tmp_path, "a.gguf", "b.gguf", "out.gguf")


def test_a_complete_file_is_no_leftover_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run for the same target begins between the sync and the new name."""
    source, out = write_gguf(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    gguf_tools.pack(source, out)

    def replace(partial: Path, path: Path, real: Any = Path.replace) -> Path:
        whole_file.remove_leftovers(tmp_path, "out.gguf")
        return real(partial, path)

    monkeypatch.setattr(Path, "replace", replace)
    gguf_tools.pack(source, out, overwrite=True)
    only_files(tmp_path, "m.gguf", "out.gguf")


@pytest.mark.parametrize(
    "record",
    [
        kv_u32(contents.K_ALIGNMENT, 0xFFFFFFFF),
        kv_u32(contents.K_ALIGNMENT, 48),
        kv_text(contents.K_ARCHITECTURE, "no name"),
    ],
    ids=["huge", "no power of two", "no name"],
)
def test_a_manifest_that_no_file_unpacks_to(record: bytes, tmp_path: Path) -> None:
    """Its own digest fits, as that of somebody who means harm would."""
    packed, changed = tmp_path / "p.gguf", tmp_path / "q.gguf"
    gguf_tools.pack(write_gguf(tmp_path / "m.gguf"), packed)
    key = next(key for key in (contents.K_ALIGNMENT, contents.K_ARCHITECTURE) if key.encode() in record)
    with_metadata(packed, changed, {key: record})
    changed.write_bytes(gguf_fuzz._signed(changed) or b"")
    with pytest.raises(GGUFError, match=key):
        gguf_tools.unpack(changed, tmp_path / "back.gguf")


# ---- what is there already


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and "packed.gguf" beside it."""
    folder = tmp_path_factory.mktemp("sources")
    model = write_gguf(folder / "m.gguf")
    gguf_tools.pack(model, folder / "packed.gguf")
    return model


def test_an_existing_file_is_not_overwritten_by_accident(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    for write, read in ((gguf_tools.pack, source), (gguf_tools.unpack, source.with_name("packed.gguf"))):
        with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
            write(read, out)
    command = [sys.executable, "-m", "tilebeam.gguf.cli", "pack", str(source), str(out), "-q"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(f": {out}: file exists; --force replaces it\n")
    assert out.read_bytes() == b"old"
    assert subprocess.run([*command, "--force"], check=False).returncode == 0
    assert out.read_bytes().startswith(b"GGUF")
    only_files(tmp_path, "out.gguf")


@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:  # a file system without nameless files
        monkeypatch.setattr(os.path, "isdir", lambda p, real=os.path.isdir: p != "/proc/self/fd" and real(p))
    source, out = write_gguf(tmp_path / "m.gguf"), tmp_path / "out.gguf"

    def progress(_done: int, _total: int) -> None:
        out.write_bytes(b"another's")

    with pytest.raises(FileExistsError):
        gguf_tools.pack(source, out, progress=progress)
    assert out.read_bytes() == b"another's"
    only_files(tmp_path, "m.gguf", "out.gguf")


@pytest.mark.parametrize("named", [False, True])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:
        monkeypatch.setattr(os.path, "isdir", lambda p, real=os.path.isdir: p != "/proc/self/fd" and real(p))
    source, out = write_gguf(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    for mode in (0o600, 0o664, 0o444):
        out.unlink(missing_ok=True)
        out.write_bytes(b"private")
        out.chmod(mode)
        gguf_tools.pack(source, out, overwrite=True)
        assert stat.S_IMODE(out.stat().st_mode) == mode
        assert gguf_tools.verify(out).unpacks
    old = os.umask(0o027)
    try:
        gguf_tools.pack(source, tmp_path / "new.gguf")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new.gguf").stat().st_mode) == 0o640


@pytest.mark.parametrize("there", [False, True])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, there: bool) -> None:
    source = write_gguf(tmp_path / "m.gguf")
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    link = near / "out.gguf"
    link.symlink_to("../far/real.gguf")
    if there:
        (far / "real.gguf").write_bytes(b"old")
        (far / "real.gguf").chmod(0o600)
        with pytest.raises(FileExistsError):
            gguf_tools.pack(source, link)
    gguf_tools.pack(source, link, overwrite=there)
    assert link.is_symlink()
    assert gguf_tools.verify(far / "real.gguf").unpacks
    only_files(far, "real.gguf")
    only_files(near, "out.gguf")
    assert not there or stat.S_IMODE((far / "real.gguf").stat().st_mode) == 0o600
    with pytest.raises(GGUFError, match="is the source itself"):
        gguf_tools.unpack(far / "real.gguf", link, overwrite=True)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        gguf_tools.pack(source, loop)
    lost = tmp_path / "lost"
    lost.symlink_to("no/such/file")
    with pytest.raises(FileNotFoundError, match="no/such"):
        gguf_tools.pack(source, lost)


# ---- no space


def test_file_size_limit(tmp_path: Path) -> None:
    """A limit on file sizes stops the writing."""
    source, out = medium(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "from tilebeam.gguf.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", str(source), str(out), "-q"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"gguf-repack: {out}: File too large")
    only_files(tmp_path, "m.gguf")


# ---- a source that changes


@pytest.mark.parametrize("how", ["write", "grow", "cut", "touch"])
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(stream, "PACK_ELEMENTS", 1 << 15)
    source, out = medium(tmp_path / "m.gguf", 8), tmp_path / "out.gguf"
    out.write_bytes(b"old")
    time.sleep(0.02)  # beyond the grain of the file system's clock

    def progress(done: int, _total: int) -> None:
        if not 0 < done < MIB:
            return
        with source.open("r+b") as f:
            if how == "write":
                f.seek(-1, os.SEEK_END)
                f.write(b"\x55")
            elif how == "grow":
                f.seek(0, os.SEEK_END)
                f.write(b"more")
            elif how == "cut":
                f.truncate(source.stat().st_size // 2)
            else:
                os.utime(source)

    with pytest.raises(GGUFError, match=r"changed while it was read|became shorter"):
        gguf_tools.pack(source, out, threads=2, progress=progress, overwrite=True)
    assert out.read_bytes() == b"old"
    only_files(tmp_path, "m.gguf", "out.gguf")


def test_a_source_that_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    """A new file under the old name does not disturb: what was opened is what is packed."""
    source, other, out = medium(tmp_path / "m.gguf", 4), medium(tmp_path / "o.gguf", 5), tmp_path / "out.gguf"

    def progress(done: int, _total: int) -> None:
        if done and other.exists():
            other.replace(source)

    report = gguf_tools.pack(source, out, progress=progress)
    assert report.n_tensors == 4
    assert gguf_tools.verify(out).unpacks


# ---- memory

PEAK = """
import sys
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import Policy
what, source, out = sys.argv[1:4]
if what == "pack":
    gguf_tools.pack(source, out, threads=4, overwrite=True)
elif what == "quantize":
    gguf_tools.pack(source, out, policy=Policy(type="q4_0", grouping="tile"), threads=4, overwrite=True)
elif what == "verify":
    gguf_tools.verify(source, against=out, threads=4)
else:
    gguf_tools.unpack(source, out, threads=4)
# not ru_maxrss, which a process started by vfork inherits from the one that started it
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(*arguments: object) -> int:
    """MiB that a process needs at most."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return int(done.stdout) >> 10


def sparse(path: Path, type: gguf.GGMLQuantizationType, gib: float) -> int:
    """A model of zeros that takes no room on the disk; returns the size of a tensor in MiB."""
    k, n = 4096, 8192
    block, size = gguf.GGML_QUANT_SIZES[type]
    nbytes = k * n // block * size
    names = [f"blk.{i}.ffn_down.weight" for i in range(int(gib * 1024 * MIB) // nbytes)]
    kv = [gguf_write.kv_text("general.architecture", "llama")]
    write_raw(path, kv, [(name, type, (k, n)) for name in names])
    assert len(names) * nbytes < path.stat().st_size
    return nbytes // MIB


@pytest.mark.skipif("TILEBEAM_SANITIZE" in os.environ, reason="AddressSanitizer keeps freed memory")
def test_memory_stays_bounded_whatever_the_files_size(tmp_path: Path) -> None:
    """256 MiB and a tensor are the limit; it is met with much to spare, and does not grow with the file.

    TILEBEAM_TEST_GIB sets the size of the large file.
    """
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    sparse(small, Q.Q8_0, 0.05)
    sparse(large, Q.Q8_0, float(os.environ.get("TILEBEAM_TEST_GIB", "0.5")))
    out = tmp_path / "out.gguf"
    of_small, of_large = peak("pack", small, out), peak("pack", large, out)
    assert of_large < 200
    assert of_large < of_small + 100  # how far the threads run ahead differs; the file is 460 MiB larger
    assert peak("verify", out, large) < 200
    floats = tmp_path / "floats.gguf"
    sparse(floats, Q.F32, 0.13)
    assert peak("quantize", floats, out) < 200
    assert peak("verify", out, floats) < 200
    assert peak("unpack", out, tmp_path / "back.gguf") < 200
