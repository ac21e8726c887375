"""Carries out the requests that need no waiting, and makes their answers."""

import time
from collections.abc import Callable, Sequence
from typing import assert_never

from buffers import messages as m
from buffers.announcements import Announcer, read_run_name
from buffers.buffer import Buffer
from buffers.parcels import PackedParcels
from buffers.parity_probe import ParityProbes
from buffers.refusal import Refusal
from buffers.waiting_room import WaitingRoom


class ImmediateAnswers:
    """Has one case for each request type: a type without one is an error of the type checker."""

    def __init__(
        self,
        buffer: Buffer,
        probes: ParityProbes,
        announcer: Announcer,
        waiting_room: WaitingRoom,
        config_text: str,
        parcels: PackedParcels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config_text` is the run's resolved configuration, as YAML."""
        self._buffer, self._probes, self._announcer = buffer, probes, announcer
        self._waiting_room, self._config_text, self._clock = waiting_room, config_text, clock
        self._parcels = parcels

    def carry_out(
        self, request: m.ImmediateRequest, payload: Sequence[memoryview]
    ) -> tuple[m.Reply, list[bytes]]:
        """Returns the answer and its binary frame, if it has one. Raises Refusal where the request does not
        fit."""
        if isinstance(request, m.GeneratorRequest):
            return self._answer_generator(request, payload), []
        buffer = self._buffer
        match request:
            case m.ListParcels():
                return m.ParcelList(parcels=self._parcels.list_parcels()), []
            case m.ReadParcelPart():
                return m.ParcelPart(), [self._parcels.read_part(request)]
            case m.RoleHeartbeat():
                if request.ended:
                    buffer.roles.remove_role(request.role)
                else:
                    buffer.roles.note_role(request.role, request, self._clock())
            case m.LocateJournal():
                folder = str(buffer.journal.folder.resolve())
                return m.JournalLocation(folder=folder, mark=buffer.journal.mark), []
            case m.ReadBatchPart():
                return m.BatchPart(), [buffer.progress.read_part(request)]
            case m.ReportDamagedGroups():
                return m.ReplacedGroups(count=buffer.progress.replace_damaged(request.groups)), []
            case m.PublishVersion():
                buffer.progress.publish_version(request.version, request.manifest_locator)
                self._announcer.count_change()
                return m.PublishedVersion(needed_versions=buffer.evaluations.list_needed_versions()), []
            case m.ReportTrainedStep():
                buffer.progress.finish_step(request)
            case m.ReportCheckpoint():
                buffer.progress.keep_checkpoint(request.step, request.oldest)
            case m.RewindToStep():
                try:
                    buffer.progress.rewind_to(request.step)
                except ValueError as error:
                    raise Refusal("wrong step", str(error)) from error
                self._announcer.count_change()
            case m.ScaleGenerators():
                if request.run and request.run != read_run_name(buffer.journal.folder):
                    raise Refusal("another run", "the run that was meant is over, and another answers")
                buffer.order_scaling(request.order, request.count)
            case m.ReportScaling():
                buffer.note_scaling(request.scaling)
            case m.StopRun():
                buffer.stop(request.reason)
            case _:
                assert_never(request)
        return m.Acknowledged(), []

    def _answer_generator(self, request: m.GeneratorRequest, payload: Sequence[memoryview]) -> m.Reply:
        buffer, name = self._buffer, request.generator
        match request:
            case m.JoinRun():
                if request.again:
                    buffer.roles.readmit_generator(name)
                else:
                    self._waiting_room.end_lease_request(name)
                    buffer.join_generator(name, evaluates=request.evaluates)
                return m.JoinedRun(config=self._config_text, run=self._announcer.run)
            case m.LeaveRun():
                self._waiting_room.end_lease_request(name)
                buffer.remove_generator(name, request.error)
                return m.Acknowledged()
            case m.GeneratorHeartbeat():
                return self._announcer.make_standing(name, buffer.take_heartbeat(request))
            case m.SubmitGroups():
                if len(payload) != 1:
                    raise Refusal(
                        "malformed group", f"a submission must carry one Arrow frame, got {len(payload)}"
                    )
                verdicts = buffer.intake.submit_groups(
                    name, request.leases, request.rows, request.schema, payload[0]
                )
                return m.LeaseReceipt(leases=request.leases, verdicts=verdicts)
            case m.SubmitParityProbe():
                self._probes.take_probe(
                    request, payload, buffer.progress.version, buffer.progress.manifest_locator
                )
                return m.Acknowledged()
            case m.SubmitEvaluation():
                if len(payload) != bool(request.num_rows):
                    raise Refusal(
                        "malformed evaluation",
                        f"an answer must carry one Arrow frame where it has rows, got {len(payload)} with "
                        f"{request.num_rows} rows",
                    )
                verdict = buffer.submit_evaluation(request, payload[0] if payload else None)
                return m.LeaseReceipt(leases=[request.lease], verdicts=[verdict])
            case m.FailLease():
                verdict = buffer.fail_lease(
                    request.lease, request.num_tokens, request.error, revoked=request.revoked
                )
                return m.LeaseReceipt(leases=[request.lease], verdicts=[verdict])
            case _:
                assert_never(request)
