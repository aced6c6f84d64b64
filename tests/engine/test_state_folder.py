"""`LM.save_prefixes` and `load_prefixes`: what finished texts left in the cache outlasts the model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import LM, StateWarning, TilebeamError
from tilebeam.engine.saved_state import SavedState, tokens_in

from bench.lib.synth import preset, write_model

PROMPTS = [f"{word} question is how many " * 14 for word in ("the", "two", "other")]
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "threads": 1, "lookup": False}


def load(path: Path, **changes: Any) -> LM:
    return tilebeam.load(path, "cpu", **{**OPTIONS, **EXACT, **changes})


def answer(lm: LM, prompt: str) -> tuple[list[int], int]:
    """What is drawn after a prompt, and tokens from the cache."""
    output = lm.generate(prompt, max_tokens=8, seed=4, ignore_eos=True)[0]
    return output.outputs[0].token_ids, output.usage.cached_tokens


def fill(lm: LM, folder: Path, prompts: list[str] = PROMPTS, **options: Any) -> int:
    """Read prompts and save them."""
    with lm.keep_prefixes():
        for prompt in prompts:
            answer(lm, prompt)
        return lm.save_prefixes(folder, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other") / "other.gguf", preset("tiny", type="f32", seed=9))


def test_what_was_read_before_is_not_read_again(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    with load(path) as lm:
        want = [answer(lm, prompt)[0] for prompt in PROMPTS]
        assert fill(lm, folder) == 3
        assert folder.stat().st_mode & 0o777 == 0o700
        first = [path.stat().st_ino for path in files(folder)]
        with lm.keep_prefixes():
            answer(lm, PROMPTS[2])
            assert fill(lm, folder) == 3
        assert sorted(path.stat().st_ino for path in files(folder)) == sorted(first)  # nothing was written twice
    with load(path) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lm.load_prefixes(folder) > 3 * 40
        for prompt, tokens in zip(PROMPTS, want, strict=True):
            assert answer(lm, prompt) == (tokens, len(lm.tokenize(prompt)) - 1)
        # A longer text takes the place of what it begins with.
        turn = lm.tokenize(PROMPTS[0]) + want[0]
        lm.generate(turn + lm.tokenize("how many " * 20), max_tokens=1)
        assert lm.save_prefixes(folder) == 3
        assert len(files(folder)) == 3


@pytest.mark.parametrize("name", ["sliding", "quantized"])
def test_other_caches_on_the_device(tmp_path: Path, name: str) -> None:
    """A window that the prompt is longer than; the usual flash attention and F16 cells."""
    setting = {"arch": "gemma3", "type": "f32", "swa": 32} if name == "sliding" else {"arch": "llama", "type": "q8_0"}
    model, folder = write_model(tmp_path / "it.gguf", preset("tiny", **setting)), tmp_path / "states"
    with tilebeam.load(model, "npu", **OPTIONS) as lm, lm.keep_prefixes():
        fill(lm, folder, PROMPTS[:1])
        (want, _), prompt = answer(lm, PROMPTS[0]), len(lm.tokenize(PROMPTS[0]))
    with tilebeam.load(model, "npu", **OPTIONS, type_k="f32") as lm:  # cells of another kind are left alone
        assert lm.load_prefixes(folder) == 0
    with tilebeam.load(model, "npu", **OPTIONS) as lm:
        lm.load_prefixes(folder)
        assert answer(lm, PROMPTS[0]) == (want, prompt - 1)


def test_only_what_fits_is_loaded(path: Path, tmp_path: Path) -> None:
    """Those used last."""
    with load(path) as lm:
        fill(lm, tmp_path)
        tokens = len(lm.tokenize(PROMPTS[2])) + 7
    with load(path, n_ctx=256) as lm:
        assert tokens <= lm.load_prefixes(tmp_path) < 256
        assert answer(lm, PROMPTS[2])[1] == tokens - 8


def test_the_folder_stays_below_its_limit(path: Path, tmp_path: Path) -> None:
    with load(path) as lm:
        fill(lm, tmp_path)
        size = max(file.stat().st_size for file in files(tmp_path))
        newest = files(tmp_path)[:2]
        (tmp_path / "notes.txt").write_text("mine")
        assert fill(lm, tmp_path, [], limit=2 * size + 1000) == 0
        assert {*newest, tmp_path / "notes.txt"} == set(files(tmp_path))
        assert fill(lm, tmp_path, limit=0) == 0
        assert files(tmp_path) == [tmp_path / "notes.txt"]


def test_old_files_make_room_before_new_ones_are_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = []
    write = SavedState.write

    def noted(state: SavedState, to: Path) -> None:
        write(state, to)
        totals.append(sum(file.stat().st_size for file in files(tmp_path)))

    monkeypatch.setattr(SavedState, "write", noted)
    with load(path) as lm:
        fill(lm, tmp_path, PROMPTS)
        limit, old = totals[-1], len(totals)
        fill(lm, tmp_path, [f"another text, {prompt}" for prompt in PROMPTS], limit=limit)
    assert len(totals) > old
    assert max(totals[old:]) <= limit


def damaged(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def change_file(path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return change_file


def cut(length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, length)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut(0), "no saved state"),
        (cut(20), "no saved state"),
        (cut(60), "ends within its tokens"),
        (cut(5000), "is damaged"),
        (damaged(lambda data: data.__setitem__(-100, data[-100] ^ 1)), "digest"),
        (damaged(lambda data: data.__setitem__(15, 7)), "format 7"),
        (damaged(lambda data: data.__setitem__(slice(0, 8), b"foreign!")), "no saved state"),
    ],
)
def test_a_bad_file_is_skipped(path: Path, tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    with load(path) as lm:
        fill(lm, tmp_path)
        ids = lm.tokenize(PROMPTS[1])
    harm(next(file for file in files(tmp_path) if tokens_in(file)[: len(ids)] == ids))
    with load(path) as lm:
        with pytest.warns(StateWarning, match=said) as seen:
            assert lm.load_prefixes(tmp_path) > 0
        assert len(seen) == 1
        assert answer(lm, PROMPTS[2])[1] == len(lm.tokenize(PROMPTS[2])) - 1
        assert answer(lm, PROMPTS[1])[1] < 5
        assert lm.save_prefixes(tmp_path) == 3
    with load(path) as lm, warnings.catch_warnings():  # all is well again
        warnings.simplefilter("error")
        assert lm.load_prefixes(tmp_path) > 0
        assert answer(lm, PROMPTS[1])[1] == len(lm.tokenize(PROMPTS[1])) - 1


def socket_at(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # its name would be too long
        made.bind(path.name)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, socket_at, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("none")],
    ids=["pipe", "folder", "socket", "device", "broken link"],
)
def test_what_is_no_file_is_skipped_and_stays(path: Path, tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Under the name of a text; a pipe would wait for a writer for ever."""
    with load(path) as lm:
        fill(lm, tmp_path)
        name = next(file for file in files(tmp_path) if tokens_in(file)[:9] == lm.tokenize(PROMPTS[1])[:9])
        name.unlink()
        make(name)
        kind = stat.S_IFMT(name.lstat().st_mode)
        with pytest.warns(StateWarning, match="is not a regular file"):
            assert fill(lm, tmp_path) == 2
    with load(path) as lm:
        with pytest.warns(StateWarning, match="is not a regular file"):
            assert lm.load_prefixes(tmp_path) > 2 * 40
        assert answer(lm, PROMPTS[1])[1] < 5
        with pytest.warns(StateWarning, match="is not a regular file"):
            lm.save_prefixes(tmp_path, limit=0)
    assert [file.name for file in tmp_path.iterdir()] == [name.name]
    assert stat.S_IFMT(name.lstat().st_mode) == kind


def test_models_share_a_folder(path: Path, other: Path, tmp_path: Path) -> None:
    with load(path) as lm, load(other) as second, warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(lm, tmp_path, PROMPTS[:1])
        assert second.load_prefixes(tmp_path) == 0
        fill(second, tmp_path, PROMPTS[:1])
        assert len(files(tmp_path)) == 2
    # A file under a name that is not its own is no text of this model.
    mine, theirs = sorted(files(tmp_path), key=lambda f: f.stat().st_mtime_ns)
    theirs.replace(mine)
    with load(path) as lm, pytest.warns(StateWarning, match="another text or another model's"):
        assert lm.load_prefixes(tmp_path) == 0
    mine.touch()
    with load(path) as lm, pytest.raises(TilebeamError, match="cannot be made a folder"):
        lm.load_prefixes(mine)


# Dies when all of a file but its digest is written.
KILLED = """
import hashlib, os, sys
from types import SimpleNamespace
import tilebeam
from tilebeam.engine import saved_state

class Last:
    def update(self, data): pass
    def digest(self): os.kill(os.getpid(), 9)

saved_state.hashlib = SimpleNamespace(blake2b=lambda **_: Last())
os.umask(0)
with tilebeam.load(sys.argv[1], "cpu", n_ctx=512, n_seq_max=2, threads=1) as lm, lm.keep_prefixes():
    lm.generate("a kill comes in the middle of this " * 10, max_tokens=2)
    lm.save_prefixes(sys.argv[2])
"""


def test_a_kill_while_writing_loses_nothing_older(path: Path, tmp_path: Path) -> None:
    with load(path) as lm:
        fill(lm, tmp_path)
    before = {file: file.read_bytes() for file in files(tmp_path)}
    program = [sys.executable, "-c", KILLED, str(path), str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (part,) = set(files(tmp_path)) - before.keys()
    assert part.name.endswith(".part")
    assert stat.S_IMODE(part.stat().st_mode) == 0o600
    assert {file: file.read_bytes() for file in before} == before
    with load(path) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lm.load_prefixes(tmp_path) > 3 * 40
        lm.save_prefixes(tmp_path)
    assert not part.exists()
