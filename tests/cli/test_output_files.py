"""Files that programs write: whole or not there, and errors that say which file it was. A full disk is played by a
limit on the size of files, and by /dev/full."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import process_kit
import pytest
from eval_kit import setting
from tilebeam.evaluation.log import Log
from tilebeam.gguf.whole_file import check_target, naming, whole_file, whole_folder

from bench.lib import synth

LIMIT = 1 << 12  # bytes that a file may have


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("output") / "m.gguf", synth.preset("tiny", n_layer=1))


def listed(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- the means --------------------------------------------------------------------------------------------------------


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with whole_file(path) as partial:
        partial.write_text("one")
        assert listed(tmp_path) == [partial.name]
        assert partial != path
    assert path.read_text() == "one"

    def interrupted() -> None:
        with whole_file(path) as partial:
            partial.write_text("tw")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ZeroDivisionError), whole_file(path):
        raise ZeroDivisionError  # before anything was written
    assert (listed(tmp_path), path.read_text()) == (["f"], "one")
    link = tmp_path / "link"
    link.symlink_to("f")
    with whole_file(link) as partial:
        partial.write_text("three")
    assert link.is_symlink()
    assert path.read_text() == "three"
    long = tmp_path / ("n" * 255)
    with whole_file(long) as partial:
        partial.write_text("four")
    assert long.read_text() == "four"


def test_a_file_that_is_replaced_hands_its_mode_on(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("private")
    path.chmod(0o600)
    with whole_file(path) as partial:
        partial.write_text("still private")
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (0o600, "still private")


@pytest.mark.parametrize("whole", [whole_file, whole_folder])
def test_what_killed_writers_left_is_removed_and_what_others_write_stays(tmp_path: Path, whole: Any) -> None:
    def fill(partial: Path) -> None:
        (partial if whole is whole_file else partial / "inside").write_text("it")

    out, others = tmp_path / "out.*", [".out.12345678.part", ".out.*.12345678.partial", ".out.*.1234567g.part"]
    for name in others:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / ".out.*.12345678.part")
    if (child := os.fork()) == 0:
        try:
            with whole(out) as partial:
                fill(partial)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    kept = sorted([*others, ".out.*.12345678.part"])
    (left,) = set(listed(tmp_path)) - set(kept)
    with whole(out) as partial:
        fill(partial)
        assert sorted([*kept, partial.name]) == listed(tmp_path)
        with whole(tmp_path / "out.x"), whole(tmp_path / "oux") as other:
            fill(other)
        with pytest.raises(ZeroDivisionError), whole(out):
            raise ZeroDivisionError
        assert partial.exists()
    assert left.startswith(".out.*.")
    assert sorted([*kept, "out.*", "out.x", "oux"]) == listed(tmp_path)


def test_devices_and_pipes_are_written_to_themselves(tmp_path: Path) -> None:
    with whole_file("/dev/null") as partial:
        partial.write_text("nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(pipe) as partial:
            partial.write_text("through it")
        assert os.read(reader, 100) == b"through it"
    finally:
        os.close(reader)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), whole_file("/dev/full") as partial:
        partial.write_text("x" * 10000)


def test_only_errors_without_a_name_get_one(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full") as caught, naming(tmp_path / "full"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "full"))
    (tmp_path / "part").mkdir()
    with pytest.raises(OSError, match="full") as caught, naming(tmp_path / "full", tmp_path / "part"):
        (tmp_path / "part").write_text("a folder cannot be written")
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path / "full"))
    with pytest.raises(OSError, match="other") as caught, naming(tmp_path / "full"):
        raise OSError(errno.ENOSPC, "No space left on device", "other")
    with pytest.raises(OSError, match="Input/output error") as caught, naming(tmp_path / "full"):
        raise OSError(errno.EIO, "Input/output error")  # of what was read, perhaps
    assert caught.value.filename is None


def test_targets_are_looked_at_before_the_work(tmp_path: Path) -> None:
    check_target(tmp_path / "new")
    check_target("/dev/null")
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "file", FileNotFoundError)):
        with pytest.raises(kind):
            check_target(path)
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(PermissionError):
            check_target(tmp_path / "new")
        tmp_path.chmod(0o700)


# --- no room ----------------------------------------------------------------------------------------------------------


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


def fails(program: str, *args: str | Path, **options: Any) -> str:
    """Run it, in a folder without room if nothing else is said; its one sentence."""
    done = process_kit.run(program, *args, **options)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_a_file_without_room_is_named_and_not_left(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("as it was")
    short = ("-m", model, "-p", "the", "-n", "4", "-t", "1")
    page = ("vote", *short, "-N", "1", "--device", "cpu", "--html", target)
    assert f"{target}: File too large" in fails("tilebeam", *page, preexec_fn=limited)
    assert listed(tmp_path) == ["page.html"]
    assert target.read_text() == "as it was"
    assert "/dev/full: No space left on device" in fails("tilebeam", "trace", *short, "-o", "/dev/full")


def test_output_without_room_is_said(model: Path) -> None:
    with open("/dev/full", "w") as full:
        for args in (
            ("tilebeam", "generate", "-m", model, "-p", "the", "-n", "2", "-t", "1"),
            ("tilebeam", "bench", "-m", model, "-p", "4", "-n", "0", "-r", "1", "-t", "1", "-o", "json"),
            ("gguf-repack", "inspect", model),
        ):
            assert "standard output: No space left on device" in fails(*args, stdout=full)


def test_a_log_without_room_keeps_what_was_whole(tmp_path: Path) -> None:
    """The program that finds no room says so and ends; the next one goes on behind the last whole line."""
    path = tmp_path / "log.jsonl"
    code = f"""
import resource
from pathlib import Path
from eval_kit import setting
from tilebeam.evaluation.log import Log
with Log(Path({str(path)!r}), setting()) as log:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))
    for i in range(1000):
        log.add({{"unit": f"u{{i}}", "text": "x" * 1000}})
"""
    done = process_kit.python(code)
    assert done.returncode == 1
    assert f"File too large: '{path}'" in done.stderr.splitlines()[-1]
    assert path.stat().st_size == LIMIT
    with Log(path, setting()) as log:
        kept = len(log.records)
        assert 0 < kept < 4
        log.add({"unit": "next", "text": "y"})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["unit"] for line in lines[1:]] == [*(f"u{i}" for i in range(kept)), "next"]


# --- signals ----------------------------------------------------------------------------------------------------------


WRITES = """
from tilebeam.gguf.whole_file import whole_file
def app():
    with whole_file(sys.argv[1]) as partial:
        partial.write_text("a part")
        end()
        time.sleep(100)
"""
CALLS = """
import ctypes
callback = ctypes.CFUNCTYPE(None)(end)
app = lambda: (callback(), time.sleep(100))
"""


@pytest.mark.parametrize("app", [WRITES, CALLS], ids=["while it writes", "in a callback of C code"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_and_leaves_no_partial_file(
    tmp_path: Path, number: signal.Signals, status: int, app: str
) -> None:
    code = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
from tilebeam.cli import main
end = lambda: os.kill(os.getpid(), {int(number)})
{app}
main.app = app
main.main()
"""
    done = process_kit.python(code, tmp_path / "f")
    assert done.returncode == status, done.stderr
    assert listed(tmp_path) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "body"

    def half() -> None:
        with whole_folder(target) as partial:
            (partial / "one").write_text("1")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        half()
    assert listed(tmp_path) == []
    with whole_folder(target) as partial:
        (partial / "one").write_text("1")
        assert not target.exists()
    assert (listed(tmp_path), listed(target)) == (["body"], ["one"])
    with pytest.raises(FileExistsError, match="body"), whole_folder(target):
        raise AssertionError
    assert listed(tmp_path) == ["body"]
