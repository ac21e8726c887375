"""Streams of the gateway while replies are sampled, and replies that end at their stop."""

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_clients import NEXT, USER, ask, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from generators.engine import Completion
from generators.gateway.followed_reply import FollowedReply, TextDecoder
from slipstream_bench.byte_tokenizer import make_byte_tokenizer
from slipstream_bench.gateway_rig import GatewayRig, OpenEpisode, ScriptedPolicy


@pytest.fixture(scope="module")
def rig() -> Iterator[GatewayRig]:
    """Replies are text: nothing is looked for in them."""
    rig = GatewayRig("episodes.tool_parser=null", "episodes.reasoning_parser=null")
    yield rig
    rig.close()


@pytest.fixture
def policy(rig: GatewayRig) -> ScriptedPolicy:
    rig.policy.reset()
    rig.policy.pause_s = 0.0
    return rig.policy


@pytest.fixture
def episode(rig: GatewayRig, policy: ScriptedPolicy) -> Iterator[OpenEpisode]:
    episode = rig.open_episode()
    yield episode
    episode.close()


def read_texts(chunks: Any, number: int = 0) -> list[str]:
    return [
        chunk.choices[0].delta.content
        for chunk in chunks
        if chunk.choices and chunk.choices[0].index == number and chunk.choices[0].delta.content
    ]


def test_text_comes_while_the_reply_is_sampled(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    policy.say, policy.steps = lambda sample: "one two", asyncio.Semaphore(3)
    stream = iter(ask(episode, USER, stream=True))
    first = next(text for chunk in stream if (text := chunk.choices[0].delta.content))
    assert "one".startswith(first) and episode.player.num_turns == 0, "the reply is not complete"
    policy.steps = None
    assert first + "".join(read_texts(stream)) == "one two"
    assert episode.player.num_turns == 1


def test_a_streamed_reply_is_the_recorded_one_and_is_known_again(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    policy.say = lambda sample: "für 漢字 \U0001f600!"
    chunks = list(ask(episode, USER, stream=True, n=2, stream_options={"include_usage": True}))
    for number in range(2):
        texts = read_texts(chunks, number)
        assert "".join(texts) == "für 漢字 \U0001f600!" and len(texts) > 5
        assert not any("\ufffd" in text for text in texts), "no character comes in parts"
    assert chunks[-1].usage.completion_tokens == 2 * len(rig.tokenizer.encode("für 漢字 \U0001f600!<|end|>"))
    assert len({chunk.id for chunk in chunks}) == 1
    ask(episode, USER, {"role": "assistant", "content": "für 漢字 \U0001f600!"}, NEXT)
    assert len(episode.player.branches.branches) == 2


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "given", "num_recorded"),
    [
        ("one two three four five six", ["thr"], "one two ", 11),
        ("one two three four five six", [" four", "three f"], "one two ", 15),
        ("aab aac aad and so on and on", ["aac", "aad"], "aab ", 7),
        ("naïve 漢字 and so on and on", ["字"], "naïve 漢", 13),
    ],
)
def test_a_stop_string_ends_the_engines_sample_and_no_part_of_it_is_shown(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode,
    streams: bool, said: str, stop: list[str], given: str, num_recorded: int,
) -> None:  # fmt: skip
    policy.say = lambda sample: said
    answer = ask(episode, USER, stop=stop, stream=streams)
    if streams:
        chunks = list(answer)
        text, reason = "".join(read_texts(chunks)), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (given, "stop")
    [branch] = episode.player.branches.branches
    assert sum(branch.sampled) == num_recorded
    assert policy.num_sampled == num_recorded + 1, "the engine was told to end, and had one token more"
    ask(episode, USER, {"role": "assistant", "content": given}, NEXT)
    assert len(episode.player.branches.branches) == 1


def test_a_stop_that_never_comes_changes_nothing(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    policy.say = lambda sample: "one two"
    assert "".join(read_texts(ask(episode, USER, stop="two!", stream=True))) == "one two"
    assert sum(episode.player.branches.branches[0].sampled) == len("one two") + 1


def test_a_client_that_leaves_in_the_middle_of_a_stream_withdraws_its_turn(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    policy.say, policy.steps = lambda sample: "one two", asyncio.Semaphore(3)
    connection = http.client.HTTPConnection(rig.gateway.root_url.removeprefix("http://"), timeout=60)
    body = json.dumps({"messages": [USER], "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {episode.key}"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    connection.close()
    answer.close()
    wait_until(lambda: policy.withdrawn, 60)
    assert policy.withdrawn == [policy.samples[0].id] and episode.player.num_turns == 0
    policy.steps = None
    assert ask(episode, USER).choices[0].message.content == "one two"


def test_the_end_of_an_episode_and_a_fault_end_a_stream_with_an_error(
    rig: GatewayRig, policy: ScriptedPolicy
) -> None:
    policy.say, policy.steps = lambda sample: "one two", asyncio.Semaphore(3)
    first = rig.open_episode()
    stream = iter(ask(first, USER, stream=True))
    next(stream)
    first.close()
    with pytest.raises(openai.APIError, match="episode of this key must be open"):
        list(stream)
    policy.steps, policy.fails_after = None, 4
    second = rig.open_episode()
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(ask(second, USER, stream=True))
    assert "the engine is gone" in str(second.session.failure) and second.player.num_turns == 0
    second.close()


def test_what_is_refused_has_its_own_status_in_a_stream_too(episode: OpenEpisode) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(episode, {"role": "user", "content": "x" * 3000}, stream=True)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab é漢\U0001f600\n", max_size=30),
    broken=st.lists(st.integers(1, 256), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stop=st.lists(st.text(alphabet="ab é漢", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_piece_by_piece_is_the_beginning_of_the_reply_whatever_the_pieces(
    text: str, broken: list[int], cuts: list[int], stop: list[str]
) -> None:
    tokenizer = make_byte_tokenizer()
    tokens = [*tokenizer.encode(text), *broken, *tokenizer.encode(text)]
    shown: list[str] = []
    reply = FollowedReply(tokenizer, stop, show_text=shown.append)
    assert reply.watch is not None
    place, has_ended = 0, False
    for size in cuts * len(tokens):
        if place >= len(tokens) or has_ended:
            break
        has_ended = reply.watch(tokens[place : place + size])
        place += size
    sampled = tokens[: place + 2]
    completion = Completion(
        id="0/0/0", tokens=sampled, logprobs=[0.0] * len(sampled), versions=[0] * len(sampled),
        finish_reason="abort",
    )  # fmt: skip
    kept = reply.cut_reply(completion)
    whole = tokenizer.decode(kept.tokens)
    assert not has_ended or any(one in tokenizer.decode(tokens[:place]) for one in stop)
    assert not has_ended or kept.finish_reason == "stop"
    assert "".join(shown) == reply.shown
    assert not any(one in reply.shown for one in stop)
    if not broken:
        assert whole.startswith(reply.shown) and "\ufffd" not in reply.shown


def test_a_character_that_is_never_complete_is_not_waited_for_without_end() -> None:
    tokenizer = make_byte_tokenizer()
    decoder = TextDecoder(tokenizer, skip_special_tokens=True)
    continuation = tokenizer.encode("漢")[1:2]
    assert "".join(decoder.decode_more(continuation) for _ in range(1000)).count("\ufffd") > 700
