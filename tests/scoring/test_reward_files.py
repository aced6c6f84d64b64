"""What reward models are made of on disk: heads in three formats, published models taken apart, what a model's
files tell of it; bad ones are refused before a model is loaded."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf_kit
import numpy as np
import pytest
import tilebeam
from cli_kit import Ran, record
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import HeadReward, TilebeamError, TokenReward, classifier_of, load_head
from tilebeam import gguf as gguf_tools
from tilebeam.gguf.gguf_write import kv_text
from tilebeam.scoring.hf_reward_model import _body_config, extract_head, write_body
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.reward_formats import preset_of
from tilebeam.scoring.reward_heads import Head, make_head, save_head

from bench.lib.synth import preset, write_model

F32 = np.float32


def random_layers(sizes: list[int], seed: int = 0) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    pairs = zip(sizes[1:], sizes, strict=False)
    return [(rng.standard_normal((n, k)).astype(F32) / k**0.5, rng.standard_normal(n).astype(F32)) for n, k in pairs]


# --- heads ------------------------------------------------------------------------------------------------------------


def test_large_values_do_not_overflow() -> None:
    one = make_head([(np.array([1.0]), None)])
    np.testing.assert_array_equal(one(np.array([[-1e4], [0.0], [1e4]])), [0.0, 0.5, 1.0])
    two = make_head([(np.array([[0.0], [1.0]]), None)])
    np.testing.assert_array_equal(two(np.array([[-1e4], [0.0], [1e4]])), [0.0, 0.5, 1.0])


def same(a: Head, b: Head) -> bool:
    pairs = zip(a.layers, b.layers, strict=True)
    alike = all(np.array_equal(w, v) and np.array_equal(p, q) for (w, p), (v, q) in pairs)
    return alike and replace(a, layers=b.layers) == b


def test_heads_come_back_from_their_files(tmp_path: Path) -> None:
    layers = random_layers([8, 8, 2])
    head = replace(make_head(layers, label=0, preset="trl"), features=("last",), layer=7, maker={"name": "m"})
    save_head(tmp_path / "h.gguf", head)
    assert same(load_head(tmp_path / "h.gguf"), head)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda _: None, "does not exist"),
        (lambda p: p.write_bytes(b"GGUF nonsense"), "not a reward head"),
        (lambda p: write_model(p, preset("tiny", n_layer=1)), "not a reward head"),
        (
            lambda p: save_head(p, make_head(random_layers([4, 3]))) or p.write_bytes(p.read_bytes()[:-80]),
            "not a reward",
        ),
    ],
)
def test_bad_gguf_heads_are_refused(write: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "h.gguf"
    write(path)
    with pytest.raises(TilebeamError, match=says):
        load_head(path)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"weight": np.ones(4)}, r"a reward head is 0\.weight"),
        ({"0.weight": np.ones((2, 4)), "1.weight": np.ones((1, 3))}, "takes 3 values but gets 2"),
        ({"0.weight": np.ones((1, 4)), "0.bias": np.ones(2)}, "a bias of shape"),
        ({"0.weight": np.ones((1, 4, 4))}, "weight of shape"),
        ({"0.weight": np.array([1.0, np.nan])}, "not numbers"),
    ],
)
def test_bad_arrays_are_refused(arrays: dict[str, Any], says: str, tmp_path: Path) -> None:
    with gguf_kit.writer(tmp_path / "h.gguf", "tilebeam-reward-head") as writer:
        for name, values in arrays.items():
            writer.add_tensor(name, values.astype(F32))
    with pytest.raises(TilebeamError, match=says):
        load_head(tmp_path / "h.gguf")


def test_other_bad_heads_are_refused() -> None:
    wide = make_head(random_layers([4, 2]))
    for output, label, says in (("sigmoid", 1, "2 outputs"), ("softmax", 2, "Label 2"), ("tanh", 1, "'tanh'")):
        with pytest.raises(TilebeamError, match=says):
            Head(wide.layers, output, label)  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="at least one"):
        make_head([])


# --- published models -------------------------------------------------------------------------------------------------


def bf16(x: Any) -> Any:
    """The upper halves of float32 values, which these here fit exactly."""
    return (np.asarray(x, F32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = (bf16(values) if dtype == "BF16" else np.asarray(values)).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def coarse(*shape: int, seed: int = 1) -> Any:
    """Numbers that BF16 and F16 hold exactly."""
    return (np.random.default_rng(seed).integers(-64, 64, shape) / 64).astype(F32)


BODY = {"model.layers.0.q.weight": ("BF16", coarse(8, 8, seed=5)), "model.norm.weight": ("F32", coarse(8, seed=6))}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_a_value_head_comes_out_of_a_folder(dtype: str, tmp_path: Path) -> None:
    """TRL's layout, as Skywork's open PRMs have it, in two files."""
    kind = np.float16 if dtype == "F16" else F32
    weight, bias = coarse(1, 8).astype(kind), coarse(1).astype(kind)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {**BODY, "v_head.summary.bias": (dtype, bias)})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"v_head.summary.weight": (dtype, weight)})
    head = extract_head(tmp_path)
    assert same(head, make_head([(weight, bias)]))
    assert (head.output, head.shape) == ("sigmoid", "8 -> 1")
    assert extract_head(tmp_path, output="none").output == "none"


def test_a_two_label_head_comes_out_of_a_file(tmp_path: Path) -> None:
    """Qwen2.5-Math-PRM's layout: layers 0 and 2, a ReLU between them."""
    a, b, c, d = coarse(8, 8), coarse(8, seed=2), coarse(2, 8, seed=3), coarse(2, seed=4)
    names = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {**BODY, **{n: ("BF16", x) for n, x in zip(names, (a, b, c, d), strict=True)}})
    head = extract_head(path, preset="qwen2.5-math-prm")
    assert same(head, make_head([(a, b), (c, d)], preset="qwen2.5-math-prm"))
    x = coarse(3, 8, seed=9)
    hidden = np.maximum(x @ a.T + b, 0) @ c.T + d
    want = np.exp(hidden[:, 1]) / np.exp(hidden).sum(axis=1)
    np.testing.assert_allclose(head(x), want, rtol=1e-6)


def test_a_classifier_of_sequences_scores_as_it_is(tmp_path: Path) -> None:
    """transformers' sequence classification has no sigmoid; a value head of the same shape has."""
    write_safetensors(tmp_path / "model.safetensors", {**BODY, "score.weight": ("F32", coarse(1, 8))})
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    assert extract_head(tmp_path).output == "none"
    assert extract_head(tmp_path, output="sigmoid").output == "sigmoid"
    assert extract_head(tmp_path / "model.safetensors").output == "sigmoid"


@pytest.mark.parametrize(
    ("tensors", "options", "says"),
    [
        (BODY, {}, r"No head in these files.*model\.norm\.weight"),
        ({"score.weight": ("F32", coarse(1, 8)), "v_head.weight": ("F32", coarse(1, 8))}, {}, "Several heads"),
        (
            {name: ("F32", coarse(1, 8)) for name in ("score.weight", "score.0.weight")},
            {},
            r"score\.0\.weight and score\.weight are the same layer",
        ),
        ({"score.weight": ("F32", coarse(1, 8))}, {"name": "v_head"}, "No v_head"),
        ({"score.bias": ("F32", coarse(1))}, {}, r"bias score\.bias, but no weight"),
        ({"score.weight": ("I64", coarse(1, 8).astype(np.int64))}, {}, "type I64"),
        ({"score.weight": ("F64", coarse(1, 8))}, {}, "its shape"),
        ({"score.weight": ("F32", coarse(1, 8))}, {"preset": "none"}, "Unknown reward preset 'none'"),
    ],
)
def test_models_without_a_readable_head_are_refused(tensors: Any, options: Any, says: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(TilebeamError, match=says):
        extract_head(tmp_path, **options)


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(TilebeamError, match="does not exist"):
        extract_head(path)
    with pytest.raises(TilebeamError, match=r"no \.safetensors files"):
        extract_head(tmp_path)
    write_safetensors(path, {"score.weight": ("F32", coarse(1, 8))})
    whole = path.read_bytes()
    for raw in (whole[:4], whole[:40], whole[:-4], b"\xff" * 16, whole[:8] + b"[" * (len(whole) - 8)):
        path.write_bytes(raw)
        with pytest.raises(TilebeamError, match=r"not a safetensors file|incomplete|not complete"):
            extract_head(path)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "", 5, None]),
        "shape": st.sampled_from([[1, 8], [8], [], [-1, 8], ["8"], [2**62, 8], 3, None]),
        "data_offsets": st.sampled_from(
            [[0, 32], [0, 16], [8, 8], [16, 0], [0.0, 32.0], [-4, 4], [0, 2**70], ["0", "4"], [0], {}, None]
        ),
    }
)


@given(
    st.one_of(
        st.dictionaries(st.sampled_from(["score.weight", "v_head.bias", "__metadata__", "x"]), ENTRY | st.none()),
        st.lists(st.integers(), max_size=3),
        st.just("text"),
    )
)
@settings(max_examples=150, deadline=None)
def test_any_header_is_read_or_refused(header: Any) -> None:
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
        with contextlib.suppress(TilebeamError):
            assert extract_head(path).n_embd == 8


def test_a_head_file_with_other_facts_is_refused(tmp_path: Path) -> None:
    for key, value in (("output", 3), ("label", "x"), ("preset", 7)):
        path = tmp_path / f"{key}.gguf"
        with gguf_kit.writer(path, "tilebeam-reward-head") as writer:
            if isinstance(value, int):
                writer.add_uint32(f"reward.{key}", value)
            else:
                writer.add_string(f"reward.{key}", value)
            writer.add_tensor("0.weight", np.ones((1, 8), F32))
        with pytest.raises(TilebeamError, match=rf"reward\.{key} is"):
            load_head(path)


def test_a_body_is_the_model_without_its_head(tmp_path: Path) -> None:
    source = tmp_path / "prm"
    source.mkdir()
    write_safetensors(source / "model-1.safetensors", {**BODY, "score.0.weight": ("F32", coarse(2, 8))})
    write_safetensors(source / "model-2.safetensors", {"lm_head.weight": ("BF16", coarse(16, 8))})
    weight_map = dict.fromkeys([*BODY, "score.0.weight"], "model-1.safetensors")
    weight_map["lm_head.weight"] = "model-2.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"architectures": ["Qwen2ForProcessRewardModel"], "auto_map": {"AutoModel": "x.py"}, "hidden_size": 8}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    (source / "x.py").write_text("1")
    seen: list[tuple[int, int]] = []
    write_body(source, tmp_path / "body", lambda done, total: seen.append((done, total)))
    body = tmp_path / "body"
    assert sorted(p.name for p in body.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert json.loads((body / "config.json").read_text()) == {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8}
    index = json.loads((body / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {*BODY, "lm_head.weight"}
    raw = (body / "model-1.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    assert set(header) == {*BODY, "__metadata__"}
    for name, (dtype, values) in BODY.items():
        begin, end = header[name]["data_offsets"]
        stored = raw[8 + length :][begin:end]
        assert stored == (bf16(values) if dtype == "BF16" else values).tobytes()
        assert (header[name]["dtype"], header[name]["shape"]) == (dtype, list(values.shape))
    assert (
        seen[-1][0] == seen[-1][1] == sum(v.nbytes // (2 if d == "BF16" else 1) for d, v in BODY.values()) + 16 * 8 * 2
    )
    with pytest.raises(TilebeamError, match="exists already"):
        write_body(source, body)
    with pytest.raises(TilebeamError, match="not a folder"):
        write_body(source / "config.json", tmp_path / "other")
    (source / "config.json").write_text("{}")
    with pytest.raises(TilebeamError, match="names no architecture"):
        write_body(source, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["body", "prm"]


def test_bodies_have_architectures_that_are_known() -> None:
    for kind in ("ProcessRewardModel", "PrmModel", "RewardModel", "SequenceClassification", "TokenClassification"):
        assert _body_config({"architectures": [f"Qwen2For{kind}"]}) == {"architectures": ["Qwen2ForCausalLM"]}


def test_the_command_writes_head_and_body(tmp_path: Path) -> None:
    source = tmp_path / "Skywork-o1-Open-PRM-Qwen-2.5-1.5B"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {**BODY, "v_head.summary.weight": ("BF16", coarse(1, 8))})
    (source / "config.json").write_text('{"architectures": ["Qwen2ForPrmModel"]}')
    head, body = tmp_path / "prm.head.gguf", tmp_path / "body"
    assert record("reward-head", source, "-o", head, "--body", body) == {
        "head": str(head),
        "layers": "8 -> 1",
        "output": "sigmoid",
        "preset": "skywork-o1-prm",
        "body": str(body),
    }
    assert same(load_head(head), make_head([(coarse(1, 8), None)], preset="skywork-o1-prm"))
    assert (body / "model.safetensors").exists()
    Ran("reward-head", source, "-o", tmp_path / "head.npy").fails_with("should end in .gguf")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reward models of every kind, with what tells them in different places."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in {"plain": {}, "cls": {"labels": ("yes", "no")}}.items():
        write_model(folder / f"{name}.gguf", preset("tiny", arch="qwen3", type="q8_0", n_layer=1, **options))
    plain = folder / "plain.gguf"
    for name, sizes in {"value": [256, 1], "two": [256, 16, 2]}.items():
        (folder / f"{name}.gguf").symlink_to(plain)
        save_head(folder / f"{name}.head.gguf", make_head(random_layers(sizes)))
    (folder / "named.gguf").symlink_to(plain)
    save_head(folder / "named.head.gguf", make_head(random_layers([256, 1]), preset="skywork-o1-prm"))
    (folder / "Qwen2.5-Math-PRM-7B.Q8_0.gguf").symlink_to(plain)
    save_head(folder / "Qwen2.5-Math-PRM-7B.Q8_0.head.gguf", make_head(random_layers([256, 2])))
    (folder / "damaged.gguf").write_bytes(b"GGUF nonsense")
    reward = folder / "told.gguf"
    facts = {"reward.kind": "token", "reward.tag": "?", "reward.good": "1", "reward.bad": "2"}
    gguf_kit.with_metadata(plain, reward, {key: kv_text(key, value) for key, value in facts.items()})
    gguf_tools.pack(reward, folder / "told.tb.gguf")
    save_head(folder / "small.gguf", make_head([(np.ones((1, 64)), None)]))
    return folder


STEPS = [["the first is it\n", "the last is it\n"]]
NPU: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "device": "npu", "threads": 1}


@pytest.mark.parametrize(
    ("file", "known", "kind", "tag"),
    [
        ("told.gguf", {}, TokenReward, "?"),
        ("told.tb.gguf", {}, TokenReward, "?"),
        ("told.gguf", {"tag": "!\n", "labels": ("3", "4")}, TokenReward, "!\n"),
        ("plain.gguf", {"tag": "?", "labels": ("1", "2")}, TokenReward, "?"),
        ("value.gguf", {}, HeadReward, ""),
        ("two.gguf", {"tag": "?"}, HeadReward, "?"),
        ("plain.gguf", {"head": "two.head.gguf", "kind": "two-label"}, HeadReward, ""),
        ("named.gguf", {}, HeadReward, "\n"),
        ("Qwen2.5-Math-PRM-7B.Q8_0.gguf", {}, HeadReward, "<extra_0>"),
        ("cls.gguf", {}, HeadReward, ""),
        ("cls.gguf", {"outcome": True}, HeadReward, ""),
        ("cls.gguf", {"head": "two.head.gguf"}, HeadReward, ""),
        ("value.gguf", {"outcome": True, "preset": "chatml-outcome"}, HeadReward, "<|im_end|>\n"),
        ("plain.gguf", {"outcome": True, "preset": "rlhflow-orm", "labels": ("1", "2")}, TokenReward, None),
    ],
)
def test_what_is_not_said_is_found(models: Path, file: str, known: dict[str, Any], kind: type, tag: str) -> None:
    arguments = known | ({"head": models / known["head"]} if "head" in known else {})
    with tilebeam.load_reward_model(models / file, **arguments, **NPU) as scorer:
        assert type(scorer) is kind
        assert tag is None or scorer.format.tag == tag
        assert scorer.outcome == known.get("outcome", False)
        assert ("outcome" if scorer.outcome else "process") in scorer.about
        [first, last] = scorer.score_steps(["the question"], STEPS)[0]
        assert first != last
        if file == "cls.gguf" and "head" not in known:
            assert same(scorer.head, classifier_of(models / "cls.gguf"))  # type: ignore[attr-defined]
    with pytest.raises(TilebeamError, match="closed"):  # the block closed the model
        scorer.lm.generate("a")


def test_an_outcome_from_a_process_model_is_its_last_verdict(models: Path) -> None:
    with tilebeam.load_reward_model(models / "named.gguf", outcome=True, aggregate="min", **NPU) as scorer:
        assert (scorer.outcome, scorer.aggregate) == (False, "last")
    with tilebeam.load_reward_model(models / "named.gguf", aggregate="min", **NPU) as scorer:
        assert scorer.aggregate == "min"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("none.gguf", {}, "does not exist"),
    ("damaged.gguf", {}, "cannot be loaded as a reward model"),
    ("plain.gguf", {}, "does not say what kind"),
    ("plain.gguf", {"preset": "mine"}, "Unknown reward preset 'mine'"),
    ("plain.gguf", {"kind": "magic"}, "Unknown kind of reward model 'magic'"),
    ("plain.gguf", {"kind": "token"}, "needs a tag"),
    ("plain.gguf", {"tag": "?", "labels": ("1",)}, "two labels"),
    ("plain.gguf", {"kind": "value-head"}, r"needs its head's weights.*plain\.head\.gguf"),
    ("plain.gguf", {"kind": "classifier"}, "holds no classifier"),
    ("plain.gguf", {"head": "plain.gguf", "kind": "value-head"}, "not a reward head"),
    ("two.gguf", {"kind": "value-head"}, "two-label"),
    ("value.gguf", {"kind": "two-label"}, "softmax over 1"),
    ("value.gguf", {"preset": "chatml-outcome"}, "with outcome=True"),
    ("plain.gguf", {"kind": "token", "tag": "?", "head": "two.head.gguf"}, "kind token, which does not use the head"),
    ("cls.gguf", {"kind": "classifier", "head": "two.head.gguf"}, "kind classifier, which does not use the head"),
]
ONLY_WHEN_LOADED: list[tuple[str, dict[str, Any], str]] = [
    ("plain.gguf", {"tag": "?", "labels": ("no such token", "2")}, "it must be one"),
    ("plain.gguf", {"head": "small.gguf"}, "belongs to another model"),
    ("value.gguf", {"aggregate": "median"}, "aggregate must be one of"),
]


@pytest.mark.parametrize(("file", "known", "says"), WRONG + ONLY_WHEN_LOADED)
def test_what_does_not_fit_is_refused(models: Path, file: str, known: dict[str, Any], says: str) -> None:
    spec = RewardSpec(models / file, **known | ({"head": models / known["head"]} if "head" in known else {}))
    # What is wrong in files and arguments is found without the model being loaded.
    find = spec.check if (file, known, says) in WRONG else partial(spec.load, **NPU)
    with pytest.raises(TilebeamError, match=says):
        find()
    RewardSpec(models / "value.gguf").check()


@pytest.mark.parametrize(
    ("name", "preset_name"),
    [
        ("math-shepherd-mistral-7b-prm.Q4_K_M.gguf", "math-shepherd"),
        ("Llama3.1-8B-PRM-Deepseek-Data-Q8_0.gguf", "rlhflow"),
        ("Llama3.1 8B ORM Mistral Data", "rlhflow-orm"),
        ("Qwen2.5-Math-PRM-72B.i1-Q4_K_M.gguf", "qwen2.5-math-prm"),
        ("Skywork_o1_Open_PRM_Qwen_2.5_7B.gguf", "skywork-o1-prm"),
        ("Qwen2.5-1.5B-Instruct-Q8_0.gguf", None),
    ],
)
def test_names_tell_presets(name: str, preset_name: str | None) -> None:
    assert preset_of(name) == preset_name


def test_the_manuals_examples_run(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = Path(__file__).parents[2] / "docs" / "reward-models.md"
    loaded, by_hand = re.findall(r"```python\n(.*?)```", manual.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name, source in {"model.gguf": "plain", "prm.gguf": "plain", "prm.head.gguf": "value.head"}.items():
        (tmp_path / name).symlink_to(models / f"{source}.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(loaded, names)
    assert 0 < names["best"].usage.scored_tokens <= names["best"].usage.full_scoring_tokens
    names["lm"].close()
    exec(by_hand, names)
    assert names["prm"].score_steps(["what"], [["is it\n"]])
    names["prm"].close()
