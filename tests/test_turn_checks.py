"""An environment's turns are checked field by field, and refused with field, rule and value."""

from typing import Any

import pytest

from generators.environment import Turn
from generators.turn_checks import MAX_TURN, check_turn, read_prompt

USER = {"role": "user", "content": "go on"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}


def make_turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [], "reward": 0.0, "components": {}, "done": False, **fields}


def make_tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **fields}}


def test_a_turn_that_obeys_the_protocol_is_taken_as_it_is() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "two parts"}], "name": "ann"},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    value = make_turn(messages=messages, tools=[TOOL])
    assert check_turn(value, is_first=True) == Turn(messages=messages, tools=[TOOL])
    value = make_turn(reward=1, components={"won": 1})
    assert check_turn(value, is_first=False) == Turn(
        messages=[USER], tools=[], reward=1.0, components={"won": 1.0}
    )
    assert check_turn(make_turn(messages=[], done=True, reward=2.5), is_first=False) == Turn(
        messages=[], tools=[], reward=2.5, done=True
    )


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role must not be assistant"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "messages[1].role must be one of system,"),
        ({"messages": [{"content": "x"}]}, "messages[0].role must be one of"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content must be text, or a list of text parts, got N",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] must read",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content must be text"),
        ({"messages": [{**USER, "tool_call_id": 7}]}, "messages[0].tool_call_id must be text, got 7"),
        ({"messages": ["go on"]}, "messages[0] must be a dict with role and content, got 'go on'"),
        ({"messages": "go on"}, "messages must be a list, got 'go on'"),
        ({"messages": None}, "messages must be a list, got None"),
        ({"messages": []}, "messages must be given unless the turn is done, got none"),
        ({"messages": [{**USER, "extra": float("nan")}]}, "must be finite, got nan"),
        (
            {"messages": [{**USER, "content": "x" * (MAX_TURN + 1)}]},
            "messages and tools of a turn must be at",
        ),
        ({"reward": float("nan")}, "reward must be finite, got nan"),
        ({"reward": "1"}, "reward must be a number, got '1'"),
        ({"components": {"won": float("inf")}}, "components['won'] must be finite, got inf"),
        ({"components": None}, "components must be a dict of numbers by name, got None"),
        ({"done": 1}, "done must be true or false, got 1"),
        ({"done": True}, "done must be false in the first turn"),
        ({"reward": 2}, "reward and components must be 0 and empty in the first turn"),
        ({"components": {"won": 0.0}}, "no reply to pay yet), got 0 and {'won': 0.0}"),
        ({"surplus": 1}, "a turn must have components, done, messages, reward, tools, got"),
        ({"tools": ["add"]}, 'tools[0] must read {"type": "function", "function": {...}}, got \'add\''),
        ({"tools": [TOOL["function"]]}, "tools[0] must read"),
        (
            {"tools": [make_tool(name="")]},
            "tools[0].function.name must be text of 1 to 64 characters, got ''",
        ),
        ({"tools": [make_tool(description=7)]}, "tools[0].function.description must be text, got 7"),
        ({"tools": [make_tool(parameters=[])]}, "tools[0].function.parameters must be a JSON schema, got []"),
        (
            {"tools": [TOOL, make_tool(name="b", parameters={"type": "objekt"})]},
            "tools[1].function.parameters must be a JSON schema, got {'type': 'objekt'}: $.type: 'objekt'",
        ),
        ({"tools": [make_tool(parameters={"required": "a"})]}, "tools[0].function.parameters must be a JSON"),
        ({"tools": [make_tool(parameters={"$schema": []})]}, "got {'$schema': []}: $.$schema: the name of a"),
        ({"tools": [make_tool(parameters={"$schema": 5})]}, "tools[0].function.parameters must be a JSON"),
        (
            {"tools": [make_tool(parameters={"description": "x" * 300_000})]},
            "parameters of all tools must be at most 262144 bytes of JSON, got 300018",
        ),
        ({"tools": [TOOL, TOOL]}, "names of tools must differ, got ['add', 'add']"),
        ({"tools": [make_tool(name=str(i)) for i in range(129)]}, "tools must be at most 128, got 129"),
    ],
)
def test_a_turn_that_breaks_the_protocol_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_turn(make_turn(**fields), is_first=True)
    assert error in str(refused.value) and len(str(refused.value)) < 1500


def test_tools_are_given_in_the_first_turn_only() -> None:
    with pytest.raises(ValueError, match="tools must be given in the first turn only, got 1 in a later one"):
        check_turn(make_turn(tools=[TOOL]), is_first=False)


def test_a_schema_of_many_choices_is_checked_at_once() -> None:
    """Older drafts ask that choices differ, which took the square of their number: minutes for these."""
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "enum": [{"a": index} for index in range(20_000)],
    }
    check_turn(make_turn(tools=[make_tool(parameters=schema)]), is_first=True)


@pytest.mark.parametrize("value", [None, [], "turn", 7, {}, {"messages": []}])
def test_anything_else_is_no_turn(value: Any) -> None:
    with pytest.raises(ValueError, match="a turn must have"):
        check_turn(value, is_first=True)


def test_a_prompt_is_text() -> None:
    prompt = read_prompt({"text": "7 + 4"})
    assert (prompt.text, prompt.messages) == ("7 + 4", [{"role": "user", "content": "7 + 4"}])
    for value in ({"text": None}, {}, None, {"text": "\ud800"}):
        with pytest.raises(ValueError, match="a prompt must be text, got"):
            read_prompt(value)
