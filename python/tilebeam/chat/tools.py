"""Functions that a chat offers to the model, as OpenAI's API describes them, and what it may or must do with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilebeam.chat.chat_template import takes_tools
from tilebeam.chat.refused import FieldRefused
from tilebeam.chat.tool_families import FAMILIES, OWN_GRAMMAR, Family, family_in

# Which calls an answer may or must have: none, any, at least one, or one of the function that is named.
ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of the function.
        description: what it does.
        parameters: a JSON schema of its arguments, None: it takes none.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the schema of its arguments: an object, without members if nothing is said."""
        given = self.parameters or {"properties": {}, "additionalProperties": False}
        return {"type": "object"} | dict(given)

    def as_dict(self) -> dict[str, Any]:
        """Describe it as OpenAI's API does, for templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.arguments}
        return {"type": "function", "function": function}


def tools_of(given: Sequence[Mapping[str, Any] | Tool] | None) -> list[Tool]:
    """Read functions like {"type": "function", "function": {"name": .., "parameters": ..}}; None: there are none.

    Raises:
        FieldRefused: one is none, or two have one name.
    """
    found = [_tool(i, one) for i, one in enumerate(given or ())]
    names = [tool.name for tool in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FieldRefused(f"tools: two functions are named {twice[0]!r}.", param="tools", code="invalid_value")
    return found


def _tool(i: int, given: Mapping[str, Any] | Tool) -> Tool:
    if isinstance(given, Tool):
        return given
    function = given.get("function") if isinstance(given, Mapping) else None
    found = function if isinstance(function, Mapping) else {}
    name, told, schema = (found.get(key) for key in ("name", "description", "parameters"))
    fit = isinstance(told, str | None) and isinstance(schema, Mapping | None)
    if not fit or not isinstance(name, str) or not name:
        message = f'tools[{i}] must be {{"type": "function", "function": {{"name": .., "parameters": ..}}}}.'
        raise FieldRefused(message, param=f"tools[{i}]", code="invalid_value")
    return Tool(name, told or "", schema)


@dataclass(frozen=True)
class ToolUse:
    """The functions of a chat, and what the model may or must do with them.

    Attributes:
        family: how this model writes calls.
        tools: those that it may call.
        forced: it must call.
        several: more than one call is allowed.
        first: where `tools` begin in the chat's list.
    """

    family: Family
    tools: Sequence[Tool]
    forced: bool
    several: bool
    first: int = 0

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Return the schemas of their arguments, by their names."""
        return {tool.name: tool.arguments for tool in self.tools}

    def check(self) -> None:
        """Raise `FieldRefused` for a function whose schema has another type than an object."""
        for i, tool in enumerate(self.tools, self.first):
            kinds = tool.arguments["type"]
            if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
                param = f"tools[{i}].function.parameters"
                why = f"the arguments of {tool.name!r} are an object, and this schema allows none"
                raise FieldRefused(f"{param}: {why}.", param=param, code="invalid_value")


def tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, template: str, *, several: bool = True
) -> ToolUse | None:
    """Decide what a chat wants of its functions; None if the model is not to call any.

    Args:
        tools: all of the chat.
        choice: None is "auto"; {"type": "function", "function": {"name": ..}} names the one to call.
        template: of the chat: how the model writes calls.
        several: more than one call is allowed.

    Raises:
        FieldRefused: the function that is named is not there.
    """
    if not tools or choice == "none":
        return None
    first = 0
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        first = next((i for i, tool in enumerate(tools) if tool.name == name), len(tools))
        tools = tools[first : first + 1]
        if not tools:
            raise FieldRefused(f"tool_choice: there is no function {name!r} in tools.", param="tool_choice")
    elif choice not in (None, "auto", "required"):
        raise FieldRefused(
            f'tool_choice must be "none", "auto", "required" or a function, not {choice!r}.', param="tool_choice"
        )
    named = isinstance(choice, Mapping)
    family = family_of(template)
    if (named or choice == "required") and family.name not in OWN_GRAMMAR:
        family = FAMILIES["json"]  # what the grammar makes of it
    return ToolUse(family, tools, named or choice == "required", several and not named, first)


def family_of(template: str) -> Family:
    """Tell how a model with this template writes calls: what it is told in words, if the template knows no tools.
    DeepSeek's models may still write theirs then, which is read beside that."""
    family = family_in(template)
    return family if takes_tools(template) or family.name == "deepseek" else FAMILIES["json"]
