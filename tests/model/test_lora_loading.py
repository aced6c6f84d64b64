"""tilebeam.load(lora=..): adapters and scales in force, and whatever cannot be applied refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import process_kit
import pytest
import tilebeam
from accuracy import compare
from gguf_kit import writer
from lora_kit import Q, write_adapter
from tilebeam import SamplingParams, TilebeamError, gguf
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 1}
TOKENS = list(range(5, 69))
KL_LIMIT, MOVED = 1e-3, 0.02  # nats; see tests/plugin/test_lora.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    model = write_model(folder / "model.gguf", preset("tiny", n_layer=2))
    gguf.pack(model, folder / "repacked.gguf")
    write_adapter(folder / "a.gguf", model, seed=1)
    write_adapter(folder / "b.gguf", model, type=Q.F16, seed=2)
    return folder


def logits(model: Path, **options: Any) -> Any:
    with tilebeam.load(model, **{**SMALL, **options}) as lm:
        return lm.logits(TOKENS)


def test_logits_are_those_of_the_cpu(folder: Path) -> None:
    model, lora = folder / "model.gguf", [folder / "a.gguf", (str(folder / "b.gguf"), -0.5)]
    npu = logits(model, lora=lora)
    assert compare(logits(model, device="cpu", lora=lora), npu).kl < KL_LIMIT
    assert compare(logits(model), npu).kl > MOVED
    for options in ({"executor": "process"}, {"executor": "thread", "devices": 2}):
        np.testing.assert_array_equal(logits(model, lora=lora, **options), npu)
    np.testing.assert_array_equal(logits(folder / "repacked.gguf", executor="thread", lora=lora), npu)


def test_scales_and_order(folder: Path) -> None:
    model, a, b = folder / "model.gguf", folder / "a.gguf", folder / "b.gguf"
    one = logits(model, lora=a)
    np.testing.assert_array_equal(logits(model, lora=[(a, 1.0)]), one)
    np.testing.assert_array_equal(logits(model, lora=(a, 1.0)), one)
    np.testing.assert_array_equal(logits(model, lora=[a, (b, 0)]), one)
    assert compare(one, logits(model, lora=[(a, 0.5), (a, 0.5)])).kl < KL_LIMIT
    assert compare(logits(model), logits(model, lora=[a, (a, -1)])).kl < KL_LIMIT
    assert compare(logits(model, lora=[a, b]), logits(model, lora=[b, a])).kl < KL_LIMIT
    assert compare(one, logits(model, lora=[(a, 2)])).kl > MOVED


def test_samples_come_from_the_adapted_model_and_nothing_stays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = control().status()["buffers"]
    capfd.readouterr()
    params = SamplingParams(n=2, max_tokens=12, temperature=0)
    with tilebeam.load(folder / "model.gguf", **SMALL) as lm:
        plain = lm.generate("the question", params)[0].outputs[0].text
    with tilebeam.load(folder / "model.gguf", lora=[(folder / "a.gguf", 2.0)], **SMALL) as lm:
        assert lm.info.lora == ((str(folder / "a.gguf"), 2.0),)
        first, second = (s.text for s in lm.generate("the question", params)[0].outputs)
        assert first == second != plain
    assert control().status()["buffers"] == before
    assert capfd.readouterr() == ("", "")


def test_adapters_have_room_in_small_address_spaces(tmp_path: Path) -> None:
    """The placement counts what the adapters take."""
    model = write_model(tmp_path / "model.gguf", preset("tiny", n_layer=4))
    lora = write_adapter(tmp_path / "wide.gguf", model, rank=64)
    options: dict[str, Any] = {"n_batch": 32, "memory_limit": "4MiB"}
    with tilebeam.load(model, **SMALL, **options) as lm:
        devices = len(lm.info.layers)
    with tilebeam.load(model, lora=lora, **SMALL, **options) as lm:
        assert len(lm.info.layers) > devices
        limited = lm.logits(TOKENS)
    np.testing.assert_array_equal(limited, logits(model, lora=lora, n_batch=32))


# --- what cannot be applied -------------------------------------------------------------------------------------------


class Forge:
    """Adapter files that are wrong in one way."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.folder, self.target = folder, target
        self.good = (folder / "a.gguf").read_bytes()

    def bytes(self, data: bytes) -> None:
        self.target.write_bytes(data)

    def keys(self, **changed: Any) -> None:
        """The good adapter with keys replaced (None: left out); dots are spelled __."""
        self._write({"general__type": "adapter", "adapter__type": "lora", "adapter__lora__alpha": 16.0} | changed)

    def tensors(self, shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32, arch: str = "llama") -> None:
        self._write({"general__type": "adapter", "adapter__type": "lora"}, shapes, dtype, arch)

    def _write(
        self,
        keys: dict[str, Any],
        shapes: dict[str, tuple[int, ...]] | None = None,
        dtype: Any = np.float32,
        arch: str = "llama",
    ) -> None:
        with writer(self.target, arch) as w:
            for key, value in keys.items():
                add = {str: w.add_string, float: w.add_float32, int: w.add_uint32, list: w.add_array}.get(type(value))
                if add is not None:
                    add(key.replace("__", "."), value)
            for name, shape in (shapes or {"blk.0.attn_q.weight.lora_a": (8, 256), **Q_B}).items():
                w.add_tensor(name, np.zeros(shape, dtype))


Q_B = {"blk.0.attn_q.weight.lora_b": (256, 8)}
Q_A = {"blk.0.attn_q.weight.lora_a": (8, 256)}
EMBEDDINGS = {"token_embd.weight.lora_a": (1024, 8), "token_embd.weight.lora_b": (256, 8)}
BAD: dict[str, tuple[Callable[[Forge], object], str]] = {
    "missing": (lambda f: f.target.unlink(missing_ok=True), "does not exist"),
    "a folder": (lambda f: f.target.mkdir(), "not a regular file"),
    "empty": (lambda f: f.bytes(b""), "is empty"),
    "a text": (lambda f: f.bytes(b"no adapter\n" * 99), "not a GGUF"),
    "cut in its header": (lambda f: f.bytes(f.good[:200]), "truncated"),
    "cut in its data": (lambda f: f.bytes(f.good[:-5000]), "truncated"),
    "a model": (lambda f: f.bytes((f.folder / "model.gguf").read_bytes()), "general.type is not 'adapter'"),
    "type is a number": (lambda f: f.keys(general__type=3), "no text 'general.type'"),
    "another kind of adapter": (lambda f: f.keys(adapter__type="ia3"), "adapter.type is not 'lora'"),
    "alpha is a whole number": (lambda f: f.keys(adapter__lora__alpha=16), "not a 32-bit float"),
    "alora": (lambda f: f.keys(adapter__alora__invocation_tokens=[5, 6]), "invocation tokens"),
    "another architecture": (lambda f: f.tensors(Q_A | Q_B, arch="qwen2"), "of a qwen2 model, not of llama"),
    "no tensors": (lambda f: f.tensors({"blk.0.attn_norm.weight": (256,)}), "changes no matrix"),
    "half a pair": (lambda f: f.tensors(Q_A), "one half of the pair"),
    "another suffix": (lambda f: f.tensors({**Q_A, **Q_B, "blk.0.attn_q.weight": (256, 256)}), "not part of a LoRA"),
    "a matrix that is not there": (
        lambda f: f.tensors({"blk.9.attn_q.weight.lora_a": (8, 256), "blk.9.attn_q.weight.lora_b": (256, 8)}),
        "which the model does not have",
    ),
    "a wider model": (lambda f: f.tensors({"blk.0.attn_q.weight.lora_a": (8, 512), **Q_B}), "do not fit the model's"),
    "ranks that differ": (lambda f: f.tensors({"blk.0.attn_q.weight.lora_a": (4, 256), **Q_B}), "do not fit"),
    "a stack": (
        lambda f: f.tensors({"blk.0.attn_q.weight.lora_a": (2, 8, 256), "blk.0.attn_q.weight.lora_b": (2, 256, 8)}),
        "do not fit",
    ),
    "a vector": (
        lambda f: f.tensors({"output_norm.weight.lora_a": (8, 256), "output_norm.weight.lora_b": (1, 8)}),
        "do not fit",
    ),
    "integers": (lambda f: f.tensors(Q_A | Q_B, np.int32), "I32, which cannot be multiplied with"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_adapter_that_cannot_be_applied_is_named(folder: Path, tmp_path: Path, what: str) -> None:
    make, said = BAD[what]
    make(Forge(folder, tmp_path / "bad.gguf"))
    before = control().status()["buffers"]
    with pytest.raises(TilebeamError, match=said) as error:
        tilebeam.load(folder / "model.gguf", lora=[folder / "a.gguf", tmp_path / "bad.gguf"], **SMALL)
    assert str(tmp_path / "bad.gguf") in str(error.value)
    assert control().status()["buffers"] == before


def test_adapters_of_the_embeddings(folder: Path, tmp_path: Path) -> None:
    """They are looked up by row. Where the output matrix is the same tensor, llama.cpp would multiply with a pair that
    is made for that, and abort the program."""
    Forge(folder, tmp_path / "e.gguf").tensors(EMBEDDINGS)
    plain, adapted = logits(folder / "model.gguf"), logits(folder / "model.gguf", lora=tmp_path / "e.gguf")
    np.testing.assert_array_equal(plain, adapted)  # its factors are zeros
    tied = write_model(tmp_path / "tied.gguf", preset("tiny", n_layer=1, tied=True, arch="qwen2"))
    Forge(folder, tmp_path / "t.gguf").tensors(EMBEDDINGS, arch="qwen2")
    with pytest.raises(TilebeamError, match="as its output matrix, too"):
        tilebeam.load(tied, lora=tmp_path / "t.gguf", **SMALL)


@pytest.mark.parametrize(
    "lora", [3, [3], [("a.gguf", "1")], [("a.gguf", float("nan"))], [("a.gguf", 1, 2)], [("a.gguf", True)]]
)
def test_arguments_that_are_no_adapters(folder: Path, lora: Any) -> None:
    with pytest.raises(TilebeamError, match="lora takes files"):
        tilebeam.load(folder / "model.gguf", lora=lora, **SMALL)


def test_llama_cpps_own_reason_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check here lets through and llama.cpp refuses."""
    Forge(folder, tmp_path / "bad.gguf").keys(adapter__type="ia3")
    monkeypatch.setattr(gguf, "check_adapter", lambda *_: [])
    before = control().status()["buffers"]
    with pytest.raises(TilebeamError, match=r"bad\.gguf.*expect adapter\.type to be 'lora', but got: ia3"):
        tilebeam.load(folder / "model.gguf", lora=tmp_path / "bad.gguf", **SMALL)
    assert control().status()["buffers"] == before


# Loads adapters with one to three bytes changed, nearly all in the header, and computes with those that are accepted.
MUTATIONS = """
import random, sys, tilebeam
from pathlib import Path
model, good, target, count = sys.argv[1:]
data = Path(good).read_bytes()
header = data.rindex(b".lora_b") + 50
for seed in range(int(count)):
    rng = random.Random(seed)
    mutated = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(header if seed % 8 else len(data))
        mutated[at] = rng.choice((mutated[at] ^ 1 << rng.randrange(8), 0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
    Path(target).write_bytes(mutated)
    print(seed, flush=True)
    try:
        with tilebeam.load(model, lora=target, n_ctx=256, n_seq_max=1, threads=1) as lm:
            lm.logits([5, 6, 7])
    except tilebeam.TilebeamError:
        pass
"""


def test_damaged_adapters_end_no_program(folder: Path, tmp_path: Path) -> None:
    done = process_kit.python(MUTATIONS, folder / "model.gguf", folder / "a.gguf", tmp_path / "bad.gguf", "150")
    assert done.returncode == 0, f"died of mutation {done.stdout.split()[-1]}\n{done.stderr[-2000:]}"
