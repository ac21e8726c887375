"""The division of GPUs: every process has a place, and Ray puts it there."""

import itertools
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from configs.placement import PlacementConfig, PlacementMode, PlacementStrategy
from slipstream.role_division import NodeRoom, RoleDivision, RolePlace, RoleWishes, read_wishes
from slipstream.role_placement import divide_roles
from slipstream.turn_placement import divide_turns

GPUS = (0, 1, 2, 3, 4, 7, 8, 16)
SHARES = (
    {},
    {"rank_gpus": 0.5, "engine_gpus": 0.5},
    {"rank_gpus": 1.0, "engine_gpus": 1.0},
    {"engine_gpus": 1 / 3},
    {"engine_ranks": 2},
    {"rank_gpus": 0.0},
    {"engine_gpus": 0.0},
    {"rank_memory": 0.5, "engine_memory": 0.4},
    {"engine_memory": 0.9},
    {"rank_memory": 1.0},
    {"rank_gpus": 2 / 3, "engine_memory": 0.3},
)
CASES = [
    (gpus, RoleWishes(ranks=ranks, engines=engines, placement=PlacementConfig(strategy=strategy), **shares))
    for gpus, ranks, engines, strategy, shares in itertools.product(
        ((0,), (1,), (2,), (3,), (4,), (8,), (0, 8), (1, 1), (2, 3), (4, 0, 4), (8, 8)),
        (0, 1, 2, 4, 8),
        (0, 1, 2, 3, 8, 17),
        PlacementStrategy,
        SHARES,
    )
]


def divide(gpus: Sequence[int], wanted: RoleWishes, *, num_cpus: int = 1000) -> RoleDivision:
    nodes = [NodeRoom(f"node{number}", num_cpus, each) for number, each in enumerate(gpus)]
    return divide_roles(nodes, wanted)


def count_room(wanted: RoleWishes, *ranks: float | None, rank_memory: tuple[float | None, ...] = ()) -> int:
    """Engines that fit beside these ranks, counted one after the other."""
    if wanted.engine_ranks > 1:
        return 0

    def fits(engines: int) -> bool:
        return all(
            sum(0.05 if share is None else share for share in (*there, *(each,) * engines)) <= 1 + 1e-9
            for there, each in ((ranks, wanted.engine_gpus), (rank_memory, wanted.engine_memory))
        )

    return next(engines for engines in itertools.count() if not fits(engines + 1))


def count_whole(gpus: Sequence[int], order: Sequence[int], ranks: int, each: int) -> int:
    """Counts the engines of several GPUs that fit beside ranks that fill these nodes one after the other."""
    left = list(gpus)
    for number in order:
        taken = min(ranks, left[number])
        left[number], ranks = left[number] - taken, ranks - taken
    return sum(free // each for free in left)


def is_possible(gpus: Sequence[int], wanted: RoleWishes) -> bool:
    """Does any division exist? By counting, without making one."""
    ranks, engines = wanted.ranks * (wanted.rank_gpus != 0), wanted.engines * (wanted.engine_gpus != 0)
    if not ranks and not engines:
        return True
    if not sum(gpus):
        return not ((ranks and wanted.rank_gpus) or (engines and wanted.engine_gpus))
    if ranks > sum(gpus):
        return False
    if (each := wanted.engine_ranks) > 1 and engines:
        # Ranks are on any node that has room for all, else on those with the most.
        whole = [[number] for number, has in enumerate(gpus) if has >= ranks]
        most = sorted(range(len(gpus)), key=lambda number: -gpus[number])
        return any(engines <= count_whole(gpus, order, ranks, each) for order in whole or [most])
    beside = count_room(wanted, wanted.rank_gpus, rank_memory=(wanted.rank_memory,))
    return engines <= ranks * beside + (sum(gpus) - ranks) * count_room(wanted)


def check_division(gpus: Sequence[int], wanted: RoleWishes, division: RoleDivision) -> None:
    assert (len(division.ranks), len(division.engines)) == (wanted.ranks, wanted.engines), (
        "every process has a place"
    )
    share, memory, together = defaultdict(float), defaultdict(float), defaultdict(set)
    for place in division.places:
        number = int(place.node.removeprefix("node"))
        assert all(0 <= gpu < gpus[number] for gpu in place.gpus) and len(set(place.gpus)) == len(place.gpus)
        assert bool(place.gpus) == bool(place.share) == (place.memory is not None)
        assert math.isclose(place.share * 10_000, round(place.share * 10_000)), "as Ray counts"
        assert place.share == 1 or len(place.gpus) <= 1, "no part of several"
        others = [
            other
            for other in division.places
            if other is not place and place.gpus and other.bundle == place.bundle
        ]
        assert place.is_shared == (len(others) > 0)
        assert (
            place.beside_rank == any(other in division.ranks for other in others) or place in division.ranks
        )
        for gpu in place.gpus:
            share[number, gpu] += place.share
            memory[number, gpu] += place.memory or 0
            together[number, gpu].add(place.gpus)
    assert all(total <= 1 + 1e-9 for total in (*share.values(), *memory.values()))
    assert all(len(bundles) == 1 for bundles in together.values()), "a GPU is in one bundle"
    of_ranks = [(place.node, gpu) for place in division.ranks for gpu in place.gpus]
    assert len(of_ranks) == len(set(of_ranks)), "no two ranks on one GPU"
    assert len({place.memory for place in division.ranks}) <= 1, "ranks need alike"
    if any(room >= wanted.ranks for room in gpus) and of_ranks:
        assert len({place.node for place in division.ranks}) == 1, "one node has room for all ranks"
    assert sum(division.bundles.values()) == wanted.ranks + wanted.engines * wanted.engine_ranks
    for place in division.engines:
        assert place.processors == wanted.engine_ranks
        assert not place.gpus or len(place.gpus) == wanted.engine_ranks
    wished = (
        (division.ranks, wanted.rank_gpus, wanted.rank_memory),
        (division.engines, wanted.engine_gpus, wanted.engine_memory),
    )
    for places, each, fraction in wished:
        for place in places:
            assert each is None or not sum(gpus) or abs(len(place.gpus) * place.share - each) < 1e-3
            assert fraction is None or not place.gpus or place.memory == pytest.approx(fraction, abs=1e-3)
    for places in (division.ranks, division.engines):
        assert len({bool(place.gpus) for place in places}) <= 1, "all on GPUs, or none"


def test_every_process_has_a_place_no_gpu_is_taken_beyond_one_and_only_the_impossible_is_refused() -> None:
    placed = 0
    for gpus, wanted in CASES:
        case = f"{gpus} GPUs, {wanted}"
        try:
            division = divide(gpus, wanted)
        except ValueError as error:
            assert not is_possible(gpus, wanted), f"{case}: {error}"
            assert ", got " in str(error)
            continue
        assert is_possible(gpus, wanted), case
        check_division(gpus, wanted, division)
        placed += 1
    assert placed > 1000 and len(CASES) - placed > 1000


def show_division(num_gpus: int, *overrides: str) -> str:
    return divide([num_gpus], read_wishes(load_config(list(overrides)))).describe_gpus("node0")


@pytest.mark.parametrize("num_gpus", GPUS)
def test_the_defaults_work_with_any_number_of_gpus(num_gpus: int) -> None:
    wanted = read_wishes(load_config([]))
    check_division([num_gpus], wanted, divide([num_gpus], wanted))


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "expected"),
    [
        (0, "", ""),
        (
            1,
            "",
            "GPU 0: learner-0 (30 % of memory), generator-0 (30 % of memory), generator-1 (30 % of memory)",
        ),
        (1, "generators.count=1", "GPU 0: learner-0 (45 % of memory), generator-0 (45 % of memory)"),
        (
            1,
            "generators.count=1 learner.gpu_memory_fraction=0.6",
            "GPU 0: learner-0 (60 % of memory), generator-0 (30 % of memory)",
        ),
        (2, "generators.count=1", "GPU 0: learner-0 (100 % of memory); GPU 1: generator-0 (90 % of memory)"),
        (
            2,
            "",
            "GPU 0: learner-0 (100 % of memory); GPU 1: generator-0 (45 % of memory), generator-1 (45 % of "
            "memory)",
        ),
        (
            2,
            "learner.gpus=0.5 generators.count=3",
            "GPU 0: learner-0 (45 % of memory), generator-2 (45 % of memory); GPU 1: generator-0 (45 % of "
            "memory), "
            "generator-1 (45 % of memory)",
        ),
        (
            2,
            "learner.gpus=0.5 generators.gpus=0.5 generators.count=2 learner.ranks=2",
            "GPU 0: learner-0 (45 % of memory), generator-0 (45 % of memory); GPU 1: learner-1 (45 % of "
            "memory), "
            "generator-1 (45 % of memory)",
        ),
        (
            3,
            "",
            "GPU 0: learner-0 (100 % of memory); GPU 1: generator-0 (90 % of memory); GPU 2: generator-1 (90 "
            "% of memory)",
        ),
        (
            3,
            "generators.tensor_parallel=2 generators.count=1",
            "GPU 0: learner-0 (100 % of memory); GPU 1 and 2: generator-0 (90 % of memory)",
        ),
        (
            2,
            "algo=ppo placement.critic=own generators.count=1",
            "GPU 0: learner-0 (45 % of memory), generator-0 (45 % of memory); GPU 1: learner-1 (45 % of "
            "memory)",
        ),
        (
            1,
            "role=generators buffer.address=tcp://127.0.0.1:5555 generators.count=1",
            "GPU 0: generator-0 (90 % of memory)",
        ),
        (2, "learner.engine=simulated generators.engine=simulated", ""),
        (2, "learner.gpus=0 generators.count=1", "GPU 0: generator-0 (90 % of memory)"),
    ],
)
def test_the_division_is_the_one_that_was_drawn_by_hand(num_gpus: int, overrides: str, expected: str) -> None:
    assert show_division(num_gpus, *overrides.split()) == expected


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        ({"here": 2}, "learner.ranks=3", r"placement.critic_ranks must be together at most 2 .* got 3"),
        (
            {"here": 2},
            "learner.gpus=1 generators.gpus=1",
            r"generators.count must be at most 1 = 1 × 0 .* \+ 1 × 1 .* got 2: .*"
            r" learner.gpus = 1.0, generators.gpus = 1.0",
        ),
        (
            {"here": 1},
            "learner.gpu_memory_fraction=0.5 generators.gpu_memory_fraction=0.3",
            r"generators.count must be at most 1 = 1 × 1 .* got 2: .* learner.gpu_memory_fraction = 0.5",
        ),
        (
            {"here": 4},
            "generators.tensor_parallel=2",
            r"generators.tensor_parallel must be at most 2 .* less 1 for the ranks.* got 2 × 2",
        ),
        ({"here": 0}, "learner.gpus=1", r"learner.gpus must be 0 or null where .* got 1.0 \(no node"),
        ({"here": 0, "there": 8}, "placement.learner.pool=big", r"placement.learner must be labels .* got"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    gpus: dict[str, int], overrides: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        divide(list(gpus.values()), read_wishes(load_config(overrides.split())))


def test_processes_beyond_the_processors_of_the_nodes_are_refused() -> None:
    run, fleet = RoleWishes(ranks=2, engines=2), RoleWishes(ranks=0, engines=6)
    divide([0], run, num_cpus=4)
    divide([0, 0], run, num_cpus=2)
    with pytest.raises(ValueError, match=r"^generators.count and .* at most 1 .* 2 of the learner .* got 2$"):
        divide([0], run, num_cpus=3)
    with pytest.raises(ValueError, match=r"^learner.ranks and .* at most 1 \(the CPUs .* got 2$"):
        divide([0], run, num_cpus=1)
    with pytest.raises(ValueError, match=r"^generators.count and eval.generators .* at most 4 .* got 6$"):
        divide([0, 0], fleet, num_cpus=2)
    # Ranks of an engine are on one node.
    big = RoleWishes(ranks=1, engines=2, engine_ranks=3)
    divide([0, 0], big, num_cpus=4)
    with pytest.raises(ValueError, match=r"at most 1 .*, of which each takes 3 of one node\), got 2$"):
        divide([0, 0], big, num_cpus=3)
    # GPUs do not help where a node has no processor left.
    with pytest.raises(ValueError, match=r"at most 4 .* got 6$"):
        divide([8, 8], fleet, num_cpus=2)


POOLS = [
    NodeRoom("head", 4),
    NodeRoom("train", 8, 4, {"pool": "train"}),
    NodeRoom("serve1", 8, 2, {"pool": "serve"}),
    NodeRoom("serve2", 8, 2, {"pool": "serve"}),
]


@pytest.mark.parametrize(
    ("overrides", "ranks", "engines"),
    [
        ("generators.count=2", "train0", "train1 train2"),
        ("generators.count=2 placement.strategy=spread", "train0", "train1 serve10"),
        ("generators.count=2 placement.generators.pool=serve", "train0", "serve10 serve11"),
        (
            "generators.count=3 placement.generators.pool=serve placement.strategy=spread",
            "train0",
            "serve10 serve20 serve11",
        ),
        (
            "generators.count=1 generators.tensor_parallel=2 placement.learner.pool=serve",
            "serve10",
            "train0,1",
        ),
        ("learner.ranks=6 generators.count=1", "train0 train1 train2 train3 serve10 serve11", "serve20"),
        ("generators.count=2 learner.gpus=0 generators.gpus=0", "head", "head head"),
        (
            "generators.count=3 learner.gpus=0 generators.gpus=0 placement.strategy=spread",
            "head",
            "head train serve1",
        ),
        ("generators.count=5 learner.gpus=0 generators.gpus=0", "head", "head head head train train"),
        # The ranks leave a node to engines that have no other one.
        (
            "generators.count=8 learner.gpus=0 generators.gpus=0 learner.ranks=4 "
            "placement.generators.pool=train",
            "head head head head",
            "train train train train train train train train",
        ),
        (
            "generators.count=8 learner.gpus=0 generators.gpus=0 learner.ranks=5 "
            "placement.generators.pool=train",
            "serve1 serve1 serve1 serve1 serve1",
            "train train train train train train train train",
        ),
        ("generators.count=1 generators.tensor_parallel=4", "serve10", "train0,1,2,3"),
    ],
)
def test_labels_and_strategy_choose_the_nodes(overrides: str, ranks: str, engines: str) -> None:
    division = divide_roles(POOLS, read_wishes(load_config(overrides.split())))

    def show(places: tuple[RolePlace, ...]) -> str:
        return " ".join(f"{place.node}{','.join(map(str, place.gpus))}" for place in places)

    assert (show(division.ranks), show(division.engines)) == (ranks, engines)


FAKE = """
import os, sys, ray, time
from ray.util.placement_group import remove_placement_group
from pathlib import Path
from configs.load import load_config
from slipstream import role_places
from slipstream.cluster import start_node
from slipstream.node_agents import NodeAgent
from slipstream.nursery import Stage, run_nursery
from slipstream.role_failures import RoleFailed
from slipstream.role_places import RolePlaces
from slipstream.stop_signals import StopSignals

class Probe:
    def visible(self): return os.environ.get("CUDA_VISIBLE_DEVICES")
    def node(self): return ray.get_runtime_context().get_node_id()
    def hang(self): time.sleep(600)

def place(*overrides, **more):
    return RolePlaces(load_config(list(overrides)), Path("logs"), StopSignals(), **more)

def probe(places, place):
    return ray.remote(Probe).options(**places.actor_options("learner", place)).remote()

def visible(*actors):
    return ray.get([actor.visible.remote() for actor in actors])

with run_nursery({"learner": Stage([], ["ray._private.workers.default_worker"])}):
    nodes = [start_node(num_cpus=5, num_gpus=2)]
    nodes.append(start_node(num_cpus=8, num_gpus=8, address=nodes[0].gcs_address))
    ray.init(address=nodes[0].gcs_address, log_to_driver=False, logging_level="ERROR")
    for engines in (["generators.count=3"], ["generators.count=1", "generators.tensor_parallel=2"]):
        turns = place("placement.mode=colocated", "learner.ranks=2", *engines)
        actors = [probe(turns, place) for place in turns.division.places]
        print(*visible(*actors))
        if "generators.count=1" in engines:
            turns._devices = {rank: actors[rank].visible.remote() for rank in (0, 1)}
            print(turns.find_place("generator-0").devices, turns.find_place("generator-0").processors)
            role_places.STARTED_S, turns._devices[1] = 0.5, actors[1].hang.remote()
            for _ in range(2):
                try:
                    turns.find_place("generator-0")
                except RoleFailed as error:
                    print(str(error).splitlines()[0])
                ray.kill(actors[1])
                role_places.STARTED_S = 60.0
        for actor in actors:
            ray.kill(actor)
        for group, _ in turns._groups.values():
            remove_placement_group(group)
    places = place("learner.ranks=2", "generators.count=1", "learner.gpus=0.3333")
    actors = [probe(places, place) for place in places.division.places]
    print(*visible(*actors))
    ray.kill(actors[0])
    print(*visible(probe(places, places.division.ranks[0])))
    try:
        place("generators.count=1", say=print, patience_s=1.0)
    except RoleFailed as error:
        print(error)
    try:
        place("generators.count=5", "generators.gpus=0")
    except ValueError as error:
        print(error)
    on_cpu = place("learner.gpus=0", "generators.count=0")
    print(repr(*visible(probe(on_cpu, on_cpu.division.ranks[0]))))
    # The second node has no nursery, as in a cluster that others have started.
    big = ["generators.count=1", "generators.tensor_parallel=4"]
    wide = place("cluster.address=auto", "learner.gpus=0", *big)
    (far,) = wide.division.engines
    engine = ray.remote(Probe).options(**wide.actor_options("none", far)).remote()
    print(*visible(engine), ray.get(engine.node.remote()) == far.node != wide.driver_node)
    print(wide.find_node("learner-0").name == wide.driver_node, wide.spans_nodes, places.spans_nodes)
    print(wide.agents.ask(far.node, NodeAgent.is_alive, os.getpid()))
    # The driver's node is full by now: another run has its learner on the other one.
    beside = place("cluster.address=auto", "learner.gpus=0", "generators.count=1", "generators.gpus=0")
    print({place.node for place in beside.division.places} == {far.node})
    ray.shutdown()
    for node in reversed(nodes):
        node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


def test_ray_puts_every_process_on_its_gpu_and_what_finds_no_place_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "fake.py").write_text(FAKE)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, str(tmp_path / "fake.py")]
    with (tmp_path / "errors").open("w") as errors:  # a file, whose end no agent of Ray's holds up
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert ran.returncode == 0, (tmp_path / "errors").read_text()
    turns, wide_turns, *names, first_life, second_life, waiting, unplaced, too_many, on_cpu = (
        ran.stdout.splitlines()[:-4]
    )
    far = ran.stdout.splitlines()[-4:]
    rank_0, rank_1, *engines = turns.split()
    assert {rank_0, rank_1} == {"0", "1"} and engines == [rank_0, rank_1, rank_0], "by turns"
    rank_0, rank_1, engine = wide_turns.split()
    assert {rank_0, rank_1} == {"0", "1"} and engine == "None", (
        "the engine hears from the ranks which they are"
    )
    silent, dead = "learner-1 has not named its GPUs within 0.5 s", "learner-1 has died. The end of its log:"
    assert names == [f"{rank_0},{rank_1} 2", silent, dead]
    of_rank_0, of_rank_1, of_engine = first_life.split()
    assert {of_rank_0, of_rank_1} == {"0", "1"} and of_engine == of_rank_0 == second_life
    assert "learner-0, generator-0 wait for 2 CPUs (2 free) and 2 GPUs (0 free) on node" in waiting
    assert waiting.endswith("(for 1 s at most)") and unplaced.endswith("they must be placed within 1 s")
    assert "together at most 4 (the CPUs for engines beside 1 of the learner of the node" in too_many
    assert too_many.endswith("got 5")
    assert on_cpu == "''", "it sees no GPU"
    assert far == ["0,1,2,3 True", "True True False", "True", "True"]


MOVED = """
import os, ray, threading, time
from pathlib import Path
from configs.load import load_config
from slipstream import node_facts, role_places
from slipstream.cluster import log_words_of_ray, start_node
from slipstream.role_failures import RoleFailed, get_result
from slipstream.role_places import RolePlaces
from slipstream.stop_signals import StopSignals

def place(*overrides, logs="logs"):
    return RolePlaces(load_config(["cluster.address=auto", *overrides]), Path(logs), StopSignals())

class Rank:
    def __init__(self, *arguments): pass
    def place(self): return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

role_places.LearnerRole = Rank
nodes = [start_node(num_cpus=3, num_gpus=1)]
far = {"address": nodes[0].gcs_address, "labels": {"pool": "far"}}
nodes += [start_node(num_cpus=9, num_gpus=2, **far) for _ in range(2)]
ray._private.worker.print_to_stdstream = log_words_of_ray
ray.init(address=nodes[0].gcs_address, log_to_driver=False, logging_level="ERROR")
places = place("learner.ranks=3", "generators.count=0")
first, kept = places.division.ranks[0].node, places.division.ranks[2].node
names = {places.driver_node: "driver", first: "lost", kept: "kept"}
for given_up in ([], [first]):
    places.replace_lost_ranks(given_up)
    ranks = [places.start_rank(rank) for rank in range(3)]
    found = ray.get([rank.place.remote() for rank in ranks], timeout=90)
    print(*(f"{names[node]}:{gpus}" for node, gpus in found))
    for rank in ranks:
        ray.kill(rank)
lost_node = [node for node in role_places.list_nodes() if node.name == first]
deadline = time.monotonic() + 60
while (free := role_places.read_free_rooms(lost_node)[0]).num_cpus < 9 and time.monotonic() < deadline:
    time.sleep(0.1)
print(free.num_cpus, free.num_gpus)
dying = next(node for node in nodes if node.node_id == kept)
threading.Timer(2, dying.kill_raylet).start()
places.say = lambda line: None
try:
    places._reserve(places.division, patience_s=100)  # it holds all of that itself
except role_places.NodeGone as error:
    print(error)
fleet = ["role=generators", "buffer.address=tcp://127.0.0.1:9", "generators.count=1", "generators.gpus=0"]
try:
    broken = place(*fleet, logs=f"{__file__}/logs")
    get_result(broken.start_buffer().get_pid.remote(), "buffer", str)
except RoleFailed as error:
    print(error)
grown = place(*fleet)  # it takes the last processor of the driver's node
node_facts.digest_code = lambda: "of other code"  # in this process alone
try:
    place(*fleet, "placement.generators.pool=far")
except RoleFailed as error:
    print(error)
for _ in range(2):
    try:
        grown.add_seats(["generator-1"], on_all_nodes=True)
    except ValueError as error:
        print(error)
print(grown.spans_nodes)
ray.shutdown()
for node in reversed(nodes):
    node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


def test_a_rank_that_moves_has_a_place_beside_others_and_a_node_where_roles_cannot_begin_says_why(
    tmp_path: Path,
) -> None:
    (tmp_path / "moved.py").write_text(MOVED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, str(tmp_path / "moved.py")]
    with (tmp_path / "errors").open("w") as errors:  # a file, whose end no agent of Ray's holds up
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert ran.returncode == 0, (tmp_path / "errors").read_text()
    before, after, given_back, gone, no_logs, other_code, said, no_seat, none_again, spans = (
        ran.stdout.splitlines()
    )
    assert before == "lost:0 lost:1 kept:0"
    assert after.split()[0] == "driver:0"
    assert {after.split()[1], after.split()[2]} == {"kept:0", "kept:1"}
    assert given_back == "9 2", "a node that comes back has all of its room again"
    assert gone.endswith(" is gone"), "nobody waits for a node that has died"
    assert other_code.startswith("the code of Slipstream must be the same on every node, got other code on ")
    assert said == other_code and "at most 0 (the CPUs" in no_seat, "a node that joins later is left out"
    assert none_again == no_seat and spans == "False", "for good"
    assert no_logs.startswith("buffer cannot begin: NotADirectoryError: ") and "moved.py/logs" in no_logs


# ---- by turns


def divide_by_turns(gpus: int, each: int = 1, num_cpus: int = 100, **wishes: Any) -> RoleDivision:
    placement = PlacementConfig(mode=PlacementMode.colocated)
    return divide_turns(
        [NodeRoom("node", num_cpus, gpus)], RoleWishes(placement=placement, engine_ranks=each, **wishes)
    )


def test_by_turns_engines_are_on_the_ranks_gpus_and_each_side_has_the_whole_memory() -> None:
    division = divide_by_turns(4, ranks=2, engines=3)
    assert [place.gpus for place in division.places] == [(0,), (1,), (0,), (1,), (0,)]
    assert [place.memory for place in division.places] == [1.0, 1.0, 0.45, 0.9, 0.45]
    assert [place.is_shared for place in division.engines] == [True, False, True]
    assert all(place.takes_turns and place.beside_rank for place in division.engines)
    for bundle, number in division.bundles.items():
        shares = [place.share for place in division.places if place.bundle == bundle]
        assert len(shares) == number and sum(shares) <= 1, "Ray gives them one GPU"
    wide = divide_by_turns(4, 2, ranks=4, engines=2)
    assert [place.gpus for place in wide.engines] == [(0, 1), (2, 3)]
    assert [place.bundle[1] for place in wide.ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {place.share for place in wide.ranks} == {1.0} and {place.share for place in wide.engines} == {0.0}
    assert set(wide.bundles.values()) == {2 + 2}, "two ranks, and an engine of two processes"
    on_cpu = divide_by_turns(0, ranks=2, engines=2)
    assert not any(place.gpus for place in on_cpu.places)
    assert all(place.takes_turns and not place.beside_rank for place in on_cpu.engines)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (
            {"gpus": 4, "each": 3, "ranks": 4, "engines": 1},
            "must divide the ranks of the learner on each node .* got 3 and 4 on node node",
        ),
        ({"gpus": 1, "ranks": 2, "engines": 1}, "must be together at most 1"),
        (
            {"gpus": 2, "ranks": 2, "engines": 1, "rank_gpus": 0.0},
            "both be null, or both 0, .* got 0.0 and None",
        ),
        (
            {"gpus": 1, "ranks": 1, "engines": 2, "engine_memory": 0.6},
            "at most 0.50 for 2 engines .* got 0.6",
        ),
        ({"gpus": 1, "ranks": 1, "engines": 2, "num_cpus": 2}, "at most 1 .the CPUs beside 1 ranks.* got 2"),
        (
            {"gpus": 4, "each": 2, "ranks": 4, "engines": 2, "num_cpus": 7},
            "at most 1 .the CPUs beside 4 ranks .* each takes 2.* got 2",
        ),
    ],
)
def test_what_cannot_be_had_by_turns_is_refused_with_the_arithmetic(
    wishes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        divide_by_turns(**wishes)


def test_by_turns_an_engine_of_several_gpus_has_them_on_one_node_and_so_its_processors() -> None:
    placement = PlacementConfig(mode=PlacementMode.colocated)

    def divide(num_gpus: int, num_cpus: int, ranks: int) -> RoleDivision:
        nodes = [NodeRoom(name, num_cpus, num_gpus) for name in ("a", "b")]
        wishes = RoleWishes(placement=placement, engine_ranks=2, ranks=ranks, engines=2)
        return divide_turns(nodes, wishes)

    division = divide(2, 4, 4)
    assert [(place.node, place.gpus) for place in division.engines] == [("a", (0, 1)), ("b", (0, 1))]
    assert [division.count_processors(node) for node in ("a", "b")] == [4, 4]
    with pytest.raises(ValueError, match="on each node .* got 2 and 3 on node a"):
        divide(3, 10, 6)
    with pytest.raises(ValueError, match="at most 0 .the CPUs beside 4 ranks .* got 2"):
        divide(2, 3, 4)
