"""Tilebeam as a model of lm-evaluation-harness: importing this registers it under the name "tilebeam".

    lm_eval.simple_evaluate(model="tilebeam", model_args={"path": "model.gguf"}, tasks=[..])

The command `tilebeam-lm-eval` is the harness's own command line with that model. All requests of a kind are handed over
at once: prompts that begin alike (examples, the context of several choices) are decoded once, and samples share
batches, so the harness's batch size means nothing here; `n_seq_max` does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - the harness fills its table of models only while it is empty
from lm_eval.api import model as harness
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm.auto import tqdm

from tilebeam.errors import TilebeamError
from tilebeam.model.lm import LM
from tilebeam.model.loader import load
from tilebeam.outputs import Likelihood, Progress
from tilebeam.sampling_params import SamplingParams

MAX_TOKENS = 256  # of a generation whose task does not say, as in the harness's other models
# Contexts per call: what is read is shared within a call and, while there is room, between calls.
_TOGETHER = 32
# What tasks may say of a generation, and what it is called here.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"} | {
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


@register_model("tilebeam")
class TilebeamModel(harness.LM):  # type: ignore[misc]
    """A GGUF file as the harness sees it.

    Args:
        path: the file, or an `LM` that is loaded already and stays open.
        device: "npu", "cpu" or "auto".
        seed: of tasks that sample.
        max_gen_toks: tokens of a generation whose task does not say.
        batch_size, max_batch_size: of the harness; ignored.
        options: of `tilebeam.load`: n_ctx, n_seq_max, threads ..; lookup is off unless given, so that a run repeats.

    Raises:
        TilebeamError: an option is unknown, or the model cannot be loaded.
    """

    def __init__(
        self,
        path: str | LM,
        device: str | None = None,
        seed: int = 1234,
        max_gen_toks: int = MAX_TOKENS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        del batch_size, max_batch_size
        known = [name for name in inspect.signature(load).parameters if name not in ("model", "device")]
        if unknown := sorted(options.keys() - set(known)):
            raise TilebeamError(f"--model_args: {unknown[0]!r} is unknown; choose from path, {', '.join(known)}.")
        if device is not None:
            options["device"] = device
        self.lm = path if isinstance(path, LM) else load(path, **{"lookup": False, **options})
        self._seed = seed
        self._max_gen_toks = max_gen_toks

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> TilebeamModel:
        """Make it from --model_args alone: the harness's own --device names one of PyTorch ("cuda:0" unless told)."""
        del additional_config
        return cls(**arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> TilebeamModel:
        """Make it as `create_from_arg_obj` does, from text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # --- what the harness asks --------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the greedy one.

        Texts are cut as `LM.loglikelihoods` says.

        Raises:
            TilebeamError: a text does not fit the context; nothing is cut off.
        """
        pairs: list[tuple[str, str]] = [tuple(request.args) for request in requests]
        contexts: dict[str, dict[str, None]] = {}
        for context, continuation in pairs:
            contexts.setdefault(context, {})[continuation] = None
        found: dict[tuple[str, str], Likelihood] = {}
        every = [(context, list(texts)) for context, texts in contexts.items()]
        total = sum(map(len, contexts.values()))
        with self.lm.keep_prefixes(), tqdm(total=total, desc="continuations", disable=disable_tqdm) as bar:
            for asked in (every[i : i + _TOGETHER] for i in range(0, len(every), _TOGETHER)):
                for (context, texts), results in zip(asked, self.lm.loglikelihoods(asked), strict=True):
                    for text, result in zip(texts, results, strict=True):
                        found[context, text] = result
                        self.cache_hook.add_partial("loglikelihood", (context, text), (result.logprob, result.greedy))
                    bar.update(len(texts))
        return [(found[pair].logprob, found[pair].greedy) for pair in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows as long as the context; every token is scored once.

        The first token of a text follows BOS, or EOS in models without; that of a window the last token of the window
        before. Control tokens spelled out in a text are text.
        """
        first = self.lm.bos if self.lm.bos >= 0 else self.lm.eos
        if first < 0:
            raise TilebeamError("The model has neither BOS nor EOS for a text to begin with.")
        totals = []
        for request in tqdm(requests, desc="texts", disable=disable_tqdm):
            (text,) = request.args
            tokens = self.lm.tokenize(text, add_special=False, parse_special=False)
            windows = get_rolling_token_windows(tokens, first, self.lm.n_ctx - 1, 1)
            scored = self.lm.loglikelihoods([(a, [b]) for a, b in map(make_disjoint_window, windows)])
            totals.append(math.fsum(result.logprob for (result,) in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each context, up to one of its stop strings or its number of tokens.

        Raises:
            TilebeamError: a context and the tokens that it may generate do not fit, or a task asks for what is unknown.
        """
        contexts, params = [], []
        for number, request in enumerate(requests):
            context, said = request.args
            contexts.append(context)
            params.append(self._sampling(said, number))
            self._check_room(context, params[-1])
        if not contexts:
            return []
        with self.lm.keep_prefixes(), tqdm(total=len(contexts), desc="generations", disable=disable_tqdm) as bar:

            def show(state: Progress) -> None:
                bar.update(state.finished - bar.n)

            outputs = self.lm.generate(contexts, params, progress=show)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a conversation; without `add_generation_prompt` its last message is to be continued."""
        return self.lm.chat_prompt(chat_history, continue_final_message=not add_generation_prompt).text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template in force, for the harness's log."""
        if isinstance(chat_template, str):
            raise TilebeamError("A GGUF file has one chat template: give --apply_chat_template without a name.")
        return self.lm.metadata.get("tokenizer.chat_template", "") if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Return the name that the harness's cache of requests goes by."""
        return self.lm.info.path.replace("/", "__")

    # --- generations ------------------------------------------------------------------------------------------------

    def _sampling(self, said: Mapping[str, Any], number: int) -> SamplingParams:
        """Read a task's generation_kwargs. Greedy unless they say otherwise; nothing is cut off unless they say so."""
        left = dict(said)
        until = left.pop("until", None) or []
        lengths = [int(value) for name in _LENGTHS if (value := left.pop(name, None)) is not None]
        sample = left.pop("do_sample", None)
        drawing: dict[str, Any] = {"temperature": 1.0 if sample else 0.0, "top_k": 0, "top_p": 1.0}
        drawing |= {_DRAWING[name]: left.pop(name) for name in list(left) if name in _DRAWING}
        if sample is False:
            drawing["temperature"] = 0.0
        if left:
            raise TilebeamError(f"generation_kwargs: {next(iter(left))!r} is not supported.")
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        limit = lengths[0] if lengths else self._max_gen_toks
        return SamplingParams(max_tokens=limit, stop=stop, seed=self._seed + number, **drawing)

    def _check_room(self, context: str, params: SamplingParams) -> None:
        """Refuse what does not fit: the engine would cut it short, and the harness would not know."""
        tokens = len(self.lm.tokenize(context))
        if tokens + (params.max_tokens or 0) > self.lm.n_ctx:
            raise TilebeamError(
                f"A prompt of {tokens} tokens and {params.max_tokens} more do not fit the context of {self.lm.n_ctx}: "
                "--model_args n_ctx=.."
            )
