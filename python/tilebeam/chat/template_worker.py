"""The process that runs chat templates: Jinja in its sandbox, a request and a reply per line of JSON.

In a process of its own because templates come out of files that anybody may have written: nothing within Python stops
one that does not end, or that asks for all memory in a single operation. A filter of system calls leaves nothing to
win for one that breaks out of Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.constants  # what Jinja imports when it is needed: then no file can be opened any more
import jinja2.debug
import jinja2.ext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tilebeam.sandbox.confinement import confine

_MEMORY = 512 << 20  # bytes for templates, beyond what the interpreter has
# A text has at most so many characters, and so many more for each byte that the request has.
_ROOM, _TIMES = 1 << 18, 4
_LONGEST_ERROR = 500
# Errors that say more in words of ours.
_WORDS = {
    MemoryError: f"it needs more than {_MEMORY >> 20} MiB of memory",
    RecursionError: "it is nested too deeply, or calls itself without end",
}


class _Refused(Exception):
    """The exception of a template that does not take these messages."""


class _TooLong(Exception):
    """The text is longer than any context."""


class _Generation(jinja2.ext.Extension):
    """{% generation %}, which marks for training what the model says: nothing here."""

    tags = {"generation"}  # noqa: RUF012 - so it is declared there

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Take what stands within."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _dumped(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as the filter "tojson" of templates, which unlike Jinja's own escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refused(message)


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    """Compile a template as transformers sets Jinja up for it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _dumped
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def _text(template: jinja2.Template, variables: Mapping[str, Any], longest: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > longest:
            raise _TooLong(f"it makes more than {longest} characters of these messages")
    return "".join(pieces)


def reply_to(template: str, variables: Mapping[str, Any] | None, longest: int) -> dict[str, Any]:
    """Run a template.

    Args:
        template: Jinja.
        variables: what it finds set; None: it is not run, only looked at.
        longest: characters that its text may have.

    Returns:
        {"text"}; or why there is none: {"refused"} by the template itself, {"invalid", "line"}, {"failed"}.
    """
    try:
        compiled = _compiled(template)
        return {"text": "" if variables is None else _text(compiled, variables, longest)}
    except _Refused as error:
        return {"refused": str(error)[:_LONGEST_ERROR]}
    except jinja2.TemplateSyntaxError as error:
        return {"invalid": str(error.message)[:_LONGEST_ERROR], "line": error.lineno}
    except _TooLong as error:
        return {"failed": str(error)}
    except Exception as error:  # whatever an expression of a template runs into, the sandbox among it
        return {"failed": _WORDS.get(type(error)) or f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}


def _limit() -> None:
    """Allow this process to compute, and little else."""
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # a system without such filters: Jinja's sandbox is what there is
        confine(timers=True)


def main() -> None:
    """Answer until the input ends: lines of [seconds of CPU time, [template, variables]]."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # By default this signal ends the process, whatever Python is doing, also if the asker died.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    reply_to("{{ strftime_now('%c') }}", {}, 99)  # the system's files of the time zone are read now
    _limit()
    answers.write(b"{}\n")
    for line in sys.stdin.buffer:
        seconds, (template, variables) = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(reply_to(template, variables, _ROOM + _TIMES * len(line))).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer)


if __name__ == "__main__":
    main()
