"""gguf-repack: every source type to every target, rules and presets, tied embeddings, split models, --against."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from gguf_kit import gaussian, only_files, repack, stored, write_raw, writer
from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type, column_type, dequantize, has_file_form, layout_version, quantize
from tilebeam.gguf import GGUFError, Policy, Rule, contents, ggml_values, gguf_write, weights

Q = gguf.GGMLQuantizationType
U8 = np.ndarray[Any, np.dtype[np.uint8]]

FLOATS = (Q.F32, Q.F16, Q.BF16)
LEGACY = (Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.IQ4_NL)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)
OTHERS = (Q.IQ4_XS, Q.IQ3_S, Q.IQ2_XXS, Q.TQ1_0, Q.MXFP4)
TARGETS = {"q4_0": Type.Q4_0, "q8_0": Type.Q8_0, "iq4_nl": Type.IQ4_NL}
N, K = 64, 256


def rows(type: gguf.GGMLQuantizationType, n: int, k: int, seed: int) -> U8:
    """Rows of any type, uint8 (n, row bytes). All bytes of blocks lie below 0x3c, so that their halves are below 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.05, (n, k)).astype(np.float32)
    if type == Q.F32:
        return x.view(np.uint8)
    if type == Q.F16:
        return x.astype(np.float16).view(np.uint8)
    if type == Q.BF16:
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[type]
    data = rng.integers(0, 0x3C, (n, k // int(block), int(size))).astype(np.uint8)
    if type == Q.MXFP4:
        data[..., 0] = 120  # an exponent, 127 is 1
    return data.reshape(n, -1)


def write_model(
    path: Path, tensors: dict[str, tuple[gguf.GGMLQuantizationType, U8]], arch: str = "llama", **values: Any
) -> Path:
    """A GGUF of these tensors and metadata."""
    with writer(path, arch) as w:
        w.add_block_count(1)
        for key, value in values.items():
            key = key.replace("__", ".")
            if key.startswith("split."):
                w.add_uint16(key, value) if key != "split.tensors.count" else w.add_int32(key, value)
            else:
                w.add_array(key, value)
        for name, (type, data) in tensors.items():
            if type == Q.F32:
                w.add_tensor(name, data.view(np.float32))
            elif type == Q.F16:
                w.add_tensor(name, data.view(np.float16))
            else:
                w.add_tensor(name, data, raw_dtype=type)
    return path


def layouts(path: Path) -> dict[str, str]:
    """Type and grouping of each tensor of a repacked file."""
    return {t["name"]: t["layout"] or t["type"] for t in gguf_tools.inspect(path)["tensors"]}


def values(type: gguf.GGMLQuantizationType, data: U8) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The gguf package's reading of (n, row bytes)."""
    return np.ascontiguousarray(gguf_dequantize(data, type), np.float32).reshape(len(data), -1)


# ---- sources and targets


@pytest.mark.parametrize("type", [*LEGACY, *K_QUANTS, *OTHERS], ids=lambda t: t.name)
def test_values_are_those_of_the_gguf_package(type: gguf.GGMLQuantizationType) -> None:
    data = rows(type, 5, 512, 1)
    x = ggml_values.to_float(type, data.reshape(-1), 5 * 512).reshape(5, 512)
    np.testing.assert_allclose(x, values(type, data), rtol=2e-7, atol=0)
    assert np.array_equal(weights.to_float(type, data.reshape(-1), 512, 5), x)


@pytest.mark.parametrize("type", [Q.I8, Q.I32, Q.F64], ids=lambda t: t.name)
def test_types_without_values(type: gguf.GGMLQuantizationType) -> None:
    assert not weights.has_values(type)
    with pytest.raises(ValueError, match="are not 32 values"):
        ggml_values.to_float(type, np.zeros(32, np.uint8), 32)


def in_files(type: Type) -> bool:
    tiled = column_type(type)
    return tiled is not None and has_file_form(tiled)


@pytest.mark.parametrize("type", [t for t in Type if in_files(t)], ids=lambda t: t.label)
def test_blocks_of_every_type_become_tiles_bit_for_bit(tmp_path: Path, type: Type) -> None:
    """Of a matrix, a stack of experts and the output; the embedding stays; older readers refuse newer types."""
    q, tiled = Q(type.ggml), column_type(type)
    assert tiled is not None
    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "output.weight")
    tensors = {name: (q, rows(q, N, K, seed)) for seed, name in enumerate(names)}
    tensors["blk.0.ffn_up_exps.weight"] = (q, rows(q, 3 * N, K, 9).reshape(3, N, -1))
    model = write_model(tmp_path / "m.gguf", tensors)
    packed, back = tmp_path / "p.gguf", tmp_path / "back.gguf"
    report = gguf_tools.pack(model, packed)
    assert report.lossless
    assert layouts(packed) == {name: tiled.label for name in names if name != "token_embd.weight"} | {
        "token_embd.weight": type.label
    }
    assert gguf_tools.manifest(packed).layout_version == layout_version(tiled)
    assert gguf_tools.verify(packed, against=model).exact == 4
    gguf_tools.unpack(packed, back)
    assert back.read_bytes() == model.read_bytes()
    devices = {t["name"]: t["device"] for t in gguf_tools.inspect(packed)["tensors"]}
    assert {devices[name] for name in names[1:]} == {"NPU"}


GROWN = [t for t in weights.TB_TYPE.values() if t.is_in_tiles and not in_files(t)]


@pytest.mark.parametrize("type", GROWN, ids=str)
def test_types_whose_tiles_are_larger_stay_blocks(tmp_path: Path, type: Type) -> None:
    """They become tiles while the packed file loads; a file that says it has such tiles is refused."""
    data = rows(Q(type.ggml), N, K, 5)
    tensors = {"blk.0.attn_q.weight": (Q(type.ggml), data), "blk.0.ffn_up.weight": (Q.Q4_0, rows(Q.Q4_0, N, K, 6))}
    model, packed = write_model(tmp_path / "m.gguf", tensors), tmp_path / "p.gguf"
    gguf_tools.pack(model, packed)
    assert layouts(packed) == {"blk.0.attn_q.weight": type.label, "blk.0.ffn_up.weight": "q4_0_col"}
    assert {t["device"] for t in gguf_tools.inspect(packed)["tensors"]} == {"NPU"}
    assert " MiB of memory" in repack("inspect", packed).stdout
    assert np.array_equal(stored(packed, "blk.0.attn_q.weight"), data.reshape(-1))
    tiled = column_type(type)
    assert tiled is not None
    with gguf_tools.GGUFFile(packed) as f, pytest.raises(GGUFError, match=f"cannot hold {tiled.label} tiles"):
        contents._tiled(f, "blk.0.attn_q.weight", tiled, 0)


@pytest.mark.parametrize("grouping", ["column", "tile"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("type", [*FLOATS, Q.Q8_0, Q.Q4_0, Q.IQ4_NL, Q.Q6_K, Q.MXFP4], ids=lambda t: t.name)
def test_sources_to_targets(tmp_path: Path, type: gguf.GGMLQuantizationType, target: str, grouping: str) -> None:
    data = rows(type, N, K, 7)
    model = write_model(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (type, data)})
    report = gguf_tools.pack(model, tmp_path / "p.gguf", type=target, grouping=grouping)
    x = values(type, data)
    tiled = Type[f"{target.upper()}_{'COL' if grouping == 'column' else 'TILE'}"]
    exact = type.name.lower() == target and grouping == "column"
    tiles = stored(tmp_path / "p.gguf", "blk.0.attn_q.weight")
    y = dequantize(tiled, tiles, K, N)
    assert layouts(tmp_path / "p.gguf") == {"blk.0.attn_q.weight": tiled.label}
    assert report.lossless == exact
    limit = {"q4_0": 1 / 8, "q8_0": 0.5 / 127, "iq4_nl": 14 / 127}[target]
    assert np.abs(x - y).max() <= np.abs(x).max() * (limit + 2**-10)
    (made,) = report.tensors
    if exact:
        assert np.array_equal(x, y)
        assert made.error is None
        gguf_tools.unpack(tmp_path / "p.gguf", tmp_path / "back.gguf")
        assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()
    else:
        # ggml's conversions and gguf's differ in the last bit of some values
        assert np.mean(tiles != quantize(tiled, x)) < 1e-3
        exact_error = float(np.linalg.norm((y - x).astype(np.float64)) / np.linalg.norm(x.astype(np.float64)))
        assert made.error == pytest.approx(exact_error, rel=1e-4)
    if type.name.lower() != target:
        with gguf_tools.GGUFFile(tmp_path / "p.gguf") as f:
            assert f.kv["general.file_type"].value == {"q4_0": 2, "q8_0": 7, "iq4_nl": 25}[target]
            assert f.kv["general.quantization_version"].value == 2
    said = any("changed the weights by" in note for note in report.notes)
    assert said == (type not in FLOATS and not exact)
    assert gguf_tools.verify(tmp_path / "p.gguf", against=model).exact == exact


def test_searched_scales_err_less(tmp_path: Path) -> None:
    data = rows(Q.F32, N, K, 3)
    model = write_model(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (Q.F32, data)})
    x, errors = data.view(np.float32), {}
    for name in ("nearest", "search"):
        gguf_tools.pack(model, tmp_path / f"{name}.gguf", type="q4_0", grouping="tile", search=name == "search")
        y = dequantize(Type.Q4_0_TILE, stored(tmp_path / f"{name}.gguf", "blk.0.attn_q.weight"), K, N)
        errors[name] = np.square(x - y).mean(axis=0)
        assert gguf_tools.manifest(tmp_path / f"{name}.gguf").scales == name
        assert gguf_tools.verify(tmp_path / f"{name}.gguf", against=model).against
    assert errors["search"].sum() < 0.95 * errors["nearest"].sum()


# ---- rules, presets


def small(tmp_path: Path, **types: gguf.GGMLQuantizationType) -> Path:
    """A model with one matrix of each role, of the given types; F32 by default."""
    roles = {
        "attn_q": "blk.0.attn_q",
        "ffn_up": "blk.0.ffn_up",
        "ffn_down": "blk.0.ffn_down",
        "norm": "blk.0.attn_norm",
    }
    tensors = {}
    for i, (role, name) in enumerate({"token_embd": "token_embd", **roles, "output": "output"}.items()):
        if role == "output" and role not in types:
            continue
        type = types.get(role, Q.F32)
        n = 1 if role == "norm" else N
        tensors[f"{name}.weight"] = (type, rows(type, n, K, i)[0 if role == "norm" else slice(None)])
    return write_model(tmp_path / "m.gguf", tensors)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "paper"}, {"attn_q": "q4_0_tile", "ffn_down": "q8_0_tile", "token_embd": "f32"}),
        ({"preset": "paper", "grouping": "column"}, {"attn_q": "q4_0_col", "ffn_down": "q8_0_col"}),
        ({"preset": "paper", "type": "iq4_nl"}, {"attn_q": "iq4_nl_tile", "ffn_down": "q8_0_tile"}),
        ({"type": "q8_0", "tensor_types": ["ffn=q4_0:tile"]}, {"attn_q": "q8_0_col", "ffn_up": "q4_0_tile"}),
        ({"type": "q4_0", "tensor_types": ["ffn_up=keep", "ffn=q8_0"]}, {"ffn_up": "f32", "ffn_down": "q8_0_col"}),
        ({"tensor_types": [r"^blk\.0\.ffn_(up|down)=IQ4_NL"]}, {"attn_q": "f32", "ffn_down": "iq4_nl_col"}),
        ({"type": "q4_0", "tensor_types": ["attn_q=f16"]}, {"attn_q": "f16", "ffn_up": "q4_0_col"}),
        ({"type": "q4_0", "token_embedding_type": "q8_0"}, {"token_embd": "q8_0", "attn_q": "q4_0_col"}),
        ({"type": "q4_0", "output_tensor_type": "q8_0"}, {"output": "q8_0_col", "attn_q": "q4_0_col"}),
    ],
)
def test_policies(tmp_path: Path, options: dict[str, Any], expected: dict[str, str]) -> None:
    model = small(tmp_path, output=Q.F32)
    gguf_tools.pack(model, tmp_path / "p.gguf", policy=Policy.make(**options))
    found = layouts(tmp_path / "p.gguf")
    for role, layout in expected.items():
        assert next(v for name, v in found.items() if f"{role}.weight" in name) == layout
    assert found["blk.0.attn_norm.weight"] == "f32"
    assert gguf_tools.verify(tmp_path / "p.gguf", against=model).against


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"preset": "lossless", "type": "q4_0"}, "changes no type"),
        ({"preset": "lossless", "grouping": "tile"}, "changes no type"),
        ({"preset": "fast"}, "not one of lossless, paper"),
        ({"type": "q2_k"}, "'q2_k' is not one of keep, q4_0"),
        ({"grouping": "row"}, "not one of column, tile"),
        ({"tensor_types": ["ffn"]}, "is not REGEX=TYPE"),
        ({"tensor_types": ["=q4_0"]}, "is not REGEX=TYPE"),
        ({"tensor_types": ["ffn=q5_1"]}, "the type is one of"),
        ({"tensor_types": ["ffn=q4_0:row"]}, "the grouping is one of"),
        ({"tensor_types": ["ffn(=q4_0"]}, "is not a regular expression"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Policy.make(**options)


def test_a_rule_that_cannot_be_followed(tmp_path: Path) -> None:
    model = small(tmp_path)
    with pytest.raises(GGUFError, match="no weight matrix for the rule fnn_up=q8_0"):
        gguf_tools.pack(model, tmp_path / "p.gguf", policy=Policy(rules=(Rule.parse("fnn_up=q8_0"),)))
    odd = write_model(tmp_path / "odd.gguf", {"blk.0.ffn_up.weight": (Q.F32, gaussian(32, 40, 1).view(np.uint8))})
    with pytest.raises(GGUFError, match="rows of 40, which are not whole Q8_0 blocks"):
        gguf_tools.pack(odd, tmp_path / "p.gguf", policy=Policy(rules=(Rule.parse("ffn_up=q8_0"),)))
    only_files(tmp_path, "m.gguf", "odd.gguf")


@pytest.mark.parametrize("preset", ["lossless", "paper"])
@pytest.mark.parametrize("k", [40, 96, 100, 160, 224, 300, 304])
def test_a_preset_leaves_matrices_that_fill_no_tiles(tmp_path: Path, preset: str, k: int) -> None:
    """Rows of any length, and rows of whole blocks in a matrix whose other side is odd."""
    tensors = {
        "blk.0.ffn_down.weight": (Q.F32, gaussian(64, k, 1).view(np.uint8)),
        "blk.1.ffn_down.weight": (Q.F32, gaussian(k, 64, 2).view(np.uint8)),
        "blk.0.attn_q.weight": (Q.Q4_0, rows(Q.Q4_0, 64, 64, 3)),
    }
    model = write_model(tmp_path / "m.gguf", tensors)
    gguf_tools.pack(model, tmp_path / "p.gguf", policy=Policy.make(preset=preset))
    found, tiled = layouts(tmp_path / "p.gguf"), preset == "paper" and k % 32 == 0
    for layer in (0, 1):
        assert found[f"blk.{layer}.ffn_down.weight"] == ("q8_0_tile" if tiled else "f32")
    assert found["blk.0.attn_q.weight"] == ("q4_0_tile" if preset == "paper" else "q4_0_col")
    assert gguf_tools.verify(tmp_path / "p.gguf", against=model).against


def test_nothing_to_tile_is_said_with_advice_that_helps(tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd.gguf", {"blk.0.ffn_up.weight": (Q.F16, rows(Q.F16, 100, 96, 1))})
    for options in ({}, {"type": "q8_0"}, {"preset": "paper"}):
        with pytest.raises(GGUFError, match=r"can become tiles \(1 F16\): .* sides are multiples of 32$"):
            gguf_tools.pack(odd, tmp_path / "p.gguf", policy=Policy.make(**options))
    model = small(tmp_path)
    with pytest.raises(GGUFError, match=r"\(4 F32\); try --type q8_0 or q4_0$"):
        gguf_tools.pack(model, tmp_path / "p.gguf")
    with pytest.raises(GGUFError, match=r"\(4 F32\): --tensor-type leaves none$"):
        gguf_tools.pack(model, tmp_path / "p.gguf", policy=Policy.make(type="q8_0", tensor_types=[".=f32"]))


# ---- tied embeddings


@pytest.mark.parametrize(
    ("embedding", "options", "expected"),
    [
        (Q.F16, {"type": "q4_0"}, "q8_0"),
        (Q.F16, {"preset": "paper"}, "q8_0"),
        (Q.F16, {"preset": "paper", "token_embedding_type": "keep"}, "f16"),
        (Q.F16, {}, "f16"),
        (Q.Q6_K, {"preset": "paper"}, "q6_k"),
        (Q.Q8_0, {"type": "q4_0"}, "q8_0"),
    ],
)
def test_embeddings_of_a_tied_model(
    tmp_path: Path, embedding: gguf.GGMLQuantizationType, options: dict[str, Any], expected: str
) -> None:
    """The device makes the output matrix of them when the file is loaded, from floats as from quantized types."""
    model = small(tmp_path, token_embd=embedding, attn_q=Q.Q8_0)
    packed, back = tmp_path / "p.gguf", tmp_path / "back.gguf"
    report = gguf_tools.pack(model, packed, policy=Policy.make(**options))
    found = layouts(packed)
    assert found["token_embd.weight"] == expected
    assert "output.weight" not in found
    assert gguf_tools.verify(packed, against=model).n_tensors == 5
    gguf_tools.unpack(packed, back)
    if embedding.name.lower() == expected:
        assert np.array_equal(stored(back, "token_embd.weight"), stored(model, "token_embd.weight"))
    if report.lossless:
        assert back.read_bytes() == model.read_bytes()
        assert gguf_tools.verify(packed).unpacks


def test_files_of_earlier_versions_with_tensors_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_tools.pack(small(tmp_path, attn_q=Q.Q8_0), packed := tmp_path / "p.gguf")
    monkeypatch.setattr(contents, "K_ADDED", contents.K_TOOL)  # a key that the file has
    assert gguf_tools.manifest(packed).lossless
    for refused in (gguf_tools.verify, lambda path: gguf_tools.unpack(path, tmp_path / "u.gguf")):
        with pytest.raises(GGUFError, match="pack its source again"):
            refused(packed)
    assert not (tmp_path / "u.gguf").exists()


def test_a_tied_model_has_no_output_matrix_for_a_rule(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"no weight matrix for the rule .*output"):
        gguf_tools.pack(small(tmp_path), tmp_path / "p.gguf", policy=Policy.make(output_tensor_type="q8_0"))


# ---- split models


def parts(folder: Path, stem: str = "m", count: int = 3) -> tuple[list[Path], Path]:
    """A model in parts, as llama-gguf-split writes it, and the same in one file."""
    tensors = {f"blk.{i}.attn_q.weight": (Q.Q8_0, rows(Q.Q8_0, N, K, i)) for i in range(5)}
    names = list(tensors)
    cuts = [names[i::count] for i in range(count)]
    paths = []
    for i, own in enumerate(cuts):
        path = folder / f"{stem}-{i + 1:05}-of-{count:05}.gguf"
        values = {"split__no": i, "split__count": count, "split__tensors__count": len(names)}
        if i == 0:
            values = {"tokenizer.ggml.tokens": ["a", "b"], **values}
        paths.append(write_model(path, {name: tensors[name] for name in own}, **values))
    ordered = {name: tensors[name] for own in cuts for name in own}
    return paths, write_model(folder / "whole.gguf", ordered, **{"tokenizer.ggml.tokens": ["a", "b"]})


@pytest.mark.parametrize("named", [0, 2])
def test_split_model_packs_to_one_file(tmp_path: Path, named: int) -> None:
    paths, whole = parts(tmp_path)
    packed, of_whole, back = tmp_path / "p.gguf", tmp_path / "w.gguf", tmp_path / "back.gguf"
    report = gguf_tools.pack(paths[named], packed)
    assert (report.lossless, report.same_contents) == (False, True)
    assert any("the source is split" in note for note in report.notes)
    assert gguf_tools.verify(packed).unpacks
    assert gguf_tools.pack(whole, of_whole).lossless
    with gguf_tools.GGUFFile(packed) as a, gguf_tools.GGUFFile(of_whole) as b:
        ours = [contents.K_LOSSLESS, contents.K_META]
        assert {k: kv.raw for k, kv in a.kv.items() if k not in ours} == {
            k: kv.raw for k, kv in b.kv.items() if k not in ours
        }
        assert packed.read_bytes()[a.data_start :] == of_whole.read_bytes()[b.data_start :]
    gguf_tools.unpack(packed, back)
    assert back.read_bytes() == whole.read_bytes()
    for against in (*paths, whole):
        assert gguf_tools.verify(packed, against=against).exact == 5
    assert not gguf_tools.is_repacked(paths[named])
    with pytest.raises(GGUFError, match="is the source itself"):
        gguf_tools.pack(paths[0], paths[1])


def test_split_models_that_are_not_whole(tmp_path: Path) -> None:
    paths, _ = parts(tmp_path)
    out = tmp_path / "out.gguf"

    def refused(why: str) -> None:
        with pytest.raises(GGUFError, match=why):
            gguf_tools.pack(paths[0], out)
        assert not out.exists()

    lost = paths[1].rename(tmp_path / "lost")
    refused("00002-of-00003.gguf is missing")
    shutil.copy(paths[2], paths[1])
    refused("does not say that it is part 2 of 3")
    paths[1].unlink()
    write_model(paths[1], {"blk.0.attn_q.weight": (Q.Q8_0, rows(Q.Q8_0, N, K, 0))}, split__no=1, split__count=3)
    refused("occurs in another part, too")
    paths[1].unlink()
    write_model(paths[1], {"x": (Q.Q8_0, rows(Q.Q8_0, N, K, 0))}, split__no=1, split__count=3)
    refused("has 5 tensors, its parts 4")
    lost.rename(paths[1])
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"not called NAME-00001-of-00003\.gguf"):
        gguf_tools.pack(renamed, out)
    renamed.rename(paths[0])
    data = paths[2].read_bytes()
    paths[2].write_bytes(data[:-4000])
    refused("truncated")
    paths[2].write_bytes(data)
    assert gguf_tools.pack(paths[0], out).n_tensors == 5


def test_values_of_another_model_are_noticed(tmp_path: Path) -> None:
    data = rows(Q.F32, N, K, 3)
    model = write_model(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (Q.F32, data)})
    gguf_tools.pack(model, tmp_path / "p.gguf", type="q8_0")
    x = data.view(np.float32).copy()
    x[5, 6] *= 1.0001  # within the error of the type, but not the source
    write_model(model, {"blk.0.attn_q.weight": (Q.F32, x.view(np.uint8))})
    with pytest.raises(GGUFError, match="its contents differ"):
        gguf_tools.verify(tmp_path / "p.gguf", against=model)


# ---- the command line


def test_command_line(tmp_path: Path) -> None:
    model, packed = small(tmp_path, attn_q=Q.Q4_K, token_embd=Q.Q6_K), tmp_path / "p.gguf"
    result = repack("pack", model, "-")
    assert result.exit_code == 2
    assert "cannot write to a pipe" in result.stderr
    assert repack("pack", model).exit_code == 2
    assert repack("pack", model, packed, "--preset", "lossless", "--type", "q4_0").exit_code == 2
    only_files(tmp_path, "m.gguf")
    planned = json.loads(repack("pack", model, packed, "--preset", "paper", "--dry-run", "--json").stdout)
    only_files(tmp_path, "m.gguf")
    result = repack("pack", model, packed, "--preset", "paper", "--search", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["written"]
    assert not planned["written"]
    assert made["size"] == planned["size"] == packed.stat().st_size
    assert {t["name"]: t["type"] for t in made["tensors"]} == {
        "token_embd.weight": "q6_k",
        "blk.0.attn_q.weight": "q4_0_tile",
        "blk.0.ffn_up.weight": "q4_0_tile",
        "blk.0.ffn_down.weight": "q8_0_tile",
        "blk.0.attn_norm.weight": "f32",
    }
    assert "changed the weights by" in result.stderr
    checked = json.loads(repack("verify", packed, "--against", model, "--json").stdout)
    assert checked["exact"] == 2
    assert "2 tensors hold its very values" in repack("verify", packed, "--against", model).stdout
    again = ("pack", "--force", model, packed, "--type", "q4_0")
    assert repack(*again, "--tensor-type", "attn=q8_0:tile", "-q").exit_code == 0
    assert layouts(packed)["blk.0.attn_q.weight"] == "q8_0_tile"


def test_inspect_shows_every_tensor_and_its_device(tmp_path: Path) -> None:
    model, packed = small(tmp_path, attn_q=Q.IQ3_S, ffn_up=Q.Q8_0, token_embd=Q.Q8_0), tmp_path / "p.gguf"
    policy = Policy.make(tensor_types=["ffn_down=q4_0:tile", "ffn_up=q8_0"])
    gguf_tools.pack(model, packed, policy=policy)
    result = repack("inspect", packed)
    assert result.exit_code == 0
    words = [line.split() for line in result.stdout.splitlines()]
    rows_ = {line[0]: line[1:] for line in words if line and line[0].endswith(".weight")}
    assert rows_ == {
        "token_embd.weight": ["q8_0", "256", "x", "64", "17,408", "CPU,", "NPU"],
        "blk.0.attn_q.weight": ["iq3_s", "256", "x", "64", "7,040", "NPU"],
        "blk.0.ffn_up.weight": ["q8_0", "column", "256", "x", "64", "17,408", "NPU"],
        "blk.0.ffn_down.weight": ["q4_0", "tile", "256", "x", "64", "9,216", "NPU"],
        "blk.0.attn_norm.weight": ["f32", "256", "1,024", "NPU"],
    }
    paths, _ = parts(tmp_path)
    assert len(json.loads(repack("inspect", paths[1], "--json").stdout)["tensors"]) == 5
    experts = {"blk.0.ffn_up_exps.weight": (Q.Q8_0, rows(Q.Q8_0, N, K, 1))}
    (of_experts,) = gguf_tools.inspect(write_model(model, experts))["tensors"]
    assert of_experts["device"] == "NPU"
    biases = {"blk.0.ffn_up_exps.bias": (Q.Q8_0, rows(Q.Q8_0, N, K, 1))}
    (of_biases,) = gguf_tools.inspect(write_model(model, biases))["tensors"]
    assert of_biases["device"] == "CPU"


def test_a_matrix_too_wide_for_memory_is_left_as_it_is(tmp_path: Path) -> None:
    """Rows of more than 2**18 elements are no weights: 32 of them would be held at a time."""
    path, wide = tmp_path / "m.gguf", (1 << 19, 32)
    tensors = [("blk.0.ffn_up.weight", Q.Q8_0, wide), ("blk.0.attn_q.weight", Q.Q8_0, (1 << 18, 32))]
    kv = [gguf_write.kv_text("general.architecture", "llama")]
    write_raw(path, kv, tensors)
    report = gguf_tools.pack(path, tmp_path / "p.gguf", type="q4_0", threads=16)
    assert [t.type for t in report.tensors] == ["q8_0", "q4_0_col"]
    assert gguf_tools.verify(tmp_path / "p.gguf", against=path, threads=16).exact == 1
