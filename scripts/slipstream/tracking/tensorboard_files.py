"""TensorBoard's event files, written and read by the driver itself."""

import contextlib
import random
import struct
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from configs.disk import disk_full, is_disk_full
from slipstream.tracking.tracker import COLUMNS, SampleRow, list_cells

EVENT_BYTES = 1 << 16
"""Bytes that TensorBoard writes from one flush to the next, about."""

START_RECORDS = 2
"""Records at the beginning of a file: the version of the format, and the step from which on it voids."""
_FRAME = struct.Struct("<Qxxxx")

ACTIVE = frozenset("\\`*_[]#<>&|~")
"""Characters that Markdown or HTML would act on."""


class TensorBoardFiles:
    """The folder `tensorboard` of a run. Every method raises DiskFull where the disk is full."""

    def __init__(self, folder: Path, first_step: int, texts: Mapping[str, str]) -> None:
        """`texts` describe the run, by their tags, as Markdown."""
        self._folder, self._purge_step, self._texts = folder, first_step, texts
        self._writer: EventFileWriter | None = None

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Writes the table as Markdown, which TensorBoard shows under Text."""
        lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS))]
        lines += [" | ".join(map(_quote_cell, list_cells(sample))) for sample in samples]
        text = "\n".join(f"| {line} |" for line in lines)
        self._add_event(_make_text_event(step, {"samples": text}))

    def flush(self) -> None:
        if self._writer is not None:
            with self._name_full_disk():
                self._writer.flush()

    def rewind_to_step(self, step: int) -> None:
        """Voids the events of steps from `step` on: they are trained again."""
        self.close()
        self._purge_step = step

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._name_full_disk():
                writer.close()

    def _add_event(self, event: Event) -> None:
        if self._writer is None:
            with self._name_full_disk():
                self._writer = EventFileWriter(str(self._folder), flush_secs=10)
            # Readers drop the events that older files have of this step and later ones.
            start = SessionLog(status=SessionLog.START)
            begin = Event(wall_time=time.time(), step=self._purge_step, session_log=start)
            events = [begin, _make_text_event(self._purge_step, self._texts), event]
        else:
            events = [event]
        # An error of the writer's own thread is raised here.
        with self._name_full_disk():
            for one in events:
                self._writer.add_event(one)

    @contextlib.contextmanager
    def _name_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self._folder, EVENT_BYTES) from error
            raise


def read_scalars(folder: Path, tags: Collection[str], most: int) -> dict[str, dict[int, float]]:
    """Returns the values of these tags by step, from about `most` records of the files, drawn at random.

    Later files void the steps of earlier ones that they train again, as TensorBoard reads them. The library's
    own reader takes a millisecond a step to check sums in Python, and keeps every value of every tag.
    """
    found: dict[str, dict[int, float]] = {tag: {} for tag in tags}
    files = [(path, list_records(path)) for path in sorted(folder.glob("events.out.tfevents.*"))]
    share = most / max(1, sum(len(places) for _, places in files))
    chance = random.Random(0)
    for path, places in files:
        with open(path, "rb") as file:
            for number, at in enumerate(places):
                # The file's first records say what it voids.
                if number >= START_RECORDS and chance.random() > share:
                    continue
                file.seek(at)
                event = Event()
                with contextlib.suppress(DecodeError):
                    event.ParseFromString(file.read(_FRAME.unpack(file.read(_FRAME.size))[0]))
                if event.session_log.status == SessionLog.START:
                    for values in found.values():
                        for step in [step for step in values if step >= event.step]:
                            del values[step]
                for value in event.summary.value:
                    if value.tag in found:
                        found[value.tag][event.step] = value.simple_value
    return found


def list_records(path: Path) -> "array[int]":
    """Returns where each whole record of an event file begins: length, four bytes, data, four bytes."""
    places, at, end = array("Q"), 0, path.stat().st_size
    with open(path, "rb") as file:
        while at + _FRAME.size <= end:
            file.seek(at)
            after = at + _FRAME.size + _FRAME.unpack(file.read(_FRAME.size))[0] + 4
            if after > end:  # a crash has cut it short
                break
            places.append(at)
            at = after
    return places


def _make_text_event(step: int, texts: Mapping[str, str]) -> Event:
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensors = {
        tag: TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
        for tag, text in texts.items()
    }
    values = [Summary.Value(tag=tag, metadata=kind, tensor=tensor) for tag, tensor in tensors.items()]
    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _quote_cell(cell: str | float | int) -> str:
    """Returns the text of a cell, in one line, with nothing that Markdown or HTML would act on."""
    text = f"{cell:g}" if isinstance(cell, float) else str(cell)
    quoted = "".join(f"&#{ord(one)};" if one in ACTIVE else one for one in text)
    return quoted.replace("\r", "").replace("\n", "<br>")
