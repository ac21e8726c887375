"""Proves, at start-up and on the model's own tokenizer, that a renderer goes on from the sampled tokens.

Small conversations are played. After each reply the renderer must keep the tokens that it was handed, bit by
bit, and what it adds must be what the chat template itself says at the end of the whole conversation. A
template whose words for new messages depend on what was said before (numbered turns, say) fails here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.messages import TEMPLATE_ERRORS, adapt_message
from generators.rendering.opening import ThinkingMarks, find_opening
from generators.rendering.renderer import Renderer, Reply

ADD: ToolSpec = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
QUESTION: Message = {"role": "user", "content": "what is two and two?"}
MORE: Message = {"role": "user", "content": "and three more?\n"}
ANSWER: Message = {"role": "assistant", "content": "an earlier answer"}
WORDS = ("seventeen", "eighteen", "nineteen")
SHOWN = 4
"""Tokens of a difference that an error shows."""


@dataclass(frozen=True, slots=True)
class ProbedTurn:
    """A reply and what follows it, as one case of a proof."""

    kind: str
    """One of `user`, `tool`, `truncated` and `thinking`."""
    reply: Message
    said: str
    """The reply as a policy might have written it."""
    following: tuple[Message, ...]
    cut_off: str | None = None
    """The beginning of `said` that is left where the reply is cut off."""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(slots=True)
class Proof:
    """The outcome: the kinds of turns that are proved, and the first problem.

    A kind is neither where the template refuses such a conversation, so that none can occur.
    """

    proved: list[str] = field(default_factory=list)
    problem: str | None = None
    holds_without_tools: bool = True
    """False when turns without tools have a problem too."""


class UnprovedRenderer:
    """A renderer that was not proved: it begins a new branch after each reply, and never goes on."""

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self.name, self.stop_tokens = f"{inner.name} (unproved)", inner.stop_tokens

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return self._inner.render_first(messages, tools)

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        return None

    def parse_reply(
        self,
        tokens: Sequence[int],
        finish_reason: str,
        *,
        tools: Sequence[ToolSpec] = (),
        turn: int = 0,
        reads_calls: bool = True,
    ) -> Reply:
        return self._inner.parse_reply(tokens, finish_reason, tools=tools, turn=turn, reads_calls=reads_calls)


class ToollessRenderer(UnprovedRenderer):
    """A renderer that was proved for conversations without tools. Where tools are used, it says why it cannot
    go on, or begins a new branch where it need not be exact."""

    def __init__(self, inner: Renderer, problem: str, is_exact: bool) -> None:
        super().__init__(inner)
        self.name, self._problem, self._is_exact = f"{inner.name} (without tools)", problem, is_exact

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        self._has_tools(messages, tools)
        return self._inner.render_first(messages, tools)

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        if self._has_tools(new_messages, tools):
            return None
        return self._inner.extend_prompt(held, new_messages, tools)

    def _has_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        """Raises ValueError where there are tools and each turn has to be exact."""
        has_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
        if has_tools and self._is_exact:
            raise ValueError(
                "messages must use no tools with this chat template (episodes.exact=false begins a new "
                f"branch at each turn instead), got some for {self._problem}"
            )
        return has_tools


def prove_renderer(renderer: Renderer, tokenizer: Any, *, follows_template: bool) -> Proof:
    """Plays each kind of turn after one question, after earlier turns, and after a system message.

    Without `follows_template` the renderer must add the messages' contents and nothing else.
    """
    proof = Proof()
    hello = {"role": "user", "content": "hello"}
    call = _make_call(0)
    called: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        _answer_call(call, WORDS[2]),
    ]
    beginnings: list[list[Message]] = [[QUESTION], [hello, ANSWER, QUESTION]]
    if follows_template and _render_reference(tokenizer, [hello, *called, ANSWER, QUESTION], ()) is not None:
        beginnings.append([hello, *called, ANSWER, QUESTION])
    with_system = [{"role": "system", "content": "be brief"}, QUESTION]
    if follows_template and _render_reference(tokenizer, with_system, ()) is not None:
        beginnings.append(with_system)
    for turn in list_turns(*_find_thinking(tokenizer) if follows_template else (False, False)):
        outcomes = [_try_turn(renderer, tokenizer, before, turn, follows_template) for before in beginnings]
        problem = next((outcome for outcome in outcomes if outcome), None)
        if problem is not None:
            proof.problem = proof.problem or f"{turn.kind} turns: {problem}"
            proof.holds_without_tools = bool(turn.tools)
            if not turn.tools:
                return proof
        elif any(outcome is not None for outcome in outcomes) and turn.kind not in proof.proved:
            proof.proved.append(turn.kind)
    if "user" not in proof.proved:
        proof.problem = "user turns: the template refuses user, assistant, user"
        proof.holds_without_tools = False
    return proof


def list_turns(thinks: bool, thinks_at_once: bool) -> Iterator[ProbedTurn]:
    """Yields the cases. `thinks_at_once` says that the template itself begins the thinking of each reply."""
    begin, end = ("" if thinks_at_once else "<think>\n"), "\n</think>\n\n"
    plain: Message = {"role": "assistant", "content": "the answer is four"}
    spoken = (end if thinks_at_once else "") + plain["content"]
    yield ProbedTurn("user", plain, spoken, (MORE,))
    yield ProbedTurn("truncated", plain, spoken, (MORE,), cut_off=spoken.removesuffix(" four"))
    for count in (1, 2):
        calls = [_make_call(place) for place in range(count)]
        results = tuple(_answer_call(call, f"result {WORDS[place]}\n") for place, call in enumerate(calls))
        reply: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        yield ProbedTurn("tool", reply, spoken, results, tools=(ADD,))
        if count == 1:
            yield ProbedTurn("tool", reply, spoken, (*results, MORE), tools=(ADD,))
    if thinks:
        thought: Message = {**plain, "reasoning_content": "two and two"}
        yield ProbedTurn("thinking", thought, f"{begin}two and two{end}the answer is four", (MORE,))
        call = _make_call(0)
        calling = {**reply, "reasoning_content": "add them", "tool_calls": [call]}
        yield ProbedTurn(
            "thinking", calling, f"{begin}add them{end}", (_answer_call(call, WORDS[0]),), tools=(ADD,)
        )
        cut_off: Message = {"role": "assistant", "content": "", "reasoning_content": "two and"}
        yield ProbedTurn("thinking", cut_off, f"{begin}two and{end}", (MORE,), cut_off=f"{begin}two and")


def _try_turn(
    renderer: Renderer, tokenizer: Any, before: Sequence[Message], turn: ProbedTurn, follows_template: bool
) -> str | None:
    """Returns a problem, "" for none, and None where the template refuses the conversation."""
    reference: list[int] | None = None
    if follows_template:
        first = _render_reference(tokenizer, before, turn.tools)
        reference = _render_reference(tokenizer, [*before, turn.reply, *turn.following], turn.tools)
        if first is None or reference is None:
            return None
        lost = _find_lost(tokenizer.decode(reference), [*before, turn.reply, *turn.following])
        if lost is not None:
            return f"the template leaves out messages ({lost!r})"
        rendered = renderer.render_first(before, turn.tools)
        if rendered != first:
            return "the first prompt differs from the template's, " + _show_difference(
                tokenizer, rendered, first
            )
    prompt = renderer.render_first(before, turn.tools)
    closed = _close_reply(renderer, prompt + tokenizer.encode(turn.said, add_special_tokens=False), turn)
    if closed is None:
        return "the renderer cannot go on"
    close, suffix = closed
    if reference is not None:
        # The close is sampled, so it is compared too. A template without one lets the reply's text run on
        # into what follows, so there only the text can be compared.
        wanted = [*close, *suffix]
        is_closed = not close or close[0] in reference
        is_same_text = tokenizer.decode(reference).endswith(tokenizer.decode(suffix))
        if reference[-len(wanted) :] != wanted and (is_closed or not is_same_text):
            return "what follows a reply differs from the template's, " + _show_difference(
                tokenizer, wanted, reference[-len(wanted) :]
            )
    elif tokenizer.decode(suffix) != "".join(message["content"] for message in turn.following):
        return f"the renderer adds {tokenizer.decode(suffix)!r} to the messages"
    if turn.cut_off is None:
        return ""
    held = prompt + tokenizer.encode(turn.cut_off, add_special_tokens=False)
    extended = renderer.extend_prompt(held, turn.following, turn.tools)
    if extended is None or extended[: len(held)] != held:
        return "the renderer cannot go on from a reply that was cut off"
    added = extended[len(held) :]
    wanted = [*close, *suffix] if follows_template and close and close[0] in added else suffix
    if added[-len(wanted) :] != wanted:
        return "what follows a cut-off reply differs, " + _show_difference(
            tokenizer, added[-len(wanted) :], wanted
        )
    between = str(tokenizer.decode(added[: len(added) - len(wanted)]))
    _, ended, lead = between.partition("</think>") if turn.kind == "thinking" else ("", "</think>", between)
    said = "" if reference is None else tokenizer.decode(reference)
    if not ended or (reference is not None and not said.endswith(lead.lstrip() + tokenizer.decode(wanted))):
        return f"a cut-off reply is ended with {between!r}"
    return ""


def _close_reply(renderer: Renderer, held: list[int], turn: ProbedTurn) -> tuple[list[int], list[int]] | None:
    """Returns the stop token that the renderer takes for a reply's end, and what it puts behind it.

    Of several stop tokens it is the one that needs the least behind it. Returns None where the renderer
    refuses each, or changes `held`.
    """
    found: list[tuple[int, list[int], list[int]]] = []
    for close in [[token] for token in sorted(renderer.stop_tokens)] or [[]]:
        whole = [*held, *close]
        extended = renderer.extend_prompt(whole, turn.following, turn.tools)
        if extended is not None and extended[: len(whole)] == whole:
            found.append((len(extended), close, extended[len(whole) :]))
    if not found:
        return None
    _, close, suffix = min(found)
    return close, suffix


def _render_reference(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int] | None:
    """Returns the tokens of the template's own text for a whole conversation, or None where it refuses it.

    A template that passes over the results of tools refuses them too: renderers raise an error there.
    """
    for as_objects in (True, False):
        adapted = [adapt_message(message, arguments_as_objects=as_objects) for message in messages]
        try:
            text = tokenizer.apply_chat_template(
                adapted, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except TypeError:
            continue
        except TEMPLATE_ERRORS:
            return None
        if any(message["role"] == "tool" and message["content"].strip() not in text for message in adapted):
            return None
        return list(tokenizer.encode(text, add_special_tokens=False))
    return None


def _find_lost(text: str, messages: Sequence[Message]) -> str | None:
    place = 0
    for message in messages:
        content = message["content"].strip()
        place = text.find(content, place)
        if place < 0:
            return str(content)
    return None


def _show_difference(tokenizer: Any, got: Sequence[int], wanted: Sequence[int]) -> str:
    """Names the first tokens that differ."""
    pairs = zip(got, wanted, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))
    shown, expected = (
        f"{list(tokens[place : place + SHOWN])} {tokenizer.decode(list(tokens[place : place + SHOWN]))!r}"
        for tokens in (got, wanted)
    )
    return f"first at token {place}: {shown} instead of {expected}"


def _make_call(place: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 2}'}
    return {"id": f"call0000{place}", "type": "function", "function": function}


def _answer_call(call: dict[str, Any], content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": content}


def _find_thinking(tokenizer: Any) -> tuple[bool, bool]:
    """Returns whether there are marks of thinking, and whether the template begins it for each reply."""
    marks = ThinkingMarks(tokenizer)
    return marks.are_known, marks.is_thinking(find_opening(tokenizer))
