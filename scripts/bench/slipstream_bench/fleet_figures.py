"""Measures the cost of a fleet of generators to one buffer, for `benchmark_buffer.py --fleet N`.

Each row is a buffer of its own. Its processor time comes from the kernel, for the thread that serves and for
ZeroMQ's, so it means something on a busy machine too. The physical limits (copying the bytes of a group in
memory, and writing and syncing them to the same disk) are measured in the same run.
"""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from buffers import messages as m
from buffers.trajectory import encode_batch
from slipstream_bench.carried_groups import make_template, measure_disk
from slipstream_bench.fleet import Fleet, FleetRow

say = Console(stderr=True)


@dataclass
class FleetFigures:
    """The figures of one row. Rates are over the time of the measurement."""

    row: FleetRow
    joined_s: float
    """Seconds from the first connection to the last welcome."""
    seconds: float = 0.0
    num_steps: int = 0
    """Steps that the consumer has trained meanwhile."""
    groups_per_s: float = 0.0
    tokens_per_s: float = 0.0
    mb_per_s: float = 0.0
    cpu_shares: dict[str, float] = field(default_factory=dict)
    """Processors that the server keeps busy, by thread."""
    full_thread_groups_per_s: float = 0.0
    """Groups a second at which the serving thread would fill a processor, heartbeats and all."""
    cpu_ms_per_group: float = 0.0
    """Milliseconds of processor time of the whole server."""
    cpu_ms_per_mb: float = 0.0
    cpu_share_of_machine: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    """Resident memory of the server at the start, in the middle and at the end."""
    latencies_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Median and 99th percentile, as the generators see them."""
    refused: dict[str, int] = field(default_factory=dict)
    """Messages that the buffer has refused, by reason. There should be none."""
    saturated: str = ""
    """The part of the machine that is used up."""


# ---- rows


def measure_row(row: FleetRow, seconds: float, folder: Path) -> FleetFigures:
    fleet = Fleet(row, folder)
    try:
        found = FleetFigures(row, fleet.joined_s)
        # Until the rate is steady: where groups take their time, no step is whole before that has gone by.
        fleet.train_for(seconds / 2 + row.play_s)
        fleet.order()
        first_step = fleet.step
        began, spent = time.monotonic(), read_cpu_times(fleet.server.pid)
        psutil.cpu_percent()
        found.rss_mb = [fleet.server.memory_info().rss / 1e6]
        for _ in range(2):
            fleet.train_for(seconds / 2)
            found.rss_mb.append(fleet.server.memory_info().rss / 1e6)
        count, found.seconds = fleet.order(), time.monotonic() - began
        found.num_steps = fleet.step - first_step
        found.cpu_share_of_machine = psutil.cpu_percent() / 100
        spent = {name: s - spent[name] for name, s in read_cpu_times(fleet.server.pid).items()}
        found.refused = fleet.ask_status().refused_requests
    finally:
        fleet.close()
    mb_per_group = encode_batch(make_template(row.size)).size / 1e6
    found.groups_per_s = count.num_accepted / found.seconds
    found.tokens_per_s = found.groups_per_s * row.tokens_per_group
    found.mb_per_s = found.groups_per_s * mb_per_group
    found.cpu_shares = {name: s / found.seconds for name, s in spent.items()}
    found.full_thread_groups_per_s = count.num_accepted / max(1e-9, spent["serving"])
    found.cpu_ms_per_group = 1e3 * sum(spent.values()) / max(1, count.num_accepted)
    found.cpu_ms_per_mb = found.cpu_ms_per_group / mb_per_group
    found.latencies_ms = {kind: find_quantiles(one) for kind, one in count.latencies_s.items()}
    found.saturated = name_bottleneck(found)
    return found


def read_cpu_times(pid: int) -> dict[str, float]:
    """Returns the processor seconds of a process: of the thread that serves, of ZeroMQ's, and of the rest."""
    spent = {"serving": 0.0, "sockets": 0.0, "rest": 0.0}
    ticks = os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # the thread has ended
        kind = "serving" if task.name == str(pid) else "sockets" if name.startswith("ZMQ") else "rest"
        spent[kind] += sum(map(int, fields.split()[11:13])) / ticks
    return spent


def find_quantiles(latencies_s: list[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile in milliseconds."""
    if not latencies_s:
        return float("nan"), float("nan")
    median, p99 = np.quantile(latencies_s, (0.5, 0.99))
    return 1e3 * float(median), 1e3 * float(p99)


def name_bottleneck(found: FleetFigures) -> str:
    if found.row.offered is not None and found.tokens_per_s > 0.9 * found.row.offered:
        return "nothing: it keeps up"
    if found.cpu_shares["serving"] > 0.85:
        return "the serving thread"
    if found.cpu_share_of_machine > 0.9:
        return "the machine's processors"
    return "the disk, or the generators"


def measure_limits(folder: Path, seconds: float) -> dict[str, float]:
    """Returns MB a second that one thread copies in memory, and that it writes and syncs to the disk."""
    size = FleetRow(num_generators=1).size
    mb = make_template(size).nbytes / 1e6
    # Bytes that are not in the cache, as those of many groups.
    source = np.ones(64 << 20, np.uint8)
    target, num, began = np.empty_like(source), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        np.copyto(target, source)
        num += 1
    copied = num * source.nbytes / 1e6 / (time.perf_counter() - began)
    return {"memcpy": copied, "write and sync": mb * measure_disk(size, seconds, folder)}


# ---- comings and goings


def measure_changes(
    num_generators: int, folder: Path, *, lease_s: float = 15.0, settle_s: float = 7.0
) -> dict[str, float]:
    """Has all generators join at once, the buffer die, half of the generators die and the rest leave. Each
    generator plays groups of 10 s meanwhile. Returns what it took, by words.

    `settle_s`: seconds after which it counts the leases that the buffer's death has cost. Those that nobody
    knows of are taken back within `BEGIN_S`.
    """
    row = FleetRow(num_generators=num_generators, num_tokens=256, lease_s=lease_s)
    row = replace(row, offered=num_generators * row.tokens_per_group / 10)
    fleet = Fleet(row, folder)
    try:
        found = {"all have joined, s": fleet.joined_s}
        fleet.train_for(2.0)
        began = time.monotonic()
        size = len(m.encoder.encode(fleet.ask_status()))
        found["an answer to a watcher, ms"] = 1e3 * (time.monotonic() - began)
        found["its size, kB"] = size / 1e3
        fleet.order()
        fleet.kill_server()
        found["killed buffer, to its first answer, s"] = fleet.wait_for_roles(lambda status: True)
        found["until it has heard of all generators, s"] = fleet.wait_for_roles(
            lambda status: len(status.generators) == num_generators
        )
        fleet.train_for(settle_s)
        count = fleet.order()
        found["leases lost by that"] = count.num_revoked
        found["longest wait for an answer meanwhile, s"] = max(count.latencies_s["heartbeat"])
        fleet.order()
        num_dead = fleet.kill_half()
        found["half killed: longest wait for a step, s"] = fleet.train_for(lease_s + 2)
        expired = fleet.ask_status().groups.rejected
        found["leases of theirs that have expired"] = expired["failed"] + expired.get("returned", 0)
        found["longest wait of the others for an answer, s"] = max(fleet.order().latencies_s["heartbeat"])
        fleet.order("leave")
        found["the others leave, s"] = fleet.wait_for_roles(lambda status: len(status.roles) <= num_dead)
        account = fleet.ask_status().groups
        assert account.total == account.trained + account.in_flight + sum(account.rejected.values())
    finally:
        fleet.close()
    return found


# ---- the report


def list_rows(num_generators: int) -> list[FleetRow]:
    many = FleetRow(num_generators=num_generators)
    return [
        FleetRow(num_generators=1),
        FleetRow(num_generators=max(1, num_generators // 10)),
        many,
        replace(many, offered=1e6),
        replace(many, durability="fsync"),
        replace(many, has_keys=True),
        FleetRow(num_generators=max(1, num_generators // 10), num_tokens=100_000, groups_per_step=16),
    ]


def print_fleet_rows(num_generators: int, seconds: float, folder: Path, json_file: Path | None) -> None:
    say.print("limits of the machine ...")
    limits, found = measure_limits(folder, seconds / 3), []
    for number, row in enumerate(list_rows(num_generators)):
        say.print(f"{row.name} ...")
        found.append(measure_row(row, seconds, folder / f"row-{number}"))
        print_row(found[-1], limits)
    say.print(f"{num_generators:,} generators come and go ...")
    changes = measure_changes(num_generators, folder / "changes")
    table = Table("", "", title=f"{num_generators:,} generators come and go", title_justify="left")
    for what, figure in changes.items():
        table.add_row(what, f"{figure:,.2f}")
    Console(width=120).print(table)
    if json_file is not None:
        whole = {"machine": platform.platform(), "load": os.getloadavg(), "limits_mb_per_s": limits}
        whole |= {"rows": [asdict(one) for one in found], "changes": changes}
        json_file.write_text(json.dumps(whole, indent=1))


def print_row(found: FleetFigures, limits: dict[str, float]) -> None:
    table = Table("", "", title=found.row.name, title_justify="left", show_header=False)
    busy = ", ".join(f"{name} {share:.2f}" for name, share in found.cpu_shares.items())
    offered = "" if found.row.offered is None else f" of {found.row.offered / 1e6:.2f} offered"
    for what, figure in {
        "sustained": f"{found.tokens_per_s / 1e6:.2f} M tokens/s{offered}, "
        f"{found.groups_per_s:.1f} groups/s, {found.mb_per_s:.0f} MB/s; {found.num_steps} steps trained",
        "of the limits": ", ".join(f"{found.mb_per_s / mb:.3f} of {name}" for name, mb in limits.items()),
        "processors busy": f"{busy}; of the whole machine {found.cpu_share_of_machine:.0%}",
        "processor time": f"{found.cpu_ms_per_group:.2f} ms a group, {found.cpu_ms_per_mb:.2f} ms a MB",
        "a full serving thread": f"{found.full_thread_groups_per_s:,.0f} groups/s, "
        f"{found.full_thread_groups_per_s * found.row.tokens_per_group / 1e6:,.1f} M tokens/s",
        "resident memory": " → ".join(f"{mb:.0f}" for mb in found.rss_mb) + " MB",
        "median, p99": ", ".join(
            f"{kind} {median:.1f}, {p99:.1f} ms" for kind, (median, p99) in found.latencies_ms.items()
        ),
        "all joined in": f"{found.joined_s:.2f} s",
        "refused": str(found.refused or "nothing"),
        "used up": found.saturated,
        "load of the machine": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors",
    }.items():
        table.add_row(what, figure)
    Console(width=120).print(table)
