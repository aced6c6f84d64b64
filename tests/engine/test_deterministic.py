"""load(deterministic=True): the tokens and log-probabilities of a request are the same bits whatever runs beside it,
for any number of samples and threads, in whatever pieces its prompt is read, on every kernel set; or the load says
why not.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tilebeam
from encoder_kit import ENCODERS, Encoder, write_encoder
from gguf_kit import retyped
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.gguf import weights
from tilebeam.native import executor
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "archs"))
import run as archs

Text = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, and their log-probabilities and statistics

TRAINED = Path(__file__).resolve().parents[2] / "bench" / "tiny" / "models"
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 16, "threads": 2, "deterministic": True}
SEED, SAMPLES = 11, 16


def asked(n: int, seed: int = SEED, temperature: float = 0.9) -> SamplingParams:
    whole = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True, statistics=True, top_k=0, top_p=1)
    return replace(whole, n=n, seed=seed, temperature=temperature)


def texts(lm: LM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[Text]]:
    return [
        [(tuple(s.token_ids), (*(s.logprobs or ()), *(s.entropies or ()), *(s.certainties or ()))) for s in o.outputs]
        for o in lm.generate(prompts, params)
    ]


def drawn_prompts(lm: LM, lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(lm.n_vocab) for _ in range(n)] for n in lengths]


def crowd(lm: LM, prompts: Sequence[Sequence[int]], seed: int) -> list[Text]:
    """Each prompt asked by a thread of its own, at another time, among others that want and bring something else."""
    rng, found, failed = random.Random(seed), dict[int, Text](), list[BaseException]()

    def wait(seconds: float, call: Any) -> None:
        time.sleep(seconds)
        try:
            call()
        except BaseException as error:
            failed.append(error)

    def ask(i: int) -> None:
        found[i] = texts(lm, [prompts[i]], asked(1))[0][0]

    def interfere(length: int, tokens: int, n: int) -> None:
        params = SamplingParams(n=n, max_tokens=tokens, temperature=1.5, ignore_eos=True)
        lm.generate(drawn_prompts(lm, [length], length), params)

    calls = [lambda i=i: ask(i) for i in range(len(prompts))]
    for _ in range(8):
        size = rng.randint(1, 90), rng.randint(1, 30), rng.randint(1, 3)
        calls.append(lambda size=size: interfere(*size))
    threads = [threading.Thread(target=wait, args=(rng.random() / 20, call)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    return [found[i] for i in range(len(prompts))]


@pytest.fixture(params=executor.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sessions that begin in the test have this kernel set."""
    control().configure(isa=request.param)
    yield request.param
    control().configure(isa="")


MODELS: dict[str, dict[str, Any]] = {
    "trained-q4_0": {},
    "q8_0-cache": {"type_k": "q8_0", "type_v": "q8_0"},
    "f32-cache": {"type_k": "f32", "type_v": "f32"},
    "q4_k": {},
    "f16": {},
    "gemma3": {},
}


def model_of(name: str, folder: Path) -> Path:
    if name == "trained-q4_0":
        return TRAINED / "0.5m-q4_0.gguf"
    if name == "gemma3":
        return write_model(folder / "m.gguf", preset("tiny", arch="gemma3", type="q8_0", swa=32, swa_pattern=2))
    return write_model(folder / "m.gguf", preset("tiny", type=name if name in ("q4_k", "f16") else "q4_0"))


@pytest.mark.parametrize("name", MODELS)
def test_a_text_depends_on_nothing_beside_it(isa: str, name: str, tmp_path: Path) -> None:
    path, options = model_of(name, tmp_path), OPTIONS | MODELS[name]
    with tilebeam.load(path, **options, n_batch=48) as lm:
        assert lm.info.deterministic
        assert control().status()["isa"] == isa
        prompts = drawn_prompts(lm, [3, 40, 70])
        for temperature in (0.0, 0.9):
            alone = [
                [texts(lm, [p], asked(1, SEED + i, temperature))[0][0] for i in range(4 if temperature else 1)]
                for p in prompts
            ]
            for n in (4, SAMPLES):
                for prompt, own in zip(prompts, alone, strict=True):
                    got = texts(lm, [prompt], asked(n, SEED, temperature))[0]
                    assert got[: len(own)] == own
                    assert temperature or set(got) == {own[0]}
            together = texts(lm, prompts, asked(5, SEED, temperature))
            assert [t[: len(own)] for t, own in zip(together, alone, strict=True)] == alone
        first = [own[0] for own in alone]
        for seed in range(2):
            assert crowd(lm, prompts, seed) == first
        with lm.keep_prefixes():  # what is kept lies elsewhere, and is not read again
            for _ in range(2):
                assert texts(lm, [[*prompts[1], 5]], asked(1))[0] == texts(lm, [[*prompts[1], 5]], asked(1))[0]
                assert [t[0] for t in texts(lm, prompts, asked(1))] == first
    with tilebeam.load(path, **(options | {"threads": 1, "n_ubatch": 20})) as lm:
        assert [t[0] for t in texts(lm, prompts, asked(1))] == first
        assert [t[0] for t in texts(lm, prompts[::-1], asked(2))] == first[::-1]


def test_without_it_company_changes_log_probabilities() -> None:
    """Were this not so, the test above would show nothing."""
    with tilebeam.load(TRAINED / "0.5m-q4_0.gguf", **(OPTIONS | {"deterministic": False, "lookup": False})) as lm:
        prompts = drawn_prompts(lm, [40, 41, 70])
        alone = [texts(lm, [p], asked(1))[0][0] for p in prompts]
        assert [t[0] for t in texts(lm, prompts, asked(SAMPLES))] != alone


@pytest.mark.parametrize("executor", ["process", "qemu-hexagon"])
def test_on_other_executors(executor: Any) -> None:
    if executor == "qemu-hexagon":
        hexagon_kit = pytest.importorskip("hexagon_kit")
        if (why := hexagon_kit.missing()) is not None:
            pytest.skip(str(why))
    with tilebeam.load(TRAINED / "0.1m-q8_0.gguf", **OPTIONS, executor=executor) as lm:
        prompts = drawn_prompts(lm, [3, 20])
        alone = [texts(lm, [p], asked(1))[0][0] for p in prompts]
        assert [t[0] for t in texts(lm, prompts, asked(6))] == alone


def test_guesses_are_off() -> None:
    path = TRAINED / "0.1m-q8_0.gguf"
    with pytest.raises(TilebeamError, match="deterministic and lookup exclude each other"):
        tilebeam.load(path, **OPTIONS, lookup=True)
    with pytest.raises(TilebeamError, match="deterministic and a draft model exclude each other"):
        tilebeam.load(path, **OPTIONS, draft=path)
    with tilebeam.load(path, **OPTIONS) as lm:
        assert lm.generate([[5, 6, 7] * 9], asked(1))[0].usage.drafted_tokens == 0
        lm.speculate()
        assert lm.generate([[5, 6, 7] * 9], asked(1))[0].usage.drafted_tokens == 0
        for guess in ({"lookup": True}, {"draft": tilebeam.load(path, n_ctx=256, lookup=False)}):
            with pytest.raises(TilebeamError, match="deterministic=True, which guesses no tokens"):
                lm.speculate(**guess)


def test_models_beside_it_keep_their_own_arithmetic() -> None:
    """The mode belongs to a context: others are as fast and as exact as before, in whichever order they are loaded."""
    path, plain = TRAINED / "0.5m-q4_0.gguf", OPTIONS | {"deterministic": False, "lookup": False}
    with tilebeam.load(path, **plain) as before:
        prompts = drawn_prompts(before, [40])
        want = texts(before, prompts, asked(4))
        with tilebeam.load(path, **OPTIONS) as lm, tilebeam.load(path, **plain) as behind:
            exact = texts(lm, prompts, asked(4))
            assert texts(before, prompts, asked(4)) == texts(behind, prompts, asked(4)) == want
            assert texts(lm, prompts, asked(4)) == exact != want
            control().configure(numerics="fp16", softmax="exact")
            try:
                assert texts(lm, prompts, asked(4)) == exact
            finally:
                control().configure(numerics="int8", softmax="table")
        assert not control().options()["deterministic"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, "deterministic needs the NPU"),
        ({"flash_attn": False}, "deterministic needs flash attention"),
        ({"n_seq_max": 4, "n_batch": 15}, "deterministic needs n_batch of at least 16"),
        ({"n_gpu_layers": 1}, "of the bytes of its weight matrices run on the CPU backend, because n_gpu_layers"),
    ],
)
def test_options_that_stand_in_the_way(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(TilebeamError, match=reason):
        tilebeam.load(TRAINED / "0.1m-q8_0.gguf", **(OPTIONS | options))


def test_matrices_on_the_cpu_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(weights.TB_TYPE, gguf.GGMLQuantizationType.NVFP4)
    whole = write_model(tmp_path / "whole.gguf", preset("tiny", type="q8_0"))
    path = retyped(whole, tmp_path / "m.gguf", {"ffn_down": gguf.GGMLQuantizationType.NVFP4})
    with pytest.raises(TilebeamError, match=r"m\.gguf cannot be deterministic: .* matrices of NVFP4"):
        tilebeam.load(path, **OPTIONS)


WAYS = {"grok-moe": "read a text in another way", "minimax-01-moe": "read a text in another way"}
CHOOSES = {"glm5-next-moe": "how full the cache is"}
RECURRENT = ("qwen35-dense", "mamba2-dense", "lfm2-dense")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "|".join(name.rpartition("-")[0] for name in (*WAYS, *CHOOSES, *RECURRENT))
    return {path.stem: path for path in archs.save(f"^({names})$", tmp_path_factory.mktemp("families"))}


@pytest.mark.parametrize(("name", "reason"), (WAYS | CHOOSES).items())
def test_families_that_stand_in_the_way(families: dict[str, Path], name: str, reason: str) -> None:
    with pytest.raises(TilebeamError, match=f"cannot be deterministic: .*{reason}"):
        tilebeam.load(families[name], **OPTIONS)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(families: dict[str, Path], name: str) -> None:
    with tilebeam.load(families[name], **OPTIONS, n_batch=48) as lm:
        prompts = drawn_prompts(lm, [3, 40, 70])
        alone = [texts(lm, [p], asked(1))[0][0] for p in prompts]
        assert [t[0] for t in texts(lm, prompts, asked(5))] == alone
        assert crowd(lm, prompts, 3) == alone


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_embeddings_and_ranks(tmp_path: Path, encoder: Encoder) -> None:
    """Of a text alone and of one among others."""
    path = write_encoder(tmp_path / "m.gguf", encoder)
    with tilebeam.load(path, **OPTIONS) as lm:
        rng = random.Random(2)
        some = [[rng.randrange(5, lm.n_vocab) for _ in range(n)] for n in (5, 30, 17, 2, 60)]
        read = lm.rank if encoder.labels else lm.embed
        together = read(some)
        assert [read([text])[0].tobytes() for text in some] == [row.tobytes() for row in together]
