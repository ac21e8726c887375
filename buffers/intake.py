"""The intake: groups that generators submit are checked, written to the journal and booked.

    submit ─▶ check every row ─▶ append to the journal ─▶ book as accepted
                                                             └─▶ refills: reject what teaches nothing

The learner's part stands in `buffers.progress`.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from buffers import events as e
from buffers.book import Book
from buffers.group_checks import (
    CheckedMessage,
    ExpectedGroup,
    GroupFacts,
    check_groups,
    slice_groups,
    split_message,
)
from buffers.journal import Journal
from buffers.refills import Refills
from buffers.refusal import RefusalCounts
from buffers.trajectory import SCHEMA_VERSION, MalformedGroup, encode_batch
from buffers.vocabulary import read_routing, read_vocabulary
from buffers.watchdog import Watchdog
from configs.schema import Config

log = logging.getLogger("slipstream.buffer")


class Intake:
    def __init__(
        self,
        config: Config,
        book: Book,
        journal: Journal,
        refusals: RefusalCounts,
        watchdog: Watchdog,
        milestones: dict[str, float],
    ) -> None:
        self._config, self._book, self._journal = config, book, journal
        self._refusals, self._watchdog, self._milestones = refusals, watchdog, milestones
        self._vocabulary = read_vocabulary(Path(config.model.path))
        self._routing = read_routing(Path(config.model.path), config.learner.moe.router_replay)
        self.refills = Refills(config, book.supply.refills)
        self.quarantined_in_a_row = 0
        """Groups that have failed for good since the last accepted one."""

    def submit_groups(
        self, generator: str, leases: Sequence[int], rows: Sequence[int], schema: int, data: memoryview
    ) -> list[str]:
        """Checks, journals and books the groups of some leases; returns a verdict for each lease.

        `data` holds the rows of all of them, and `rows` says how many are of each lease.

        `accepted`; `zero_variance` or `uninformative` (complete, and rejected: `buffers.refills`);
        `duplicate`; or `failed` (and counted as refused, because the group breaks a rule, or the message
        cannot be read at all).
        """
        num_samples = self._book.terms.samples_per_prompt
        wanted = self._find_wanted(leases, rows)
        spent: dict[int, int] = {}
        found = None
        try:
            if schema != SCHEMA_VERSION:
                raise MalformedGroup(f"schema version must be {SCHEMA_VERSION}, got {schema}")
            if len(rows) != len(leases):
                raise MalformedGroup(f"`rows` must be as long as `leases`, {len(leases)}, got {len(rows)}")
            if len(wanted) < len(leases):
                data, spent = split_message(data, rows, wanted)
            if wanted:
                found = check_groups(
                    data,
                    list(wanted.values()),
                    num_samples=num_samples,
                    newest_version=self._book.history.newest_version,
                    longest=self._config.longest_row,
                    vocabulary=self._vocabulary,
                    routing=self._routing,
                    max_turns=self._config.episodes.max_turns,
                )
        except MalformedGroup as error:
            self._refusals.refuse_message("malformed group", f"from {generator}: {error}")
            for place in wanted:
                self.fail_lease(leases[place], 0, str(error))
        stored = iter(
            ()
            if found is None
            else self._store(generator, [leases[place] for place in wanted], [*wanted.values()], data, found)
        )
        return [
            next(stored, "failed") if place in wanted else self._settle_unwanted(lease, spent.get(place, 0))
            for place, lease in enumerate(leases)
        ]

    def _find_wanted(self, leases: Sequence[int], rows: Sequence[int]) -> dict[int, ExpectedGroup]:
        """Returns, by place in the message, the groups that are still open.

        A group counts once in a message.
        """
        wanted: dict[int, ExpectedGroup] = {}
        groups: set[int] = set()
        for place, lease in enumerate(leases):
            held = self._book.leases.find_open_group(lease)
            if held is not None and held[0] not in groups:
                groups.add(held[0])
                num_rows = rows[place] if place < len(rows) else 0
                prompt = self._book.leases.open_groups[held[0]].prompt
                wanted[place] = ExpectedGroup(*held, prompt, num_rows)
        return wanted

    def _settle_unwanted(self, lease: int, num_tokens: int) -> str:
        """Books a group that is complete already, or that nobody waits for any more; returns the verdict."""
        leases = self._book.leases
        if leases.attempts.is_accepted(lease):
            return "accepted"  # sent again because the receipt was lost
        if leases.find_open_group(lease) is not None:
            return self.fail_lease(lease, num_tokens, "handed in twice in one message, and refused")
        if leases.attempts.find_attempt(lease) is not None:
            leases.count_duplicate(lease, num_tokens)
        return "duplicate"

    def _store(
        self,
        generator: str,
        leases: list[int],
        expected: list[ExpectedGroup],
        data: memoryview,
        found: CheckedMessage,
    ) -> Iterator[str]:
        """Appends the whole groups of a message to the journal and books them; yields a verdict for each
        lease."""
        if any(isinstance(facts, GroupFacts) for facts in found.verdicts):
            message = data
            if not found.is_storable:
                groups = slice_groups(found.batch, [one.rows for one in expected])
                parts = [
                    group
                    for group, facts in zip(groups, found.verdicts, strict=True)
                    if isinstance(facts, GroupFacts)
                ]
                message = memoryview(encode_batch(pa.concat_batches(parts))).cast("B")
            segment, offset, xxh3 = self._journal.append_batch(message)
            self._watchdog.note_movement()
            self.quarantined_in_a_row = 0
            self._milestones.setdefault("first_group", time.time())
        row = 0
        for lease, wanted, facts in zip(leases, expected, found.verdicts, strict=True):
            if isinstance(facts, MalformedGroup):
                self._refusals.refuse_message("malformed group", f"from {generator}: {facts}")
                self.fail_lease(lease, 0, str(facts))
                yield "failed"
                continue
            held = self._book.leases.find_open_group(lease)
            assert held is not None
            group, due = held
            if self._book.leases.is_too_new(due, facts.newest_version):
                row += wanted.rows
                error = f"sampled by version {facts.newest_version}, newer than the step {due} that it is for"
                self._book.leases.fail_lease(lease, facts.num_tokens, error, counts=False)
                yield "failed"
                continue
            content = e.Accepted(
                lease=lease,
                group=group,
                due=due,
                prompt=wanted.prompt,
                segment=segment,
                offset=offset,
                size=len(message),
                xxh3=xxh3,
                row=row,
                rows=wanted.rows,
                tokens=facts.num_tokens,
                oldest=facts.oldest_version,
                newest=facts.newest_version,
                reward_mean=facts.reward_mean,
                reward_std=facts.reward_std,
                at=time.time(),
                versions=facts.tokens_by_version,
            )
            row += wanted.rows
            yield self._book_content(content)

    def _book_content(self, content: e.Accepted) -> str:
        self._book.leases.accept_group(content)
        reason = self.refills.judge_group(content)
        if reason is not None:
            self._book.history.reject_group(content.group, reason)
        self.refills.warn_of_waste()
        return reason or "accepted"

    def fail_lease(self, lease: int, num_tokens: int, error: str, *, revoked: bool = False) -> str:
        """Books that a lease came to nothing.

        Reports about unknown leases are not worth a line in the journal.
        """
        leases = self._book.leases
        if leases.attempts.find_attempt(lease) is not None:
            held = leases.find_open_group(lease)
            outcome = leases.fail_lease(lease, max(0, num_tokens), error, counts=not revoked)
            if held is not None and outcome != "over":
                self.note_lost(held[0], outcome, error, counts=not revoked)
        return "failed"

    def note_lost(self, group: int, outcome: str, error: str, *, counts: bool = True) -> None:
        """Logs an attempt that came to nothing. `outcome` is `lost` or `quarantined`; with `counts=False` it
        is no failure."""
        if counts or outcome == "quarantined":
            log.warning("group %d failed and is %s: %s", group, outcome, error)
        else:
            log.info("group %d is given out again: %s", group, error)
        self.quarantined_in_a_row += outcome == "quarantined"
