"""User code that hangs, crashes or floods costs one call and one worker, and leaves no process behind."""

import asyncio
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import is_alive
from worker_pools import run_with_pool

from generators.user_code import process_tree
from generators.user_code.errors import CallFailed, TaskRefused, UserCodeError, WorkerDied
from generators.user_code.pool import UserCodePool, WorkerLimits
from generators.user_code.process_control import find_children, list_children
from generators.user_code.process_orders import Notice, WorkerStarted
from generators.user_code.user_worker import UserWorker
from generators.user_code.worker_limits import raise_descriptor_limit

ROOT = Path(__file__).parents[1]
LONG_S = 120.0
"""A deadline that no test reaches."""


async def score(worker: UserWorker, response: str, deadline_s: float = LONG_S) -> Any:
    return await worker.call("score_response", ["train", 0, 0, response], deadline_s, "a.setting")


def list_descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 60
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


async def wait_for_descendants(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := list_descendants(pid)) < count:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize("attack", ["spin", "swallow", "hold_interpreter"])
def test_a_call_past_its_deadline_is_killed_and_the_error_names_the_setting(attack: str) -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        process = psutil.Process(worker.pid)
        with pytest.raises(WorkerDied) as died:
            await score(worker, attack, 0.3)
        assert str(died.value) == (
            "score_response must take at most 0.3 s (a.setting), got no end; its worker was killed"
        )
        assert not process.is_running() and not worker.is_alive
        pool.return_worker(worker)
        assert pool.num_workers == 0 and (pool.counts.kills, pool.counts.deaths) == (1, 0)
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


@pytest.mark.parametrize(
    ("attack", "error", "detail"),
    [
        ("segfault", "its worker was killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("grow", "must allocate at most 600 MB (episodes.worker_memory_mb), got MemoryError", "do_grow"),
        ("exit 3", "its worker exited with code 3", ""),
        ("exit 0", "its worker exited with code 0", ""),
        ("fork_and_exit", "its worker exited with code 7", ""),
        ("close_descriptors", "its worker exited with code 1", "Bad file descriptor"),
        ("write_garbage ffffffff", "broke its worker's socket: a frame must be at most 16777216 bytes", ""),
        ("write_garbage 00000002aabb", "broke its worker's socket: a worker's answer must be a frame", ""),
        (f"print {1 << 30}", "must print at most 16 MB (episodes.worker_output_mb), got more", "xxxx"),
    ],
)
def test_a_worker_that_dies_says_how_and_another_takes_its_place(
    attack: str, error: str, detail: str
) -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        with pytest.raises(WorkerDied) as died:
            await score(worker, attack)
        assert error in str(died.value) and detail in died.value.detail
        pool.return_worker(worker)
        with pytest.raises(WorkerDied, match="could not be called, because its worker has ended"):
            await score(worker, "four")
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0
        assert pool.counts.kills + pool.counts.deaths == 1

    run_with_pool(play, memory_mb=600)


def test_a_call_that_is_cancelled_while_its_worker_dies_gives_the_worker_to_nobody_else() -> None:
    """The other samples of a group are cancelled when one fails, and they may fail at the same moment."""

    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        call = asyncio.create_task(score(worker, "hang_up"))
        while not worker._reader.at_eof():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.005)  # the call has seen the end, and asks how it came
        call.cancel()
        await asyncio.wait({call})
        pool.return_worker(worker)
        assert call.cancelled() and not worker.is_alive
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


@pytest.mark.parametrize(
    ("attack", "error", "detail"),
    [
        ("leave 3", "SystemExit: 3", "do_leave"),
        ("raise", "TextlessError (its text cannot be shown)", "do_raise"),
        ("raise_plainly here", "KeyError: 'here'", "said before it failed"),
        ("nan", "reward must be finite, got nan", ""),
        ("return_nothing", "score_response must return a generators.task.Score, got None", ""),
        ("return_strange", "components['strange'] must be a number, got <object", ""),
        (f"return_huge {900 << 20}", "names of components must be text of at most 200 characters", ""),
    ],
)
def test_a_call_that_fails_leaves_its_worker_alive(attack: str, error: str, detail: str) -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        with pytest.raises(CallFailed) as failed:
            await score(worker, attack)
        assert str(failed.value).startswith("score_response failed: ") and error in str(failed.value)
        assert detail in failed.value.detail
        assert (await score(worker, "four"))["components"]["pid"] == worker.pid
        assert pool.counts.forks == 1 and not pool.counts.kills and not pool.counts.deaths

    run_with_pool(play)


def test_a_call_that_forks_and_returns_twice_answers_once() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        for _ in range(3):
            assert (await score(worker, "return_twice"))["reward"] == 1.0
            assert (await score(worker, "four"))["reward"] == 4.0

    run_with_pool(play)


def test_a_deadline_kills_plain_children_children_with_sessions_and_daemons() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        assert worker.pid is not None
        call = asyncio.create_task(score(worker, "start_children", 20.0))
        descendants = await wait_for_descendants(worker.pid, 3)
        await asyncio.sleep(0.2)
        descendants = list_descendants(worker.pid)
        assert len(descendants) == 3, "the daemon is below the worker still"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await worker.kill()
        assert not [process for process in descendants if is_alive(process)]

    run_with_pool(play)


def test_children_live_on_between_calls_and_die_with_their_worker() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        assert worker.pid is not None
        await score(worker, "leave_children")
        descendants = list_descendants(worker.pid)
        assert len(descendants) == 2
        await score(worker, "four")
        assert all(is_alive(process) for process in descendants)
        with pytest.raises(WorkerDied, match="exited with code 5"):
            await score(worker, "exit 5")
        assert not [process for process in descendants if is_alive(process)]

    run_with_pool(play)


PARENT = """
import asyncio, os, sys
from generators.user_code.pool import UserCodePool, WorkerLimits

async def call_for_ever():
    pool = await UserCodePool.open("misbehaving:Misbehaving", {}, WorkerLimits())
    workers = [await pool.take_worker() for _ in range(3)]
    async def call(worker, response):
        await worker.call("score_response", ["train", 0, 0, response], 600, "s")
    calls = [call(worker, response) for worker, response in zip(workers, sys.argv[1:])]
    if os.environ.get("FORK") and os.fork() == 0:   # holds a copy of the socket to the guard
        __import__("time").sleep(600)
    print(*[worker.pid for worker in workers], flush=True)
    await asyncio.gather(*calls)

asyncio.run(call_for_ever())
"""


@pytest.mark.parametrize("fork", ["", "plain"])
def test_no_process_outlives_a_generator_that_is_killed(fork: str) -> None:
    environment = {**os.environ, "FORK": fork, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = ["start_children", "swallow", "start_children"]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, env=environment, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 3
        guard = workers[0].parent()
        assert guard is not None
        deadline = time.monotonic() + 60
        # The template, three workers, and three children of two of them.
        while len(found := guard.children(recursive=True)) != 10:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        held = list_descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
        wait_until_gone([guard, *found])
        for process in held:
            process.kill()


def test_workers_end_when_the_guard_is_killed_and_the_pool_starts_another() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = psutil.Process(worker.pid).parent()
        assert guard is not None
        found = guard.children(recursive=True)
        call = asyncio.create_task(score(worker, "spin"))
        await asyncio.sleep(0.05)
        guard.kill()
        with pytest.raises(WorkerDied):
            await call
        wait_until_gone([guard, *found])
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0
        assert pool.counts.template_starts == 2

    run_with_pool(play)


def test_a_template_that_dies_is_started_again_and_fails_nobody() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = psutil.Process(worker.pid).parent()
        assert guard is not None
        (template,) = [process for process in guard.children() if process.pid != worker.pid]
        template.kill()  # and those who take a worker at this moment do not notice
        others = await asyncio.gather(*(pool.take_worker() for _ in range(3)))
        assert (await score(worker, "four"))["reward"] == 4.0
        assert [(await score(other, "four"))["reward"] for other in others] == [4.0] * 3
        assert pool.counts.template_starts == 2 and pool.counts.deaths == 0

    run_with_pool(play)


@pytest.mark.parametrize(
    ("module", "limits", "error"),
    [
        ("while True: pass", {"start_timeout_s": 0.5}, "within 0.5 s (episodes.start_timeout_s), got no end"),
        ("raise RuntimeError('at import')", {}, "RuntimeError: at import"),
        ("import sys; sys.exit(4)", {}, "SystemExit: 4"),
        ("import os; os._exit(4)", {}, "its process exited with code 4"),
        ("import ctypes; ctypes.string_at(0)", {}, "its process was killed by SIGSEGV"),
        ("x = [bytearray(1 << 26) for _ in range(64)]", {"memory_mb": 512}, "MemoryError"),
        ("for i in range(1 << 20): print('x' * 99)", {"output_mb": 1}, "it printed more than 1 MB"),
        ("this is no Python", {}, "SyntaxError"),
        ("class Task: pass", {}, "without `make_prompt` and `score_response`"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_by_name(
    module: str, limits: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskRefused) as refused:
        asyncio.run(UserCodePool.open("hostile:Task", {}, WorkerLimits(**limits)))
    assert str(refused.value).startswith("task.name must") and error in str(refused.value)


def test_sixty_four_workers_serve_at_once_and_the_next_one_waits_for_one_of_them() -> None:
    async def play(pool: UserCodePool) -> None:
        workers = await asyncio.gather(*(pool.take_worker() for _ in range(64)))
        assert len({worker.pid for worker in workers}) == 64 == pool.num_workers == pool.counts.forks
        scores = await asyncio.gather(*(score(worker, "four") for worker in workers))
        assert {one["components"]["pid"] for one in scores} == {worker.pid for worker in workers}
        waiting = [asyncio.create_task(pool.take_worker()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        pool.return_worker(workers[7])
        assert await waiting[1] is workers[7]
        await workers[8].kill()
        assert (await waiting[2]).pid not in {worker.pid for worker in workers}
        assert pool.num_workers == 64

    run_with_pool(play)


def test_a_worker_that_spins_does_not_delay_the_calls_of_another() -> None:
    async def play(pool: UserCodePool) -> None:
        spinning, other = await asyncio.gather(pool.take_worker(), pool.take_worker())
        call = asyncio.create_task(score(spinning, "spin"))
        for _ in range(50):
            await score(other, "four")
            assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await spinning.kill()

    run_with_pool(play)


def test_a_worker_that_comes_back_soon_is_taken_before_another_is_forked() -> None:
    async def play(pool: UserCodePool) -> None:
        async def take_and_score() -> None:
            worker = await pool.take_worker()
            await score(worker, "four")
            pool.return_worker(worker)

        for _ in range(50):
            await take_and_score()
        assert pool.counts.forks == 1

    run_with_pool(play)


def test_a_process_that_hops_from_child_to_child_is_caught() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = psutil.Process(worker.pid).parent()
        assert guard is not None and worker.pid is not None
        for _ in range(4):
            await score(worker, "hop")
        await asyncio.sleep(0.05)
        await worker.kill()
        (template,) = guard.children(recursive=True)
        assert "slip-template" in template.name()
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


def test_a_worker_that_another_program_kills_is_replaced_idle_or_not() -> None:
    async def play(pool: UserCodePool) -> None:
        idle, busy = await asyncio.gather(pool.take_worker(), pool.take_worker())
        pool.return_worker(idle)
        call = asyncio.create_task(score(busy, "spin"))
        await asyncio.sleep(0.05)
        for worker in (idle, busy):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="got no answer: its worker was killed by SIGKILL"):
            await call
        pool.return_worker(busy)
        while pool.num_workers:
            await asyncio.sleep(0.01)
        assert pool.counts.deaths == 2 and not pool.counts.kills
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


def test_the_guard_ends_by_no_signal_that_a_task_sends_to_its_parent() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            assert (await score(worker, f"signal_parent {int(number)}"))["reward"] == 1.0
        assert (await score(worker, "four"))["reward"] == 4.0
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0

    run_with_pool(play)


def test_a_pool_works_in_any_thread() -> None:
    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        assert (await score(worker, "four"))["reward"] == 4.0
        with pytest.raises(WorkerDied):
            await score(worker, "spin", 0.1)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(run_with_pool, play).result()


def test_children_are_found_with_and_without_the_kernels_list() -> None:
    with subprocess.Popen(["sleep", "3600"]) as child:
        assert child.pid in list_children() and child.pid in find_children()
        assert os.getppid() not in find_children()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child.pid in list_children() and child.pid in find_children(), "it is not reaped yet"


def test_more_workers_than_the_host_has_open_files_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, raised = (1024, 4096), list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    raise_descriptor_limit(64)
    assert not raised
    raise_descriptor_limit(1000)
    assert raised == [(2512, 4096)]
    with pytest.raises(
        ValueError, match="max_workers must be at most 1792 here .*4096 open files.*, got 1793"
    ):
        raise_descriptor_limit(1793)


def test_cancelled_takes_lose_no_worker_and_no_place() -> None:
    async def play(pool: UserCodePool) -> None:
        rng = random.Random(0)
        first = await pool.take_worker()
        guard = psutil.Process(first.pid).parent()
        assert guard is not None
        pool.return_worker(first)

        async def take_for_a_while() -> None:
            worker = await pool.take_worker()
            try:
                await asyncio.sleep(rng.random() * 0.02)
                await score(worker, rng.choice(["four", "four", "exit 1", "hop"]))
            except WorkerDied:
                pass
            finally:
                pool.return_worker(worker)

        for _ in range(6):
            tasks = [asyncio.create_task(take_for_a_while()) for _ in range(12)]
            await asyncio.sleep(rng.random() * 0.1)
            for task in rng.sample(tasks, 6):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert pool.num_workers <= 4
        workers = await asyncio.gather(*(pool.take_worker() for _ in range(4)))
        scores = await asyncio.gather(*(score(worker, "four") for worker in workers))
        assert {one["components"]["pid"] for one in scores} == {worker.pid for worker in workers}
        for worker in workers:  # one in which much has hopped may be gone already
            await worker.kill()
        assert [process.name() for process in guard.children(recursive=True)] == ["slip-template"]

    run_with_pool(play, max_workers=4)


def test_a_take_that_is_cancelled_as_its_worker_begins_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cancelled: list[asyncio.Task[UserWorker]] = []
    take_notice = process_tree.ProcessTree._take_notice

    def take_and_cancel(tree: process_tree.ProcessTree, notice: Notice | None) -> None:
        take_notice(tree, notice)
        if isinstance(notice, WorkerStarted) and cancelled:
            cancelled[0].cancel()

    async def play(pool: UserCodePool) -> None:
        held = await pool.take_worker()
        cancelled.append(asyncio.create_task(pool.take_worker()))
        with pytest.raises(asyncio.CancelledError):
            await cancelled[0]
        async with asyncio.timeout(60):
            while pool.num_workers > 1:
                await asyncio.sleep(0.01)
        assert held.is_alive and pool.counts.kills == 1

    monkeypatch.setattr(process_tree.ProcessTree, "_take_notice", take_and_cancel)
    run_with_pool(play, max_workers=2)


HOSTILE_MODULES = {
    "it reaps by itself": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "it holds back signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "it leaves a thread": "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
    "it leaves a child": "subprocess.Popen(['sleep', '3600'], start_new_session=True)",
    "it leaves a daemon": "misbehaving.start_daemon()",
    "it closes its output": "os.close(1); os.close(2); sys.stdout = None",
    "it is a reaper itself": "process_control.become_subreaper()",
}


@pytest.mark.parametrize("line", HOSTILE_MODULES.values(), ids=HOSTILE_MODULES.keys())
def test_a_module_with_strange_habits_is_served_and_leaves_nothing(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = "import misbehaving, os, signal, subprocess, sys, threading, time"
    habits = f"{imports}\nfrom generators.user_code import process_control\n{line}\n"
    (tmp_path / "strange.py").write_text(f"{habits}class Task(misbehaving.Misbehaving): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    left: list[psutil.Process] = []

    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        for _ in range(2):
            assert (await score(worker, "four"))["reward"] == 4.0
        with pytest.raises(WorkerDied, match="exited with code 3"):
            await score(worker, "exit 3")
        worker = await pool.take_worker()
        with pytest.raises(WorkerDied, match="at most 0.2 s"):
            await score(worker, "swallow", 0.2)
        guard = psutil.Process((await pool.take_worker()).pid).parent()
        assert guard is not None
        left.extend([guard, *guard.children(recursive=True)])

    run_with_pool(play, "strange:Task")
    wait_until_gone(left)


def test_a_template_that_cannot_fork_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(
        "import os, time, misbehaving\n"
        f"flag = {str(tmp_path / 'flag')!r}\n"
        "os.register_at_fork(before=lambda: os.path.exists(flag) and time.sleep(3600))\n"
        "class Task(misbehaving.Misbehaving): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_tree, "_FORK_S", 0.5)

    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        (tmp_path / "flag").touch()
        with pytest.raises(WorkerDied, match="could not be started: it must be forked within 0.5 s"):
            await pool.take_worker()
        (tmp_path / "flag").unlink()
        assert (await score(worker, "four"))["reward"] == 4.0
        monkeypatch.setattr(process_tree, "_FORK_S", LONG_S)
        assert (await score(await pool.take_worker(), "four"))["reward"] == 4.0
        assert pool.counts.template_starts == 2

    run_with_pool(play, "stuck:Task")


def test_a_module_that_breaks_later_fails_those_who_wait_with_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "breaking.py"
    module.write_text("import misbehaving\nclass Task(misbehaving.Misbehaving): pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = psutil.Process(worker.pid).parent()
        assert guard is not None
        (template,) = [process for process in guard.children() if process.pid != worker.pid]
        # It breaks late, so that all five wait for the same attempt, however busy the machine is.
        module.write_text("import time\ntime.sleep(1)\nraise RuntimeError('broken meanwhile')")
        template.kill()
        wait_until_gone([template])
        while pool.has_template:
            await asyncio.sleep(0.01)
        takes = [pool.take_worker() for _ in range(5)]
        errors = await asyncio.gather(*takes, return_exceptions=True)
        assert all(isinstance(error, TaskRefused) and "broken meanwhile" in str(error) for error in errors)
        assert pool.counts.template_starts == 2

    run_with_pool(play, "breaking:Task")


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_no_process_outlives_a_generator_that_is_killed_while_the_task_is_imported(
    delay_s: float, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(3600)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, "SLIPSTREAM_TEST_MARK": str(tmp_path)}
    program = (
        "import asyncio\n"
        "from generators.user_code.pool import UserCodePool, WorkerLimits\n"
        "print('ready', flush=True)\n"
        "asyncio.run(UserCodePool.open('endless:Task', {}, WorkerLimits()))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        parent.kill()
    deadline = time.monotonic() + 60
    while left := find_marked(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def find_marked(mark: str) -> list[psutil.Process]:
    """Returns the processes whose environment holds the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIPSTREAM_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


def test_five_hundred_kills_leave_no_descriptor_and_no_process() -> None:
    async def play(pool: UserCodePool) -> None:
        async def kill_one(index: int) -> None:
            worker = await pool.take_worker()
            if index % 2:
                call = asyncio.create_task(score(worker, "spin"))
                await asyncio.sleep(0)
                call.cancel()
            await worker.kill()
            pool.return_worker(worker)

        await kill_one(0)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for start in range(0, 500, 50):
            await asyncio.gather(*(kill_one(index) for index in range(start, start + 50)))
        assert pool.counts.kills >= 500 and pool.num_workers == 0
        for _ in range(100):  # transports close in the loop's next round
            await asyncio.sleep(0.01)
            if len(os.listdir("/proc/self/fd")) <= before:
                break
        assert len(os.listdir("/proc/self/fd")) <= before

    run_with_pool(play)


def test_a_closed_pool_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    left: list[psutil.Process] = []

    async def play(pool: UserCodePool) -> None:
        worker = await pool.take_worker()
        guard = psutil.Process(worker.pid).parent()
        assert guard is not None
        call = asyncio.create_task(score(worker, "start_children"))
        assert worker.pid is not None
        await wait_for_descendants(worker.pid, 3)
        left.extend([guard, *guard.children(recursive=True)])
        await pool.close()
        with pytest.raises(WorkerDied):
            await call
        with pytest.raises(UserCodeError, match="got a closed one"):
            await pool.take_worker()

    run_with_pool(play)
    wait_until_gone(left)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
