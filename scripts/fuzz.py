"""Sends whatever can be sent to the sockets of a run, beside honest traffic that must not notice, and counts what became of it.

    scripts/fuzz.sh [--messages 1000000] [--seed 0] [--only buffer|weights] [--folder DIR]

Real processes: a buffer server, a server of weights, and honest roles (two generators, a learner, a host that fetches weights).
The attacks are requests made from their own types (nesting, extremes of every integer and float, lengths, tags), real traffic with
bytes changed, cut or spliced, damaged Arrow payloads, messages wrong in their frames, and connections that speak no ZeroMQ or never
end a message. The exit status is 1 when a server died, an honest request had no answer, memory grew, the ledger does not close, or the
journal cannot be recovered.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq
from forge import Forge, damage, hand_made
from rich.console import Console
from rich.table import Table

from buffers import messages as m
from buffers.client import BufferClient, BufferGone, RefusedByBuffer, Taken
from buffers.server import BufferServer
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode, flat, to_batch
from configs.load import load
from configs.schema import Config
from sync.transports import tcp
from sync.transports.server import SnapshotServer

SAMPLES, STALENESS = 2, 2
PATIENCE_S = 30.0
"""An honest request is answered within this time, however busy the machine is."""
BATCH = 100
"""Messages between two looks at the answers."""
MEMORY_MIB = 64
"""A server may hold so much more at the end than after a tenth of the messages."""
LEARNERS_OWN = m.Publish | m.Consumed | m.Checkpointed | m.Rewind | m.Stop | m.Finish | m.Next
"""Requests that only keys can forbid: where there are none, an attack that came out as a right one is not sent."""
SNAPSHOT = "v0-fuzz"


def configure() -> Config:
    return load(
        [
            "generators.engine=simulated", "learner.engine=simulated", "eval.prompts=2", "eval.every=50", "run.steps=1000000",
            "learner.groups_per_step=4", f"learner.samples_per_prompt={SAMPLES}", f"staleness.max_versions={STALENESS}", "buffer.lease_s=3",
            "buffer.max_attempts=1000", "buffer.max_quarantined=1000000000", "buffer.watchdog_s=600", "buffer.retention=checkpoints",
            "buffer.segment_mb=4",
        ]
    )  # fmt: skip


# ---- the processes


def serve_buffer(folder: Path) -> None:
    server = BufferServer(configure(), folder / "journal")
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    print(server.address, flush=True)
    server.run()


def serve_weights(folder: Path) -> None:
    """A file by hand: the server looks at no more than names and bytes."""
    (folder / "weights").mkdir()
    for suffix in ("json", "safetensors"):
        (folder / "weights" / f"{SNAPSHOT}.{suffix}").write_bytes(random.Random(suffix).randbytes(3 << 20))
    server = SnapshotServer(folder / "weights")
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    print(server.address, flush=True)
    while not stop and server._thread.is_alive():
        time.sleep(0.1)
    if not stop:
        raise SystemExit("the thread that serves weights has died")
    server.close()
    print(json.dumps({"refused": server.refused}), flush=True)


def be_honest(folder: Path, buffer: str, weights: str) -> None:
    """All honest roles, in turns, until SIGTERM: prints what they have done."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    done, slowest = Counter[str](), 0.0
    turns = [turn for turn, address in ((run_buffer, buffer), (fetch_weights, weights)) if address]
    roles = [
        turn(folder, address, done) for turn, address in zip(turns, [a for a in (buffer, weights) if a], strict=True)
    ]
    print("ready", flush=True)
    while not stop:
        for role in roles:
            began = time.monotonic()
            next(role)
            slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.02)  # others shall have the processor too
    print(json.dumps({**done, "slowest_s": round(slowest, 2)}), flush=True)


def run_buffer(folder: Path, address: str, done: Counter[str]) -> Iterator[None]:
    """Two generators and a learner of a run: every request is answered, or this raises BufferGone."""
    client = BufferClient(address, timeout_s=PATIENCE_S)
    client.call(m.Publish(version=0, weights="v0"), m.Done)
    step = 0
    for turn in itertools.count():
        name = f"honest-{turn % 2}"
        leases = client.call(m.Ask(generator=name, count=4, wait_s=0.0), m.Work).leases
        report = m.GeneratorReport(version=step, sampled_tokens=turn)
        client.call(m.Heartbeat(generator=name, progress={lease.id: 1 for lease in leases}, report=report), m.Standing)
        for lease in leases:
            if lease.split == "eval":
                client.call(m.Evaluated(generator=name, lease=lease.id, reward=1.0), m.Receipt)
            else:
                (verdict,) = client.submit(name, [lease.id], to_batch(rows_of(lease, lease.floor)))
                done[f"groups {verdict}"] += 1
        taken = client.next(step, wait_s=0.0)
        if isinstance(taken, Taken):
            trained = int((flat(taken.table, "versions") >= max(0, step - STALENESS)).sum())  # a stranger's may be older
            client.call(m.Consumed(step=step, num_trained=trained, idle_s=0.0, alive_s=1.0, metrics={"x": 1.0}), m.Done)
            step += 1
            client.call(m.Publish(version=step, weights=f"v{step}"), m.Done)
            if step % 5 == 0:
                client.call(m.Checkpointed(step=step, oldest=step - 5), m.Done)
        done["steps"] = step
        yield


def fetch_weights(folder: Path, address: str, done: Counter[str]) -> Iterator[None]:
    """A host that fetches a file in parts, and compares each with the file."""
    asker: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    asker.connect(address)
    name = f"{SNAPSHOT}.safetensors"
    whole, size = (folder / "weights" / name).read_bytes(), 1 << 16
    for offset in itertools.cycle(range(0, len(whole), size)):
        asker.send(tcp.encode(tcp.Get(name, offset, size)))
        if not asker.poll(int(PATIENCE_S * 1000)):
            raise BufferGone(f"no answer from the server of weights in {PATIENCE_S} s")
        header, *parts = asker.recv_multipart()
        assert b"".join(parts) == whole[offset : offset + size], tcp.replies.decode(header)
        done["parts of weights"] += 1
        yield


def rows_of(lease: m.Lease, version: int, **changes: Any) -> list[Trajectory]:
    fields: dict[str, Any] = {
        "group": lease.group, "due": lease.due, "prompt_id": lease.index, "task": lease.task, "tokens": [5, 6, 7],
        "sampled": [False, True, True], "logprobs": [0.0, -0.5, -1.0], "versions": [-1, version, version], "reward": 1.0,
        "finish_reason": "stop", "generator": "g", "started_at": 1.0, "finished_at": 2.0,
    }  # fmt: skip
    return [Trajectory(sample=sample, **{**fields, **changes}) for sample in range(lease.num_samples)]


# ---- the attackers


class Attacker:
    """Sends to one server through a few connections, which it gives up and opens again, and reads the answers."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.address, self._rng = address, rng
        self._sockets = [self._connect() for _ in range(6)]
        self.sent, self.answered = Counter[str](), Counter[str]()
        self._raw: list[socket.socket] = []

    def _connect(self) -> "zmq.Socket[bytes]":
        connection: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 0)
        connection.setsockopt(zmq.SNDHWM, 200)
        connection.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        connection.connect(self.address)
        return connection

    def send(self, kind: str, frames: list[bytes]) -> None:
        self.sent[kind] += 1
        self._rng.choice(self._sockets).send_multipart(frames)

    def read(self, decode: Callable[[bytes], Any] | None = None) -> Iterator[Any]:
        for connection in self._sockets:
            while connection.poll(0):
                frames = connection.recv_multipart()
                self.answered["answers"] += 1
                if decode is not None:
                    yield decode(frames[1])
        if self._rng.random() < 0.02:
            place = self._rng.randrange(len(self._sockets))
            self._sockets[place].close()
            self._sockets[place] = self._connect()

    def speak_no_zeromq(self) -> None:
        """A TCP connection with a broken greeting, or a right one and garbage after it; some stay open for a while."""
        self.sent["bytes that are no ZeroMQ"] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        data = self._rng.choice(
            [
                self._rng.randbytes(self._rng.randrange(1, 300)), greeting[: self._rng.randrange(64)], greeting,
                greeting + self._rng.randbytes(100), damage(greeting, self._rng, [greeting]),
                greeting + ready() + damage(ready(), self._rng, [greeting]), b"GET / HTTP/1.1\r\n\r\n",
                greeting + ready() + b"\x02" + b"\x7f" + b"\xff" * 7,
            ]
        )  # fmt: skip
        self._raw.append(self._open(data))
        while len(self._raw) > 50:
            self._raw.pop(0).close()

    def never_end_a_message(self, num_bytes: int) -> None:
        """Frames of one message, each of which says that more follow, until enough is sent or the server has had enough."""
        self.sent["messages that do not end"] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        connection = self._open(greeting + ready())
        size = self._rng.choice([200, 4000, 65_536])
        header = b"\x01" + bytes([size]) if size < 256 else b"\x03" + size.to_bytes(8, "big")
        frame = (header + bytes(size)) * max(1, 65_536 // size)
        try:
            connection.settimeout(PATIENCE_S)
            for _ in range(num_bytes // len(frame) + 1):
                connection.sendall(frame)
        except OSError:
            self.answered["connections ended by the server"] += 1
        connection.close()

    def _open(self, data: bytes) -> socket.socket:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        try:
            connection.sendall(data)
        except OSError:
            self.answered["connections ended by the server"] += 1
        return connection

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        for raw in self._raw:
            raw.close()


def ready() -> bytes:
    properties = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    return b"\x04" + bytes([len(properties)]) + properties


class BufferAttack:
    """Everything that is sent to the buffer."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.attacker, self._rng = Attacker(address, rng), rng
        self._forge = Forge(m.Request, rng, ["x", "stranger", "y" * 200])
        self._frames, self._numbers = hand_made(rng), itertools.count()
        self._leases: list[m.Lease] = [
            m.Lease(id=1, split="train", task="t", index=0, seed=0, group=0, due=0, floor=0, num_samples=2)
        ]
        self._payloads = [encode(to_batch(rows_of(self._leases[0], 0) * n)).to_pybytes() for n in (1, 3)]
        self._corpus = [self._forge.right() for _ in range(300)]

    def strike(self) -> None:
        """One message."""
        rng, number = self._rng, next(self._numbers).to_bytes(8, "little")
        match rng.choices(
            ("forged", "damaged", "arrow", "leases", "frames", "bytes", "endless"), (45, 25, 18, 4, 7, 0.4, 0.001)
        )[0]:
            case "forged":
                kind, body = self._forge.wrong()
                self._send(kind, number, body)
            case "damaged":
                self._send("real traffic, damaged", number, damage(rng.choice(self._corpus), rng, self._corpus))
            case "arrow":
                self._hand_in(number)
            case "leases":
                body = m.encoder.encode(
                    m.Ask(generator="stranger", count=rng.randrange(3), wait_s=rng.choice([0.0, 0.05]))
                )
                self.attacker.send("leases asked for", [number, body])
            case "frames":
                self.attacker.send("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.speak_no_zeromq()
            case "endless":
                self.attacker.never_end_a_message(400 << 20)

    def listen(self) -> None:
        for reply in self.attacker.read(m.reply_decoder.decode):
            if isinstance(reply, m.Work):
                self._leases = (self._leases + reply.leases)[-50:]

    def _send(self, kind: str, number: bytes, body: bytes) -> None:
        try:
            request = m.decode_request(body)
        except m.Undecodable:
            request = None
        if isinstance(request, LEARNERS_OWN) or (isinstance(request, m.Ask) and request.count > 3):
            return self.strike()  # it came out right, and would take the run from those whose it is
        self.attacker.send(kind, [number, body])

    def _hand_in(self, number: bytes) -> None:
        rng, lease = self._rng, self._rng.choice(self._leases)
        request = m.Submit(generator="stranger", leases=[lease.id], schema=rng.choice([SCHEMA_VERSION] * 9 + [0]))
        if rng.random() < 0.3:
            wrong: dict[str, Any] = rng.choice(
                [{"reward": float("nan")}, {"reward": 3e38}, {"logprobs": [0.0, 1e30, -1e38]}, {"versions": [-1, 2**31 - 1, 0]},
                 {"tokens": [], "sampled": [], "logprobs": [], "versions": []}, {"rewards": {"x" * 1000: float("inf")}},
                 {"started_at": float("nan"), "finished_at": 1e308}, {"extra": "x" * 10_000}, {"prompt_id": -1}, {"group": 2**62}]
            )  # fmt: skip
            payload = encode(to_batch(rows_of(lease, 0, **wrong))).to_pybytes()
        else:
            payload = damage(rng.choice(self._payloads), rng, self._payloads)
        self.attacker.send("Arrow payloads, damaged", [number, m.encoder.encode(request), payload])


class WeightsAttack:
    """Everything that is sent to a server of weights."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self.attacker, self._rng = Attacker(address, rng), rng
        names = [f"{SNAPSHOT}.json", f"{SNAPSHOT}.safetensors", "v7-gone.json", "../journal/log", "x"]
        self._forge = Forge(tcp.Request, rng, names)
        self._frames = hand_made(rng)
        self._corpus = [self._forge.right() for _ in range(300)]

    def strike(self) -> None:
        rng = self._rng
        match rng.choices(("forged", "damaged", "frames", "bytes", "endless"), (60, 30, 9, 0.4, 0.01))[0]:
            case "forged":
                kind, body = self._forge.wrong()
                self.attacker.send(kind, [body])
            case "damaged":
                self.attacker.send("real traffic, damaged", [damage(rng.choice(self._corpus), rng, self._corpus)])
            case "frames":
                self.attacker.send("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.speak_no_zeromq()
            case "endless":
                self.attacker.never_end_a_message(4 << 20)

    def listen(self) -> None:
        for _ in self.attacker.read():
            pass


# ---- the whole


class Processes:
    """The servers and the honest, each with its standard error in a file of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str) -> str:
        """Returns the first line that it prints."""
        command = [sys.executable, __file__, "--be", name, "--folder", str(self._folder), *arguments]
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

    def memory(self) -> dict[str, float]:
        """MiB of each server."""
        servers = {name: process for name, process in self.running.items() if name != "honest"}
        return {name: psutil.Process(process.pid).memory_info().rss / (1 << 20) for name, process in servers.items()}

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def fuzz(folder: Path, num_messages: int, seed: int, only: str | None, console: Console) -> list[str]:
    """Returns what has gone wrong, in words."""
    processes, rng = Processes(folder), random.Random(seed)
    try:
        names = [only] if only else ["buffer", "weights"]
        addresses = {name: processes.start(name) for name in names}
        kinds: dict[str, Any] = {"buffer": BufferAttack, "weights": WeightsAttack}
        attacks = {name: kinds[name](address, rng) for name, address in addresses.items()}
        processes.start("honest", "--buffer", addresses.get("buffer", ""), "--weights", addresses.get("weights", ""))
        time.sleep(1.0)
        memory = [processes.memory()]
        began, problems = time.monotonic(), []
        for number in range(num_messages):
            attack = attacks["weights"] if "weights" in attacks and (only or number % 4 == 0) else attacks["buffer"]
            attack.strike()
            if number % BATCH == BATCH - 1:
                for one in attacks.values():
                    one.listen()
                if died := processes.died():
                    problems += [f"{name} has died: {(folder / f'{name}.log').read_text()[-3000:]}" for name in died]
                    break
            if len(memory) == 1 and number >= num_messages // 10:
                memory.append(processes.memory())
        if problems:
            return problems
        memory.append(processes.memory())
        seconds = time.monotonic() - began
        for one in attacks.values():
            one.attacker.close()
        show_sent(console, attacks, seconds)
        problems += judge_memory(console, memory)
        if "buffer" in addresses:
            problems += judge_buffer(console, processes, addresses["buffer"], folder)
        return problems + judge_honest(console, processes)
    except (zmq.Again, BufferGone, RefusedByBuffer, OSError) as error:
        logs = [f"{name} has died: {(folder / f'{name}.log').read_text()[-3000:]}" for name in processes.died()]
        return [f"{type(error).__name__}: {error}", *logs]
    finally:
        processes.kill()


def show_sent(console: Console, attacks: dict[str, Any], seconds: float) -> None:
    table = Table("sent to", "kind", "messages")
    for name, attack in attacks.items():
        for kind, count in sorted(attack.attacker.sent.items(), key=lambda item: -item[1]):
            table.add_row(name, kind, f"{count:,}")
        for kind, count in attack.attacker.answered.items():
            table.add_row(name, f"({kind})", f"{count:,}")
    console.print(table)
    total = sum(attack.attacker.sent.total() for attack in attacks.values())
    console.print(f"{total:,} messages in {seconds:.0f} s, {total / seconds:,.0f} a second")


def judge_memory(console: Console, memory: list[dict[str, float]]) -> list[str]:
    table = Table("memory, MiB", "at the start", "after a tenth", "at the end")
    problems = []
    for name in memory[0]:
        table.add_row(name, *(f"{moment[name]:.0f}" for moment in memory))
        if memory[-1][name] > memory[1][name] + MEMORY_MIB:
            problems.append(f"the memory of {name} grew from {memory[1][name]:.0f} to {memory[-1][name]:.0f} MiB")
    console.print(table)
    return problems


def judge_honest(console: Console, processes: Processes) -> list[str]:
    """What the honest have done beside it; their process ends with a traceback when a request has no answer."""
    if "honest" not in processes.running:
        return []
    process = processes.running["honest"]
    done = processes.stop("honest")
    console.print(f"the honest: {done}")
    lazy = [name for name in ("steps", "parts of weights") if name in done and done[name] < 3]
    return [f"the honest were stopped: {done}"] if process.returncode or not done or lazy else []


def judge_buffer(console: Console, processes: Processes, address: str, folder: Path) -> list[str]:
    """The ledger closes, and the journal is recovered to the same."""
    client = BufferClient(address, timeout_s=PATIENCE_S)
    problems = []
    console.print("refused by the buffer:", client.call(m.Watch(after=2**63 - 1, wait_s=0.0), m.News).status.refused)
    problems += judge_honest(console, processes)
    before = client.call(m.Watch(after=2**63 - 1, wait_s=0.0), m.News).status
    client.close()
    processes.stop("buffer")
    client = BufferClient(processes.start("buffer"), timeout_s=PATIENCE_S)
    after = client.call(m.Watch(after=2**63 - 1, wait_s=0.0), m.News).status
    client.close()
    for when, status in (("before", before), ("after", after)):
        console.print(f"the ledger {when} a restart, at step {status.step}:", status.tokens, status.groups)
        for unit, account in (("tokens", status.tokens), ("groups", status.groups)):
            fates = (
                account.trained
                + account.masked * (unit == "tokens")
                + sum(account.rejected.values())
                + account.in_flight
            )
            if account.total != fates:
                problems.append(f"the ledger of {unit} does not close {when} a restart: {account}")
    if (before.step, before.tokens.trained, before.groups) != (after.step, after.tokens.trained, after.groups):
        problems.append("the journal is not recovered to the state that was left")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["buffer", "weights"])
    parser.add_argument("--folder", type=Path, help="where journal and logs are kept; a temporary folder if not given")
    parser.add_argument("--be", choices=["buffer", "weights", "honest"], help=argparse.SUPPRESS)
    parser.add_argument("--buffer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--weights", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.be:
        case "buffer":
            serve_buffer(arguments.folder)
            return 0
        case "weights":
            serve_weights(arguments.folder)
            return 0
        case "honest":
            be_honest(arguments.folder, arguments.buffer, arguments.weights)
            return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="slipstream-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    console = Console()
    problems = fuzz(folder, arguments.messages, arguments.seed, arguments.only, console)
    for problem in problems:
        console.print(f"[red]{problem}", markup=True, highlight=False)
    if arguments.folder is None and not problems:
        shutil.rmtree(folder)
    console.print(f"what is left is in {folder}" if problems or arguments.folder else "all as it should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
