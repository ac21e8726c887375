"""Holds a journal, its log and the records that producers and consumer kept for themselves against each
other (`chaos.py`)."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from buffers import events as e
from buffers.book_state import export_book
from buffers.buffer import Buffer
from buffers.event_log import read_events
from buffers.prompts import PromptOrder
from buffers.run_status import RunStatus
from buffers.segments import Reader
from buffers.trajectory import flatten_column
from configs.schema import Config
from configs.staleness import OnLate

Train = Callable[[str, pa.Table], str]
"""(state, a step's groups) -> the next state: what the consumer does with what it is handed."""


@dataclass
class Audit:
    """What was found wrong, by kind, and the figures."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, int | str] = field(default_factory=dict)


@dataclass
class Records:
    """What the log says, read event by event, rewinds taken into account."""

    accepted: dict[int, e.Accepted] = field(default_factory=dict)
    leased: dict[int, int] = field(default_factory=dict)
    """Lease to group."""
    handed: dict[int, list[int]] = field(default_factory=dict)
    trained: dict[int, e.Trained] = field(default_factory=dict)
    told: list[e.Trained | e.Rewound | e.Repaired] = field(default_factory=list)
    """Steps and what undid them, in order."""
    damaged: set[int] = field(default_factory=set)
    """Groups that were rejected, or not trained again, because the disk had lost them."""
    cancelled: set[int] = field(default_factory=set)
    """Groups that held a step for too long: their prompts were given out, and are done with."""
    repaired: list[e.Repaired] = field(default_factory=list)
    loose: set[int] = field(default_factory=set)
    """Steps that were handed out before a repair, and may be handed out anew."""
    num_rewinds: int = 0
    num_undone: int = 0


def audit(folder: Path, config: Config, train: Train, status: RunStatus | None = None) -> Audit:
    """Audits the run in `folder`.

    `status` is what its server said of itself at the end, when nothing was under way.
    """
    found = Audit()
    bring_back(folder)
    records = _read(folder / "journal", found)
    batches = _read_groups(folder / "journal", records, found)
    _check_acknowledged(folder, records, batches, found)
    _check_training(config, records, batches, found)
    _check_states(folder, records, batches, train, found)
    _check_epochs(config, records, found)
    _check_ledger(folder, config, records, status, found)
    return found


def bring_back(folder: Path) -> None:
    """Undoes what stands in the way of the audit alone: what retention has discarded comes back, and so do
    changed bits."""
    journal = folder / "journal"
    for path in (folder / "discarded").rglob("*.*"):
        shutil.move(path, journal / path.relative_to(folder / "discarded"))
    rotten = folder / "rotten"
    for line in rotten.read_text().splitlines() if rotten.exists() else []:
        segment, place, bit = map(int, line.split())
        path = journal / f"{segment:06d}.arrow"
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))
    rotten.unlink(missing_ok=True)


def _read(journal: Path, found: Audit) -> Records:
    records = Records()
    for event in read_events(journal):
        match event:
            case e.Leased():
                if event.lease in records.leased:
                    found.wrong.append(f"lease {event.lease} was given out twice")
                records.leased[event.lease] = event.group
            case e.Accepted():
                if event.group in records.accepted:
                    found.wrong.append(f"group {event.group} was accepted twice")
                if records.leased.get(event.lease) != event.group:
                    found.wrong.append(
                        f"group {event.group} was accepted under lease {event.lease}, which is not for it"
                    )
                records.accepted[event.group] = event
            case e.Handed():
                if event.step in records.loose:
                    records.loose.discard(event.step)
                    records.handed[event.step] = event.groups
                if records.handed.setdefault(event.step, event.groups) != event.groups:
                    found.wrong.append(f"step {event.step} was handed out anew with other groups")
            case e.Rejected(group=group, reason="damaged"):
                records.damaged.add(group)
                records.handed = {
                    step: groups for step, groups in records.handed.items() if group not in groups
                }
            case e.Rejected(group=group, reason="cancelled"):
                records.cancelled.add(group)
            case e.Repaired():
                records.repaired.append(event)
                records.told.append(event)
                records.loose = {step for step in records.handed if step >= event.step}
            case e.Trained():
                records.told.append(event)
                if event.step in records.trained or event.step != len(records.trained):
                    found.wrong.append(f"step {event.step} was trained out of order")
                if records.handed.get(event.step) != event.groups:
                    found.wrong.append(f"step {event.step} trained other groups than it was handed")
                records.trained[event.step] = event
            case e.Rewound():
                records.told.append(event)
                records.num_rewinds += 1
                records.num_undone += sum(step >= event.step for step in records.trained)
                records.trained = {step: done for step, done in records.trained.items() if step < event.step}
    found.figures["steps trained"] = len(records.trained)
    found.figures["steps undone by rewinds"] = f"{records.num_undone} in {records.num_rewinds} rewinds"
    return records


def _read_groups(journal: Path, records: Records, found: Audit) -> dict[int, pa.RecordBatch]:
    reader, batches = Reader(journal), {}
    for group, event in records.accepted.items():
        try:
            batches[group] = reader.read(event)
        except ValueError as error:
            found.wrong.append(f"group {group} cannot be read: {error}")
    found.figures["groups accepted"] = len(records.accepted)
    found.figures["tokens in the journal"] = sum(event.tokens for event in records.accepted.values())
    return batches


def _check_acknowledged(
    folder: Path, records: Records, batches: dict[int, pa.RecordBatch], found: Audit
) -> None:
    """What a producer was told is accepted must be in the journal, under its lease."""
    acknowledged = {
        tuple(map(int, line.split()))
        for path in folder.glob("*.acknowledged")
        for line in path.read_text().splitlines()
        if len(line.split()) == 2
    }
    excused = {group for event in records.repaired for group in event.lost}
    lost = [
        pair
        for pair in acknowledged
        if pair[1] not in excused
        and (pair[1] not in batches or (records.accepted[pair[1]].lease != pair[0] and not records.repaired))
    ]
    found.wrong += [f"acknowledged group {group} (lease {lease}) is lost" for lease, group in lost]
    found.figures["groups that the disk lost, replaced"] = len(records.damaged)
    found.figures["repairs, groups that they list as lost"] = f"{len(records.repaired)}, {len(excused)}"
    found.figures["groups acknowledged to producers"] = len(acknowledged)
    found.figures["acknowledged groups lost"] = len(lost)


def _check_training(
    config: Config, records: Records, batches: dict[int, pa.RecordBatch], found: Audit
) -> None:
    """Each group once, at its own step, whole steps, and no token beyond the bound."""
    uses = Counter(group for done in records.trained.values() for group in done.groups)
    twice = [group for group, times in uses.items() if times > 1]
    found.wrong += [f"group {group} was trained {uses[group]} times" for group in twice]
    beyond = 0
    for step, done in sorted(records.trained.items()):
        if len(done.groups) != config.learner.groups_per_step:
            found.wrong.append(f"step {step} trained {len(done.groups)} groups")
        for group in done.groups:
            if group not in records.accepted:
                found.wrong.append(f"group {group} was trained at step {step} and never accepted")
            elif (
                config.staleness.on_late is not OnLate.mask
                and records.accepted[group].due != step
                and not any(
                    step >= repaired.step for repaired in records.repaired
                )  # which may leave more groups than places
            ):
                due = records.accepted[group].due
                found.wrong.append(f"group {group}, due at {due}, was trained at step {step}")
            if group in batches:
                versions = flatten_column(batches[group], "versions")
                stale = step - versions[versions >= 0]
                late = int(((stale < 0) | (stale > config.max_versions)).sum())
                beyond += late - done.excluded[done.groups.index(group)]
    if beyond:
        found.wrong.append(f"{beyond} tokens were beyond the staleness bound when they were trained")
    found.figures["groups trained twice"] = len(twice)
    found.figures["tokens beyond the bound"] = beyond


def _check_states(
    folder: Path, records: Records, batches: dict[int, pa.RecordBatch], train: Train, found: Audit
) -> None:
    """The consumer's states and checkpoints must be those that the journal, trained in the order of the
    log, leads to."""
    states = [""]
    reached: dict[int, set[str]] = {0: {""}}  # by steps trained, in any life
    for event in records.told:
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
    told = [
        (f"the state after step {step}", int(step) + 1, told)
        for step, _, told in (x.partition(" ") for x in lines)
    ]
    excused = 0
    for number, (what, num_trained, state) in enumerate(told):
        if num_trained not in reached or state in reached[num_trained]:
            continue
        if _was_lost(folder, records, number, num_trained):
            excused += 1
        else:
            found.wrong.append(f"{what} is not what the journal leads to")
    for path in folder.glob("checkpoints/*.json"):
        num_trained, state = int(path.stem), json.loads(path.read_text())["state"]
        if num_trained in reached and state not in reached[num_trained]:
            found.wrong.append(f"the checkpoint of step {path.stem} is not what the journal leads to")
    found.figures["states compared (not after a repair)"] = f"{len(told) - excused} ({excused})"


def _was_lost(folder: Path, records: Records, number: int, num_trained: int) -> bool:
    """True for a line of the consumer's states that tells of a step which the log had lost before a
    repair."""
    before = (
        [int(line) for line in (folder / "repairs").read_text().split()]
        if (folder / "repairs").exists()
        else []
    )
    repairs = zip(before, records.repaired, strict=False)
    return any(number < lines and num_trained > event.step for lines, event in repairs)


def _check_epochs(config: Config, records: Records, found: Audit) -> None:
    """Group numbers have no gaps, and each epoch has every prompt once."""
    size = config.task.size
    assert size is not None
    groups = set(records.leased.values())
    if groups != set(range(len(groups))):
        found.wrong.append(
            f"of groups 0..{max(groups)}, {max(groups) + 1 - len(groups)} were never given out"
        )
    prompts: dict[int, Counter[int]] = {}
    for group, event in records.accepted.items():
        prompts.setdefault(group // size, Counter())[event.prompt] += 1
    order = PromptOrder(size, config.run.seed)
    for group in sorted(records.cancelled):
        prompts.setdefault(group // size, Counter())[order.prompt_index(group)] += 1
    for epoch, counts in sorted(prompts.items()):
        if max(counts.values()) > 1 or not set(counts) <= set(range(size)):
            found.wrong.append(
                f"epoch {epoch} has a prompt twice, or one that is not of the task: {counts.most_common(1)}"
            )
    done = max((max(event.groups) for event in records.trained.values()), default=-1) + 1
    whole = [epoch for epoch in range(done // size) if len(prompts.get(epoch, ())) == size]
    if len(whole) < done // size - 1:  # the last may have a group that was leased early and is due late
        found.wrong.append(f"{done // size} epochs are behind, and {len(whole)} have every prompt")
    found.figures["epochs with every prompt once"] = f"{len(whole)} of {done // size}"


def _check_ledger(
    folder: Path, config: Config, records: Records, status: RunStatus | None, found: Audit
) -> None:
    """The newest state and the log since, and the log alone from its beginning, must make the same ledger,
    which closes and agrees with the journal and with `status`."""
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
        found.wrong.append(f"the log cannot be applied: {type(error).__name__}: {error}")
        return
    if export_book(whole.book) != export_book(buffer.book):
        found.wrong.append("the newest state and the log since lead elsewhere than the log alone")
    ledger, pool = buffer.book.ledger, buffer.book.pool.groups
    trained = [group for done in records.trained.values() for group in done.groups]
    if not ledger.closes() or buffer.book.history.trained_twice:
        found.wrong.append(f"the ledger does not close: {vars(ledger)}")
    if ledger.groups["trained"] != len(trained) or len(trained) + len(pool) + len(records.damaged) != len(
        records.accepted
    ):
        found.wrong.append(
            f"the ledger has {ledger.groups} groups; {len(trained)} trained, {len(records.accepted)} accepted"
        )
    num_trained = sum(sum(done.trained) for done in records.trained.values())
    num_excluded = sum(sum(done.excluded) for done in records.trained.values())
    if ledger.tokens["trained"] != num_trained or num_trained + num_excluded != sum(
        records.accepted[group].tokens for group in trained
    ):
        found.wrong.append(f"the ledger has {ledger.tokens['trained']} tokens trained, the journal others")
    if status is not None and (status.tokens, status.groups) != (
        ledger.token_account(),
        ledger.group_account(),
    ):
        found.wrong.append(f"the server said {status.tokens}, {status.groups}; its log says {vars(ledger)}")
    found.figures["ledger, groups"] = _account(ledger.leased, ledger.groups)
    found.figures["ledger, tokens"] = _account(ledger.generated, ledger.tokens)


def _account(total: int, fates: Counter[str]) -> str:
    return f"{total:,} = " + " + ".join(
        f"{number:,} {fate}" for fate, number in sorted(fates.items()) if number
    )
