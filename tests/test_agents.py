"""Agents that know nothing of training: their requests become turns, their faults cost their own group."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from test_episodes import EpisodeRun, RecordingEngine, assert_ledger_closes
from test_episodes import make_config as make_episode_config

from configs.load import load_config
from generators.agent_episodes import limit_agents
from generators.user_code.agent_command import bypass_proxies, check_command, parse_outcome, run_command
from slipstream_bench.byte_tokenizer import make_byte_tokenizer


def make_config(task: str, *overrides: str) -> Any:
    return make_episode_config(task, f"task.name=agent_tasks:{task}", *overrides)


@pytest.fixture(autouse=True)
def tasks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield


def find_sampled_text(row: dict[str, Any], turn: int) -> str:
    tokens = [token for token, of in zip(row["tokens"], row["turn"], strict=True) if of == turn]
    return make_byte_tokenizer().decode(tokens)


def test_a_stock_client_trains_with_the_engines_tokens_and_the_version_of_each_call(tmp_path: Path) -> None:
    engine = RecordingEngine()
    run = EpisodeRun(make_config("StockClientAgent", "sampling.max_tokens=32"), tmp_path, engine)
    trained = run.train_steps(2)
    status = run.close()
    rows = run.list_rows()
    assert len(rows) == 2 * len(trained) == 16
    for row in rows:
        assert (row["branch"], row["reward"], row["stop"]) == (0, 3.0, "completed")
        assert dict(row["rewards"]) == {"index": float(row["prompt_id"])} and row["renderer"] == "plain-1"
        turns = np.array(row["turn"])
        assert sorted(set(turns.tolist())) == [-1, 0, 1, 2]
        for turn in range(3):
            places = np.flatnonzero(turns == turn)
            prompt = row["tokens"][: places[0]]
            answers = [engine.answered[id] for id, asked in engine.prompts.items() if asked == prompt]
            said = [row["tokens"][place] for place in places]
            [answer] = [one for one in answers if one.tokens == said]
            assert answer.versions == [row["versions"][place] for place in places]
            assert answer.logprobs == pytest.approx([row["logprobs"][place] for place in places])
    assert_ledger_closes(status)


def test_a_shell_script_trains_through_curl_and_its_last_line_is_its_outcome(tmp_path: Path) -> None:
    run = EpisodeRun(make_config("ShellAgent"), tmp_path)
    run.train_steps(1)
    run.close()
    for row in run.list_rows():
        assert (row["branch"], row["reward"]) == (0, 0.5) and dict(row["rewards"])["row"] > 10
        assert sorted(set(row["turn"])) == [-1, 0, 1]


def test_agents_that_fail_cost_their_group_and_none_of_their_processes_stays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = make_config(
        "UnrulyAgent", "task.args={log: " + str(log) + "}", "episodes.timeout_s=8",
        "episodes.reset_timeout_s=8",
        "episodes.turn_timeout_s=8", "episodes.score_timeout_s=8", "learner.groups_per_step=2", "run.steps=2",
    )  # fmt: skip
    run = EpisodeRun(config, tmp_path)
    trained = run.train_steps(2)
    run.wait_for(lambda status: len(status.quarantined) >= 7, timeout_s=120)
    status = run.close()
    assert not {1, 2, 4, 5, 6, 7, 8} & set(trained)
    errors = dict(status.quarantined)
    for group, part in {
        1: "an agent must ask the policy at least once",
        2: "RuntimeError: the agent is lost",
        4: "the outcome of an agent must hold a reward",
        5: "finite",
        6: "episodes.timeout_s",
        7: "AuthenticationError",
        8: "exited with code 9",
    }.items():
        assert part in errors[group], (group, errors[group])
    started = [int(line) for line in log.read_text().split()]
    assert len(started) >= 4 and not any(psutil.pid_exists(pid) for pid in started)
    assert_ledger_closes(status)


def test_a_command_that_fails_is_a_failed_attempt(tmp_path: Path) -> None:
    run = EpisodeRun(make_config("FailingCommand"), tmp_path)
    run.publish_version(0)
    status = run.wait_for(lambda status: bool(status.quarantined))
    assert all("agent_command must exit with 0, got 7" in error for error in status.quarantined.values())
    run.close()


def test_an_agent_that_never_stops_asking_ends_at_its_last_turn(tmp_path: Path) -> None:
    run = EpisodeRun(make_config("EndlessAgent", "episodes.max_turns=5"), tmp_path)
    run.train_steps(1)
    run.close()
    rows = run.list_rows()
    assert {row["stop"] for row in rows} == {"max_turns"} and {row["reward"] for row in rows} == {5.0}
    # Each request is a conversation of its own.
    assert max(row["branch"] for row in rows) == 4 and {len(set(row["turn"])) for row in rows} == {2}


def test_a_command_has_its_row_and_its_last_line_counts_even_when_its_children_live_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = "sleep 30 & echo $SLIPSTREAM_ROW; echo $OPENAI_BASE_URL $OPENAI_API_KEY >&2; echo 0.25; echo"
    outcome = run_command(["bash", "-c", script], {"index": 3}, "http://here/v1", "key")
    assert outcome == 0.25
    printed = capfd.readouterr()
    assert printed.out == '{"index": 3}\n0.25\n\n' and printed.err == "http://here/v1 key\n"
    with pytest.raises(ValueError, match="agent_command must name a program that starts"):
        run_command(["/no/such/program"], {}, "", "")


def test_agents_reach_the_gateway_past_a_proxy_and_keep_what_else_was_unproxied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    bypass_proxies("http://10.1.2.3:4000/v1")
    bypass_proxies("http://10.1.2.3:4000/v1")
    bypass_proxies("http://127.0.0.1:4000/v1")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,10.1.2.3,127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        serving = threading.Thread(target=lambda: server.accept()[0].send(b"HTTP/1.1 204 \r\n\r\n"))
        serving.start()
        assert httpx.get(url, timeout=60).status_code == 204
        serving.join()


def test_a_row_that_no_environment_holds_is_named() -> None:
    assert run_command(["bash", "-c", "echo ${#SLIPSTREAM_ROW}"], {"text": "x" * 100_000}, "", "") > 100_000
    with pytest.raises(ValueError, match="row of an agent_command must have at most 131072 bytes"):
        run_command(["true"], {"text": "x" * 131_072}, "", "")


@pytest.mark.parametrize("text", ["", "text", "done.", "�", "[" * 100_000])
def test_a_last_line_that_is_no_json_is_an_outcome_of_text(text: str) -> None:
    assert parse_outcome(b"1.0\n" + text.encode() + b"\n\n") == (text or 1.0)
    assert parse_outcome(b"\n") == ""


@pytest.mark.parametrize("command", ["bash", [], [""], [1], None, 5])
def test_a_command_that_is_no_list_of_words_is_refused(command: Any) -> None:
    with pytest.raises(ValueError, match="agent_command must be a list of words"):
        check_command(command)


@pytest.mark.parametrize(
    ("overrides", "processors", "most"),
    [
        ([], 2, 32),
        ([], 64, 256),
        (["episodes.max_concurrent=200"], 2, 200),
        (["learner.samples_per_prompt=40"], 1, 40),
    ],
)
def test_a_host_runs_as_many_agents_as_it_has_processors_for_unless_a_number_is_set(
    overrides: list[str], processors: int, most: int
) -> None:
    assert limit_agents(load_config(overrides), range(processors)) == most


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "episodes.gateway.host=10.0.0.5",
            "buffer.keys must name a folder of keys when episodes.gateway.host",
        ),
        ("episodes.gateway.host=0.0.0.0", "episodes.gateway.host must name a host"),
        ("episodes.gateway.port=8000", "episodes.gateway.port must be 0 with several generators"),
        ("episodes.gateway.port=70000", "episodes.gateway.port must be a port from 0 to 65535"),
        ("episodes.gateway.max_body_mb=0", "episodes.gateway.max_body_mb must be"),
    ],
)
def test_an_address_that_strangers_could_reach_and_one_that_cannot_be_are_refused(
    override: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        load_config([override])
