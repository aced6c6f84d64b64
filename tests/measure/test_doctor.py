"""`tilebeam doctor -m`: a file that `tilebeam.load` refuses fails with the same sentence, one that it takes passes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tilebeam
from gguf_kit import with_metadata
from lora_kit import write_adapter
from tilebeam import CacheWarning, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam._ext.cpus import Cpus
from tilebeam.cli.main import app
from tilebeam.gguf import gguf_write as w
from tilebeam.measure import doctor, selftest
from typer.testing import CliRunner

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("doctor") / "model.gguf", preset("tiny", n_layer=2, type="q8_0"))


def _without_vocabulary(model: Path, path: Path) -> Path:
    with gguf_tools.GGUFFile(model) as f:
        return with_metadata(model, path, {key: None for key in f.kv if key.startswith("tokenizer.")})


def _said(model: Path, path: Path, key: str, value: str) -> Path:
    return with_metadata(model, path, {key: w.kv_text(key, value)})


# What makes a file of a model, and what is said of it.
FILES: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "adapter": (lambda m, p: write_adapter(p, m), "is an adapter, not a model: .* by lora= or --lora"),
    "mmproj": (lambda m, p: _said(m, p, "general.type", "mmproj"), r"reads images or sound \(mmproj\)"),
    "old mmproj": (lambda m, p: _said(m, p, "general.architecture", "clip"), r"reads images or sound \(mmproj\)"),
    "imatrix": (lambda m, p: _said(m, p, "general.type", "imatrix"), "an importance matrix, which llama-quantize"),
    "unknown architecture": (
        lambda m, p: _said(m, p, "general.architecture", "llamma9"),
        "unknown model architecture: 'llamma9'",
    ),
    "a tensor less": (
        lambda m, p: with_metadata(m, p, {}, r"blk\.1\.ffn_down"),
        r"blk\.1\.ffn_down\.weight' not found",
    ),
    "no tensors": (lambda m, p: with_metadata(m, p, {}, ""), "token_embd.weight' not found"),
    "no vocabulary": (_without_vocabulary, "error loading model vocabulary"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_cannot_be_loaded(kind: str, model: Path, tmp_path: Path) -> None:
    make, said = FILES[kind]
    path = make(model, tmp_path / "f.gguf")
    with pytest.raises(TilebeamError) as refused:
        tilebeam.load(path)
    assert re.search(said, str(refused.value))
    report = doctor.DoctorReport()
    report.attempt("model", "advice", lambda r: doctor._model(r, path))
    assert [(c.ok, c.detail) for c in report.checks] == [(False, " ".join(str(refused.value).split()))]


def test_other_warnings_than_those_it_tells_are_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_PACKED_CACHE", "1")
    with pytest.warns(CacheWarning, match="packed_cache allows 0 MiB"):
        doctor._model(doctor.DoctorReport(), model)


def test_the_command_fails_with_the_sentence_and_passes_what_loads(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter.gguf", model)
    for path, healthy in ((adapter, False), (model, True)):
        ran = CliRunner().invoke(app, ["doctor", "--json", "-m", str(path)])
        report = json.loads(ran.stdout)
        assert (ran.exit_code, report["healthy"]) == (0 if healthy else 1, healthy)
        assert [c["name"] for c in report["checks"] if not c["ok"]] == ([] if healthy else ["model"])


@pytest.mark.parametrize(
    ("cpus", "said"),
    [
        (Cpus(24, 16, 8, 2, 8, None), "24 CPUs on 16 cores, 8 of them performance cores: 8 threads; 2 memory nodes; "),
        (Cpus(8, 8, 4, 1, 2, 1.5), "8 CPUs, 4 of their cores performance cores, quota of 1.5 CPUs: 2 threads; "),
    ],
)
def test_cores_and_memory_nodes_are_told(monkeypatch: pytest.MonkeyPatch, cpus: Cpus, said: str) -> None:
    monkeypatch.setattr("tilebeam._ext.cpus.usable_cpus", lambda: cpus)
    report = doctor.DoctorReport()
    assert re.match(re.escape(said) + r"\d", doctor._limits(report))
    assert report.facts["limits"]["performance_cores"] == cpus.performance_cores


def test_a_cpu_backend_that_dies_of_a_product_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one does that GCC 12 compiled for AMX; the product itself is made where nothing stands in for Python."""
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nkill -SEGV $$\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    check = next(c for c in doctor.examine().checks if c.name == "llama.cpp's CPU backend")
    assert not check.ok
    assert check.detail == "its product of quantized weights ends with SIGSEGV"
    assert "-DGGML_NATIVE=OFF" in check.advice
    monkeypatch.undo()
    assert next(c for c in doctor.examine().checks if c.name == check.name).detail.startswith("products of ")


def test_kernels_that_were_never_timed_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [selftest.KernelResult(isa, "mul_mat", None, 0.0) for isa in ("i8mm", "neon", "portable")]
    monkeypatch.setattr(selftest, "run", lambda: found)
    monkeypatch.delenv("TILEBEAM_ISA", raising=False)
    report = doctor.DoctorReport()
    assert doctor._kernels(report).startswith("in use: i8mm (untimed: its speed has never been measured); all 3 tests")
    assert report.facts["untimed_kernel_sets"] == ["i8mm", "neon"]
    monkeypatch.setenv("TILEBEAM_ISA", "portable")
    assert doctor._kernels(report).startswith("in use: portable; ")
