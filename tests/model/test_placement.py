"""Placements: what goes to which device, from a file's header and limits; refusals that say what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tilebeam
from devices_kit import GREEDY, KIB, PROMPT, SMALL, VOCAB, nothing_stays, write_files  # noqa: F401
from gguf_kit import split_model, with_metadata, writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam import TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.gguf.weights import TB_TYPE
from tilebeam.model import load_options
from tilebeam.model.placement import PAGE, Placement, Planner, Use, Weights, weights_of
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("models"))


def needs(w: Weights, use: Use, p: Placement) -> list[int]:
    """Bytes of each device for weights and KV cache alone, counted anew: what every placement must leave room for."""
    home = [d for d, count in enumerate(p.counts) for _ in range(count)]
    used = [0] * len(p.counts)
    for i, size in enumerate(w.layers):
        used[home[i]] += size
        if i < w.n_layer:
            used[home[i]] += int(use.n_ctx * w.kv_row * use.kv_bytes)
    return used


@pytest.mark.parametrize("type", sorted(t.name for t in TB_TYPE))
def test_weights_of_every_type_of_the_device_are_counted(type: str, tmp_path: Path) -> None:
    """A type that is left out counts 0 bytes, and the model does not fit where it was planned."""
    path, qtype = tmp_path / "m.gguf", gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    data = np.zeros((512, 256 // block * size), np.uint8)
    with writer(path) as w:
        w.add_block_count(1)
        w.add_embedding_length(256)
        for name in ("blk.0.ffn_up.weight", "output.weight"):
            w.add_tensor(name, data, raw_shape=data.shape, raw_dtype=qtype)
    with gguf_tools.open_gguf(path) as source:
        assert all(layer >= data.nbytes for layer in weights_of(source, "llama").layers)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Weights, Use, list[int]]:
    n_layer = draw(st.integers(1, 6))
    layers = [draw(st.integers(1, 1000)) * PAGE for _ in range(n_layer + 1)]
    w = Weights(tuple(layers), 64, 128, 512, 64, 32, 2, draw(st.integers(1, 2)))
    use = Use(256, draw(st.integers(1, 64)), draw(st.integers(1, 32)), draw(st.booleans()), 4.0)
    one = st.integers(200_000, 6_000_000)
    limits = draw(st.one_of(st.just([0] * 15), st.lists(one, min_size=15, max_size=15), one.map(lambda n: [n] * 15)))
    return w, use, limits


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 15))
def test_placements_keep_their_promises(case: tuple[Weights, Use, list[int]], n: int) -> None:
    w, use, limits = case
    p = Planner(w, use).on(limits[:n])
    if p is None:
        assert any(limits), "without a limit everything fits"
        return
    assert len(p.counts) == n
    assert sum(p.counts) == len(w.layers)
    if not any(limits):  # no device idles while another could give it a layer
        assert 0 not in p.counts or max(p.counts) == 1
    for least, planned, limit in zip(needs(w, use, p), p.planned, limits, strict=False):
        assert least <= planned + PAGE
        assert limit == 0 or planned <= limit


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["ordinary", "repacked", "tied", "float output"]), st.integers(500, 4000), st.integers(8, 64))
def test_what_is_planned_can_be_loaded(files: dict[str, Path], name: str, limit: int, n_batch: int) -> None:
    """Any limit either gives a model that works within it, or a refusal by the plan: never a failure half way."""
    try:
        lm = tilebeam.load(files[name], **{**SMALL, "n_batch": n_batch}, memory_limit=limit * KIB)
    except TilebeamError as error:
        if "does not fit" not in str(error):
            raise
        return
    with lm:
        assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        assert all(d["memory_used"] <= limit * KIB for d in control().devices() if d["session"] == "alive")


def test_the_advice_of_a_refusal_works(files: dict[str, Path]) -> None:
    with pytest.raises(TilebeamError, match="does not fit") as refusal:
        tilebeam.load(files["ordinary"], **SMALL, devices=2, memory_limit="1900KiB")
    advice = str(refusal.value)
    assert "the output" in advice
    devices = int(advice.partition("devices=")[2].partition(",")[0])
    with tilebeam.load(files["ordinary"], **SMALL, devices=devices, memory_limit="1900KiB") as lm:
        assert len(lm.info.layers) == devices
    with pytest.raises(TilebeamError, match="Use a memory_limit of at least") as refusal:
        tilebeam.load(files["ordinary"], **SMALL, devices=1, memory_limit="300KiB")
    least = float(str(refusal.value).partition("at least ")[2].partition(" MiB")[0])
    with tilebeam.load(files["ordinary"], **SMALL, devices=1, memory_limit=int(least * 2**20)) as lm:
        assert lm.info.layers == (5,)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": 0}, "from 1 to 15"),
        ({"devices": 16}, "from 1 to 15"),
        ({"memory_limit": "much"}, "size such as"),
        ({"memory_limit": -1}, "size such as"),
        ({"memory_limit": []}, "between 1 and 15 sizes"),
        ({"devices": 2, "n_gpu_layers": 1}, "n_gpu_layers=-1"),
    ],
)
def test_bad_options(files: dict[str, Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(TilebeamError, match=text):
        tilebeam.load(files["ordinary"], **SMALL, **options)


def test_sizes() -> None:
    assert load_options.parse_limits("2GiB") == [2 << 30]
    assert load_options.parse_limits(["512M", "1kb", 7, "0"]) == [512 << 20, 1024, 7, 0]


def test_a_limit_is_for_one_load(files: dict[str, Path]) -> None:
    before = control().options()["memory_limit"]
    with tilebeam.load(files["ordinary"], **SMALL, memory_limit="8MiB") as limited:
        assert limited.info.layers == (5,)
        used = control().device_status(0)["memory_used"]
        assert control().options()["memory_limit"] == before
        # what is left of a running session's limit counts for the next model
        with tilebeam.load(files["tied"], **SMALL) as second:
            assert len(second.info.layers) == 2
            assert used < control().device_status(0)["memory_used"] <= 8 << 20
        with pytest.raises(TilebeamError, match="HMX0 already runs with memory_limit=8388608"):
            tilebeam.load(files["tied"], **SMALL, memory_limit="9MiB")
    with tilebeam.load(files["ordinary"], **SMALL) as free:
        assert free.info.layers == (5,)
        assert control().device_status(0)["memory_limit"] == before[0]


def test_weights_are_read_from_the_header(files: dict[str, Path]) -> None:
    with gguf_tools.GGUFFile(files["ordinary"]) as gguf:
        w = weights_of(gguf, "llama")
        sizes = {t.name: t.nbytes for t in gguf.tensors.values()}
    assert w.n_layer == 4
    assert (w.n_embd, w.n_ff, w.n_vocab, w.q_row, w.kv_row) == (256, 512, VOCAB, 256, 128)
    for i in range(4):
        exact = sum(n for name, n in sizes.items() if name.startswith(f"blk.{i}."))
        assert exact <= w.layers[i] <= exact + 2 * PAGE * 9
    output = sizes["output.weight"] + sizes["output_norm.weight"]
    assert output <= w.layers[4] <= output + 4 * PAGE


# --- types ------------------------------------------------------------------------------------------------------------


def as_bf16(model: Path, path: Path) -> Path:
    """The same model with its F16 matrices as BF16."""
    with gguf_tools.GGUFFile(model) as f:
        with writer(path, f.architecture) as w:
            for t in f.tensors.values():
                raw = f.read(t.offset, t.nbytes)
                shape = t.ne[::-1]
                if t.type.name == "F16":
                    values = raw.view(np.float16).astype(np.float32)
                    data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(*shape[:-1], -1)
                    w.add_tensor(t.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
                else:
                    w.add_tensor(t.name, raw.view(np.float32).reshape(shape))
        plain = path.with_suffix(".tmp")
        path.rename(plain)
        return with_metadata(plain, path, {key: kv.raw for key, kv in f.kv.items()})


def test_bf16_weights_count_as_f16_ones_do(tmp_path: Path) -> None:
    """They go to the device and take as many bytes; a plan that forgot them would find room for anything."""
    half = write_model(tmp_path / "f16.gguf", preset("tiny", arch="llama", type="f16", n_vocab=VOCAB))
    other = as_bf16(half, tmp_path / "bf16.gguf")
    found = []
    for path in (half, other):
        with gguf_tools.GGUFFile(path) as f:
            w = weights_of(f, "llama")
        with tilebeam.load(path, **SMALL, memory_limit="5MiB") as lm:
            assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
            assert lm.info.device == "npu"
            found.append((w.layers, lm.info.layers))
    assert found[0] == found[1]
    assert len(found[1][1]) > 1
    with pytest.raises(TilebeamError, match="does not fit"):
        tilebeam.load(other, **SMALL, devices=1, memory_limit="5MiB")


# --- split models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [0, 1, 2])
def test_a_split_model_is_planned_and_loaded_as_one_file(files: dict[str, Path], tmp_path: Path, named: int) -> None:
    """All parts count for the plan, whichever is named: the first one alone would fit on one device."""
    part = split_model(files["ordinary"], tmp_path / "m", [12, 25])[named]
    found = []
    for path in (files["ordinary"], part):
        with tilebeam.load(path, **SMALL, memory_limit="2MiB") as lm:
            said = lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
            found.append((lm.info.layers, said))
    assert found[0] == found[1]
    assert len(found[0][0]) > 1


def test_a_split_model_on_the_cpu_and_without_a_part(files: dict[str, Path], tmp_path: Path) -> None:
    paths = split_model(files["tied"], tmp_path / "m", [9])
    with tilebeam.load(paths[1], "cpu", **SMALL) as lm:
        assert lm.info.path == str(paths[0])
        assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    paths[1].unlink()
    with pytest.raises(TilebeamError, match=r"m-00002-of-00002\.gguf is missing"):
        tilebeam.load(paths[0], **SMALL)


def test_a_repacked_file_in_parts_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    paths = split_model(files["repacked"], tmp_path / "m", [9])
    with pytest.raises(TilebeamError, match="a repacked model must be one file"):
        tilebeam.load(paths[0], **SMALL)
