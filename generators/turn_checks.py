"""The checks of what an environment says: messages in OpenAI's form, tools, and rewards that are numbers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import msgspec

from generators.environment import Message, ToolSpec, Turn
from generators.plain_values import is_text, make_plain, show_value
from generators.score_checks import check_score
from generators.task import Prompt, Score

MAX_TURN = 4 << 20
"""Characters and values in the messages and tools of one turn."""
MAX_TOOLS = 128
MAX_SCHEMAS = 256 << 10
"""Bytes of the JSON schemas of all tools. Checking them takes about 20 µs a byte."""
_ROLES = ("system", "developer", "user", "tool")
_FIELDS = frozenset({"messages", "tools", "reward", "components", "done"})


def read_prompt(value: Any) -> Prompt:
    """Returns the prompt that a worker has sent, with its messages. Raises ValueError for anything else."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a prompt must be text, got {show_value(value)}")
    text, template_args = value.get("text"), value.get("template_args", {})
    if not isinstance(text, str) or not is_text(text):
        raise ValueError(f"a prompt must be text, got {show_value(text)}")
    if not isinstance(template_args, dict):
        raise ValueError(f"template_args must be a dict, got {show_value(template_args)}")
    make_plain([value.get("messages", ()), template_args], "messages of a prompt", MAX_TURN)
    messages = [
        _check_message(message, f"messages[{index}]", (*_ROLES, "assistant"))
        for index, message in enumerate(_check_list(value.get("messages", ()), "messages"))
    ] or [{"role": "user", "content": text}]
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages of a prompt must not end with the assistant's, got one")
    return Prompt(text, messages=messages, template_args=template_args)


def check_turn(value: Any, is_first: bool) -> Turn:
    """Returns the turn that a worker has sent. Raises ValueError that names the field, the rule and the
    value. `is_first` is True for the answer to `reset`."""
    if not isinstance(value, Mapping) or set(value) != _FIELDS:
        raise ValueError(f"a turn must have {', '.join(sorted(_FIELDS))}, got {show_value(value)}")
    if not isinstance(value["done"], bool):
        raise ValueError(f"done must be true or false, got {show_value(value['done'])}")
    make_plain([value["messages"], value["tools"]], "messages and tools of a turn", MAX_TURN)
    score = check_score(Score(value["reward"], value["components"]))
    messages = [
        _check_message(message, f"messages[{index}]")
        for index, message in enumerate(_check_list(value["messages"], "messages"))
    ]
    if not messages and not value["done"]:
        raise ValueError("messages must be given unless the turn is done, got none")
    specs = check_tools(value["tools"])
    if specs and not is_first:
        raise ValueError(f"tools must be given in the first turn only, got {len(specs)} in a later one")
    if is_first and value["done"]:
        raise ValueError("done must be false in the first turn (the policy has not replied yet), got True")
    if is_first and (score.reward or score.components):
        raise ValueError(
            "reward and components must be 0 and empty in the first turn (there is no reply to pay yet), got "
            f"{score.reward:g} and {show_value(dict(score.components))}"
        )
    return Turn(
        messages=messages,
        tools=specs,
        reward=score.reward,
        components=score.components,
        done=value["done"],
    )


def check_tools(value: Any) -> list[ToolSpec]:
    """Returns the tools of an episode. Raises ValueError that names the field, the rule and the value."""
    tools = _check_list(value, "tools")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}")
    specs = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    schemas = [msgspec.json.encode(spec["function"].get("parameters", {})) for spec in specs]
    if (total := sum(map(len, schemas))) > MAX_SCHEMAS:
        raise ValueError(f"parameters of all tools must be at most {MAX_SCHEMAS} bytes of JSON, got {total}")
    for index, schema in enumerate(schemas):
        if fault := _find_schema_fault(schema):
            shown = show_value(specs[index]["function"]["parameters"])
            path = f"tools[{index}].function.parameters"
            raise ValueError(f"{path} must be a JSON schema, got {shown}: {fault}")
    names = [spec["function"]["name"] for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"names of tools must differ, got {names}")
    return specs


def _check_list(value: Any, path: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path} must be a list, got {show_value(value)}")
    return value


def _check_message(message: Any, path: str, roles: Sequence[str] = _ROLES) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{path} must be a dict with role and content, got {show_value(message)}")
    role = message.get("role")
    if role == "assistant" and role not in roles:
        raise ValueError(f"{path}.role must not be assistant (the policy writes those), got {role!r}")
    if role not in roles:
        raise ValueError(f"{path}.role must be one of {', '.join(roles)}, got {show_value(role)}")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{path}.content[{index}]")
    elif not isinstance(content, str):
        raise ValueError(f"{path}.content must be text, or a list of text parts, got {show_value(content)}")
    for field in ("tool_call_id", "name"):
        if not isinstance(message.get(field, ""), str):
            raise ValueError(f"{path}.{field} must be text, got {show_value(message[field])}")
    return message


def _check_part(part: Any, path: str) -> None:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'{path} must read {{"type": "text", "text": ...}}, got {show_value(part)}')


def _check_tool(tool: Any, path: str) -> ToolSpec:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ValueError(
            f'{path} must read {{"type": "function", "function": {{...}}}}, got {show_value(tool)}'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > 64:
        raise ValueError(f"{path}.function.name must be text of 1 to 64 characters, got {show_value(name)}")
    if not isinstance(function.get("description", ""), str):
        description = show_value(function["description"])
        raise ValueError(f"{path}.function.description must be text, got {description}")
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"{path}.function.parameters must be a JSON schema, got {show_value(parameters)}")
    return tool


@functools.lru_cache(maxsize=256)
def _find_schema_fault(encoded: bytes) -> str | None:
    """Returns what is wrong with a JSON schema. The episodes of a run give the same few."""
    schema = msgspec.json.decode(encoded)
    if not isinstance(schema.get("$schema", ""), str):
        return "$.$schema: the name of a dialect must be text"
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # That no two items are the same is left out: it takes the square of their number, here beside the engine.
    lenient = jsonschema.validators.extend(draft, {"uniqueItems": lambda *_: ()})
    validator = lenient(draft.META_SCHEMA, format_checker=draft.FORMAT_CHECKER)
    for error in validator.iter_errors(schema):
        return f"{error.json_path}: {error.message}"[:500]
    return None
