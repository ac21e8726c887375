"""Sends broken messages of every kind to the sockets of a run, whose honest traffic must not suffer.

    scripts/fuzz.sh [--messages 1000000] [--seed 0] [--only buffer|weights] [--keys] [--folder DIR]

The processes are real: a buffer server, a server of weights, and honest roles (two generators, a learner, a
host that fetches weights). The attacks are:

    forged requests     made from their own types: nesting, extremes of every integer and float, lengths, tags
    damaged traffic     real requests with bytes changed, cut or spliced, and damaged Arrow payloads
    wrong frames        messages with too few, too many or too large frames
    raw connections     bytes that are no ZeroMQ, and messages that never end

A hundredth as many messages follow to servers with keys; with `--keys` all messages go there. They come from
strangers without a key or with a wrong one, from the owner of a generator's key who sends requests of a
learner or an operator, and over handshakes that are damaged on their way. Meanwhile keys come and go, and
files that hold no key lie beside them.

The exit status is 1 when a server died, an honest request had no answer, memory grew, the ledger does not
close, or the journal cannot be recovered.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq
from rich.console import Console
from rich.table import Table

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer, TakenBatch
from buffers.keys import KeyRole
from buffers.run_status import GeneratorReport, RunStatus
from buffers.server import BufferServer
from buffers.trajectory import flatten_column, to_batch
from configs.load import load_config
from configs.schema import Config
from slipstream_bench.attack_keys import attack_with_keys, make_all_keys
from slipstream_bench.attacks import ENDED, ENDLESS, PATIENCE_S, Attacker, BufferAttack, branch_off, make_rows

SAMPLES, STALENESS = 2, 2
BATCH = 100
"""Number of messages between two readings of the answers."""
ENDLESS_EVERY = 250_000
"""Number of messages between two that do not end.

The first is sent at once, because a server keeps the memory that it needed for it, and needs no more for the
next.
"""
MEMORY_MIB = 64
"""MiB of memory that a server may gain between a tenth of the messages and the end."""
LEASE_S = 3
"""`buffer.lease_s` of the attacked runs."""
KEYED_SHARE, LEAST_KEYED = 100, 600
"""A share of 1 / `KEYED_SHARE` of the messages, and at least `LEAST_KEYED`, goes to servers with keys.

The share is small because a handshake takes as long as a hundred messages.
"""


def make_config(keys: Path | None) -> Config:
    """Returns the configuration of the attacked run; `keys` is the folder of keys, or None for none."""
    return load_config(
        [
            *([] if keys is None else [f"buffer.keys={keys}"]),
            "generators.engine=simulated",
            "learner.engine=simulated",
            "eval.prompts=2",
            "eval.every=50",
            "run.steps=1000000",
            "learner.groups_per_step=4",
            f"learner.samples_per_prompt={SAMPLES}",
            f"staleness.max_versions={STALENESS}",
            f"buffer.lease_s={LEASE_S}",
            "buffer.max_attempts=1000",
            "buffer.max_quarantined=1000000000",
            "buffer.watchdog_s=600",
            "buffer.retention=checkpoints",
            "buffer.segment_mb=4",
        ]
    )


# ---- the processes


def serve_buffer(folder: Path, keys: Path | None) -> None:
    """Runs a buffer server until SIGTERM, and prints its address first."""
    server = BufferServer(make_config(keys), folder / "journal")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(server.address, flush=True)
    server.run()


def play_honest_roles(folder: Path, buffer: str, weights: str, keys: Path | None) -> None:
    """Plays all honest roles in turns until SIGTERM, then prints what they have done, as JSON."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    done, slowest = Counter[str](), 0.0
    roles = [exercise_buffer(buffer, keys, done)] if buffer else []
    if weights:
        # Imported here, because it needs torch, which takes seconds and memory.
        from slipstream_bench.attack_weights import fetch_weights

        roles.append(fetch_weights(folder, weights, keys, done))
    print("ready", flush=True)
    while not stop:
        for role in roles:
            began = time.monotonic()
            next(role)
            slowest = max(slowest, time.monotonic() - began)
        # Leave the processor to the servers and the attackers.
        time.sleep(0.02)
    print(json.dumps({**done, "slowest_s": round(slowest, 2)}), flush=True)


def connect_client(address: str, keys: Path | None, role: KeyRole) -> BufferClient:
    return BufferClient(address, timeout_s=PATIENCE_S, keys=None if keys is None else str(keys), role=role)


def exercise_buffer(address: str, keys: Path | None, done: Counter[str]) -> Iterator[None]:
    """Plays two generators and a learner, one turn at each step.

    Raises BufferGone when a request has no answer within `PATIENCE_S`.
    """
    client, learner = (
        connect_client(address, keys, KeyRole.generator),
        connect_client(address, keys, KeyRole.learner),
    )
    learner.call(m.PublishVersion(version=0, manifest_locator="v0"), m.Acknowledged)
    step = 0
    for turn in itertools.count():
        name = f"honest-{turn % 2}"
        leases = client.call(m.RequestLeases(generator=name, count=4, wait_s=0.0), m.LeaseGrant).leases
        report = GeneratorReport(version=step, sampled_tokens=turn)
        client.call(
            m.GeneratorHeartbeat(generator=name, progress={lease.id: 1 for lease in leases}, report=report),
            m.GeneratorStanding,
        )
        for lease in leases:
            if lease.split == "eval":
                client.call(
                    m.SubmitEvaluation(
                        generator=name,
                        lease=lease.id,
                        rewards=[1.0] * lease.num_samples,
                        num_tokens=1,
                        oldest_version=lease.due,
                        newest_version=lease.due,
                    ),
                    m.LeaseReceipt,
                )
            else:
                rows = make_rows(lease, lease.min_version)
                rows = branch_off(rows) if lease.group % 3 == 0 else rows
                (verdict,) = client.submit_groups(name, [lease.id], [len(rows)], to_batch(rows))
                done[f"groups {verdict}"] += 1
        taken = learner.take_batch(step, wait_s=0.0)
        if isinstance(taken, TakenBatch):
            # A group of an attacker may hold older tokens, which are not trained.
            oldest = max(0, step - STALENESS)
            trained = int((flatten_column(taken.table, "versions") >= oldest).sum())
            learner.call(
                m.ReportTrainedStep(
                    step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={"x": 1.0}
                ),
                m.Acknowledged,
            )
            step += 1
            learner.call(m.PublishVersion(version=step, manifest_locator=f"v{step}"), m.Acknowledged)
            if step % 5 == 0:
                learner.call(m.ReportCheckpoint(step=step, oldest=step - 5), m.Acknowledged)
        done["steps"] = step
        yield


# ---- the whole


class FuzzProcesses:
    """The servers and the process of the honest roles.

    Each writes its standard error to a file of the folder.
    """

    def __init__(self, folder: Path, keys: Path | None) -> None:
        self._folder, self._keys = folder, keys
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start_process(self, name: str, *arguments: str) -> str:
        """Starts a process and returns the first line that it prints."""
        command = [sys.executable, __file__, "--be", name, "--folder", str(self._folder), *arguments]
        command += [] if self._keys is None else ["--with-keys", str(self._keys)]
        with open(self._folder / f"{name}.log", "a") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.running[name] = process
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def stop_process(self, name: str) -> dict[str, Any]:
        """Ends a process and returns what it printed last, decoded from JSON."""
        process = self.running.pop(name)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        return dict(json.loads(out)) if out.strip() else {}

    def find_dead(self) -> list[str]:
        return [name for name, process in self.running.items() if process.poll() is not None]

    def describe_deaths(self) -> list[str]:
        """Returns the end of the log of each process that has died, in words."""
        logs = {name: (self._folder / f"{name}.log").read_text(errors="replace") for name in self.find_dead()}
        return [f"{name} died: {text[-3000:]}" for name, text in logs.items()]

    def measure_memory(self) -> dict[str, float]:
        """Returns the resident memory of each server in MiB."""
        servers = {name: process for name, process in self.running.items() if name != "honest"}
        return {
            name: psutil.Process(process.pid).memory_info().rss / (1 << 20)
            for name, process in servers.items()
        }

    def kill_all(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def fuzz_run(
    folder: Path, num_messages: int, seed: int, only: str | None, console: Console, keys: Path | None = None
) -> list[str]:
    """Attacks the servers with `num_messages` messages, and returns the problems that it found, in words.

    `only` is the one server to attack, or None for both. `keys` is the folder of the servers' keys, or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if keys is not None:
        make_all_keys(keys)
    processes, rng = FuzzProcesses(folder, keys), random.Random(seed)
    try:
        names = [only] if only else ["buffer", "weights"]
        addresses = {name: processes.start_process(name) for name in names}
        attacks: dict[str, Any] = {
            name: make_attack(name, address, rng, keys) for name, address in addresses.items()
        }
        processes.start_process(
            "honest", "--buffer", addresses.get("buffer", ""), "--weights", addresses.get("weights", "")
        )
        time.sleep(1.0)
        memory = [processes.measure_memory()]
        began, problems = time.monotonic(), []
        for number in range(num_messages):
            attack = (
                attacks["weights"]
                if "weights" in attacks and (only or number % 4 == 0)
                else attacks["buffer"]
            )
            attack.send_one()
            if number % ENDLESS_EVERY == 0:
                for one in attacks.values():
                    one.send_endless_message()
            if number % BATCH == BATCH - 1:
                for one in attacks.values():
                    one.read_answers()
                if problems := processes.describe_deaths():
                    return problems
            if len(memory) == 1 and number >= num_messages // 10:
                memory.append(processes.measure_memory())
        seconds = time.monotonic() - began
        read_until_quiet([one.attacker for one in attacks.values()])
        memory.append(processes.measure_memory())
        for one in attacks.values():
            one.attacker.close()
        print_sent_messages(console, attacks, seconds, keys)
        problems += check_memory(console, memory) + check_endless(attacks)
        if "buffer" in addresses:
            problems += check_buffer(console, processes, addresses["buffer"], keys)
        return problems + check_honest(console, processes)
    except (zmq.Again, BufferGone, RefusedByBuffer, OSError) as error:
        # A dying process closes its sockets before it ends.
        time.sleep(1.0)
        return [f"{type(error).__name__}: {error}", *processes.describe_deaths()]
    finally:
        processes.kill_all()


def read_until_quiet(attackers: list[Attacker]) -> None:
    """Reads answers until no more come, or until `PATIENCE_S` is over."""
    before, patience = -1, time.monotonic() + PATIENCE_S
    while (now := sum(one.answered.total() for one in attackers)) != before and time.monotonic() < patience:
        before = now
        time.sleep(0.5)
        for one in attackers:
            for _ in one.read_replies():
                pass


def make_attack(name: str, address: str, rng: random.Random, keys: Path | None) -> Any:
    if keys is not None:
        return attack_with_keys(name, address, rng, keys)
    if name == "buffer":
        return BufferAttack(address, rng)
    from slipstream_bench.attack_weights import WeightsAttack

    return WeightsAttack(address, rng)


def print_sent_messages(console: Console, attacks: dict[str, Any], seconds: float, keys: Path | None) -> None:
    table = Table("sent to", "kind", "messages")
    for server, attack in attacks.items():
        name = server if keys is None else f"{server} with keys"
        for kind, count in sorted(attack.attacker.sent.items(), key=lambda item: -item[1]):
            table.add_row(name, kind, f"{count:,}")
        for kind, count in attack.attacker.answered.items():
            table.add_row(name, f"({kind})", f"{count:,}")
    console.print(table)
    total = sum(attack.attacker.sent.total() for attack in attacks.values())
    console.print(f"{total:,} messages in {seconds:.0f} s, {total / seconds:,.0f} a second")


def check_endless(attacks: dict[str, Any]) -> list[str]:
    counts = {
        name: (one.attacker.sent[ENDLESS], one.attacker.answered[ENDED]) for name, one in attacks.items()
    }
    return [
        f"{name} ended {ended} of {sent} messages that do not end"
        for name, (sent, ended) in counts.items()
        if sent != ended
    ]


def check_memory(console: Console, memory: list[dict[str, float]]) -> list[str]:
    table = Table("memory, MiB", "at the start", "after a tenth", "at the end")
    problems = []
    for name in memory[0]:
        table.add_row(name, *(f"{moment[name]:.0f}" for moment in memory))
        if memory[-1][name] > memory[1][name] + MEMORY_MIB:
            problems.append(
                f"the memory of {name} grew from {memory[1][name]:.0f} to {memory[-1][name]:.0f} MiB"
            )
    console.print(table)
    return problems


def check_honest(console: Console, processes: FuzzProcesses) -> list[str]:
    """Stops the honest roles and checks that they made progress.

    Their process ends with a traceback when one of their requests has no answer.
    """
    if "honest" not in processes.running:
        return []
    process = processes.running["honest"]
    done = processes.stop_process("honest")
    console.print(f"the honest roles: {done}")
    lazy = [name for name in ("steps", "parts of weights") if name in done and done[name] < 3]
    return [f"the honest roles were stopped: {done}"] if process.returncode or not done or lazy else []


def read_status(client: BufferClient) -> RunStatus:
    return client.call(m.WatchRun(after=2**63 - 1, wait_s=0.0), m.RunNews).status


def wait_until_settled(client: BufferClient) -> RunStatus:
    """Waits until the leases of the roles that have gone have expired, and returns the status then.

    From then on nothing changes by itself.
    """
    status, since = read_status(client), time.monotonic()
    while time.monotonic() - since < 2 * LEASE_S:
        time.sleep(0.2)
        newer = read_status(client)
        if newer.groups != status.groups:
            status, since = newer, time.monotonic()
    return status


def check_buffer(console: Console, processes: FuzzProcesses, address: str, keys: Path | None) -> list[str]:
    """Checks that the ledger closes, and that a restart recovers the same ledger from the journal."""
    client = connect_client(address, keys, KeyRole.watcher)
    problems = []
    console.print("requests that the buffer refused:", read_status(client).refused_requests)
    problems += check_honest(console, processes)
    before = wait_until_settled(client)
    client.close()
    processes.stop_process("buffer")
    client = connect_client(processes.start_process("buffer"), keys, KeyRole.watcher)
    after = read_status(client)
    client.close()
    for when, status in (("before", before), ("after", after)):
        console.print(
            f"the ledger {when} a restart, at step {status.num_trained_steps}:", status.tokens, status.groups
        )
        for unit, account in (("tokens", status.tokens), ("groups", status.groups)):
            fates = (
                account.trained
                + account.masked * (unit == "tokens")
                + sum(account.rejected.values())
                + account.in_flight
            )
            if account.total != fates:
                problems.append(f"the ledger of {unit} does not close {when} a restart: {account}")
    if (before.num_trained_steps, before.tokens.trained, before.groups) != (
        after.num_trained_steps,
        after.tokens.trained,
        after.groups,
    ):
        problems.append("the state after a restart differs from the state before it")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["buffer", "weights"])
    parser.add_argument("--keys", action="store_true", help="attack only servers with keys")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder of the journal and the logs, which is kept (default: a temporary folder)",
    )
    parser.add_argument("--be", choices=["buffer", "weights", "honest"], help=argparse.SUPPRESS)
    parser.add_argument("--with-keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--buffer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--weights", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.be:
        case "buffer":
            serve_buffer(arguments.folder, arguments.with_keys)
            return 0
        case "weights":
            from slipstream_bench.attack_weights import serve_weights

            serve_weights(arguments.folder, arguments.with_keys)
            return 0
        case "honest":
            play_honest_roles(arguments.folder, arguments.buffer, arguments.weights, arguments.with_keys)
            return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="slipstream-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    console = Console()
    many, seed, only = arguments.messages, arguments.seed, arguments.only
    problems = [] if arguments.keys else fuzz_run(folder / "open", many, seed, only, console)
    few = many if arguments.keys else max(min(many, LEAST_KEYED), many // KEYED_SHARE)
    problems += fuzz_run(folder / "closed", few, seed, only, console, folder / "keys")
    for problem in problems:
        console.print(f"[red]{problem}", markup=True, highlight=False)
    if arguments.folder is None and not problems:
        shutil.rmtree(folder)
    console.print(
        f"journal and logs are in {folder}" if problems or arguments.folder else "nothing went wrong"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
