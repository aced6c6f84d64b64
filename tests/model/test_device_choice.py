"""Where the matrices of a model run: decided from the file, as it then happens, said once, and shown everywhere."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import gguf
import pytest
import tilebeam
from accuracy import Job
from gguf_kit import retyped
from tilebeam import PlacementWarning, SamplingParams
from tilebeam import gguf as gguf_tools
from tilebeam.cli.main import app
from tilebeam.gguf import weights
from tilebeam.gguf.matrices import Matrix, grouped
from tilebeam.model import device_choice, file_check
from tilebeam.model.device_choice import LEAST_SHARE, MANY
from tilebeam.model.load_options import LoadOptions
from tilebeam.native.executor import UsableMemory
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model

Q = gguf.GGMLQuantizationType
SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = "the question is how many"
LAYERS = r"(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight"
# Every type that gguf knows has tiles: of this one these tests say that it has none, and nobody asks the device.
FOREIGN = Q.NVFP4


@pytest.fixture(autouse=True)
def without_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.function is not test_products_run_where_the_list_of_tensors_says:
        monkeypatch.delitem(weights.TB_TYPE, FOREIGN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which the device multiplies by all, most, few and no matrices; one whose embeddings are tied."""
    folder = tmp_path_factory.mktemp("models")
    whole = write_model(folder / "whole.gguf", preset("tiny", type="q8_0"))
    tied = write_model(folder / "q8.gguf", preset("tiny", arch="gemma3", type="q8_0"))
    patterns = {"most": rf"blk\.0\.{LAYERS}", "few": LAYERS, "none": rf"{LAYERS}|output\.weight"}
    made = {name: retyped(whole, folder / f"{name}.gguf", {p: FOREIGN}) for name, p in patterns.items()}
    return {"whole": whole, **made, "tied": retyped(tied, folder / "tied.gguf", {"token_embd": Q.NVFP4})}


def matrices(path: Path) -> tuple[Matrix, ...]:
    with gguf_tools.open_gguf(path) as f:
        return gguf_tools.matrices_of(f)


@pytest.mark.parametrize("layers", [-1, 2, 0])
@pytest.mark.parametrize("name", ["whole", "most", "few", "none", "tied"])
def test_products_run_where_the_list_of_tensors_says(
    models: dict[str, Path], name: str, layers: int, tmp_path: Path
) -> None:
    path = models[name]
    job = Job(str(path), "npu", n_positions=4, n_threads=1, n_ctx=256, n_gpu_layers=layers, products=True)
    ran = accuracy.got(accuracy.run([job], tmp_path)[0]).products
    n_layer = 4
    planned = {
        m.name: "cpu" if m.why or (layers >= 0 and m.layer < n_layer + 1 - layers) else "npu" for m in matrices(path)
    }
    assert ran == planned
    if layers == -1:
        assert set(ran.values()) == {"npu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlacementWarning)
        lm = tilebeam.load(path, "npu", n_gpu_layers=layers, **SMALL)
    with lm:
        for place in ("npu", "cpu"):
            on_it = [m for m in matrices(path) if ran[m.name] == place]
            groups = [g for g in lm.info.matrices if g.device == place]
            assert sum(g.matrices for g in groups) == len(on_it)
            assert sum(g.bytes for g in groups) == sum(m.bytes for m in on_it)


def test_a_type_that_grows_stays_on_the_cpu_where_memory_is_short(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tiles are larger than the file; what the CPU backend reads is mapped."""
    path = retyped(models["whole"], tmp_path / "grid.gguf", {rf"{LAYERS}|output\.weight": Q.IQ2_XXS})
    (group,) = grouped(matrices(path))
    assert group.packed_bytes == pytest.approx(group.bytes * 3264 / (32 * 66))
    for available, device in ((group.packed_bytes, "npu"), (group.packed_bytes - 1, "cpu")):
        memory = UsableMemory(1 << 40, available, 1 << 40)
        monkeypatch.setattr(device_choice, "usable_memory", lambda of=memory: of)
        said = pytest.warns(PlacementWarning, match="more memory than there is") if device == "cpu" else nullcontext()
        with said, tilebeam.load(path, **SMALL) as lm:
            assert lm.info.device == device


def test_load_warns_once_with_the_share_the_reason_and_what_to_do(models: dict[str, Path]) -> None:
    with pytest.warns(PlacementWarning) as said, tilebeam.load(models["most"], **SMALL) as lm:
        assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert len(said) == 1
    assert said[0].filename == __file__
    on_cpu = sum(m.bytes for m in matrices(models["most"]) if m.why) / sum(m.bytes for m in matrices(models["most"]))
    text = str(said[0].message)
    assert f"most.gguf: {100 * on_cpu:.0f} % of the bytes of its weight matrices run on the CPU" in text
    assert "matrices of NVFP4 (7)" in text
    assert "`gguf-repack pack most.gguf most-q8_0.gguf --type q8_0`" in text
    assert lm.info.device == "npu"
    assert lm.info.device_share == pytest.approx(1 - on_cpu)
    assert [(g.type, g.device, g.matrices, g.why) for g in lm.info.matrices] == [
        ("q8_0", "npu", 22, ""),
        ("nvfp4", "cpu", 7, "type"),
    ]


def test_the_advice_helps(models: dict[str, Path], tmp_path: Path) -> None:
    gguf_tools.pack(models["few"], tmp_path / "packed.gguf", type="q8_0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tilebeam.load(tmp_path / "packed.gguf", **SMALL) as lm:
            assert lm.info.device_share == 1


def test_nothing_is_said_where_nothing_is_left_out(models: dict[str, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tilebeam.load(models["whole"], **SMALL) as lm:
            assert (lm.info.device, lm.info.device_share) == ("npu", 1.0)
        with tilebeam.load(models["few"], "cpu", **SMALL) as lm:
            assert (lm.info.device, lm.info.device_share) == ("cpu", 0.0)
        with tilebeam.load(models["whole"], "npu", n_gpu_layers=2, **SMALL) as lm:
            assert 0 < lm.info.device_share < 1
            assert {g.why for g in lm.info.matrices} == {"", "layers"}


@pytest.mark.parametrize("name", ["few", "none"])
def test_a_model_of_few_device_matrices_stays_on_the_cpu(models: dict[str, Path], name: str) -> None:
    with tilebeam.load(models[name], "cpu", **SMALL) as stock:
        want = stock.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    with pytest.warns(PlacementWarning, match="runs on the CPU backend as a whole") as said:
        lm = tilebeam.load(models[name], **SMALL)
    with lm:
        assert (lm.info.device, lm.info.executor, lm.info.tiled_tensors) == ("cpu", None, 0)
        assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == want
        assert {g.device for g in lm.info.matrices} == {"cpu"}
    assert 'device="tilebeam"' in str(said[0].message)
    with pytest.warns(PlacementWarning, match="run on the CPU, because"):
        lm = tilebeam.load(models[name], "npu", **SMALL)
    with lm:
        assert lm.info.device == "npu"
        assert lm.info.device_share < LEAST_SHARE


@pytest.mark.parametrize(
    "option", [{"executor": "thread"}, {"devices": 1}, {"memory_limit": "1GiB"}, {"n_gpu_layers": 5}], ids=str
)
def test_an_option_of_the_device_asks_for_it(models: dict[str, Path], option: dict[str, Any]) -> None:
    with pytest.warns(PlacementWarning), tilebeam.load(models["few"], **SMALL, **option) as lm:
        assert lm.info.device == "npu"


def test_a_repacked_file_asks_for_the_device(models: dict[str, Path], tmp_path: Path) -> None:
    gguf_tools.pack(models["few"], tmp_path / "packed.gguf")
    with pytest.warns(PlacementWarning, match="pack the file that it was made from"):
        lm = tilebeam.load(tmp_path / "packed.gguf", **SMALL)
    with lm:
        assert lm.info.device == "npu"


def test_the_share_decides(models: dict[str, Path]) -> None:
    file = file_check.inspect(models["whole"], False)
    for sequences, least in ((1, 75), (MANY - 1, 75), (MANY, 25), (16, 25)):
        options = LoadOptions(n_seq_max=sequences).checked()
        for share, backend in ((0, "cpu"), (least - 1, "cpu"), (least, "npu"), (100, "npu")):
            both = (Matrix("a.weight", "q4_0", share, 0, ""), Matrix("b.weight", "q1_0", 100 - share, 0, "type"))
            assert device_choice.choose(replace(file, matrices=both), options).backend == backend
        assert device_choice.choose(replace(file, matrices=()), options).backend == "npu"


def test_load_says_what_was_chosen(models: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    with tilebeam.load(models["whole"], verbose=True, **SMALL) as lm:
        assert lm.info.choice == "100 % of the matrices' bytes can run on the device"
    assert f"{models['whole']} runs on npu: {lm.info.choice}" in capfd.readouterr().err


def test_floats_are_read_where_memory_has_room(tmp_path: Path) -> None:
    def copied(spare: int, **types: Any) -> bool:
        path = write_model(tmp_path / "m.gguf", preset("tiny", **types))
        file = file_check.inspect(path, verify=False)
        return device_choice.copied(file, device_choice.groups_of(file, "npu", -1), spare)

    assert copied(1 << 30, type="f16")
    assert not copied((tmp_path / "m.gguf").stat().st_size - 1, type="f16")
    assert not copied(1 << 30, type="q8_0", types={"output": "f16"})


def test_an_output_matrix_that_stays_with_the_embeddings_is_named() -> None:
    groups = grouped(
        [Matrix("token_embd.weight", "f16", 10, 4, "embeddings"), Matrix("blk.0.x.weight", "q4_0", 30, 0, "")]
    )
    said = device_choice.warning("m.gguf", groups, device_choice.Choice("npu", ""))
    assert said == (
        "m.gguf: 25 % of the bytes of its weight matrices run on the CPU, because llama.cpp multiplies by the "
        "embedding table where that is."
    )


# --- the commands -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_doctor_shows_where_matrices_run(models: dict[str, Path], tmp_path: Path) -> None:
    done = run("doctor", "-m", models["few"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert rows["nvfp4"][0] == "28"
    assert "does not multiply by this type" in " ".join(rows["nvfp4"])
    assert "runs on the CPU backend as a whole" in " ".join(done.stdout.split())
    model = json.loads(run("doctor", "--json", "-m", models["most"]).stdout)["model"]
    assert (model["device"], [g["type"] for g in model["matrices"]]) == ("npu", ["q8_0", "nvfp4"])
    assert 0.5 < model["device_share"] < 1
    (tmp_path / "damaged.gguf").write_bytes(models["most"].read_bytes()[:1000])
    assert run("doctor", "-m", tmp_path / "damaged.gguf").exit_code == 1
