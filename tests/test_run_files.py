"""A host that joins a run gets what it lacks: the model's small files and the rows, whole or not at all."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

import pytest
from buffer_harness import SMALL_RUN
from dataset_rows import write_lines
from hypothesis import given
from hypothesis import strategies as st

from buffers import messages as m
from buffers.client import BufferClient, RefusedByBuffer
from buffers.parcel_messages import MAX_FILE_PART_BYTES, Parcel, ParcelFile
from buffers.parcels import PARCELS, PackedParcels, digest_parcel
from buffers.role_registry import RoleRegistry
from buffers.run_status import GeneratorReport
from buffers.server import BufferServer
from configs.disk import DiskFull
from configs.eval import EvalSetConfig
from configs.load import load_config, parse_config, to_yaml
from configs.parallel import LoraPublish
from configs.schema import Config
from generators import run_files
from generators.data import cache
from generators.data.cache import find_cache, read_meta
from generators.data.prepare import prepare_data
from generators.task_episodes import refuse_missing_code
from generators.tasks import load_task
from generators.user_code.errors import TaskRefused
from slipstream.generator_fleet import GeneratorFleet
from slipstream.packing import pack_parcels
from slipstream.stop_signals import StopSignals
from sync.model_files import is_model_file, list_model_files

SMALL_FILES = {
    "config.json": b'{"model_type": "qwen3", "vocab_size": 300}',
    "generation_config.json": b"{}",
    "tokenizer.json": os.urandom(3 * MAX_FILE_PART_BYTES + 5),
    "merges.txt": b"a b\n",
    "tokenizer.model": b"\x00\xff",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "special_tokens_map.json": b"",
}
NEVER_SENT = {
    "model.safetensors": b"weights",
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"weights",
    "modeling_own.py": b"raise SystemExit",
    "trainer_state.json": b"{}",
    ".hidden.json": b"{}",
}
PULL = """
import sys
from buffers.client import BufferClient
from configs.load import parse_config
from generators import run_files
run_files.MAX_FILE_PART_BYTES = 4096
config = parse_config(open(sys.argv[1]).read())
run_files.bring_files(config, BufferClient(sys.argv[2]), lambda what, moved: print(what, flush=True))
"""


class JoinedHost:
    """A run's buffer on a socket, and the cache of another host, which lacks the files of the run."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        folder.mkdir(parents=True, exist_ok=True)
        pack_parcels(config, folder)
        self.server = BufferServer(config, folder / "journal", parcels=folder / PARCELS)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.client = BufferClient(self.server.address, timeout_s=30.0)
        self.said: list[tuple[str, bool]] = []
        self.parts: list[m.ReadParcelPart] = []
        parcels = self.server._immediate_answers._parcels
        read_part = parcels.read_part
        self.before_part: Callable[[], None] = lambda: None

        def note_part(request: m.ReadParcelPart) -> bytes:
            self.parts.append(request)
            self.before_part()
            return read_part(request)

        parcels.read_part = note_part  # type: ignore[method-assign]

    def bring(self, bring: Callable[..., None] = run_files.bring_files) -> Config:
        """Returns the configuration as the joining host has it."""
        own = parse_config(to_yaml(self.config))
        client = self.client.open_another()
        try:
            bring(own, client, lambda what, moved: self.said.append((what, moved)))
        finally:
            client.close()
        return own

    def close(self) -> None:
        self.client.close()
        self.server.stop()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def list_visible(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if not one.name.endswith(".lock"))


@pytest.fixture
def hosts() -> Iterator[list[JoinedHost]]:
    made: list[JoinedHost] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[JoinedHost]) -> JoinedHost:
    """A host that lacks the model."""
    model = write_files(tmp_path / "model", SMALL_FILES | NEVER_SENT)
    hosts.append(JoinedHost(load_config([*SMALL_RUN, f"model.path={model}"]), tmp_path / "run"))
    shutil.move(model, tmp_path / "gone")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    return hosts[0]


@pytest.fixture
def with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[JoinedHost]) -> JoinedHost:
    """A host that lacks the rows."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + 1, "more": "x" * 500} for i in range(4000)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    config = load_config([*SMALL_RUN, "task=dataset", "reward.function=math", f"data.train={file}"])
    config.data.prepared = prepare_data(asdict(config.data))
    questions = write_lines(tmp_path / "set.jsonl", [{"prompt": f"And {i}?", "answer": i} for i in range(9)])
    exam = config.eval.sets["exam"] = EvalSetConfig(data=questions)
    exam.prepared = prepare_data(asdict(config.for_evaluation(exam).data))
    config.model.path = "simulated"
    hosts.append(JoinedHost(config, tmp_path / "run"))
    for path in (file, questions):
        Path(path).unlink()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    return hosts[0]


# ---- the model


def test_a_host_without_the_model_gets_its_small_files_and_neither_weights_nor_code(
    joined: JoinedHost, tmp_path: Path
) -> None:
    folder = Path(joined.bring().model.path)
    assert folder.parent == tmp_path / "other" / "models" and len(folder.name) == 32
    assert read_files(folder) == SMALL_FILES
    assert joined.said[0] == ("fetching the model's files: 0 %", True)
    assert joined.said[-1] == ("fetching the model's files: 100 %", True)
    # Once a host.
    num_parts = len(joined.parts)
    assert Path(joined.bring().model.path) == folder and len(joined.parts) == num_parts
    assert list_visible(folder.parent) == [folder.name]


def test_a_host_with_the_same_model_uses_its_own_folder_and_fetches_nothing(
    joined: JoinedHost, tmp_path: Path
) -> None:
    own = write_files(Path(joined.config.model.path), SMALL_FILES | {"model.safetensors": b"other weights"})
    assert joined.bring().model.path == str(own)
    assert not joined.parts and not joined.said and not (tmp_path / "other").exists()
    # A template more, and a host would make other prompts of the same messages.
    (own / "additional_chat_templates" / "rag.jinja").write_bytes(b"{{ documents }}")
    assert joined.bring().model.path != str(own)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "more"])
def test_a_copy_that_is_damaged_on_the_host_is_fetched_anew(joined: JoinedHost, damage: str) -> None:
    folder = Path(joined.bring().model.path)
    tokenizer = folder / "tokenizer.json"
    if damage == "cut":
        os.truncate(tokenizer, 7)
    elif damage == "flipped":
        data = bytearray(tokenizer.read_bytes())
        data[-1] ^= 1
        tokenizer.write_bytes(data)
    elif damage == "gone":
        tokenizer.unlink()
    else:
        (folder / "added_tokens.json").write_text("{}")
    assert Path(joined.bring().model.path) == folder and read_files(folder) == SMALL_FILES


def test_generators_of_one_host_fetch_once(joined: JoinedHost) -> None:
    joined.before_part = lambda: time.sleep(0.02)  # so that all of them have begun
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(joined.bring().model.path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 4 and len(set(found)) == 1 and read_files(Path(found[0])) == SMALL_FILES
    assert len({(one.file, one.offset) for one in joined.parts}) == len(joined.parts)
    assert ("fetching the model's files: another process of this host does", False) in joined.said


def test_a_host_that_is_killed_while_it_fetches_leaves_nothing_that_the_next_would_believe(
    joined: JoinedHost, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(joined.config))
    joined.before_part = lambda: time.sleep(0.005)
    puller = subprocess.Popen(
        [sys.executable, "-c", PULL, str(tmp_path / "config.yaml"), joined.server.address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in puller.stdout:
        if "20 %" in line:
            break
    puller.send_signal(signal.SIGKILL)
    puller.wait()
    models = tmp_path / "other" / "models"
    (unfinished,) = list_visible(models)
    assert unfinished.endswith(".unfinished") and (models / unfinished / "tokenizer.json").stat().st_size
    joined.before_part = lambda: None
    folder = Path(joined.bring().model.path)
    assert read_files(folder) == SMALL_FILES and list_visible(models) == [folder.name]


def test_files_that_a_resumed_run_packs_anew_while_a_host_fetches_them_are_fetched_anew(
    joined: JoinedHost, tmp_path: Path
) -> None:
    """The buffer is another one then, at the same address."""

    def resume() -> None:
        joined.before_part = lambda: None
        write_files(Path(joined.config.model.path), SMALL_FILES | {"merges.txt": b"a c\n", "new.json": b"[]"})
        pack_parcels(joined.config, joined.folder)
        shutil.rmtree(joined.config.model.path)
        packed = PackedParcels(joined.folder / PARCELS)
        joined.server._immediate_answers._parcels._packed = packed._packed

    joined.before_part = resume
    folder = Path(joined.bring().model.path)
    assert read_files(folder) == SMALL_FILES | {"merges.txt": b"a c\n", "new.json": b"[]"}
    assert list_visible(folder.parent) == [folder.name]


def test_models_that_no_run_has_used_for_weeks_are_removed(joined: JoinedHost, tmp_path: Path) -> None:
    folder = Path(joined.bring().model.path)
    names = {"old": "0" * 32, "young": "1" * 32, "foreign": "notes"}
    old, young, foreign = (write_files(folder.parent / name, {"a": b""}) for name in names.values())
    long_ago = time.time() - 61 * 86400
    for one in (old, foreign, folder):
        os.utime(one, (long_ago, long_ago))
    num_parts = len(joined.parts)
    joined.bring()
    assert not old.exists() and young.exists() and foreign.exists()
    assert folder.exists() and len(joined.parts) == num_parts, "this run uses it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    os.chmod(base, 0o1777)
    folder = base / "models" / "abc"
    folder.parent.mkdir()
    os.chmod(folder.parent, 0o1777)

    def write(unfinished: Path) -> None:
        (unfinished / "file").write_bytes(b"")
        if os.geteuid() == 12345:
            os._exit(7)  # as if it were killed

    try:
        child = os.fork()
        if not child:
            try:
                os.seteuid(12345)
                cache.fill_folder(folder, lambda: False, write)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os.seteuid(12346)
        cache.fill_folder(folder, lambda: False, write)
        os.seteuid(0)
        assert (folder / "file").exists() and folder.with_name(".abc.12345.unfinished").exists()
        lock = folder.with_name(".abc.lock")
        os.chmod(lock, 0o600)  # as an earlier version made it
        os.seteuid(12346)
        with pytest.raises(ValueError, match=f"SLIPSTREAM_CACHE must name a folder .*{base}.*Permission"):
            cache.fill_folder(folder, lambda: False, write)
    finally:
        os.seteuid(0)
        shutil.rmtree(base)


def test_a_file_that_changes_on_the_buffers_host_is_named_and_leaves_nothing(
    joined: JoinedHost, tmp_path: Path
) -> None:
    file = joined.folder / "model" / "merges.txt"
    file.write_bytes(b"a c\n")
    with pytest.raises(ValueError, match=r"merges\.txt of model must have the bytes with which the run was"):
        joined.bring()
    file.write_bytes(b"a")
    with pytest.raises(ValueError, match="file .* of model must be as long as .*, got 1 bytes in the place"):
        joined.bring()
    file.unlink()
    with pytest.raises(ValueError, match=r"merges\.txt must be on the buffer's host for as long as the run"):
        joined.bring()
    assert list_visible(tmp_path / "other" / "models") == []
    file.write_bytes(SMALL_FILES["merges.txt"])
    assert read_files(Path(joined.bring().model.path)) == SMALL_FILES


def test_a_model_that_needs_code_and_a_base_model_that_is_not_here_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[JoinedHost]
) -> None:
    told = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    model = write_files(tmp_path / "model", {"config.json": json.dumps(told).encode()})
    config = load_config([*SMALL_RUN, f"model.path={model}"])
    hosts.append(JoinedHost(config, tmp_path / "run"))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    assert hosts[0].bring().model.path == str(model)  # where the folder is, transformers decides
    shutil.rmtree(model)
    with pytest.raises(ValueError, match=r"model\.path must be a model .* without code .*, got .*=own "):
        hosts[0].bring()
    config.learner.lora = replace(config.learner.lora, rank=8, publish=LoraPublish.adapter)
    with pytest.raises(ValueError, match=r"model\.path must be on every host .*=adapter .*, got no weights"):
        hosts[0].bring()


def test_a_rank_of_the_learner_gets_the_small_files_of_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[JoinedHost]
) -> None:
    model = write_files(tmp_path / "model", SMALL_FILES | NEVER_SENT)
    config = load_config([*SMALL_RUN, f"model.path={model}"])
    config.learner.lora = replace(config.learner.lora, rank=8, publish=LoraPublish.adapter)
    hosts.append(JoinedHost(config, tmp_path / "run"))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    assert hosts[0].bring(run_files.bring_model).model.path == str(model)
    shutil.rmtree(model)
    brought = Path(hosts[0].bring(run_files.bring_model).model.path)
    assert read_files(brought) == SMALL_FILES
    assert list_visible(tmp_path / "other") == ["models"], "it needs no rows"


def test_known_models_whose_configuration_names_code_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[JoinedHost]
) -> None:
    told = {"model_type": "qwen3", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    model = write_files(tmp_path / "model", {"config.json": json.dumps(told).encode()})
    hosts.append(JoinedHost(load_config([*SMALL_RUN, f"model.path={model}"]), tmp_path / "run"))
    shutil.rmtree(model)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "other"))
    assert Path(hosts[0].bring().model.path).parent == tmp_path / "other" / "models"


# ---- what the run keeps


def test_a_resumed_run_keeps_the_files_of_its_model_and_takes_a_change_of_them(tmp_path: Path) -> None:
    model, run = write_files(tmp_path / "model", SMALL_FILES | NEVER_SENT), tmp_path / "run"
    run.mkdir()
    config = load_config([*SMALL_RUN, f"model.path={model}"])

    def pack() -> tuple[dict[str, bytes], str]:
        pack_parcels(config, run)
        (parcel,) = PackedParcels(run / PARCELS).list_parcels()
        return read_files(run / "model"), digest_parcel(parcel.files)

    files, digest = pack()
    assert files == SMALL_FILES
    (run / "model" / "merges.txt").write_bytes(b"damaged")
    (run / "model.unfinished").mkdir()  # left by a driver that was killed
    assert pack() == (SMALL_FILES, digest) and not (run / "model.unfinished").exists()
    (model / "merges.txt").write_bytes(b"another")
    files, other = pack()
    assert files == SMALL_FILES | {"merges.txt": b"another"} and other != digest
    shutil.rmtree(model)
    assert pack() == (files, other)
    shutil.move(run, tmp_path / "moved")
    parcels = PackedParcels(tmp_path / "moved" / PARCELS)
    assert parcels.read_part(m.ReadParcelPart(parcel="model", file=0, offset=0, size=9)) == b"{{ tools "


@given(st.text() | st.from_regex(r"\A[./a-z]{0,20}\.(json|txt|jinja|py|model)\Z"))
def test_a_name_of_a_models_file_stays_in_its_folder_and_is_no_code(name: str) -> None:
    if is_model_file(name):
        path = PurePosixPath(name)
        assert not path.is_absolute() and ".." not in path.parts and not path.name.startswith(".")
        assert path.suffix not in (".py", ".so", ".pkl", ".bin", ".safetensors", ".pt", ".pth")
        assert len(path.parts) == 1 or path.parts[:-1] == ("additional_chat_templates",)


def test_large_files_beside_a_model_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, SMALL_FILES)
    with open(tmp_path / "records.json", "wb") as file:
        file.truncate((64 << 20) + 1)
    assert list_model_files(tmp_path) == sorted(SMALL_FILES)


# ---- the rows


def test_a_host_without_the_rows_fetches_what_the_run_has_prepared(with_rows: JoinedHost) -> None:
    config = with_rows.bring()
    task = load_task("dataset", config.task_arguments)
    assert task.make_prompt("train", 0, 0).text.startswith("What is ") and task.num_prompts > 3000
    by_set = config.for_evaluation(config.eval.sets["exam"])
    assert load_task("dataset", by_set.task_arguments).make_prompt("eval", 8, 0).text == "And 8?"
    shares = [what for what, moved in with_rows.said if moved]
    assert shares[0] == "fetching rows: 0 %" and shares[-1] == "fetching rows: 100 %"
    assert len(set(shares)) > 3, "progress is seen on the way"
    num_parts = len(with_rows.parts)
    with_rows.bring()
    assert len(with_rows.parts) == num_parts
    # What another run of this host prepares of the same rows is what was fetched.
    for record in config.data.prepared:
        meta = read_meta(find_cache() / record["kept"])
        assert meta == {key: record[key] for key in meta} and meta["digest"] == record["digest"]


def test_rows_that_nobody_has_any_more_are_named(with_rows: JoinedHost, tmp_path: Path) -> None:
    store = with_rows.config.data.prepared[0]["store"]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match=rf"{store}/offsets\.u64 must be on the buffer's host"):
        with_rows.bring()
    pack_parcels(with_rows.config, with_rows.folder)
    assert not PackedParcels(with_rows.folder / PARCELS).list_parcels()
    with_rows.config.data.prepared[0]["store"] = f"rows-{'0' * 32}"
    with pytest.raises(ValueError, match=r"the rows of the run must be in the cache .*, got no rows-0000"):
        with_rows.bring()


def test_rows_of_an_earlier_cache_which_has_no_digests_travel_too(
    with_rows: JoinedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    listed = (with_rows.folder / PARCELS).read_bytes()
    for meta in find_cache().glob("*/meta.json"):
        told = json.loads(meta.read_bytes())
        del told["digests"]
        meta.write_text(json.dumps(told))
    for _ in range(2):
        pack_parcels(with_rows.config, with_rows.folder)
        assert json.loads((with_rows.folder / PARCELS).read_bytes()) == json.loads(listed)


# ---- what a buffer and a host refuse


@pytest.mark.parametrize(
    "wanted",
    [
        m.ReadParcelPart(parcel="model", file=99, offset=0, size=1),
        m.ReadParcelPart(parcel="../model", file=0, offset=0, size=1),
        m.ReadParcelPart(parcel="model", file=0, offset=0, size=MAX_FILE_PART_BYTES + 1),
        m.ReadParcelPart(parcel="model", file=-1, offset=0, size=1),
        m.ReadParcelPart(parcel="model", file=0, offset=-1, size=1),
    ],
)
def test_a_buffer_reads_the_files_of_its_list_alone(joined: JoinedHost, wanted: m.ReadParcelPart) -> None:
    with pytest.raises(RefusedByBuffer):
        joined.client.exchange(wanted)
    reply, payload = joined.client.exchange(m.ReadParcelPart(parcel="model", file=0, offset=2**40, size=9))
    assert isinstance(reply, m.ParcelPart) and [bytes(one) for one in payload] == [b""]


class ForgingBuffer:
    """A buffer that lists whatever it likes."""

    def __init__(self, *parcels: Parcel) -> None:
        self._parcels = list(parcels)

    def call(self, *_: object) -> m.ParcelList:
        return m.ParcelList(parcels=self._parcels)


@pytest.mark.parametrize("name", ["../config.json", "/etc/config.json", "a/b.json", "x.py", "m.bin", ""])
def test_a_host_writes_no_file_of_another_kind_or_place(name: str, tmp_path: Path) -> None:
    file = ParcelFile(name=name, size=1, digest="0")
    model = ForgingBuffer(Parcel(name="model", files=[file]))
    with pytest.raises(ValueError, match="a model's parcel must hold small files of a model alone, got"):
        run_files.bring_files(load_config(SMALL_RUN), model, lambda *_: None)  # type: ignore[arg-type]
    config = load_config([*SMALL_RUN, "task=dataset", "reward.function=math", "data.train=rows"])
    for folder in (f"rows-{'0' * 32}", name or "rows"):
        config.data.prepared = [{"store": folder, "kept": folder}]
        rows = ForgingBuffer(Parcel(name=folder, files=[file]))
        with pytest.raises(ValueError, match="a parcel of rows must be a folder of the cache of rows, got"):
            run_files.bring_files(config, rows, lambda *_: None)  # type: ignore[arg-type]


def test_a_generator_that_fetches_is_at_work_and_not_ready() -> None:
    registry = RoleRegistry(num_expected=1)
    registry.begin_life("g", now=0.0)

    def beat(activity: str, now: float, standstill_s: float) -> None:
        beats = {"activity": activity, "activity_s": standstill_s, "standstill_s": standstill_s}
        registry.note_generator(
            m.GeneratorHeartbeat(generator="g", progress={}, report=GeneratorReport(), **beats), now
        )

    beat("fetching rows: 40 %", 100.0, 0.1)
    assert registry.describe_starts(100.0) == "0 of 1 generators ready, 1 fetching files of the run"
    assert registry.is_at_work(100.0, stalled_s=30.0)
    beat("fetching rows: 40 %", 200.0, 50.0)
    assert not registry.is_at_work(200.0, stalled_s=30.0), "no bytes for long are no progress"
    beat("waiting for leases", 201.0, 0.0)
    assert registry.describe_starts(201.0) == ""


def test_code_that_a_host_lacks_is_named_with_the_reason() -> None:
    missing = TaskRefused("reward.function must name a function, got x: there is no file a.py")
    with pytest.raises(ValueError, match=rf"{missing}, on {os.uname().nodename} \(code does not travel: "):
        refuse_missing_code(missing)
    other = TaskRefused("task.args must have either name or datasets, got none")
    refuse_missing_code(other)


def test_a_disk_without_room_is_named_and_left_clean(joined: JoinedHost, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_PART_BYTES, before[1]))
    try:
        with pytest.raises(DiskFull, match=r"the disk of .*/models/.* must have room for"):
            joined.bring()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list_visible(tmp_path / "other" / "models") == []
    assert read_files(Path(joined.bring().model.path)) == SMALL_FILES


def test_a_fleet_says_how_far_its_host_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    joining = ["role=generators", "buffer.address=tcp://127.0.0.1:5555", "generators.count=2"]
    fleet = GeneratorFleet(load_config(joining), StopSignals())
    first, second = fleet._names

    def tell(*activities: str) -> str:
        fleet._tell_fetching(dict(zip((first, second), activities, strict=True)))
        return capsys.readouterr().out

    waits = "fetching rows: another process of this host does"
    assert tell("starting the engine", "joined") == ""
    assert tell(waits, "fetching rows: 40 %") == "fetching rows: 40 %\n"
    assert tell(waits, "fetching rows: 41 %") == "", "not every second"
