"""Tilebeam as a model of lm-evaluation-harness: every kind of request against the library's own answers, and whole
tasks from local files. Without the harness (it is an extra) only the sentence that says so is tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_kit
import numpy as np
import pytest
import tilebeam
from tilebeam import LM, Prompt, SamplingParams, TilebeamError

from bench.lib.synth import preset, write_model

installed = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not installed, reason="lm-evaluation-harness is not installed")
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = preset("tiny", arch="qwen2", type="f32", n_layer=2)
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", config)


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=4, threads=1, **engine_kit.EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def model(lm: LM) -> Any:
    from tilebeam.evaluation.harness import TilebeamModel

    return TilebeamModel(lm)


def asked(*args: Any) -> Any:
    """A request as the harness makes it."""
    return SimpleNamespace(args=args)


@pytest.mark.skipif(installed, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_command_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-m", "tilebeam.cli.harness"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install tilebeam[harness]" in done.stderr


@needs_harness
def test_loglikelihoods_are_the_librarys(model: Any, lm: LM) -> None:
    pairs = [("the people", " was"), ("the number ", "of the people"), ("", "the number"), ("the people", " in the")]
    found = model.loglikelihood([asked(*p) for p in pairs], disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        (wanted,) = lm.loglikelihood(context, [continuation])
        assert logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert greedy == wanted.greedy


@needs_harness
def test_texts_are_cut_as_by_the_harness(lm: LM) -> None:
    """Where no token covers the border; there the harness scores a text that nobody wrote."""
    from lm_eval.api.model import TemplateLM

    class Own(TemplateLM):  # type: ignore[misc, name-defined]
        tok_encode = staticmethod(lm.tokenize)

    encode = Own._encode_pair
    for context in ("the people", "the number \n", "Question: how many?\nAnswer:", "it was 12"):
        for continuation in (" was", "of the people", "\nin", " 3 of it"):
            _, wanted = encode(Own, context, continuation)
            (found,) = lm.loglikelihood(context, [continuation])
            assert found.token_ids == wanted, (context, continuation)


@needs_harness
def test_rolling_windows_score_every_token_once(model: Any, lm: LM) -> None:
    texts = ["the number of the people", "it was the number of the people in the world " * 40]
    found = model.loglikelihood_rolling([asked(t) for t in texts], disable_tqdm=True)
    for text, value in zip(texts, found, strict=True):
        tokens = lm.tokenize(text, add_special=False)
        size, total = lm.n_ctx - 1, 0.0
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            # A later window is as long as the first: what comes before its tokens is their context.
            before = tokens[: start + len(part)][-size - 1 : -len(part)] if start else [lm.bos]
            logits = lm.logits([*before, *part]).astype(np.float64)[len(before) - 1 : -1]
            logits -= logits.max(1, keepdims=True)
            total += float((logits - np.log(np.exp(logits).sum(1, keepdims=True)))[range(len(part)), part].sum())
        assert value == pytest.approx(total, abs=0.05)


@needs_harness
def test_generations_end_as_the_task_says(model: Any, lm: LM) -> None:
    greedy = lm.generate("the people", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    stop = greedy[len(greedy) // 2 :][:3]
    cut, plain, drawn = model.generate_until(
        [
            asked("the people", {"until": [stop, ""], "max_gen_toks": 12}),
            asked("the people", {"until": [], "max_new_tokens": 12, "do_sample": False, "temperature": 0.7}),
            asked("the people", {"max_tokens": 12, "do_sample": True, "top_k": 5}),
        ],
        disable_tqdm=True,
    )
    assert plain == greedy
    assert cut == greedy[: greedy.index(stop)]
    assert drawn != greedy
    with pytest.raises(TilebeamError, match="'num_beams' is not supported"):
        model.generate_until([asked("the", {"num_beams": 4})])
    with pytest.raises(TilebeamError, match="do not fit the context of 512"):
        model.generate_until([asked("the", {"max_gen_toks": 512})])


@needs_harness
def test_a_message_to_be_continued_is_left_open(lm: LM) -> None:
    from tilebeam.evaluation.harness import TilebeamModel

    class Chats(LM):
        """The same model with a chat template."""

        def __init__(self) -> None: ...

        def __del__(self) -> None: ...

        def chat_prompt(self, messages: Any, **options: Any) -> Prompt:
            return lm.chat_prompt(messages, template=CHAT, **options)

    model = TilebeamModel(Chats())
    history = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]
    assert model.apply_chat_template(history[:1]) == "<user>2 + 2?<assistant>"
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<user>2 + 2?<assistant>It is"


@needs_harness
def test_unknown_options_are_refused(path: Path) -> None:
    from tilebeam.evaluation.harness import TilebeamModel

    with pytest.raises(TilebeamError, match="'gpu' is unknown; choose from path, n_ctx"):
        TilebeamModel(str(path), gpu=1)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""


@needs_harness
def test_the_command_runs_tasks_from_local_files(path: Path, tmp_path: Path) -> None:
    docs = [{"question": f"the number {i} is", "choices": ["the", "of", "people"], "answer": i % 3} for i in range(4)]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    choices = TASK.format(name="own_choices", file=file, kind="multiple_choice")
    (tmp_path / "choices.yaml").write_text(choices + 'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\n')
    texts = TASK.format(name="own_texts", file=file, kind="generate_until")
    texts += 'doc_to_target: "{{answer}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 4}\n'
    (tmp_path / "texts.yaml").write_text(texts)
    command = [sys.executable, "-m", "tilebeam.cli.harness", "run", "--model", "tilebeam"]
    options = [
        "--model_args",
        f"path={path},device=cpu,n_ctx=512,threads=1",
        "--output_path",
        str(tmp_path / "out.json"),
    ]
    tasks = ["--include_path", str(tmp_path), "--tasks", "own_choices,own_texts", "--log_samples"]
    caches = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *options, *tasks], env=os.environ | caches, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = tmp_path.rglob("out_*.json")
    results = json.loads(report.read_text())["results"]
    with tilebeam.load(path, "cpu", n_ctx=512, threads=1) as lm:
        scores = [lm.loglikelihood(d["question"], [f" {c}" for c in docs[0]["choices"]]) for d in docs]
    right = [int(np.argmax([s.logprob for s in some])) == d["answer"] for some, d in zip(scores, docs, strict=True)]
    assert results["own_choices"]["acc,none"] == np.mean(right)
    assert "exact_match,none" in results["own_texts"]
