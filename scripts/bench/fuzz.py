"""Sends whatever can be sent to the sockets of a run, beside honest traffic that must not notice, and counts
what became of it.

    scripts/fuzz.sh [--messages 1000000] [--seed 0] [--only buffer|weights] [--keys] [--folder DIR]

Real processes: a buffer server, a server of weights, and honest roles (two generators, a learner, a host that
fetches weights). The attacks are requests made from their own types (nesting, extremes of every integer and
float, lengths, tags), real traffic with bytes changed, cut or spliced, damaged Arrow payloads, messages wrong
in their frames, and connections that speak no ZeroMQ or never end a message. A hundredth as many messages
follow to servers with keys (`--keys`: all of them, and nothing before): from strangers without a key or with
a wrong one, from the owner of a generator's key who says what a learner or an operator may, over handshakes
that are damaged on their way, while keys come and go and files that hold none lie beside them. The exit
status is 1 when a server died, an honest request had no answer, memory grew, the ledger does not close, or
the journal cannot be recovered.
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
from slipstream_bench.attacks import ENDED, ENDLESS, PATIENCE_S, Attacker, BufferAttack, rows_of

SAMPLES, STALENESS = 2, 2
BATCH = 100
"""Messages between two looks at the answers."""
ENDLESS_EVERY = 250_000
"""Messages between two that do not end.

The first comes at once: what a server has needed for one, it keeps for the next.
"""
MEMORY_MIB = 64
"""A server may hold so much more at the end than after a tenth of the messages."""
LEASE_S = 3
"""`buffer.lease_s` of the runs that are attacked."""
KEYED_SHARE, LEAST_KEYED = 100, 600
"""One in so many messages, again, goes to servers with keys: a handshake takes as long as a hundred messages.

At least so many do.
"""


def configure(keys: Path | None) -> Config:
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
    server = BufferServer(configure(keys), folder / "journal")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(server.address, flush=True)
    server.run()


def be_honest(folder: Path, buffer: str, weights: str, keys: Path | None) -> None:
    """All honest roles, in turns, until SIGTERM: prints what they have done."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    done, slowest = Counter[str](), 0.0
    roles = [run_buffer(buffer, keys, done)] if buffer else []
    if weights:
        from slipstream_bench.attack_weights import (
            fetch_weights,
        )  # here: it needs torch, which takes seconds and memory

        roles.append(fetch_weights(folder, weights, keys, done))
    print("ready", flush=True)
    while not stop:
        for role in roles:
            began = time.monotonic()
            next(role)
            slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.02)  # others shall have the processor too
    print(json.dumps({**done, "slowest_s": round(slowest, 2)}), flush=True)


def connect(address: str, keys: Path | None, role: KeyRole) -> BufferClient:
    return BufferClient(address, timeout_s=PATIENCE_S, keys=None if keys is None else str(keys), role=role)


def run_buffer(address: str, keys: Path | None, done: Counter[str]) -> Iterator[None]:
    """Two generators and a learner of a run: every request is answered, or this raises BufferGone."""
    client, learner = connect(address, keys, KeyRole.generator), connect(address, keys, KeyRole.learner)
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
                client.call(m.SubmitEvaluation(generator=name, lease=lease.id, reward=1.0), m.LeaseReceipt)
            else:
                (verdict,) = client.submit_groups(
                    name, [lease.id], to_batch(rows_of(lease, lease.min_version))
                )
                done[f"groups {verdict}"] += 1
        taken = learner.take_batch(step, wait_s=0.0)
        if isinstance(taken, TakenBatch):
            trained = int(
                (flatten_column(taken.table, "versions") >= max(0, step - STALENESS)).sum()
            )  # a stranger's may be older
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


class Processes:
    """The servers and the honest, each with its standard error in a file of the folder."""

    def __init__(self, folder: Path, keys: Path | None) -> None:
        self._folder, self._keys = folder, keys
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str) -> str:
        """Returns the first line that it prints."""
        command = [sys.executable, __file__, "--be", name, "--folder", str(self._folder), *arguments]
        command += [] if self._keys is None else ["--with-keys", str(self._keys)]
        with open(self._folder / f"{name}.log", "a") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.running[name] = process
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def stop(self, name: str) -> dict[str, Any]:
        """What it prints at its end."""
        process = self.running.pop(name)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        return dict(json.loads(out)) if out.strip() else {}

    def died(self) -> list[str]:
        return [name for name, process in self.running.items() if process.poll() is not None]

    def obituaries(self) -> list[str]:
        """How each that has died has ended."""
        logs = {name: (self._folder / f"{name}.log").read_text(errors="replace") for name in self.died()}
        return [f"{name} has died: {text[-3000:]}" for name, text in logs.items()]

    def memory(self) -> dict[str, float]:
        """MiB of each server."""
        servers = {name: process for name, process in self.running.items() if name != "honest"}
        return {
            name: psutil.Process(process.pid).memory_info().rss / (1 << 20)
            for name, process in servers.items()
        }

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def fuzz(
    folder: Path, num_messages: int, seed: int, only: str | None, console: Console, keys: Path | None = None
) -> list[str]:
    """Returns what has gone wrong, in words. `keys`: the servers have these."""
    folder.mkdir(parents=True, exist_ok=True)
    if keys is not None:
        make_all_keys(keys)
    processes, rng = Processes(folder, keys), random.Random(seed)
    try:
        names = [only] if only else ["buffer", "weights"]
        addresses = {name: processes.start(name) for name in names}
        attacks: dict[str, Any] = {
            name: make_attack(name, address, rng, keys) for name, address in addresses.items()
        }
        processes.start(
            "honest", "--buffer", addresses.get("buffer", ""), "--weights", addresses.get("weights", "")
        )
        time.sleep(1.0)
        memory = [processes.memory()]
        began, problems = time.monotonic(), []
        for number in range(num_messages):
            attack = (
                attacks["weights"]
                if "weights" in attacks and (only or number % 4 == 0)
                else attacks["buffer"]
            )
            attack.strike()
            if number % ENDLESS_EVERY == 0:
                for one in attacks.values():
                    one.never_end_a_message()
            if number % BATCH == BATCH - 1:
                for one in attacks.values():
                    one.listen()
                if problems := processes.obituaries():
                    return problems
            if len(memory) == 1 and number >= num_messages // 10:
                memory.append(processes.memory())
        seconds = time.monotonic() - began
        settle([one.attacker for one in attacks.values()])
        memory.append(processes.memory())
        for one in attacks.values():
            one.attacker.close()
        show_sent(console, attacks, seconds, keys)
        problems += judge_memory(console, memory) + judge_endless(attacks)
        if "buffer" in addresses:
            problems += judge_buffer(console, processes, addresses["buffer"], keys)
        return problems + judge_honest(console, processes)
    except (zmq.Again, BufferGone, RefusedByBuffer, OSError) as error:
        time.sleep(1.0)  # whoever dies lets go of its sockets first
        return [f"{type(error).__name__}: {error}", *processes.obituaries()]
    finally:
        processes.kill()


def settle(attackers: list[Attacker]) -> None:
    """Reads until nothing more is answered."""
    before, patience = -1, time.monotonic() + PATIENCE_S
    while (now := sum(one.answered.total() for one in attackers)) != before and time.monotonic() < patience:
        before = now
        time.sleep(0.5)
        for one in attackers:
            for _ in one.read():
                pass


def make_attack(name: str, address: str, rng: random.Random, keys: Path | None) -> Any:
    if keys is not None:
        return attack_with_keys(name, address, rng, keys)
    if name == "buffer":
        return BufferAttack(address, rng)
    from slipstream_bench.attack_weights import WeightsAttack

    return WeightsAttack(address, rng)


def show_sent(console: Console, attacks: dict[str, Any], seconds: float, keys: Path | None) -> None:
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


def judge_endless(attacks: dict[str, Any]) -> list[str]:
    counts = {
        name: (one.attacker.sent[ENDLESS], one.attacker.answered[ENDED]) for name, one in attacks.items()
    }
    return [
        f"{name} has ended {ended} of {sent} messages that do not end"
        for name, (sent, ended) in counts.items()
        if sent != ended
    ]


def judge_memory(console: Console, memory: list[dict[str, float]]) -> list[str]:
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


def judge_honest(console: Console, processes: Processes) -> list[str]:
    """What the honest have done beside it; their process ends with a traceback when a request has no
    answer."""
    if "honest" not in processes.running:
        return []
    process = processes.running["honest"]
    done = processes.stop("honest")
    console.print(f"the honest: {done}")
    lazy = [name for name in ("steps", "parts of weights") if name in done and done[name] < 3]
    return [f"the honest were stopped: {done}"] if process.returncode or not done or lazy else []


def status_of(client: BufferClient) -> RunStatus:
    return client.call(m.WatchRun(after=2**63 - 1, wait_s=0.0), m.RunNews).status


def wait_until_settled(client: BufferClient) -> RunStatus:
    """Returns the status once the leases of those who have gone have expired: nothing changes by itself
    any more."""
    status, since = status_of(client), time.monotonic()
    while time.monotonic() - since < 2 * LEASE_S:
        time.sleep(0.2)
        newer = status_of(client)
        if newer.groups != status.groups:
            status, since = newer, time.monotonic()
    return status


def judge_buffer(console: Console, processes: Processes, address: str, keys: Path | None) -> list[str]:
    """The ledger closes, and the journal is recovered to the same."""
    client = connect(address, keys, KeyRole.watcher)
    problems = []
    console.print("refused by the buffer:", status_of(client).refused_requests)
    problems += judge_honest(console, processes)
    before = wait_until_settled(client)
    client.close()
    processes.stop("buffer")
    client = connect(processes.start("buffer"), keys, KeyRole.watcher)
    after = status_of(client)
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
        problems.append("the journal is not recovered to the state that was left")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["buffer", "weights"])
    parser.add_argument("--keys", action="store_true", help="servers with keys alone")
    parser.add_argument(
        "--folder", type=Path, help="where journal and logs are kept; a temporary folder if not given"
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
            be_honest(arguments.folder, arguments.buffer, arguments.weights, arguments.with_keys)
            return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="slipstream-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    console = Console()
    many, seed, only = arguments.messages, arguments.seed, arguments.only
    problems = [] if arguments.keys else fuzz(folder / "open", many, seed, only, console)
    few = many if arguments.keys else max(min(many, LEAST_KEYED), many // KEYED_SHARE)
    problems += fuzz(folder / "closed", few, seed, only, console, folder / "keys")
    for problem in problems:
        console.print(f"[red]{problem}", markup=True, highlight=False)
    if arguments.folder is None and not problems:
        shutil.rmtree(folder)
    console.print(f"what is left is in {folder}" if problems or arguments.folder else "all as it should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
