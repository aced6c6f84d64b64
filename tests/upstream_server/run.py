"""Run llama-server's own API tests, of the newest llama.cpp that Tilebeam is made for, against `tilebeam serve`.

    python tests/upstream_server/run.py [tokenize embedding ..] [--out FOLDER]

The tests lie in llama.cpp's tools/server/tests. They start a program with llama-server's options, which here is
`serve.py` beside this file: it starts `tilebeam serve` with what both have in common. The models that they would
download are random ones of the same kind, so tests that compare texts or token counts of those models fail;
README.md lists what fails and why. Printed is each file's count; FOLDER keeps what pytest said. The exit status is
0 if it ran. Needs the packages requests, aiohttp, filelock and openai.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "backend" / "cmake"), str(ROOT / "tests" / "kits"), str(ROOT)]
import ggml_source  # noqa: E402
from encoder_kit import POOLING, Encoder, write_encoder  # noqa: E402

from bench.lib.synth import preset, write_model  # noqa: E402

# Where the paths that they ask are served; others ask /completion in its own form, slots, vision, built-in tools.
FILES = ("tokenize", "chat_completion", "tool_call", "compat_oai_responses", "embedding", "rerank", "infill")
FILES += ("compat_anthropic", "template", "security", "basic", "ignore_eos", "stream")


def prepare(folder: Path) -> None:
    """The tests and the models, in a folder of their own: conftest.py there downloads models before all else."""
    release = ggml_source.releases()[-1]
    sources = ROOT / "build" / "ggml-source" / f"llama_cpp_python-{release}" / "vendor" / "llama.cpp"
    tests = sources / "tools" / "server" / "tests"
    if not tests.is_dir():
        sys.exit(f"{tests} is missing: make lint fetches llama-cpp-python {release}'s sources")
    shutil.copytree(tests / "unit", folder / "unit")
    # Tests name templates from where they lie in llama.cpp.
    shutil.copytree(sources / "models" / "templates", folder.parents[2] / "models" / "templates")
    shutil.copy(tests / "utils.py", folder)
    (folder / "wget.py").write_text("def download(*_, **__):\n    raise OSError('no downloads here')\n")
    (folder / "conftest.py").write_text(
        "import pytest, utils\n\n\n@pytest.fixture(autouse=True)\ndef _stop():\n    yield\n"
        "    for server in set(utils.server_instances):\n        server.stop()\n"
    )
    models = folder / "models"
    models.mkdir()
    write_model(models / "decoder.gguf", preset("tiny", n_layer=1))
    write_encoder(models / "encoder.gguf", Encoder("bert", POOLING.MEAN))
    write_encoder(models / "reranker.gguf", Encoder("bert", POOLING.RANK, ("relevance",)))


def main() -> int:
    """Run them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES, help=f"of {', '.join(FILES)} (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "upstream-server", help="pytest's words")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| file | pass | of |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tools", "server", "tests")
        folder.mkdir(parents=True)
        prepare(folder)
        environment = os.environ | {
            "LLAMA_SERVER_BIN_PATH": str(HERE / "serve.py"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # of serve.py's Python
            "TILEBEAM_UPSTREAM_MODELS": str(folder / "models"),
        }
        for file in options.files:
            pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", "-rfE"]
            done = subprocess.run(
                [*pytest, f"unit/test_{file}.py"], cwd=folder, env=environment, capture_output=True, text=True
            )
            (options.out / f"{file}.log").write_text(done.stdout + done.stderr)
            last = (done.stdout.splitlines() or [""])[-1]
            counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error)", last)}
            print(f"| `test_{file}` | {counts.get('passed', 0)} | {sum(counts.values())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
