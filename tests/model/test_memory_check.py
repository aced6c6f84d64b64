"""Models that the memory of a control group cannot hold: `load` says so before it packs. What fits is not refused."""

from __future__ import annotations

import json
from pathlib import Path

import limits_kit
import process_kit
import pytest
import tilebeam
from head_kit import write_head
from tilebeam.model import device_choice, file_check, head_file, loader, memory_check
from tilebeam.model.cache_size import Cache, cache_of
from tilebeam.model.load_options import LoadOptions
from tilebeam.native import control
from tilebeam.native.executor import UsableMemory

from bench.lib import synth

EXECUTORS = ("thread", "process")
# 49 MiB of weights that become tiles; of the rest next to nothing.
SHAPE = {"n_layer": 8, "n_embd": 1024, "n_head": 8, "n_head_kv": 2, "head_dim": 128, "n_ff": 2816, "type": "q4_0"}
OPTIONS = {"n_ctx": 1024, "n_seq_max": 2, "threads": 1, "n_batch": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(
        tmp_path_factory.mktemp("model") / "model.gguf", synth.preset("tiny", **SHAPE), direct=True
    )


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    path = model.with_name("packed.gguf")
    assert process_kit.run("gguf-repack", "pack", model, path).returncode == 0
    return path


def weights(path: Path) -> int:
    file = file_check.inspect(path, False)
    return memory_check.unmapped(file, device_choice.groups_of(file, "npu", -1))


def give(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(memory_check, "usable_memory", lambda: UsableMemory(1 << 40, available, available))


# ---- what is counted


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_does_not_fit_is_refused_with_the_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    give(monkeypatch, 20 << 20)
    with pytest.raises(tilebeam.TilebeamError) as refused:
        tilebeam.load(model, executor=executor, **OPTIONS)
    text = str(refused.value)
    assert "of memory, and this process can have 20 MiB: " in text
    assert f"{weights(model) / 2**20:.0f} MiB for its weights, 8 MiB for a KV cache of 1024 tokens and " in text
    assert "Take a smaller quantization" in text
    assert "`gguf-repack pack`" in text
    assert "n_ctx" not in text  # the weights alone are too much
    give(monkeypatch, weights(model) + (4 << 20))
    with pytest.raises(tilebeam.TilebeamError, match="Choose a smaller n_ctx or n_seq_max; or take a smaller quant"):
        tilebeam.load(model, executor=executor, **OPTIONS)


def test_a_cache_that_does_not_fit_is_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packed file, whose weights are mapped, and on the CPU, where they are, too."""
    give(monkeypatch, 20 << 20)
    for arguments in ({"model": packed}, {"model": packed.with_name("model.gguf"), "device": "cpu"}):
        with pytest.raises(tilebeam.TilebeamError) as refused:
            tilebeam.load(**arguments, **OPTIONS | {"n_ctx": 1 << 17})
        assert "1.0 GiB for a KV cache of 131072 tokens" in str(refused.value)
        assert "weights" not in str(refused.value)
        assert str(refused.value).endswith("samples. Choose a smaller n_ctx or n_seq_max.")
        with tilebeam.load(**arguments, **OPTIONS) as lm:
            assert lm.generate("1", max_tokens=1)


def test_what_is_left_is_memory_that_is_not_swapped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "usable_memory", lambda: UsableMemory(1 << 40, 1 << 30, 1 << 40))
    file, options = file_check.inspect(model, False), LoadOptions(**OPTIONS).checked()
    left = [memory_check.check(file, options, (), 1, cells=cells) for cells in (None, 256)]
    assert left[0] == left[1] < 1 << 30


def test_memory_that_became_less_meanwhile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took it while the weights were packed: the cache would be too much."""
    left = iter([1 << 40, 6 << 20])
    monkeypatch.setattr(memory_check, "usable_memory", lambda: UsableMemory(1 << 40, 0, next(left)))
    with pytest.raises(tilebeam.TilebeamError, match="more, and this process can have 6 MiB: 8 MiB for a KV"):
        tilebeam.load(model, **OPTIONS)
    assert control.control().status()["buffers"] == 0


def test_a_draft_head_that_does_not_fit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are those of the whole vocabulary, whatever it guesses among."""
    shape = synth.preset("tiny", **SHAPE)
    path = write_head(tmp_path / "head.gguf", shape, (5, 6))
    head = head_file.head_file(path)
    assert head is not None
    size = head.memory(OPTIONS["n_ctx"])
    assert size > 0.99 * path.stat().st_size + 90 * 4 * shape.n_vocab
    file, options = file_check.inspect(model, False), LoadOptions(**OPTIONS).checked()
    groups, texts = device_choice.groups_of(file, "cpu", -1), (1 + loader.KEPT) * 2 + 1
    give(monkeypatch, 1 << 40)
    plain, left = (memory_check.check(file, options, groups, texts, head=n) for n in (0, size))
    assert plain - left == size
    give(monkeypatch, (1 << 40) - left)
    tilebeam.load(model, "cpu", draft=path, **OPTIONS).close()
    give(monkeypatch, (1 << 40) - left - 1)
    with pytest.raises(tilebeam.TilebeamError, match=r"its draft head\. .*; or load it without the draft head\.$"):
        tilebeam.load(model, "cpu", draft=path, **OPTIONS)


ATTENTION = {"block_count": 4, "embedding_length": 512, "attention.head_count": 8, "attention.head_count_kv": 2}


@pytest.mark.parametrize(
    ("changes", "k", "v"),
    [
        ({}, 4 * 2 * 64, 4 * 2 * 64),
        ({"attention.key_length": 96, "attention.value_length": 32}, 4 * 2 * 96, 4 * 2 * 32),
        ({"attention.key_length": 96, "attention.key_length_swa": 48}, 4 * 2 * 48, 4 * 2 * 64),
        ({"attention.head_count_kv": None}, 4 * 8 * 64, 4 * 8 * 64),
        ({"attention.head_count_kv": [0, 2, 0, 4]}, 6 * 64, 6 * 64),  # layers without attention
        ({"attention.shared_kv_layers": 1}, 3 * 2 * 64, 3 * 2 * 64),
        ({"nextn_predict_layers": 2}, 2 * 2 * 64, 2 * 2 * 64),
        ({"attention.key_length": 576, "attention.key_length_mla": 192}, 4 * 2 * 576, 0),
    ],
)
def test_what_a_cache_keeps_of_a_token(changes: dict[str, object], k: int, v: int) -> None:
    tensors = [f"blk.{i}.attn_k.weight" for i in range(4)]
    found = cache_of(Header(ATTENTION | changes, tensors), "llama")
    assert found == Cache(k, v)


def test_layers_that_keep_a_state_have_no_cache() -> None:
    """One of four attends; the others have fused weights as well, of another kind of attention."""
    tensors = ["blk.3.attn_k.weight", *(f"blk.{i}.attn_qkv.weight" for i in range(3))]
    found = cache_of(Header(ATTENTION, tensors), "llama")
    assert found == Cache(2 * 64, 2 * 64, recurrent=True)


class Header:
    """As much of a GGUF file as is asked for."""

    def __init__(self, keys: dict[str, object], tensors: list[str]) -> None:
        self.architecture = "llama"
        self.tensors = dict.fromkeys(tensors)
        self.kv = {f"llama.{key}": Entry(value) for key, value in keys.items() if value is not None}


class Entry:
    def __init__(self, value: object) -> None:
        self.value = value


# ---- real groups

LOAD = """
import json, sys, warnings
import tilebeam

warnings.simplefilter("ignore")
model, arguments = sys.argv[1], json.loads(sys.argv[2])
try:
    lm = tilebeam.load(model, **arguments)
except tilebeam.TilebeamError as error:
    sys.exit(str(error))
print(lm.generate("1+1=" * 50, max_tokens=8)[0].outputs[0].token_ids)
lm.close()
"""


def in_a_group(model: Path, executor: str, limit: int) -> tuple[int, str, int]:
    """Load and generate under this limit: (exit status, what was said, most bytes that the group had)."""
    arguments = json.dumps(OPTIONS | {"executor": executor})
    with limits_kit.group("memory", {"memory.limit_in_bytes": limit}, {"memory.max": str(limit)}) as group:
        done = group.python(LOAD, model, arguments)
        return done.returncode, done.stdout + done.stderr, group.peak()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_loads_under_real_limits(model: Path, packed: Path, executor: str) -> None:
    code, said, peak = in_a_group(model, executor, 1 << 30)
    assert code == 0, said
    assert peak > weights(model)
    # What it needs and a little more: it fits.
    code, said, _ = in_a_group(model, executor, peak + (2 << 20))
    assert code == 0, said
    # Much too little: a sentence, and not the end of the process. The packed file does with it.
    small = peak - weights(model) * 3 // 4
    code, said, most = in_a_group(model, executor, small)
    assert code == 1
    assert "MiB for its weights" in said
    assert most < small
    code, said, _ = in_a_group(packed, executor, small)
    assert code == 0, said


def test_stock_llama_under_a_real_limit(model: Path) -> None:
    """Which packs by the plugin alone: it refuses the memory, and the program goes on."""
    code = (
        "import sys, tilebeam, llama_cpp; tilebeam.register()\n"
        "try: llama_cpp.Llama(sys.argv[1], n_gpu_layers=-1, n_ctx=256, verbose=True)\n"
        "except ValueError: print('refused')"
    )
    with limits_kit.group("memory", {"memory.limit_in_bytes": 70 << 20}, {"memory.max": str(70 << 20)}) as group:
        done = group.python(code, model)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert "bytes of memory to be had" in done.stderr
