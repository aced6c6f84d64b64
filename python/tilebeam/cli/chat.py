"""`tilebeam chat`: a conversation with a model, on a terminal or line by line through a pipe."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.options import ModelOptions, SamplingOptions, grouped, option, tell_thoughtless
from tilebeam.errors import SearchCancelled, TilebeamError
from tilebeam.gguf.whole_file import os_error, whole_file
from tilebeam.scoring.scoring_defaults import ScorerName
from tilebeam.text_files import read_text

if TYPE_CHECKING:
    from tilebeam.chat.prepared import PreparedChat
    from tilebeam.model.lm import LM
    from tilebeam.outputs import CompletionOutput, Progress, Usage
    from tilebeam.sampling_params import SamplingParams
    from tilebeam.search.contract import Algorithm, Generator, SearchResult
    from tilebeam.search.events import SearchEvent

_HELP = {
    "/think [N] [QUESTION]": "answer N times (8), with programs that are run, and let the answers vote; without "
    "QUESTION what was asked last",
    "/best [N] [QUESTION]": "answer N times (8) and take the text that is rated best",
    "/regen": "answer the last question anew",
    "/system [TEXT]": "set the system prompt, or take it away",
    "/reset": "forget the conversation, but for the system prompt",
    "/save FILE": "write the conversation as JSON messages",
    "/load FILE": "go on with a conversation",
    "/help": "show this",
}
_SAMPLES = 8
_LEAST_ROOM = 16  # tokens; an answer that the context has no more room for is none


@grouped
def chat(
    model: ModelOptions,
    drawing: SamplingOptions,
    first: str | None = option(None, "-p", "--prompt", help="What to ask first."),
    system: str | None = option(
        None, "-sys", "--system", "--system-prompt", help="The system prompt.", show_default=False
    ),
    extract: str = option("gsm8k", help="An answer for the votes of /think; see tilebeam vote."),
    scorer: ScorerName | None = option(None, metavar="NAME", help="What /best rates texts by: see tilebeam best-of-n."),
) -> None:
    """Talk with a model: answers stream, and each turn reads only what is new. /help lists the commands.

    Ctrl-C stops an answer, Ctrl-D ends the conversation. In a pipe every line is a question.

    Example: tilebeam chat -m model.gguf --system "Answer in one or two sentences."
    """
    from tilebeam.scoring.scorer_names import named_scorer
    from tilebeam.search import algorithms

    vote, params = algorithms.create("self-consistency", extract=extract), drawing.params()
    with model.load(model.parallel) as lm, lm.keep_prefixes():
        if lm.chat_template is None:
            raise TilebeamError(
                f"{lm.info.path} has no chat template: it is a base model. tilebeam generate continues a text with it."
            )
        tell_thoughtless(params, lm.chat_template)
        best = algorithms.create("best-of-n", scorer=named_scorer(scorer, lm) if scorer else None)
        talk = _Talk(lm, drawing, params, {"/think": vote, "/best": best})
        talk.set_system(system or "")
        if _on_terminal():
            console.err().print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
            if first:
                print(f"> {first}")
        failed = _converse(talk, first)
    if failed and not _on_terminal():
        raise typer.Exit(1)


def _converse(talk: _Talk, first: str | None) -> bool:
    """Carry out lines until they end; return whether one failed."""
    read, line, failed = _reader(), first, False
    while True:
        try:
            line = read() if line is None else line
            talk.take(line)
        except EOFError:
            return failed
        except KeyboardInterrupt:
            if not _on_terminal():
                raise
            console.err().print("stopped" if line is not None else "Ctrl-D leaves", style="dim")
        except (TilebeamError, OSError) as error:
            if talk.lm.failure is not None:
                raise
            failed = True
            text = os_error(error) if isinstance(error, OSError) else str(error)
            console.err().print(text, style="red", markup=False, soft_wrap=True)
        line = None


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _reader() -> Callable[[], str]:
    """Return what reads a line: with editing, history and completion of commands on a terminal."""
    if not _on_terminal():
        return input
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.shortcuts import CompleteStyle
    except ImportError:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history
        return lambda: input("> ")
    session: Any = PromptSession(
        completer=WordCompleter([usage.split()[0] for usage in _HELP], sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )
    return lambda: str(session.prompt("> "))


@dataclass
class _Talk:
    """A conversation.

    Attributes:
        lm, drawing, params: the model, and how answers are drawn.
        searches: what chooses among several answers, by command.
        messages: what was said.
        drawn: answers so far; each has a seed of its own.
    """

    lm: LM
    drawing: SamplingOptions
    params: SamplingParams
    searches: Mapping[str, Algorithm[SearchResult]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    drawn: int = 0

    def take(self, line: str) -> None:
        """Carry out a line: a command or a question.

        Raises:
            TilebeamError: it cannot be done; nothing has changed.
            KeyboardInterrupt: the answer was stopped before there was any.
        """
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if not line.startswith("/"):
            return self._answer(line, self._stream) if line.strip() else None
        match name:
            case "/think" | "/best":
                self._search(name, rest)
            case "/regen":
                self._answer("", self._stream)
            case "/system":
                self.set_system(rest)
            case "/reset":
                self.messages = self.messages[: self._has_system()]
            case "/save" | "/load":
                self._file(name, rest)
            case "/help":
                for usage, meaning in _HELP.items():
                    console.err().print(f"{usage:24}{meaning}", markup=False, soft_wrap=True)
            case _:
                raise TilebeamError(
                    f"There is no {name}; /help lists the commands. A space before it makes it a message."
                )
        return None

    def set_system(self, text: str) -> None:
        """Set the system prompt, "" for none."""
        messages = [*([{"role": "system", "content": text}] if text else []), *self.messages[self._has_system() :]]
        self._check(messages)
        self.messages = messages

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def _check(self, messages: list[dict[str, Any]]) -> None:
        """Raise `TilebeamError` if the model's template does not take these."""
        asked = bool(messages) and messages[-1]["role"] == "user"
        self.lm.chat_prompt(messages if asked else [*messages, {"role": "user", "content": "?"}])

    def _file(self, name: str, path: str) -> None:
        """Write the conversation, or read one."""
        if not path:
            raise TilebeamError(f"Name the file: {name} talk.json")
        if name == "/save":
            with whole_file(path) as partial:
                partial.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        try:
            messages = json.loads(read_text(Path(path)))
        except (ValueError, RecursionError) as error:
            raise TilebeamError(f"{path} is not JSON: {error}.") from None
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise TilebeamError(f"{path} is no list of messages with roles.")
        self._check(messages)
        self.messages = messages
        console.err().print(f"{len(messages)} messages", style="dim")

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, text: str, draw: Callable[[], CompletionOutput]) -> None:
        """Answer a text, "" for what was asked last, and keep both; nothing is kept if there is no answer."""
        former = list(self.messages)
        while not text and self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        if text:
            self.messages.append({"role": "user", "content": text})
        elif len(self.messages) == self._has_system():
            self.messages = former
            raise TilebeamError("Nothing was asked yet.")
        try:
            self.messages.append(draw().message)
        except BaseException:
            self.messages = former
            raise

    def _prepared(self, samples: int, ahead: Sequence[dict[str, Any]] = ()) -> PreparedChat:
        """Make the chat ready to be answered, behind these messages; raise `TilebeamError` if the context is full."""
        params = replace(self.params, seed=self.params.sample_seed(self.drawn))
        ready = self.lm.prepare_chat([*ahead, *self.messages], params)
        used = len(ready.prompt.ids)
        if used + _LEAST_ROOM > self.lm.n_ctx:
            raise TilebeamError(
                f"The conversation has {used} tokens, the context {self.lm.n_ctx}: no answer fits in. /save FILE keeps "
                f"it, /reset begins anew, and tilebeam chat -c {2 * self.lm.n_ctx} has room for more."
            )
        self.drawn += samples
        return ready

    def _stream(self) -> CompletionOutput:
        """Answer once, and print the text as it comes; of an answer that is stopped what there is stays."""
        ready = self._prepared(1)
        stream = self.lm.stream(ready.prompt, ready.params)
        text, thoughts = "", ""
        screen = console.out()
        with _stopped_by_ctrl_c(stream.cancel):
            for delta in ready.read_stream(stream):
                if _on_terminal() and delta.reasoning:
                    screen.print(delta.reasoning, style="dim", end="", markup=False, soft_wrap=True)
                if _on_terminal() and delta.text and thoughts and not text:
                    print("\n")
                text, thoughts = text + delta.text, thoughts + delta.reasoning
                print(delta.text, end="", flush=True)
        print(flush=True)
        output = stream.output
        if output.outputs[0].finish_reason == "aborted" and not text.strip():
            raise KeyboardInterrupt
        self._account(output.usage, output.outputs[0], len(ready.prompt.ids))
        return replace(output.outputs[0], text=text, reasoning=thoughts or None)

    def _search(self, name: str, rest: str) -> None:
        """Answer many times, show the candidates as they end, and choose one."""
        number, _, question = rest.partition(" ")
        sum_ = question.lstrip()[:1] in tuple("+-*/^=<>%")  # 17 + 25 asks for one
        if not number.isdecimal() or len(number) > 9 or sum_:
            number, question = str(_SAMPLES), rest
        if int(number) < 1:
            raise TilebeamError(f"{name} {number}: at least one answer has to be drawn.")
        self._answer(question.strip(), lambda: self._chosen(name, int(number)))

    def _chosen(self, name: str, samples: int) -> CompletionOutput:
        from tilebeam.cli.search_view import one_line
        from tilebeam.outputs import RequestOutput
        from tilebeam.search.contract import VoteResult
        from tilebeam.search.tool_forms import beginning
        from tilebeam.search.tool_reasoning import ToolGenerator, confined

        source: Generator = self.lm
        with suppress(TilebeamError):  # programs in its samples run where they can be confined
            source = self.lm if self.params.constrained else ToolGenerator(self.lm, confined())
        asks = name == "/think" and not self._has_system()
        ready = self._prepared(samples, beginning(self.lm.chat_template) if asks and source is not self.lm else ())
        params = self.drawing.fitted(ready.params, self.lm, [ready.prompt], samples)
        stop = threading.Event()
        try:
            with _stopped_by_ctrl_c(stop.set), console.bar("candidates") as bar:
                task = bar.add_task("", total=samples, note="")

                def moved(state: Progress) -> bool:
                    bar.update(task, completed=state.finished, note=f"{state.tokens} tokens")
                    return not stop.is_set()

                def told(event: SearchEvent) -> None:
                    bar.console.print(_described(event), style="dim", markup=False, soft_wrap=True)

                (result,) = self.searches[name].run(
                    source, [ready.prompt], samples, sampling=params, progress=moved, events=told
                )
        except SearchCancelled:
            raise KeyboardInterrupt from None
        best = RequestOutput(result.prompt, [], [result.best], result.usage, result.seed)
        answer = ready.read(best).outputs[0]
        print(answer.text, flush=True)
        if isinstance(result, VoteResult):
            said = one_line(result.answer or "none in any text, so the first one stays; /best fits open questions", 80)
            console.err().print(f"answer: {said}", style="bold", markup=False)
        self._account(result.usage, answer, len(ready.prompt.ids))
        return answer

    def _account(self, usage: Usage, answer: CompletionOutput, asked: int) -> None:
        """Say what the answer took, and how full the context is."""
        used = asked + len(answer.token_ids)
        speed = usage.completion_tokens / usage.decode_seconds if usage.decode_seconds else 0.0
        if _on_terminal():
            read = f"{usage.prompt_tokens - usage.cached_tokens} tokens read, {usage.cached_tokens} kept"
            line = f"{read}, {usage.completion_tokens} written, {speed:.1f} t/s; context {used} of {self.lm.n_ctx}"
            console.err().print(line, style="dim", soft_wrap=True)
        if answer.finish_reason == "length":
            full = f"the context is full; /reset begins anew, -c {2 * self.lm.n_ctx} has more room"
            hint = full if used >= self.lm.n_ctx else f"-n {2 * len(answer.token_ids)} gives it more room"
            console.err().print(f"The answer was cut after {len(answer.token_ids)} tokens: {hint}.", soft_wrap=True)


@contextmanager
def _stopped_by_ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """On a terminal, call this at the first Ctrl-C within the block. It may wait, so it has a thread of its own; an
    exception would end a step of the model, and with it what the context keeps."""
    if not _on_terminal():
        yield
        return

    def handle(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=stop).start()

    former = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _described(event: SearchEvent) -> str:
    """Describe a candidate that has ended or was rated, and the votes so far."""
    from tilebeam.cli.search_view import one_line

    ended = event.event == "candidate"
    what = f"#{event.index} " + (f"{event.fate} after {event.tokens} tokens" if ended else f"rated {event.score:.3f}")
    shown = f"answer {one_line(event.answer, 20)}" if event.answer else one_line(event.text, 60)
    votes = ", ".join(f"{one_line(a, 20)} x{n:.4g}" for a, n in (event.votes or {}).items())
    return "; ".join(filter(None, (what, shown, votes and f"votes: {votes}")))
