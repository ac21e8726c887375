"""The files of a run on a host that joins it: the small files of its model, and its rows.

What the host lacks comes from the buffer, by digest, into the caches of this host:

    ~/.cache/slipstream/models/<digest>/         the model's configuration, tokenizer and chat templates
    ~/.cache/slipstream/data/rows-…, kept-…      the rows (generators/data/cache.py)

A folder appears there whole or not at all, once for all processes of the host. Weights come as published
versions, and code does not travel.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from buffers import messages as m
from buffers.client import Answer, BufferClient, BufferGone
from buffers.parcel_messages import MAX_FILE_PART_BYTES, Parcel, ParcelFile
from buffers.parcels import MODEL, describe_files, digest_bytes, digest_parcel
from buffers.role_registry import FETCHING_MODEL, FETCHING_ROWS
from configs.disk import disk_full, find_cache
from configs.generators import EngineKind
from configs.parallel import LoraPublish
from configs.schema import Config
from generators.data import cache
from generators.data.run_data import name_folders
from sync.model_files import is_model_file, list_model_files
from sync.transports.puller import ChunkPace

POLL_S = 0.1
MAX_WINDOW = 4
"""Parts that are asked for and have not come: the buffer holds so many of each host that joins."""
KEEP_S = 60 * 86400.0
"""Seconds for which a fetched model is kept after its last use."""
Say = Callable[[str, bool], None]
"""Called with what this host does, and whether it gets on with it."""


class ParcelChanged(ValueError):
    """Raised for a file of the buffer's host that is not what its list says."""


def bring_files(config: Config, client: BufferClient, say: Say) -> None:
    """Fetches what the run reads from files and this host lacks. `model.path` then names the folder that
    this host has.

    Raises ValueError for files that cannot be had here, BufferGone when the buffer is silent.
    """
    own = Path(config.model.path)

    def bring(parcels: Mapping[str, Parcel]) -> None:
        if MODEL in parcels:
            config.model.path = str(_bring_model(config, own, parcels[MODEL], client, say))
        _bring_rows(config, parcels, client, say)

    _follow_list(client, bring)


def bring_model(config: Config, client: BufferClient, say: Say) -> None:
    """Fetches the small files of the model alone, in the same way, for a rank of the learner."""
    own = Path(config.model.path)

    def bring(parcels: Mapping[str, Parcel]) -> None:
        if MODEL in parcels:
            folder = _bring_model(config, own, parcels[MODEL], client, say, generates=False)
            config.model.path = str(folder)

    _follow_list(client, bring)


def _follow_list(client: BufferClient, bring: Callable[[Mapping[str, Parcel]], None]) -> None:
    """Brings the parcels of the run, and begins anew where the run is resumed meanwhile and has packed other
    files."""
    parcels = _list_parcels(client)
    while True:
        try:
            return bring(parcels)
        except ParcelChanged:
            before, parcels = parcels, _list_parcels(client)
            if parcels == before:
                raise


def _list_parcels(client: BufferClient) -> dict[str, Parcel]:
    return {one.name: one for one in client.call(m.ListParcels(), m.ParcelList).parcels}


def _bring_model(
    config: Config, own: Path, parcel: Parcel, client: BufferClient, say: Say, *, generates: bool = True
) -> Path:
    """Returns the folder of this host with the run's model: `own`, the run's path, where it holds the same.

    `generates`: an engine of this host will generate. A rank of the learner merges nothing into the model.
    """
    with contextlib.suppress(OSError):  # another user's folder, perhaps
        if describe_files(own, list_model_files(own)) == parcel.files:
            return own
    if generates:
        _check_base_model(config, own)
    for file in parcel.files:
        if not is_model_file(file.name):
            raise ValueError(f"a model's parcel must hold small files of a model alone, got {file.name!r}")
    folder = find_cache("models") / digest_parcel(parcel.files)
    with contextlib.suppress(OSError):
        os.utime(folder)  # it is used
    _remove_unused_models(folder.parent)
    fetch = ParcelFetch(client, FETCHING_MODEL, parcel.files, say, config.buffer.reconnect_s)
    cache.fill_folder(
        folder,
        lambda: describe_files(folder, list_model_files(folder)) == parcel.files,
        lambda unfinished: fetch.fetch_parcel(parcel, unfinished),
        fetch.wait_for_other,
    )
    if config.generators.engine is not EngineKind.simulated:
        _check_code(folder, own)
    return folder


def _remove_unused_models(models: Path) -> None:
    """Removes models that no run has used for `KEEP_S`. A generator reads its own only while it starts."""
    for folder in models.glob("[0-9a-f]" * 32):
        with contextlib.suppress(OSError):  # another generator removes it too, or it is another user's
            if time.time() - folder.stat().st_mtime > KEEP_S:
                shutil.rmtree(folder)


def _check_base_model(config: Config, own: Path) -> None:
    """Raises ValueError where versions hold adapters alone, and the model to merge them into is not here."""
    lora = config.learner.lora
    if lora.rank is not None and lora.publish is LoraPublish.adapter and not any(own.glob("*.safetensors")):
        raise ValueError(
            f"model.path must be on every host that generates with learner.lora.publish=adapter (`merged` "
            f"needs no base model there), got no weights in {own} on {os.uname().nodename}"
        )


def _check_code(folder: Path, own: Path) -> None:
    """Raises ValueError for a model that this host's transformers knows by code of its folder only."""
    told = json.loads((folder / "config.json").read_text())
    if "auto_map" not in told:
        return
    from transformers import CONFIG_MAPPING

    if told.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"model.path must be a model that the transformers of {os.uname().nodename} knows without code "
            f"from its folder (code does not travel), got {own} with model_type={told.get('model_type')} and "
            f"auto_map={told['auto_map']}"
        )


def _bring_rows(config: Config, parcels: Mapping[str, Parcel], client: BufferClient, say: Say) -> None:
    """Fills the cache of this host with the folders that it lacks."""
    names = name_folders(config)
    lacking = [name for name in names if cache.read_meta(cache.find_cache() / name) is None]
    if lost := [name for name in lacking if name not in parcels]:
        raise ValueError(
            f"the rows of the run must be in the cache of the buffer's host or of this one, got no {lost[0]} "
            f"in {cache.find_cache()} (the run prepares them anew when it is resumed)"
        )
    for name in lacking:
        cache.check_names(name, [file.name for file in parcels[name].files])
    files = [file for name in lacking for file in parcels[name].files]
    fetch = ParcelFetch(client, FETCHING_ROWS, files, say, config.buffer.reconnect_s)
    for name in lacking:

        def fetch_rows(folder: Path, parcel: Parcel = parcels[name]) -> dict[str, Any]:
            fetch.fetch_parcel(parcel, folder)
            return cache.take_meta(folder)

        cache.make_folder(name, fetch_rows, fetch.wait_for_other)


class ParcelFetch:
    """Fetches parcels, and says how far it has come."""

    def __init__(
        self, client: BufferClient, activity: str, files: Iterable[ParcelFile], say: Say, patience_s: float
    ) -> None:
        """`files`: all that may have to be fetched. `patience_s`: seconds without a byte after which the
        buffer counts as gone."""
        self._client, self._activity, self._say, self._patience_s = client, activity, say, patience_s
        self._num_bytes, self._total = 0, sum(file.size for file in files)
        self._pace = ChunkPace()

    def wait_for_other(self) -> None:
        """Waits a moment for another process of this host, which fetches the same."""
        self._say(f"{self._activity}: another process of this host does", False)
        cache.wait_a_moment()

    def fetch_parcel(self, parcel: Parcel, folder: Path) -> None:
        """Fetches all files of a parcel into an empty folder.

        Raises ParcelChanged, DiskFull, and BufferGone.
        """
        needed = sum(file.size for file in parcel.files)
        if needed > shutil.disk_usage(folder).free:
            raise disk_full(folder, needed)
        for number, file in enumerate(parcel.files):
            path = folder / file.name
            path.parent.mkdir(exist_ok=True)
            with open(path, "wb") as opened:
                self._fetch_file(parcel, number, opened)
                opened.flush()
                os.fsync(opened.fileno())
            if digest_bytes(path) != file.digest:
                raise ParcelChanged(
                    f"{file.name} of {parcel.name} must have the bytes with which the run was started"
                    ", got others from the buffer's host"
                )

    def _fetch_file(self, parcel: Parcel, number: int, opened: BinaryIO) -> None:
        """Asks for one part after the other, a few at a time, as large as the link bears."""
        size = parcel.files[number].size
        asked: dict[int, m.ReadParcelPart] = {}
        begin, arrived_at = 0, time.monotonic()
        self._say_share()
        while asked or begin < size:
            while begin < size and len(asked) < min(self._pace.window, MAX_WINDOW):
                part_bytes = min(self._pace.chunk_bytes, MAX_FILE_PART_BYTES, size - begin)
                part = m.ReadParcelPart(parcel=parcel.name, file=number, offset=begin, size=part_bytes)
                asked[self._client.send_request(part)] = part
                begin += part_bytes
            for answer in self._client.receive_answers(POLL_S):
                if answer.number not in asked:
                    continue
                part = asked.pop(answer.number)
                opened.seek(part.offset)
                opened.write(_read_part(answer, part))
                self._num_bytes += part.size
                self._say_share()
                if part.offset + part.size < size:  # the last bytes of a file come quickly over any link
                    self._pace.note_chunk(time.monotonic() - arrived_at)
                arrived_at = time.monotonic()
            if time.monotonic() - arrived_at > self._patience_s:
                raise BufferGone(
                    f"no part of {parcel.files[number].name} from the buffer at {self._client.address} in "
                    f"{self._patience_s:.0f} s"
                )

    def _say_share(self) -> None:
        self._say(f"{self._activity}: {100 * self._num_bytes // max(1, self._total)} %", True)


def _read_part(answer: Answer, part: m.ReadParcelPart) -> memoryview:
    """Returns the bytes of a part. Raises ParcelChanged where the buffer has them not."""
    if isinstance(answer.reply, m.RefusedRequest):
        raise ParcelChanged(answer.reply.reason)
    data = answer.payload[0] if answer.payload else memoryview(b"")
    if len(data) != part.size:
        raise ParcelChanged(
            f"file {part.file} of {part.parcel} must be as long as when the run began or was resumed, got "
            f"{len(data)} bytes in the place of {part.size} at {part.offset:,}"
        )
    return data
