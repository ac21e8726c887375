"""The task `dataset`: rows from files and other tasks, as prompts with a reward."""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import write_lines, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_config
from generators.data.found_file import FileKind, FoundFile
from generators.data.open_sources import take_turns
from generators.data.row_files import read_rows
from generators.tasks import load_task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def load_dataset(train: Any, held_out: Any = None, function: str | None = "math", **data: Any) -> Any:
    reward = {"function": function}
    return load_task("dataset", {"data": {"train": train, "eval": held_out, **data}, "reward": reward})


def list_texts(task: Any, split: str, number: int) -> set[str]:
    return {task.make_prompt(split, index, 0).text for index in range(number)}


def rate_answer(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's form of a reward function."""
    return float(extra_info["index"] == 7 and data_source == "sums" and solution_str == ground_truth)


# ---- layouts

VERL = {
    "data_source": "sums",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
SKYRL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "env_class": "sums",
    "reward_spec": {"method": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}
TRL = {"prompt": "1 + 1?", "ground_truth": "2", "extra_info": {"index": 7}, "data_source": "sums"}
TRL_CHAT = {**TRL, "prompt": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]}


@pytest.mark.parametrize("write", [write_lines, write_parquet])
@pytest.mark.parametrize("row", [VERL, SKYRL, TRL, TRL_CHAT], ids=["verl", "skyrl", "trl", "trl_chat"])
def test_the_layouts_of_verl_skyrl_and_trl_work_as_they_are(row: dict, write: Any, tmp_path: Path) -> None:
    file = write(tmp_path / ("rows.jsonl" if write is write_lines else "rows.parquet"), [row])
    task = load_dataset(file, file, f"{__name__}:rate_answer")
    prompt = task.make_prompt("train", 0, 0)
    assert list(prompt.messages)[-1] == {"role": "user", "content": "1 + 1?"}
    assert len(prompt.messages) == (2 if row is VERL else 1)
    assert task.score_response(prompt, "2").reward == 1.0 and task.score_response(prompt, "3").reward == 0.0
    assert prompt.entry.items() >= {key: row[key] for key in row if key != "prompt"}.items()


def test_named_columns_with_dots_take_the_place_of_the_layouts(tmp_path: Path) -> None:
    rows = [
        {"task": {"question": f"{i}?", "result": i}, "prompt": "not this", "answer": -1} for i in range(8)
    ]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    task = load_dataset(file, prompt="task.question", answer="task.result")
    for index in range(task.num_prompts):
        prompt = task.make_prompt("train", index, 0)
        assert task.score_response(prompt, prompt.text.strip("?")).reward == 1.0


def test_a_system_prompt_stands_before_chats_that_have_none_and_template_arguments_travel(
    tmp_path: Path,
) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [VERL, SKYRL, TRL])
    thinking = {"enable_thinking": False}
    task = load_dataset(file, file, system_prompt="Think.", chat_template_kwargs=thinking)
    systems = [task.make_prompt("train", index, 0).messages[0] for index in range(3)]
    assert [one["content"] for one in systems] == ["Be brief.", "Think.", "Think."]
    assert task.make_prompt("train", 0, 0).template_args == thinking


def test_fields_that_a_table_fills_with_nothing_are_not_in_the_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a", "name": "me"}, {"role": "user", "content": "b"}]
    file = write_parquet(tmp_path / "rows.parquet", [{"prompt": chat, "answer": 1}])
    assert list(load_dataset(file, file).make_prompt("train", 0, 0).messages) == chat


# ---- places of rows


def test_files_of_either_kind_give_the_same_prompts_and_no_held_out_one_is_trained(tmp_path: Path) -> None:
    rows = [VERL | {"prompt": f"{i} + 1?", "reward_model": {"ground_truth": str(i + 1)}} for i in range(40)]
    files = [write_lines(tmp_path / "rows.jsonl", rows), write_parquet(tmp_path / "rows.parquet", rows)]
    one, other = map(load_dataset, files)
    assert one.num_prompts == other.num_prompts and 25 <= one.num_prompts < 40
    for split in ("train", "eval"):
        for index in range(50):
            prompt = one.make_prompt(split, index, 0)
            assert prompt == other.make_prompt(split, index, 1)
            answer = str(int(prompt.text.split()[0]) + 1)
            assert one.score_response(prompt, answer).reward == 1.0
            assert other.score_response(prompt, "-7").reward == 0.0
    train, held_out = list_texts(one, "train", one.num_prompts), list_texts(one, "eval", 40)
    assert len(train) == one.num_prompts and not train & held_out and len(train | held_out) == 40


@pytest.mark.parametrize("num_prompts", range(2, 12))
def test_a_file_of_any_size_is_divided_and_a_prompt_that_is_there_twice_is_on_one_side(
    num_prompts: int, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i % num_prompts}?"} for i in range(2 * num_prompts)]
    task = load_dataset(write_lines(tmp_path / "rows.jsonl", rows))
    train, held_out = list_texts(task, "train", 30), list_texts(task, "eval", 30)
    assert train and held_out and not train & held_out and len(train | held_out) == num_prompts


def make_stream(path: Path, rows: Sequence[dict]) -> None:
    """Writes a table as `datasets` does."""
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_saved(folder: Path, rows: Sequence[dict]) -> None:
    """Writes a folder as `Dataset.save_to_disk` does, in two files."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:3], rows[3:]), strict=True):
        make_stream(folder / name, part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": one} for one in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_every_way_to_name_files_gives_their_rows_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": i} for i in range(6)]
    parts = tmp_path / "parts"
    parts.mkdir()
    for place, name in enumerate("abc"):
        write_lines(parts / f"{name}.jsonl", rows[2 * place : 2 * place + 2])
    (parts / "notes.txt").write_text("not rows")
    (parts / ".ipynb_checkpoints").mkdir()
    write_lines(parts / ".ipynb_checkpoints" / "a-checkpoint.jsonl", rows)
    whole = write_parquet(tmp_path / "whole.parquet", rows, row_group_size=2)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as packed:
        packed.writelines(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "marked.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in rows)
    )
    write_saved(tmp_path / "saved", rows)
    both = tmp_path / "both"
    write_saved(both / "train", rows)
    write_saved(both / "test", rows[:4])
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    write_parquet(hub / "train-00000-of-00001.parquet", rows)
    write_parquet(hub / "test-00000-of-00001.parquet", rows[:4])
    named = [
        whole,
        str(parts),
        f"{parts}/*.jsonl",
        [f"{parts}/a.jsonl", f"{parts}/b.jsonl", f"{parts}/c.jsonl"],
        f"{tmp_path}/rows.jsonl.gz",
        f"{tmp_path}/marked.jsonl",
        f"{tmp_path}/saved",
        str(both),
        f"{both}@train",
        str(hub.parent),
        [{"name": "all", "path": whole}],
        {"path": [f"{parts}/[ab].jsonl", f"{parts}/c.jsonl"]},
    ]
    for name in named:
        task = load_dataset(name, whole)
        assert [task.make_prompt("train", i, 0).text for i in range(task.num_prompts)] == [
            row["prompt"] for row in rows
        ], name
    for name in (str(both), str(hub.parent), f"{both}@test"):
        task = load_dataset(whole, name)
        assert [task.make_prompt("eval", i, 0).text for i in range(5)] == ["0?", "1?", "2?", "3?", "0?"]


def test_columns_that_no_prompt_needs_may_hold_anything_that_a_text_can_say(tmp_path: Path) -> None:
    moment, table = 1_700_000_000_123_456_789, {"prompt": ["a?", "b?"]}
    times: dict[str, tuple[pa.DataType, Any]] = {
        "at": (pa.timestamp("ns", "UTC"), moment),
        "took": (pa.duration("ns"), 1_001),
        "clock": (pa.time64("ns"), 1_001),
        "deep": (pa.list_(pa.struct([("at", pa.timestamp("ns"))])), [{"at": moment}, None]),
        "day": (pa.date32(), 3),
        "exact": (pa.decimal128(5, 2), Decimal("1.50")),
        "kind": (pa.dictionary(pa.int8(), pa.string()), "x"),
        "long": (pa.large_string(), "x"),
        "none": (pa.null(), None),
        "by_key": (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    }
    columns = {name: pa.array([value, None], kind) for name, (kind, value) in times.items()}
    pq.write_table(pa.table({**table, **columns}), tmp_path / "rows.parquet")
    rows = [json.loads(row) for row in read_rows(FoundFile(tmp_path / "rows.parquet", FileKind.parquet))]
    assert rows[0] == {
        "prompt": "a?",
        "at": "2023-11-14T22:13:20.123456+00:00",
        "took": "0:00:00.000001",
        "clock": "00:00:00.000001",
        "deep": [{"at": "2023-11-14T22:13:20.123456"}, None],
        "day": "1970-01-04",
        "exact": "1.50",
        "kind": "x",
        "long": "x",
        "none": None,
        "by_key": {"a": 1},
    }
    assert rows[1] == {"prompt": "b?", **dict.fromkeys(times)}


# ---- several sources


def test_sources_take_turns_by_index_and_each_has_its_own_keys(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"q": f"one {i}", "answer": i} for i in range(3)])
    two = write_lines(tmp_path / "two.jsonl", [{"prompt": f"two {i}", "answer": i} for i in range(5)])
    train = [
        {"name": "a", "path": one, "prompt": "q", "weight": 2, "system_prompt": "Hm."},
        {"path": two},
        {"task": "sorting", "args": {"numbers": 2}},
    ]
    task = load_dataset(train, two)
    assert [(one.name, one.size, one.weight) for one in task.sources] == [
        ("a", 3, 2.0), ("two", 5, 1.0), ("sorting", None, 1.0)
    ]  # fmt: skip
    sorting = load_task("sorting", {"numbers": 2})
    for index in range(21):
        prompt, (row, place) = task.make_prompt("train", index, 0), divmod(index, 3)
        if place == 2:
            assert prompt.text == sorting.make_prompt("train", row, 0).text
        else:
            assert prompt.text.split("\n\n")[-1] == ("one", "two")[place] + f" {row % (3, 5)[place]}"
            assert prompt.messages[0]["role"] == ("system", "user")[place]
            assert task.score_response(prompt, str(row % (3, 5)[place])).reward == 1.0


@given(st.lists(st.integers(1, 6) | st.none(), min_size=1, max_size=5))
def test_held_out_sources_give_a_row_each_by_turns_until_they_have_no_more(sizes: list[int | None]) -> None:
    finite = [size for size in sizes if size is not None]
    rounds = range(max(finite, default=0) + 3)
    expected = [
        (place, row) for row in rounds for place, size in enumerate(sizes) if size is None or row < size
    ]
    if None not in sizes:
        assert len(expected) == sum(finite)
        expected *= 2
    assert [take_turns(index, sizes) for index in range(len(expected))] == expected


def test_each_task_scores_its_own_rows_unless_a_part_says_so() -> None:
    config = load_config(
        [
            "task=dataset",
            "data.train={task: sorting, args: {numbers: 2}}",
            f"reward.parts=[{{name: own, use: task}}, {{use: '{__name__}:rate_brief'}}]",
        ]
    )
    brief = load_task(config.task.name, config.task_arguments)
    task, sorting = load_dataset(config.data.train, function=None), load_task("sorting", {"numbers": 2})
    question, answer = next(task.solved_examples("train", 0))
    assert (question, answer) == next(sorting.solved_examples("train", 0))
    assert task.num_prompts is None
    prompt, own = task.make_prompt("train", 5, 0), sorting.make_prompt("train", 5, 0)
    assert prompt.text == own.text
    assert task.score_response(prompt, "no").reward == sorting.score_response(own, "no").reward == 0.0
    score = brief.score_response(brief.make_prompt("train", 5, 0), "no numbers at all")
    assert score.reward == 1.0 and score.components["own"] == 0.0 and "own/correct" in score.components


class LateTask:
    async def make_prompt(self, split: str, index: int, seed: int) -> Any: ...

    async def score_response(self, prompt: Any, response: str) -> Any: ...


def rate_brief(row: dict, reply: str) -> float:
    return 1.0


def test_solved_examples_are_short_rows_with_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1 + 1?", "answer": 2},
        {"prompt": "long" * 200, "answer": 3},
        {"prompt": VERL["prompt"], "answer": "4"},
        {"prompt": "no answer"},
    ]  # fmt: skip
    file = write_lines(tmp_path / "rows.jsonl", rows)
    task = load_dataset(file, file)
    solved: Iterator[tuple[str, str]] = task.solved_examples("train", 0)
    assert list(islice(solved, 3)) == [("1 + 1?", "2"), ("Be brief.\n\n1 + 1?", "4"), ("1 + 1?", "2")]
    bare = write_lines(tmp_path / "bare.jsonl", rows[3:])
    task = load_dataset(bare, file)
    with pytest.raises(ValueError, match="model.path must be a folder for rows without short texts"):
        next(task.solved_examples("train", 0))


# ---- what is refused

A = {"prompt": "a"}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], r"data\.train must have a row, got .*rows\.jsonl, which has none"),
        (
            [{"question": "1?", "n": 1}],
            r"rows\.jsonl, row 0: data\.prompt must name a column .*'prompt' of the columns question, n",
        ),
        ([A, ["b"]], r"rows\.jsonl must have a JSON object in each line, got row 1 \(line 2\)"),
        ([{"prompt": []}], r"row 0: prompt must be a text or a list of messages, got \[\]"),
        ([A, {"prompt": ""}], r"row 1: prompt must not be empty"),
        ([A, {"prompt": None}], r"row 1: data\.prompt must name a column that has a value"),
        ([A, {"prompt": 7}], r"row 1: prompt must be a text or a list of messages, got 7"),
        ([{"prompt": [{"role": "user"}]}], r"row 0: messages must have a role and a content"),
        ([{"prompt": [{"role": "robot", "content": "a"}]}], r"roles of messages must be one of system"),
        (
            [{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            r"row 0: prompt must not end with a message of the assistant",
        ),
        ([A | {"images": [{"bytes": "x"}]}], r"row 0: prompts must be text alone, got .* column 'images'"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            r"row 0: prompts must be text alone, got a content with",
        ),
        ([{"prompt": "a \ud800"}], r"row 0: prompt must be text that can be encoded"),
        ([A, A], r"data\.train must have two prompts or more where data\.eval is null, got one in 2 rows"),
    ],
)
def test_a_wrong_row_is_refused_by_file_and_number(lines: list, sentence: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", lines)
    with pytest.raises(ValueError, match=sentence):
        load_dataset(file)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}', r"row 1 \(line 2\): .* got 'prompt' twice"),
        (b'{"prompt": "a"}\n\n{"prompt": "\xff"}', r"row 1 \(line 3\): 'utf-8' codec can't decode"),
        (b"{", r"row 0 \(line 1\)"),
        (b'{"prompt": ' + b"[" * 100_000, r"row 0 \(line 1\)"),
        (b"PAR1 nonsense", r"row 0 \(line 1\)"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"rows\.jsonl must have .* in each line, got {sentence}"):
        load_dataset(f"{tmp_path}/rows.jsonl")


def test_a_wrong_row_of_a_later_file_is_named_by_that_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [A, {"prompt": "b"}])
    write_lines(tmp_path / "b.jsonl", [{"prompt": "c"}, {"text": "d"}])
    with pytest.raises(ValueError, match=r"/b\.jsonl, row 1: data\.prompt must name a column"):
        load_dataset(f"{tmp_path}/*.jsonl")


def test_a_folder_of_splits_and_other_files_is_refused_until_a_split_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "dev-rows"  # its own name is of no split
    folder.mkdir()
    for name in ("train", "gsm8k"):
        write_lines(folder / f"{name}.jsonl", [{"prompt": name}, {"prompt": f"{name}?"}])
    with pytest.raises(ValueError, match=r"or else .*@train, or a pattern\), got .*, where gsm8k\.jsonl"):
        load_dataset(str(folder))
    task = load_dataset(f"{folder}@train", f"{folder}/g*.jsonl")
    assert list_texts(task, "train", 2) == {"train", "train?"}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    # The kernel refuses to read its first byte, to root too.
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=r"rows\.jsonl must be a file that can be read, got "):
        load_dataset(f"{tmp_path}/rows.jsonl")


def test_sources_that_cannot_be_are_refused_by_their_key(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [A, {"prompt": "b"}])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    (tmp_path / "empty").mkdir()
    both = tmp_path / "both"
    both.mkdir()
    write_lines(both / "train.jsonl", [A])
    write_lines(both / "validation.jsonl", [A])
    picture = write_parquet(tmp_path / "picture.parquet", [A | {"picture": b"\x89PNG"}])
    for value, sentence in [
        (None, r"data\.train must name rows to train on"),
        ("x" * 5000, r"data\.train must be a path that can be read, got '/.*File name too long"),
        ("/nowhere.jsonl", r"data\.train must be a file, a folder or a pattern .*, got '/nowhere"),
        (f"{tmp_path}/*.json", r"data\.train must be a pattern that files match, got .*\.json', which none"),
        (f"{tmp_path}/rows.csv", r"data\.train must have files \.jsonl, .* got '.*rows\.csv'"),
        (f"{tmp_path}/empty", r"data\.train must be a folder with files .* got '.*/empty'"),
        (f"{tmp_path}/broken.parquet", r"broken\.parquet must be a file that can be read, got"),
        (f"{both}@test", r"must name a split of the folder .*, got 'test', .* has: train, validation"),
        (f"{rows}@train", r"data\.train must name a split of a folder only"),
        (picture, r"picture\.parquet must have rows that JSON can hold, got row 0: prompts must be text"),
        ([], r"data\.train must be a path, a list of paths, or a list of sources, got \[\]"),
        (7, r"data\.train must be a path, a list of paths, or a list of sources, got 7"),
        ([rows, {"path": rows}], r"data\.train\[0\] must be a path or \{name, path, weight"),
        ([{"path": rows}, {"path": rows}], r"data\.train\[1\]\.name must be another .* got 'rows'"),
        ({"path": rows, "weight": 0}, r"data\.train\.weight must be a finite number, above 0, got 0"),
        ({"path": rows, "wait": 1}, r"data\.train must have keys of a source .*, got 'wait'"),
        ({"name": "a"}, r"data\.train must have a path or a task, got"),
        ({"path": rows, "task": "sorting"}, r"data\.train must have a path or a task, got"),
        ({"task": "poetry"}, r"task\.name must be one of"),
        ({"task": f"{__name__}:LateTask"}, r"data\.train must name tasks with plain methods as sources"),
        ({"task": "calculator"}, r"data\.train must name tasks of one turn as sources, got 'calculator'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            load_dataset(value)
    with pytest.raises(ValueError, match=r"row 0: data\.answer must name a column .*, got 'x' of the"):
        load_dataset(rows, answer="x")
    with pytest.raises(ValueError, match=r"^reward\.function must name a reward for these rows"):
        load_dataset(rows, function=None)


# ---- the hub


class HubModule:
    """The part of the package `datasets` that is used, over files that stand for the package's cache."""

    def __init__(self, splits: dict[tuple[str, str | None, str], list[Path]]) -> None:
        self.splits = splits

    def load_dataset(self, name: str, config: str | None, split: str) -> "HubModule":
        if (name, config, split) not in self.splits:
            raise FileNotFoundError(f"no split {split}")
        self.cache_files = [{"filename": str(file)} for file in self.splits[name, config, split]]
        return self

    def __len__(self) -> int:
        return 6


def test_a_name_of_the_hub_is_loaded_by_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{i}?", "answer": i} for i in range(6)]
    write_saved(tmp_path / "saved", rows)
    files = sorted((tmp_path / "saved").glob("*.arrow"))
    module = HubModule({("me/sums", None, "train"): files, ("me/sums", "hard", "dev"): files[:1]})
    monkeypatch.setitem(sys.modules, "datasets", module)
    eval_rows = write_lines(tmp_path / "eval.jsonl", rows)
    task = load_dataset("hf:me/sums", eval_rows)
    assert [task.make_prompt("train", i, 0).text for i in range(7)] == [f"{i % 6}?" for i in range(7)]
    for name, sentence in {
        "hf:me/sums@test": r"data\.train must name a data set that can be loaded, got .* no split test",
        "hf:me/sums@train[:2]": r"data\.train must read hf:NAME, .* got 'hf:me/sums@train\[:2\]'",
        "hf:me/sums:hard@dev": r"data\.train must name a data set that `datasets` keeps in files as it is",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            load_dataset(name, eval_rows)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"`datasets` is missing \(pip install 'slipstream\[hub\]' brings it\)"
    ):
        load_dataset("hf:me/sums@dev", eval_rows)
