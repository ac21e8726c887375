"""Tasks that misbehave. Workers import them from here; a test calls one method of each."""

import ctypes
import fcntl
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from generators.environment import EpisodeRecord, Turn
from generators.task import Prompt, Score


class Misbehaving:
    """Its responses say what to do: `spin`, `segfault` … Anything else scores by its length."""

    name = "misbehaving"

    def __init__(self, start: str = "") -> None:
        if start:
            getattr(self, start)()

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(f"{split} {index} {seed}", entry=object())

    def score_response(self, prompt: Prompt, response: str) -> Any:
        name, _, argument = response.partition(" ")
        method = getattr(self, f"do_{name}", None)
        return method(argument) if method else Score(float(len(response)), {"pid": os.getpid()})

    def do_spin(self, _: str) -> Any:
        while True:
            pass

    def do_swallow(self, _: str) -> Any:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                pass

    def do_hold_interpreter(self, _: str) -> Any:
        ctypes.PyDLL(None).pause()  # holds the lock of the interpreter, so no other thread of it runs

    def do_segfault(self, _: str) -> Any:
        ctypes.string_at(0)

    def do_hang_up(self, _: str) -> Any:
        os.closerange(3, 1000)
        time.sleep(3600)

    def do_exit(self, code: str) -> Any:
        os._exit(int(code))

    def do_leave(self, code: str) -> Any:
        sys.exit(int(code))

    def do_grow(self, _: str) -> Any:
        held = []
        while True:
            held.append(bytearray(64 << 20))

    def do_raise(self, _: str) -> Any:
        raise TextlessError

    def do_raise_plainly(self, text: str) -> Any:
        print("said before it failed")
        raise KeyError(text)

    def do_nan(self, _: str) -> Any:
        return Score(float("nan"))

    def do_print(self, num_bytes: str) -> Any:
        for _ in range(int(num_bytes) >> 16):
            os.write(1, b"x" * (1 << 16))
        return Score(1.0)

    def do_return_huge(self, num_bytes: str) -> Any:
        return Score(1.0, {"x" * int(num_bytes): 1.0})

    def do_return_strange(self, _: str) -> Any:
        return Score(1.0, {"strange": object()})

    def do_return_nothing(self, _: str) -> Any:
        return None

    def do_close_descriptors(self, _: str) -> Any:
        os.closerange(3, 1000)
        return Score(1.0)

    def do_write_garbage(self, text: str) -> Any:
        for descriptor in find_sockets():
            os.write(descriptor, bytes.fromhex(text))
        return Score(1.0)

    def do_return_twice(self, _: str) -> Any:
        os.fork()
        return Score(1.0)

    def do_fork_and_exit(self, _: str) -> Any:
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(7)

    def do_start_children(self, _: str) -> Any:
        """Starts a plain child, one with a session of its own, and a daemon; then spins."""
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        start_daemon()
        self.do_spin("")

    def do_leave_children(self, _: str) -> Any:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        start_daemon()
        return Score(1.0)

    def do_hop(self, _: str) -> Any:
        """Leaves a process that goes on in a child of its own again and again, each in another session."""
        if os.fork() == 0:
            while True:
                os.setsid()
                time.sleep(0.002)
                if os.fork():
                    os._exit(0)
        return Score(1.0)

    def do_bomb(self, places: str) -> Any:
        """Leaves processes in sessions of their own, so many at a time: each starts others wherever one has
        been killed, as fast as it can."""
        start_bomb(int(places))
        return Score(1.0)

    def do_forget_child(self, _: str) -> Any:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        return Score(1.0, {"pid": os.getpid()})

    def do_read(self, _: str) -> Any:
        return Score(float(len(sys.stdin.read())))

    def import_numpy(self) -> None:
        self.numpy = importlib.import_module("numpy")

    def do_draw(self, _: str) -> Any:
        return Score(random.random(), {"numpy": self.numpy.random.random()})

    def do_signal_parent(self, number: str) -> Any:
        os.kill(os.getppid(), int(number))
        return Score(float(signal.getsignal(int(number)) == signal.SIG_DFL))

    def do_sleep(self, seconds: str) -> Any:
        time.sleep(float(seconds))
        return Score(1.0)


class Unbounded(Misbehaving):
    max_scores = 0


class TextlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def find_sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def start_daemon() -> None:
    """Starts a process that has lost its parent, its session and its standard streams."""
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 1000)
            time.sleep(3600)
        os._exit(0)
    os.waitpid(pid, 0)


def start_bomb(places: int) -> None:
    # The kernel frees the place of a process when it is killed.
    file = os.memfd_create("places")
    if os.fork():
        return
    has_place, end = False, time.monotonic() + 20  # so that no mistake can fill the machine
    while time.monotonic() < end:
        if not has_place:
            for place in range(places):
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                    has_place = True
                    break
                except OSError:
                    continue
            if not has_place:
                os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        if os.fork() == 0:
            os.setsid()
            has_place = False
    os._exit(0)


class Counting:
    """An environment of the first kind: it counts replies."""

    def __init__(self, limit: int = 3) -> None:
        if limit < 1:
            raise ValueError("limit must be positive")
        self.limit, self.count = limit, 0
        self.was_reset = False

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        self.was_reset = True
        return Turn(messages=[{"role": "user", "content": f"{row['index']} {seed}"}])

    async def step(self, reply: dict[str, Any]) -> Turn:
        self.count += 1
        done = self.count == self.limit
        messages = [] if done else [{"role": "user", "content": f"{reply['content']} {self.count}"}]
        return Turn(messages=messages, reward=float(self.count), done=done)

    def close(self) -> None:
        assert self.was_reset, "what the protocol does not promise"


class OwnRows(Counting):
    """An environment that makes rows by itself, of which there is none before an episode."""

    def make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        return {}


class VagueEnd(Counting):
    """It says in a way of its own whether it is done."""

    end: Any = "no"

    async def step(self, reply: dict[str, Any]) -> Turn:
        return Turn(messages=[{"role": "user", "content": "x"}], done=self.end)


class Duel:
    """An environment task whose groups are scored together."""

    name = "duel"
    num_prompts = 7

    def make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        return {"index": index, "number": index * 10}

    async def make_environment(self, row: dict[str, Any]) -> Counting:
        return Counting(limit=row["number"])

    def score_group(self, episodes: list[EpisodeRecord]) -> list[Score] | None:
        if len(episodes) == 3:
            return None
        best = max(episode.reward for episode in episodes)
        return [Score(float(episode.reward == best) * episode.row["number"]) for episode in episodes]


class CommandAgent:
    """An agent in another program."""

    agent_command = ["sh", "-c", 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY $SLIPSTREAM_ROW"']

    def make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        return {"index": index}

    def score_agent(self, row: dict[str, Any], outcome: Any) -> Score:
        return Score(float(row["index"]), {"output": float(len(outcome))})


class CoroutineAgent:
    """An agent in a coroutine, which returns its reward."""

    def make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        return {"index": index}

    async def run_agent(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        if not row["index"]:
            return 0.5
        reward = importlib.import_module("numpy").float32(row["index"])
        return {"reward": reward, "length": len(base_url + api_key)}


class Incomplete:
    def make_row(self, split: str, index: int, seed: int) -> dict[str, Any]:
        return {}
