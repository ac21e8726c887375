"""Measures how many groups a second go from producers through the buffer to a consumer.

    scripts/benchmark_buffer.sh [--seconds 6] [--only large|small] [--peers] [--long] [--json FILE]
    scripts/benchmark_buffer.sh --fleet 1000 [--seconds 6] [--json FILE]

The same is measured for what else could carry groups. A group is 8 trajectories of 2,048 tokens (`large`) or
of 64 (`small`). Producers and consumer are processes of their own. The consumer adds up all tokens that it
receives, so that every byte of them has arrived. `raw pyzmq` sends the same bytes from one process to another
and keeps nothing: it is the limit. The buffer checks every group, writes it to disk, leases it, acknowledges
it and accounts for it.

`--peers` also measures Ray's object store with a queue actor, and TransferQueue (`pip install
TransferQueue`). `--long` sends a million trajectories through the buffer while it watches memory and speed,
and connects 1,000 producers instead of 10.

`--fleet` measures instead what so many generators cost the buffer, with the heartbeats and requests of real
ones, and what happens when all of them come, leave, or lose the buffer at once
(`slipstream_bench.fleet_figures`).
"""

import argparse
import json
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import zmq
from rich.console import Console
from rich.table import Table

from buffers import messages as m
from buffers.client import BufferClient, TakenBatch
from buffers.trajectory import SCHEMA, SCHEMA_VERSION, encode_batch
from configs.load import load_config
from configs.schema import Config
from slipstream_bench.buffer_peers import PEERS, measure_peer
from slipstream_bench.carried_groups import (
    SAMPLES,
    GroupSize,
    add_up_tokens,
    make_template,
    measure_disk,
    running_processes,
    serve_buffer,
)
from slipstream_bench.fleet_figures import print_fleet_rows

say = Console(stderr=True)


SIZES = {"large": GroupSize("large", 2048, 8, 128, 3), "small": GroupSize("small", 64, 32, 1024, 2)}


# ---- raw pyzmq


def measure_raw_zmq(size: GroupSize, seconds: float, folder: Path) -> float:
    """Returns groups a second that one process sends and this one reads and adds up; nothing keeps them."""
    address = f"ipc://{folder}/raw"
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(address)
    with running_processes([(push_groups, (size, address))]):
        socket.recv()
        began, num = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            add_up_tokens(pa.ipc.read_record_batch(pa.py_buffer(socket.recv(copy=False).buffer), SCHEMA))
            num += 1
    socket.close(linger=0)
    return num / seconds


def push_groups(size: GroupSize, address: str) -> None:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(address)
    data = encode_batch(make_template(size))
    while True:
        socket.send(data, copy=False)


# ---- the buffer


def make_config(size: GroupSize, address: str, durability: str) -> Config:
    return load_config(
        [
            "generators.max_model_len=4096",
            "generators.engine=simulated",
            "learner.engine=simulated",
            "eval.prompts=0",
            f"buffer.address={address}",
            f"learner.groups_per_step={size.groups_per_step}",
            f"learner.samples_per_prompt={SAMPLES}",
            "run.steps=100000000",
            "staleness.max_versions=1000000",
            f"buffer.max_groups={16 * size.groups_per_step}",
            f"buffer.durability={durability}",
            "buffer.segment_mb=64",
            "buffer.retention=checkpoints",
        ]
    )


class Producer:
    """Producer that keeps a few submissions and one request for leases under way.

    It makes groups by writing the numbers of its leases into a template.
    """

    def __init__(self, name: str, size: GroupSize, address: str, in_flight: int = 4) -> None:
        self._name, self._size, self._in_flight = name, size, in_flight
        whole = pa.concat_batches([make_template(size)] * size.per_message)
        self._columns = [whole.column(i) for i in range(whole.num_columns)]
        self.client = BufferClient(address, timeout_s=60.0)
        self._leases: list[m.Lease] = []
        self._asked: int | None = None
        # True when the buffer had no more leases. Then the leases at hand are sent, fewer than fill a
        # message.
        self._scarce = False
        self._sent: dict[int, float] = {}
        self.latencies: list[float] = []
        self.over = False

    def take_turn(self) -> None:
        """Reads the answers that have arrived, and sends all that may be sent."""
        for answer in self.client.receive_answers(0.0):
            if isinstance(answer.reply, m.LeaseGrant):
                self._asked, self.over = None, answer.reply.ended
                self._leases += answer.reply.leases
                self._scarce = not answer.reply.leases
            elif isinstance(answer.reply, m.LeaseReceipt):
                self.latencies.append(time.perf_counter() - self._sent.pop(answer.number))
        most = self._size.per_message
        if self._asked is None and len(self._leases) < self._in_flight * most:
            self._asked = self.client.send_request(
                m.RequestLeases(generator=self._name, count=self._in_flight * most, wait_s=0.3)
            )
        while len(self._sent) < self._in_flight and (
            len(self._leases) >= most or (self._leases and self._scarce)
        ):
            mine, self._leases = self._leases[:most], self._leases[most:]
            request = m.SubmitGroups(
                generator=self._name,
                leases=[lease.id for lease in mine],
                rows=[SAMPLES] * len(mine),
                schema=SCHEMA_VERSION,
            )
            self._sent[self.client.send_request(request, self._encode_groups(mine))] = time.perf_counter()

    def _encode_groups(self, leases: list[m.Lease]) -> pa.Buffer:
        columns = [column.slice(0, SAMPLES * len(leases)) for column in self._columns]
        for name, values in (
            ("group", [lease.group for lease in leases]),
            ("due", [lease.due for lease in leases]),
            ("prompt_id", [lease.index for lease in leases]),
        ):
            columns[SCHEMA.get_field_index(name)] = pa.array(np.repeat(np.array(values), SAMPLES))
        return encode_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def run_producers(size: GroupSize, address: str, names: list[str], latencies: Path | None = None) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 10_000)
    producers = [Producer(name, size, address, in_flight=4 if len(names) == 1 else 1) for name in names]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        run_until_over(producers)
    finally:
        if latencies is not None:
            latencies.write_text(
                json.dumps([x for producer in producers for x in producer.latencies[-2_000:]])
            )


def run_until_over(producers: list[Producer]) -> None:
    poller, by_socket = zmq.Poller(), {}
    for producer in producers:
        for one in producer.client.sockets:
            poller.register(one, zmq.POLLIN)
            by_socket[one] = producer
        producer.take_turn()
    while not all(producer.over for producer in producers):
        for producer in {by_socket[one] for one, _ in poller.poll(1000)}:
            producer.take_turn()


@dataclass
class BufferThroughput:
    """Measured passage of groups through the buffer."""

    groups_per_s: float
    latencies_s: list[float]
    rates: list[float]
    """Groups a second in each tenth of the time."""
    rss_mb: list[float]
    """Resident memory of the server at the end of each tenth of the time."""


def measure_buffer(
    size: GroupSize,
    durability: str,
    seconds: float,
    folder: Path,
    *,
    sockets: int = 1,
    groups: int | None = None,
) -> BufferThroughput:
    """Runs server and producers, and consumes until `seconds` are over or `groups` have come.

    Each producer process has `sockets` producers with a socket each.
    """
    folder.mkdir()
    address = f"ipc://{folder}/socket"
    config = make_config(size, address, durability)
    work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(serve_buffer, (config, folder / "journal"))]
    for number in range(size.num_producers):
        names = [f"producer-{number}-{i}" for i in range(sockets)]
        work.append((run_producers, (size, address, names, folder / f"latencies-{number}")))
    with running_processes(work) as pids:
        server = psutil.Process(pids[0])
        client = BufferClient(address, timeout_s=120.0)
        client.call(m.PublishVersion(version=0, manifest_locator="w"), m.Acknowledged)
        # From step `ready` on the buffer holds as many groups as it may, so the rate is steady.
        marks, step, ready = [], 0, 2 if groups is None else 16
        sampled = SAMPLES * (size.num_tokens - size.num_tokens // 4) * size.groups_per_step
        began = time.perf_counter()
        while True:
            taken = client.take_batch(step, wait_s=60.0)
            assert isinstance(taken, TakenBatch), taken
            add_up_tokens(taken.table)
            consumed = m.ReportTrainedStep(
                step=step, num_trained=sampled, idle_s=0.0, alive_s=1.0, metrics={}
            )
            for request in (consumed, m.PublishVersion(version=step + 1, manifest_locator="w")):
                client.send_request(request)
            step += 1
            if step % 16 == 0:
                # A checkpoint lets the buffer delete old groups, so that the disk does not fill up.
                client.call(m.ReportCheckpoint(step=step, oldest=step - 1), m.Acknowledged)
            if step == ready:
                began = time.perf_counter()
            if step >= ready:
                marks.append((time.perf_counter() - began, step - ready, server.memory_info().rss / 1e6))
            if (marks and groups is None and marks[-1][0] > seconds) or (
                groups and (step - ready) * size.groups_per_step >= groups
            ):
                break
        client.call(m.StopRun(reason="done"), m.Acknowledged)
        client.close()
    latencies = [x for path in folder.glob("latencies-*") for x in json.loads(path.read_text())]
    shutil.rmtree(folder)
    tenths = [marks[round(i * (len(marks) - 1) / 10)] for i in range(11)]
    rates = [
        size.groups_per_step * (b[1] - a[1]) / max(1e-9, b[0] - a[0])
        for a, b in zip(tenths, tenths[1:], strict=False)
    ]
    total = size.groups_per_step * (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
    return BufferThroughput(total, latencies, rates, [mark[2] for mark in tenths])


# ---- the run


def measure_sizes(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for size in (SIZES[name] for name in ([options.only] if options.only else SIZES)):
        rates = found[size.name] = {}
        say.print(f"{size.name}: raw pyzmq ...")
        rates["raw pyzmq"] = measure_raw_zmq(size, options.seconds, folder)
        rates["the disk alone"] = measure_disk(size, options.seconds, folder)
        for durability in ("none", "os", "fsync"):
            say.print(f"{size.name}: buffer, durability={durability} ...")
            passed = measure_buffer(size, durability, options.seconds, folder / durability)
            rates[f"buffer, {durability}"] = passed.groups_per_s
            rates[f"latency, {durability}"] = format_quantiles(passed.latencies_s)
    if options.long:
        small = SIZES["small"]
        for sockets in (5, 500):
            say.print(f"small: {2 * sockets} connected producers ...")
            few = GroupSize("small", 64, 8, 2048, 2)
            passed = measure_buffer(few, "os", max(15.0, options.seconds), folder / "many", sockets=sockets)
            found["small"][f"{2 * sockets} producers"] = passed.groups_per_s
        say.print("small: a million trajectories ...")
        passed = measure_buffer(small, "os", 0.0, folder / "long", groups=125_000)
        found["small"]["a million trajectories"] = {"groups_per_s": passed.rates, "rss_mb": passed.rss_mb}
    for size in (SIZES[name] for name in found):
        # Peers come last, because they leave much running.
        for peer in PEERS if options.peers else ():
            say.print(f"{size.name}: {peer} ...")
            data = encode_batch(make_template(size)).to_pybytes()
            found[size.name][peer] = measure_peer(peer, data, (SAMPLES, size.num_tokens), options.seconds)
    return found


def format_quantiles(latencies: list[float]) -> str:
    ordered = sorted(latencies) or [float("nan")]
    return (
        f"{1e3 * median(ordered):.1f} ms median, {1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.1f} ms p99"
    )


def compare_with_targets(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Yields (comparison, ratio reached, ratio asked for)."""
    asked = {
        "large": (("raw pyzmq", 0.5), ("Ray queue actor", 10), ("TransferQueue", 20)),
        "small": (("Ray queue actor", 10), ("TransferQueue", 60)),
    }
    for size, rates in found.items():
        for other, ratio in asked[size]:
            if isinstance(rates.get(other), float):
                yield f"{size}: os against {other}", rates["buffer, os"] / rates[other], ratio
        yield f"{size}: fsync against os", rates["buffer, fsync"] / rates["buffer, os"], 0.7
        if size == "large":
            yield (
                f"{size}: fsync against the disk alone",
                rates["buffer, fsync"] / rates["the disk alone"],
                0.7,
            )
    small = found.get("small", {})
    if "1000 producers" in small:
        yield "1,000 connected producers against 10", small["1000 producers"] / small["10 producers"], 0.9
        long = small["a million trajectories"]["groups_per_s"]
        yield "last tenth of a million against the first", long[-1] / long[0], 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of each measurement")
    parser.add_argument("--only", choices=tuple(SIZES))
    parser.add_argument("--peers", action="store_true", help="also measures Ray and TransferQueue")
    parser.add_argument(
        "--long", action="store_true", help="also measures a million trajectories, and 1,000 producers"
    )
    parser.add_argument("--fleet", type=int, metavar="N", help="measures a fleet of N generators instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    # /var/tmp lies on a disk; /tmp may lie in memory.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-", dir="/var/tmp"))
    try:
        if options.fleet:
            print_fleet_rows(options.fleet, options.seconds, folder, options.json)
            return 0
        found = measure_sizes(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = Table("", *found, title="groups a second", title_justify="left")
    for name in dict.fromkeys(name for rates in found.values() for name in rates):
        cells = [rates.get(name, "") for rates in found.values()]
        table.add_row(name, *(f"{c:,.0f}" if isinstance(c, float) else format_cell(c) for c in cells))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for what, reached, wanted in compare_with_targets(found):
        verdict = "ok" if reached >= wanted else "[red]missed[/]"
        console.print(f"{what}: {reached:.2f} × (asked for: {wanted}) {verdict}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.platform(), "groups_per_s": found}, indent=1))
    return 0


def format_cell(cell: Any) -> str:
    if isinstance(cell, dict):
        rates, rss = cell["groups_per_s"], cell["rss_mb"]
        return (
            f"{rates[0]:,.0f} at first, {rates[-1]:,.0f} at last; server {rss[0]:.0f} → {rss[-1]:.0f} MB (max"
            f" {max(rss):.0f})"
        )
    return str(cell)


if __name__ == "__main__":
    sys.exit(main())
