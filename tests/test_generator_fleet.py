"""A fleet's console says what becomes of the buffer, and how its generators have failed, in sentences."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from buffers.client import BufferClient, BufferGone, RefusedByBuffer
from buffers.driver_messages import RUN_OVER, GeneratorNews
from buffers.server import BufferServer
from configs.load import load_config
from slipstream import answers, buffer_silence, generator_fleet, role_failures
from slipstream.generator_fleet import FleetWatch, GeneratorFleet
from slipstream.stop_signals import StopSignals


def test_a_buffer_that_does_not_answer_is_named_once_and_once_more_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(buffer_silence, "time", clock)
    monkeypatch.setattr(buffer_silence, "UNANSWERED_S", 0.3)
    server = BufferServer(load_config([]), tmp_path / "journal")  # it listens, and does not run yet
    client, said = BufferClient(server.address), []
    watch = FleetWatch(client, ["a"], said.append)
    while not said:
        assert watch.wait_for_news(0.1) is None
    for _ in range(5):
        assert watch.wait_for_news(0.1) is None
    assert len(said) == 1 and f"{server.address} has not answered for 0 s: the generators keep" in said[0]
    clock.monotonic = lambda: 138.0
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while (news := watch.wait_for_news(60.0)) is None:
            pass
    finally:
        server.stop()
        thread.join(60)
        client.close()
    assert news.end is None and said[1:] == [f"{server.address} answers again, after 38 s"]


def test_a_fleet_that_says_farewell_for_one_of_its_generators_still_hears_news(tmp_path: Path) -> None:
    server = BufferServer(load_config([]), tmp_path / "journal")
    client = BufferClient(server.address)
    watch = FleetWatch(client, ["a", "b"], print)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        watch.say_left("a")
        while (news := watch.wait_for_news(60.0)) is None:
            pass
        assert news.end is None
    finally:
        server.stop()
        thread.join(60)
        client.close()


@pytest.mark.parametrize("error", [BufferGone("no answer from the buffer"), RefusedByBuffer("not welcome")])
def test_a_generator_that_finds_no_buffer_has_failed_in_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ref: object) -> object:
        raise ray.exceptions.RayTaskError("run", "a long traceback", error)

    monkeypatch.setattr(role_failures, "ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
    with pytest.raises(role_failures.RoleFailed, match=f"^far-1: {error}$"):
        role_failures.get_result(object(), "far-1", str)


class UnaskedPlaces:
    """Nothing may be asked of a Ray whose processes have died."""

    def ask_to_leave(self, name: str) -> None:
        raise AssertionError(name)


def test_a_fleet_whose_ray_has_got_the_signal_too_leaves_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "has_own_cluster", lambda: True)
    monkeypatch.setattr(answers, "list_dead_processes", lambda: ["gcs_server"])
    monkeypatch.setattr(generator_fleet, "wait_for_results", lambda *_: [])
    places: Any = UnaskedPlaces()
    fleet = GeneratorFleet(load_config(["generators.grace_s=600"]), StopSignals())
    fleet._drain_generators(places, {"its end": "far-0"})
    said = capsys.readouterr().out
    assert "within 600 s" in said
    assert said.endswith("no role can be started again: the generators leave at once\n")


def test_a_fleet_whose_generators_hear_first_that_the_run_is_over_asks_again_how_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The buffer has told its news just before the end, and the driver reads them after it."""
    monkeypatch.setattr(generator_fleet, "wait_for_results", lambda refs, *_: list(refs))
    monkeypatch.setattr(generator_fleet, "get_result", lambda *_: False)
    before, after = (
        GeneratorNews(num_trained_steps=9, end=end, versions={}, activities={}) for end in (None, RUN_OVER)
    )
    told = [before, None, before, after]  # the wait for the end may be cut short
    monkeypatch.setattr(FleetWatch, "wait_for_news", lambda *_: told.pop(0))
    watch = FleetWatch.__new__(FleetWatch)
    places: Any = SimpleNamespace(read_log_end=str)
    fleet = GeneratorFleet(load_config([]), StopSignals())
    assert fleet._watch_generators(watch, places, {"its end": "far-0"}) == 0
    assert capsys.readouterr().out == f"{RUN_OVER}\n" and not told


class PlacesOnNodes:
    """Two generators on two nodes of a cluster."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.out_of_reach: list[str] = []
        self.ended: list[str] = []

    def find_lost_engines(self) -> list[str]:
        return self.lost

    def is_out_of_reach(self, name: str) -> bool:
        return name in self.out_of_reach

    def find_node(self, name: str) -> str:
        return "host-2"

    def end_generator(self, name: str) -> None:
        self.ended.append(name)

    def read_log_end(self, name: str) -> str:
        return ""


def test_a_fleet_over_a_cluster_goes_on_without_the_generators_of_a_node_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(ref: object) -> object:
        raise ray.exceptions.RayActorError

    fleet = GeneratorFleet(load_config(["cluster.address=auto"]), StopSignals())
    places, left, ended = PlacesOnNodes(), list[str](), list[str]()
    watch: Any = SimpleNamespace(say_left=left.append)
    given: Any = places
    monkeypatch.setattr(generator_fleet, "wait_for_results", lambda *_: ended)
    monkeypatch.setattr(role_failures, "ray", SimpleNamespace(get=die, exceptions=ray.exceptions))
    ends: dict[Any, str] = {f"end of {name}": name for name in ("a", "b", "c")}
    assert not fleet._collect_ended(watch, given, ends)
    places.lost = ["a"]  # Ray has given up the node, and lets the generator wait for it
    assert not fleet._collect_ended(watch, given, ends)
    assert capsys.readouterr().out == "a is lost with host-2: the others go on\n"
    ended, places.out_of_reach = ["end of b"], ["b"]  # its end is known before
    assert not fleet._collect_ended(watch, given, ends)
    assert left == places.ended == ["a", "b"] and list(ends.values()) == ["c"]
    ended, places.lost = [], ["c"]
    with pytest.raises(role_failures.RoleFailed, match="^c is lost with host-2, and no generator is left$"):
        fleet._collect_ended(watch, given, ends)
    ended, places.lost, ends = ["end of d"], [], {"end of d": "d"}
    with pytest.raises(role_failures.RoleFailed, match="^d has died"):
        fleet._collect_ended(watch, given, ends)
