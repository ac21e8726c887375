"""Reads sampled tokens as a message, with vLLM's parsers of reasoning and of tool calls where they are set.

vLLM's parsers are lenient, as a server must be: a broken call becomes plain text, a call that was cut off is
mended, and some text vanishes. A policy must not be paid for such a call, so this reader checks what it wrote
and reports `parse_error`.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.renderer import Reply

CALL = ("<tool_call>", "</tool_call>")
FUNCTION = (("<function=", "</function>"), ("<parameter=", "</parameter>"))
DEEPSEEK = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
)
CALL_MARKS: dict[str, tuple[tuple[str, str], ...]] = {
    "hermes": (CALL,),
    "qwen3_json": (CALL,),
    "qwen3_coder": (CALL, *FUNCTION),
    "qwen3_xml": (CALL, *FUNCTION),
    "glm45": (CALL, ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
    "glm47": (CALL, ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "kimi_k2": (
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "minimax_m2": (("<minimax:tool_call>", "</minimax:tool_call>"), ("<invoke", "</invoke>")),
    "seed_oss": (("<seed:tool_call>", "</seed:tool_call>"), *FUNCTION),
}
"""The marks that a parser's calls stand between, each to be closed as often as it is opened. Between the
first of them stands at least one call."""
LOOKS_LIKE_CALL = {
    "llama3_json": re.compile(r'\s*(<\|python_tag\|>|\{.*"name"\s*:)', re.DOTALL),
    "llama4_json": re.compile(r'\s*(<\|python_tag\|>|\{.*"name"\s*:)', re.DOTALL),
    "pythonic": re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\("),
    "llama4_pythonic": re.compile(r"\s*(<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\("),
}
"""Formats without marks: a text that begins like this is meant as a call."""
READ_WHOLE = ("hermes", "qwen3_json", *LOOKS_LIKE_CALL)
"""Parsers that take a call only with its complete arguments, so that none is half of one."""


class ReplyReader:
    """Reads completions. Without parsers a reply is its text, without special tokens."""

    def __init__(
        self, tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        """Raises ValueError where vLLM has no such parser, or where it does not suit the tokenizer."""
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self.thinks_at_once = False
        """True where the template begins the thinking, so that the reply does not show its beginning."""
        if tool_parser is None and reasoning_parser is None:
            return
        self._parser_tokenizer = load_parser_tokenizer(tokenizer)
        if tool_parser is not None:
            self._tool_class = find_parser("tool_parser", tool_parser)
            reader = self._make_parser("tool_parser", tool_parser, self._tool_class)
            require_reading(
                "tool_parser",
                tool_parser,
                lambda: reader.extract_tool_calls("four", make_request(())).content,
            )
        if reasoning_parser is not None:
            reasoning_class = find_parser("reasoning_parser", reasoning_parser)
            self._reasoning = self._make_parser("reasoning_parser", reasoning_parser, reasoning_class)
            require_reading(
                "reasoning_parser",
                reasoning_parser,
                lambda: len(self._reasoning.extract_reasoning("four", make_request(()))),
            )

    def read_reply(
        self,
        tokens: Sequence[int],
        finish_reason: str,
        tools: Sequence[ToolSpec],
        turn: int,
        reads_calls: bool = True,
    ) -> Reply:
        """`reads_calls=False` leaves what looks like a call as text."""
        reads_calls = reads_calls and self._tool_parser is not None
        if not reads_calls and self._reasoning_parser is None:
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
            return Reply({"role": "assistant", "content": text})
        said = list(tokens)
        if said and said[-1] in self._special_ids and finish_reason != "length":
            said.pop()
        text = str(self._tokenizer.decode(said, skip_special_tokens=False))
        reasoning, content = self._divide_thinking(text)
        message: Message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if not reads_calls:
            return Reply(message)
        return self._read_calls(message, finish_reason, tools, _name_calls(tokens, turn))

    def _divide_thinking(self, text: str) -> tuple[str | None, str]:
        if self._reasoning_parser is None:
            return None, text
        start, end = self._reasoning.reasoning_start_str, self._reasoning.reasoning_end_str
        # Some parsers take a text without any mark for thinking that was cut off.
        is_marked = start is None or end is None or start in text or end in text
        if not is_marked and not self.thinks_at_once:
            return None, text
        reasoning, content = self._reasoning.extract_reasoning(text, make_request(()))
        return reasoning, content or ""

    def _read_calls(
        self, message: Message, finish_reason: str, tools: Sequence[ToolSpec], name_call: Callable[[int], str]
    ) -> Reply:
        text = message["content"]
        request = make_request(tools)
        try:
            found = self._tool_class(self._parser_tokenizer, request.tools).extract_tool_calls(text, request)
        # Parsers are many, and a policy writes anything: whatever one raises is about this text.
        except Exception as error:
            return Reply(message, f"{self._tool_parser} raised {type(error).__name__}: {error}"[:200])
        calls = [
            {
                "id": name_call(place),
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for place, call in enumerate(found.tool_calls if found.tools_called else ())
        ]
        problem = self._check_calls(text, calls, found.content or "", finish_reason)
        if problem is not None:
            return Reply(message, problem)
        if calls:
            message = {**message, "content": found.content or "", "tool_calls": calls}
        return Reply(message)

    def _check_calls(
        self, text: str, calls: Sequence[dict[str, Any]], content: str, finish_reason: str
    ) -> str | None:
        """Returns what is wrong with the calls in a text, by what the parser made of it."""
        name = str(self._tool_parser)
        for place, (opening, closing) in enumerate(CALL_MARKS.get(name) or _find_marks(self._tool_class)):
            opened, closed = text.count(opening), text.count(closing)
            if opened != closed:
                return f"{opening} must be closed by {closing}, got {opened} and {closed} of them"
            if place == 0 and opened > len(calls):
                return f"{opening} must hold a call that {name} can read, got {len(calls)} calls of {opened}"
        if not calls:
            looks = LOOKS_LIKE_CALL.get(name)
            if looks is not None and looks.match(text):
                return f"a call must be one that {name} can read, got {text[:80]!r}"
            return None if content.strip() or not text.strip() else f"{name} read nothing in {text[:80]!r}"
        if finish_reason == "length" and name not in CALL_MARKS and name not in READ_WHOLE:
            return f"{name} may have mended a call that was cut off"
        return next(filter(None, map(_find_problem, calls)), None)

    def _make_parser(self, key: str, name: str, parser_class: Any) -> Any:
        try:
            return parser_class(self._parser_tokenizer)
        # Each parser complains in its own way of a tokenizer that lacks its tokens.
        except Exception as error:
            raise ValueError(
                f"episodes.{key} must suit the model's tokenizer, got {name}: {type(error).__name__}: {error}"
            ) from error


class ReadsReplies:
    """The half of a renderer that all have in common: it reads replies with a `ReplyReader`."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader

    def parse_reply(
        self,
        tokens: Sequence[int],
        finish_reason: str,
        *,
        tools: Sequence[ToolSpec] = (),
        turn: int = 0,
        reads_calls: bool = True,
    ) -> Reply:
        return self._reader.read_reply(tokens, finish_reason, tools, turn, reads_calls)


def find_parser(key: str, name: str) -> Any:
    """Returns vLLM's class of parsers of that name. Imports vLLM, which takes seconds."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    # A broken call is an everyday event here, and they log a stack for each.
    for package in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
    manager, find = (
        (ToolParserManager, ToolParserManager.get_tool_parser)
        if key == "tool_parser"
        else (ReasoningParserManager, ReasoningParserManager.get_reasoning_parser)
    )
    known = sorted(manager.list_registered())
    if name not in known:
        raise ValueError(f"episodes.{key} must be one of {', '.join(known)}, got {name}")
    return find(name)


def require_reading(key: str, name: str, read: Callable[[], Any]) -> None:
    """Raises ValueError for a parser that cannot read even a plain text: vLLM has some that only work inside
    its server, and with them every reply would be an error."""
    try:
        read()
    # Each stub complains in its own way.
    except Exception as error:
        raise ValueError(
            f"episodes.{key} must be one that reads a whole reply, got {name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def load_parser_tokenizer(tokenizer: Any) -> Any:
    """Returns a copy of the tokenizer for which a parser reads the vocabulary at no cost."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def make_request(tools: Sequence[ToolSpec]) -> Any:
    """Returns the request that vLLM's parsers want to see."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = [{"role": "user", "content": ""}]
    return ChatCompletionRequest(model="policy", messages=asked, tools=list(tools) or None)


def _name_calls(tokens: Sequence[int], turn: int) -> Callable[[int], str]:
    """Returns the names of a reply's calls, by their place in it: they follow from what was sampled."""
    digest = hashlib.sha256(json.dumps([turn, list(tokens)]).encode()).hexdigest()[:20]
    return lambda place: f"call_{digest}{place:04x}"


def _find_marks(parser_class: Any) -> tuple[tuple[str, str], ...]:
    """Returns the marks that a parser's class itself names."""
    marks = [getattr(parser_class, f"tool_call_{end}_token", None) for end in ("start", "end")]
    return ((marks[0], marks[1]),) if isinstance(marks[0], str) and isinstance(marks[1], str) else ()


def _find_problem(call: dict[str, Any]) -> str | None:
    """Returns what is wrong with a call that a parser has read."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str) or not name or not _can_be_sent(name):
        return f"a call must name its tool, got {name!r}"
    if not _is_object(arguments):
        return f"the arguments of {name} must be a JSON object, got {arguments[:80]!r}"
    # An escape such as \\ud800 in a call becomes text that neither a socket nor a tokenizer takes.
    return None if _can_be_sent(arguments) else f"the arguments of {name} must be text that UTF-8 can hold"


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    # A policy may nest brackets deeper than the reader goes.
    except (ValueError, RecursionError):
        return False


def _can_be_sent(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
