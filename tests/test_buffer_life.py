"""Another life of the buffer within a run knows all that the one before has acknowledged, and nobody who
watches, waits or samples notices more than a pause."""

import math
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from buffer_harness import SMALL_RUN, BufferHarness
from buffer_lives import LIFE_SETTINGS, copy_killed, submit_group

from buffers import events as e
from buffers import messages as m
from buffers.buffer import Buffer
from buffers.message_fields import GroupSlice
from buffers.run_status import GeneratorReport, StepRecord
from buffers.server import BufferServer
from buffers.step_records import MAX_STORED, StepRecords, make_report, read_report
from configs.load import load_config
from slipstream.buffer_keeper import reserve_port


def train_steps(buffer: Buffer, first: int, last: int, **metrics: float) -> None:
    for step in range(first, last):
        buffer.progress.publish_version(step, f"host#x#{step}#w{step}")
        while (lease := buffer.lease_next("g")) is not None and not lease.evaluation:
            assert submit_group(buffer, lease, step) == "accepted"
        handout = buffer.progress.hand_out(step)
        assert handout is not None
        trained = sum(buffer.book.pool.get_content(group).tokens for group in handout.groups)
        buffer.progress.finish_step(
            m.ReportTrainedStep(
                step=step, num_trained=trained, idle_s=0, alive_s=1, metrics={"s": step, **metrics}
            )
        )
        buffer.commit()


# ---- watchers


def test_a_record_is_read_back_from_the_log_as_it_was_whatever_its_numbers_are() -> None:
    odd = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "tiny": 5e-324, "third": 1 / 3, "zero": -0.0}
    samples = [GroupSlice(segment=1, offset=2, size=3, xxh3=2**64 - 1, row=5, rows=6)]
    record = StepRecord(step=7, time=1.25, metrics=odd, samples=samples)
    line = e.decode_line(e.encode_line(make_report(record)))
    assert isinstance(line, e.Reported)
    assert repr(read_report(line)) == repr(record)


@pytest.mark.parametrize("rotates", [False, True])
def test_a_watcher_misses_no_record_and_sees_none_twice_over_lives_of_the_buffer(
    tmp_path: Path, rotates: bool
) -> None:
    config = load_config([*LIFE_SETTINGS, "tracking.samples.count=1", "tracking.samples.every=2"])
    buffer, told = Buffer(config, tmp_path / "0"), list[StepRecord]()

    def watch() -> None:
        told.extend(buffer.progress.step_records.list_after(len(told), 500))

    for life in range(4):
        train_steps(buffer, 5 * life, 5 * life + 3)
        watch()
        train_steps(buffer, 5 * life + 3, 5 * life + 5, loss=math.nan)  # nobody has asked for these
        if rotates:
            buffer.progress.keep_checkpoint(5 * life + 5, 0)
            buffer.commit()
            buffer.journal._state_written.result()
        killed, elapsed_s = copy_killed(buffer, tmp_path / str(life + 1)), buffer.progress.elapsed_s
        buffer.close()
        buffer = Buffer(config, killed)
        assert buffer.progress.elapsed_s >= elapsed_s
        watch()
        assert [record.step for record in told] == list(range(5 * life + 5))
    assert [record.metrics["s"] for record in told] == list(range(20))
    assert [math.isnan(record.metrics.get("loss", 0)) for record in told] == [False] * 3 + [True] * 2 + (
        [False] * 3 + [True] * 2
    ) * 3
    assert [bool(record.samples) for record in told] == [step % 2 == 0 for step in range(20)]
    buffer.close()
    resumed = Buffer(config, killed, resume_step=20)
    assert resumed.progress.step_records.list_after(0, 500) == [], "its driver has recorded those"
    train_steps(resumed, 20, 22)
    again = Buffer(config, copy_killed(resumed, tmp_path / "resumed"))
    assert [one.step for one in again.progress.step_records.list_after(0, 500)] == [20, 21]
    resumed.close()
    again.close()


def test_a_state_holds_the_newest_records_alone_and_the_numbers_go_on() -> None:
    records = StepRecords()
    for step in range(MAX_STORED + 7):
        records.add_record(StepRecord(step=step, time=0.0, metrics={}))
    other = StepRecords()
    other.restore_state(records.export_state())
    assert other.count == MAX_STORED + 7
    assert [one.step for one in other.list_after(0, 3)] == [7, 8, 9]
    assert [one.step for one in other.list_after(MAX_STORED + 5, 9)] == [MAX_STORED + 5, MAX_STORED + 6]


def test_the_lag_that_the_controller_has_chosen_is_that_of_the_next_life(tmp_path: Path) -> None:
    config = load_config([*LIFE_SETTINGS, "staleness.max_versions=4", "staleness.controller=ess"])
    buffer = Buffer(config, tmp_path / "0")
    train_steps(buffer, 0, 12, **{"offpolicy/ess_token": 1.0})
    lag = buffer.book.leases.admission_lag
    assert lag > 1, "it began there"
    again = Buffer(config, copy_killed(buffer, tmp_path / "1"))
    assert again.book.leases.admission_lag == lag
    buffer.close()
    again.close()


def test_results_of_evaluations_keep_their_numbers_and_versions_their_manifests(tmp_path: Path) -> None:
    config = load_config([*LIFE_SETTINGS, "eval.prompts=1", "eval.every=1", "eval.generators=1"])
    buffer = Buffer(config, tmp_path / "0")
    buffer.join_generator("e", evaluates=True)

    def evaluate(version: int) -> None:
        lease = buffer.lease_next("e")
        assert lease is not None and lease.due == version
        answer = m.SubmitEvaluation(
            generator="e", lease=lease.id, rewards=[1.0], num_tokens=2, oldest_version=version,
            newest_version=version, digest=str(version),
        )  # fmt: skip
        assert buffer.submit_evaluation(answer) == "accepted"

    for step in range(3):
        train_steps(buffer, step, step + 1)
        evaluate(step)
    buffer.progress.rewind_to(1)  # the results of versions 1 and 2 are undone, and numbers 2 and 3 are gone
    for step in range(1, 3):
        train_steps(buffer, step, step + 1)
        if step == 1:
            evaluate(step)
    buffer.commit()
    expected = [(1, 0), (4, 1)]
    for life in range(3):  # from the log, then from a state of each life
        killed = copy_killed(buffer, tmp_path / str(life + 1))
        buffer.close()
        buffer = Buffer(config, killed)
        records = buffer.evaluations.records
        assert [(record.number, record.result.version) for record in records] == expected
        assert buffer.evaluations.num_records == 4
        assert buffer.evaluations.version_under_way == (2, "host#x#2#w2"), "its generator needs the weights"
    buffer.join_generator("e", evaluates=True)
    evaluate(2)
    assert [record.number for record in buffer.evaluations.records] == [1, 4, 5]
    buffer.close()


# ---- generators


def test_a_lease_that_no_heartbeat_names_in_the_next_life_is_free_before_it_expires(tmp_path: Path) -> None:
    now = [0.0]
    config = load_config([*LIFE_SETTINGS, "buffer.lease_s=1000"])
    buffer = Buffer(config, tmp_path / "0", clock=lambda: now[0])
    buffer.progress.publish_version(0, "w0")
    leases = [lease for _ in range(6) if (lease := buffer.lease_next("g")) is not None]
    assert len(leases) == 6 and buffer.count_openings() == 0
    buffer.commit()
    again = Buffer(config, copy_killed(buffer, tmp_path / "1"), clock=lambda: now[0])
    heard, lost = leases[:4], leases[4:]

    def beat(held: list[m.Lease], generator: str = "g") -> list[int]:
        progress = {lease.id: 5 for lease in held}
        report = GeneratorReport(version=0)
        return again.take_heartbeat(
            m.GeneratorHeartbeat(generator=generator, progress=progress, report=report)
        )

    beat(heard)  # composed before the grant of the others came
    beat([], "another")
    assert again.count_openings() == 0
    now[0] = 6.0
    beat(heard[:3])  # the fourth was handed in meanwhile, and is on its way
    assert again.count_openings() == 2
    given = [again.lease_next("other") for _ in range(2)]
    assert [lease and lease.group for lease in given] == [lease.group for lease in lost]
    assert submit_group(again, heard[3], 0) == "accepted"
    assert submit_group(again, lost[0], 0) == "accepted", "whoever is first"
    assert again.book.ledger.closes()
    assert not again.book.list_groups()[lost[1].group].num_failures, "nobody has failed"
    buffer.close()
    again.close()


# ---- its address


def test_a_port_is_kept_while_the_buffer_is_away_and_no_client_meets_itself_there(
    harness: Callable[..., BufferHarness], tmp_path: Path
) -> None:
    address, kept = reserve_port("tcp://127.0.0.1:0")
    assert kept is not None and not address.endswith(":0")
    port = int(address.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    with socket.socket() as client:
        client.settimeout(1.0)
        assert client.connect_ex(("127.0.0.1", port)), "nobody listens yet"
    config = load_config(SMALL_RUN)
    for _ in range(2):
        server = BufferServer(config, tmp_path / "journal", address=address)
        assert server.address == address
        with pytest.raises(ValueError, match=f"buffer.address must be free, got {address}: Address already"):
            BufferServer(config, tmp_path / "other", address=address)
        assert reserve_port(address)[1] is None, "another run is told so by its own buffer"
        server.close()
    kept.close()
    for strange in ("ipc:///tmp/x", "tcp://192.0.2.77:5555", "tcp://no-such-host.invalid:5555"):
        assert reserve_port(strange) == (strange, None)


def test_clients_go_on_when_a_server_is_started_again_at_its_address(tmp_path: Path) -> None:
    address, kept = reserve_port("tcp://127.0.0.1:0")
    config = load_config([*SMALL_RUN, f"buffer.address={address}"])
    first = BufferHarness(config, tmp_path / "journal")
    first.publish(0)
    leases = first.ask()
    waiting = first.client.send_request(m.RequestBatch(step=0, wait_s=60.0))
    time.sleep(0.1)
    first.server.stop()
    first.thread.join()
    second = BufferHarness(config, tmp_path / "journal")
    for lease in leases:
        assert second.submit(lease) == "accepted"
    answer = next(one for _ in range(300) for one in first.client.receive_answers(0.1))
    assert answer.number == waiting and isinstance(answer.reply, m.BatchOffer)
    first.client.close()
    second.close()
    assert kept is not None
    kept.close()
