"""Episodes as plain text, for a model that is trained before any engine runs. The plain renderer says the
same with tokens."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from generators.environment import Message
from generators.rendering.messages import read_content
from generators.user_code.task_host import TaskHost


class TextPlay:
    """One episode of a task of several turns, in this process."""

    def __init__(
        self, name: str, args: Mapping[str, Any], index: int, seed: int, loop: asyncio.Runner
    ) -> None:
        """Begins the episode of a training row. `name` and `args` are `task.name` and `task.args`; `loop` is
        for async methods, and may be shared."""
        self._host = TaskHost(name, args, loop)
        self._turn = self._host.reset("train", index, seed, seed)
        self.reward = 0.0

    @property
    def text(self) -> str:
        return "".join(map(read_content, self._turn["messages"]))

    @property
    def is_done(self) -> bool:
        return bool(self._turn["done"])

    def take_reply(self, reply: str) -> None:
        self._turn = self._host.step({"role": "assistant", "content": reply})
        self.reward += self._turn["reward"]
        if self.is_done:
            self._host.close()


def join_messages(conversation: Sequence[Message]) -> list[str]:
    """Returns the environment's text, the reply, and so on by turns, up to the last reply."""
    texts = [""]
    for message in conversation:
        is_reply = message["role"] == "assistant"
        if is_reply != (len(texts) % 2 == 0):
            texts.append("")
        texts[-1] += read_content(message)
    return texts if len(texts) % 2 == 0 else texts[:-1]
