"""`LM.save_state` and `load_state`: another model goes on as if it had read the prompt; wrong files are refused."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import LM, TilebeamError
from tilebeam.engine import saved_state
from tilebeam.engine.saved_state import SavedState

from bench.lib.synth import preset, write_model

PROMPT = "the question is how many " * 12
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "threads": 1, "lookup": False}


def load(path: Path, device: Any = "cpu", **changes: Any) -> LM:
    return tilebeam.load(path, device, **{**OPTIONS, **EXACT, **changes})


def answer(lm: LM, prompt: str = PROMPT) -> tuple[list[int], int, int]:
    """What is drawn after a prompt, tokens from the cache, and of the prompt."""
    output = lm.generate(prompt, max_tokens=12, seed=4, ignore_eos=True)[0]
    return output.outputs[0].token_ids, output.usage.cached_tokens, output.usage.prompt_tokens


@pytest.fixture(scope="module")
def state(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompt's cells."""
    file = tmp_path_factory.mktemp("states") / "prompt.state"
    with load(path) as lm:
        assert lm.save_state(file, PROMPT) == len(lm.tokenize(PROMPT)) - 1
        assert lm.figures().cells_used == 0  # nothing stays that was not to be kept
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "sliding": write_model(folder / "gemma.gguf", preset("tiny", arch="gemma3", type="f32", swa=32)),
        "quantized": write_model(folder / "q8.gguf", preset("tiny", arch="llama", type="q8_0", n_layer=2)),
    }


def test_another_model_goes_on(path: Path, state: Path) -> None:
    with load(path) as lm:
        want, cached, prompt = answer(lm)
        longer = answer(lm, PROMPT + "two")[0]
        assert cached == 0
    with load(path) as lm:
        assert lm.load_state(state) == prompt - 1
        assert answer(lm) == (want, prompt - 1, prompt)
        found, cached, _ = answer(lm, PROMPT + "two")
        assert (found, cached >= prompt - 2) == (longer, True)
        assert answer(lm, "other")[1] <= 1  # BOS


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("name", ["sliding", "quantized"])
def test_other_models_and_devices(models: dict[str, Path], tmp_path: Path, name: str, device: str) -> None:
    """A window that the prompt is longer than; the usual flash attention and F16 cells."""
    file = tmp_path / "it.state"
    with tilebeam.load(models[name], device, **OPTIONS) as lm, lm.keep_prefixes():  # type: ignore[arg-type]
        lm.save_state(file, PROMPT)
        want = answer(lm)[0]
    with tilebeam.load(models[name], device, **OPTIONS) as lm:  # type: ignore[arg-type]
        lm.load_state(file)
        found, cached, prompt = answer(lm)
        assert (found, cached) == (want, prompt - 1)


def test_what_the_cache_holds_is_saved_without_decoding(path: Path, state: Path, tmp_path: Path) -> None:
    with load(path) as lm, lm.keep_prefixes():
        answer(lm)
        before = lm.figures().cells_used
        lm.save_state(tmp_path / "again.state", PROMPT)
        assert lm.figures().cells_used == before
        lm.save_state(tmp_path / "ids.state", lm.tokenize(PROMPT))
    assert (tmp_path / "again.state").read_bytes() == (tmp_path / "ids.state").read_bytes() == state.read_bytes()


def test_a_state_that_is_loaded_makes_room_and_goes_when_room_is_needed(path: Path, state: Path) -> None:
    with load(path, n_ctx=256, n_seq_max=1) as lm:
        for _ in range(4):
            lm.load_state(state)
        assert answer(lm)[1] > 0
        assert len(lm.generate("two " * 200, max_tokens=3)[0].outputs[0].token_ids) > 0


def test_damaged_files(path: Path, state: Path, tmp_path: Path) -> None:
    data = state.read_bytes()
    bad = tmp_path / "bad.state"
    with load(path) as lm:
        for at in (0, 15, 16, 20, 30, 60, 300, len(data) // 2, len(data) - 40, len(data) - 1):
            bad.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(TilebeamError, match=r"damaged|no saved state|has the format"):
                lm.load_state(bad)
        for length in (0, 5, 24, 100, len(data) // 2, len(data) - 1):
            bad.write_bytes(data[:length])
            with pytest.raises(TilebeamError, match=r"damaged|no saved state"):
                lm.load_state(bad)
        bad.write_bytes(data + b"x")
        with pytest.raises(TilebeamError, match="damaged"):
            lm.load_state(bad)
        os.mkfifo(tmp_path / "pipe")
        for file in (tmp_path / "none", tmp_path, tmp_path / "pipe", Path("/dev/zero"), path):
            with pytest.raises(TilebeamError, match=r"cannot be read|not a regular file|no saved state"):
                lm.load_state(file)
        assert answer(lm)[1] == 0  # and the model goes on


def test_foreign_files(path: Path, state: Path, models: dict[str, Path], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", preset("tiny", arch="llama", type="f32", n_layer=2, seed=9))
    for model in (other, models["quantized"]):
        with load(model) as lm, pytest.raises(TilebeamError, match=r"by another model \(f32\.gguf\)"):
            lm.load_state(state)
    with load(path, type_k="f16") as lm, pytest.raises(TilebeamError, match=r"f32 f32 plain.*is f16 f32 plain"):
        lm.load_state(state)
    long = tmp_path / "long.state"
    with load(path) as lm:
        lm.save_state(long, "two " * 300)
    with load(path, n_ctx=256) as lm:
        with pytest.raises(TilebeamError, match="KV cells are free"):
            lm.load_state(long)
        assert [answer(lm)[1] for _ in range(2)] == [0, 0]  # and finished prompts are not kept from then on


def test_what_cannot_be_saved(path: Path, tmp_path: Path) -> None:
    with load(path) as lm:
        with pytest.raises(TilebeamError, match="at least two tokens"):
            lm.save_state(tmp_path / "a", [5])
        with pytest.raises(TilebeamError, match="the context 512"):
            lm.save_state(tmp_path / "a", "two " * 900)
        with pytest.raises(TilebeamError, match="cannot be written"):
            lm.save_state(tmp_path / "no" / "a", PROMPT)
    assert list(tmp_path.iterdir()) == []


# --- killed -----------------------------------------------------------------------------------------------------------


def killed_at(point: int, state: SavedState, file: Path) -> bool:
    """Write a state in a child that kills itself before the given call of the means of writing; False: it came to its
    end before."""
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def step(call: Any) -> Any:
                def stopped(*args: Any, **options: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **options)

                return stopped

            class Digest:
                def __init__(self, **options: int) -> None:
                    real = hashlib.blake2b(**options)  # type: ignore[arg-type]
                    self.update, self.digest = step(real.update), step(real.digest)

            saved_state.hashlib = SimpleNamespace(blake2b=Digest)  # type: ignore[attr-defined]
            Path.replace = step(Path.replace)  # type: ignore[method-assign]
            os.open, os.fchmod, os.close = step(os.open), step(os.fchmod), step(os.close)
            os.umask(0)
            state.write(file)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("there", [False, True])
def test_killed_at_every_point_of_writing(state: Path, tmp_path: Path, there: bool) -> None:
    """The old file stays whole, the new one is whole or absent, nobody else may read a byte, and no part stays."""
    new, file = SavedState.read(state), tmp_path / "it.state"
    old = SavedState(new.origin, new.tokens[:3], new.cells[:64])
    point, parts, fresh = 0, 0, 0
    while True:
        file.unlink(missing_ok=True)
        if there:
            old.write(file)
            file.chmod(0o644)
        before = file.read_bytes() if there else b""
        point += 1
        if not killed_at(point, new, file):
            break
        left = [path for path in tmp_path.iterdir() if path != file]
        assert len(left) <= 1  # the one of this kill: those before were removed
        assert all(path.name.endswith(".part") and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in left)
        parts += len(left)
        content = file.read_bytes() if file.exists() else b""
        fresh += content == state.read_bytes()
        assert content in (before, state.read_bytes())
    assert parts > 5
    assert fresh > 0  # killed behind the last step that matters
    assert file.read_bytes() == state.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
