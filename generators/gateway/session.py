"""A session is one episode as its agent sees it: each request is a turn.

A request whose messages go on from a reply of this session is asked with the exact tokens of that turn before
it. Any other is rendered as a whole, and begins a branch of the episode: a conversation that was rewritten, a
sub-agent, the first one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from configs.sampling import SamplingConfig
from generators.engine import Completion
from generators.environment import Message
from generators.gateway.chat_answer import ChatAnswer, ChatChoice
from generators.gateway.chat_request import ChatRequest
from generators.gateway.followed_reply import FollowedReply
from generators.gateway.messages import ConversationKeys
from generators.gateway.refusals import RequestRefused
from generators.gateway.stops import cut_text
from generators.gateway.token_request import TokenRequest
from generators.group import Player, parse_turn_number, wait_for_all
from generators.rendering.renderer import Renderer
from generators.score_checks import describe_error

log = logging.getLogger("slipstream.generator")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The part that all sessions of a run share."""

    renderer: Renderer
    tokenizer: Any
    sampling: SamplingConfig
    max_turns: int
    max_model_len: int
    parses_calls: bool
    """True with `episodes.tool_parser`."""
    parses_reasoning: bool
    """True with `episodes.reasoning_parser`."""

    def has_plain_replies(self, request: ChatRequest) -> bool:
        """True where a reply is its text, which grows at its end only while it is sampled."""
        return not self.parses_reasoning and not (self.parses_calls and request.reads_calls)


@dataclass(frozen=True, slots=True)
class GivenReply:
    """A reply that the client may echo."""

    turn: int
    reasoning: str


@dataclass(slots=True)
class GatewaySession:
    player: Player
    rules: SessionRules
    stop: str | None = None
    """Why the policy is not asked any further, a word of `buffers.trajectory`: `max_turns` or
    `context_overflow` when the last request was refused for that."""
    failure: Exception | None = None
    """The first fault of the generator's own. The episode has failed then, whatever its agent says."""
    is_closed: bool = False
    messages: list[Message] = field(default_factory=list)
    """The conversation of the last answered chat, with its first reply."""
    last_reason: str = ""
    """Finish reason of the last turn."""
    ends_in_parse_error: bool = False
    """True when a call in the last turn could not be read."""
    _given: dict[bytes, list[GivenReply]] = field(default_factory=dict)
    """By the digest of a conversation that ends with the replies."""
    _open_requests: set[asyncio.Future[Any]] = field(default_factory=set)

    def hold_request(self, answering: "asyncio.Future[Any]") -> None:
        """Keeps a request that is being answered, so that the end of the session cancels it."""
        self._open_requests.add(answering)
        answering.add_done_callback(self._open_requests.discard)

    async def close(self) -> None:
        """Cancels the requests that are open, which withdraws what they have asked for."""
        self.is_closed = True
        cancelled = list(self._open_requests)
        for answering in cancelled:
            answering.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)

    async def answer_chat(
        self, request: ChatRequest, show_text: Callable[[str, int, str], None] | None = None
    ) -> ChatAnswer:
        """Raises RequestRefused for what is beyond the limits of an episode.

        `show_text` gets the answer's id, the number of a choice and the text that it goes on with. It is for
        plain replies only.
        """
        keys = ConversationKeys(request.messages, request.tools)
        prompt = self._make_prompt(request, keys)
        answer_id = f"chatcmpl-{self.player.next_sample_id.replace('/', '-')}"
        replies = [
            FollowedReply(
                self.rules.tokenizer,
                request.stop,
                show_text=None if show_text is None else partial(show_text, answer_id, number),
            )
            for number in range(request.num_choices)
        ]
        ends = self.rules.renderer.stop_tokens
        completions = await self._sample(prompt, request.max_tokens, replies, ends)
        choices = [
            self._read_choice(request, completion, reply.shown)
            for completion, reply in zip(completions, replies, strict=True)
        ]
        for choice in choices:
            given = GivenReply(
                parse_turn_number(choice.completion.id), choice.message.get("reasoning_content", "")
            )
            self._given.setdefault(keys.append_reply(choice.message), []).append(given)
        self.messages = [*request.messages, choices[0].message]
        self.ends_in_parse_error = choices[-1].parse_error is not None
        return ChatAnswer(
            id=answer_id,
            num_prompt_tokens=len(prompt),
            choices=choices,
        )

    async def answer_tokens(self, request: TokenRequest) -> list[Completion]:
        """Raises RequestRefused for what is beyond the limits of an episode."""
        replies = [
            FollowedReply(self.rules.tokenizer, stop_tokens=request.stop_tokens)
            for _ in range(request.num_choices)
        ]
        completions = await self._sample(request.prompt, request.max_tokens, replies, request.stop_tokens)
        self.ends_in_parse_error = False
        return completions

    def _make_prompt(self, request: ChatRequest, keys: ConversationKeys) -> list[int]:
        """Returns the tokens of a conversation, which begin with those of its last turn where it has one."""
        renderer, messages, tools = self.rules.renderer, request.messages, request.tools
        try:
            for place in range(len(messages) - 2, -1, -1):
                if messages[place]["role"] != "assistant":
                    continue
                turn = self._find_turn(keys.keys[place], messages[place])
                if turn is None:
                    break
                held = self.player.branches.list_tokens(turn)
                extended = renderer.extend_prompt(held, messages[place + 1 :], tools)
                if extended is not None:
                    return extended
                break
            return renderer.render_first(messages, tools)
        # A chat template may raise anything for messages that it does not foresee.
        except Exception as error:
            raise RequestRefused(
                400, f"messages must be ones that can be rendered: {describe_error(error)}", field="messages"
            ) from error

    def _find_turn(self, key: bytes, echoed: Message) -> int | None:
        """Returns the turn whose reply ends the conversation; where there are several, the latest that has
        the echoed reasoning, if any is echoed."""
        given = self._given.get(key, [])
        if reasoning := echoed.get("reasoning_content"):
            given = [one for one in given if one.reasoning == reasoning]
        return given[-1].turn if given else None

    async def _sample(
        self,
        prompt: list[int],
        max_tokens: int | None,
        replies: Sequence[FollowedReply],
        stop_tokens: frozenset[int] = frozenset(),
    ) -> list[Completion]:
        most = self._limit_tokens(prompt, max_tokens)
        self._require_turns(len(replies))
        try:
            asked = [self.player.ask_policy(prompt, most, reply, stop_tokens) for reply in replies]
            completions = await wait_for_all(asked)
        except Exception as error:
            self.failure = self.failure or error
            log.error("the gateway cannot sample a turn: %s", describe_error(error))
            raise RequestRefused(500, f"the turn cannot be sampled: {describe_error(error)}") from error
        self.stop, self.last_reason = None, completions[-1].finish_reason
        return completions

    def _limit_tokens(self, prompt: list[int], max_tokens: int | None) -> int:
        """Returns the longest reply that the request, the run and the context allow."""
        room = self.rules.max_model_len - len(prompt)
        if room < 1:
            self.stop = "context_overflow"
            raise RequestRefused(
                400,
                f"messages must have fewer tokens than the model's maximum context length of "
                f"{self.rules.max_model_len} (generators.max_model_len), got {len(prompt)}",
                code="context_length_exceeded",
                field="messages",
            )
        most = min(room, self.rules.sampling.max_tokens)
        return most if max_tokens is None else min(most, max_tokens)

    def _require_turns(self, count: int) -> None:
        """Raises RequestRefused beyond the last turn. OpenAI's clients do not repeat a request after 400."""
        # A turn whose client has gone has used its number, and the record has `max_turns` numbers.
        used = self.player.num_asked
        if used + count > self.rules.max_turns:
            self.stop = "max_turns"
            raise RequestRefused(
                400,
                f"an episode must have at most {self.rules.max_turns} turns (episodes.max_turns), got "
                f"{count} more after {used}",
                code="max_turns",
            )

    def _read_choice(self, request: ChatRequest, completion: Completion, shown: str) -> ChatChoice:
        tokens, reason = completion.tokens, completion.finish_reason
        turn = parse_turn_number(completion.id)
        reply = self.rules.renderer.parse_reply(
            tokens, reason, tools=request.tools, turn=turn, reads_calls=request.reads_calls
        )
        message = reply.message
        if request.stop and message.get("content"):
            message = {**message, "content": cut_text(message["content"], request.stop)}
        # What has been sent is the reply, also where a tokenizer reads all tokens together in another way.
        if not message["content"].startswith(shown):
            message = {**message, "content": shown}
        return ChatChoice(message=message, completion=completion, parse_error=reply.parse_error, shown=shown)
