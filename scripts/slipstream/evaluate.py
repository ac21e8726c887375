"""Evaluates a run's checkpoint, an export or any Hugging Face folder, without a run.

    scripts/evaluate.sh outputs/NAME                       its newest checkpoint on its own sets
    scripts/evaluate.sh outputs/NAME --step 50             the checkpoint of step 50
    scripts/evaluate.sh models/mine task=arithmetic        a model folder on held-out prompts of a task
    scripts/evaluate.sh outputs/NAME eval.benchmarks=[gsm8k]    a benchmark of the catalogue
    scripts/evaluate.sh outputs/A outputs/B                both, side by side, with the difference

Overrides are those of scripts/launch.sh. Results are in outputs/evaluations/<model>-<digest>/ (or --out): a
table, results.json, and every sample as Arrow. The same command goes on where it was stopped; another model,
or other settings, never mix with what is there. The exit status is 0 when all prompts have their samples, 1
when some failed, 2 for what cannot be, and 130 after Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console

from buffers.evaluated_samples import EvaluatedSamples
from buffers.evaluation_statistics import EvaluationResult, PromptSamples, summarize_samples
from buffers.files import replace_file
from buffers.messages import Lease
from configs.data import DataConfig
from configs.learner import LearnerConfig
from configs.load import find_named_sets, find_said_keys, load_config, load_recorded_config
from configs.parallel import FsdpConfig
from configs.schema import Config
from configs.tracking import TrackingConfig
from generators.engine import Engine
from generators.joining import make_engine, make_episodes
from generators.rewards.trial import try_reward
from generators.solo_play import SoloGroup, open_player
from generators.tasks import load_task
from slipstream.evaluated_model import (
    Target,
    bring_model,
    digest_files,
    find_target,
    publish_model,
    read_longest_context,
)
from slipstream.evaluated_sets import SoloSet, digest_value, list_sets
from slipstream.evaluation_pair import compare_targets
from slipstream.evaluation_sets import forget_rows, prepare_eval_sets, prepare_held_out
from slipstream.evaluation_view import SetProgress, make_comparison, make_table
from slipstream.extras import require_extras, run_program
from slipstream.preparation import claim_folder
from slipstream.stop_signals import KILLED, Interrupted, StopSignals
from sync.folders import shared_memory_folder
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest

GENERATOR = "evaluate"
LOG_FILE = "evaluate.log"
LOG_BYTES = 16 << 20
"""Bytes after which the log begins anew. The one before stays."""
FAILED = 1
"""Exit status of a command with prompts that failed."""
PROMPT_ROOM = 4096
"""Tokens for prompts where nobody has said `generators.max_model_len`."""


@dataclass(slots=True)
class SetOutcome:
    """One set with its samples so far."""

    chosen: SoloSet
    settings: str
    """Digest of all that decides the samples."""
    samples: EvaluatedSamples
    errors: dict[int, str] = field(default_factory=dict)
    """By prompt: why it could not be played in this life."""

    @property
    def num_missing(self) -> int:
        return self.chosen.num_prompts - len(self.answered)

    @property
    def answered(self) -> dict[int, PromptSamples]:
        """Those of the set's prompts that have their samples."""
        known = self.samples.prompts
        return {index: known[index] for index in sorted(known) if index < self.chosen.num_prompts}

    def list_missing(self) -> Iterator[int]:
        return (index for index in range(self.chosen.num_prompts) if index not in self.samples.prompts)

    def summarize(self, version: int, digest: str) -> EvaluationResult:
        return summarize_samples(
            self.chosen.name,
            list(self.answered.values()),
            num_failed=len(self.errors),
            k=self.chosen.k,
            passes_at=self.chosen.passes_at,
            version=version,
            digest=digest,
        )


class Evaluation:
    """The evaluation of one model: its folder, its sets and their samples."""

    def __init__(
        self, target: Target, digest: str, identity: str, sets: Sequence[SoloSet], out: Path
    ) -> None:
        """`digest` is of the weights, `identity` of these and the files beside them. Raises ValueError where
        the folder holds the evaluation of another model."""
        self._target, self._digest, self._identity, self.folder = target, digest, identity, out
        out.mkdir(parents=True, exist_ok=True)
        claim_folder(out, "--out", "name a folder where no other command is at work")
        self._check_model()
        self.outcomes = []
        for chosen in sets:
            settings = chosen.digest_settings(identity)
            samples = EvaluatedSamples(out / f"{chosen.name}-{settings[:8]}")
            self.outcomes.append(SetOutcome(chosen, settings, samples))

    @property
    def is_complete(self) -> bool:
        return not any(outcome.num_missing for outcome in self.outcomes)

    def try_rewards(self, raise_if_stopped: Callable[[], None]) -> None:
        """Raises ValueError for a reward that cannot rate the first row: before an engine starts."""
        for outcome in self.outcomes:
            raise_if_stopped()
            config = outcome.chosen.config
            if outcome.num_missing and config.task.name == "dataset":
                try:
                    task = load_task(config.task.name, config.task_arguments)
                    try_reward(config, task, "eval", outcome.chosen.samples)
                except ValueError as error:
                    raise ValueError(f"{outcome.chosen.name} cannot be played: {error}") from error

    def play_sets(
        self,
        engine: Engine,
        progress: SetProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        """Plays the prompts that have no samples yet, set after set."""
        for outcome in self.outcomes:
            if outcome.num_missing and not should_stop():
                self._play_set(outcome, engine, progress, should_stop)

    def report(self) -> dict[str, Any]:
        """Returns what results.json holds, and writes it."""
        results = []
        for outcome in self.outcomes:
            result = outcome.summarize(self._target.version, self._digest)
            results.append(
                msgspec.json.decode(msgspec.json.encode(result))
                # A model folder has no version.
                | ({} if self._target.step is not None else {"versions": None})
                | {
                    "settings": outcome.settings,
                    "prompts_digest": outcome.chosen.digest_prompts(),
                    "wanted": outcome.chosen.num_prompts,
                    "missing": outcome.num_missing - len(outcome.errors),
                    "samples_folder": outcome.samples.folder.name,
                    "errors": {str(index): error for index, error in sorted(outcome.errors.items())},
                }
            )
        report = {
            "model": self._target.text,
            "step": self._target.step,
            "digest": self._digest,
            "folder": str(self.folder),
            "is_complete": self.is_complete,
            "results": results,
        }
        replace_file(self.folder / "results.json", json.dumps(report, indent=2).encode() + b"\n")
        return report

    def _check_model(self) -> None:
        known = self.folder / "model.json"
        if known.is_file():
            held = json.loads(known.read_bytes())
            if held.get("identity") != self._identity:
                raise ValueError(
                    f"--out must be new, or hold the evaluation of this model ({self._identity}), got "
                    f"{self.folder} with that of {held.get('model')} ({held.get('identity')})"
                )
            return
        if any(path.name != ".lock" for path in self.folder.iterdir()):
            raise ValueError(f"--out must be a new folder, got {self.folder}, which holds other files")
        told = {"model": self._target.text, "step": self._target.step, "identity": self._identity}
        replace_file(known, json.dumps(told, indent=2).encode() + b"\n")

    def _play_set(
        self,
        outcome: SetOutcome,
        engine: Engine,
        progress: SetProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        chosen, config = outcome.chosen, outcome.chosen.config
        with (
            progress.follow_set(chosen, outcome.answered),
            open_player(
                engine,
                make_episodes(config),
                max_tokens=config.sampling.max_tokens,
                max_episodes=config.max_episodes,
                timeout_s=config.episodes.timeout_s,
                max_attempts=config.buffer.max_attempts,
                temperature=chosen.temperature,
            ) as player,
            contextlib.closing(outcome.samples),
        ):
            leases = make_leases(chosen, outcome.list_missing(), self._target.version)
            for group in player.play_leases(leases, generator=GENERATOR, should_stop=should_stop):
                if group.error:
                    outcome.errors[group.lease.index] = group.error
                    progress.note_failure()
                else:
                    progress.note_prompt(outcome.samples.append_group(keep_messages(group)))


def make_leases(chosen: SoloSet, indices: Iterable[int], version: int) -> Iterator[Lease]:
    return (
        Lease(
            id=index,
            split="eval",
            task=chosen.config.task.name,
            index=index,
            seed=chosen.config.run.seed,
            group=index,
            due=max(0, version),
            min_version=max(0, version),
            num_samples=chosen.samples,
            evaluation=chosen.name,
        )
        for index in indices
    )


def keep_messages(group: SoloGroup) -> list[Any]:
    """Returns the rows with the conversation of each sample in the column `extra`, as JSON."""
    texts = [json.dumps({"messages": list(episode.messages)}, default=str) for episode in group.episodes]
    return [dataclasses.replace(row, extra=texts[row.sample]) for row in group.rows]


def evaluate_target(
    options: argparse.Namespace, signals: StopSignals, say: Console
) -> tuple[dict[str, Any], int]:
    """Returns the report and the exit status."""
    target = find_target(options.models[0], options.step)
    settings_of = options.settings_of or target.run
    config = load_settings(target, settings_of, options.overrides)
    config = choose_sets(config, options.overrides, settings_of is not None)
    require_extras(keep_used(config, target))
    outputs = Path(config.run.outputs) / "evaluations"
    with contextlib.ExitStack() as ends, signals.interruptible():
        with say.status(f"reading {target.text}"):
            folder, work = bring_model(target, config, outputs)
            if work is not None:
                ends.callback(shutil.rmtree, work, ignore_errors=True)
            publisher = Publisher(shared_memory_folder(f"evaluate-{os.getpid()}"), "evaluate")
            ends.callback(publisher.close)
            locator = publish_model(folder, publisher, str(config.model.dtype), target.version)
        signals.raise_if_received()
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))
        sets = prepare_sets(config, signals)
        manifest = read_manifest(locator)
        identity = digest_value([manifest.digest, digest_files(folder)])
        out = options.out or outputs / f"{target.name}-{identity[:8]}"
        evaluation = Evaluation(target, manifest.digest, identity, sets, out)
        write_log(out / LOG_FILE)
        if not evaluation.is_complete:
            evaluation.try_rewards(signals.raise_if_received)
            with say.status("starting the engine"):
                engine = make_engine(config, seed=config.run.seed)
                engine.load_version(Snapshot(manifest))
            with SetProgress(say) as progress:
                evaluation.play_sets(engine, progress, lambda: signals.received is not None)
        report = evaluation.report()
    if evaluation.is_complete:
        return report, 0
    return report, FAILED if signals.received is None else KILLED


def write_log(path: Path) -> None:
    """Has warnings and tracebacks of failed prompts in a file. The progress bars are on the terminal."""
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("slipstream")
    log.addHandler(handler)
    log.propagate = False


def load_settings(target: Target, settings_of: Path | None, overrides: Sequence[str]) -> Config:
    """Returns the configuration: that of a run, or the defaults, with the overrides on top, and the target's
    model.

    Where nobody has said how long prompt and reply may be together, a model folder's own limit holds, up to
    the longest reply and `PROMPT_ROOM`.
    """
    if settings_of is not None:
        config = forget_rows(load_recorded_config(settings_of, overrides), overrides)
        if target.run is None:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=target.text))
        return config
    named = [*overrides, f"model.path={target.text}"]
    key = "generators.max_model_len"
    if target.text == "tiny" or key in find_said_keys(overrides):
        return load_config(named)
    longest = read_longest_context(Path(target.text))
    config = load_config([*named, f"{key}={longest}"])
    replies = [one.max_tokens or config.sampling.max_tokens for one in config.eval.sets.values()]
    return load_config(
        [*named, f"{key}={min(longest, max([config.sampling.max_tokens, *replies]) + PROMPT_ROOM)}"]
    )


def choose_sets(config: Config, overrides: Sequence[str], is_run: bool) -> Config:
    """Returns the configuration with the sets that the command asks for: those that it names, or else all."""
    # Without a run, the configuration has no sets but those that the command names.
    named = find_named_sets(overrides) if is_run else config.eval.sets
    says_held_out = any(key.startswith(("eval.prompts", "data.eval")) for key in find_said_keys(overrides))
    with_held_out = says_held_out or not named
    asked = dataclasses.replace(
        config.eval,
        prompts=config.eval.prompts if with_held_out else 0,
        sets={name: one for name, one in config.eval.sets.items() if name in (named or config.eval.sets)},
    )
    return dataclasses.replace(config, eval=asked)


def keep_used(config: Config, target: Target) -> Config:
    """Returns the configuration without what this evaluation makes no use of, so needs no packages for."""
    data = config.data if config.data.eval is None else dataclasses.replace(config.data, train=None)
    # A checkpoint is exported by the engine that has written it. The kernels of training are not needed.
    learner = dataclasses.replace(config.learner, fsdp=FsdpConfig())
    return dataclasses.replace(
        config,
        data=data if config.eval.prompts else DataConfig(),
        learner=LearnerConfig() if target.run is None else learner,
        tracking=TrackingConfig(),
    )


def prepare_sets(config: Config, signals: StopSignals) -> list[SoloSet]:
    """Returns the sets with their rows. Raises ValueError where there is none."""
    config = dataclasses.replace(config, eval=prepare_eval_sets(config, signals.raise_if_received))
    if config.eval.prompts:
        config = prepare_held_out(config, signals.raise_if_received)
    sets = list_sets(config)
    if not sets:
        raise ValueError("eval.prompts must be above 0, or eval.sets name a set, got nothing to evaluate")
    return sets


@contextlib.contextmanager
def reserve_stdout() -> Iterator[TextIO]:
    """Keeps standard output for what the context writes to the file that it gets. All else that is printed
    meanwhile, by user code and the engine too, goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as file:
        os.dup2(2, 1)
        try:
            yield file
        finally:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="MODEL-OR-RUN|key=value")
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--settings-of", type=Path, metavar="RUN", help="take the settings of this run")
    options = parser.parse_intermixed_args(arguments)
    options.models = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    if not 1 <= len(options.models) <= 2:
        parser.error(f"MODEL-OR-RUN must be one, or two to compare, got {options.models or 'none'}")
    if len(options.models) == 2 and (options.step is not None or options.out is not None):
        parser.error("--step and --out must be left out where two are compared")
    return options


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    with reserve_stdout() as result:
        return run_command(options, result)


def run_command(options: argparse.Namespace, result: TextIO) -> int:
    """Evaluates, writes the table or the JSON to `result`, and returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    say, signals = Console(stderr=True), StopSignals()
    signals.install_handlers()
    try:
        if len(options.models) == 2:
            report, status = compare_targets(options.models, options.overrides, options.settings_of, signals)
        else:
            report, status = evaluate_target(options, signals, say)
    except Interrupted:
        say.print("interrupted: the same command goes on from here")
        return KILLED
    except ValueError as error:
        print(f"Slipstream cannot evaluate:\n{error}", file=sys.stderr)
        return 2
    finally:
        signals.ignore_further_signals()
    if options.json and report:
        print(json.dumps(report, indent=2), file=result)
    elif report:
        Console(file=result).print(make_comparison(report) if "models" in report else make_table(report))
    if status == KILLED:
        say.print("stopped before the end: the same command goes on from here")
    return status


if __name__ == "__main__":
    run_program(main)
