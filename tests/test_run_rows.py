"""The rows of a run: filtered by length, cached whole or not at all, and the same when the run goes on."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_rows import write_lines, write_parquet
from template_families import family_tokenizer

from configs.disk import DiskFull
from configs.load import load_config
from configs.schema import Config
from generators.data import run_data, selection
from generators.data.cache import find_cache
from generators.data.prepare import count_repeats, prepare_data
from generators.data.row_store import RowStore
from generators.data.selection import LengthLimit
from generators.rendering.prompts import PromptEncoder
from generators.tasks import load_task
from learners.tiny_cache import prepare_tiny_model

ROOT = Path(__file__).parents[1]
LIMIT = LengthLimit(PromptEncoder(family_tokenizer("qwen3")), 60)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_data, "make_limit", lambda config: LIMIT)
    return tmp_path / "cache" / "data"


def make_rows(number: int, begin: int = 0) -> list[dict]:
    """Every seventh prompt is longer than the limit."""
    return [
        {"prompt": f"What is {i} + 1? " + "again " * (90 if i % 7 == 0 else i % 5), "answer": i + 1}
        for i in range(begin, begin + number)
    ]


def prepare_config(train: Any, **data: Any) -> Config:
    config = load_config(["task=dataset", "reward.function=math", "data.train=unset"])
    config = replace(config, data=replace(config.data, train=train, **data))
    return replace(config, data=replace(config.data, prepared=prepare_data(asdict(config.data), LIMIT)))


def resume(config: Config, before: run_data.FileLists, began: Config | None = None) -> list[dict]:
    data = asdict((began or config).data)
    return run_data.resume_data(config, data, before, lambda what, done, total: None)


def count_tokens(prompt: str) -> int:
    encoder = PromptEncoder(family_tokenizer("qwen3"))
    return len(encoder.encode_prompt([{"role": "user", "content": prompt}]))


# ---- the filter


@pytest.mark.parametrize("measured", [10, 1000])
def test_prompts_beyond_the_limit_are_left_out_and_counted(
    measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MEASURED", measured)
    number, rows = 300, make_rows(300)
    config = prepare_config(write_lines(tmp_path / "rows.jsonl", rows), eval=None)
    (record,) = config.data.prepared
    lengths = {
        row["prompt"]: len(LIMIT.encoder.encode_prompt([{"role": "user", "content": row["prompt"]}]))
        for row in rows
    }
    fitting = {prompt for prompt, length in lengths.items() if length <= LIMIT.tokens}
    assert 0 < len(fitting) < number
    assert record["num_rows"] == number and record["num_too_long"] == number - len(fitting)
    task = load_task("dataset", config.task_arguments)
    sizes = {"train": task.num_prompts, "eval": task.num_eval_prompts}
    taken = [task.make_prompt(split, i, 0).text for split, size in sizes.items() for i in range(size)]
    assert sorted(taken) == sorted(fitting)
    assert record["tokens_max"] == max(lengths[prompt] for prompt in fitting)
    if measured > number:
        assert record["tokens_mean"] == pytest.approx(np.mean([lengths[prompt] for prompt in fitting]))


def test_a_source_without_a_prompt_that_fits_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "again " * 90, "answer": 1} for _ in range(3)]
    with pytest.raises(ValueError, match=r"data\.train must have a prompt of at most 60 tokens .*got 3 rows"):
        prepare_config(write_lines(tmp_path / "rows.jsonl", rows))


def test_prompts_that_stand_twice_and_held_out_ones_that_are_trained_are_counted(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", make_rows(20) + make_rows(4, begin=1))
    two = write_lines(tmp_path / "two.jsonl", make_rows(10, begin=15))
    held_out = write_lines(tmp_path / "eval.jsonl", make_rows(3, begin=1) + make_rows(20, begin=100))
    config = prepare_config([{"path": one}, {"path": two}], eval=held_out)
    assert count_repeats(config.data.prepared) == (4 + 5, 3)  # no prompt of 15 to 19 is too long


# ---- the cache


def test_rows_are_read_alone_and_changed_files_are_read_again(tmp_path: Path) -> None:
    rows = make_rows(50)
    file = tmp_path / "rows.parquet"
    records = prepare_data({"train": write_parquet(file, rows), "eval": None})
    store = RowStore(find_cache() / records[0]["store"])
    assert [store.read_row(index) for index in (49, 0, 17)] == [rows[49], rows[0], rows[17]]
    moved = shutil.copy(file, tmp_path / "moved.parquet")
    assert prepare_data({"train": str(moved), "eval": None}) == [records[0] | {"name": "moved"}]
    write_parquet(file, make_rows(50, begin=1))
    assert prepare_data({"train": str(file), "eval": None})[0]["store"] != records[0]["store"]


PREPARE = """
import sys
from generators.data import prepare
from generators.data.prepare import prepare_data
def report(what, done, total):
    print(what, done, flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.readline()
print(prepare_data({"train": sys.argv[1], "eval": None}, report=report)[0]["store"])
"""


def start_preparing(file: str, waits: bool) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, file, "wait" if waits else "go"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_a_killed_preparation_leaves_nothing_half_and_another_waits_for_one_at_work(
    tmp_path: Path, cache: Path
) -> None:
    file = write_lines(tmp_path / "rows.jsonl", make_rows(2000))
    first = start_preparing(file, waits=True)
    assert first.stdout is not None and "reading" in first.stdout.readline()
    second = start_preparing(file, waits=False)
    assert second.stderr is not None
    assert f"process {first.pid} of {socket.gethostname()} prepares" in second.stderr.readline()
    assert not [folder for folder in cache.glob("rows-*")]
    assert [folder.suffix for folder in cache.glob(".rows-*.unfinished")] == [".unfinished"]
    first.send_signal(signal.SIGKILL)
    first.wait()
    out, _ = second.communicate(timeout=120)
    store = out.split()[-1]
    assert len(RowStore(cache / store)) == 2000
    assert not list(cache.glob("*.unfinished")) and not list(cache.glob(".*.unfinished"))


def test_an_interrupted_preparation_is_cleared_away(tmp_path: Path, cache: Path) -> None:
    class Stopped(BaseException):
        pass

    def report(what: str, done: int, total: int | None) -> None:
        if "checking" in what and done:
            raise Stopped

    file = write_lines(tmp_path / "rows.jsonl", make_rows(1000))
    with pytest.raises(Stopped):
        prepare_data({"train": file, "eval": None}, LIMIT, report)
    left = {path.name.partition("-")[0] for path in cache.iterdir() if path.suffix != ".lock"}
    assert left - {"files"} == {"rows"}


@contextmanager
def limiting_files(size: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named(tmp_path: Path, cache: Path) -> None:
    data = {"train": write_lines(tmp_path / "rows.jsonl", make_rows(5000)), "eval": None}
    with (
        pytest.raises(DiskFull, match=r"the disk of .*rows\.jsonl must have room"),
        limiting_files(50_000),
    ):
        prepare_data(data)
    assert not list(cache.glob("rows-*")) and not list(cache.glob(".*.unfinished"))
    prepare_data(data)
    shutil.rmtree(*cache.glob("kept-*"))
    with (
        pytest.raises(DiskFull, match=r"the disk of .*/(taken|hashes)\.npy.* must have room"),
        limiting_files(10_000),
    ):
        prepare_data(data)
    assert not list(cache.glob("kept-*")) and not list(cache.glob(".*.unfinished"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "rows.jsonl", make_rows(20))
    monkeypatch.setenv("SLIPSTREAM_CACHE", file)
    with pytest.raises(ValueError, match=r"SLIPSTREAM_CACHE must name a folder .*, got .*/rows\.jsonl: "):
        prepare_data({"train": file, "eval": None})
    # A folder of the kernel's, where nobody can make another one.
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(ValueError, match=r"SLIPSTREAM_CACHE must name a folder .*, got /proc/none/"):
        prepare_data({"train": file, "eval": None})
    with pytest.raises(ValueError, match=r"SLIPSTREAM_CACHE must name a folder .*, got /proc/none/"):
        prepare_tiny_model(iter([("1 + 1?", "2")] * 2000))


def test_files_that_change_before_the_run_has_begun_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", make_rows(20))
    config = prepare_config(file)
    files = run_data.list_prepared_files(asdict(config.data))
    assert files == run_data.list_files(asdict(config.data))
    write_lines(tmp_path / "rows.jsonl", make_rows(20, begin=7))
    with pytest.raises(ValueError, match=r"data\.train must stay as it is until .*, got .*/rows\.jsonl"):
        run_data.list_prepared_files(asdict(config.data))


def test_a_folder_of_the_cache_that_is_damaged_or_of_another_version_is_made_anew(
    tmp_path: Path, cache: Path
) -> None:
    data = {"train": write_lines(tmp_path / "rows.jsonl", make_rows(20)), "eval": None}
    records = prepare_data(data)
    store, kept = (cache / records[0][part] for part in ("store", "kept"))
    (store / "meta.json").write_text("{}")
    (kept / "meta.json").write_text('{"digest": "of an older version"}')
    assert prepare_data(data) == records
    os.truncate(store / "offsets.u64", 8)
    (kept / "taken.npy").unlink()
    assert prepare_data(data) == records
    assert RowStore(store).read_row(19) == make_rows(20)[19]


# ---- a run that goes on, and other hosts


def test_a_resumed_run_has_the_rows_that_it_began_with_wherever_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(write_lines(tmp_path / "rows.jsonl", make_rows(40)))
    config = prepare_config(str(file))
    before = run_data.list_files(asdict(config.data))
    assert resume(config, before) == config.data.prepared
    moved = file.rename(tmp_path / "elsewhere.jsonl")
    told = replace(config, data=replace(config.data, train={"name": "rows", "path": str(moved)}))
    assert resume(told, before) == config.data.prepared
    with caplog.at_level("WARNING"):
        assert resume(config, before) == config.data.prepared
    assert "must be a file, a folder or a pattern that is there" in caplog.text
    shutil.rmtree(find_cache() / config.data.prepared[0]["kept"])
    assert resume(config, before) == config.data.prepared
    shutil.rmtree(find_cache())
    assert resume(told, before) == config.data.prepared
    shutil.rmtree(find_cache())
    with pytest.raises(ValueError, match=r"rows\.jsonl', and .* has lost the rows that the run began with"):
        resume(config, before)


def test_a_resumed_run_whose_files_or_limits_have_changed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for place in range(3):
        write_lines(folder / f"{place}.jsonl", make_rows(20, begin=20 * place))
    config = prepare_config(str(folder))
    before = json.loads(json.dumps(run_data.list_files(asdict(config.data))))
    write_lines(folder / "3.jsonl", make_rows(1))
    with pytest.raises(ValueError, match=r"as they were when it began, got .*/3\.jsonl, which is new"):
        resume(config, before)
    (folder / "3.jsonl").unlink()
    write_lines(folder / "1.jsonl", make_rows(20, begin=7))
    with pytest.raises(ValueError, match=r"got .*/1\.jsonl, which has changed \(from [\d,]+ to"):
        resume(config, before)
    (folder / "1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"got .*/1\.jsonl, which is gone"):
        resume(config, before)
    write_lines(folder / "1.jsonl", make_rows(20, begin=20))
    assert resume(config, before) == config.data.prepared
    monkeypatch.setattr(run_data, "make_limit", lambda config: replace(LIMIT, tokens=1000))
    with pytest.raises(ValueError, match=r"must give the same rows of source 'rows' in a resumed .*, got 5"):
        resume(config, before)
    shutil.rmtree(folder)
    folder.mkdir()  # as where a disk is not mounted
    with pytest.raises(ValueError, match=r"must give the same rows of source 'rows' in a resumed .*, got 5"):
        resume(config, before)
    named = replace(config, data=replace(config.data, train={"name": "others", "path": str(folder)}))
    with pytest.raises(ValueError, match=r"must name the sources that the run began with \(train/rows\)"):
        resume(named, before)


@pytest.mark.parametrize("files_are_gone", [False, True])
def test_a_resumed_run_makes_its_prompts_of_the_same_columns(tmp_path: Path, files_are_gone: bool) -> None:
    rows = [row | {"other": row["prompt"], "solution": 0} for row in make_rows(40)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    config = prepare_config({"path": file, "answer": "answer"})
    before = run_data.list_files(asdict(config.data))
    if files_are_gone:
        os.remove(file)
    changes: dict[str, Any] = {
        "prompt": "other",
        "system_prompt": "Be brief.",
        "form": "problem",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for key, value in changes.items():
        changed = replace(config, data=replace(config.data, **{key: value}))
        with pytest.raises(ValueError, match=rf"data\.{key} of the source 'rows' of data\.train must stay"):
            resume(changed, before, began=config)
    changed = replace(config, data=replace(config.data, train={"path": file, "answer": "solution"}))
    with pytest.raises(
        ValueError, match=r"data\.answer of .* must stay \"answer\" in a resumed .*, got \"solution\""
    ):
        resume(changed, before, began=config)
    rows, more = {"path": file, "answer": "answer"}, {"name": "more", "task": "sorting", "args": {"high": 3}}
    began = replace(config, data=replace(config.data, train=[rows, more]))
    for key, value in {"level": 1, "task": "arithmetic", "args": {"high": 4}}.items():
        changed = replace(config, data=replace(config.data, train=[rows, {**more, key: value}]))
        with pytest.raises(ValueError, match=rf"{key} of the source 'more' of data\.train must stay .*, got"):
            resume(changed, before, began=began)
    assert resume(config, before) == config.data.prepared


def test_a_resumed_run_keeps_its_sources_their_order_and_weights(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", make_rows(40))
    sums = {"name": "sums", "task": "sorting", "weight": 2.0}
    config = prepare_config([{"path": file}, sums])
    sources = [asdict(one) for one in load_task("dataset", config.task_arguments).sources]
    config = replace(config, task=replace(config.task, sources=sources))
    before = run_data.list_files(asdict(config.data))
    assert resume(config, before) == config.data.prepared
    for train in ([sums, {"path": file}], [{"path": file}], [{"path": file}, sums | {"weight": 1.0}]):
        changed = replace(config, data=replace(config.data, train=train))
        with pytest.raises(ValueError, match=r"data\.train must name the sources .*rows with weight 1, sums"):
            resume(changed, before)


def test_a_host_prepares_what_its_cache_lacks_and_refuses_other_rows(tmp_path: Path) -> None:
    file = Path(write_lines(tmp_path / "rows.jsonl", make_rows(40)))
    config = prepare_config(str(file))
    task = load_task("dataset", config.task_arguments)
    prompts = [task.make_prompt("train", i, 0).text for i in range(task.num_prompts)]
    shutil.rmtree(find_cache())
    with pytest.raises(ValueError, match=r"data\.train must be prepared in the cache of this host"):
        load_task("dataset", config.task_arguments)
    run_data.bring_rows(config)
    task = load_task("dataset", config.task_arguments)
    assert prompts == [task.make_prompt("train", i, 0).text for i in range(task.num_prompts)]
    file.unlink()
    run_data.bring_rows(config)
    shutil.rmtree(find_cache())
    with pytest.raises(ValueError, match=r"data\.train must be a file, a folder or a pattern that is there"):
        run_data.bring_rows(config)
    write_lines(file, make_rows(41))
    with pytest.raises(ValueError, match=r"must give the same rows of source 'rows' on every host, got"):
        run_data.bring_rows(config)
    write_lines(file, make_rows(40)[::-1])
    with pytest.raises(ValueError, match=r"on every host, got"):
        run_data.bring_rows(config)
