"""How models write calls of functions, as data: a family for each way, and which family a chat template has.

A call stands behind marks (`fences`), or begins with one, as its pattern (`heads`) says. In a pattern {name} is a
function of the request, {id} a word of the model's own, and white space any white space or none. Behind the pattern
come the arguments:

    object    the call is a JSON object that holds the name, too: {"name": .., "arguments": {..}}
    json      a JSON object, told as it comes
    others    up to `end`, read when all is there: see `tool_arguments`

A pattern without {name} is an object's, whatever the family's other calls are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Arguments = Literal["json", "elements", "pairs", "python", "gemma"]


@dataclass(frozen=True)
class Family:
    """One way of writing calls.

    Attributes:
        name: of the way.
        told_by: a template is of this family if it holds all the texts of one of these.
        fences: marks before a call or several. They, and patterns that begin with a mark, begin calls anywhere.
        heads: patterns of a call up to its arguments.
        arguments: how these are written.
        end: what ends a call's arguments, where they are no JSON.
        closes: marks behind calls.
        bare: marks that calls may begin with at the start of an answer only; None: without a fence there is no call.
        silent: marks around what is not a call, which are no text.
    """

    name: str
    told_by: tuple[tuple[str, ...], ...]
    fences: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("[", "")
    arguments: Arguments = "json"
    end: str = ""
    closes: tuple[str, ...] = ()
    bare: tuple[str, ...] | None = None
    silent: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All of its marks: control tokens in them have to be seen in the text."""
        heads = [head.partition("{name}") for head in self.heads]
        patterns = [part.replace("{id}", " ") for before, _, behind in heads for part in (before, behind)]
        ends = (self.end, '<|"|>') if self.arguments == "gemma" else (self.end,)
        return tuple(
            filter(str.strip, (*self.fences, *patterns, *ends, *self.closes, *self.silent, *(self.bare or ())))
        )


# In the order in which a template is compared with them.
_FAMILIES = (
    Family(
        "gpt-oss",
        (("<|channel|>", "<|message|>", "functions."),),
        heads=("<|channel|>commentary to=functions.{name}<|message|>",),
        closes=("<|call|>",),
    ),
    Family(
        "gemma",
        (("<|tool_call>", "call:"),),
        heads=("<|tool_call> call:{name}",),
        arguments="gemma",
        end="<tool_call|>",
    ),
    Family(
        "deepseek",
        (("<｜tool▁calls▁begin｜>",), ("<｜tool▁sep｜>",)),
        fences=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        heads=("function<｜tool▁sep｜>{name} ```json ", "{name}<｜tool▁sep｜>", "[", ""),
        closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "]"),
        bare=("```json\n",),
    ),
    Family(
        "atem",
        (("<atem:invoke",), ("atem:", "invoke name=")),
        fences=("<atem:function_calls>",),
        heads=('<atem:invoke name="{name}">', 'to={id}<|message|><atem:function_calls> <atem:invoke name="{name}">'),
        arguments="elements",
        end="</atem:invoke>",
        closes=("</atem:function_calls>", "<|eom|>", "<|start|>assistant"),
    ),
    Family(
        "seed",
        (("<seed:tool_call>",),),
        fences=("<seed:tool_call>",),
        heads=("<function={name}>",),
        arguments="elements",
        end="</function>",
        closes=("</seed:tool_call>",),
    ),
    Family(
        "minicpm5",
        (('<function name="', "<param name="),),
        heads=('<function name="{name}">',),
        arguments="elements",
        end="</function>",
    ),
    Family("glm", (("<tool_call>", "<arg_key>"),), heads=("<tool_call>{name}",), arguments="pairs", end="</tool_call>"),
    Family(
        "qwen3-coder",
        (("<tool_call>", "<function="), ("<function=", "<parameter=")),
        fences=("<tool_call>",),
        heads=("<function={name}>",),
        arguments="elements",
        end="</function>",
        closes=("</tool_call>",),
    ),
    Family(
        "tool_calls", (("<tool_calls>",),), fences=("<tool_calls>",), closes=("]", "</tool_calls>"), bare=("```json\n",)
    ),
    Family(
        "hermes", (("<tool_call>",),), fences=("<tool_call>",), closes=("</tool_call>", "```", "]"), bare=("```json\n",)
    ),
    Family(
        "mistral",
        (("[TOOL_CALLS]",),),
        fences=("[TOOL_CALLS]",),
        heads=("[", "", "{name}[CALL_ID]{id}[ARGS]", "{name}[ARGS]", "{name}"),
        closes=("</tool_call>", "```", "]"),
        bare=(),
    ),
    Family(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking")),
        fences=("<|tool_call_start|>",),
        heads=("[{name}(", "{name}("),
        arguments="python",
        end=")",
        closes=("]", "<|tool_call_end|>"),
    ),
    Family(
        "cohere",
        (("<|START_ACTION|>",),),
        fences=("<|START_ACTION|>",),
        closes=("]", "<|END_ACTION|>"),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Family(
        "granite",
        (("<|tool_call|>", "available_tools"),),
        fences=("<|tool_call|>", "<tool_call>"),
        closes=("]", "<|/tool_call|>", "</tool_call>"),
        bare=("```json\n",),
    ),
    Family("nemotron-v2", (("<TOOLCALL>",),), fences=("<TOOLCALL>",), closes=("]", "</TOOLCALL>")),
    Family(
        "gigachat",
        (("<|function_call|>",), ("function call<|role_sep|>",), ("function call", "<|role_sep|>")),
        fences=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
        closes=("<|message_sep|>",),
    ),
    Family(
        "apertus",
        (("<|tools_prefix|>",),),
        fences=("<|tools_prefix|>",),
        heads=('[ { "{name}" : ', '{ "{name}" : '),
        closes=("}", "]", "<|tools_suffix|>"),
    ),
    Family(
        "llama",
        (("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        fences=("<|python_tag|>",),
        closes=("</tool_call>", "```", "]"),
        bare=(),
    ),
    Family("json", (), closes=("</tool_call>", "```", "]"), bare=("```json\n",)),
)

FAMILIES = {family.name: family for family in _FAMILIES}
# Families whose calls are forced in their own form; others' calls become JSON.
OWN_GRAMMAR = ("hermes", "mistral", "llama")


def family_in(template: str) -> Family:
    """Return the family that a template tells of; where it tells of none, "json": the form that models are told in
    words."""
    for family in _FAMILIES:
        if any(all(mark in template for mark in marks) for marks in family.told_by):
            return family
    return FAMILIES["json"]
