"""Shared by the environments: what a reply says, and messages to answer it."""

from generators.environment import Message


def read_text(reply: Message) -> str:
    """Returns the text of a reply, empty where it has none."""
    content = reply.get("content")
    return content if isinstance(content, str) else ""


def say(text: str) -> list[Message]:
    """Returns the text as a user's message."""
    return [{"role": "user", "content": text}]
