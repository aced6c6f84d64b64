"""How well reward heads tell right from wrong samples by the hidden states of each layer, not only of the last.

    python -m bench.real.head_layers --data FOLDER [--model 0.5B=FILE ..] [--into docs/reward-models.md]

The models read the samples of GSM8K's test problems that are kept in bench/real/logs once more, and the outputs of some
layers are taken while they do. Heads learn from four fifths of the problems and rate the samples of the others, as in
`tilebeam reward train`, once for each layer and each of the last state, recent ones and the mean of all; AUROC over all
samples and within a problem, means over several divisions of the problems. Of token log-probabilities, heads know
the mean alone here. States are kept under --out, so that a run that was stopped is resumed.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tilebeam
from rich.progress import track
from tilebeam import LM, TilebeamError
from tilebeam.cli import console
from tilebeam.evaluation.options import TaskOptions
from tilebeam.evaluation.ranking import auroc, auroc_within
from tilebeam.evaluation.tasks import open_task
from tilebeam.gguf.whole_file import whole_file
from tilebeam.measure.graph_watch import Watch, name_of, watched
from tilebeam.native.ggml_base import ggml_base
from tilebeam.native.llama import Context
from tilebeam.text_state import DECAY, Confidence, Feature, TextState
from tilebeam.training import fitting
from tilebeam.training.collection import FEATURES
from tilebeam.training.options import FitOptions

from bench.lib import ROOT
from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.lib.report import start
from bench.real.__main__ import found_in, model_file, named_models
from bench.real.rows import GSM8K
from bench.real.search_cost import LOGS
from bench.real.sources import MODELS

F16, F32 = npt.NDArray[np.float16], npt.NDArray[np.float32]
OUT = ROOT / "build" / "head-layers"
PARTS: tuple[Feature, ...] = ("last", "recent", "mean")
_WINDOW = 1536  # tokens of prompt and sample at most
_EVERY = 3  # layers
_RESULT = "result_norm"  # behind the last layer; llama.cpp computes it of rows with outputs: of the last token alone


class LayerOutputs(Watch):
    """Takes what comes out of some layers.

    Attributes:
        values: by name, float32 [tokens, n_embd].
    """

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.names = [*(f"l_out-{layer}" for layer in layers), _RESULT]
        self.values: dict[str, F32] = {}
        self._get = ggml_base().ggml_backend_tensor_get
        self._get.restype, self._get.argtypes = None, [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2

    def wants(self, t: Any) -> bool:
        """Those layers' outputs."""
        return name_of(t) in self.names

    def add(self, t: Any) -> None:
        """Copy it, from wherever the device has it."""
        value = np.empty((t.ne[1], t.ne[0]), np.float32)
        self._get(ctypes.addressof(t), value.ctypes.data, 0, value.nbytes)
        self.values[name_of(t)] = value


def kept_samples(model: str) -> dict[int, list[dict[str, Any]]]:
    """The kept samples of a model, by the number of the problem."""
    found = {}
    with lzma.open(LOGS / "gsm8k-log.jsonl.xz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if re.match(rf"{re.escape(model)}/", record.get("unit", "")):
                found |= {int(item["id"]): item["samples"] for item in record["items"]}
    return found


def features(states: F32, sample: dict[str, Any], n_text: int) -> F32:
    """A row of `Collection.states`: all features, of hidden states [tokens, n_embd] of a text of `n_text` tokens."""
    decay = float(DECAY)
    weights = decay ** np.arange(len(states))[::-1, None]
    mean = sample["scores"]["logprob"]
    confidence = Confidence(1, mean, mean**2, mean, mean, sample["finish"] == "stop")
    state = TextState(
        n_text,
        states.sum(0) * (n_text / len(states)),
        (states * weights).sum(0) * ((1 - decay**n_text) / (1 - decay) / weights.sum()),
        states[-1],
        confidence,
    )
    return state.features(FEATURES)


def read(lm: LM, context: Context, watch: LayerOutputs, prompt: str, samples: list[dict[str, Any]]) -> F16:
    """What the layers say of samples: [samples, layers, features]."""
    rows = []
    head = lm.tokenize(prompt, parse_special=True)
    for sample in samples:
        tokens = [*head, *lm.tokenize(sample["text"], add_special=False)][:_WINDOW]
        n = len(tokens)
        context.clear()
        context.token[:n], context.pos[:n], context.seq[:n] = tokens, np.arange(n), 0
        context.output[:n] = np.arange(n) == n - 1
        watch.values.clear()
        status = context.decode(n)
        if watch.error is not None:
            raise watch.error
        if status:
            raise TilebeamError(f"llama.cpp could not decode a sample (status {status}).")
        found = [watch.values[name] for name in watch.names]
        rows.append([features(v[len(head) :] if len(v) == n else v, sample, n - len(head)) for v in found])
    return np.array(rows, np.float16)


def collected(
    name: str, model: Path, problems: Path, layers: list[int], n_samples: int, most: int, folder: Path
) -> tuple[list[dict[str, Any]], F16, list[str]]:
    """Records as of a collection, the states [rows, layers, features], and the layers' names."""
    task = open_task(TaskOptions(f"gsm8k:{problems}"))
    samples = {i: s[:n_samples] for i, s in list(kept_samples(name).items())[:most]}
    files = {i: folder / name / f"{i}.npy" for i in samples}
    (folder / name).mkdir(parents=True, exist_ok=True)
    with tilebeam.load(model, "npu", n_ctx=512, n_seq_max=1) as lm:
        layers = layers or list(range(_EVERY - 1, lm.n_layer - 1, _EVERY))
        watch = LayerOutputs(layers)
        with watched(lm, _WINDOW, lm.info.threads, watch) as context:
            for i in track([i for i in samples if not files[i].exists()], name, console=console.err()):
                states = read(lm, context, watch, task.prompt(task.items[i], lm), samples[i])
                with whole_file(files[i]) as partial, open(partial, "wb") as file:
                    np.save(file, states)
    records = [
        {"unit": str(i), "row": row, "samples": [{"correct": s["correct"], "states": 1} for s in found]}
        for row, (i, found) in zip(range(0, n_samples * len(samples), n_samples), samples.items(), strict=True)
    ]
    states = np.concatenate([np.load(file) for file in files.values()])
    if states.shape[1] != len(watch.names):
        raise TilebeamError(f"{folder / name} holds states of other layers: remove it, or name another --out.")
    return records, states, watch.names


def measured(records: list[dict[str, Any]], states: F16, names: list[str], draws: int) -> Iterator[dict[str, Any]]:
    """A row for each layer and part: AUROC over all samples and within a problem, means over the draws."""
    cases = [(layer, part) for layer in range(len(names)) for part in PARTS]
    cases = [(layer, part) for layer, part in cases if names[layer] != _RESULT or part == "last"]
    for layer, part in track(cases, "Fitting", console=console.err(), transient=True):
        pairs = []
        for draw in range(draws):
            learnt = fitting.samples_of(records, seed=draw)
            options = FitOptions((part, "length", "confidence"), seed=draw)
            scores = fitting.fit(np.ascontiguousarray(states[:, layer]), learnt, options, {}).scores
            right = learnt.correct >= 0.5
            pairs.append((auroc(scores, right), auroc_within(scores, right, learnt.problem)))
        mean = np.mean(pairs, 0)
        yield {"layer": names[layer].removeprefix("l_out-"), "part": part, "all": mean[0], "within": mean[1]}


def table(rows: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Markdown."""
    yield "| model | behind layer | last state | recent states | mean of all |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for model, found in rows.items():
        for layer in dict.fromkeys(row["layer"] for row in found):
            cells = {r["part"]: f"{r['all']:.3f}, {r['within']:.3f}" for r in found if r["layer"] == layer}
            where = "the final norm" if layer == _RESULT else layer
            yield f"| {model} | {where} | {' | '.join(cells.get(part, '') for part in PARTS)} |"


def main() -> None:
    """Read, fit, and print the table."""
    p = Parser(__doc__, "two samples of 20 problems")
    p.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl")
    p.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help=f"instead of {', '.join(MODELS)}")
    p.add_argument("--layers", default="", help="comma separated (default: every third one)")
    p.add_count("--problems", usual=80, quick=20, what="problems")
    p.add_count("--samples", usual=8, quick=2, what="samples of each")
    p.add_argument("--draws", type=int, default=4, help="divisions of the problems (default: 4)")
    p.add_argument("--out", type=Path, default=OUT, help="states and fetched models (default: build/head-layers)")
    p.add_argument("--into", type=Path, help="a document that holds the marks of head-layers")
    options = p.parse()
    if (problems := found_in(options.data, GSM8K)) is None:
        p.error(f"--data: no {' or '.join(GSM8K)} there")
    named = named_models(p, options)
    layers = [int(text) for text in options.layers.split(",") if text]
    rows = {}
    for name in named or MODELS:
        file = model_file(name, named, options)
        found = collected(name, file, problems, layers, options.samples, options.problems, options.out)
        rows[name] = list(measured(*found, options.draws))
    if options.into:
        put_into(options.into, "head-layers", "\n".join(table(rows)))
    print(json.dumps(rows, indent=1) if options.json else "\n".join(table(rows)))


if __name__ == "__main__":
    start(main)
