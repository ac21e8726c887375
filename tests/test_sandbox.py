"""Code that nobody has read: what it cannot do in the sandbox, and how its tests are counted."""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from dataset_rows import make_arguments, write_lines

from generators.rewards.code_tests import CodePart, find_code, read_tests
from generators.rewards.composition import make_parts
from generators.rewards.sandbox import Sandbox, SandboxFailed, SandboxLimits, SandboxMissing, SandboxResult
from generators.user_code.errors import WorkerDied
from generators.user_code.pool import UserCodePool, WorkerLimits

LIMITS = SandboxLimits(timeout_s=60, memory_bytes=256 << 20, disk_bytes=8 << 20, processes=8)


def find_obstacle() -> str:
    try:
        Sandbox(LIMITS)
    except SandboxMissing as error:
        return str(error)
    return ""


OBSTACLE = find_obstacle()
with_sandbox = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"\[0\]\.use must name a part that this machine can run, got 'code'"
    ) as e:
        make_parts([{"use": "code"}])
    assert "bubblewrap must be on the PATH (`bwrap`), got none" in str(e.value)
    assert "apt-get install bubblewrap" in str(e.value)


def write_program(folder: Path, script: str) -> Path:
    """Writes a program in the place of bubblewrap, which nobody may run too."""
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    for one in (folder, *folder.parents[:3]):
        if one.stat().st_uid == os.getuid():
            one.chmod(one.stat().st_mode | 0o055)
    return program


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo bubblewrap 0.6.1", r"bubblewrap must be 0\.8 or newer, got \['0\.6\.1'\]"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.11.0 && exit 0\n'
            "echo 'bwrap: No permissions to create a new namespace' >&2; exit 1",
            r"a sandbox must start on this machine.*No permissions to create a new namesp.*user namespaces",
        ),
    ],
)
def test_a_bubblewrap_that_cannot_be_used_is_refused_with_its_reason(
    script: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_program(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing, match=f"(?s){sentence}"):
        Sandbox(LIMITS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"timeout_s": 0}, r"\[0\]\.timeout_s must be a finite number, above 0, got 0"),
        ({"memory_mb": 1}, r"\[0\]\.memory_mb must be a whole number of at least 64, got 1"),
        ({"processes": 1.5}, r"\[0\]\.processes must be a whole number of at least 1, got 1\.5"),
        ({"partial": "yes"}, r"\[0\]\.partial must be true or false, got 'yes'"),
        ({"network": True}, r"\[0\] must have arguments of code: tests, partial, .*, got 'network'"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_parts([{"use": "code"} | arguments])


# ---- attacks


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


@pytest.fixture(scope="module")
def quick_sandbox() -> Sandbox:
    """Its time is over after a second."""
    return Sandbox(SandboxLimits(timeout_s=1, memory_bytes=256 << 20, disk_bytes=8 << 20, processes=8))


@pytest.fixture(scope="module", autouse=True)
def inherits_orphans() -> Iterator[None]:
    """Makes this process one that inherits the orphans below it, as workers are."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def nothing_stays(inherits_orphans: None) -> Iterator[None]:
    """Sees that a test leaves no process, dead ones that nobody has waited for included, and no open file."""
    num_files = len(os.listdir("/proc/self/fd"))
    yield
    assert [one for one in psutil.Process().children(recursive=True) if "bwrap" in one.name()] == []
    assert len(os.listdir("/proc/self/fd")) <= num_files + 1  # the selector of a fixture's first use


def attack(sandbox: Sandbox, code: str) -> SandboxResult:
    return sandbox.run_program({"kind": "program", "code": code})


@with_sandbox
def test_a_program_reads_its_input_and_prints_its_output(sandbox: Sandbox) -> None:
    code = "import sys\nprint(input()[::-1])\nprint(sys.stdin.read())"
    result = sandbox.run_program({"kind": "program", "code": code}, b"abc\nd\n")
    assert result == SandboxResult(b"cba\nd\n\n", b"", 0, "ended")


@with_sandbox
def test_a_fork_bomb_meets_the_limit_and_is_gone_with_its_children(
    sandbox: Sandbox, quick_sandbox: Sandbox
) -> None:
    counted = (
        "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(99)\nexcept OSError: print(n)"
    )
    result = attack(sandbox, counted)
    assert result.verdict == "ended" and 1 <= int(result.output) <= LIMITS.processes
    endless = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert attack(quick_sandbox, endless).verdict == "timeout"


@with_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(1e6)",
        "import signal, time\n"
        "for n in set(signal.valid_signals()) - {9, 19}:\n  signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(1e6)",
    ],
)  # fmt: skip
def test_a_program_without_end_is_ended(code: str, quick_sandbox: Sandbox) -> None:
    began = time.monotonic()
    assert attack(quick_sandbox, code).verdict == "timeout"
    assert time.monotonic() - began >= 1


@with_sandbox
def test_the_time_that_a_sandbox_takes_to_begin_is_not_the_codes(tmp_path: Path) -> None:
    late = Sandbox(SandboxLimits(timeout_s=1, processes=8))
    late._argv[0] = str(write_program(tmp_path, f'sleep 1.5; exec {shutil.which("bwrap")} "$@"'))
    assert attack(late, "print(1)") == SandboxResult(b"1\n", b"", 0, "ended")


@with_sandbox
def test_a_child_that_has_cut_itself_loose_goes_too(sandbox: Sandbox) -> None:
    """The child leaves its session and closes all its files, so nothing but the namespace holds it."""
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n  os.setsid()\n"
        "  if os.fork() == 0:\n    os.closerange(0, 64)\n    time.sleep(1e6)\n"
        "  os._exit(0)\nos.wait()\nprint('parent ends')"
    )  # fmt: skip
    assert attack(sandbox, code).output == b"parent ends\n"


@with_sandbox
def test_a_child_that_holds_the_output_does_not_hold_up_the_end(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1e6)\nprint('parent ends')"
    began = time.monotonic()
    assert attack(sandbox, code).output == b"parent ends\n"
    assert time.monotonic() - began < LIMITS.timeout_s


@with_sandbox
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_gigabyte_of_output_ends_the_program_and_is_not_kept(stream: str, sandbox: Sandbox) -> None:
    code = f"import sys\nfor _ in range(1000): sys.{stream}.write('a' * (1 << 20))"
    result = attack(sandbox, code)
    assert result.verdict == "output"
    assert len(result.output) <= LIMITS.output_bytes and len(result.errors) <= LIMITS.output_bytes


@with_sandbox
def test_the_disk_cannot_be_filled(sandbox: Sandbox) -> None:
    code = (
        "import os\nwritten = 0\n"
        "for folder in ('/tmp', '/', '/dev', '/dev/shm', '/usr', '/var/tmp', '/home', '/proc', '/run'):\n"
        "  for i in range(20):\n"
        "    try:\n"
        "      with open(f'{folder}/{i}', 'wb', buffering=0) as file:\n"
        "        while True: written += file.write(b'0' * 100_000)\n"
        "    except OSError: pass\n"
        "print(written)"
    )  # fmt: skip
    result = attack(sandbox, code)
    assert 0 < int(result.output) <= LIMITS.disk_bytes


@with_sandbox
def test_memory_ends_at_the_limit(sandbox: Sandbox) -> None:
    result = attack(sandbox, "x = bytearray(300 << 20)")
    assert result.exit_code == 1 and b"MemoryError" in result.errors
    assert attack(sandbox, "x = bytearray(30 << 20)\nprint(len(x))").output == b"31457280\n"


@with_sandbox
def test_no_file_of_the_machine_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    keys = tmp_path / "run.keys"
    keys.write_text("secret")
    keys.chmod(0o644)
    places = ["/etc/shadow", "/etc/passwd", str(keys), str(Path.home()), __file__, "/var", "/root", "/sys",
              "/proc/1/environ", "/proc/1/root/etc/passwd", "/run", "/mnt", "/work"]  # fmt: skip
    code = (
        "import os\n"
        f"for place in {places}:\n"
        "  try: print(place, os.listdir(place) if os.path.isdir(place) else open(place).read()[:80])\n"
        "  except OSError: pass"
    )
    # Its own environment is what the sandbox gives it, so that one may be read.
    lines = [line for line in attack(sandbox, code).output.decode().splitlines() if "environ" not in line]
    assert lines == []


@with_sandbox
def test_the_environment_has_no_secret(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code = (
        "import os\nprint(dict(os.environ))\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  try: print(open(f'/proc/{pid}/environ').read(), open(f'/proc/{pid}/cmdline').read())\n"
        "  except OSError as error: print(error)"
    )
    output = attack(sandbox, code).output.decode()
    assert "PATH" in output and "sk-secret" not in output


@with_sandbox
def test_no_socket_leads_out(sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0slipstream-sandbox-test")
        local.listen()
        code = (
            "import socket\n"
            f"places = [(socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})),\n"
            "  (socket.AF_INET, ('1.1.1.1', 80)), (socket.AF_UNIX, '\\0slipstream-sandbox-test')]\n"
            "for family, address in places:\n"
            "  with socket.socket(family) as one:\n"
            "    one.settimeout(20)\n"
            "    try: one.connect(address); print('connected', address)\n"
            "    except OSError as error: print('refused')"
        )
        assert attack(sandbox, code).output == b"refused\n" * 3


@with_sandbox
def test_no_privilege_can_be_got(sandbox: Sandbox) -> None:
    code = (
        "import ctypes, os, resource\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print([libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])\n"
        "print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
        "for call in (lambda: os.setuid(0), lambda: os.write(0, b'x'), lambda: os.chroot('/tmp'),\n"
        "    lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000)),\n"
        "    lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))):\n"
        "  try: call(); print('done')\n"
        "  except (OSError, ValueError): print('refused')\n"
        "wanted = ('CapEff', 'NoNewPrivs')\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(wanted)])"
    )
    assert attack(sandbox, code).output.decode().splitlines() == [
        "[-1, -1, -1]", "-1", *["refused"] * 5, "['0000000000000000', '1']",
    ]  # fmt: skip


@with_sandbox
def test_processes_outside_are_neither_seen_nor_killed(sandbox: Sandbox) -> None:
    code = (
        f"import os\nprint(os.path.exists('/proc/{os.getpid()}/status') and {os.getpid()} > 100)\n"
        "print(len(list(filter(str.isdigit, os.listdir('/proc')))))\nos.kill(-1, 9)"
    )
    output = attack(sandbox, code).output.decode().split()
    assert output[0] == "False" and int(output[1]) <= 3


@with_sandbox
def test_a_sandbox_that_does_not_start_is_an_error_and_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = CodePart()
    bwrap = shutil.which("bwrap")
    part._sandbox._argv = [str(bwrap), "--ro-bind", "/nowhere", "/nowhere", "true"]
    with pytest.raises(SandboxFailed, match="a sandbox must begin, got exit code 1 .*nowhere"):
        part.rate_reply({"tests": ["assert True"]}, "x = 1")


# ---- tests of a reply


ADD = "Here:\n```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```\nDone."
SUM = "```\nprint(sum(map(int, input().split())))\n```"
SUMS = "```\nimport sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\n```"
PASSES: list[tuple[str, object]] = [
    (SUM, [{"input": "1 2\n", "output": "3\n"}, {"input": "4", "output": "4"}]),
    (SUM, json.dumps({"inputs": ["1 2\n", "5 5"], "outputs": ["3\n", "10"]})),
    (SUMS, {"inputs": [["1 2", "3 4"], ["5"]], "outputs": [["3", 7], ["5"]]}),
    (ADD, [{"call": "add", "arguments": [1, 2], "expected": 3}]),
    (ADD, [{"call": "add", "arguments": [0.1, 0.2], "expected": 0.3}]),
    (ADD, [{"call": "add", "arguments": [[1], [2]], "expected": [1, 2]}]),
    (ADD, {"inputs": [[1, 2], "3\n4"], "outputs": [[3], "7"], "fn_name": "add"}),
    (ADD, ["assert add(2, 2) == 4", {"assert": "assert add('a', 'b') == 'ab'"}]),
    (
        "class Solution:\n  def add(self, a, b): return a + b",
        [{"call": "add", "arguments": [1, 2], "expected": 3}],
    ),
    (
        "def f(x): return x, [x], {'a': {x}}, None, 1.5, b'z', 'é', (), set(), 2j, True",
        ["assert f(1) == (1, [1], {'a': {1}}, None, 1.5, b'z', 'é', (), set(), 2j, True), 'message'"],
    ),
    (
        "from collections import Counter\nfrom fractions import Fraction\nfrom enum import IntEnum\n"
        "class Color(IntEnum):\n  RED = 3\n"
        "def f(s): return Counter(s)\ndef g(): return {1: 2}.keys(), Fraction(1, 2), Color.RED, float('inf')",
        ["assert f('aab') == {'a': 2, 'b': 1}", "assert g()[:3] == ({1}, 0.5, 3)\nassert g()[3] > 1e300"],
    ),
    (ADD, ["assert add(1, 1) in (2, 3)", "assert add(1, 1) <= 2", "  assert 4 == add(2, 2)"]),
    (ADD, ["import math\nassert math.isclose(add(0.1, 0.2), 0.3)", "assert add(1, 1) is not None"]),
    (
        ADD,
        [
            "assert add(1, 1) == add(2, 0) == 2",
            "assert not add(0, 0)",
            "for i in 1, 2: assert add(i, 0) == i",
        ],
    ),
]
CHEAT = "class Equal:\n  def __eq__(self, other): return True\ndef add(a, b): return Equal()"
INTEGER = "class Equal(int):\n  def __eq__(self, other): return True\n  def __repr__(self): return '4'\n"
STATEMENT = "import math\nassert math.isclose(add(2, 2), 4)"
FAILS: list[tuple[str, object]] = [
    (SUM, [{"input": "1 2", "output": "4"}]),
    (ADD, [{"call": "add", "arguments": [1, 2], "expected": 4}]),
    (ADD, [{"call": "add", "arguments": [1, 0], "expected": True}]),
    (ADD, [{"call": "subtract", "arguments": [1, 2], "expected": -1}]),
    (ADD, ["assert add(2, 2) == 5"]),
    ("no code at all", ["assert True"]),
    ("", [{"input": "", "output": "1"}]),
    # To end early, however politely, is not to pass.
    ("import sys; sys.exit(0)", ["assert add(2, 2) == 4"]),
    ("import os; os._exit(0)", ["assert add(2, 2) == 4"]),
    ("import os; os.kill(os.getpid(), 9)", ["assert add(2, 2) == 4"]),
    ("def add(a, b):\n    import os\n    os._exit(0)", [{"call": "add", "arguments": [1, 2], "expected": 3}]),
    # To equal everything is not to be right.
    (CHEAT, ["assert add(2, 2) == 4"]),
    (INTEGER + "def add(a, b): return Equal(0)", ["assert add(2, 2) == 4", "assert [add(2, 2)] == [4]"]),
    ("def add(a, b): return [1, 2]", ["assert add(2, 2) == (1, 2)"]),
    ("def add(a, b):\n  a = []\n  a.append(a)\n  return a", ["assert add(2, 2) == [[]]"]),
    # Nor is it to replace what runs the test.
    ("import runpy\nrunpy.run_path = lambda *a, **b: {}\ndef add(a, b): return 0", [STATEMENT]),
    ("import builtins\nbuiltins.exec = lambda *a: None\ndef add(a, b): return 0", [STATEMENT]),
    ("import os\nos.write = lambda *a: None\ndef add(a, b): return 0", [STATEMENT]),
    ("def add(a, b): return {1, 2}", [{"call": "add", "arguments": [1, 2], "expected": 3}]),
]


@pytest.fixture(scope="module")
def part() -> CodePart:
    return CodePart(timeout_s=60)


@with_sandbox
@pytest.mark.parametrize(("reply", "tests"), PASSES)
def test_right_code_passes(reply: str, tests: object, part: CodePart) -> None:
    assert part.rate_reply({"tests": tests}, reply).value == 1.0


@with_sandbox
@pytest.mark.parametrize(("reply", "tests"), FAILS)
def test_wrong_code_fails(reply: str, tests: object, part: CodePart) -> None:
    assert part.rate_reply({"tests": tests}, reply).value == 0.0


@with_sandbox
def test_a_part_of_the_tests_counts_where_that_is_wanted() -> None:
    tests = [f"assert add({i}, 1) == {i + (i != 2)}" for i in range(5)] + ["assert False"] * 9
    row = {"reward_model": {"ground_truth": json.dumps(tests)}}
    score = make_parts([{"use": "code", "partial": True, "max_tests": 5}]).rate_reply(row, ADD)
    assert score.reward == pytest.approx(4 / 5)
    assert make_parts([{"use": "code", "max_tests": 5}]).rate_reply(row, ADD).reward == 0.0


@with_sandbox
def test_code_without_end_fails_its_test_and_is_no_error() -> None:
    score = make_parts([{"use": "code", "timeout_s": 0.5}]).rate_reply(
        {"tests": ["assert 1"]}, "while True: pass"
    )
    assert score.reward == 0.0 and score.components["seconds/code"] >= 0.5


@with_sandbox
def test_a_reply_that_is_slow_in_every_test_is_a_wrong_one_before_its_worker_is_killed() -> None:
    code = "import time\ndef wait(seconds):\n  time.sleep(seconds)\n  return seconds"
    tests = [f"assert wait({seconds}) == {seconds}" for seconds in [0] + [100] * 9]
    part = CodePart(partial=True, timeout_s=1, total_timeout_s=2.5, max_tests=10)
    run, results = part._sandbox.run_program, list[SandboxResult]()

    def record_run(*arguments: Any) -> SandboxResult:
        results.append(run(*arguments))
        return results[-1]

    part._sandbox.run_program = record_run  # type: ignore[method-assign]
    assert part.rate_reply({"tests": tests}, code).value <= 0.1
    assert {one.verdict for one in results[1:]} == {"timeout"} and 3 <= len(results) <= 4
    with pytest.raises(ValueError, match="total_timeout_s must be a finite number, at least 5, got 4"):
        CodePart(total_timeout_s=4)


def test_a_fence_with_a_long_line_of_blanks_is_read_at_once() -> None:
    """It took the square of the line's length: hours for this one."""
    reply = "```" + " " * 2_000_000 + "x"
    assert find_code(reply) == reply


@pytest.mark.parametrize(
    ("tests", "sentence"),
    [
        ([], r"tests must be a list of 1 to 1000, got \[\]"),
        ("[", r"tests must be JSON, got '\['"),
        (
            [{"input": "1"}],
            r"a test must have input and output \(texts\), call, arguments and expected, or assert",
        ),
        ([{"input": "1", "output": 2}], r"a test must have input and output"),
        ([{"call": "f", "arguments": [1]}], r"a test must have .* got \{'call': 'f', 'arguments': \[1\]\}"),
        ({"inputs": ["1"], "outputs": []}, r"tests must have as many inputs as outputs"),
        (7, r"tests must be a list of 1 to 1000, got 7"),
    ],
)
def test_tests_that_are_none_are_refused(tests: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_tests(tests)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\na\n```\ntext\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```Python\r\na\n", "a\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
    ],
)
def test_the_last_block_of_code_counts(reply: str, code: str) -> None:
    assert find_code(reply) == code


@with_sandbox
def test_a_worker_that_is_killed_takes_its_sandbox_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    coding = [{"prompt": f"Code {i}!", "tests": ["assert True"]} for i in range(2)]
    rows = write_lines(tmp_path / "rows.jsonl", coding)
    args = make_arguments(rows, {"use": "code", "timeout_s": 1000})

    def list_sandboxes() -> list[int]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process.pid] if process.name() == "bwrap" else []
        return found

    async def score_endless_code() -> None:
        pool = await UserCodePool.open("dataset", args, WorkerLimits(max_workers=1))
        try:
            worker = await pool.take_worker()
            call = worker.call("score_response", ["train", 0, 0, "while True: pass"], 20.0, "score")
            task = asyncio.create_task(call)
            while not list_sandboxes():
                await asyncio.sleep(0.05)
                assert not task.done()
            await worker.kill()
            with pytest.raises(WorkerDied):
                await task
            deadline = time.monotonic() + 60
            while list_sandboxes() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert list_sandboxes() == []
        finally:
            await pool.close()

    asyncio.run(score_endless_code())
