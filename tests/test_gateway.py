"""The gateway: real clients speak with a policy through it, and each of their requests is a turn."""

import asyncio
import gc
import http.client
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from gateway_clients import NEXT, USER, ask, make_client, wait_until

from fuzz_gateway import attack_socket
from generators.gateway import connection as gateway_connection
from generators.gateway.chat_request import read_chat_request
from generators.gateway.fields import parse_body
from generators.gateway.refusals import RequestRefused
from generators.gateway.server import open_listener
from slipstream_bench.gateway_attack import MAX_BODY_MB, GatewayAttack
from slipstream_bench.gateway_latency import measure_gateway
from slipstream_bench.gateway_rig import GatewayRig, OpenEpisode, ScriptedPolicy

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def rig() -> Iterator[GatewayRig]:
    rig = GatewayRig()
    yield rig
    rig.close()


@pytest.fixture
def policy(rig: GatewayRig) -> ScriptedPolicy:
    """The rig's policy, which says `four` and waits for nothing."""
    rig.policy.reset()
    return rig.policy


@pytest.fixture
def episode(rig: GatewayRig, policy: ScriptedPolicy) -> Iterator[OpenEpisode]:
    episode = rig.open_episode()
    yield episode
    episode.close()


def post(episode: OpenEpisode, body: Any, path: str = "/v1/chat/completions", **options: Any) -> Any:
    headers = {"authorization": f"Bearer {episode.key}"}
    root = episode.base_url.removesuffix("/v1")
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(root + path, content=content, headers=headers, timeout=60, **options)


# ---- conversations


def test_a_conversation_goes_on_with_the_exact_tokens_that_were_sampled(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    messages: list[Any] = [{"role": "system", "content": "be brief"}, USER]
    for turn in range(4):
        reply = ask(episode, *messages)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("four", "stop")
        messages += [reply.choices[0].message, {"role": "user", "content": f"again {turn} é"}]
    [branch] = episode.player.branches.branches
    assert [sample.prompt for sample in policy.samples] == [
        branch.tokens[: len(sample.prompt)] for sample in policy.samples
    ]
    sampled = [token for token, flag in zip(branch.tokens, branch.sampled, strict=True) if flag]
    assert rig.tokenizer.decode(sampled) == "four<|end|>" * 4
    assert sorted(set(branch.turn)) == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "echoed",
    [
        {"role": "assistant", "content": "four"},
        {"role": "assistant", "content": [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]},
        {"role": "assistant", "content": "four", "tool_calls": None, "refusal": None, "audio": None},
        {"role": "assistant", "content": "four", "tool_calls": [], "annotations": [], "name": None},
    ],
)
def test_a_reply_is_known_again_whatever_fields_a_client_adds_or_drops(
    policy: ScriptedPolicy, episode: OpenEpisode, echoed: Any
) -> None:
    ask(episode, USER)
    assert post(episode, {"messages": [USER, echoed, NEXT]}).status_code == 200
    assert len(episode.player.branches.branches) == 1


@pytest.mark.parametrize(
    "rewritten",
    [
        [USER, {"role": "assistant", "content": "five"}, NEXT],
        [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "four"}, NEXT],
        [{"role": "system", "content": "new"}, USER, {"role": "assistant", "content": "four"}, NEXT],
        [NEXT],
    ],
)
def test_a_conversation_that_was_rewritten_begins_a_branch_and_no_sampled_token_is_lost(
    rig: GatewayRig, episode: OpenEpisode, rewritten: Any
) -> None:
    ask(episode, USER)
    ask(episode, *rewritten)
    first, second = episode.player.branches.branches
    for branch in (first, second):
        sampled = [token for token, flag in zip(branch.tokens, branch.sampled, strict=True) if flag]
        assert rig.tokenizer.decode(sampled) == "four<|end|>"
    assert (max(first.turn), max(second.turn)) == (0, 1)


def test_other_tools_are_another_context(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    ask(episode, USER)
    ask(episode, USER, {"role": "assistant", "content": "four"}, NEXT, tools=[TOOL])
    assert len(episode.player.branches.branches) == 2
    ask(episode, USER, {"role": "assistant", "content": "four"}, NEXT, tools=[])
    assert len(episode.player.branches.branches) == 2


def test_reasoning_that_a_client_drops_stays_in_the_tokens_and_one_it_echoes_tells_replies_apart(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    policy.say = lambda sample: f"<think>thought {sample.id[-1]}</think>four"
    replies = [choice.message for choice in ask(episode, USER, n=3).choices]
    assert [reply.reasoning_content for reply in replies] == [f"thought {n}" for n in range(3)]
    ask(episode, USER, {"role": "assistant", "content": "four", "reasoning_content": "thought 1"}, NEXT)
    ask(episode, USER, {"role": "assistant", "content": "four"}, NEXT)
    prompts = [rig.tokenizer.decode(sample.prompt) for sample in policy.samples[-2:]]
    assert "thought 1" in prompts[0] and "thought 2" in prompts[1]
    assert len(episode.player.branches.branches) == 3


def test_weights_that_change_between_two_requests_are_recorded_for_each_token(
    policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    reply = ask(episode, USER).choices[0].message
    policy.version = 7
    ask(episode, USER, reply, NEXT)
    [branch] = episode.player.branches.branches
    found = {(turn, version) for turn, version in zip(branch.turn, branch.versions, strict=True)}
    assert found == {(-1, -1), (0, 0), (1, 7)}


# ---- OpenAI's form


def test_tools_are_called_answered_and_called_again(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    policy.say = lambda sample: 'CALL add {"a": 2}' if len(policy.samples) < 3 else "four"
    messages: list[Any] = [USER]
    for turn in range(2):
        choice = ask(episode, *messages, tools=[TOOL], tool_choice="auto").choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            "add",
            {"a": 2},
        )
        # Clients write the arguments anew.
        echoed = choice.message.model_dump(exclude_none=True)
        echoed["tool_calls"][0]["function"]["arguments"] = '{"a":2}'
        messages += [echoed, {"role": "tool", "tool_call_id": call.id, "content": str(turn)}]
    assert ask(episode, *messages, tools=[TOOL]).choices[0].message.content == "four"
    assert len(episode.player.branches.branches) == 1
    assert len({message["tool_call_id"] for message in messages if message["role"] == "tool"}) == 2


def test_tool_choice_none_leaves_a_call_as_text_and_a_broken_call_is_a_parse_error(
    policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    policy.say = lambda sample: 'CALL add {"a": 2}'
    choice = ask(episode, USER, tools=[TOOL], tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ('CALL add {"a": 2}', None)
    policy.say = lambda sample: 'CALL add {"a": 2'
    choice = ask(episode, USER, tools=[TOOL]).choices[0]
    assert choice.message.content == 'CALL add {"a": 2'
    assert choice.model_extra["parse_error"] == "a call must end with a brace"
    assert episode.session.ends_in_parse_error
    choice = ask(episode, USER).choices[0]
    assert (choice.message.content, choice.model_extra.get("parse_error")) == ('CALL add {"a": 2', None)
    assert not episode.session.ends_in_parse_error, "without tools there are no calls"


def test_a_stream_gives_what_the_whole_answer_gives(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    options: Any = {"stream": True, "logprobs": True, "n": 2, "stream_options": {"include_usage": True}}
    chunks = list(ask(episode, USER, **options))
    whole = ask(episode, USER, logprobs=True, n=2)
    for number in range(2):
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == number]
        assert parts[0].delta.role == "assistant" and parts[-1].finish_reason == "stop"
        assert "".join(part.delta.content or "" for part in parts) == "four"
        [logprobs] = [part.logprobs.content for part in parts if part.logprobs]
        assert logprobs == whole.choices[number].logprobs.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    policy.say = lambda sample: 'CALL add {"a": 2}'
    with make_client(episode).chat.completions.stream(model="any", messages=[USER], tools=[TOOL]) as stream:
        list(stream)
        message = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("add", '{"a": 2}')
    ]
    # A reply that was streamed is known again.
    ask(episode, USER, message, {"role": "tool", "tool_call_id": "x", "content": "4"}, tools=[TOOL])
    assert len(episode.player.branches.branches) == 5


def test_log_probabilities_are_those_of_the_record(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    choice = ask(episode, USER, logprobs=True, top_logprobs=5).choices[0]
    [branch] = episode.player.branches.branches
    given = [one.logprob for one in choice.logprobs.content]
    assert given == [p for p, flag in zip(branch.logprobs, branch.sampled, strict=True) if flag]
    assert "".join(one.token for one in choice.logprobs.content) == "four<|end|>"


@pytest.mark.parametrize(
    ("stop", "given", "recorded"),
    [("u", "fo", "fou"), (["zz", "ou"], "f", "fou"), ("zz", "four", "four<|end|>"), ("é", "four", None)],
)
def test_a_stop_string_cuts_the_text_before_it_and_the_record_behind_it(
    rig: GatewayRig, episode: OpenEpisode, stop: Any, given: str, recorded: str | None
) -> None:
    choice = ask(episode, USER, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (given, "stop")
    ask(episode, USER, choice.message, NEXT)
    [branch] = episode.player.branches.branches
    first = [token for token, turn in zip(branch.tokens, branch.turn, strict=True) if turn == 0]
    assert rig.tokenizer.decode(first) == (recorded or "four<|end|>")


def test_replies_are_as_long_as_request_run_and_context_allow(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    choice = ask(episode, USER, max_tokens=2).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("fo", "length")
    ask(episode, USER, max_completion_tokens=100_000)
    ask(episode, {"role": "user", "content": "x" * 1900})
    room = 2000 - len(policy.samples[2].prompt)
    assert [sample.max_tokens for sample in policy.samples] == [2, 200, room] and room < 200


def test_the_asynchronous_client_asks_side_by_side(policy: ScriptedPolicy, episode: OpenEpisode) -> None:
    async def ask_many() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=episode.base_url, api_key=episode.key, max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="any", messages=[{"role": "user", "content": f"task {number}"}]
                    )
                    for number in range(10)
                )
            )

    replies = asyncio.run(ask_many())
    assert len({reply.id for reply in replies}) == 10
    assert len(episode.player.branches.branches) == episode.player.num_turns == 10


def test_models_and_health_are_there(rig: GatewayRig, episode: OpenEpisode) -> None:
    [model] = make_client(episode).models.list().data
    assert model.model_extra == {"max_model_len": 2000, **model.model_extra}
    assert httpx.get(f"{rig.gateway.root_url}/health").json() == {"status": "ok"}


def test_tokens_in_tokens_out_go_on_with_a_branch(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    path = "/inference/v1/generate"
    prompt = rig.tokenizer.encode("2+2?")
    params = {"max_tokens": 20, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [0]}
    found = post(episode, {"model": "m", "token_ids": prompt, "sampling_params": params}, path).json()
    [choice] = found["choices"]
    assert rig.tokenizer.decode(choice["token_ids"]) == "four<|end|>" and choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    more = [*prompt, *choice["token_ids"], *rig.tokenizer.encode(" and 3+3?")]
    stop = rig.tokenizer.encode("u")
    params["stop_token_ids"] = stop
    found = post(episode, {"token_ids": more, "sampling_params": params}, path).json()
    assert rig.tokenizer.decode(found["choices"][0]["token_ids"]) == "fou"
    [branch] = episode.player.branches.branches
    assert branch.tokens == [*more, *rig.tokenizer.encode("fou")]


# ---- refusals


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", 0.7, "temperature must be 1.0"),
        ("temperature", True, "temperature must be 1.0"),
        ("top_p", 0.9, "top_p must be 1.0"),
        ("top_k", 5, "top_k must be -1 or 0"),
        ("presence_penalty", 0.5, "presence_penalty must be 0"),
        ("logit_bias", {"1": 5}, "logit_bias must be {}"),
        ("response_format", {"type": "json_object"}, "response_format must be"),
        ("tool_choice", "required", "tool_choice must be"),
        ("functions", [], "functions must be left out"),
        ("stop_token_ids", [5], "stop_token_ids must be []"),
        ("chat_template_kwargs", {"enable_thinking": False}, "chat_template_kwargs must be {}"),
        ("continue_final_message", True, "continue_final_message must be false"),
        ("skip_special_tokens", False, "skip_special_tokens must be true"),
        ("truncate_prompt_tokens", 5, "truncate_prompt_tokens must be left out"),
        ("n", 0, "n must be a whole number from 1"),
        ("n", True, "n must be a whole number from 1"),
        ("max_tokens", 0, "max_tokens must be a whole number from 1"),
        ("max_tokens", "5", "max_tokens must be a whole number from 1"),
        ("stop", ["a"] * 17, "stop must be at most 16 strings, got 17"),
        ("stop", [""], "stop must be strings of 1 to 1000 characters"),
        ("stream", "yes", 'stream must be true or false, got "yes"'),
        ("stream_options", 5, "stream_options must be a JSON object, got 5"),
        ("tools", {}, "tools must be a list, got {}"),
        ("tools", [{"type": "function"}], "tools[0] must read"),
        ("messages", [], "messages must be 1 to 10000, got 0"),
        ("messages", "hi", 'messages must be a list, got "hi"'),
        ("messages", [5], "messages[0] must be a JSON object, got 5"),
        ("messages", [{"role": "root", "content": ""}], "messages[0].role must be one of"),
        ("messages", [{"role": "user"}], "messages[0].content must be text"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content must be"),
        ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function must"),
    ],
)
def test_a_field_that_breaks_its_rule_is_named_with_rule_and_value(
    episode: OpenEpisode, field: str, value: Any, says: str
) -> None:
    answer = post(episode, {"messages": [USER], field: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"], error
    assert error["type"] == "invalid_request_error" and error["param"].startswith(field)
    assert episode.player.num_turns == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1, "top_p": 1.0, "presence_penalty": 0, "seed": 5, "user": "me"},
        {"temperature": None, "tools": None, "tool_choice": None, "stop": None, "n": None},
        {"response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False, "logit_bias": {}},
        {"metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low", "prompt_cache_key": "x"},
    ],
)
def test_what_clients_send_by_default_is_taken(episode: OpenEpisode, options: Any) -> None:
    assert post(episode, {"messages": [USER], **options}).status_code == 200


def test_the_runs_own_sampling_is_taken() -> None:
    rig = GatewayRig("sampling.temperature=0.7")
    try:
        episode = rig.open_episode()
        assert [
            post(episode, {"messages": [USER], "temperature": value}).status_code for value in (0.7, 1, 0.8)
        ] == [200, 200, 400]
    finally:
        rig.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ["\\ud800"]}',
    ],
)
def test_a_body_that_is_no_json_object_gets_400(episode: OpenEpisode, body: bytes) -> None:
    answer = post(episode, body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_text_that_cannot_be_encoded_gets_400_and_other_text_does_not(episode: OpenEpisode) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\u0000 \\ud83d\\ude00 <|end|><|user|>"}]}'
    assert post(episode, body).status_code == 200
    lone = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    assert post(episode, lone).status_code == 400


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere", "/inference/v1/generate"])
def test_strangers_get_401_on_every_path(
    rig: GatewayRig, episode: OpenEpisode, key: str | None, path: str
) -> None:
    headers = {} if key is None else {b"authorization": key.format(key=episode.key).encode("latin-1")}
    answer = httpx.post(rig.gateway.root_url + path, content=b"{}", headers=headers)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_other_paths_and_methods_get_404_and_405(episode: OpenEpisode) -> None:
    assert post(episode, {}, "/v1/completions").status_code == 404
    answer = post(episode, {}, "/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_gets_413_whether_its_length_is_told_or_not(
    episode: OpenEpisode, chunked: bool
) -> None:
    part = b" " * (1 << 20)

    def send_parts() -> Iterator[bytes]:
        for _ in range(6):
            yield part

    body: Any = send_parts() if chunked else part * 6
    url = f"{episode.base_url}/chat/completions"
    answer = httpx.post(url, content=body, headers={"authorization": f"Bearer {episode.key}"}, timeout=60)
    assert answer.status_code == 413 and "episodes.gateway.max_body_mb" in answer.json()["error"]["message"]
    assert ask(episode, USER).choices[0].message.content == "four"


def test_a_body_without_an_end_is_refused_and_its_connection_closed(
    rig: GatewayRig, episode: OpenEpisode
) -> None:
    place = ("127.0.0.1", int(rig.gateway.root_url.rpartition(":")[2]))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {episode.key}\r\n"
        f"content-length: {1 << 40}\r\n\r\n"
    )
    with socket.create_connection(place, timeout=60) as connection:
        connection.sendall(head.encode())
        sent = 0
        with pytest.raises(OSError):
            while sent < 1 << 30:
                sent += connection.send(b" " * (1 << 20))
        assert sent < 1 << 29
    assert ask(episode, USER).choices[0].message.content == "four"


def test_requests_that_are_open_when_the_generator_ends_get_503(capfd: pytest.CaptureFixture[str]) -> None:
    rig = GatewayRig()
    episode, answers = rig.open_episode(), []
    rig.policy.gate = asyncio.Event()
    asking = threading.Thread(target=lambda: answers.append(post(episode, {"messages": [USER]})))
    asking.start()
    wait_until(lambda: rig.policy.samples)
    rig.close()
    asking.join(60)
    [answer] = answers
    assert answer.status_code == 503 and "a generator that ends" in answer.json()["error"]["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_turns_beyond_the_last_are_refused_and_the_client_does_not_repeat_them(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    ask(episode, USER, n=16)
    with pytest.raises(openai.BadRequestError, match="episodes.max_turns") as refused:
        openai.OpenAI(base_url=episode.base_url, api_key=episode.key).chat.completions.create(
            model="any", messages=[USER]
        )
    assert refused.value.code == "max_turns" and episode.session.stop == "max_turns"
    assert len(policy.samples) == 16


def test_requests_side_by_side_do_not_get_beyond_the_last_turn(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    async def ask_at_once() -> list[Any]:
        body = parse_body(json.dumps({"messages": [USER]}).encode())
        request = read_chat_request(body, rig.config.sampling)
        asked = [episode.session.answer_chat(request) for _ in range(20)]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = rig.run(ask_at_once())
    refused = [one for one in answers if isinstance(one, RequestRefused)]
    assert {one.code for one in refused} == {"max_turns"} and len(refused) == 4
    assert len(policy.samples) == episode.player.num_turns == 16


def test_a_prompt_beyond_the_context_is_refused_as_openai_does(episode: OpenEpisode) -> None:
    with pytest.raises(openai.BadRequestError, match="2000") as refused:
        ask(episode, {"role": "user", "content": "x" * 3000})
    assert refused.value.code == "context_length_exceeded" and episode.session.stop == "context_overflow"
    ask(episode, USER)
    assert episode.session.stop is None


def test_a_fault_of_the_generator_is_500_and_the_sessions_failure(
    policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    def fail(sample: Any) -> str:
        raise RuntimeError("the engine is gone")

    policy.say = fail
    with pytest.raises(openai.InternalServerError, match="the engine is gone"):
        ask(episode, USER)
    assert "the engine is gone" in str(episode.session.failure)


# ---- ends


def test_a_client_that_goes_away_withdraws_its_turn_and_the_episode_goes_on(
    rig: GatewayRig, policy: ScriptedPolicy, episode: OpenEpisode
) -> None:
    policy.gate = asyncio.Event()
    connection = http.client.HTTPConnection(rig.gateway.root_url.removeprefix("http://"))
    headers = {"authorization": f"Bearer {episode.key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": [USER]}), headers)
    wait_until(lambda: policy.samples)
    connection.close()
    wait_until(lambda: policy.withdrawn)
    assert policy.withdrawn == [policy.samples[0].id] and episode.player.num_turns == 0
    policy.gate = None
    assert ask(episode, USER).choices[0].message.content == "four"


def test_requests_that_are_open_when_the_episode_ends_get_410_and_later_ones_401(
    rig: GatewayRig, policy: ScriptedPolicy
) -> None:
    episode = rig.open_episode()
    policy.gate = asyncio.Event()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(post(episode, {"messages": [USER]})))
    asking.start()
    wait_until(lambda: policy.samples)
    episode.close()
    asking.join(30)
    assert answers[0].status_code == 410 and "ended" in answers[0].json()["error"]["message"]
    assert policy.withdrawn == [policy.samples[0].id]
    assert post(episode, {"messages": [USER]}).status_code == 401


def test_connections_that_say_nothing_or_nonsense_cost_nobody_anything(
    rig: GatewayRig, episode: OpenEpisode
) -> None:
    place = ("127.0.0.1", int(rig.gateway.root_url.rpartition(":")[2]))
    silent = [socket.create_connection(place) for _ in range(50)]
    for one, said in zip(
        silent, [b"", b"GET", b"\x00\xff" * 100, b"POST / HTTP/9\r\n\r\n"] * 12, strict=False
    ):
        one.sendall(said)
    endless = socket.create_connection(place)
    endless.settimeout(30)
    endless.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
    assert b"400" in endless.recv(1000), "headers are bounded"
    assert ask(episode, USER).choices[0].message.content == "four"
    for one in [*silent, endless]:
        one.close()


def test_64_sessions_side_by_side_keep_their_turns_apart(rig: GatewayRig, policy: ScriptedPolicy) -> None:
    episodes = [rig.open_episode() for _ in range(64)]
    policy.say = lambda sample: rig.tokenizer.decode(sample.prompt)[-18:-12]

    async def talk(client: httpx.AsyncClient, number: int, episode: OpenEpisode) -> None:
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{number:03d}-{turn:02d}"})
            answer = await client.post(
                f"{episode.base_url}/chat/completions",
                json={"messages": messages},
                headers={"authorization": f"Bearer {episode.key}"},
            )
            messages.append(answer.json()["choices"][0]["message"])

    async def talk_all() -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(talk(client, number, one) for number, one in enumerate(episodes)))

    asyncio.run(talk_all())
    for number, episode in enumerate(episodes):
        [branch] = episode.player.branches.branches
        text = rig.tokenizer.decode(branch.tokens)
        assert episode.player.num_turns == 4 and all(f"{number:03d}-{turn:02d}" in text for turn in range(4))
        assert not any(f"{other:03d}-" in text for other in range(64) if other != number)
        episode.close()


def test_an_address_that_is_taken_or_not_this_hosts_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=r"episodes.gateway.host and port must .*got 127.0.0.1 and "):
            GatewayRig(f"episodes.gateway.port={port}")
    # Nobody listens yet at the address of the first, and it is taken all the same.
    with open_listener("127.0.0.1", port), pytest.raises(ValueError, match="that is free"):
        open_listener("127.0.0.1", port)


@pytest.mark.parametrize("said", [b"", b"GET /health HT"])
def test_a_connection_without_a_request_is_closed_in_time_however_slowly_it_speaks(
    rig: GatewayRig, episode: OpenEpisode, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(gateway_connection, "HEAD_S", 1.0)
    place = ("127.0.0.1", int(rig.gateway.root_url.rpartition(":")[2]))
    with socket.create_connection(place) as slow:
        slow.settimeout(0.05)
        for number in range(600):
            try:
                slow.sendall(said[number : number + 1])
                assert slow.recv(100) == b""
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("the gateway must close it within 30 s")
    policy_answer = ask(episode, USER)
    assert policy_answer.choices[0].message.content == "four"


def test_connections_are_bounded_and_those_that_are_open_are_served() -> None:
    rig = GatewayRig("generators.max_sequences=16")
    try:
        episode = rig.open_episode()
        client = make_client(episode)
        assert client.models.list().data
        place = ("127.0.0.1", int(rig.gateway.root_url.rpartition(":")[2]))
        silent = [socket.create_connection(place) for _ in range(16 * 8 + 20)]
        wait_until(lambda: sum(is_closed(one) for one in silent) >= 20)
        assert client.models.list().data, "its connection was there before"
        for one in silent:
            one.close()
        wait_until(lambda: ask(episode, USER).choices[0].message.content == "four")
    finally:
        rig.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# ---- attacks


def test_forged_requests_get_an_answer_in_openais_form_and_leave_nothing_behind() -> None:
    rig = GatewayRig(f"episodes.gateway.max_body_mb={MAX_BODY_MB}")
    try:
        attack = GatewayAttack(rig, seed=1)
        rig.run(attack.send_requests(600))
        gc.collect()
        tracemalloc.start()
        rig.run(attack.send_requests(200))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        rig.run(attack.send_requests(400))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 1 << 20, grown
        assert {"200", "400", "401", "404", "405", "left"} <= set(attack.counts)
        assert attack_socket(rig, 120, seed=1) > 60
        rig.run(attack.send_requests(40))
    finally:
        rig.close()


def test_the_overhead_of_a_request_can_be_measured() -> None:
    measured = measure_gateway(16)
    assert 0 < measured["p50_ms"] <= measured["p99_ms"] and measured["cpu_ms"] > 0
