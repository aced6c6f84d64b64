"""Models by name: what is chosen of a repository, what is downloaded, what the cache answers, and every refusal."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import tilebeam
from cli_kit import Ran, ok
from hub_kit import FakeHub, fake_hub
from huggingface_hub import constants
from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install
from tilebeam.model import hub

TINY = (Path(__file__).parents[2] / "bench/tiny/models/0.1m-q4_0.gguf").read_bytes()
REPO = "arith/tiny-GGUF"
# As repositories have them: halves, several quantizations, a split one, and files that are no language model.
FILES = (
    *(
        "README.md",
        "mmproj-tiny-Q4_K_M.gguf",
        "tiny.imatrix.gguf",
        "tiny-bf16.gguf",
        "tiny-f16.gguf",
        "tiny-iq4_xs.gguf",
    ),
    *("tiny-q4_k_m.gguf", "tiny-Q6_K-00001-of-00002.gguf", "tiny-Q6_K-00002-of-00002.gguf", "tiny-q8_0.gguf"),
)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub", monkeypatch) as found:
        found.files[REPO] = {name: name.encode() + TINY for name in FILES}
        yield found


@pytest.mark.parametrize(
    ("name", "left_out", "file"),
    [
        (REPO, "", "tiny-q4_k_m.gguf"),
        (f"hf://{REPO}", "q4_k_m", "tiny-q8_0.gguf"),
        (f"hf:/{REPO}", "q4_k_m q8_0", "tiny-Q6_K-00001-of-00002.gguf"),  # through a Path; the first there is
        (f"{REPO}:q8_0", "", "tiny-q8_0.gguf"),
        (f"{REPO}:Q4_K_M", "", "tiny-q4_k_m.gguf"),
        (f"{REPO}:F16", "", "tiny-f16.gguf"),  # not bf16
        (f"{REPO}:Q6_K", "", "tiny-Q6_K-00001-of-00002.gguf"),
        (f"{REPO}/tiny-iq4_xs.gguf", "", "tiny-iq4_xs.gguf"),
        (f"{REPO}/*iq4*", "", "tiny-iq4_xs.gguf"),
    ],
)
def test_the_model_that_a_name_means(served: FakeHub, name: str, left_out: str, file: str) -> None:
    files = served.files[REPO]
    served.files[REPO] = {n: data for n, data in files.items() if not any(f"{word}." in n for word in left_out.split())}
    path = Path(hub.local_file(name))
    assert path.name == file
    assert path.read_bytes() == files[file]
    parts = [file, file.replace("-00001", "-00002")] if "-of-" in file else [file]
    assert served.downloads() == parts
    assert all((path.parent / part).read_bytes() == files[part] for part in parts)
    hub.local_file(name)
    assert served.downloads() == parts  # once


def test_a_download_that_breaks_off_goes_on(served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)  # 10 MB, below which nothing is kept
    served.cut.add("tiny-q8_0.gguf")
    assert Path(hub.local_file(f"{REPO}:Q8_0")).read_bytes() == served.files[REPO]["tiny-q8_0.gguf"]
    (_, _, whole), (_, _, rest) = [a for a in served.asked if a[0] == "GET" and "/resolve/" in a[1]]
    assert whole is None
    assert rest == f"bytes={(len(TINY) + len('tiny-q8_0.gguf')) // 2}-"


@pytest.mark.parametrize("how", ["no network", "offline"])
def test_the_cache_answers_without_the_hub(served: FakeHub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    for quant in ("Q8_0", "Q6_K"):
        hub.local_file(f"{REPO}:{quant}")
    (half,) = served.cache.rglob("tiny-Q6_K-00002-of-00002.gguf")
    half.unlink()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    served.asked.clear()
    assert Path(hub.local_file(REPO)).name == "tiny-q8_0.gguf"
    for name, words in (
        (f"{REPO}:Q6_K", "has no Q6_K; it has: Q8_0."),
        ("arith/other", "arith/other is not in the cache"),
    ):
        with pytest.raises(TilebeamError, match=re.escape(words)) as said:
            hub.local_file(name)
    assert ("HF_HUB_OFFLINE is set" if how == "offline" else "cannot be asked") in str(said.value)
    assert served.asked == []


@pytest.mark.parametrize(
    ("name", "refused", "words"),
    [
        (f"{REPO}:Q5_K_M", None, "has no Q5_K_M; it has: Q6_K, BF16, F16, IQ4_XS, Q4_K_M, Q8_0."),
        (f"{REPO}/*q*.gguf", None, "has several models '*q*.gguf'; it has: tiny-iq4_xs.gguf, tiny-q4_k_m.gguf, "),
        (f"{REPO}/x.gguf", None, "has no model 'x.gguf'; it has: tiny-Q6_K-00001-of-00002.gguf, "),
        ("arith/plain", None, "arith/plain has no GGUF model. Look for a repository whose name ends in GGUF"),
        ("arith/none", None, "/arith/none does not exist, or is private: check the name, or give your token"),
        (REPO, (403, "GatedRepo"), f"{REPO} is gated: accept its terms at http://"),
        (REPO, (418, ""), f"refused {REPO}: "),
        ("arith", None, "'arith' is no model of Hugging Face's hub: write OWNER/REPO"),
    ],
)
def test_refusals(served: FakeHub, name: str, refused: tuple[int, str] | None, words: str) -> None:
    served.files["arith/plain"] = {"model.safetensors": b"x"}
    if refused:
        served.refused[REPO] = refused
    with pytest.raises(TilebeamError, match=re.escape(words)):
        hub.local_file(name)
    assert served.downloads() == []


@pytest.mark.usefixtures("served")
def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(TilebeamError, match=f"No room for {REPO} in .*HF_HOME"):
        hub.local_file(REPO)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TilebeamError, match=re.escape(f"need the package huggingface_hub: {how_to_install('hub')}")):
        hub.local_file(REPO)


def test_how_extras_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the packages that they need, never by Tilebeam's own; where it is not installed, from here."""
    needs = ["numpy>=1", 'uvicorn[standard]>=2; extra == "server"', "a; extra == 'server'", 'b; extra == "plot"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: needs)
    assert how_to_install("server") == "pip install 'uvicorn[standard]>=2' 'a'"
    assert how_to_install("hub") == "pip install '.[hub]'"


@pytest.fixture
def real(served: FakeHub) -> FakeHub:
    served.files[REPO] = {"tiny-q4_0.gguf": TINY, "tiny-q8_0.gguf": TINY}
    return served


@pytest.mark.usefixtures("real")
def test_models_are_loaded_by_name() -> None:
    options = {"n_ctx": 256, "n_seq_max": 1, "threads": 1}
    with tilebeam.load(f"hf://{REPO}:Q4_0", device="tilebeam", **options) as lm:  # type: ignore[arg-type]
        assert (lm.device, Path(lm.info.path).name) == ("npu", "tiny-q4_0.gguf")
        assert lm.description == "llama 0.1M Q4_0"  # counted: the file does not tell its size
    with tilebeam.load(f"hf://{REPO}/*8_0.gguf", device="cpu", **options) as lm:  # type: ignore[arg-type]
        assert (lm.device, Path(lm.info.path).name) == ("cpu", "tiny-q8_0.gguf")


def test_commands_take_names(real: FakeHub) -> None:
    asked = ("-p", "1+1=", "-n", "2", "--temp", "0", "--json")
    by_repo = json.loads(ok("generate", "-hf", f"{REPO}:q4_0", *asked).out)
    by_file = json.loads(ok("generate", "--hf-repo", REPO, "--hf-file", "tiny-q4_0.gguf", *asked).out)
    by_model = json.loads(ok("generate", "-m", f"hf://{REPO}:Q4_0", *asked).out)
    texts = [r["outputs"][0]["text"] for r in (by_repo, by_file, by_model)]
    assert texts[0]
    assert texts == texts[:1] * 3
    assert real.downloads() == ["tiny-q4_0.gguf"]
    test = ("-p", 8, "-n", 0, "-r", 1, "-t", 1, "--device", "cpu")
    ok("bench", "-hf", f"{REPO}:q8_0", "-m", f"hf://{REPO}:q4_0", *test)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-hf a/b -m c.gguf", 2, "Give one model: -m or -hf."),
        ("-hf a/b -hf c/d", 2, "Give one model: -m or -hf."),
        ("-hff x.gguf -m c.gguf", 2, "-hff names a file of one -hf repository."),
        ("", 2, "Missing option -m (a GGUF file) or -hf (a model of Hugging Face's hub)."),
        ("-m Qwen/Qwen2.5-0.5B-Instruct-GGUF", 1, "Then -hf Qwen/Qwen2.5-0.5B-Instruct-GGUF, or hf://"),
        ("-m nothing.gguf", 1, "nothing.gguf does not exist.\n"),
        ("-m ./some/thing.gguf", 1, "some/thing.gguf does not exist.\n"),
    ],
)
def test_which_model(words: str, code: int, said: str) -> None:
    ran = Ran("generate", *words.split(), "-p", "hi")
    assert ran.code == code
    assert said in ran.err
