"""A gateway with a policy that answers by script, served over a real socket from an episode thread."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai

from buffers import messages as m
from configs.load import load_config
from configs.schema import Config
from generators.engine import Completion, Sample
from generators.episode_thread import EpisodeThread
from generators.gateway.server import Gateway
from generators.gateway.session import GatewaySession
from generators.group import GroupProgress, Player
from generators.rendering.difference import DifferenceRenderer
from generators.rendering.plain import PlainRenderer
from generators.rendering.renderer import Reply

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OVERRIDES = [
    "generators.engine=simulated", "learner.engine=simulated", "generators.max_model_len=2000",
    "sampling.max_tokens=200", "episodes.max_turns=16",
]  # fmt: skip


class ScriptedPolicy:
    """Answers with the texts that `say` returns, and keeps what it was asked. `versions` name the weights."""

    def __init__(self, tokenizer: Any, say: Callable[[Sample], str] | None = None) -> None:
        self._tokenizer = tokenizer
        self.reset()
        if say is not None:
            self.say = say

    def reset(self) -> None:
        self.say: Callable[[Sample], str] = lambda sample: "four"
        self.samples: list[Sample] = []
        self.withdrawn: list[str] = []
        self.version = 0
        self.gate: asyncio.Event | None = None
        """Replies wait for it where it is set."""

    async def sample_turn(self, sample: Sample) -> Completion:
        self.samples.append(sample)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.append(sample.id)
            raise
        tokens = self._tokenizer.encode(self.say(sample), add_special_tokens=False)
        tokens = [*tokens, self._tokenizer.eos_token_id]
        reason = "stop" if len(tokens) <= sample.max_tokens else "length"
        tokens = tokens[: sample.max_tokens]
        return Completion(
            id=sample.id,
            tokens=tokens,
            logprobs=[-(1 + place) / 64 for place in range(len(tokens))],
            versions=[self.version] * len(tokens),
            finish_reason=reason,
        )


class CallReader:
    """Reads `CALL name {...}` as a tool call, and `<think>…</think>` as reasoning."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read_reply(self, tokens: Any, finish_reason: str, tools: Any, turn: int) -> Reply:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        if text.startswith("<think>"):
            reasoning, _, text = text.removeprefix("<think>").partition("</think>")
            message |= {"content": text, "reasoning_content": reasoning}
        if tools and text.startswith("CALL "):
            _, name, arguments = text.split(" ", 2)
            if not arguments.endswith("}"):
                return Reply(message, "a call must end with a brace")
            function = {"name": name, "arguments": arguments}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            message |= {"content": "", "tool_calls": [call]}
        return Reply(message)


@dataclass
class OpenEpisode:
    key: str
    session: GatewaySession
    player: Player
    base_url: str
    close: Any

    def make_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self.key, max_retries=0, **options)


class GatewayRig:
    def __init__(
        self, tokenizer: Any, policy: Any, *overrides: str, config: Config | None = None, chat: bool = True
    ) -> None:
        self.config = config or load_config([*OVERRIDES, *overrides])
        self.policy, self.tokenizer = policy, tokenizer
        self.thread = EpisodeThread()
        reader: Any = CallReader(tokenizer)
        renderer = DifferenceRenderer(tokenizer, reader) if chat else PlainRenderer(tokenizer, reader)
        self.gateway = Gateway(self.config, renderer, tokenizer)
        self.run(self.gateway.open())
        self._count = 0
        self._holding: list[Any] = []
        """The loop itself keeps no task alive."""

    def run(self, coroutine: Any) -> Any:
        return self.thread.start_coroutine(coroutine).result(60)

    def open_episode(self) -> OpenEpisode:
        opened: list[OpenEpisode] = []
        is_open, events = threading.Event(), list[asyncio.Event]()
        number, self._count = self._count, self._count + 1
        lease = m.Lease(
            id=number, group=number, due=0, task="t", index=number, seed=0, split="train", num_samples=1,
            min_version=0,
        )  # fmt: skip

        def close() -> None:
            self.call_soon(events[0].set)
            holding.result(30)

        async def hold() -> None:
            player = Player(self.policy, lease, 0, self.config.sampling.max_tokens, GroupProgress(1, 1))
            release = asyncio.Event()
            events.append(release)
            async with self.gateway.open_session(player) as (key, session):
                opened.append(OpenEpisode(key, session, player, f"{self.gateway.root_url}/v1", close))
                is_open.set()
                await release.wait()

        holding = self.thread.start_coroutine(hold())
        self._holding.append((holding, events))
        assert is_open.wait(30)
        return opened[0]

    def call_soon(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self.run(call())

    def close(self) -> None:
        self.thread.close(self.gateway.close())
