"""Trimmed vocabularies: real tokenizers before and after on any text, logits bit for bit, and files that do not fit.

The tokenizers are the vocabulary files in llama.cpp's source distribution, which the build fetched; where it lies
elsewhere, the tests of them are skipped. Tests of metadata, tensors and logits use a random model with a small one.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf_kit import Q, gaussian, only_files, scalar, split_model, with_metadata, write_raw
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tilebeam import gguf as gguf_tools
from tilebeam.gguf import gguf_write as w
from tilebeam.gguf.errors import GGUFError
from tilebeam.gguf.gguf_file import GGUFFile
from tilebeam.gguf.trim_vocab import TrimReport, trim_vocab
from tilebeam.gguf.trim_vocab_llama import LlamaTokenizer
from tilebeam.gguf.trim_vocab_tokens import read_vocabulary

from bench.lib.synth import preset, write_model

Array = np.ndarray[Any, np.dtype[Any]]

ROOT = Path(__file__).resolve().parents[2]
VOCABULARIES = sorted((ROOT / "build" / "ggml-source").glob("*/vendor/llama.cpp/models"))
SWEEPS = "TILEBEAM_TRIM_SWEEPS"  # damaged models per seed, instead of 80
REAL = ("llama-spm", "gpt-2", "llama-bpe", "qwen2")
TEXT = Path(__file__).parents[2] / "README.md"
SAMPLE = "The quick brown fox jumps over the lazy dog.\n\n\tdef f(x): return x ** 2  # naïve café, 数学, 123456\n"


# ---- real tokenizers


def vocabulary_file(name: str) -> Path:
    for folder in VOCABULARIES:
        if (folder / f"ggml-vocab-{name}.gguf").is_file():
            return folder / f"ggml-vocab-{name}.gguf"
    pytest.skip(f"ggml-vocab-{name}.gguf is not in build/ggml-source")


def add_tensors(vocabulary: Path, path: Path) -> Path:
    """A file with this vocabulary and an embedding of 32 numbers for each token."""
    with GGUFFile(vocabulary) as f:
        n = len(read_vocabulary(f).tokens)
        header = ("token_embd.weight", Q.F16, (32, n))
        return write_raw(path, (kv.raw for kv in f.kv.values()), [header], [embedding(n)])


def embedding(n: int) -> Array:
    """Row i tells its number."""
    rows = np.zeros((n, 32), np.float16)
    rows[:, :18] = (np.arange(n)[:, None] >> np.arange(18)) & 1
    return rows


class Pair:
    """A tokenizer, its trimmed self, and which tokens became which."""

    def __init__(self, source: Path, trimmed: Path, report: TrimReport) -> None:
        self.report = report
        self.whole, self.trimmed = LlamaTokenizer(source), LlamaTokenizer(trimmed)
        with GGUFFile(source) as f:
            self.new = np.full(len(read_vocabulary(f).tokens), -1)
        with GGUFFile(trimmed) as f:
            t = f.tensors["token_embd.weight"]
            rows = f.read(t.offset, t.nbytes).view(np.float16).reshape(-1, 32)
            self.old = (rows[:, :18].astype(np.int64) << np.arange(18)).sum(axis=1)
            assert len(read_vocabulary(f).tokens) == len(rows) == report.n_kept
        self.new[self.old] = np.arange(len(self.old))

    def check(self, text: str) -> bool:
        """The same text comes out; the same tokens where all of them are kept. Says whether they are."""
        raw = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
        ids, got = self.whole(raw), self.trimmed(raw)
        assert self.trimmed.text(got) == self.whole.text(ids)
        expected = self.new[ids]
        if (expected < 0).any():
            return False
        assert got.tolist() == expected.tolist()
        return True


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trim")


@cache
def pair(name: str, work: Path) -> Pair:
    source = add_tensors(vocabulary_file(name), work / f"{name}.gguf")
    (work / "corpus.txt").write_bytes(TEXT.read_bytes() + SAMPLE.encode())
    return Pair(
        source, work / f"{name}-t.gguf", trim_vocab(source, work / f"{name}-t.gguf", corpus=[work / "corpus.txt"])
    )


@cache
def words() -> list[str]:
    return TEXT.read_text().split()


def readme_like() -> st.SearchStrategy[str]:
    """Text of the corpus' words, in other orders, cut at other places."""
    parts = st.one_of(
        st.sampled_from(words()), st.text("abeinorst", max_size=6), st.sampled_from(["\n", "  ", "\t", "."])
    )
    return st.builds("".join, st.lists(st.builds(lambda a, b: a + b, st.sampled_from(["", " "]), parts), max_size=30))


@pytest.mark.parametrize("name", REAL)
def test_the_corpus_is_cut_as_before(name: str, work: Path) -> None:
    p = pair(name, work)
    assert p.report.n_kept < p.report.n_vocab // 4
    assert p.report.n_kept % 32 == 0
    assert p.report.corpus_covered == 1
    assert p.report.checked_tokens == p.report.checked_tokens_after == p.report.corpus_tokens
    assert (np.diff(p.old) > 0).all()
    assert p.check(TEXT.read_text())
    kept = sum(p.check(line) for line in TEXT.read_text().splitlines())
    assert kept > 0.5 * len(TEXT.read_text().splitlines())


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80))
@example(text="\ud800 \x00 \U00040000 \U0010ffff ﷺ 👩‍👩‍👧 \u0301\u0301 नमस्ते こんにちは <|im_end|> </s> <0x41>")
def test_any_text_comes_back(name: str, work: Path, text: str) -> None:
    pair(name, work).check(text)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=150, deadline=None)
@given(text=readme_like())
def test_text_of_kept_tokens_is_cut_as_before(name: str, work: Path, text: str) -> None:
    pair(name, work).check(text)


@pytest.mark.parametrize("name", REAL)
def test_kept_tokens_are_cut_as_before(name: str, work: Path) -> None:
    """Every kept token that the whole vocabulary reaches by its own text is reached by it in the trimmed one."""
    p = pair(name, work)
    reached = 0
    for old in p.old.tolist():
        text = p.whole.text(np.array([old], np.int32))
        try:
            reached += p.whole(text).tolist() == [old] and p.check(text.decode())
        except UnicodeDecodeError:
            continue
    assert reached > p.report.kept_corpus / 2


@pytest.mark.parametrize("name", REAL)
def test_special_ids_are_those_of_the_same_tokens(name: str, work: Path) -> None:
    pair(name, work)
    texts = {}
    for path in (work / f"{name}.gguf", work / f"{name}-t.gguf"):
        with GGUFFile(path) as f:
            v = read_vocabulary(f)
            texts[path] = {
                key: v.tokens[kv.value]
                for key, kv in f.kv.items()
                if key.endswith("_token_id") and kv.value < len(v.tokens)
            }
    before, after = texts.values()
    assert before == after
    assert before


@pytest.mark.parametrize("name", ["bert-bge", "nomic-bert-moe", "gemma-4", "falcon"])
def test_other_tokenizers_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    with GGUFFile(vocabulary_file(name)) as f:
        kv = [kv.raw for kv in f.kv.values()]
        source = write_raw(tmp_path / "m.gguf", kv, [("token_embd.weight", Q.F32, (32, 1))])
    with pytest.raises(GGUFError, match=r"tokenizer|byte"):
        trim_vocab(source, tmp_path / "o.gguf", corpus=[TEXT])
    only_files(tmp_path, "m.gguf")


# ---- a small model: metadata, tensors, logits


@pytest.fixture(scope="session")
def model(work: Path) -> Path:
    return write_model(work / "model.gguf", preset("tiny", n_vocab=1536, type="q8_0", tied=False, seed=3))


@pytest.fixture(scope="session")
def corpus(work: Path) -> Path:
    path = work / "small.txt"
    path.write_text("the question is what the answer of the first number is\n" * 3 + "how much more time\n")
    return path


def logits(path: Path, ids: Sequence[int], steps: int = 4) -> Array:
    """Logits of a prompt's last token and of a few decoded ones, on the stock CPU backend."""
    lm = llama_cpp.Llama(str(path), n_ctx=256, verbose=False, n_threads=2, logits_all=True)
    lm.eval(ids[:-steps])
    for token in ids[-steps:]:
        lm.eval([token])
    out = np.array(lm.scores[: len(ids)], np.float32)
    lm.close()
    return out


def mapping(source: Path, trimmed: Path) -> Array:
    """The old number of each new token, by its text."""
    with GGUFFile(source) as a, GGUFFile(trimmed) as b:
        ids = read_vocabulary(a).ids
        return np.array([ids[t] for t in read_vocabulary(b).tokens])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_0", "iq4_nl"])
def test_logits_of_kept_tokens_are_the_same_bits(type: str, tied: bool, work: Path, corpus: Path) -> None:
    arch = "gemma3" if tied else "llama"
    source = write_model(work / f"{type}-{tied}.gguf", preset("tiny", arch=arch, n_vocab=1536, type=type, seed=5))
    trimmed = work / f"{type}-{tied}-t.gguf"
    report = trim_vocab(source, trimmed, corpus=[corpus])
    assert report.n_kept < 1400
    old = mapping(source, trimmed)
    tokens = LlamaTokenizer(trimmed)(corpus.read_bytes())[:40].tolist()
    before, after = logits(source, old[tokens].tolist()), logits(trimmed, tokens)
    assert np.array_equal(before[:, old], after)
    assert len({*before.argmax(axis=1).tolist()}) > 3


def int_array(key: str, values: Sequence[int]) -> bytes:
    return w.kv_u32s(key, []).replace(struct.pack("<IIQ", 9, 4, 0), b"") + struct.pack(
        f"<IIQ{len(values)}i", 9, 5, len(values), *values
    )


def test_metadata_and_tensors_follow_the_tokens(model: Path, corpus: Path, tmp_path: Path) -> None:
    with GGUFFile(model) as f:
        v = read_vocabulary(f)
    gone = next(i for i in range(1500, 1536) if v.tokens[i].startswith("▁t"))
    source = with_metadata(
        model,
        tmp_path / "m.gguf",
        {
            "tokenizer.ggml.eot_token_id": w.kv_u32("tokenizer.ggml.eot_token_id", 1400),
            "tokenizer.ggml.mask_token_id": w.kv_u32("tokenizer.ggml.mask_token_id", 99999),
            "tokenizer.ggml.suppress_tokens": int_array("tokenizer.ggml.suppress_tokens", [gone, 1400, 2]),
            "tokenizer.ggml.cls_token_id": scalar("tokenizer.ggml.cls_token_id", 5, struct.pack("<i", -1)),
            "tokenizer.ggml.odd_token_id": scalar("tokenizer.ggml.odd_token_id", 6, struct.pack("<f", 2.0)),
            "tokenizer.ggml.list_token_id": int_array("tokenizer.ggml.list_token_id", [1, 2]),
            "tokenizer.ggml.wide_token_id": scalar("tokenizer.ggml.wide_token_id", 10, struct.pack("<Q", 1401)),
            "tokenizer.huggingface.json": w.kv_text("tokenizer.huggingface.json", "{}"),
            "tokenizer.chat_template": w.kv_text("tokenizer.chat_template", "{{ messages }}"),
        },
    )
    report = trim_vocab(source, tmp_path / "o.gguf", corpus=[corpus])
    assert any("huggingface" in n for n in report.notes)
    a, b = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "o.gguf")
    old = mapping(source, tmp_path / "o.gguf")
    new = {int(o): i for i, o in enumerate(old)}
    for key, field in a.fields.items():
        if key.startswith("GGUF.") or key == "tokenizer.huggingface.json":
            continue
        before, after = field.contents(), b.fields[key].contents()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
            assert after == [before[i] for i in old], key
        elif key == "tokenizer.ggml.eot_token_id":
            assert after == new[1400]
        elif key == "tokenizer.ggml.wide_token_id":
            assert after == new[1401]
        elif key == "tokenizer.ggml.suppress_tokens":
            assert after == [new[1400], 2]
        elif key == "llama.vocab_size":
            assert after == report.n_kept
        else:
            assert after == before, key
    assert "tokenizer.huggingface.json" not in b.fields
    for s, t in zip(a.tensors, b.tensors, strict=True):
        assert (s.name, s.tensor_type) == (t.name, t.tensor_type)
        expected = s.data[old] if s.name in ("token_embd.weight", "output.weight") else s.data
        assert np.array_equal(t.data, expected)
    assert (tmp_path / "o.gguf").stat().st_size == report.size


def test_ids_that_llama_cpp_assumes_do_not_move(model: Path, corpus: Path, tmp_path: Path) -> None:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")]
    source = with_metadata(model, tmp_path / "m.gguf", dict.fromkeys(keys))
    trim_vocab(source, tmp_path / "o.gguf", corpus=[corpus])
    assert mapping(source, tmp_path / "o.gguf")[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("type", [Q.F32, Q.BF16, Q.Q4_0, Q.Q5_1, Q.Q4_K, Q.Q6_K])
def test_rows_of_any_type_are_whole(type: Any, model: Path, corpus: Path, tmp_path: Path) -> None:
    """Rows of 256 of any type, and a bias for each token, cut as numpy cuts them."""
    with GGUFFile(model) as f:
        n = len(read_vocabulary(f).tokens)
        kv = [r.raw for r in f.kv.values()]
    size = gguf.GGML_QUANT_SIZES[type]
    rows = np.random.default_rng(1).integers(0, 256, (n, 256 // size[0] * size[1])).astype(np.uint8)
    bias = gaussian(1, n, 3)[0]
    headers = [("token_embd.weight", type, (256, n)), ("output.bias", Q.F32, (n,))]
    source = write_raw(tmp_path / "m.gguf", kv, headers, (rows, bias))
    trim_vocab(source, tmp_path / "o.gguf", corpus=[corpus])
    old = mapping(source, tmp_path / "o.gguf")
    got = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "o.gguf").tensors}
    assert np.array_equal(
        np.ascontiguousarray(got["token_embd.weight"]).view(np.uint8).reshape(len(old), -1), rows[old]
    )
    assert np.array_equal(got["output.bias"], bias[old])


def test_options_keep_more_or_fewer(model: Path, corpus: Path, tmp_path: Path) -> None:
    plain = trim_vocab(model, tmp_path / "a.gguf", corpus=[corpus])
    rare = trim_vocab(model, tmp_path / "b.gguf", corpus=[corpus], min_count=2)
    assert rare.kept_corpus < plain.kept_corpus
    assert rare.corpus_covered < 1
    assert rare.checked_tokens_after >= rare.checked_tokens
    with GGUFFile(model) as f:
        v = read_vocabulary(f)
    wanted = v.tokens[1500:1510]
    (tmp_path / "keep.txt").write_text("\n".join([wanted[0].replace("▁", " "), *wanted[1:], ""]))
    listed = trim_vocab(model, tmp_path / "c.gguf", corpus=[corpus], keep_tokens=tmp_path / "keep.txt")
    assert listed.kept_listed == 10
    with GGUFFile(tmp_path / "c.gguf") as f:
        assert {*wanted} <= {*read_vocabulary(f).tokens}
    (tmp_path / "keep.txt").write_text(" the\nno such token\n")
    with pytest.raises(GGUFError, match=r"line 2: 'no such token' is not a token"):
        trim_vocab(model, tmp_path / "d.gguf", corpus=[corpus], keep_tokens=tmp_path / "keep.txt")
    with pytest.raises(ValueError, match="min_count"):
        trim_vocab(model, tmp_path / "d.gguf", corpus=[corpus], min_count=0)
    assert not (tmp_path / "d.gguf").exists()


def test_a_split_model_becomes_one_file(model: Path, corpus: Path, tmp_path: Path) -> None:
    """Two parts as llama-gguf-split names and marks them."""
    split_model(model, tmp_path / "m", [5])
    trim_vocab(model, tmp_path / "a.gguf", corpus=[corpus])
    trim_vocab(tmp_path / "m-00002-of-00002.gguf", tmp_path / "b.gguf", corpus=[corpus])
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_trimmed_model_can_be_packed(model: Path, corpus: Path, tmp_path: Path) -> None:
    trim_vocab(model, tmp_path / "t.gguf", corpus=[corpus])
    gguf_tools.pack(tmp_path / "t.gguf", tmp_path / "t.tb.gguf")
    names = [t.name for t in gguf_tools.manifest(tmp_path / "t.tb.gguf").tensors]
    assert "output.weight" in names
    with pytest.raises(GGUFError, match="unpack it first"):
        trim_vocab(tmp_path / "t.tb.gguf", tmp_path / "o.gguf", corpus=[corpus])


# ---- what is refused


def test_models_that_do_not_fit_are_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    with GGUFFile(model) as f:
        v = read_vocabulary(f)
        kv = {key: r.raw for key, r in f.kv.items()}
    n = len(v.tokens)

    def refused(
        why: str, tensors: list[tuple[str, Any, tuple[int, ...]]], change: dict[str, bytes] | None = None
    ) -> None:
        write_raw(tmp_path / "m.gguf", (kv | (change or {})).values(), tensors)
        with pytest.raises(GGUFError, match=why):
            trim_vocab(tmp_path / "m.gguf", tmp_path / "o.gguf", corpus=[corpus])
        only_files(tmp_path, "m.gguf")

    good = ("token_embd.weight", Q.F32, (32, n))
    refused("is for 64 tokens", [("token_embd.weight", Q.F32, (32, 64))])
    refused("no token embeddings", [("blk.0.attn_q.weight", Q.F32, (32, 32))])
    refused("unknown way", [good, ("hash.weight", Q.F32, (4, n))])
    tokens = [t.encode() for t in v.tokens]
    no_byte = [b"x41" if t == b"<0x41>" else t for t in tokens]
    refused("no token for byte 0x41", [good], texts(no_byte))
    twice = [*tokens[:-1], b"a"]
    no_space = [b"no space" if t == "▁".encode() else t for t in tokens]
    refused("no token for a space", [good], texts(no_space))
    refused("twice", [good], texts(twice))
    cut_off = [*tokens[:-1], b"a\0b"]  # llama.cpp reads "a"
    refused("twice", [good], texts(cut_off))
    refused("one entry for each|different", [good], texts(tokens[:-1]))
    refused("right type", [good], {"tokenizer.ggml.tokens": w.kv_text("tokenizer.ggml.tokens", "a")})


def test_a_model_that_lacks_a_tensor_is_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    with GGUFFile(model) as f:
        kept = [(t.name, t.type, t.ne) for t in f.tensors.values() if t.name != "blk.1.ffn_down.weight"]
        write_raw(tmp_path / "m.gguf", (kv.raw for kv in f.kv.values()), kept)
    with pytest.raises(GGUFError, match=r"cannot load .*m\.gguf: .*'blk\.1\.ffn_down\.weight' not found"):
        trim_vocab(tmp_path / "m.gguf", tmp_path / "o.gguf", corpus=[corpus])
    only_files(tmp_path, "m.gguf")


SWEEP = """
import os, random, sys, traceback
import llama_cpp.llama_cpp
from tilebeam.gguf.errors import GGUFError
from tilebeam.gguf.trim_vocab import trim_vocab

model, corpus, out, seed, count = sys.argv[1:]
raw = open(model, "rb").read()
rng = random.Random(int(seed))
end = raw.index(b"token_embd.weight") + 4096
for _ in range(int(count)):
    damaged = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        near = raw.find(b"tokenizer.ggml.", rng.randrange(end)) + rng.randrange(80)
        at = near if rng.random() < 0.6 else rng.randrange(end)
        damaged[at] = rng.choice([0, 1, 255, rng.randrange(256), damaged[at] ^ 128])
    path = out + ".in"
    open(path, "wb").write(damaged)
    child = os.fork()
    if child == 0:  # an abort of llama.cpp must not end the sweep
        try:
            trim_vocab(path, out, corpus=[corpus], overwrite=True)
        except GGUFError:
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        sys.exit(f"status {status} with bytes {[(i, b) for i, (a, b) in enumerate(zip(raw, damaged)) if a != b]}")
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_models_are_one_error_or_work(seed: int, corpus: Path, tmp_path: Path) -> None:
    small = {"n_vocab": 700, "n_layer": 1, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff": 64}
    model = write_model(tmp_path / "m.gguf", preset("tiny", type="q8_0", **small))
    command = [sys.executable, "-c", SWEEP, model, corpus, tmp_path / "o.gguf", seed, os.environ.get(SWEEPS, "80")]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def texts(tokens: Sequence[bytes]) -> dict[str, bytes]:
    key = "tokenizer.ggml.tokens"
    return {key: w.kv_texts(key, [t.decode() for t in tokens])}


def test_nothing_to_drop_and_no_corpus_are_errors(model: Path, corpus: Path, tmp_path: Path) -> None:
    with GGUFFile(model) as f:
        everything = read_vocabulary(f).tokens
    (tmp_path / "all.txt").write_text("\n".join(everything))
    with pytest.raises(GGUFError, match="nothing to drop"):
        trim_vocab(model, tmp_path / "o.gguf", corpus=[corpus], keep_tokens=tmp_path / "all.txt")
    with pytest.raises(GGUFError, match="corpus is required"):
        trim_vocab(model, tmp_path / "o.gguf", corpus=[])
    with pytest.raises(FileNotFoundError):
        trim_vocab(model, tmp_path / "o.gguf", corpus=[tmp_path / "none.txt"])
    with pytest.raises(GGUFError, match="is the source itself"):
        trim_vocab(model, tmp_path / "all.txt", corpus=[tmp_path / "all.txt"])
    read: list[str] = []
    for bad in (tmp_path, tmp_path / "no" / "o.gguf"):
        with pytest.raises((GGUFError, OSError)):
            trim_vocab(model, bad, corpus=[corpus], progress=lambda what, *_: read.append(what))
    assert not read  # not even the corpus
    (tmp_path / "empty.txt").write_text("")
    report = trim_vocab(model, tmp_path / "o.gguf", corpus=[tmp_path / "empty.txt"])
    assert any("empty" in note for note in report.notes)
    assert text_survives(model, tmp_path / "o.gguf", "any text at all: ünï")


def text_survives(a: Path, b: Path, text: str) -> bool:
    x, y = LlamaTokenizer(a), LlamaTokenizer(b)
    return x.text(x(text.encode())) == y.text(y(text.encode())) == text.encode()


# ---- the program


def program(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilebeam.gguf.trim_vocab_cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_program_reports_in_json_and_words(model: Path, corpus: Path, tmp_path: Path) -> None:
    dry = program(model, tmp_path / "o.gguf", "--corpus", corpus, "--dry-run", "--json", "-q")
    assert dry.returncode == 0, dry.stderr
    assert dry.stderr == ""
    planned = json.loads(dry.stdout)
    only_files(tmp_path)
    done = program(model, tmp_path / "o.gguf", "--corpus", corpus)
    assert done.returncode == 0, done.stderr
    assert f"{planned['n_kept']} kept" in done.stdout
    assert (tmp_path / "o.gguf").stat().st_size == planned["size"]
    assert planned["source_size"] == model.stat().st_size
    only_files(tmp_path, "o.gguf")


def test_the_program_says_what_is_wrong_in_one_line(model: Path, corpus: Path, tmp_path: Path) -> None:
    for args, why in (
        ((corpus, tmp_path / "o.gguf", "--corpus", corpus), "not a GGUF file"),
        ((model, tmp_path / "o.gguf", "--corpus", tmp_path / "none.txt"), "No such file"),
        ((model, tmp_path / "no" / "o.gguf", "--corpus", corpus), "No such file"),
    ):
        done = program(*args, "-q")
        assert done.returncode == 1
        assert done.stderr.startswith("gguf-trim-vocab: ")
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
    only_files(tmp_path)
