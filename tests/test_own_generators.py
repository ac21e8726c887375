"""The driver's own generators come and go: who is started in whose place, and who is asked to leave."""

from types import SimpleNamespace
from typing import Any

import pytest

from configs.load import load_config
from slipstream import own_generators
from slipstream.own_generators import OwnGenerators
from slipstream.role_failures import RoleDied


class RecordedPlaces:
    """Notes whose processes are started, asked to leave and ended. There is room for as many as it says."""

    def __init__(self) -> None:
        self.alive: list[str] = []
        self.asked: list[str] = []
        self.lost: list[str] = []
        self.out_of_reach: list[str] = []
        self.room = 10

    def start_generator(self, name: str) -> Any:
        self.alive.append(name)
        return SimpleNamespace(run=SimpleNamespace(remote=lambda *_: name))

    def end_generator(self, name: str) -> None:
        self.alive.remove(name)

    def ask_to_leave(self, name: str) -> None:
        self.asked.append(name)

    def add_seats(self, names: list[str], *, on_all_nodes: bool) -> None:
        if len(self.alive) + len(names) > self.room:
            raise ValueError("no room")

    def find_place(self, name: str) -> Any:
        return SimpleNamespace(beside_rank=False)

    def find_node(self, name: str) -> str:
        return "host-2"

    def find_lost_engines(self) -> list[str]:
        return self.lost

    def is_out_of_reach(self, name: str) -> bool:
        return name in self.out_of_reach

    def read_log_end(self, name: str) -> str:
        return ""


class Scene:
    """Own generators over recorded places. `ends` says how a generator has ended: as `run` does, or by an
    error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.ends: dict[str, Any] = {}
        self.said: list[str] = []
        self.now = 1000.0
        self.places = RecordedPlaces()
        monkeypatch.setattr(own_generators, "is_ready", lambda name: name in self.ends)
        monkeypatch.setattr(own_generators, "get_result", self.get_result)
        monkeypatch.setattr(own_generators, "time", SimpleNamespace(monotonic=lambda: self.now))
        network: Any = SimpleNamespace(
            keys=SimpleNamespace(find_folder=lambda name: None),
            reach_buffer=str,
            reaches_all_nodes=True,
        )
        answers: Any = SimpleNamespace(expect_answer=lambda name, actor: None)
        places: Any = self.places
        self.own = OwnGenerators(load_config([*overrides]), places, network, answers, self.said.append)
        self.own.join_run("nowhere")

    def get_result(self, name: str, *_: object) -> bool:
        end = self.ends[name]
        if isinstance(end, Exception):
            raise end
        return bool(end)

    def look(self) -> list[str]:
        """Lets enough time pass that the driver looks at everything."""
        self.now += own_generators.LOOK_EVERY_S + 1.0
        return self.own.collect_ended(is_stopping=False)


def test_an_evaluator_is_replaced_whether_it_was_told_to_leave_or_lost_with_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No generator for training answers in its place: the run would wait for ever for the evaluation."""
    scene = Scene(monkeypatch, "generators.count=1", "eval.generators=1")
    scene.ends["evaluator-0"] = True
    assert scene.look() == ["evaluator-0"]
    scene.look()
    assert scene.places.alive == ["generator-0", "evaluator-1"]
    scene.places.lost, scene.places.room = ["evaluator-1"], 1
    assert scene.look() == ["evaluator-1"]
    scene.look()
    assert scene.places.alive == ["generator-0"], "no node has room"
    scene.places.room = 2
    scene.look()
    assert scene.places.alive == ["generator-0", "evaluator-2"]
    scene.ends["evaluator-2"] = RoleDied("evaluator-2 has died")
    scene.places.out_of_reach = ["evaluator-2"]
    assert scene.look() == ["evaluator-2"], "its end is known before Ray gives up the host"
    assert scene.own.training == ["generator-0"]


def test_a_generator_that_is_to_leave_is_asked_again_because_ray_may_have_started_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, "generators.count=3", "generators.grace_s=60")
    scene.own.let_newest_leave(2)
    assert scene.places.asked == ["generator-2", "generator-1"]
    scene.ends["generator-2"] = True
    assert scene.look() == ["generator-2"]
    scene.look()
    assert scene.places.asked.count("generator-1") == 3
    scene.now += 60.0
    assert scene.look() == ["generator-1"] and scene.places.alive == ["generator-0"]
