"""Packed files kept for the next load: what is kept, whom it is shared with, and that nothing else than a sentence
comes of whatever is wrong with them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from tilebeam import CacheWarning, SamplingParams, TilebeamError
from tilebeam.model import packed_cache
from tilebeam.native import llama
from tilebeam.native.control import control
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

ROOM = "64MiB"
SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 1, "threads": 1, "packed_cache": ROOM}
# A load that is killed while it packs.
KILLED = """
import os, signal, sys, tilebeam
tilebeam.load(sys.argv[1], n_ctx=256, threads=1, progress=lambda share: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "ordinary.gguf", preset("tiny", arch="qwen2", type="q4_0"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tilebeam" / "packed"


def said(model: Path, **options: Any) -> tuple[list[int], bool]:
    """What a model says, and whether it was loaded from a packed file."""
    with tilebeam.load(model, **SMALL | options) as lm:
        answer = lm.generate("the question is how many", SamplingParams(temperature=0, max_tokens=8))
        assert (lm.info.path, lm.info.repacked) == (str(model), False)
        return answer[0].outputs[0].token_ids, f"{packed_cache.folder()}/" in Path("/proc/self/maps").read_text()


def only(home: Path) -> Path:
    (found,) = home.iterdir()
    return found


def quietly(model: Path, **options: Any) -> tuple[list[int], bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return said(model, **options)


def test_a_second_load_maps_what_the_first_one_packed(ordinary: Path, home: Path) -> None:
    want = quietly(ordinary, packed_cache=0)[0]
    assert not home.exists()
    first = quietly(ordinary)
    made, state = only(home), only(home).stat()
    assert quietly(ordinary) == first == (want, True)
    assert (only(home), only(home).stat().st_mtime) == (made, state.st_mtime)  # not made anew
    assert [p.stat().st_mode & 0o777 for p in (home.parent, home, made)] == [0o700, 0o700, 0o600]
    assert [(file.path, file.size) for file in packed_cache.kept()] == [(made, state.st_size)]
    assert quietly(ordinary, verify=True) == first


def damage(file: Path, kind: str) -> None:
    state = file.stat()
    if kind == "replaced by a link":
        file.symlink_to(file.rename(file.parent.parent / "elsewhere"))
    elif kind == "writable by others":
        file.chmod(0o622)
    elif kind == "truncated":
        os.truncate(file, state.st_size // 2)
    else:
        with open(file, "r+b") as f:
            f.seek(200 if kind == "damaged header" else -1000, os.SEEK_SET if kind == "damaged header" else os.SEEK_END)
            f.write(b"\xff" * 8)
    if kind != "written into":  # what shows by itself
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize(
    "kind", ["truncated", "damaged header", "written into", "replaced by a link", "writable by others"]
)
def test_a_file_that_cannot_be_trusted_is_made_anew(ordinary: Path, home: Path, kind: str) -> None:
    first = quietly(ordinary)
    damage(only(home), kind)
    with pytest.warns(CacheWarning, match=r"^The packed file of ordinary\.gguf is made anew: .*\.$"):
        assert said(ordinary) == first
    assert quietly(ordinary) == first


@pytest.mark.usefixtures("home")
def test_another_version_or_source_gets_a_file_of_its_own(ordinary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = quietly(ordinary)
    os.utime(ordinary)
    assert quietly(ordinary) == first
    monkeypatch.setattr("tilebeam.gguf.repack.tool_version", lambda: "tilebeam 0.0")
    assert quietly(ordinary) == first
    assert len(packed_cache.kept()) == 3


@pytest.mark.usefixtures("home")
def test_what_is_used_longest_ago_makes_room(tmp_path: Path) -> None:
    kinds = ("q4_0", "q8_0", "q4_1")
    models = [write_model(tmp_path / f"{kind}.gguf", preset("tiny", arch="qwen2", type=kind)) for kind in kinds]
    room = sum(m.stat().st_size for m in models) - 1
    for model in models[:2]:
        quietly(model, packed_cache=room)
    for file in packed_cache.kept():
        used = 10**18 if file.path.name.startswith("q8_0") else 2 * 10**18
        os.utime(file.path, ns=(used, file.path.stat().st_mtime_ns))
    quietly(models[2], packed_cache=room)
    assert sorted(file.path.name[:4] for file in packed_cache.kept()) == ["q4_0", "q4_1"]
    with pytest.warns(CacheWarning, match="packed_cache allows 0 MiB"):
        assert not said(models[1], packed_cache=1000)[1]


def test_what_has_no_tiles_to_keep_costs_no_file_and_no_word(ordinary: Path, home: Path, tmp_path: Path) -> None:
    quietly(ordinary)
    kept = only(home)
    config = preset("tiny", arch="qwen2", type="iq3_s", types={"token_embd": "q8_0"}, tied=True)
    assert not quietly(write_model(tmp_path / "model.gguf", config), packed_cache=1)[1]
    assert only(home) == kept


def test_it_has_its_name_once_it_can_be_trusted(ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ordinary.with_name("模" * 80)  # 240 bytes
    os.link(ordinary, long)
    utime, seen = os.utime, []

    def noted(*args: Any, **options: Any) -> None:
        seen.append(only(home).suffix)
        utime(*args, **options)

    monkeypatch.setattr(packed_cache.os, "utime", noted)
    quietly(long)
    assert seen == [".part", ".gguf"]


def test_what_another_process_has_just_made_stays(ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, opened = quietly(ordinary), packed_cache._opened
    made, answers = only(home).stat().st_ino, [packed_cache._UnusableError("it was damaged")]

    def then_sound(*args: Any, **options: Any) -> Any:
        if answers:
            raise answers.pop()
        return opened(*args, **options)

    monkeypatch.setattr(packed_cache, "_opened", then_sound)
    assert quietly(ordinary) == first
    assert only(home).stat().st_ino == made


@pytest.mark.parametrize("kind", ["a file", "writable by others", "another user's"])
def test_a_folder_that_cannot_be_used_costs_a_sentence(ordinary: Path, home: Path, kind: str) -> None:
    home.parent.mkdir(parents=True, mode=0o700)
    if kind == "a file":
        home.write_text("")
    else:
        home.mkdir()
        home.chmod(0o777 if kind == "writable by others" else 0o700)
    if kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root gives folders away")
        os.chown(home, 12345, 12345)
    with pytest.warns(CacheWarning, match=r"^No packed file of ordinary\.gguf is kept: .*\.$"):
        assert said(ordinary) == (quietly(ordinary, packed_cache=0)[0], False)


def test_a_full_disk_and_another_process_that_packs(
    ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr("tilebeam.gguf.gguf_write.os.posix_fallocate", full)
        with pytest.warns(CacheWarning, match=r"No space left.* are needed"):
            assert not said(ordinary)[1]
    assert list(home.iterdir()) == []
    fd = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.warns(CacheWarning, match="another process is packing"):
            assert not said(ordinary)[1]
        with monkeypatch.context() as patch:
            patch.setattr("tilebeam.folder_lock.fcntl.flock", no_locks)
            with pytest.warns(CacheWarning, match="No locks available"):
                assert not said(ordinary)[1]
    finally:
        os.close(fd)
    assert quietly(ordinary)[1]


@pytest.mark.usefixtures("home")
def test_a_load_that_is_killed_while_it_packs_leaves_nothing(ordinary: Path) -> None:
    env = os.environ | {"TILEBEAM_PACKED_CACHE": ROOM}
    done = subprocess.run([sys.executable, "-c", KILLED, str(ordinary)], env=env, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert packed_cache.kept() == []
    assert quietly(ordinary)[1]


def test_a_file_that_another_process_deletes_meanwhile(
    ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, find = quietly(ordinary), packed_cache.find

    def then_deleted(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        only(home).unlink()
        return found

    monkeypatch.setattr(packed_cache, "find", then_deleted)
    with pytest.warns(CacheWarning, match="could not be loaded"):
        assert said(ordinary) == (first[0], False)


def test_tiles_that_llama_cpp_leaves_out(ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, find = quietly(ordinary), packed_cache.find

    def with_more(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        return replace(found, tensors=(*found.tensors, replace(found.tensors[-1], name="blk.9.attn_q.weight")))

    monkeypatch.setattr(packed_cache, "find", with_more)
    with pytest.warns(CacheWarning, match="has tiles that llama.cpp leaves out"):
        assert said(ordinary) == (first[0], False)
    assert only(home)


def test_what_fails_however_it_is_loaded_costs_no_file(
    ordinary: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quietly(ordinary)
    made = only(home)
    with monkeypatch.context() as patch:
        patch.setattr("tilebeam.model.loader.own_load", lambda: lambda *_: None)
        with pytest.raises(TilebeamError, match="could not load"):
            tilebeam.load(ordinary, **SMALL)
    assert only(home) == made
    made.unlink()
    monkeypatch.setitem(llama.COMPUTED_WRONGLY, "qwen2", "always")
    with pytest.raises(TilebeamError, match="wrongly always"):
        tilebeam.load(ordinary, **SMALL)
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("room", [0, ROOM])
@pytest.mark.parametrize("drafts", [False, True])
def test_progress_goes_from_nothing_to_all(ordinary: Path, room: int | str, drafts: bool) -> None:
    for _ in range(2):
        told: list[float] = []
        said(ordinary, packed_cache=room, progress=told.append, draft=ordinary if drafts else None)
        assert (told, told[0], told[-1]) == (sorted(told), 0, 1)
        assert len({share for share in told if share > (0.9 if drafts else 0)}) > 3


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("at", [0.5, 0.95, 1.0])
def test_what_progress_raises_ends_the_load(ordinary: Path, at: float) -> None:
    def stop(share: float) -> None:
        if share >= at:
            raise OSError("stop")  # as packing may, too

    before = control().status()["buffers"]
    for room in (ROOM, ROOM, 0):
        with pytest.raises(OSError, match=r"^stop$"):
            tilebeam.load(ordinary, **SMALL | {"packed_cache": room}, progress=stop)
    assert control().status()["buffers"] == before


def test_no_size(ordinary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TilebeamError, match="packed_cache must be bytes, or a size such as"):
        tilebeam.load(ordinary, packed_cache="5 bananas")
    monkeypatch.setenv("TILEBEAM_PACKED_CACHE", "-1")
    with pytest.raises(TilebeamError, match="TILEBEAM_PACKED_CACHE must be"):
        tilebeam.load(ordinary)


def test_the_command_lists_and_deletes(ordinary: Path, home: Path) -> None:
    from tilebeam.cli.main import app

    run = CliRunner()
    assert json.loads(run.invoke(app, ["cache", "--json"]).stdout)["files"] == []
    quietly(ordinary)
    (listed,) = json.loads(run.invoke(app, ["cache", "--json"]).stdout)["files"]
    assert (listed["path"], listed["bytes"]) == (str(only(home)), only(home).stat().st_size)
    assert re.search(r"^ordinary-[0-9a-f]{16}\.gguf +\d +2", run.invoke(app, ["cache"]).stdout, re.MULTILINE)
    assert "deleted 1 packed files" in run.invoke(app, ["cache", "--clear"]).stdout
    assert packed_cache.kept() == []
