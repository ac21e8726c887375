"""The driver's own generators come and go: who is started in whose place, and who is asked to leave."""

import inspect
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffers.client import BufferGone
from buffers.server import BufferServer
from configs.load import load_config, to_yaml
from generators import joining
from generators.joining import join_run
from slipstream import own_generators, role_places
from slipstream.own_generators import OwnGenerators
from slipstream.role_division import RolePlace
from slipstream.role_failures import RoleDied, RoleFailed
from slipstream.role_places import RolePlaces
from slipstream.roles import GeneratorRole


class RecordedPlaces:
    """Notes whose processes are started, asked to leave and ended. There is room for as many as it says."""

    def __init__(self) -> None:
        self.alive: list[str] = []
        self.asked: list[str] = []
        self.lost: list[str] = []
        self.out_of_reach: list[str] = []
        self.found: list[str] = []
        self.beside_ranks = False
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

    def is_beside_rank(self, name: str) -> bool:
        return self.beside_ranks

    def find_place(self, name: str) -> Any:
        self.found.append(name)

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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str, beside_ranks: bool = False) -> None:
        self.ends: dict[str, Any] = {}
        self.said: list[str] = []
        self.now = 1000.0
        self.places = RecordedPlaces()
        self.places.beside_ranks = beside_ranks
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


def test_nobody_waits_for_the_names_of_a_ranks_gpus_before_the_learner_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's process may take minutes to come up, and whoever waits for it is named."""
    scene = Scene(monkeypatch, "generators.count=1", "eval.generators=1", beside_ranks=True)
    status: Any = None
    monkeypatch.setattr(own_generators, "has_learner_begun", lambda status: False)
    scene.own.start_beside_learner(status)
    assert scene.places.found == [] and scene.own.waits_for_learner
    monkeypatch.setattr(own_generators, "has_learner_begun", lambda status: True)
    scene.own.start_beside_learner(status)
    assert scene.places.found == ["generator-0", "evaluator-0"] and not scene.own.waits_for_learner


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


def test_an_error_that_a_generator_has_told_is_never_taken_for_the_loss_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy host may not answer for a moment, and the error would be lost."""
    scene = Scene(monkeypatch, "generators.count=1")
    scene.ends["generator-0"] = RoleFailed("generator-0 has failed: the engine's assertion")
    scene.places.out_of_reach = ["generator-0"]
    with pytest.raises(RoleFailed, match="the engine's assertion"):
        scene.look()


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


def test_an_engine_has_the_gpus_that_the_command_which_starts_it_has_set_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host that joins has other GPUs than the run's own."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(joining, "join_run", lambda *_, **named: given.update(named))
    role = GeneratorRole.__new__(GeneratorRole)
    role._is_leaving, role._patience_s, role._run_folder = False, 1.0, tmp_path
    role._join_run("address", "far-0", 0, None, RolePlace("here", (0, 1), processors=2), False)
    config = load_config(["generators.gpus=0.5"])
    joining.take_host_settings(config, None, given["tensor_parallel"], takes_turns=False)
    assert config.generators.tensor_parallel == 2
    with pytest.raises(
        ValueError, match="sync.transport must be .* when generators.tensor_parallel is above 1"
    ):
        joining.take_host_settings(load_config(["sync.transport=nccl"]), None, 2, takes_turns=False)


def test_a_generator_that_is_started_again_waits_for_the_buffer_as_long_as_those_that_have_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run whose buffer stands still for a while would end with a generator that has died meanwhile."""
    started: list[tuple[Any, ...]] = []
    actor = SimpleNamespace(remote=lambda *arguments: started.append(arguments))
    remote = SimpleNamespace(options=lambda **_: actor)
    monkeypatch.setattr(role_places, "ray", SimpleNamespace(remote=lambda role: remote))
    monkeypatch.setattr(RolePlaces, "_seat_options", lambda *_: {})
    places = RolePlaces.__new__(RolePlaces)
    places._config, places._logs, places._actors = load_config(["buffer.reconnect_s=77"]), tmp_path, []
    places._generators, places.driver_node = {}, "here"
    seat: Any = SimpleNamespace(place=SimpleNamespace(node="here"), group=None, bundle=0)
    places._seats = {"generator-0": seat}
    places.start_generator("generator-0")
    given = inspect.signature(GeneratorRole).bind(*started[0]).arguments
    assert given["patience_s"] == 77.0

    config = load_config(["generators.engine=simulated", "learner.engine=simulated", "eval.prompts=0"])
    text = to_yaml(config)
    server = BufferServer(config, tmp_path / "journal", config_text=text)  # it listens, and stands still
    with pytest.raises(BufferGone):
        join_run(server.address, "generator-0", 0, None, patience_s=0.2)
    thread = threading.Thread(target=server.run)
    threading.Timer(0.5, thread.start).start()
    try:
        generator = join_run(server.address, "generator-0", 0, None, patience_s=60.0)
        generator.leave_within(0.0)
        assert generator.run(), "it has left"
    finally:
        server.stop()
        thread.join(60)
