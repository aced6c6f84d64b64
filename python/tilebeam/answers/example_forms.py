"""The examples in a question that is the beginning of a program, in the forms in which people write them.

    >>> f(1)                    f(1) == 2                       For x = 1, y = 2 the output should be 3
    2                           assert 2 == f(1)                Input: x = 1, y = 2
    >>> f(1) == 2               `f(1)` returns `2`              Output: 3

Calls and values are plain data; a line that leaves a doubt is no example.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from tilebeam.sandbox import Test

# What stands between a call, or the values of parameters, and a result.
_VERBS = "be|equals?|returns?|gives?|yields?|outputs?|produces?|prints?|evaluates? to|results? in"
_WORDS = (
    rf"(?:is|(?:will |should |must )?(?:be equal to|{_VERBS}))\b(?: equal to)?(?: the (?:value|list|string|number))?:?"
)
_MEANS = re.compile(rf"[ \t]*+(?:#[ \t]*+)?(?:[-=]+>|~>|===?|≡|[:=]|[➞→⇒➔↦]|{_WORDS})[ \t]*")
# A full stop, a remark, the end of the docstring.
_AFTER = re.compile(r"[ \t]*+(?:[.;,][ \t]*+)?(?:\"\"\"|'''|#.*|//.*|\(.*|because\b.*|since\b.*)?[ \t]*$")
_NEXT = re.compile(r"[ \t]*(?:,|;|and|,[ \t]*and)[ \t]+")  # another example of the same line
_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "`": " ", "−": "-"})
# What is looked at, so that no text takes long: characters of a line and of a call or value, and in a line calls (or
# values of parameters), possible ends of each, and in a doctest lines of a value.
LINE, MOST, CALLS, ENDS, LINES = 4000, 1000, 6, 60, 50
_SPELLED = {"true": True, "false": False, "null": None, "none": None}
_PART = re.compile(r"(?:[-+*/%&|^~(\[{<>!]|\bnot)[ \t]*$")  # a call behind it is a part of something
_BULLET = re.compile(r"^\s*(?:>>>|[*•-](?=\s)|\d+[.)])?\s*")
_LEFT = re.compile(r"(?:assert[ \t]++)?([^=]+)==[ \t]*")
_SPACES = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class _Function:
    """The function that is asked for: its name, its parameters, how many of them have no default, and the text below
    its first line."""

    name: str
    parameters: tuple[str, ...]
    required: int
    text: str


def examples_of(source: str, function: str) -> list[Test]:
    """Collect the examples of a function.

    Args:
        source: a program's beginning, up to the function's docstring or further.
        function: its name. Where no example calls it, but all that there are call another name that nothing defines,
            they are taken for its.
    """
    source = "\n".join(line for line in source.split("\n") if len(line) <= LINE)
    doctests = list(_doctests(source))
    found = [*doctests, *_called(source, function, {test.source for test in doctests})]
    if not found and (described := _function(source, function)):
        found = [*_given(described), *_input_output(described)]
        if not found and len(others := _foreign(described)) == 1:
            found = [*_called(re.sub(rf"\b{others.pop()}\(", f"{function}(", described.text), function, set())]
    return list(dict.fromkeys(found))


def _function(source: str, name: str) -> _Function | None:
    heads = list(re.finditer(rf"^(?:async\s+)?def\s+{re.escape(name)}\b", source, re.MULTILINE))
    if not heads:
        return None
    text = source[heads[-1].start() :]
    # The signature ends at the first colon that closes it: annotations and defaults may hold others.
    for end in (m.end() for m in islice(re.finditer(r":[ \t]*+(?:#.*)?\n|:", text), ENDS)):
        try:
            defined = ast.parse(text[:end] + "\n    pass").body[0]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = defined.args
            names = tuple(a.arg for a in [*arguments.posonlyargs, *arguments.args])
            return _Function(name, names, len(names) - len(arguments.defaults), text[end:])
    return None


# --- calls ------------------------------------------------------------------------------------------------------------

_DOCTEST = re.compile(r"^[ \t]*>>> ?(?P<call>.+)\n(?P<rest>(?:(?!\s*(?:>>>|\"\"\"|'''|\n)).+\n?)+)", re.MULTILINE)


def _doctests(source: str) -> Iterator[Test]:
    for found in _DOCTEST.finditer(source):
        call = found["call"].strip()
        if (tree := _parsed(call)) is None:
            continue
        value = _value(found["rest"].splitlines())
        if not (isinstance(tree, ast.Compare) and value not in {"True", "False"}):  # prose below `>>> f(1) == 2`
            yield Test(call, value)


def _value(lines: list[str]) -> str:
    """Find the lines that are one value, the first line if none are."""
    for end in range(1, min(len(lines), LINES) + 1):
        text = " ".join(line.strip() for line in lines[:end])
        if _literal(text) is not None:
            return text
    return lines[0].strip()


def _called(source: str, function: str, taken: Set[str]) -> Iterator[Test]:
    """Find `f(1) == 2`, `f(1) => 2`, `>>> f(1) [2]`, `2 == f(1)` and their like, several in a line too; none of the
    calls that are taken."""
    for line in source.splitlines():
        code = line.strip()
        if code.startswith(("def ", "return ", "async def ")) or code.removeprefix(">>>").strip() in taken:
            continue
        yield from list(_calls(line, function)) or _calls(line.translate(_QUOTES), function)


def _calls(line: str, function: str) -> Iterator[Test]:
    end = 0
    for begin in islice(re.finditer(rf"(?<![\w.]){re.escape(function)}\(", line), CALLS):
        at = begin.start()
        before = _BULLET.sub("", line[:at])
        if at < end or _PART.search(before) or not (call := _longest(line[at:], call=True)):
            continue
        end = at + len(call)
        spaces = _SPACES if line.lstrip().startswith(">>>") else _MEANS  # `>>> f(1) [2]`
        means = _MEANS.match(line, end) or spaces.match(line, end)
        left = _LEFT.fullmatch(before)
        if means and (result := _result(line[means.end() :])):
            yield Test(call, result[0])
            end = means.end() + result[1]
        elif left and _AFTER.match(line, end) and (value := _literal(left[1])):
            yield Test(call, value)


def _result(text: str) -> tuple[str, int] | None:
    """Find the value that a text begins with, and how far it goes; None where what follows makes it doubtful."""
    value = _longest(text, call=False)
    length = len(value)
    if value and (_AFTER.fullmatch(text, length) or _NEXT.match(text, length)):
        return _literal(value) or "", length
    return None


def _foreign(function: _Function) -> set[str]:
    """Names that lines like `assert g([1]) => [1]` call and that nothing defines."""
    called = re.findall(
        r"^[ \t]*(?:assert[ \t]+|>>>[ \t]*)?(\w+)\(.*\)[ \t]*(?:[-=]+>|==|➞|→)", function.text, re.MULTILINE
    )
    return set(called).difference(re.findall(r"\b(?:def|import|as)\s+(\w+)", function.text))


# --- values of parameters ---------------------------------------------------------------------------------------------

_WHO = "function|output|result|answer|return value|program|it"
_ANSWER = re.compile(
    rf"[ \t]*+(?:[,;:][ \t]*+)?(?:then[ \t]++)?(?:(?:the|your|its)[ \t]++)?(?:{_WHO})?{_MEANS.pattern}", re.IGNORECASE
)
_SAID = re.compile(r".*\b(?:output|result|answer)[ \t]+(?:is|should be|will be|must be)[ \t]+", re.IGNORECASE)
_INPUT = re.compile(r"^\W*(?:sample )?inputs?(?:[ \t]*\d+)?\**[ \t]*[:=]\**[ \t]*(.*)$", re.IGNORECASE)
_OUTPUT = re.compile(
    r"^\W*(?:(?:expected|sample) )?(?:outputs?|results?|returns?)(?:[ \t]*\d+)?\**[ \t]*[:=]*\**[ \t]*(.*)$",
    re.IGNORECASE,
)


def _given(function: _Function) -> Iterator[Test]:
    """Find `For x = 1, y = 2 the output should be 3`."""
    for line in function.text.translate(_QUOTES).splitlines():
        begin = re.search(rf"\b(?:{'|'.join(map(re.escape, function.parameters)) or '(?!)'})[ \t]*={{1,2}}(?!=)", line)
        if begin is None or _INPUT.match(line):
            continue
        values, end = _assigned(line[begin.start() :])
        rest = line[begin.start() + end :]
        answer = _SAID.match(rest) or _ANSWER.match(rest)
        if answer and (call := _call(function, values)) and (result := _result(rest[answer.end() :])):
            yield Test(call, result[0])


def _input_output(function: _Function) -> Iterator[Test]:
    """Find `Input: x = 1, y = 2` with `Output: 3` below it; values by name, or in the order of the parameters."""
    lines = [line.translate(_QUOTES) for line in function.text.splitlines()]
    for number, line in enumerate(lines):
        if not (head := _INPUT.match(line)):
            continue
        given = [head[1]] if head[1].strip() else []
        for below in range(number + 1, min(number + 8, len(lines))):
            if output := _OUTPUT.match(lines[below]):
                said = output[1] if output[1].strip() else next(iter(lines[below + 1 : below + 2]), "").strip()
                call, result = _call(function, _inputs(", ".join(given))), _result(said)
                if call and result:
                    yield Test(call, result[0])
                break
            if lines[below].strip():
                given.append(lines[below].strip().rstrip(","))


def _inputs(text: str) -> list[tuple[str | None, str]]:
    """Read `x = 1, y = 2`, `x : 1, y : 2` or `1, 2`; [] if it is none of them."""
    for pattern in (r"(\w+)[ \t]*=[ \t]*", r"(\w+)[ \t]*:[ \t]*"):
        if re.match(pattern, text):
            values, end = _assigned(text, pattern)
            return values if not text[end:].strip(" .;") else []
    tree = _parsed(f"f({text.strip()})")
    if not isinstance(tree, ast.Call) or tree.keywords:
        return []
    parts = [_plain(part) for part in tree.args]
    return [] if None in parts else [(None, part) for part in parts if part is not None]


def _assigned(text: str, pattern: str = r"(\w+)[ \t]*={1,2}(?!=)[ \t]*") -> tuple[list[tuple[str | None, str]], int]:
    """Read `x = 1, y = 2 and z = 3` at a text's begin: names with values, and how far it goes."""
    found: list[tuple[str | None, str]] = []
    end = at = 0
    while len(found) < CALLS and (name := re.compile(pattern).match(text, at)):
        rest = re.split(rf"(?:,|;|\band\b)[ \t]*(?={pattern})", text[name.end() :])[0]
        value = _longest(rest, call=False)
        if not value:
            break
        found.append((name[1], _literal(value) or ""))
        end = name.end() + len(value)
        more = re.compile(r"[ \t]*(?:,[ \t]*and|,|;|and)[ \t]*").match(text, end)
        if more is None:
            break
        at = more.end()
    return found, end


def _call(function: _Function, values: Sequence[tuple[str | None, str]]) -> str | None:
    """Write a call with all of these values; None if they are not the function's parameters, each once."""
    names = [name for name, _ in values]
    if set(names) <= set(function.parameters) and set(names) >= set(function.parameters[: function.required]):
        return f"{function.name}({', '.join(f'{name}={value}' for name, value in values)})" if names else None
    # Values without names, or with others than the parameters', are taken in order.
    return f"{function.name}({', '.join(v for _, v in values)})" if len(values) == len(function.parameters) else None


# --- plain data -------------------------------------------------------------------------------------------------------


class _Spelled(ast.NodeTransformer):
    """Write true, false, null and none as Python does."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_SPELLED[node.id]) if node.id in _SPELLED else node


def _literal(text: str) -> str | None:
    """Write a text that is plain data as Python does; None if it is something else."""
    tree = _parsed(text)
    # `("a")` may be meant for a tuple.
    doubtful = text.lstrip().startswith("(") and not isinstance(tree, ast.Tuple)
    return None if tree is None or doubtful else _plain(tree)


def _parsed(text: str) -> ast.expr | None:
    """Read an expression; None if it is none, or nested too deeply for Python's parser."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _plain(tree: ast.expr) -> str | None:
    """Write an expression that is plain data; None if it is something else. Long sums are nested deeply too."""
    try:
        ast.literal_eval(tree := _Spelled().visit(tree))
        return ast.unparse(tree)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _longest(text: str, *, call: bool) -> str:
    """Find the shortest call of plain data that a text begins with, or the longest value; "" if it begins with none."""
    text = text[:MOST]
    ends = [i + 1 for i, c in enumerate(text) if c == ")"][:ENDS]
    if not call:
        ends = [len(text), *[i for i in range(len(text) - 1, 0, -1) if text[i] in " \t.,;:#()/\"'"][-ENDS:]]
    for end in ends:
        part = text[:end].rstrip()
        if not call and not part.endswith((",", ".")) and _literal(part) is not None:
            return part
        if call and _is_call(part):
            return part
    return ""


def _is_call(text: str) -> bool:
    tree = _parsed(text)
    return isinstance(tree, ast.Call) and all(
        _plain(part) is not None for part in [*tree.args, *(k.value for k in tree.keywords)]
    )
