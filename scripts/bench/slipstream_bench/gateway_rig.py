"""A gateway with a policy that answers by script, served over a real socket from an episode thread.

Tests, the fuzz and the benchmark of the gateway use it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from buffers.messages import Lease
from configs.load import load_config
from generators.engine import Completion, Sample
from generators.episode_thread import EpisodeThread
from generators.gateway.server import Gateway
from generators.gateway.session import GatewaySession
from generators.group import GroupProgress, Player
from generators.policy import Watch
from generators.rendering.difference import DifferenceRenderer
from generators.rendering.parsing import ReplyReader
from generators.rendering.renderer import Reply
from slipstream_bench.byte_tokenizer import make_byte_tokenizer

T = TypeVar("T")

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OVERRIDES = [
    "generators.engine=simulated", "learner.engine=simulated", "generators.max_model_len=2000",
    "sampling.max_tokens=200", "episodes.max_turns=16", "generators.count=1",
    # `CallReader` takes the place of both.
    "episodes.tool_parser=hermes", "episodes.reasoning_parser=qwen3",
]  # fmt: skip


def make_chat_tokenizer() -> Any:
    """Returns a tokenizer of bytes with a chat template."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ScriptedPolicy:
    """Answers with the texts that `say` returns, and keeps what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Says `four` from here on, at once, with version 0."""
        self.say: Callable[[Sample], str] = lambda sample: "four"
        self.keeps_samples = True
        self.samples: list[Sample] = []
        self.withdrawn: list[str] = []
        self.version = 0
        """The weights' version."""
        self.gate: asyncio.Event | None = None
        """Replies wait for it where it is set."""
        self.pause_s: float | None = None
        """Seconds between two tokens of a reply that is watched. None: all come at once, when it ends."""
        self.steps: asyncio.Semaphore | None = None
        """Each token of a reply that is watched takes one where it is set."""
        self.fails_after: int | None = None
        """Number of a watched reply's tokens after which the engine fails."""
        self.num_sampled = 0
        """Tokens of all replies, those behind a stop included."""

    async def sample_turn(self, sample: Sample, watch: Watch | None = None) -> Completion:
        if self.keeps_samples:
            self.samples.append(sample)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.append(sample.id)
            raise
        tokens = [*self._tokenizer.encode(self.say(sample), add_special_tokens=False)]
        tokens.append(self._tokenizer.eos_token_id)
        reason = "stop" if len(tokens) <= sample.max_tokens else "length"
        tokens = tokens[: sample.max_tokens]
        if watch is not None and self.pause_s is not None:
            count = await self._show_tokens(tokens, watch, sample.id)
            reason = reason if count is None else "abort"
            tokens = tokens[:count]
        self.num_sampled += len(tokens)
        return Completion(
            id=sample.id,
            tokens=tokens,
            logprobs=[-(1 + place) / 64 for place in range(len(tokens))],
            versions=[self.version] * len(tokens),
            finish_reason=reason,
        )

    async def _show_tokens(self, tokens: list[int], watch: Watch, sample_id: str) -> int | None:
        """Shows a reply token by token. Returns how many an engine has sampled of one that is ended early,
        one more than it has shown; else None."""
        try:
            for count, token in enumerate(tokens, 1):
                await asyncio.sleep(self.pause_s or 0)
                while self.steps is not None and self.steps.locked():
                    await asyncio.sleep(0.005)
                if self.steps is not None:
                    await self.steps.acquire()
                if count == self.fails_after:
                    raise RuntimeError("the engine is gone")
                if watch([token]):
                    return count + 1
        except asyncio.CancelledError:
            self.withdrawn.append(sample_id)
            raise
        return None


class CallReader:
    """Reads `CALL name {...}` as a tool call, and `<think>…</think>` as reasoning."""

    thinks_at_once = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read_reply(
        self, tokens: Any, finish_reason: str, tools: Any, turn: int, reads_calls: bool = True
    ) -> Reply:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        if text.startswith("<think>"):
            reasoning, _, text = text.removeprefix("<think>").partition("</think>")
            message |= {"content": text, "reasoning_content": reasoning}
        if reads_calls and text.startswith("CALL "):
            _, name, arguments = [*text.split(" ", 2), ""][:3]
            if not arguments.endswith("}"):
                return Reply(message, "a call must end with a brace")
            function = {"name": name, "arguments": arguments}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            message |= {"content": "", "tool_calls": [call]}
        return Reply(message)


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    key: str
    session: GatewaySession
    player: Player
    base_url: str
    close: Callable[[], None]


class GatewayRig:
    def __init__(self, *overrides: str) -> None:
        self.config = load_config([*OVERRIDES, *overrides])
        self.tokenizer = make_chat_tokenizer()
        self.policy = ScriptedPolicy(self.tokenizer)
        parses = self.config.episodes.tool_parser is not None
        reader: Any = CallReader(self.tokenizer) if parses else ReplyReader(self.tokenizer)
        renderer = DifferenceRenderer(self.tokenizer, reader)
        self.gateway = Gateway(self.config, renderer, self.tokenizer)
        self.thread = EpisodeThread()
        self.run(self.gateway.open())
        self._num_episodes = 0
        self._holding: dict[int, Any] = {}
        """The loop itself keeps no task alive."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.thread.start_coroutine(coroutine).result(600)

    def make_player(self) -> Player:
        """Returns the player of an episode of its own."""
        number, self._num_episodes = self._num_episodes, self._num_episodes + 1
        lease = Lease(
            id=number, group=number, due=0, task="t", index=number, seed=0, split="train", num_samples=1,
            min_version=0,
        )  # fmt: skip
        return Player(self.policy, lease, 0, self.config.sampling.max_tokens, GroupProgress(1, 1))

    def open_episode(self) -> OpenEpisode:
        player = self.make_player()
        number, opened, is_open = player.lease.id, list[OpenEpisode](), threading.Event()
        release = asyncio.Event()

        def close() -> None:
            self.run(_set_event(release))
            self._holding.pop(number).result(60)

        async def hold() -> None:
            async with self.gateway.open_session(player) as (key, session):
                opened.append(OpenEpisode(key, session, player, f"{self.gateway.root_url}/v1", close))
                is_open.set()
                await release.wait()

        self._holding[number] = self.thread.start_coroutine(hold())
        assert is_open.wait(60), "an episode must open within 60 s"
        return opened[0]

    def close(self) -> None:
        self.thread.close(self.gateway.close())


async def _set_event(event: asyncio.Event) -> None:
    event.set()
