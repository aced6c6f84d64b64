"""Model files are read through once for each state they have, and never believed on the word of somebody else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tilebeam
from tilebeam import gguf as gguf_tools
from tilebeam.model import file_check as checked_files
from tilebeam.model.file_check import State
from tilebeam.model.load_options import Verify

from bench.lib import synth


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; files count as settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checked_files, "_SETTLED_NS", 0)
    monkeypatch.setattr(checked_files, "_here", set())
    return checked_files.folder()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    return path


def forget() -> None:
    """What a new process knows: nothing of its own."""
    checked_files._here.clear()


def remember(path: Path, check: str = "digests") -> None:
    checked_files.remember(State.of(path), path, check)


def known(path: Path, check: str = "digests") -> bool:
    return checked_files.known(State.of(path), check)


def test_a_file_is_remembered_across_processes(cache: Path, file: Path) -> None:
    assert not known(file)
    remember(file)
    assert known(file)
    forget()
    assert known(file)
    assert not known(file, "another check")
    assert cache.stat().st_mode & 0o777 == 0o700
    for record in cache.iterdir():
        record.unlink()
    assert not known(file)


def rewritten(path: Path) -> None:
    with path.open("r+b") as f:
        f.write(b"x")


def rewritten_with_its_old_time(path: Path) -> None:
    before = path.stat()
    rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replaced(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(bytes(1000))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def shortened(path: Path) -> None:
    os.truncate(path, 999)


@pytest.mark.parametrize("change", [rewritten, rewritten_with_its_old_time, replaced, shortened])
def test_a_changed_file_is_not_the_one_that_was_checked(
    cache: Path, file: Path, change: Callable[[Path], None]
) -> None:
    del cache
    remember(file)
    change(file)
    assert not known(file)
    forget()
    assert not known(file)


def test_a_file_that_changes_during_the_check_is_not_remembered(cache: Path, file: Path) -> None:
    for change in (rewritten, replaced, Path.unlink):
        before = State.of(file)
        change(file)
        checked_files.remember(before, file, "digests")
        assert not checked_files.known(before, "digests")
    assert not cache.exists()


def test_a_file_that_was_just_written_is_remembered_by_this_process_only(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_files, "_SETTLED_NS", 3600 * 10**9)
    remember(file)
    assert known(file)
    forget()
    assert not known(file)
    assert not cache.exists()


def test_records_that_others_could_have_made_do_not_count(cache: Path, file: Path, tmp_path: Path) -> None:
    remember(file)
    forget()
    cache.chmod(0o777)
    assert not known(file)
    cache.chmod(0o700)
    assert known(file)
    moved = tmp_path / "moved"
    cache.rename(moved)
    cache.symlink_to(moved)
    assert not known(file)


def test_no_place_for_records_is_no_error(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    remember(file)
    assert known(file)
    forget()
    assert not known(file)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache / "home"))  # below a file: not even root can make it
    remember(file)
    assert known(file)


def test_old_records_go(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "_MOST", 3)
    for i in range(6):
        path = tmp_path / f"f{i}"
        path.write_bytes(b"z")
        remember(path)
        for age, record in enumerate(sorted(cache.iterdir(), key=lambda r: r.stat().st_mtime_ns)):
            os.utime(record, ns=(0, age))
    assert len(list(cache.iterdir())) == 3
    forget()
    assert [known(tmp_path / f"f{i}") for i in range(6)] == [False] * 3 + [True] * 3


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    synth.write_model(folder / "m.gguf", synth.preset("tiny", type="q4_0"))
    gguf_tools.pack(folder / "m.gguf", folder / "m.tb.gguf")
    return folder / "m.tb.gguf"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read through from now on."""
    seen = []
    real = gguf_tools.verify

    def verify(path: Path, *, deep: bool) -> object:
        seen.append(path)
        return real(path, deep=deep)

    monkeypatch.setattr(gguf_tools, "verify", verify)
    return seen


def test_load_reads_a_file_through_once(cache: Path, packed: Path, verified: list[Path]) -> None:
    def load(verify: Verify | bool | None) -> None:
        with tilebeam.load(packed, n_ctx=256, n_seq_max=1, threads=1, verify=verify):
            pass

    load("never")
    assert len(verified) == 0
    for _ in range(2):
        load(None)
        assert len(verified) == 1
        forget()
    load(True)
    assert len(verified) == 1
    load("always")
    assert len(verified) == 2
    assert len(list(cache.iterdir())) == 2  # its digests, its vocabulary


def test_header_is_parsed_once(cache: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del cache
    with tilebeam.load(packed, n_ctx=256, n_seq_max=1, threads=1):
        pass
    opened = []
    real = gguf_tools.GGUFFile.__init__

    def init(self: gguf_tools.GGUFFile, path: str | os.PathLike[str]) -> None:
        opened.append(path)
        real(self, path)

    monkeypatch.setattr(gguf_tools.GGUFFile, "__init__", init)
    with tilebeam.load(packed, n_ctx=256, n_seq_max=1, threads=1):
        pass
    assert opened == [packed]


def test_what_fails_is_not_remembered(cache: Path, packed: Path, tmp_path: Path, verified: list[Path]) -> None:
    with gguf_tools.GGUFFile(packed) as f:
        offset = max(t.offset for t in f.tensors.values())
    data = bytearray(packed.read_bytes())
    data[offset] ^= 1
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    for attempt in range(2):
        with pytest.raises(tilebeam.TilebeamError, match="damaged"):
            tilebeam.load(damaged, n_ctx=256, n_seq_max=1, threads=1)
        assert len(verified) == attempt + 1
    assert len(list(cache.iterdir())) == 1  # the vocabulary is sound


def test_environment_says_when(packed: Path, verified: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_VERIFY", "never")
    with tilebeam.load(packed, n_ctx=256, n_seq_max=1, threads=1):
        assert not verified
    monkeypatch.setenv("TILEBEAM_VERIFY", "sometimes")
    with pytest.raises(tilebeam.TilebeamError, match=r"TILEBEAM_VERIFY must be one of once, always, never"):
        tilebeam.load(packed, n_ctx=256, n_seq_max=1, threads=1)
