"""What all commands of tilebeam have in common: models by name, llama.cpp's options, and what help shows first."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from tilebeam.cli import console
from tilebeam.gguf import help_text
from tilebeam.model.hub import local_file

_HfRepo = Annotated[
    list[str] | None,
    typer.Option(
        "-hf",
        "--hf-repo",
        metavar="REPO[:QUANT]",
        help="Instead of -m: OWNER/NAME of Hugging Face's hub, downloaded once; QUANT: by default Q4_K_M, else Q8_0.",
        show_default=False,
    ),
]
_HfFile = Annotated[
    str | None, typer.Option("-hff", "--hf-file", help="File of the -hf repository, or a pattern.", show_default=False)
]

# Options that matter first, of a command with many: as many of these as it has.
_FIRST = (
    *("-m", "-hf", "--task", "--method", "--items", "--host", "--port", "--api-key", "--system", "-p", "-f"),
    *("--budget", "-n", "--scorer", "--beam-width", "--prm", "--extract", "--chat", "-c", "-np", "--temp", "--out"),
)
# Options of llama.cpp's programs that change nothing here, and those that something else stands for.
_IGNORED = frozenset(
    ("--mlock", "--mmap", "--no-mmap", "--jinja", "--no-warmup", "--simple-io", "--no-perf", "-kvu", "-cnv")
)
# Of --numa: memory is spread over all nodes that the process may use, and a policy that numactl set is kept.
_NUMA = ("distribute", "numactl")
_ON, _OFF = {"on", "1", "enabled", "auto", "-1"}, {"off", "0", "disabled"}  # of -fa
_CHAT, _FETCH = "`tilebeam chat` converses", "download the file and name it with -m, or use -hf"
_INSTEAD = {
    **dict.fromkeys(("-i", "-ins", "--interactive"), _CHAT),
    **dict.fromkeys(("-mu", "--model-url"), _FETCH),
    **dict.fromkeys(("-hft", "--hf-token"), "set the variable HF_TOKEN, or use `hf auth login`"),
    "--mmproj": "Tilebeam reads text only",
    "--numa": "distribute or numactl; in place of isolate: numactl -N 0 -m 0 tilebeam ..",
    "-ngl": "--device says where a model runs",
    "-no-cnv": "`tilebeam generate --raw` continues a text",
    "-sys": "`tilebeam chat` takes a system prompt; with -f a line may have messages",
}


class Command(help_text.PlainCommand):
    """A command that understands llama.cpp's habits."""

    first = _FIRST

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse after llama.cpp's words have become this command's own."""
        if not ctx.resilient_parsing:
            args = list(self._translated(ctx, args))
        rest: list[str] = super().parse_args(ctx, args)
        if not ctx.resilient_parsing and "hf_repo" in ctx.params:
            named, repos, file = (ctx.params[name] for name in ("model", "hf_repo", "hf_file"))
            count = (len(named) if isinstance(named, list | tuple) else named is not None) + len(repos or [])
            if file is not None and len(repos or []) != 1:
                ctx.fail("-hff names a file of one -hf repository.")
            if not count and getattr(self.callback, "needs_model", False):
                ctx.fail("Missing option -m (a GGUF file) or -hf (a model of Hugging Face's hub).")
            if count > 1 and not next(p for p in self.params if p.name == "model").multiple:
                ctx.fail("Give one model: -m or -hf.")
        return rest

    def missing(self, known: dict[str, Any]) -> list[str]:
        """As the base's, with the model, which two options can name."""
        model = any(p.name == "hf_repo" for p in self.params) and getattr(self.callback, "needs_model", False)
        named = known.get("model") or known.get("hf_repo")
        return ["-m", *super().missing(known)] if model and not named else super().missing(known)

    def _translated(self, ctx: Any, args: list[str]) -> Iterator[str]:
        known = {flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}
        takes_value = {flag for p in self.params for flag in p.opts if not getattr(p, "is_flag", True)}
        ignored = []
        left = deque(args)
        while left:
            word = left.popleft()
            name = word.partition("=")[0]
            if name == "--":
                yield word
                break
            if name in ("-fa", "--flash-attn") and name in known:
                value = left.popleft() if left and left[0] in _ON | _OFF else None
                yield "--no-flash-attn" if value in _OFF else word
            elif name in _IGNORED - known:
                ignored.append(word)
            elif name == "--numa" and (value := word.partition("=")[2] or (left[0] if left else "")) in _NUMA:
                ignored.append(f"--numa {value}" if "=" in word else f"{word} {left.popleft()}")
            elif name in _INSTEAD.keys() - known:
                ctx.fail(f"No such option: {name}: {_INSTEAD[name]}.")
            else:
                yield word
                if word in takes_value and left:
                    yield left.popleft()
        yield from left
        if ignored:
            console.err().print(f"ignored: {' '.join(ignored)}, which changes nothing here", style="dim")


def prepared(command: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: its errors are sentences, and where it takes -m it also takes -hf and hf://names."""
    hints = get_type_hints(command, include_extras=True)
    if "model" not in hints:
        return console.sentences(command)
    kind, info = hints["model"].__origin__, hints["model"].__metadata__
    several = get_args(kind)[:1] in ((str,), (Path,)) and type(None) not in get_args(kind)
    options = []
    for p in inspect.signature(command).parameters.values():
        p = p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        needed = p.name == "model" and p.default is inspect.Parameter.empty
        options.append(p.replace(default=None, annotation=Annotated[(kind | None, *info)]) if needed else p)
        if p.name == "model":
            required = needed
            options += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                for name, kind in (("hf_repo", _HfRepo), ("hf_file", _HfFile))
            ]

    @functools.wraps(command)
    def run(*, hf_repo: list[str] | None, hf_file: str | None, **given: Any) -> None:
        named = given["model"] if several else [given["model"]]
        models = [_local(str(model)) for model in named or [] if model is not None]
        models += [local_file(repo, hf_file) for repo in hf_repo or []]
        paths: list[Any] = models if str in get_args(kind) else [Path(model) for model in models]
        command(**given | {"model": paths if several else next(iter(paths), None)})

    run.needs_model = required  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in options}
    return console.sentences(run)


def _local(model: str) -> str:
    """Return the path of what -m names: FILE, hf://NAME, or one of them behind NAME=."""
    name, found, rest = model.rpartition("hf:/")
    return name + local_file(found + rest) if found and (not name or name.endswith("=")) else model
