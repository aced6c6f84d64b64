"""How reward models want prompt and steps to be written, and the formats of models that are published.

A format is a few strings with `{prompt}` and `{step}` in them. What stands around the placeholders may hold control
tokens; what is put in their place is read as plain text, so that a solution cannot spell the tag and praise itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.prompt import Prompt
from tilebeam.scoring.scoring_defaults import HeadOutput, Kind

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

KINDS: dict[Kind, str] = {
    "token": "probability of one label token against another's behind each step",
    "value-head": "linear layer on the hidden state, weights in a file of their own",
    "two-label": "layers with ReLU and a softmax over labels, weights in a file of their own",
    "classifier": "the classifier that the GGUF file holds itself (cls.output)",
}


@dataclass(frozen=True)
class RewardFormat:
    """The text that a reward model reads: head, then for each step the step and the tag, whose last token is judged.

    Attributes:
        head: before the first step, with {prompt}.
        step: each step, with {step}.
        first: the first step, None if it looks like the others.
        tag: what follows every step; the verdict is read at its last token, or at the step's if it is empty.
        strip: characters taken off both ends of a step.
        bos: begin with the BOS token even if the model does not ask for one.
    """

    head: str = "{prompt}"
    step: str = "{step}"
    first: str | None = None
    tag: str = ""
    strip: str = ""
    bos: bool = False

    def __post_init__(self) -> None:
        for name, placeholder in (("head", "{prompt}"), ("step", "{step}"), ("first", "{step}")):
            text = getattr(self, name)
            if text is not None and text.count(placeholder) != 1:
                raise TilebeamError(f"The {name} of a reward format must hold {placeholder} once, not {text!r}.")


@dataclass(frozen=True)
class Preset:
    """A published kind of reward model.

    Attributes:
        kind: how it gives its verdict.
        format: how it wants its text.
        about: one line.
        good, bad: label tokens (kind "token").
        label: number of the good label (softmax over labels).
        output: "sigmoid", "softmax" or "none" (kinds with a head).
        outcome: it judges a solution as a whole.
        names: parts of a model's name that tell it.
    """

    kind: Kind
    format: RewardFormat
    about: str
    good: str = "+"
    bad: str = "-"
    label: int = 1
    output: HeadOutput | None = None
    outcome: bool = False
    names: tuple[str, ...] = ()


_LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
_LLAMA3_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
_RLHFLOW = _LLAMA3.format("system") + _LLAMA3_DATES + _LLAMA3.format("user") + "{prompt}"
_CHATML_USER = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"

PRESETS: dict[str, Preset] = {
    "math-shepherd": Preset(
        "token",
        RewardFormat(first=" {step}", step="\n{step}", tag=" ки", strip="\n"),
        'tag " ки" at the end of each step, then + or - (math-shepherd-mistral-7b-prm)',
        names=("math-shepherd",),
    ),
    "rlhflow": Preset(
        "token",
        RewardFormat(
            head=_RLHFLOW,
            first=" {step}",
            step="+<|eot_id|>" + _LLAMA3.format("user") + "{step}",
            tag="<|eot_id|>" + _LLAMA3.format("assistant"),
            strip=" \t\r\n",
        ),
        "a chat: each step a user's turn, the assistant answers + or - (Llama3.1-8B-PRM-Deepseek-Data, -Mistral-Data)",
        names=("llama3.1-8b-prm",),
    ),
    "rlhflow-orm": Preset(
        "token",
        RewardFormat(head=_RLHFLOW, first=" {step}", tag="<|eot_id|>" + _LLAMA3.format("assistant")),
        "a chat of one turn, the assistant answers + or - (Llama3.1-8B-ORM-Deepseek-Data, -Mistral-Data)",
        outcome=True,
        names=("llama3.1-8b-orm",),
    ),
    "qwen2.5-math-prm": Preset(
        "two-label",
        RewardFormat(
            head="<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
            "<|im_end|>\n" + _CHATML_USER,
            tag="<extra_0>",
            strip=" \t\r\n",
        ),
        "<extra_0> behind each step, two layers, softmax over bad and good (Qwen2.5-Math-PRM-7B, -72B)",
        names=("qwen2.5-math-prm", "math-prm-7b", "math-prm-72b"),
    ),
    "skywork-o1-prm": Preset(
        "value-head",
        RewardFormat(head="{prompt}\n", tag="\n", strip="\n", bos=True),
        "a linear layer at the line break behind each step, sigmoid (Skywork-o1-Open-PRM-Qwen-2.5-1.5B, -7B)",
        output="sigmoid",
        names=("skywork-o1-open-prm", "skywork-o1-prm"),
    ),
    "trl": Preset(
        "two-label",
        RewardFormat(tag="\n", strip="\n"),
        "token classification at the line break behind each step (models of TRL's PRMTrainer)",
        output="softmax",
    ),
    "chatml-outcome": Preset(
        "value-head",
        RewardFormat(head=_CHATML_USER, tag="<|im_end|>\n"),
        "sequence classification of a ChatML conversation, raw score at its end",
        output="none",
        outcome=True,
    ),
    "llama3-outcome": Preset(
        "value-head",
        RewardFormat(
            head=_LLAMA3.format("user") + "{prompt}<|eot_id|>" + _LLAMA3.format("assistant"), tag="<|eot_id|>"
        ),
        "sequence classification of a Llama 3 conversation, raw score at its end (Skywork-Reward-*-Llama-3*)",
        output="none",
        outcome=True,
    ),
}


def preset(name: str) -> Preset:
    """Look up a preset.

    Raises:
        TilebeamError: there is none.
    """
    if name not in PRESETS:
        raise TilebeamError(f"Unknown reward preset {name!r}: choose from {', '.join(PRESETS)}.")
    return PRESETS[name]


def preset_of(model_name: str) -> str | None:
    """Guess the preset from a model's name; None if it tells none."""
    flat = model_name.lower().replace("_", "-").replace(" ", "-")
    return next((name for name, p in PRESETS.items() if any(part in flat for part in p.names)), None)


class Layout:
    """A format in the tokens of one model.

    Parts are tokenized one by one, so that the tokens of a solution are those of its beginning and more; the tokenizer
    sees each part as what it is, the middle of a text.

    Args:
        lm: the reward model.
        format: how it wants its text.
    """

    def __init__(self, lm: LM, format: RewardFormat) -> None:
        self._lm = lm
        self._format = format
        lead = lm.tokenize("\n", add_special=False)
        # SentencePiece vocabularies may put a space before a text; none belongs into the middle of one.
        self._lead = lead if lm.detokenize(lead).startswith(" ") else []
        self.tag = self._inside(format.tag, control=True)
        self._head = lru_cache(maxsize=256)(self._make_head)
        self._step = lru_cache(maxsize=4096)(self._make_step)

    def head(self, prompt: str | Prompt) -> list[int]:
        """Return the tokens before the first step: the prompt's question, as the format wants it."""
        return list(self._head(Prompt.of(prompt)))

    def step(self, text: str, first: bool) -> list[int]:
        """Return the tokens of a step, without the tag."""
        return list(self._step(text, first))

    def _make_head(self, prompt: Prompt) -> tuple[int, ...]:
        before, after = self._format.head.split("{prompt}")
        question, lm = prompt.asked, self._lm
        if not before and not after:  # a bare text is the model's own, with what control tokens it has
            tokens = lm.tokenize(question, parse_special=prompt.question is None)
        elif not before:
            tokens = lm.tokenize(question, parse_special=False) + self._inside(after, control=True)
        else:
            lone = before.rstrip(" ")
            tokens = lm.tokenize(lone) + self._inside(before[len(lone) :] + question, control=False)
            tokens += self._inside(after, control=True)
        if self._format.bos and lm.bos >= 0 and tokens[:1] != [lm.bos]:
            tokens = [lm.bos, *tokens]
        return tuple(tokens)

    def _make_step(self, text: str, first: bool) -> tuple[int, ...]:
        form = self._format
        template = form.first if first and form.first is not None else form.step
        before, after = template.split("{step}")
        lone = before.rstrip(" ")  # a space belongs to the word that follows, as tokenizers see it
        text = before[len(lone) :] + (text.strip(form.strip) if form.strip else text)
        return (*self._inside(lone, True), *self._inside(text, False), *self._inside(after, True))

    def _inside(self, text: str, control: bool) -> list[int]:
        """Return the tokens of a text that follows other text."""
        if not text:
            return []
        if self._lead:
            tokens = self._lm.tokenize("\n" + text, add_special=False, parse_special=control)
            if tokens[: len(self._lead)] == self._lead:
                return tokens[len(self._lead) :]
        return self._lm.tokenize(text, add_special=False, parse_special=control)
