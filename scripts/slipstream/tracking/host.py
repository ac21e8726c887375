"""The process of a tracker: it takes orders from the driver, one after the other, and answers each."""

import contextlib
import fcntl
import os
import socket
import traceback
from typing import Any

import msgspec

from configs.plugins import call_plugin, find_plugin
from slipstream.check import describe_machine
from slipstream.tracking.orders import (
    AnyOrder,
    CloseRun,
    LogMetrics,
    LogSamples,
    OpenRun,
    OrderFailed,
    OrderTaken,
    receive_order,
    send_message,
)
from slipstream.tracking.tracker import OpenedRun

MAX_ERROR = 1000
"""Characters of an error that the driver is told."""
METHODS = ("open", "log_metrics", "log_samples", "close")
BUILT_IN = {
    "wandb": "slipstream.tracking.wandb_run:WandbRun",
    "mlflow": "slipstream.tracking.mlflow_run:MlflowRun",
    "trackio": "slipstream.tracking.trackio_run:TrackioRun",
}


class TrackerLedger:
    """The file that says what a tracker was given, over all lives of a run: a line for the run's id, and one
    for each record.

    A record is noted before the tracker is given it, so it is never given twice; one that was under way when
    a process died may be lost. The process that has the ledger open is the only one that serves the run.
    """

    def __init__(self, path: str) -> None:
        """Waits until the process of an earlier life has closed the run."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.id: str | None = None
        self.num_records = 0
        self._newest = {"metrics": -1, "samples": -1}
        """Newest step by kind of record. Older steps do not come again unless they are trained again."""
        self._evaluations: set[tuple[int, str]] = set()
        with open(path, "rb") as file:
            lines = file.read().splitlines()
        for line in lines:
            # A line that was cut short counts for nothing.
            with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError):
                self._take_line(msgspec.json.decode(line))
        if lines:
            os.write(self._file, b"\n")

    def _take_line(self, line: dict[str, Any]) -> None:
        if "id" in line:
            self.id = line["id"]
        elif "evaluation" in line:
            self._evaluations.add((line["step"], line["evaluation"]))
            self.num_records += 1
        else:
            self._newest[line["kind"]] = max(line["step"], self._newest[line["kind"]])
            self.num_records += 1

    def note_id(self, id: str) -> None:
        if id != self.id:
            self._append({"id": id})

    def note_record(self, order: LogMetrics | LogSamples) -> bool:
        """Returns False for a record that is noted already."""
        line: dict[str, Any]
        if isinstance(order, LogMetrics) and order.is_evaluation:
            line = {"step": order.step, "evaluation": min(order.metrics, default="")}
            is_new = (line["step"], line["evaluation"]) not in self._evaluations
        else:
            line = {"step": order.step, "kind": "metrics" if isinstance(order, LogMetrics) else "samples"}
            is_new = order.step > self._newest[line["kind"]]
        if is_new:
            self._append(line)
        return is_new

    def _append(self, line: dict[str, Any]) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        self._take_line(line)


def run_host(link: int) -> None:
    """Serves the driver until the run is closed. The status is `killed` when the driver has died."""
    connection = socket.socket(fileno=link)
    connection.set_inheritable(False)
    host = TrackerHost()
    while (order := receive_order(connection)) is not None:
        try:
            answer: OrderTaken | OrderFailed = host.obey_order(order)
        # The tracker's code may raise anything, `SystemExit` too.
        except BaseException as error:
            traceback.print_exc()
            answer = OrderFailed(error=f"{type(error).__name__}: {error}"[:MAX_ERROR])
        try:
            send_message(connection, answer)
        except ConnectionError:
            break
        if isinstance(answer, OrderFailed) or isinstance(order, CloseRun):
            return
    host.obey_order(CloseRun(status="killed", summary={}, files=[]))


class TrackerHost:
    """One tracker, and the ledger of what it was given."""

    def __init__(self) -> None:
        self._tracker: Any = None
        self._ledger: TrackerLedger | None = None

    def obey_order(self, order: AnyOrder) -> OrderTaken:
        """Raises whatever the tracker raises."""
        match order:
            case OpenRun():
                return OrderTaken(place=self._open_run(order))
            case CloseRun():
                if self._ledger is not None:
                    self._tracker.close(order.status, order.summary, order.files)
            case LogMetrics() | LogSamples():
                assert self._ledger is not None, "the run is opened first"
                if not self._ledger.note_record(order):
                    return OrderTaken(was_known=True)
                if isinstance(order, LogMetrics):
                    self._tracker.log_metrics(order.step, order.metrics)
                else:
                    self._tracker.log_samples(order.step, order.samples)
        return OrderTaken()

    def _open_run(self, order: OpenRun) -> str:
        """Returns where the user finds the run."""
        tracker_class = find_plugin(order.target, BUILT_IN, "tracking.trackers")
        self._tracker = call_plugin(tracker_class, order.target, order.args, "tracking.args")
        for method in METHODS:
            if not callable(getattr(self._tracker, method, None)):
                raise ValueError(
                    f"tracking.trackers must name a class with the methods {', '.join(METHODS)}, got "
                    f"{order.target!r} without {method}"
                )
        if not order.ledger:  # the class was only to be tried
            return ""
        ledger = TrackerLedger(order.ledger)
        run = order.run
        run.machine, run.id, run.num_records = describe_machine(), ledger.id, ledger.num_records
        opened = self._tracker.open(run)
        self._ledger = ledger
        if not isinstance(opened, OpenedRun):
            return ""
        ledger.note_id(opened.id)
        return opened.place
