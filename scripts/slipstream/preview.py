"""Shows what a run would train on, before it trains: prompts as the model sees them, replies, and rewards.

    scripts/preview.sh [--rows 5] [--samples 1] [--split train] [--no-engine] [--json] [key=value ...]

The overrides are those of scripts/launch.sh. The prompts are those that the run asks first. The engine
samples a reply to each; with --no-engine, which takes seconds, the reply is the row's right answer. No run
begins. The exit status is 1 when a group fails.
"""

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from buffers.messages import Lease
from configs.eval import EvalConfig
from configs.generators import EngineKind
from configs.learner import LearnerConfig
from configs.load import find_resumed_folder, load_config, load_resumed_config
from configs.schema import Config
from configs.tracking import TrackingConfig
from generators.engine import Engine, Sample
from generators.episode import Episodes
from generators.group import parse_lease_id
from generators.rewards.trial import find_right_reply
from generators.solo_play import open_player
from generators.user_code.task_kinds import TaskKind, find_kind
from slipstream.extras import require_extras, run_program
from slipstream.preparation import resolve_config
from slipstream.preview_page import PreviewPage
from slipstream.preview_play import (
    AnswerEngine,
    PreviewGroup,
    RecordedEngine,
    begin_group,
    fill_group,
    list_leases,
)
from slipstream.preview_report import make_report
from slipstream.stop_signals import KILLED

LARGEST = 1000
"""Rows, and samples of a row, that a preview shows at most."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "scripts/preview.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=read_count, default=5, metavar="N", help="prompts to show (5)")
    parser.add_argument("--samples", type=read_count, default=1, metavar="N", help="replies to each (1)")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="which prompts (train)")
    parser.add_argument("--no-engine", action="store_true", help="reply with the right answers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for scripts/launch.sh")
    options = parser.parse_intermixed_args(arguments)
    # A group that fails says so on the page; the traceback is in the log of a run.
    logging.getLogger("slipstream").addHandler(logging.NullHandler())
    logging.getLogger("slipstream").propagate = False
    try:
        return preview_run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return KILLED
    except ValueError as error:
        print(f"Slipstream cannot show this:\n{error}", file=sys.stderr)
        return 2


def preview_run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ValueError, in the words of the configuration, for what cannot be."""
    has_engine = not options.no_engine
    # The preparation's lines are no part of the JSON.
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        config, task = open_task(options.overrides)
    from transformers import AutoTokenizer

    from generators.task_episodes import TaskEpisodes

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    episodes = TaskEpisodes(config, tokenizer)
    leases = list_leases(config, task, options.split, options.rows, options.samples if has_engine else 1)
    answers = {lease.id: find_answer(task, lease) for lease in leases}
    groups = [begin_group(config, task, lease, answers[lease.id]) for lease in leases]
    page = PreviewPage(tokenizer)
    with open_engine(config) if has_engine else script_engine(task, tokenizer, answers) as engine:
        played = play_groups(config, RecordedEngine(engine), episodes, leases, groups)
        for number, group in enumerate(played, 1):
            if not options.json:
                page.print_group(group, number, len(groups))
    too_long = {
        f"data.{record['split']} {record['name']}": record["num_too_long"] for record in config.data.prepared
    }
    report = make_report(config, groups, too_long, has_engine=has_engine)
    if options.json:
        print(
            json.dumps(
                {"prompts": [write_group(group, tokenizer) for group in groups], **asdict(report)}, indent=1
            )
        )
    else:
        page.print_report(report)
    return int(any(group.error for group in groups))


def open_task(overrides: Sequence[str]) -> tuple[Config, Any]:
    """Returns the configuration of a run that these overrides would begin, or go on with, and its task."""
    folder = find_resumed_folder(overrides)
    config = load_config(overrides) if folder is None else load_resumed_config(folder, overrides)
    if config.generators.engine is EngineKind.simulated:
        raise ValueError(
            "generators.engine must be vllm or transformers for a preview (a simulated one makes no prompts)"
        )
    used = dataclasses.replace(config, learner=LearnerConfig(), tracking=TrackingConfig(), eval=EvalConfig())
    require_extras(used)
    return resolve_config(config)


def find_answer(task: Any, lease: Lease) -> str | None:
    """Returns the right answer of a row of `data`; None where the row has none, and for other tasks."""
    if getattr(task, "name", None) != "dataset":
        return None
    return find_right_reply(task.make_row(lease.split, lease.index, lease.seed)) or None


@contextmanager
def open_engine(config: Config) -> Iterator[Engine]:
    """Opens the engine of a generator, with the weights of the model's folder."""
    # Imported here: without an engine, a preview takes seconds.
    import torch

    from generators.joining import make_engine
    from slipstream.evaluated_model import read_tensors
    from sync.publisher import Publisher
    from sync.snapshot import Snapshot

    with tempfile.TemporaryDirectory(prefix="slipstream-preview-", dir="/dev/shm") as folder:
        with Console(stderr=True).status("starting the engine"):
            engine = make_engine(config, config.run.seed)
            publisher = Publisher(Path(folder), "preview")
            weights = read_tensors(Path(config.model.path), getattr(torch, config.model.dtype))
            engine.load_version(Snapshot(publisher.publish_version(0, weights)))
        try:
            yield engine
        finally:
            publisher.close()


@contextmanager
def script_engine(task: Any, tokenizer: Any, answers: Mapping[int, str | None]) -> Iterator[AnswerEngine]:
    """Opens an engine that replies with the right answers. Only tasks of one turn get replies."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def write_reply(sample: Sample) -> list[int]:
        answer = answers[parse_lease_id(sample.id)] or ""
        return [*tokenizer.encode(answer, add_special_tokens=False), *end]

    is_one_turn = find_kind(type(task), type(task).__name__) is TaskKind.one_turn
    yield AnswerEngine(write_reply if is_one_turn else None)


def play_groups(
    config: Config,
    engine: RecordedEngine,
    episodes: Episodes,
    leases: Sequence[Lease],
    groups: Sequence[PreviewGroup],
) -> Iterator[PreviewGroup]:
    """Plays the leases, and yields their groups in order, each as soon as those before it have ended."""
    ended: set[int] = set()

    def has_seen_all() -> bool:
        """True when an engine that answers nothing has seen each first prompt."""
        is_silent = getattr(engine, "is_silent", False)
        return is_silent and len(engine.prompts.keys() | ended) == len(leases)

    with open_player(
        engine,
        episodes,
        max_tokens=config.sampling.max_tokens,
        max_episodes=config.max_episodes,
        timeout_s=config.episodes.timeout_s,
    ) as player:
        shown = 0
        for played in player.play_leases(leases, should_stop=has_seen_all):
            fill_group(groups[played.lease.id], played, engine, config)
            ended.add(played.lease.id)
            while shown in ended:
                yield groups[shown]
                shown += 1
    for group in groups[shown:]:
        group.prompt = engine.prompts.get(group.group, [])
        yield group


def write_group(group: PreviewGroup, tokenizer: Any) -> dict[str, Any]:
    """Returns a group in JSON's types: texts in place of tokens."""
    return {
        "source": group.source,
        "prompt": group.index,
        "text": tokenizer.decode(group.prompt, skip_special_tokens=False),
        "prompt_tokens": len(group.prompt),
        "answer": group.answer,
        "error": group.error or None,
        "rejected_by": group.rejection or None,
        "samples": [
            {
                "reply": sample.text,
                "tokens": sample.num_sampled,
                "stop": sample.stop,
                "reward": sample.reward,
                "components": sample.components,
                "seconds": sample.seconds,
            }
            for sample in group.samples
        ],
    }


def read_count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be 1 to {LARGEST}, got {number}")
    return number


if __name__ == "__main__":
    run_program(main)
