"""Messages in the form that chat templates expect, from the form that OpenAI's protocol gives them."""

import json
from typing import Any

from jinja2 import TemplateError

from generators.environment import Message

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The errors that a chat template raises for messages that it refuses or does not foresee."""


def read_content(message: Message) -> str:
    """Returns the text of a message. Raises ValueError where a part of it is no text."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.get("type") != "text":
            raise ValueError(f"messages.content[{place}].type must be text, got {part.get('type')!r}")
        texts.append(part["text"])
    return "".join(texts)


def adapt_message(message: Message, *, arguments_as_objects: bool) -> Message:
    """Returns a message for a chat template: its content is one text, and the arguments of its tool calls are
    objects where the template wants to print them itself. Few templates know a developer's role."""
    role = "system" if message["role"] == "developer" else message["role"]
    adapted = {**message, "role": role, "content": read_content(message)}
    if adapted.get("tool_calls"):
        adapted["tool_calls"] = [_adapt_call(call, arguments_as_objects) for call in message["tool_calls"]]
    return adapted


def _adapt_call(call: dict[str, Any], as_object: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if as_object and isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        # What is no JSON object stays the text that it is: the template then prints it as a string.
        arguments = read if isinstance(read, dict) else arguments
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
