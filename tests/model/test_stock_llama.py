"""Repacked files in stock llama_cpp: after `tilebeam.register()` they load, and without it nothing computes nonsense.

Everything here runs in processes of its own: `register` changes llama_cpp for all of a process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import process_kit
import pytest
from lora_kit import write_adapter
from tilebeam import gguf
from tilebeam.gguf import contents

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "ordinary.gguf", preset("tiny", n_layer=2))


@pytest.fixture(scope="module")
def repacked(ordinary: Path) -> Path:
    return gguf.pack(ordinary, ordinary.with_name("repacked.gguf")).path


@pytest.fixture(scope="module")
def early(ordinary: Path) -> Path:
    """As early versions wrote them: with the number of layers under its ordinary key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "moved_layers", lambda _: False)
        path = gguf.pack(ordinary, ordinary.with_name("early.gguf")).path
    assert gguf.manifest(path).layers is None
    return path


# For each of the given loads: the logits of a few tokens, or the exception.
LLAMA = """
import json, sys
import llama_cpp, numpy
register, loads = json.loads(sys.argv[1])
if register:
    import tilebeam
    tilebeam.register()
for path, options in loads:
    defaults = {"n_gpu_layers": -1, "flash_attn": True, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
    try:
        llm = llama_cpp.Llama(path, **{**defaults, "logits_all": True, "verbose": False, **options})
        if options.get("vocab_only"):
            print("tokens", llm.tokenize(b"the question"))
            continue
        llm.eval(list(range(5, 40)))
        print("logits", numpy.array(llm.scores[:35]).tobytes().hex())
        llm.close()
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


def llama(register: bool, *loads: tuple[Path, dict[str, Any]], **environment: str) -> list[str]:
    spec = json.dumps([register, [(str(path), options) for path, options in loads]])
    done = process_kit.python(LLAMA, spec, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(loads), done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_registered_program_loads_repacked_files(
    ordinary: Path, repacked: Path, early: Path, tmp_path: Path, executor: str
) -> None:
    lora = str(write_adapter(tmp_path / "lora.gguf", ordinary))
    plain, *same = llama(
        True,
        (ordinary, {}),
        (repacked, {}),
        (early, {}),
        (repacked, {"verbose": True}),
        (repacked, {"use_mmap": False}),
        (repacked, {"kv_overrides": {"general.architecture": "llama"}}),
        (repacked, {"kv_overrides": {"general.architecture": "qwen2", "tokenizer.ggml.add_bos_token": False}}),
        TILEBEAM_NPU=executor,
    )
    assert plain.startswith("logits")
    assert same == [plain] * len(same)
    adapted = llama(True, (ordinary, {"lora_path": lora}), (repacked, {"lora_path": lora}), TILEBEAM_NPU=executor)
    assert adapted[0] == adapted[1] != plain
    overridden = {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 0.5}}
    of_ordinary, of_repacked = llama(True, (ordinary, overridden), (repacked, overridden))
    assert of_ordinary == of_repacked != plain


def test_all_split_modes(ordinary: Path, repacked: Path) -> None:
    """By row is by layer on this device; by tensor runs through ggml's meta device, and repacked files refuse it."""
    loads = [(path, {"split_mode": mode}) for path in (ordinary, repacked) for mode in range(4)]
    *said, refused = llama(True, *loads)
    by_tensor = said.pop(3)
    assert said == [said[0]] * 6
    assert refused.startswith("TilebeamError")
    assert "split_mode=LLAMA_SPLIT_MODE_LAYER" in refused
    whole, parts = (np.frombuffer(bytes.fromhex(line.split()[1]), np.float32) for line in (said[0], by_tensor))
    assert whole.std() > 1
    assert np.abs(whole - parts).max() < 0.3


def test_what_a_registered_program_cannot_load_is_said(ordinary: Path, repacked: Path, tmp_path: Path) -> None:
    cut, changed, text = (tmp_path / f"{name}.gguf" for name in ("cut", "changed", "text"))
    data = bytearray(repacked.read_bytes())
    cut.write_bytes(data[: len(data) // 2])
    data[data.index(b"tilebeam.architecture") + 40] ^= 1
    changed.write_bytes(data)
    text.write_text("no model\n")
    said = llama(
        True,
        (repacked, {"n_gpu_layers": 0}),
        (repacked, {"n_gpu_layers": 1}),
        (repacked, {"n_gpu_layers": 1, "verbose": True}),
        (cut, {}),
        (changed, {}),
        (text, {}),
        (repacked, {"vocab_only": True, "n_gpu_layers": 0}),
        (ordinary, {"n_gpu_layers": 0}),
    )
    assert all(line.startswith("TilebeamError") for line in said[:5])
    assert all("Load it with n_gpu_layers=-1" in line for line in said[:3])
    assert "truncated" in said[3]
    assert "changed.gguf cannot be loaded" in said[4]
    assert said[5] == f"ValueError Failed to load model from file: {text}"
    assert said[6].startswith("tokens")
    assert said[7].startswith("logits")


def test_a_program_that_does_not_register_is_refused(repacked: Path) -> None:
    architecture = {"kv_overrides": {"general.architecture": "llama"}}
    for register in (False, True):
        # Without layers on the NPU a registered program is told so by Tilebeam.
        said = llama(register, (repacked, {"n_gpu_layers": 0}), (repacked, {"n_gpu_layers": 0, **architecture}))
        assert all(line.startswith("TilebeamError" if register else "ValueError Failed to load") for line in said)


# Around the function that `register` puts in front: an override of the architecture, or of all that is missing.
BYPASS = """
import sys
import llama_cpp.llama_cpp as capi
load = capi.llama_model_load_from_file
import tilebeam
registry = tilebeam.register()
assert capi.llama_model_load_from_file is not load
path, layers, n_gpu_layers = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
params = capi.llama_model_default_params()
params.n_gpu_layers = n_gpu_layers
overrides = (capi.llama_model_kv_override * 3)()
overrides[0].tag, overrides[0].key = capi.LLAMA_KV_OVERRIDE_TYPE_STR, b"general.architecture"
overrides[0].value.val_str = b"llama"
if layers:
    overrides[1].tag, overrides[1].key = capi.LLAMA_KV_OVERRIDE_TYPE_INT, b"llama.block_count"
    overrides[1].value.val_i64 = layers
params.kv_overrides = overrides
print("model", bool(load(path, params)))
"""


@pytest.mark.parametrize(
    ("file", "layers", "offloaded", "said"),
    [
        ("repacked", 0, 99, "key not found in model: llama.block_count"),
        ("repacked", 0, 0, "key not found in model: llama.block_count"),
        ("repacked", 2, 99, "its tiles were not announced"),
        ("early", 0, 99, "its tiles were not announced"),
    ],
)
def test_overrides_alone_do_not_load_a_repacked_file(
    request: pytest.FixtureRequest, file: str, layers: int, offloaded: int, said: str
) -> None:
    done = process_kit.python(BYPASS, request.getfixturevalue(file), str(layers), str(offloaded))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "model False\n"
    assert said in done.stderr


def test_registering_twice_changes_llama_cpp_once() -> None:
    code = """
import llama_cpp, llama_cpp.llama_cpp as capi
before = capi.llama_model_load_from_file
import tilebeam
assert tilebeam.register() is tilebeam.register()
assert llama_cpp.llama_model_load_from_file is capi.llama_model_load_from_file
assert capi.llama_model_load_from_file.tilebeam_original is before
print(llama_cpp.llama_model_load_from_file.__name__)
"""
    assert process_kit.python(code).stdout == "llama_model_load_from_file\n"
