"""The division of GPUs: every process has a place, and Ray puts it there."""

import itertools
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from configs.load import load_config
from slipstream.role_placement import GpuDivision, RolePlace, RoleWishes, divide_gpus, read_wishes

GPUS = (0, 1, 2, 3, 4, 7, 8, 16)
SHARES = (
    {},
    {"rank_gpus": 0.5, "engine_gpus": 0.5},
    {"rank_gpus": 1.0, "engine_gpus": 1.0},
    {"engine_gpus": 1 / 3},
    {"engine_gpus": 2.0},
    {"rank_gpus": 0.0},
    {"engine_gpus": 0.0},
    {"rank_memory": 0.5, "engine_memory": 0.4},
    {"engine_memory": 0.9},
    {"rank_memory": 1.0},
    {"rank_gpus": 2 / 3, "engine_memory": 0.3},
)
CASES = [
    (num_gpus, elsewhere, RoleWishes(ranks=ranks, engines=engines, **shares))
    for num_gpus, elsewhere, ranks, engines, shares in itertools.product(
        GPUS, (0, 8), (0, 1, 2, 4, 8), (0, 1, 2, 3, 8, 17), SHARES
    )
]


def count_room(wanted: RoleWishes, *ranks: float | None, rank_memory: tuple[float | None, ...] = ()) -> int:
    """Engines that fit beside these ranks, counted one after the other."""
    if (wanted.engine_gpus or 0) > 1:
        return 0

    def fits(engines: int) -> bool:
        return all(
            sum(0.05 if share is None else share for share in (*there, *(each,) * engines)) <= 1 + 1e-9
            for there, each in ((ranks, wanted.engine_gpus), (rank_memory, wanted.engine_memory))
        )

    return next(engines for engines in itertools.count() if not fits(engines + 1))


def is_possible(num_gpus: int, elsewhere: int, wanted: RoleWishes) -> bool:
    """Does any division exist? By counting, without making one."""
    ranks, engines = wanted.ranks * (wanted.rank_gpus != 0), wanted.engines * (wanted.engine_gpus != 0)
    if not ranks and not engines:
        return True
    if not num_gpus:
        explicit = (ranks and wanted.rank_gpus) or (engines and wanted.engine_gpus)
        return not elsewhere and not explicit
    if ranks > num_gpus:
        return False
    if (wanted.engine_gpus or 0) > 1:
        return engines * int(wanted.engine_gpus or 0) <= num_gpus - ranks
    beside = count_room(wanted, wanted.rank_gpus, rank_memory=(wanted.rank_memory,))
    return engines <= ranks * beside + (num_gpus - ranks) * count_room(wanted)


def check_division(num_gpus: int, wanted: RoleWishes, division: GpuDivision) -> None:
    assert (len(division.ranks), len(division.engines)) == (wanted.ranks, wanted.engines), (
        "every process has a place"
    )
    share, memory, together = defaultdict(float), defaultdict(float), defaultdict(set)
    for place in division.places:
        assert all(0 <= gpu < num_gpus for gpu in place.gpus) and len(set(place.gpus)) == len(place.gpus)
        assert bool(place.gpus) == bool(place.share) == (place.memory is not None)
        assert math.isclose(place.share * 10_000, round(place.share * 10_000)), "as Ray counts"
        assert place.share == 1 or len(place.gpus) <= 1, "no part of several"
        others = [
            other
            for other in division.places
            if other is not place and place.gpus and other.gpus == place.gpus
        ]
        assert place.is_shared == (len(others) > 0)
        assert (
            place.beside_rank == any(other in division.ranks for other in others) or place in division.ranks
        )
        for gpu in place.gpus:
            share[gpu] += place.share
            memory[gpu] += place.memory or 0
            together[gpu].add(place.gpus)
    assert all(total <= 1 + 1e-9 for total in (*share.values(), *memory.values()))
    assert all(len(bundles) == 1 for bundles in together.values()), "a GPU is in one bundle"
    of_ranks = [gpu for place in division.ranks for gpu in place.gpus]
    assert len(of_ranks) == len(set(of_ranks)), "no two ranks on one GPU"
    assert len({place.memory for place in division.ranks}) <= 1, "ranks need alike"
    assert sum(division.bundles.values()) == len(division.places)
    wished = (
        (division.ranks, wanted.rank_gpus, wanted.rank_memory),
        (division.engines, wanted.engine_gpus, wanted.engine_memory),
    )
    for places, gpus, fraction in wished:
        for place in places:
            assert gpus is None or num_gpus == 0 or abs(len(place.gpus) * place.share - gpus) < 1e-3
            assert fraction is None or not place.gpus or place.memory == pytest.approx(fraction, abs=1e-3)
    for places in (division.ranks, division.engines):
        assert len({bool(place.gpus) for place in places}) <= 1, "all on GPUs, or none"


def test_every_process_has_a_place_no_gpu_is_taken_beyond_one_and_only_the_impossible_is_refused() -> None:
    placed = 0
    for num_gpus, elsewhere, wanted in CASES:
        case = f"{num_gpus} GPUs here, {elsewhere} elsewhere, {wanted}"
        try:
            division = divide_gpus({"here": num_gpus, "there": elsewhere}, "here", wanted)
        except ValueError as error:
            assert not is_possible(num_gpus, elsewhere, wanted), f"{case}: {error}"
            assert ", got " in str(error)
            continue
        assert is_possible(num_gpus, elsewhere, wanted), case
        check_division(num_gpus, wanted, division)
        placed += 1
    assert placed > 1000 and len(CASES) - placed > 1000


def show_division(num_gpus: int, *overrides: str) -> str:
    return str(divide_gpus({"here": num_gpus}, "here", read_wishes(load_config(list(overrides)))))


@pytest.mark.parametrize("num_gpus", GPUS)
def test_the_defaults_work_with_any_number_of_gpus(num_gpus: int) -> None:
    wanted = read_wishes(load_config([]))
    check_division(num_gpus, wanted, divide_gpus({"here": num_gpus}, "here", wanted))


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
            "generators.gpus=2 generators.count=1",
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
            "generators.gpus=2",
            r"generators.count × generators.gpus must be at most 3 .* got 2 × 2",
        ),
        ({"here": 0}, "learner.gpus=1", r"got 1.0 and None with 0 GPUs here and none elsewhere"),
        ({"here": 0, "there": 8}, "", r"got None and None with 0 GPUs here and 8 on node there"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    gpus: dict[str, int], overrides: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        divide_gpus(gpus, "here", read_wishes(load_config(overrides.split())))


def test_gpus_of_other_nodes_do_not_count() -> None:
    wanted = RoleWishes(ranks=1, engines=1)
    assert divide_gpus({"here": 1, "there": 8}, "here", wanted) == divide_gpus({"here": 1}, "here", wanted)
    assert divide_gpus(
        {"here": 0, "there": 8}, "here", RoleWishes(ranks=1, engines=1, rank_gpus=0, engine_gpus=0)
    ).ranks == (RolePlace(),)


FAKE = """
import os, sys, time, ray
from configs.load import load_config
from slipstream.cluster import start_node
from slipstream.nursery import Stage, run_nursery
from slipstream.role_failures import RoleFailed
from slipstream.role_places import RolePlaces
from slipstream.stop_signals import StopSignals

class Probe:
    def visible(self): return os.environ.get("CUDA_VISIBLE_DEVICES")

def probe(places, place):
    return ray.remote(Probe).options(**places.actor_options("learner", place)).remote()

def visible(*actors):
    return ray.get([actor.visible.remote() for actor in actors])

with run_nursery({"learner": Stage([], ["ray._private.workers.default_worker"])}):
    nodes = [start_node(num_cpus=5, num_gpus=2)]
    nodes.append(start_node(num_cpus=8, num_gpus=8, address=nodes[0].gcs_address))
    ray.init(address=nodes[0].gcs_address, log_to_driver=False, logging_level="ERROR")
    three = load_config(["learner.ranks=2", "generators.count=1", "learner.gpus=0.3333"])
    places = RolePlaces(three, StopSignals())
    actors = [probe(places, place) for place in places.division.places]
    print(*visible(*actors))
    ray.kill(actors[0])
    print(*visible(probe(places, places.division.ranks[0])))
    try:
        RolePlaces(load_config(["generators.count=1"]), StopSignals(), patience_s=1.0)
    except RoleFailed as error:
        print(error)
    on_cpu = RolePlaces(load_config(["learner.gpus=0", "generators.count=0"]), StopSignals())
    print(repr(*visible(probe(on_cpu, on_cpu.division.ranks[0]))))
    ray.shutdown()
    for node in reversed(nodes):
        node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


def test_ray_puts_every_process_on_its_gpu_of_the_drivers_node_and_what_finds_no_place_there_is_named(
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
    first_life, second_life, unplaced, on_cpu = ran.stdout.splitlines()
    of_rank_0, of_rank_1, of_engine = first_life.split()
    assert {of_rank_0, of_rank_1} == {"0", "1"} and of_engine == of_rank_0 == second_life
    assert (
        "learner-0, generator-0 must be placed within 1 s, and wait for 2 CPUs (2 free) and 2 GPUs (0 free)"
        in unplaced
    )
    assert on_cpu == "''", "it sees no GPU"
