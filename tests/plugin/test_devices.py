"""Several devices: models spread by layers, limits on address space, faults of one of them.

Whatever the placement, the logits are those of one device bit for bit: the kernels are the same, and each output is
computed by one of them alone.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ggml_kit as kit
import numpy as np
import numpy.typing as npt
import process_kit
import pytest
import tilebeam
from accuracy import compare
from devices_kit import GREEDY, KIB, MODELS, PROMPT, SMALL, held, nothing_stays, write_files  # noqa: F401
from ggml_kit import Device, ffi
from tilebeam import NpuError, SamplingParams, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.model.placement import Placement, Planner
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

F32 = npt.NDArray[np.float32]
LIMIT = 1900 * KIB  # the smallest in which the largest part of the small models, the output, fits


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("models"))


def answer(path: Path, **options: Any) -> tuple[tilebeam.LoadInfo, list[dict[str, Any]], F32, list[int]]:
    """How it was loaded, the devices then, logits of a prompt in batches of 8 and 1, and what it says."""
    with tilebeam.load(path, **{**SMALL, **options}) as lm:
        tokens = lm.tokenize(PROMPT)
        logits = np.concatenate([lm.logits(tokens, chunk=8), lm.logits(tokens[:5], chunk=1)])
        said = lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        devices = [control().device_status(d) for d in range(len(lm.info.layers))]
        return lm.info, devices, logits, said


# --- the same logits whatever the placement ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(files: dict[str, Path]) -> dict[str, tuple[F32, list[int]]]:
    """Logits and text of each model on one device without a limit."""
    result = {}
    for name, path in files.items():
        info, _, logits, said = answer(path)
        assert len(info.layers) == 1
        result[name] = logits, said
    return result


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("name", ["ordinary", "repacked"])
@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"devices": 2, "memory_limit": 2400 * KIB}, 2),
        ({"devices": 4}, 4),
        ({"memory_limit": LIMIT}, 3),
    ],
)
def test_spread(
    files: dict[str, Path],
    alone: dict[str, tuple[F32, list[int]]],
    name: str,
    executor: str,
    options: dict[str, Any],
    devices: int,
) -> None:
    info, states, logits, said = answer(files[name], executor=executor, **options)
    assert len(info.layers) == devices
    assert sum(info.layers) == 5  # the output counts as one
    assert min(info.layers) > 0
    np.testing.assert_array_equal(logits, alone[name][0])
    assert said == alone[name][1]
    for d in states:
        assert d["executor"] == executor
        assert (d["npu_pid"] == os.getpid()) == (executor == "thread")
        assert d["memory_used"] > 0
        if d["memory_limit"]:
            assert d["memory_used"] <= d["memory_limit"] == d["memory_total"]
            assert d["memory_free"] <= d["memory_limit"] - d["memory_used"]
    assert len({d["npu_pid"] for d in states}) == (1 if executor == "thread" else devices)


def test_against_the_stock_backend(files: dict[str, Path], alone: dict[str, tuple[F32, list[int]]]) -> None:
    """What all placements agree on is right."""
    for name in MODELS:
        with tilebeam.load(files[name], "cpu", **SMALL) as lm:
            tokens = lm.tokenize(PROMPT)
            stock = np.concatenate([lm.logits(tokens, chunk=8), lm.logits(tokens[:5], chunk=1)])
        assert compare(stock, alone[name][0]).kl < 2e-3, name


# --- devices as ggml sees them ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device() -> Device:
    return kit.device()


def test_devices_do_not_take_each_others_memory(device: Device) -> None:
    """ggml then copies what crosses from one to another."""
    others = [ffi.cast("void *", control().device(i)) for i in range(3)]
    assert others[0] == device.pointer
    for i, j in itertools.product(range(3), repeat=2):
        buft = kit.lib.ggml_backend_dev_buffer_type(others[j])
        assert ffi.string(kit.lib.ggml_backend_buft_name(buft)) == f"HMX{j}".encode()
        assert kit.lib.ggml_backend_dev_supports_buft(others[i], buft) == (i == j)
    with pytest.raises(TilebeamError, match="Invalid device index 15"):
        control().device_status(15)


# --- limits that are met late, or not at all --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ordinary", "repacked", "float output"])
@pytest.mark.parametrize("limit", [64, 1200, 2000, 3000, 4400, 12000])
def test_the_plugin_refuses_what_no_plan_kept_out(
    files: dict[str, Path], name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, KV cache or intermediate results past the limit: an error with the numbers, and nothing stays."""
    monkeypatch.setattr(Planner, "place", lambda *_: Placement((5,)))
    before = len(os.listdir("/proc/self/fd"))
    said = ""
    try:
        with tilebeam.load(files[name], **{**SMALL, "n_ctx": 1024}, memory_limit=limit * KIB) as lm:
            assert lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    except TilebeamError as error:
        said = str(error)
    if limit < 12000:
        assert "HMX0 has" in said
        assert f"its {limit * KIB} bytes of address space in use" in said
        assert "use more devices, a larger memory limit" in said
    else:
        assert said == ""
    assert len(os.listdir("/proc/self/fd")) == before


STOCK = """
import json, os, sys
from pathlib import Path
import numpy as np
import tilebeam
from tilebeam.native.control import control
registry = tilebeam.register()
from llama_cpp import Llama
out = {"names": registry.device_names()}
try:
    llm = Llama(sys.argv[1], n_gpu_layers=-1, flash_attn=True, n_ctx=256, n_batch=8, logits_all=True, verbose=False)
    llm.eval(llm.tokenize(sys.argv[2].encode()))
    np.save(sys.argv[3], llm.scores[: llm.n_tokens])
except Exception as error:
    out["error"] = str(error)
out["devices"], out["last_error"] = control().devices(), control().last_error()
print(json.dumps(out))
"""


def stock(path: Path, folder: Path, **env: str) -> tuple[dict[str, Any], F32 | None]:
    """Run llama-cpp-python's own Llama in a fresh process: (its report, logits)."""
    target = folder / "logits.npy"
    target.unlink(missing_ok=True)
    done = process_kit.python(STOCK, str(path), PROMPT, str(target), **env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), np.load(target) if target.exists() else None


def test_stock_llama(files: dict[str, Path], tmp_path: Path) -> None:
    """One device unless the environment says otherwise; then layers by free memory."""
    report, reference = stock(files["ordinary"], tmp_path)
    assert report["names"] == ["HMX0"] == [d["name"] for d in report["devices"]]
    assert reference is not None

    report, logits = stock(files["ordinary"], tmp_path, TILEBEAM_DEVICES="3")
    assert report["names"] == ["HMX0", "HMX1", "HMX2"]
    assert all(d["memory_used"] > 0 for d in report["devices"])
    np.testing.assert_array_equal(logits, reference)

    report, logits = stock(files["ordinary"], tmp_path, TILEBEAM_MEMORY_LIMIT="900K")
    assert logits is None
    assert report["error"]
    assert "HMX0 has" in report["last_error"]


def test_environment(files: dict[str, Path]) -> None:
    code = (
        "from tilebeam.native.control import control; o = control().options();"
        "print(o['n_devices'], o['memory_limit'][:4]);"
        "import tilebeam, sys; lm = tilebeam.load(sys.argv[1], n_ctx=256, n_seq_max=2, n_batch=32, threads=1);"
        "print(len(lm.info.layers)); lm.close()"
    )
    path = str(files["ordinary"])
    good = process_kit.python(code, path, TILEBEAM_DEVICES="4", TILEBEAM_MEMORY_LIMIT="2GiB,1M,1540k")
    assert good.stdout.splitlines() == ["4 [2147483648, 1048576, 1576960, 1576960]", "1"]
    spread = process_kit.python(code, path, TILEBEAM_MEMORY_LIMIT="1900k")
    assert spread.stdout.splitlines()[1] == "3"
    bad = (
        "from tilebeam.native.control import control; o = control().options();"
        "print(o['n_devices'], o['memory_limit'][:4]);"
        "import tilebeam, sys\ntry: tilebeam.load(sys.argv[1])\nexcept tilebeam.TilebeamError as e: print(e)"
    )
    for devices, limit in (("0", "1,,2"), ("2x", "99999999999G")):
        lines = process_kit.python(bad, path, TILEBEAM_DEVICES=devices, TILEBEAM_MEMORY_LIMIT=limit).stdout.splitlines()
        assert lines[0] == "1 [0, 0, 0, 0]"
        assert f"TILEBEAM_DEVICES={devices} is not" in lines[1]
        assert f"TILEBEAM_MEMORY_LIMIT={limit} is not" in lines[1]


# --- faults of one session --------------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < end:
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.001)


@pytest.mark.parametrize("which", [0, 3])
def test_one_session_dies(files: dict[str, Path], which: int) -> None:
    """The spread model ends with an error; a model on other sessions goes on; the next load starts what is missing."""
    options = {**SMALL, "executor": "process", "devices": 4, "memory_limit": LIMIT}
    with tilebeam.load(files["ordinary"], **options) as spread:
        said = spread.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        pids = [control().device_status(d)["npu_pid"] for d in range(4)]
        assert len(set(pids)) == 4
        kill(pids[which])
        with pytest.raises(NpuError, match="killed by signal 9"):
            spread.generate(PROMPT, GREEDY)
        states = [control().device_status(d)["session"] for d in range(4)]
        assert states == ["dead" if d == which else "alive" for d in range(4)]
    with tilebeam.load(files["ordinary"], **options) as again:
        assert again.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == said


def test_other_models_go_on(files: dict[str, Path]) -> None:
    options = {**SMALL, "executor": "process"}
    with tilebeam.load(files["tied"], **options) as other, tilebeam.load(files["repacked"], **options, devices=3) as lm:
        said = other.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        lm.generate(PROMPT, GREEDY)
        kill(control().device_status(2)["npu_pid"])
        with pytest.raises(NpuError):
            lm.generate(PROMPT, GREEDY)
        assert other.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == said
        with tilebeam.load(files["repacked"], **options, devices=3) as new:
            new.generate(PROMPT, GREEDY)
        assert other.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == said


# --- one copy of the weights ------------------------------------------------------------------------------------------


def memory(pids: set[int]) -> int:
    """Anonymous and shared-memory bytes of processes; pages that several of them map count once. No file pages.

    Sanitizers keep freed memory and shadow all of it: with them the anonymous part says nothing.
    """
    counted = ("Pss_Shmem:",) if os.environ.get("TILEBEAM_SANITIZE") else ("Pss_Anon:", "Pss_Shmem:")
    kb = 0
    for pid in pids | {os.getpid()}:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(counted):
                kb += int(line.split()[1])
    return kb * 1024


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("options", [{}, {"devices": 2}, {"devices": 3, "memory_limit": "24MiB"}])
@pytest.mark.parametrize("repacked", [False, True])
def test_prefill_and_decode_share_one_copy(
    big_files: tuple[Path, Path], repacked: bool, options: dict[str, Any], executor: str
) -> None:
    """Packed at load, the weights are in memory once; from a repacked file they are in the page cache alone."""
    path = big_files[repacked]
    with gguf_tools.GGUFFile(path) as gguf:
        tiles = sum(t.nbytes for t in gguf.tensors.values() if t.type.name == "Q4_0" and t.name != "token_embd.weight")
    settings_ = {"n_ctx": 512, "n_seq_max": 2, "n_batch": 64, "threads": 2, "executor": executor, **options}
    with tilebeam.load(path, **settings_):  # once before, so that what stays with the process is there
        pass
    before = memory(set())
    status = control().status()
    bytes_before = status["buffer_bytes"] - status["mapped_bytes"]
    with tilebeam.load(path, **settings_) as lm:
        pids = {control().device_status(d)["npu_pid"] for d in range(len(lm.info.layers))}
        status = control().status()
        buffers = status["buffer_bytes"] - status["mapped_bytes"] - bytes_before
        slack = tiles // 2
        assert tiles > 24 << 20
        # what the plugin allocated: KV cache, intermediate results, and the tiles if the file has none
        assert (buffers > tiles) == (not repacked)
        assert buffers < slack + (0 if repacked else tiles)
        loaded = memory(pids) - before
        assert loaded < buffers + slack
        lm.generate([PROMPT * 6] * 2, SamplingParams(max_tokens=16, seed=1))
        assert memory(pids) - before < buffers + slack
        assert control().status()["buffer_bytes"] - status["buffer_bytes"] == 0


@pytest.fixture(scope="module")
def big_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("big")
    shape = {"n_layer": 8, "n_embd": 768, "n_head": 12, "n_head_kv": 4, "n_ff": 2304, "n_vocab": 6000}
    ordinary = write_model(folder / "ordinary.gguf", preset("tiny", arch="llama", type="q4_0", **shape))
    gguf_tools.pack(ordinary, folder / "repacked.gguf")
    return ordinary, folder / "repacked.gguf"


def test_command_line(files: dict[str, Path]) -> None:
    """The same options there, with llama.cpp's manner of lists."""
    args = ["generate", "-m", files["ordinary"], "-p", PROMPT]
    args += ["-n", "4", "-np", "2", "-c", "256", "--temp", "0", "--devices", "2", "--json"]
    done = process_kit.run("tilebeam", *args, "--memory-limit", "24MiB,20MiB")
    assert done.returncode == 0, done.stderr
    assert "on 2 devices" in " ".join(done.stderr.split())
    refused = process_kit.run("tilebeam", *args, "--memory-limit", "1MiB")
    assert refused.returncode != 0
    assert "does not fit" in " ".join(refused.stderr.split())
