"""Models whose file has no tokenizer: token ids in, token ids out, and texts refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tilebeam
from gguf_kit import with_metadata
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write as w

from bench.lib.synth import preset, write_model

IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with a tokenizer and without, the latter also repacked."""
    folder = tmp_path_factory.mktemp("no_vocab")
    whole = write_model(folder / "whole.gguf", preset("tiny", n_layer=1, type="q8_0"))
    with gguf_tools.GGUFFile(whole) as f:
        changes: dict[str, bytes | None] = {key: None for key in f.kv if key.startswith("tokenizer.")}
        n_vocab = f.tensors["token_embd.weight"].ne[1]
    changes["tokenizer.ggml.model"] = w.kv_text("tokenizer.ggml.model", "no_vocab")
    changes["llama.vocab_size"] = w.kv_u32("llama.vocab_size", n_vocab)
    without = with_metadata(whole, folder / "without.gguf", changes)
    gguf_tools.pack(without, folder / "packed.gguf")
    return {"whole": whole, "without": without, "packed": folder / "packed.gguf"}


@pytest.fixture(params=[("without", "cpu"), ("without", "npu"), ("packed", "npu")], ids="-".join)
def lm(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[LM]:
    name, device = request.param
    with tilebeam.load(paths[name], device, n_ctx=256, n_seq_max=2, threads=1) as model:
        yield model


def test_tokens_are_generated(lm: LM, paths: dict[str, Path]) -> None:
    params = SamplingParams(n=2, max_tokens=12, seed=1, ignore_eos=True, logprobs=True, repeat_penalty=1.1)
    [output] = lm.generate([IDS], params)
    with tilebeam.load(paths["whole"], lm.device, n_ctx=256, n_seq_max=2, threads=1) as whole:
        [expected] = whole.generate([IDS], params)
    assert [s.token_ids for s in output.outputs] == [s.token_ids for s in expected.outputs]
    assert (output.prompt, output.prompt_token_ids) == ("", IDS)
    assert [s.text for s in output.outputs] == ["", ""]
    assert (lm.bos, lm.eos, lm.adds_bos) == (-1, -1, False)
    assert (lm.detokenize(IDS), lm.piece(5), lm.is_control(1)) == ("", b"", False)
    with lm.stream(IDS, SamplingParams(max_tokens=4)) as stream:
        assert sum(len(delta.token_ids) for delta in stream) == 4
    assert lm.read([IDS], [[-1]])[0].logits.shape == (1, lm.n_vocab)


@pytest.mark.parametrize(
    "ask",
    [
        lambda lm: lm.generate("the"),
        lambda lm: lm.tokenize("the"),
        lambda lm: lm.generate([IDS], SamplingParams(stop="a")),
        lambda lm: lm.generate([IDS], SamplingParams(grammar='root ::= "a"')),
        lambda lm: tilebeam.SelfConsistency(tilebeam.last_number).infer(lm, "the", 2),
    ],
)
def test_texts_are_refused(lm: LM, ask: Callable[[LM], object]) -> None:
    with pytest.raises(TilebeamError, match="has no tokenizer"):
        ask(lm)
    with pytest.raises(TilebeamError, match="has no tokenizer"):
        lm.chat_prompt([{"role": "user", "content": "hi"}])
    assert lm.generate([IDS], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
