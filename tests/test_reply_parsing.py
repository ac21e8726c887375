"""Replies as messages: vLLM's own parsers, and the calls that they would let pass or lose."""

import json
from typing import Any

import pytest
from template_families import (
    LLAMA_SPECIALS,
    QWEN_SPECIALS,
    THINK_MARKERS,
    TOOL_MARKERS,
    family_tokenizer,
    make_tokenizer,
)

from configs.episodes import EpisodesConfig
from generators.rendering import Reply, choose_renderer
from generators.rendering.parsing import ReplyReader

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "2"}}'
PYTHONIC = "[add(a=1, b='2')]"
FORMATS = {"hermes": HERMES, "qwen3_coder": CODER, "llama3_json": LLAMA, "pythonic": PYTHONIC}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    specials = (*QWEN_SPECIALS, *LLAMA_SPECIALS)
    return make_tokenizer(None, specials, TOOL_MARKERS + THINK_MARKERS, "<|im_end|>")


def read(
    tokenizer: Any,
    text: str,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    finish: str = "stop",
    turn: int = 0,
) -> Reply:
    reader = ReplyReader(tokenizer, tool_parser, reasoning_parser)
    return reader.read_reply(tokenizer.encode(text, add_special_tokens=False), finish, [ADD], turn)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_and_its_end_token_is_no_part_of_the_message(tokenizer: Any, name: str) -> None:
    reply = read(tokenizer, f"{FORMATS[name]}<|im_end|>", name)
    assert reply.parse_error is None and reply.message["role"] == "assistant"
    (call,) = reply.message["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "2"}
    assert reply.message["content"] == ""


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_cut_off_anywhere_is_never_a_call_and_never_silent(tokenizer: Any, name: str) -> None:
    """A parser would mend some of these and turn others into plain text. What ends before the format shows
    itself is text; where only white space or nothing is missing, the call is whole."""
    whole, shows = FORMATS[name], {"pythonic": 5, "llama3_json": 8}.get(name, len("<tool_call>"))
    for length in range(shows, len(whole)):
        reply = read(tokenizer, whole[:length], name, finish="length")
        assert "tool_calls" not in reply.message and reply.parse_error, whole[:length]
        assert reply.message["content"] == whole[:length]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES.replace("}}", "}")),
        ("hermes", HERMES + HERMES.replace("}}", "}")),
        ("hermes", HERMES.replace('{"a": 1, "b": "2"}', '"a"')),
        ("hermes", HERMES.replace('"add"', "7")),
        ("hermes", HERMES.replace('"add"', '""')),
        ("hermes", HERMES.replace('"add"', '"\\ud800"')),
        ("hermes", HERMES.replace('"2"', '"\\udfff"')),
        ("hermes", HERMES.replace("1", "[" * 5000 + "]" * 5000)),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
        ("hermes", HERMES.replace("<tool_call>", "")),
        ("qwen3_coder", CODER.replace("</function>", "")),
        ("qwen3_coder", CODER.replace("</parameter>", "", 1)),
        ("qwen3_coder", CODER + CODER[:30]),
        ("qwen3_coder", "<tool_call>garbage</tool_call>"),
        ("llama3_json", LLAMA[:-1]),
        ("llama3_json", f"<|python_tag|>{LLAMA[:-1]}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[add(a=f())]"),
        ("pythonic", "[add(a=1"),
    ],
)
def test_a_broken_call_is_a_parse_error_and_its_text_stays(tokenizer: Any, name: str, text: str) -> None:
    reply = read(tokenizer, f"well {text}" if name in ("hermes", "qwen3_coder") else text, name)
    assert reply.parse_error and "tool_calls" not in reply.message
    assert reply.message["content"].endswith(text)


def test_arguments_that_nest_deeper_than_a_reader_goes_are_a_parse_error() -> None:
    """This parser hands the arguments on as they are written."""
    marks = [f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
    tokenizer = make_tokenizer(None, QWEN_SPECIALS, tuple(marks), "<|im_end|>")
    begin, end, call, call_end, sep = marks
    for arguments, is_call in [('{"a": 1}', True), (f'{{"a": {"[" * 100_000}', False)]:
        reply = read(tokenizer, f"{begin}{call}add{sep}{arguments}{call_end}{end}", "deepseek_v31")
        assert ("tool_calls" in reply.message) == is_call == (reply.parse_error is None), reply


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_where_none_is_read_is_text(tokenizer: Any, name: str) -> None:
    tokens = tokenizer.encode(FORMATS[name] + "<|im_end|>", add_special_tokens=False)
    reply = ReplyReader(tokenizer, name).read_reply(tokens, "stop", [ADD], 0, reads_calls=False)
    assert reply == Reply({"role": "assistant", "content": FORMATS[name]})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "four", "the answer is [1, 2] or {3}", "a < b", "漢\n"])
def test_text_without_a_call_is_text(tokenizer: Any, name: str, text: str) -> None:
    assert read(tokenizer, text, name) == Reply({"role": "assistant", "content": text})


def test_the_ids_of_calls_follow_from_the_tokens_and_the_turn(tokenizer: Any) -> None:
    first, again, later = (read(tokenizer, HERMES + HERMES, "hermes", turn=turn) for turn in (0, 0, 1))
    ids = [call["id"] for call in first.message["tool_calls"]]
    assert first == again and len(set(ids)) == 2
    assert not {call["id"] for call in later.message["tool_calls"]} & set(ids)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nfour", "\nhm\n", "\n\nfour"),
        ("hm\n</think>\n\nfour", "hm\n", "\n\nfour"),
        ("<think>\ncut off", "\ncut off", ""),
        ("no thinking at all", None, "no thinking at all"),
    ],
)
def test_thinking_is_divided_from_the_answer_and_text_without_thinking_is_an_answer(
    tokenizer: Any, text: str, reasoning: str | None, content: str
) -> None:
    message = read(tokenizer, text, None, "qwen3").message
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_call_behind_thinking_is_read(tokenizer: Any) -> None:
    thought = "<think>\nperhaps add\n</think>\n\n"
    reply = read(tokenizer, f"{thought}{HERMES}<|im_end|>", "hermes", "qwen3")
    assert reply.parse_error is None and len(reply.message["tool_calls"]) == 1
    assert reply.message["reasoning_content"] == "\nperhaps add\n"


def test_where_the_template_begins_the_thinking_text_without_marks_is_thinking() -> None:
    template = family_tokenizer("qwen3").chat_template
    opening = "'<|im_start|>assistant\\n' + ("
    assert opening in template
    tokenizer = make_tokenizer(
        template.replace(opening, "'<|im_start|>assistant\\n<think>\\n' + ("),
        QWEN_SPECIALS,
        TOOL_MARKERS + THINK_MARKERS,
        "<|im_end|>",
    )
    renderer = choose_renderer(tokenizer, EpisodesConfig(reasoning_parser="qwen3"))
    cut_off = tokenizer.encode("let me see", add_special_tokens=False)
    message = renderer.parse_reply(cut_off, "length").message
    assert (message["reasoning_content"], message["content"]) == ("let me see", "")
    held = renderer.render_first([{"role": "user", "content": "q"}], []) + cut_off
    tokens = renderer.extend_prompt(held, [{"role": "user", "content": "more"}], [])
    assert tokens is not None
    assert tokenizer.decode(tokens[len(held) :]).startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("tool_parser", "openai"),
        ("tool_parser", "cohere_command4"),
        ("reasoning_parser", "openai_gptoss"),
        ("reasoning_parser", "cohere_command4"),
    ],
)
def test_a_parser_that_only_works_inside_vllms_server_is_refused(tokenizer: Any, key: str, name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"episodes\.{key} must be one that reads a whole reply, got {name}"
    ):
        ReplyReader(tokenizer, **{key: name})


@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_known_names(tokenizer: Any, key: str) -> None:
    with pytest.raises(ValueError, match=rf"episodes\.{key} must be one of .*deepseek_v3, .*, got qwen33"):
        choose_renderer(tokenizer, EpisodesConfig(**{key: "qwen33"}))


def test_a_parser_that_the_tokenizer_lacks_the_tokens_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"episodes\.tool_parser must suit the model's tokenizer, got jamba"):
        choose_renderer(family_tokenizer("tiny"), EpisodesConfig(tool_parser="jamba"))
