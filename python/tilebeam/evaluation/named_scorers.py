"""The scorers of an evaluation by name.

logprob          the model's own log-probability per token
logprob-sum      of the whole text
tail-entropy     how sure the model was of the last tokens
verifier         the task's own checker, which knows the answer: an upper bound for real scorers
examples         the share of the examples in a question's docstring that a program passes
behavior         the same, then how many other programs give the same values
prm, orm         the reward model that the options name
head             the reward head on the generator's own hidden states
adapter          the generator with its reward adapter
FILE.py:function a function of prompt and text that returns a score; searches by steps ask it after every step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.functions import is_function_name, load_function, source_digest
from tilebeam.prompt import Prompt
from tilebeam.sandbox import need_confinement
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.reward_model import StepScorer
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.scoring.scorers import Scorer, Verifier
from tilebeam.scoring.scoring_defaults import RUN_PROGRAMS, STEP_STOP

OWN, ADAPTER = "head", "adapter"
REWARDS = ("prm", "orm", OWN, ADAPTER)
VERIFIER = "verifier"


class FunctionScorer(StepScorer):
    """A function of prompt and text, asked of a text up to each of its steps; a whole text's score is the last.

    Args:
        function: gets the prompt's text and another one; returns a number, or True or False for 1 and 0.
        step_stop: what ends a step.
    """

    knows = True

    def __init__(self, function: Callable[[str, str], float | bool], *, step_stop: str = STEP_STOP) -> None:
        super().__init__(step_stop=step_stop)
        self._function = function

    def score_steps(self, prompts: Sequence[str | Prompt], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        """Rate the first step, the first two, and so on, by the function."""
        return [
            [float(self._function(Prompt.of(prompt).text, "".join(steps[: i + 1]))) for i in range(len(steps))]
            for prompt, steps in zip(prompts, solutions, strict=True)
        ]


def reward_name(reward: RewardSpec | None) -> str | None:
    """Name a reward model as scorers do: "prm", "orm", "head" or "adapter"; None for none."""
    if reward is None:
        return None
    if not reward.own:
        return "orm" if reward.outcome else "prm"
    return ADAPTER if any(head.adapter for head in reward.own_heads) else OWN


def knows(name: str) -> bool:
    """Return whether a scorer checks texts; see `Scorer.knows`."""
    return name in (VERIFIER, "examples") or is_function_name(name)


def check_scorer(name: str, reward: str | None, *, unsafe_code: bool = False) -> None:
    """Raise `TilebeamError` if there is no such scorer.

    Args:
        reward: `reward_name` of the reward model that options name.
        unsafe_code: programs may run where they cannot be confined.
    """
    if name == "consensus":
        raise TilebeamError("--scorer consensus is not supported: its scores depend on which texts are compared.")
    if name in REWARDS:
        if name != reward:
            option = "reward-head" if name in (OWN, ADAPTER) else name
            raise TilebeamError(f"--scorer {name} needs a reward model: --{option} FILE.")
    elif name != VERIFIER and not is_function_name(name):
        named_scorer(name)
        if name in RUN_PROGRAMS:
            need_confinement(unsafe=unsafe_code)


def sources(names: Sequence[str]) -> dict[str, str]:
    """Digest the source of each function among the scorers."""
    return {name: source_digest(load_function(name, "--scorer")) for name in names if is_function_name(name)}


def rates_steps(name: str) -> bool:
    """Tell whether searches by steps can use a scorer."""
    return name in REWARDS or is_function_name(name)


def is_weight(name: str) -> bool:
    """Tell whether a scorer can weigh votes: log-probabilities per token (as exp), reward models and functions (as they
    are). Votes that the verifier weights would be its own verdict."""
    return rates_steps(name) or name == "logprob"


def needs(names: Sequence[str]) -> dict[str, bool | str]:
    """Return the fields of `SamplingParams` with which samples are drawn for scorers that are no reward models."""
    wanted: dict[str, bool | str] = {}
    for name in names:
        if not rates_steps(name) and name != VERIFIER:
            wanted |= named_scorer(name).needs()
    return wanted


def modelless_scorer(
    name: str, verdict: Callable[[str, str], float], step_stop: str, *, unsafe_code: bool = False
) -> Scorer:
    """Make a scorer that needs no model of its own.

    Args:
        verdict: the verifier's, of prompt and text.
        step_stop: what ends a step.
        unsafe_code: programs may run where they cannot be confined.
    """
    if name == VERIFIER:
        return Verifier(verdict)
    if is_function_name(name):
        return FunctionScorer(load_function(name, "--scorer"), step_stop=step_stop)
    return named_scorer(name, unsafe_code=unsafe_code)
