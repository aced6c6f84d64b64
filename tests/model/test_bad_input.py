"""Hostile and broken input to the whole library: always a clear exception, never an abort, a hang or a partial file.

Every check runs in a process of its own. A sweep loads many damaged copies of one file in one process and announces
each before it touches it, so that a crash names the mutation.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import accuracy
import pytest
from tilebeam import gguf as gguf_tools

from bench.lib.synth import SynthConfig, write_model

TINY = SynthConfig(arch="llama", n_layer=1, n_embd=64, n_head=1, n_head_kv=1, n_ff=64, n_vocab=640, type="q8_0")

# Loads sys.argv[1] with each patch of the list on stdin: {"cut": n} or {"at": [[offset, byte], ..]}.
SWEEP = """
import json, sys
from pathlib import Path
import tilebeam
original = Path(sys.argv[1]).read_bytes()
verify = sys.argv[2] == "verify"
work = Path(sys.argv[1] + ".damaged")
for i, patch in enumerate(json.load(sys.stdin)):
    data = bytearray(original)
    if "cut" in patch:
        del data[patch["cut"]:]
    for offset, byte in patch.get("at", []):
        data[offset] = byte
    work.unlink(missing_ok=True)
    work.write_bytes(data)
    print(json.dumps({"try": i}), flush=True)
    try:
        with tilebeam.load(work, n_ctx=256, n_seq_max=1, threads=1, verify=verify) as lm:
            lm.generate("the sum", tilebeam.SamplingParams(max_tokens=2, temperature=0))
        said = None
    except tilebeam.TilebeamError as error:
        said = str(error)
    print(json.dumps({"done": i, "said": said}), flush=True)
"""


def sweep(path: Path, patches: list[dict[str, Any]], verify: bool = True) -> list[str | None]:
    """What loading each damaged copy said, None where it loaded and generated."""
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(path), "verify" if verify else "trust"],
        input=json.dumps(patches),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=accuracy.environment(accuracy.Job(str(path))),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [line["said"] for line in lines if "done" in line]
    if len(said) != len(patches):
        patch = patches[len(said)] if lines else None
        pytest.fail(f"ended with {done.returncode} at {patch}\n{done.stderr[-2500:]}")
    return said


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bad") / "ordinary.gguf", TINY)


@pytest.fixture(scope="module")
def repacked(ordinary: Path) -> Path:
    return gguf_tools.pack(ordinary, ordinary.with_name("repacked.gguf")).path


def flips(path: Path, start: int, end: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Copies with one to three bytes between two offsets changed."""
    rng = random.Random(seed)
    data = path.read_bytes()
    out = []
    for _ in range(count):
        at = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            offset = rng.randrange(start, end)
            # Single bits, and the bytes that make lengths, counts and types extreme.
            byte = rng.choice((data[offset] ^ (1 << rng.randrange(8)), 0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
            at.append([offset, byte if byte != data[offset] else data[offset] ^ 0xFF])
        out.append({"at": at})
    return out


def header(path: Path) -> tuple[int, int, int]:
    """(end of the metadata before the token list, end of the header, start of the data)."""
    with gguf_tools.GGUFFile(path) as f:
        return path.read_bytes().index(b"tokenizer.ggml.tokens"), f.header_end, f.data_start


def test_the_undamaged_file_loads(ordinary: Path, repacked: Path) -> None:
    assert sweep(repacked, [{}]) == [None]
    assert sweep(ordinary, [{}]) == [None]


def test_truncated_files(ordinary: Path, repacked: Path) -> None:
    for path in (ordinary, repacked):
        size = path.stat().st_size
        cuts = [0, 1, 3, 4, 8, 23, 24, 100, 1000, header(path)[1], header(path)[2], size // 2, size - 2000]
        for patch, said in zip(cuts, sweep(path, [{"cut": c} for c in cuts]), strict=True):
            assert said, f"{path.name} cut at {patch} was accepted"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "trust"])
def test_flipped_header_of_a_repacked_file(repacked: Path, verify: bool) -> None:
    early, end, _ = header(repacked)
    patches = flips(repacked, 0, early, 120, seed=1) + flips(repacked, early, end, 60, seed=2)
    said = sweep(repacked, patches, verify)
    if verify:
        # The metadata have a digest: not one of them may pass.
        assert all(said), [p for p, s in zip(patches, said, strict=True) if not s]


def test_flipped_data_of_a_repacked_file(repacked: Path) -> None:
    _, _, start = header(repacked)
    patches = flips(repacked, start, repacked.stat().st_size, 40, seed=3)
    said = sweep(repacked, patches)
    assert all(said), [p for p, s in zip(patches, said, strict=True) if not s]
    # Without the digests wrong weights cannot be told from right ones, but they must not crash anything.
    sweep(repacked, patches[:20], verify=False)


def test_flipped_header_of_an_ordinary_file(ordinary: Path) -> None:
    """No digest here: either a clear refusal, or a model that loads and generates something."""
    early, end, _ = header(ordinary)
    patches = flips(ordinary, 0, early, 200, seed=4) + flips(ordinary, early, end, 60, seed=5)
    said = sweep(ordinary, patches)
    assert sum(s is not None for s in said) > len(said) // 4


def test_flipped_tensor_list_of_an_ordinary_file(ordinary: Path) -> None:
    data = ordinary.read_bytes()
    start = data.index(b"token_embd.weight") - 8
    said = sweep(ordinary, flips(ordinary, start, header(ordinary)[1], 100, seed=6))
    assert sum(s is not None for s in said) > len(said) // 2


def _python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=accuracy.environment(accuracy.Job("")),
    )


def test_damaged_source_leaves_no_output(ordinary: Path, tmp_path: Path) -> None:
    data = ordinary.read_bytes()
    for i, damaged in enumerate((b"", data[:3000], data[: len(data) // 2], b"GGUF" + b"\xff" * 5000)):
        source, out = tmp_path / f"{i}.gguf", tmp_path / f"{i}.out.gguf"
        source.write_bytes(damaged)
        done = _python("from tilebeam.gguf.cli import main; main()", "pack", str(source), str(out))
        assert done.returncode not in (0, None)
        assert done.returncode > 0, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{j}.gguf" for j in range(i + 1))
