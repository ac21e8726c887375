"""`scripts/scale.sh` changes the number of a run's generators, and whatever dies meanwhile leaves nothing
behind."""

import json
import re
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from buffer_harness import SMALL_RUN, BufferHarness
from msgspec import structs
from runs import ROOT, SIMULATED, StartedRun, assert_accounts_close

import slipstream.scale
from buffers import messages as m
from buffers.client import RefusedByBuffer
from buffers.keys import KeyRole, make_keys
from buffers.run_status import RunStatus, Scaling
from buffers.server import BufferServer
from configs.load import load_config
from slipstream.run_address import remove_address, write_address
from slipstream.scale import Gone, follow_order, main
from slipstream.scaling import GeneratorScaling


def start_scaling(run: str | Path, *arguments: object) -> subprocess.Popen[str]:
    command = ["scripts/scale.sh", str(run), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def scale(run: str | Path, *arguments: object) -> tuple[int, str]:
    process = start_scaling(run, *arguments)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


@pytest.mark.whole_run
def test_generators_come_and_go_while_the_run_goes_on(tmp_path: Path) -> None:
    """One more, although the buffer dies meanwhile; a fleet that is preempted; fewer; and a driver that is
    killed in the middle."""
    run = StartedRun(tmp_path, *SIMULATED, "run.steps=100000")
    fleet = None
    try:
        run.wait_for(lambda: run.steps() > 0, "step")
        growing = start_scaling(run.folder, 2)
        run.lose_buffer()
        said, _ = growing.communicate(timeout=300)
        assert growing.returncode == 0 and said.endswith("generators of the run: 2\n"), said
        status, said = scale(run.folder, 900)
        assert status == 1 and "900 generators are 898 more than run" in said and "at most" in said, said
        status, said = scale(run.folder, 0)
        assert status == 1 and "must be at least 1 as long as no other command's generator" in said, said

        address = json.loads((run.folder / "address.json").read_text())["buffer"]
        fleet = StartedRun(tmp_path / "fleet", *SIMULATED, "role=generators", f"buffer.address={address}")
        assert fleet.process.stdout is not None
        while "generates with version" not in (line := fleet.process.stdout.readline()):
            assert line, "the fleet has ended"
        assert scale(address, 0)[0] == 0
        told = run.steps()
        run.wait_for(lambda: run.steps() > told + 2, "step by the fleet alone")
        assert scale(address, 1)[0] == 0
        fleet.process.send_signal(signal.SIGTERM)
        status, said = fleet.finish()
        assert status == 130 and said.endswith("SIGTERM: the generators have left\n"), said
        fleet.assert_nothing_left()
        # The first has left, and nobody takes its name.
        assert (run.folder / "logs" / "generator-2.log").exists()
        told = run.steps()
        run.wait_for(lambda: run.steps() > told + 2, "step by the new generator")
        summary = run.summary()
        assert_accounts_close(summary)
        assert summary["groups"]["rejected"]["failed"] == 0, "those that leave hand in, or return"

        growing = start_scaling(run.folder, 2)
        assert growing.stdout is not None and "starting: generator-3" in growing.stdout.readline()
        run.process.kill()
        said, _ = growing.communicate(timeout=300)
        assert growing.returncode == 1 and "has ended: its driver, process" in said, said
        run.assert_nothing_left()
        status, said = scale(run.folder, 2)
        assert status == 2 and "has ended: its driver, process" in said, said
    finally:
        for started in (fleet, run):
            if started is not None and started.process.poll() is None:
                started.kill()


def test_the_buffer_keeps_one_order_at_a_time_and_learns_of_it_again_from_the_driver(tmp_path: Path) -> None:
    run = BufferHarness(load_config(SMALL_RUN), tmp_path)
    try:
        for _ in range(2):  # the command may ask again
            run.client.call(m.ScaleGenerators(order="a", count=3), m.Acknowledged)
        assert run.status().scaling == Scaling(order="a", count=3)
        with pytest.raises(RefusedByBuffer, match=r"must have ended, got one to 3 .*\(not begun\)"):
            run.client.call(m.ScaleGenerators(order="b", count=4), m.Acknowledged)
        done = Scaling(order="a", count=3, progress="so many", ended=True)
        run.client.call(m.ReportScaling(scaling=done), m.Acknowledged)
        assert run.status().scaling == done
        run.client.call(m.ScaleGenerators(order="b", count=4), m.Acknowledged)
        run.client.call(m.ReportScaling(scaling=done), m.Acknowledged)  # the driver has not heard of "b" yet
        assert run.status().scaling == Scaling(order="b", count=4)
        own = (tmp_path / ".run").read_text()
        run.client.call(m.ScaleGenerators(order="b", count=4, run=own), m.Acknowledged)
        with pytest.raises(RefusedByBuffer, match="the run that was meant is over, and another answers"):
            run.client.call(m.ScaleGenerators(order="d", count=4, run=own[::-1]), m.Acknowledged)
        run.client.call(m.StopRun(reason="enough"), m.Acknowledged)
        with pytest.raises(RefusedByBuffer, match="told to stop: enough"):
            run.client.call(m.ScaleGenerators(order="c", count=4), m.Acknowledged)
    finally:
        run.close()


class RecordedGenerators:
    """Notes what it is asked for. Newcomers generate, and others leave, when the test says so."""

    def __init__(self) -> None:
        self.training, self.newcomers, self.leaving = ["generator-0"], dict[str, float](), list[str]()
        self.failure, self.waits_for_learner, self.forgets_lost = "", False, False

    def add(self, number: int) -> None:
        if number > 5:
            raise ValueError("room for five")
        names = [f"generator-{1 + more}" for more in range(number)]
        self.training += names
        self.newcomers |= dict.fromkeys(names, 0.0)

    def let_newest_leave(self, number: int) -> None:
        self.leaving = self.training[::-1][:number]
        self.training = self.training[: len(self.training) - number]

    def note_versions(self, status: RunStatus) -> None: ...

    def forget_lost(self) -> None:
        self.forgets_lost = True

    def give_up(self, name: str, why: str) -> None:
        del self.newcomers[name]
        self.training.remove(name)
        self.failure = why


class ScalingDriver:
    """A driver's side of the changes, and the buffer's memory of them."""

    def __init__(self) -> None:
        self.generators, self.now = RecordedGenerators(), 0.0
        self.known: Scaling | None = None
        generators: Any = self.generators
        self.scaling = GeneratorScaling(generators, self.take_report, lambda line: None, lambda: self.now)

    def take_report(self, request: m.Request) -> None:
        assert isinstance(request, m.ReportScaling)
        self.known = request.scaling

    def look(self, *others: str, silent_s: float = 0.0) -> Scaling | None:
        roles = dict.fromkeys(others, SimpleNamespace(last_heard_s=silent_s))
        status: Any = SimpleNamespace(scaling=self.known, generators=roles, roles=roles, evaluators=[])
        self.scaling.follow(status)
        return self.known

    def order(self, order: str, count: int, *others: str) -> Scaling | None:
        self.known = Scaling(order=order, count=count)
        return self.look(*others)


def test_the_driver_tells_a_buffer_that_was_started_again_of_the_change_under_way_and_of_its_end() -> None:
    driver = ScalingDriver()
    under_way = driver.order("a", 3)
    assert under_way == Scaling(order="a", count=3, progress="starting: generator-1, generator-2")
    driver.known = None
    assert driver.look() == under_way
    driver.known = Scaling(order="b", count=9)  # asked of the new buffer, which knew of no other
    assert driver.look() == under_way
    driver.generators.newcomers.clear()
    ended = Scaling(order="a", count=3, progress="generators of the run: 3", ended=True)
    assert driver.look() == ended
    driver.known = None
    assert driver.look() == ended
    assert driver.order("a", 3) == ended, "asked again by a command that has not heard of the end"
    assert len(driver.generators.training) == 3


def test_a_change_that_fails_says_why_and_the_next_one_begins_anew() -> None:
    driver = ScalingDriver()
    refused = driver.order("a", 9)
    assert refused is not None and refused.failed and refused.progress.endswith("for these: room for five")
    refused = driver.order("b", 0)
    assert refused is not None and refused.failed and "must be at least 1" in refused.progress
    driver.known = Scaling(order="b2", count=0)
    refused = driver.look("far-0", silent_s=20.0)
    assert refused is not None and refused.failed, "a generator whose host is gone works for nobody"
    assert not driver.generators.forgets_lost, "those that wait for a node are started later"
    driver.order("c", 2)
    assert driver.generators.forgets_lost
    driver.now = 301.0
    failed = driver.look()
    assert failed is not None and failed.failed and failed.ended
    assert failed.progress == "generators of the run: 1; generator-1 has not been heard of for 300 s"
    driver.generators.waits_for_learner = True
    assert driver.order("d", 0, "far-0") == Scaling(order="d", count=0), "not before the learner has loaded"
    driver.generators.waits_for_learner = False
    leaving = driver.look("far-0")
    assert leaving is not None and leaving.progress == "handing in what they have begun: generator-0"
    driver.generators.leaving = []
    ended = driver.look("far-0")
    assert ended is not None and ended.ended and not ended.failed


def test_a_change_ends_well_with_the_number_that_was_asked_for_alone() -> None:
    driver = ScalingDriver()
    same = driver.order("a", 1)
    assert same == Scaling(order="a", count=1, progress="generators of the run: 1", ended=True)
    driver.order("b", 3)
    driver.generators.newcomers.clear()
    driver.generators.training.remove("generator-0")  # its host was preempted
    ended = driver.look()
    assert ended is not None and ended.ended and ended.failed
    assert ended.progress == "generators of the run: 2; others have left meanwhile"


class ForgetfulBuffer:
    """Answers with one status after the other, and notes the orders. The status calls the last of them
    "own"."""

    def __init__(self, *statuses: Scaling | None) -> None:
        self.orders: list[str] = []
        self._statuses = iter(statuses)

    def read_name(self) -> str:
        return ""

    def ask(self, request: m.ScaleGenerators, expect: type[m.Acknowledged]) -> m.Acknowledged:
        self.orders.append(request.order)
        return m.Acknowledged()

    def fetch_status(self) -> Any:
        scaling = next(self._statuses)
        if scaling is not None and scaling.order == "own":
            scaling = structs.replace(scaling, order=self.orders[-1])
        return SimpleNamespace(ended=False, scaling=scaling)


def test_a_command_orders_again_what_was_lost_with_the_buffer_and_never_what_another_has_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slipstream.scale, "LOOK_EVERY_S", 0.0)
    before = Scaling(order="before", count=9, progress="nine", ended=True)
    started, done = Scaling(order="own", count=2), Scaling(order="own", count=2, progress="two", ended=True)
    told = structs.replace(started, progress="starting")
    lost: Any = ForgetfulBuffer(before, started, None, before, told, None, started, done)
    assert follow_order(lost, 2) == 0
    assert capsys.readouterr().out == "starting\ntwo\n"
    assert len(lost.orders) == 4 and len(set(lost.orders)) == 1
    replaced: Any = ForgetfulBuffer(before, started, Scaling(order="after", count=7))
    with pytest.raises(Gone, match="another change, to 7 generators, has taken the place of this one"):
        follow_order(replaced, 2)
    assert len(replaced.orders) == 1


def test_what_cannot_be_scaled_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    run = str(tmp_path / "run")
    for arguments, why in (
        ([run], "the arguments must be RUN and a number"),
        ([run, "-1"], "a whole number from 0 to 1000, got -1"),
        ([run, "two"], "a whole number from 0 to 1000, got two"),
        ([run, "1001"], "a whole number from 0 to 1000, got 1001"),
        ([str(tmp_path), "2"], f"RUN must be the folder of a run that goes on, .* got {tmp_path}"),
        ([run, "2"], f"the run in {run} has ended, or"),
        ([run, "2", f"buffer.keys={tmp_path}/none"], f"the run in {run} has ended, or"),
        (["tcp://127.0.0.1:9", "2", f"buffer.keys={tmp_path}/none"], "buffer.keys must be a folder"),
        (["tcp://*:9", "2"], "RUN must be an address that can be reached, got tcp:"),
        (["ipc://", "2"], "RUN must be an address that can be reached, got ipc:"),
    ):
        assert main(arguments) == 2
        assert re.search(why, capsys.readouterr().err), why
    write_address(Path(run), "tcp://127.0.0.1:9", None)
    remove_address(Path(run))
    assert main([run, "2"]) == 2


def test_a_command_without_the_keys_of_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys", list(KeyRole))
    config = load_config([*SMALL_RUN, f"buffer.keys={tmp_path}/keys"])
    server = BufferServer(config, tmp_path / "journal")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert main([server.address, "2"]) == 1
    finally:
        server.stop()
        thread.join(60)
    assert "one side has keys, and the other has none" in capsys.readouterr().err
