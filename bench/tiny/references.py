"""What is agreed about the files in bench/tiny/models: names, the reward model's format, texts of the references."""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).resolve().parent / "models"
LOGITS = MODELS / "logits.npz"  # float32 [tokens, vocabulary] as PyTorch computes them, by "name/text"

REASONERS = ("0.1m", "0.5m", "3.1m")
PRM = "prm"
HYBRID, MIXTURE = "hybrid", "mixture"  # reasoners of other families: lfm2, qwen3moe
THINKER = "thinker"
THINKERS_TERMS = (2, 8)  # numbers in its problems
TAG, GOOD, BAD = "?", "+", "-"  # what ends a step for the reward model, and its verdicts

# The thinker's conversations, in DeepSeek-R1's form: the template opens the thoughts, and drops those of former turns.
USER, ASSISTANT, THINK, ANSWER = CONTROLS = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    f"{USER}{{{{ m.content }}}}"
    "{% else %}"
    f"{ASSISTANT}{{{{ m.content.split('{ANSWER}')[-1] }}}}{{{{ eos_token }}}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    f"{ASSISTANT}{THINK}\n"
    "{% endif %}"
)

# A right solution and a wrong one.
TEXTS = ("9-4+7*3-8\n9-4+21-8\n5+21-8\n26-8\n18\n", "6*7+5-9\n42+5-9\n57-9\n48\n")


def file_of(name: str, kind: str) -> Path:
    return MODELS / f"{name}-{kind}.gguf"


def asked(problem: str) -> str:
    """Return a problem as the thinker's template puts it, without BOS."""
    return f"{USER}{problem}{ASSISTANT}{THINK}\n"


def as_read(name: str, text: str) -> str:
    """Return a problem and its solution as models read them: for the reward model with a tag behind each line, for the
    thinker as thoughts and an answer."""
    problem, *lines = text.splitlines(keepends=True)
    if name == THINKER:
        return asked(problem.strip()) + "".join(lines) + f"{ANSWER}\n\n{lines[-1].strip()}"
    return text if name != PRM else problem + "".join(line + TAG for line in lines)
