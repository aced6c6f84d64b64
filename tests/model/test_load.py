"""Loading: what works, and that everything else is a clear exception that leaves nothing behind."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import struct
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import process_kit
import pytest
import tilebeam
from tilebeam import NpuError, SamplingParams, TilebeamError, register, search
from tilebeam import gguf as gguf_tools
from tilebeam._ext._library import native_file
from tilebeam.gguf import gguf_write
from tilebeam.native.control import Control, control

from bench.lib.synth import preset, write_model

PROMPT = "the question is how many"
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SMALL: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 2, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> Path:
    return write_model(folder / "ordinary.gguf", preset("tiny", arch="qwen2", type="q4_0"))


@pytest.fixture(scope="module")
def repacked(ordinary: Path, folder: Path) -> Path:
    gguf_tools.pack(ordinary, folder / "repacked.gguf")
    return folder / "repacked.gguf"


def say(lm: tilebeam.LM) -> list[int]:
    return lm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def held() -> tuple[int, int]:
    status = control().status()
    return status["buffers"], status["tiled_tensors"]


# --- what works -------------------------------------------------------------------------------------------------------


def test_ordinary_and_repacked_files_say_the_same(ordinary: Path, repacked: Path) -> None:
    before = held()
    with tilebeam.load(ordinary, **SMALL) as a, tilebeam.load(str(repacked), **SMALL) as b:
        assert say(a) == say(b)
        assert (a.info.repacked, b.info.repacked) == (False, True)
        listed = len(gguf_tools.manifest(repacked).tensors)
        # the ordinary model's tied output matrix is tiled too, in a file it cannot be
        assert b.info.tiled_tensors == listed <= a.info.tiled_tensors
        with tilebeam.load(repacked, **SMALL) as again:
            assert again.info.tiled_tensors == listed
    assert held() == before


def test_cpu_does_not_touch_a_registered_npu(ordinary: Path) -> None:
    register()
    before = control().status()
    with tilebeam.load(ordinary, "cpu", **SMALL) as lm:
        assert lm.info.tiled_tensors == 0
        say(lm)
        after = control().status()
    assert (after["graphs"], after["buffers"]) == (before["graphs"], before["buffers"])


@pytest.mark.parametrize(
    "options",
    [
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"type_k": "q8_0", "type_v": "q4_0"},
        {"type_k": "q4_0", "type_v": "q4_0"},
        {"type_k": "f32", "type_v": "f32"},
        {"flash_attn": False},
        {"n_gpu_layers": 0},
        {"n_gpu_layers": 2},
        {"n_batch": 2},
        {"n_batch": 64, "n_ubatch": 5},
        {"n_seq_max": 256},
        {"n_ctx": 1},
    ],
)
def test_other_options_work_too(ordinary: Path, options: dict[str, Any]) -> None:
    with tilebeam.load(ordinary, **{**SMALL, **options}) as lm:
        assert len(say(lm)) == 10
        assert lm.n_ctx == 256
        result = lm.generate(PROMPT, SamplingParams(n=lm.n_seq_max, max_tokens=2))[0]
        assert {len(s.token_ids) for s in result.outputs} == {2}


@pytest.mark.parametrize("alignment", [1, 2, 16])
def test_files_of_small_alignment(tmp_path: Path, alignment: int) -> None:
    """llama.cpp asserts that mapped ranges begin on multiples of 32, and the NPU reads whole elements only."""
    shape = {"n_embd": 96, "n_head": 3, "n_head_kv": 1, "head_dim": 32, "n_ff": 96, "n_vocab": 1001}
    model = write_model(tmp_path / "model.gguf", preset("tiny", n_layer=1, types={"attn_k": "f32"}, **shape))
    packed = tmp_path / "packed.gguf"
    with gguf_tools.GGUFFile(model) as f:
        tensors = [(t.name, t.type, t.ne) for t in f.tensors.values()]
        kv = [entry.raw for entry in f.kv.values()] + [gguf_write.kv_u32("general.alignment", alignment)]
        # so that the first tensor does not begin on a multiple of 32
        kv.append(gguf_write.kv_text("general.description", ""))
        short = len(gguf_write.header(f.version, kv, tensors, 1)[0])
        kv[-1] = gguf_write.kv_text("general.description", "x" * ((max(4, alignment) - short) % 32))
        head, offsets, _ = gguf_write.header(f.version, kv, tensors, alignment)
        assert offsets[0] % 32
        assert len({offset % 32 for offset in offsets}) > 1
        with packed.open("wb") as out:
            out.write(head)
            for offset, t in zip(offsets, f.tensors.values(), strict=True):
                out.seek(offset)
                out.write(f.read(t.offset, t.nbytes))
    for device in ("cpu", "npu"):
        logits = []
        for file in (model, packed):
            with tilebeam.load(file, device, **SMALL) as lm:
                logits.append(lm.logits([5, 6, 7]))
        assert (logits[0] == logits[1]).all()


def test_log_is_shown_only_when_asked_for(ordinary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tilebeam.load(ordinary, "cpu", **SMALL).close()
    assert capfd.readouterr() == ("", "")
    tilebeam.load(ordinary, "cpu", verbose=True, **SMALL).close()
    assert "llama_model_loader" in capfd.readouterr().err


# --- failing closed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_too_few_layers_of_a_repacked_file_are_refused(repacked: Path, layers: int) -> None:
    before = held()
    with pytest.raises(TilebeamError, match="n_gpu_layers=-1"):
        tilebeam.load(repacked, n_gpu_layers=layers, **SMALL)
    assert held() == before


def test_cpu_is_refused_for_a_repacked_file(repacked: Path) -> None:
    with pytest.raises(TilebeamError, match="gguf-repack unpack"):
        tilebeam.load(repacked, "cpu", **SMALL)


def test_a_plugin_that_did_not_get_the_list_is_noticed(repacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override without the list would compute garbage."""
    announced = Control.announced
    before = held()
    monkeypatch.setattr(Control, "announced", lambda self, *_: announced(self))
    with pytest.raises(TilebeamError, match="its tiles were not announced"):
        tilebeam.load(repacked, **SMALL)
    assert held() == before


def test_a_missing_plugin_is_a_sentence(ordinary: Path, tmp_path: Path) -> None:
    for name in ("libtilebeam_ext.so", "libtilebeam_sampling.so", "libtilebeam_npu.so"):
        (tmp_path / name).symlink_to(native_file(name).resolve())
    code = f"""
import tilebeam
lm = tilebeam.load({str(ordinary)!r}, "cpu", n_ctx=256)
lm.close()
try:
    tilebeam.load({str(ordinary)!r}, "npu")
except tilebeam.TilebeamError as error:
    print(error)
"""
    run = process_kit.python(code, TILEBEAM_LIB_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "libggml-tilebeam.so is missing" in run.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_seq_max": 257}, "n_seq_max must be a whole number from 1 to 256"),
        ({"n_seq_max": 0}, "n_seq_max"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"n_ctx": "4096"}, "n_ctx"),
        ({"n_ctx": 2**24}, "smaller n_ctx"),
        ({"threads": 0}, "threads"),
        ({"n_batch": 8}, "at least n_seq_max"),
        ({"n_ubatch": 1000}, "n_ubatch"),
        ({"device": "gpu"}, "device"),
        ({"executor": "qemu"}, "executor"),
        ({"type_k": "q3"}, "type_k"),
        ({"type_v": "q8_0", "flash_attn": False}, "flash attention"),
        ({"n_gpu_layers": -2}, "n_gpu_layers"),
        ({"verify": "never"}, "verify must be True or False"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_bad_options_are_named(ordinary: Path, device: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TilebeamError, match=said):
        tilebeam.load(ordinary, **{"device": device, **options})


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TilebeamError, match="does not exist"):
        tilebeam.load(tmp_path / "none.gguf")
    with pytest.raises(TilebeamError, match="not a file"):
        tilebeam.load(tmp_path)


def test_a_header_is_parsed_once(repacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = gguf_tools.GGUFFile.__init__

    def init(self: gguf_tools.GGUFFile, path: str | os.PathLike[str]) -> None:
        opened.append(path)
        real(self, path)

    monkeypatch.setattr(gguf_tools.GGUFFile, "__init__", init)
    tilebeam.load(repacked, **SMALL).close()
    assert opened == [repacked]


def test_a_model_llama_cpp_does_not_take_is_refused_with_its_reason(ordinary: Path, tmp_path: Path) -> None:
    data = bytearray(ordinary.read_bytes())
    at = data.index(b"qwen2", data.index(b"general.architecture"))
    data[at : at + 5] = b"qwen9"
    (tmp_path / "odd.gguf").write_bytes(data)
    for device in ("cpu", "npu"):
        before = held()
        with pytest.raises(TilebeamError, match="unknown model architecture: 'qwen9'"):
            tilebeam.load(tmp_path / "odd.gguf", device, **SMALL)
        assert held() == before


# --- executors and failure --------------------------------------------------------------------------------------------


def test_executors_agree_and_do_not_mix(ordinary: Path, repacked: Path) -> None:
    with tilebeam.load(repacked, executor="thread", **SMALL) as lm:
        expected = say(lm)
        with pytest.raises(TilebeamError, match="already runs"):
            tilebeam.load(ordinary, executor="process", **SMALL)
    with tilebeam.load(repacked, executor="process", **SMALL) as lm:
        assert lm.info.executor == "process"
        assert control().status()["npu_pid"] != os.getpid()
        assert say(lm) == expected
        with tilebeam.load(ordinary, **SMALL) as second:  # on the session that runs
            assert second.info.executor == "process"
    with tilebeam.load(ordinary, **SMALL) as lm:  # an executor is asked for by each load, not for all that follow
        assert lm.info.executor == "thread"
        assert say(lm) == expected


def test_a_killed_npu_is_an_npu_error_and_the_next_load_works(repacked: Path) -> None:
    with tilebeam.load(repacked, executor="process", **SMALL) as lm:
        expected = say(lm)
        os.kill(control().status()["npu_pid"], signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(NpuError, match="Load the model again"):
            lm.generate(PROMPT, GREEDY)
        with pytest.raises(NpuError):
            lm.logits([1, 2, 3])
        with tilebeam.load(repacked, executor="process", **SMALL) as fresh:
            assert say(fresh) == expected
    with tilebeam.load(repacked, executor="thread", **SMALL) as lm:
        assert say(lm) == expected


# --- the package ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_other_platforms_get_one_sentence(system: str, machine: str) -> None:
    code = f"""
import platform, sys
sys.platform = {system!r}
platform.machine = lambda: {machine!r}
try:
    import tilebeam
except ImportError as error:
    print(error)
"""
    said = process_kit.python(code).stdout.strip()
    assert said.startswith("Tilebeam runs on Linux on x86-64 and aarch64; this is")
    assert machine in said


HEAVY = ("numpy", "gguf", "llama_cpp", "cffi", "typer")


@pytest.mark.parametrize("package", [tilebeam, gguf_tools, search])
def test_public_names_are_those_of_the_stub(package: ModuleType) -> None:
    """What type checkers and editors see is what can be imported, and nothing is imported before it is asked for."""
    stub = ast.parse(Path(f"{package.__file__}i").read_text())
    names = [(a.name, a.asname) for line in stub.body if isinstance(line, ast.ImportFrom) for a in line.names]
    assert [(name, name) for name in sorted(package.__all__)] == sorted(names)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(tilebeam, name, getattr(package, name))
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'nonsense'"):
        _ = package.nonsense
    code = f"import sys, {package.__name__}; print(*{{{', '.join(map(repr, HEAVY))}}} & {{*sys.modules}})"
    assert process_kit.python(code).stdout.strip() == ""


def test_no_module_hides_a_public_name() -> None:
    code = """
import importlib, pkgutil, tilebeam
modules = {m.name for m in pkgutil.iter_modules(tilebeam.__path__)}
print(sorted(modules & set(tilebeam.__all__)))
"""
    assert process_kit.python(code).stdout.strip() == "[]"


def test_version_is_that_of_the_project() -> None:
    assert tilebeam.__version__ == metadata.version("tilebeam")


def test_libllama_sees_the_device() -> None:
    """The plugin must be in the libggml that libllama resolved, not in the wheel's second copy."""
    import llama_cpp

    register()
    assert llama_cpp.llama_supports_gpu_offload()
    lib = ctypes.CDLL("libggml.so.0")
    lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    assert lib.ggml_backend_dev_by_name(b"HMX0")
    assert tilebeam.register().devices() == [lib.ggml_backend_dev_by_name(b"HMX0")]


def pair(kind: int, value: int) -> bytes:
    """A metadata value as in the file: its type (4 is uint32) and itself."""
    return struct.pack("<II", kind, value)


def damaged_metadata(gguf_path: Path, key: str, old: bytes, new: bytes) -> bytes:
    data = bytearray(gguf_path.read_bytes())
    at = data.index(old, data.index(key.encode()) + len(key))
    data[at : at + len(old)] = new
    return bytes(data)


@pytest.mark.parametrize(
    ("key", "old", "new", "said"),
    [
        ("qwen2.block_count", pair(4, 4), pair(4, 0), "block_count is 0,"),
        ("qwen2.block_count", pair(4, 4), pair(4, 513), "block_count is 513,"),
        (
            "qwen2.attention.head_count_kv",
            (2).to_bytes(4, "little"),
            (3).to_bytes(4, "little"),
            "head_count_kv is 3, no divisor",
        ),
        ("qwen2.attention.head_count_kv", pair(4, 2), pair(4, 0), "head_count_kv is 0,"),
        ("tokenizer.ggml.tokens", b"the", b"her", "a token twice"),
    ],
)
def test_metadata_that_would_end_the_process_is_refused(
    ordinary: Path, tmp_path: Path, key: str, old: bytes, new: bytes, said: str
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(damaged_metadata(ordinary, key, old, new))
    with pytest.raises(TilebeamError, match=said):
        tilebeam.load(bad, "cpu", **SMALL)


@pytest.mark.parametrize("type", ["q4_0", "f16"])
def test_weights_lie_in_huge_pages(type: str, tmp_path: Path) -> None:
    """Where the kernel gives shared memory huge pages on demand, nearly all tiles and plain floats are in some, on one
    side at least."""
    model = write_model(tmp_path / "small.gguf", preset("small", arch="qwen2", type=type))
    result = process_kit.python(
        f"""
import ctypes, os, re
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
page = 2 << 20
fd = os.memfd_create("probe")
os.ftruncate(fd, page)
reserved = libc.mmap(None, 2 * page, 0, 0x22, -1, 0)  # private, anonymous
start = libc.mmap(reserved + -reserved % page, page, 3, 0x11, fd, 0)  # shared, at that address
ctypes.memset(start, 0, 1)
if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(page), 25):
    print("refused")
    raise SystemExit
import tilebeam
lm = tilebeam.load({str(model)!r}, device="npu", n_ctx=256)
huge = name = 0
for line in open("/proc/self/smaps"):
    if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
        name = "memfd:tilebeam" in line
    elif name and line.startswith("ShmemPmdMapped"):
        huge += int(line.split()[1])
print(huge)
"""
    )
    assert result.returncode == 0, result.stderr
    answer = result.stdout.split()[-1]
    if answer == "refused":
        pytest.skip("this kernel gives no huge pages to shared memory on demand")
    assert int(answer) >= 4 << 10  # KiB, of 8 MiB of tiles or 30 of floats: what is left begins or ends inside a page
