"""Renders what is new in a conversation as the difference that it makes to a chat template's text.

A base conversation with a marked reply is rendered with the new messages behind it. The text behind the
mark, from the token that closes the reply, is what the template says for these messages. The earlier tokens
are never rendered again.

    <|im_start|>user … <|im_start|>assistant  MARK  <|im_end|>  \\n<|im_start|>user …<|im_start|>assistant
    ╰─ the base: thrown away ──────────────────────╯ ╰ close ──╯ ╰─ rest: encoded, put behind what is held ──╯
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.encoder import TextEncoder
from generators.rendering.endings import MARK, find_ends
from generators.rendering.messages import TEMPLATE_ERRORS, adapt_message
from generators.rendering.opening import QUESTION, ThinkingMarks, find_opening, find_reply
from generators.rendering.parsing import ReadsReplies, ReplyReader

FOLLOWING = "MARKEDRESULT"
CALL_ID, CALL_NAME = "call00000", "tool"
KEPT_SUFFIXES = 512
"""Suffixes that are kept, because environments repeat themselves."""
LONGEST_KEPT = 4096
"""Characters of the longest messages whose suffix is kept."""


@dataclass(frozen=True, slots=True)
class Suffix:
    """The tokens that a template puts behind a reply."""

    close: int | None
    """The token that ends the reply, where the template has one."""
    rest: tuple[int, ...]
    """The tokens from behind `close` to where the policy begins its next reply."""


class DifferenceRenderer(ReadsReplies):
    """Renders the first prompt with the chat template, and later ones as what is held plus a suffix.

    Where the reply was cut off, its thinking is ended and its close is put behind it, as the template would.
    """

    def __init__(self, tokenizer: Any, reader: ReplyReader) -> None:
        super().__init__(reader)
        self._tokenizer, self._encoder = tokenizer, TextEncoder(tokenizer)
        # Some models have several templates by name: one with tools, and one without.
        template = tokenizer.chat_template
        written = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        digest = hashlib.sha256(written.encode()).hexdigest()[:12]
        self.name = f"difference-1:{digest}"
        self._suffixes: OrderedDict[str, Suffix] = OrderedDict()
        self._arguments_as_objects = True
        self._arguments_as_objects = self._accepts_objects()
        self._closes: dict[str, str | None] = {}
        """The text of the special token that ends a reply before messages of a role."""
        self._lead = self._find_lead()
        self._hidden: dict[tuple[str, bool], bool] = {}
        """By role, and whether its message is the first: whether the template passes over it."""
        ends = find_ends(tokenizer)
        # A template that ends no reply lets the next message do it.
        closes = set() if ends else {self._find_close(role) for role in ("user", "tool")}
        self.stop_tokens = ends | {
            int(tokenizer.convert_tokens_to_ids(close))
            for close in (*closes, tokenizer.eos_token)
            if close is not None
        }
        self._opening, self._thinking = find_opening(tokenizer), ThinkingMarks(tokenizer)
        reader.thinks_at_once = self._thinking.is_thinking(self._opening)

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        hidden = self._find_hidden(messages, begins=True)
        if hidden is not None:
            raise ValueError(
                f"messages must be ones that the model's chat template shows, got one of the role {hidden}, "
                "which it does not"
            )
        try:
            text, mark = self._render_text(messages, tools)
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"messages must be ones that the model's chat template accepts, got {roles}: {error}"
            ) from error
        return self._encoder.encode_guarded(text, mark)

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        is_hidden = self._find_hidden(new_messages, begins=False) is not None
        suffix = None if is_hidden else self._find_suffix(new_messages, tools)
        if suffix is None:
            return None
        ends = self.stop_tokens if suffix.close is None else (suffix.close,)
        if held and held[-1] in ends:
            return [*held, *suffix.rest]
        close = [] if suffix.close is None else [*self._lead, suffix.close]
        return [*held, *self._end_thinking(held), *close, *suffix.rest]

    def _find_hidden(self, messages: Sequence[Message], begins: bool) -> str | None:
        """Returns the first role of messages that the template passes over in silence. `begins`: the first of
        them begins the conversation, where many templates treat a system's message in a way of its own."""
        for place, message in enumerate(messages):
            case = message["role"], begins and not place
            if case not in self._hidden:
                texts = list(self._render_following(*case))
                self._hidden[case] = bool(texts) and not any(FOLLOWING in text for text in texts)
            if self._hidden[case]:
                return case[0]
        return None

    def _render_following(self, role: str, begins: bool = False) -> Iterator[str]:
        """Yields what a template makes of a marked message of a role: one that begins a conversation, or
        stands behind each reply that it could follow. Nothing where it refuses them."""
        following: Message = {"role": role, "content": FOLLOWING}
        if role == "tool":
            following |= {"tool_call_id": CALL_ID, "name": CALL_NAME}
        behind = [[QUESTION, reply, following] for reply in list_bases([following], MARK)]
        for messages in [[following, QUESTION]] if begins and role != "user" else behind:
            try:
                yield self._render_text(messages, ())[0]
            except TEMPLATE_ERRORS:
                continue

    def _render_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], reply_follows: bool = True
    ) -> tuple[str, str]:
        """Returns the template's text, and the character that breaks up special tokens in messages."""
        adapted = [adapt_message(m, arguments_as_objects=self._arguments_as_objects) for m in messages]
        (guarded, guarded_tools), mark = self._encoder.guard_text((adapted, list(tools)))
        text = self._tokenizer.apply_chat_template(
            guarded, tools=guarded_tools or None, tokenize=False, add_generation_prompt=reply_follows
        )
        return str(text), mark

    def _find_suffix(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Suffix | None:
        key = json.dumps([list(messages), list(tools)])
        suffix = self._suffixes.get(key)
        if suffix is not None:
            self._suffixes.move_to_end(key)
            return suffix
        suffix = self._make_suffix(messages, tools, key)
        if suffix is not None and len(key) <= LONGEST_KEPT:
            self._suffixes[key] = suffix
            if len(self._suffixes) > KEPT_SUFFIXES:
                self._suffixes.popitem(last=False)
        return suffix

    def _make_suffix(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], written: str
    ) -> Suffix | None:
        """Returns None where the template shows no marked reply or refuses the messages."""
        reply_mark = MARK
        while reply_mark in written:
            reply_mark += "X"
        for reply in list_bases(messages, reply_mark):
            try:
                text, mark = self._render_text([QUESTION, reply, *messages], tools)
            except TEMPLATE_ERRORS:
                continue
            _, found, behind = text.rpartition(reply_mark)
            if found:
                return self._cut_suffix(behind, mark, self._find_close(messages[0]["role"]))
        return None

    def _cut_suffix(self, behind: str, mark: str, close: str | None) -> Suffix:
        if close is None or close not in behind:
            return Suffix(None, tuple(self._encoder.encode_guarded(behind, mark)))
        # The close is encoded with what follows: some tokenizers let it swallow the line break behind it.
        token, *rest = self._encoder.encode_guarded(behind[behind.index(close) :], mark)
        return Suffix(token, tuple(rest))

    def _accepts_objects(self) -> bool:
        """True for templates that print the arguments of a tool call from an object, false for those that
        join their text to other text."""
        call = make_call({"role": "tool", "content": ""}, MARK)
        try:
            self._render_text([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], ())
        except TypeError:
            return False
        except TEMPLATE_ERRORS:
            return True
        return True

    def _find_region(self, role: str) -> str | None:
        """Returns the text between a reply and the content of a message of a role, or None where the template
        refuses such a message or passes over it."""
        for text in self._render_following(role):
            between, found, _ = text.rpartition(MARK)[2].partition(FOLLOWING)
            if found:
                return between
        return None

    def _find_close(self, role: str) -> str | None:
        """Returns the special token that ends a reply before a message of a role: the first that is known to
        end replies, else the first."""
        if role not in self._closes:
            found = self._encoder.list_specials(self._find_region(role) or "")
            known = [text for text in found if text in (self._tokenizer.eos_token, self._closes.get("user"))]
            self._closes[role] = next(iter(known or found), None)
        return self._closes[role]

    def _find_lead(self) -> list[int]:
        """Returns the white space that the template puts between a reply and its close."""
        region, close = self._find_region("user"), self._find_close("user")
        if region is None:
            raise ValueError(
                "episodes.renderer must suit the model's chat template, got difference for a template that "
                "does not show user, assistant, user"
            )
        return [] if close is None else self._encoder.encode_text(region.partition(close)[0])

    def _end_thinking(self, held: Sequence[int]) -> list[int]:
        """Returns what ends the thinking of a reply that was cut off in it."""
        is_cut_off = self._thinking.is_thinking(held[find_reply(held, self._opening) or 0 :])
        return self._thinking.ending if is_cut_off else []


def make_call(message: Message, mark: str) -> dict[str, Any]:
    """Returns the tool call that a tool's message answers."""
    return {
        "id": message.get("tool_call_id") or CALL_ID,
        "type": "function",
        "function": {"name": message.get("name") or CALL_NAME, "arguments": {"value": mark}},
    }


def list_bases(new_messages: Sequence[Message], mark: str) -> Iterator[Message]:
    """Yields replies that the new messages could follow, each with the mark near its end.

    Some templates take a tool's message only behind the call that it answers, and take its name from there.
    """
    results = [message for message in new_messages if message["role"] == "tool"]
    if results:
        calls = [make_call(message, mark) for message in results]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": mark}
