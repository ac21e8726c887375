"""The audits of `chaos.py` and `chaos_run.py`: they compare a journal, its log, and the records of the
producers and the consumer.

The producers and the consumer write their own files, so these files can contradict the journal and the log.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from buffers import events as e
from buffers.book import Book
from buffers.book_state import export_book
from buffers.buffer import Buffer
from buffers.event_log import read_events
from buffers.ledger import Ledger
from buffers.prompts import PromptOrder
from buffers.run_status import RunStatus
from buffers.segments import Reader
from buffers.terms import SourceTerms
from buffers.trajectory import flatten_column
from configs.buffer import Durability
from configs.schema import Config
from configs.staleness import OnLate

LOGGED_FATES = ("trained", "masked", "late", "zero_variance", "uninformative", "unsampled", "damaged")
"""Fates of tokens that events count to the last one. Attempts that came to nothing may have sampled tokens of
which a last heartbeat told."""
TrainFunction = Callable[[str, pa.Table], str]
"""(state, groups of a step) -> the next state. It stands for the training step of the consumer."""


@dataclass
class AuditReport:
    """The problems that an audit found, in words, and the figures that it counted."""

    problems: list[str] = field(default_factory=list)
    figures: dict[str, int | str] = field(default_factory=dict)


@dataclass
class LogRecords:
    """The content of the log, read event by event. A rewind removes the steps that it undoes."""

    accepted: dict[int, e.Accepted] = field(default_factory=dict)
    group_of_lease: dict[int, int] = field(default_factory=dict)
    """The group of each lease, by lease."""
    prompt_of_group: dict[int, int] = field(default_factory=dict)
    """The prompt that each group was leased with, by group."""
    handed_out: dict[int, list[int]] = field(default_factory=dict)
    """The groups that the buffer handed out, by step."""
    trained: dict[int, e.Trained] = field(default_factory=dict)
    history: list[e.Trained | e.Rewound | e.Repaired] = field(default_factory=list)
    """Trained steps, and the rewinds and repairs that undid some of them, in the order of the log."""
    damaged_groups: set[int] = field(default_factory=set)
    """Groups that the buffer rejected, or did not hand out again, because the disk had lost them."""
    given_up: dict[int, str] = field(default_factory=dict)
    """Why accepted groups were rejected, by group."""
    cancelled_groups: set[int] = field(default_factory=set)
    """Groups that delayed a step for too long. Their prompts were leased, and are not leased again."""
    repairs: list[e.Repaired] = field(default_factory=list)
    reopened_steps: set[int] = field(default_factory=set)
    """Steps that were handed out before a repair. The buffer may hand them out again, with other groups."""
    num_rewinds: int = 0
    num_undone: int = 0
    num_resumed: int = 0
    """Rewinds to a checkpoint: the others go back to the model itself."""


def audit_run(
    folder: Path, config: Config, train: TrainFunction, status: RunStatus | None = None
) -> AuditReport:
    """Audits the run in `folder`, whose processes have ended.

    `train` is the training step of the consumer. `status` is the last answer of the server about itself,
    asked when nothing was under way; without it, that comparison is left out.
    """
    found = AuditReport()
    restore_journal(folder)
    records = _read_log(folder / "journal", found)
    batches = _read_groups(folder / "journal", records, found)
    _check_acknowledged(folder, records, batches, found)
    _check_training(config, records, batches, found)
    _check_states(folder, records, batches, train, found)
    _check_epochs(config, records, found)
    _check_ledger(folder, config, records, status, found)
    return found


def audit_whole_run(folder: Path, witnesses: Path, config: Config, summary: dict[str, Any]) -> AuditReport:
    """Audits a whole run in `folder` that has ended, with the last `summary` that it wrote. `witnesses` has
    what its generators wrote down."""
    found = AuditReport()
    records = _read_log(folder / "journal", found)
    batches = _read_groups(folder / "journal", records, found)
    _check_acknowledged(
        witnesses, records, batches, found, may_lose=config.buffer.durability is Durability.none
    )
    _check_witnesses(records, found)
    found.problems += [
        f"group {group} was accepted and given up as {reason}"
        for group, reason in sorted(records.given_up.items())
        # Under `mask` a group may come when all of its tokens are too old.
        if (reason, config.staleness.on_late) != ("unsampled", OnLate.mask)
    ]
    found.problems += ["the journal was repaired" for _ in records.repairs]
    _check_training(config, records, batches, found)
    ledger = _check_ledger(folder, config, records, None, found)
    found.problems += [f"the summary does not add up: {text}" for text in find_open_accounts(summary)]
    if ledger is not None:
        found.problems += compare_summary(summary, ledger)
    return found


def compare_summary(summary: dict[str, Any], ledger: Ledger) -> list[str]:
    """Returns the numbers that differ between a run's last summary and the ledger that its log leads to."""
    tokens, groups = summary["tokens"], summary["groups"]
    pairs = {
        "groups leased": (groups["leased"], ledger.leased),
        "groups trained": (groups["trained"], ledger.groups["trained"]),
        "tokens trained": (tokens["trained"], ledger.tokens["trained"]),
        "tokens masked": (tokens["masked"], ledger.tokens["masked"]),
    }
    return [
        f"{name}: the summary has {said}, the journal {counted}"
        for name, (said, counted) in pairs.items()
        if said != counted
    ]


def find_open_accounts(summary: dict[str, Any]) -> list[str]:
    """Returns the equations of a run's summary that do not hold."""
    tokens, groups, staleness = summary["tokens"], summary["groups"], summary["staleness"]
    rest = sum(tokens["rejected"].values()) + tokens["in_flight"]
    held = groups["trained"] + sum(groups["rejected"].values()) + groups["in_flight"]
    equations = {
        "tokens generated": (tokens["generated"], tokens["trained"] + tokens["masked"] + rest),
        "groups leased": (groups["leased"], held),
        "groups trained twice": (groups["trained_twice"], 0),
        "tokens by staleness": (sum(staleness["histogram"].values()), tokens["trained"]),
        "tokens beyond the bound": (max(staleness["max"] - staleness["max_versions"], 0), 0),
    }
    return [f"{name}: {left} and {right}" for name, (left, right) in equations.items() if left != right]


def restore_journal(folder: Path) -> None:
    """Undoes the two changes that only hinder the audit.

    The files that retention discarded move back, and each bit that `chaos.py` flipped in a group is flipped
    back.
    """
    journal = folder / "journal"
    for path in (folder / "discarded").rglob("*.*"):
        shutil.move(path, journal / path.relative_to(folder / "discarded"))
    flipped = folder / "flipped_bits"
    for line in flipped.read_text().splitlines() if flipped.exists() else []:
        segment, place, bit = map(int, line.split())
        path = journal / f"{segment:06d}.arrow"
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))
    flipped.unlink(missing_ok=True)


def _read_log(journal: Path, found: AuditReport) -> LogRecords:
    records = LogRecords()
    for event in read_events(journal):
        if isinstance(event, e.Rejected) and event.group in records.accepted:
            records.given_up[event.group] = event.reason
        match event:
            case e.Leased():
                if event.lease in records.group_of_lease:
                    found.problems.append(f"lease {event.lease} was granted twice")
                records.group_of_lease[event.lease] = event.group
                if records.prompt_of_group.setdefault(event.group, event.prompt) != event.prompt:
                    found.problems.append(f"group {event.group} was leased again with another prompt")
            case e.Accepted():
                if event.group in records.accepted:
                    found.problems.append(f"group {event.group} was accepted twice")
                if records.group_of_lease.get(event.lease) != event.group:
                    found.problems.append(
                        f"group {event.group} was accepted under lease {event.lease}, which is not its own"
                    )
                if records.prompt_of_group.setdefault(event.group, event.prompt) != event.prompt:
                    found.problems.append(f"group {event.group} was accepted with another prompt")
                records.accepted[event.group] = event
            case e.Handed():
                if event.step in records.reopened_steps:
                    records.reopened_steps.discard(event.step)
                    records.handed_out[event.step] = event.groups
                if records.handed_out.setdefault(event.step, event.groups) != event.groups:
                    found.problems.append(f"step {event.step} was handed out again with other groups")
            case e.Rejected(group=group, reason="damaged"):
                records.damaged_groups.add(group)
                records.handed_out = {
                    step: groups for step, groups in records.handed_out.items() if group not in groups
                }
            case e.Rejected(group=group, reason="cancelled"):
                records.cancelled_groups.add(group)
            case e.Repaired():
                records.repairs.append(event)
                records.history.append(event)
                records.reopened_steps = {step for step in records.handed_out if step >= event.step}
            case e.Trained():
                records.history.append(event)
                if event.step in records.trained or event.step != len(records.trained):
                    found.problems.append(f"step {event.step} was trained out of order")
                if records.handed_out.get(event.step) != event.groups:
                    found.problems.append(
                        f"step {event.step} trained other groups than the buffer handed out"
                    )
                records.trained[event.step] = event
            case e.Rewound():
                records.history.append(event)
                records.num_rewinds += 1
                records.num_resumed += event.step > 0
                records.num_undone += sum(step >= event.step for step in records.trained)
                records.trained = {step: done for step, done in records.trained.items() if step < event.step}
    found.figures["steps trained"] = len(records.trained)
    found.figures["steps undone by rewinds"] = (
        f"{records.num_undone} in {records.num_rewinds} rewinds, {records.num_resumed} to a checkpoint"
    )
    return records


def _read_groups(journal: Path, records: LogRecords, found: AuditReport) -> dict[int, pa.RecordBatch]:
    reader, batches = Reader(journal), {}
    for group, event in records.accepted.items():
        try:
            batches[group] = reader.read(event)
        except ValueError as error:
            found.problems.append(f"group {group} cannot be read: {error}")
    found.figures["groups accepted"] = len(records.accepted)
    found.figures["tokens in the journal"] = sum(event.tokens for event in records.accepted.values())
    return batches


def _check_acknowledged(
    folder: Path,
    records: LogRecords,
    batches: dict[int, pa.RecordBatch],
    found: AuditReport,
    *,
    may_lose: bool = False,
) -> None:
    """Checks that the journal holds each group that the buffer acknowledged to a producer, under its
    lease. `may_lose`: a buffer that was killed may have lost some (`buffer.durability=none`)."""
    acknowledged = {
        tuple(map(int, line.split()))
        for path in folder.glob("*.acknowledged")
        for line in path.read_text().splitlines()
        if len(line.split()) == 2
    }
    excused = {group for event in records.repairs for group in event.lost}
    lost = [
        pair
        for pair in acknowledged
        if pair[1] not in excused
        and (pair[1] not in batches or (records.accepted[pair[1]].lease != pair[0] and not records.repairs))
    ]
    if not may_lose:
        found.problems += [f"acknowledged group {group} (lease {lease}) is lost" for lease, group in lost]
    found.figures["groups that the disk lost, replaced"] = len(records.damaged_groups)
    found.figures["repairs, groups that they list as lost"] = f"{len(records.repairs)}, {len(excused)}"
    found.figures["groups acknowledged to producers"] = len(acknowledged)
    found.figures["acknowledged groups lost"] = len(lost)


def _check_witnesses(records: LogRecords, found: AuditReport) -> None:
    """Checks that the generators wrote down most of what the journal holds: the others, a few, were killed
    before they could. An audit without witnesses would find nothing lost."""
    acknowledged = int(found.figures["groups acknowledged to producers"])
    if acknowledged < len(records.accepted) / 2:
        found.problems.append(
            f"the generators wrote down {acknowledged} of {len(records.accepted)} accepted groups"
        )


def _check_training(
    config: Config, records: LogRecords, batches: dict[int, pa.RecordBatch], found: AuditReport
) -> None:
    """Checks that each step is whole, trains each group once and at its own step, and no token that is too
    stale."""
    uses = Counter(group for done in records.trained.values() for group in done.groups)
    twice = [group for group, times in uses.items() if times > 1]
    found.problems += [f"group {group} was trained {uses[group]} times" for group in twice]
    beyond = late_in_time = 0
    masks = config.staleness.on_late is OnLate.mask
    for step, done in sorted(records.trained.items()):
        # A repair may leave more groups than places, so the steps after it may train a group late.
        is_repaired = any(step >= repaired.step for repaired in records.repairs)
        if len(done.groups) != config.learner.groups_per_step:
            found.problems.append(f"step {step} trained {len(done.groups)} groups")
        for group in done.groups:
            if group not in records.accepted:
                found.problems.append(f"group {group} was trained at step {step} and never accepted")
            elif not (masks or is_repaired) and records.accepted[group].due != step:
                due = records.accepted[group].due
                found.problems.append(f"group {group}, due at {due}, was trained at step {step}")
            if group in batches:
                versions = flatten_column(batches[group], "versions")
                stale = step - versions[versions >= 0]
                late = int(((stale < 0) | (stale > config.max_versions)).sum())
                beyond += max(0, late - done.excluded[done.groups.index(group)])
                late_in_time += 0 if masks or is_repaired else late
    if late_in_time:
        found.problems.append(
            f"{late_in_time} tokens that steps were handed were more than `max_versions` versions old under "
            f"on_late={config.staleness.on_late}"
        )
    if beyond:
        found.problems.append(f"{beyond} trained tokens were more than `max_versions` versions old")
    staleness = sum((Counter(done.staleness) for done in records.trained.values()), Counter[int]())
    found.figures["trained tokens by staleness"] = ", ".join(
        f"{versions}: {tokens}" for versions, tokens in sorted(staleness.items())
    )
    found.figures["groups trained twice"] = len(twice)
    found.figures["trained tokens older than max_versions"] = beyond


def _check_states(
    folder: Path,
    records: LogRecords,
    batches: dict[int, pa.RecordBatch],
    train: TrainFunction,
    found: AuditReport,
) -> None:
    """Trains the journal again in the order of the log, and compares the states with those of the consumer.

    Each state that the consumer wrote down and each of its checkpoints must be among them.
    """
    states = [""]
    # By number of trained steps: every state that the run had then. A run that rewinds reaches a step again.
    reached: dict[int, set[str]] = {0: {""}}
    for event in records.history:
        if isinstance(event, e.Trained):
            groups = [batches[group] for group in event.groups if group in batches]
            states = [
                *states[: event.step + 1],
                train(states[-1], pa.Table.from_batches(groups)) if groups else states[-1],
            ]
            reached.setdefault(event.step + 1, set()).add(states[-1])
        else:
            states = states[: event.step + 1]
    lines = (folder / "consumer.states").read_text().splitlines()
    written = [
        (f"the state after step {step}", int(step) + 1, state)
        for step, _, state in (line.partition(" ") for line in lines)
    ]
    excused = 0
    for number, (what, num_trained, state) in enumerate(written):
        if num_trained not in reached or state in reached[num_trained]:
            continue
        if _is_excused_by_repair(folder, records, number, num_trained):
            excused += 1
        else:
            found.problems.append(f"{what} is not the state that the journal leads to")
    for path in folder.glob("checkpoints/*.json"):
        num_trained, state = int(path.stem), json.loads(path.read_text())["state"]
        if num_trained in reached and state not in reached[num_trained]:
            found.problems.append(
                f"the checkpoint of step {path.stem} is not the state that the journal leads to"
            )
    found.figures["states compared (not after a repair)"] = f"{len(written) - excused} ({excused})"


def _is_excused_by_repair(folder: Path, records: LogRecords, number: int, num_trained: int) -> bool:
    """True for a line of the consumer's states whose step is not in the log, because a repair cut the log
    off.

    The file `repairs` holds, for each repair, how many lines the consumer had written before it.
    """
    path = folder / "repairs"
    before = [int(line) for line in path.read_text().split()] if path.exists() else []
    repairs = zip(before, records.repairs, strict=False)
    return any(number < lines and num_trained > event.step for lines, event in repairs)


def _check_epochs(config: Config, records: LogRecords, found: AuditReport) -> None:
    """Checks that group numbers have no gaps, and that each epoch has every prompt once."""
    size = config.task.size
    assert size is not None
    groups = set(records.group_of_lease.values())
    if groups != set(range(len(groups))):
        found.problems.append(
            f"{max(groups) + 1 - len(groups)} of the groups 0..{max(groups)} were never leased"
        )
    prompts: dict[int, Counter[int]] = {}
    for group, event in records.accepted.items():
        prompts.setdefault(group // size, Counter())[event.prompt] += 1
    order = PromptOrder([SourceTerms("", size)], config.run.seed)
    for group in sorted(records.cancelled_groups):
        prompts.setdefault(group // size, Counter())[order.prompt_index(group)] += 1
    for epoch, counts in sorted(prompts.items()):
        if max(counts.values()) > 1 or not set(counts) <= set(range(size)):
            found.problems.append(
                f"epoch {epoch} has a prompt twice, or one that the task lacks: {counts.most_common(1)}"
            )
    done = max((max(event.groups) for event in records.trained.values()), default=-1) + 1
    whole = [epoch for epoch in range(done // size) if len(prompts.get(epoch, ())) == size]
    # The last epoch may lack a group that was leased early and is due late.
    if len(whole) < done // size - 1:
        found.problems.append(f"{done // size} epochs are over, and {len(whole)} of them have every prompt")
    found.figures["epochs with every prompt once"] = f"{len(whole)} of {done // size}"


def _check_ledger(
    folder: Path, config: Config, records: LogRecords, status: RunStatus | None, found: AuditReport
) -> Ledger | None:
    """Recovers the buffer twice, and compares the ledgers with each other, the journal and `status`.

    Once from the newest state and the log since then, once from the whole log. Both must lead to one ledger,
    and the ledger must close. Returns it; None where the log cannot be applied.
    """
    alone = folder / "log_alone"
    shutil.rmtree(alone, ignore_errors=True)
    (alone / "log").mkdir(parents=True)
    for path in (folder / "journal/log").glob("*.jsonl"):
        shutil.copy(path, alone / "log")
    for path in (folder / "journal").glob("*.arrow"):
        (alone / path.name).symlink_to(path.resolve())
    try:
        whole = Buffer(config, alone)
        whole.journal.close()
        buffer = Buffer(config, folder / "journal")
        buffer.close()
    except Exception as error:
        found.problems.append(f"the log cannot be applied: {type(error).__name__}: {error}")
        return None
    if describe_logged_book(whole.book) != describe_logged_book(buffer.book):
        found.problems.append(
            "the newest state and the log after it lead to another ledger than the whole log"
        )
    ledger, pool = buffer.book.ledger, buffer.book.pool.groups
    trained = [group for done in records.trained.values() for group in done.groups]
    if not ledger.closes() or buffer.book.history.trained_twice:
        found.problems.append(f"the ledger does not close: {vars(ledger)}")
    num_held = len(trained) + len(pool) + len(records.given_up)
    if ledger.groups["trained"] != len(trained) or num_held != len(records.accepted):
        found.problems.append(
            f"the ledger has {ledger.groups} groups; {len(trained)} trained, {len(records.accepted)} accepted"
        )
    if ledger.leased != len(records.group_of_lease) and not records.repairs:
        found.problems.append(
            f"the ledger has {ledger.leased} leases; the log has granted {len(records.group_of_lease)}"
        )
    num_trained = sum(sum(done.trained) for done in records.trained.values())
    num_excluded = sum(sum(done.excluded) for done in records.trained.values())
    if ledger.tokens["trained"] != num_trained or num_trained + num_excluded != sum(
        records.accepted[group].tokens for group in trained
    ):
        found.problems.append(
            f"the ledger has {ledger.tokens['trained']} trained tokens, the journal {num_trained}"
        )
    if status is not None and (status.tokens, status.groups) != (
        ledger.token_account(),
        ledger.group_account(),
    ):
        found.problems.append(
            f"the server said {status.tokens}, {status.groups}; its log says {vars(ledger)}"
        )
    found.figures["ledger, groups"] = _format_account(ledger.leased, ledger.groups)
    found.figures["ledger, tokens"] = _format_account(ledger.generated, ledger.tokens)
    return ledger


def _format_account(total: int, fates: Counter[str]) -> str:
    return f"{total:,} = " + " + ".join(
        f"{number:,} {fate}" for fate, number in sorted(fates.items()) if number
    )


def describe_logged_book(book: Book) -> dict[str, object]:
    """Returns the state of a book as far as events record it: without the token counts of attempts that
    heartbeats alone have told."""
    state = msgspec.to_builtins(export_book(book))
    for attempt in (*state["attempts_under_way"], *state["attempts_ended"]):
        if attempt[4] != "accepted":
            attempt[3] = 0
    generated, leased, tokens, groups, *rest = state.pop("ledger")
    kept = {fate: tokens.get(fate, 0) for fate in LOGGED_FATES}
    return state | {"ledger": [leased, {fate: n for fate, n in groups.items() if n}, kept, *rest]}
