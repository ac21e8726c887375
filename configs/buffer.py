"""`buffer`: the journal, leases, samplers and limits of the process between generators and learner."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from configs.addresses import TCP_OR_IPC_ADDRESS
from configs.rules import NOT_NEGATIVE, POSITIVE, Rule
from configs.setting import Section, setting


class Durability(StrEnum):
    """Where a group stands when the buffer acknowledges it."""

    fsync = "fsync"
    """On the disk: it survives a power cut."""
    os = "os"
    """In the kernel's memory: it survives the death of the buffer, and not that of the machine."""
    none = "none"
    """In the buffer's memory: it is lost with the buffer."""


class Retention(StrEnum):
    """Segments of the journal that stay on the disk."""

    all = "all"
    """Every segment, for queries and replay."""
    checkpoints = "checkpoints"
    """The segments that a kept checkpoint needs."""


PORT = Rule("a port from 1 to 65535", lambda port: 1 <= port <= 65535)


@dataclass(kw_only=True, slots=True)
class BufferConfig(Section):
    """The process between generators and learner: journal, leases, samplers and limits."""

    address: str = setting("tcp://127.0.0.1:0", TCP_OR_IPC_ADDRESS)
    """Address on which the buffer listens (port 0: any free one). With `role=generators`: where it
    answers."""
    durability: Durability = setting(Durability.os)
    """Where a group stands when it is acknowledged."""
    lease_s: float = setting(30.0, POSITIVE)
    """Seconds after which a lease that is not renewed expires and is given out again."""
    reconnect_s: float = setting(300.0, POSITIVE)
    """Seconds for which generators, learner and driver go on without a word from the buffer before they end:
    a link may be down, or the buffer is started again."""
    max_restarts: int = setting(5, NOT_NEGATIVE)
    """Deaths of the buffer's process after which the run stops. Before that it is started again at the same
    address, and goes on from its journal."""
    max_attempts: int = setting(3, POSITIVE)
    """Failures of one group after which it is quarantined with its error. The run goes on."""
    max_quarantined: int = setting(100, POSITIVE)
    """Groups quarantined in a row, with none accepted between, at which the run ends: it makes nothing."""
    segment_mb: int = setting(64, POSITIVE)
    """Size in MB at which a segment of the journal is closed."""
    retention: Retention = setting(Retention.all)
    """Segments of the journal that stay on the disk."""
    max_uses: int = setting(1, POSITIVE)
    """Times that a group may be trained. Must divide `learner.groups_per_step`. Above 1, fewer fresh groups
    are made."""
    sampler: str = setting("fifo")
    """Order in which a step takes complete groups: `fifo`, `freshest`, `prioritized`, `reward_balanced`, or
    `module:Class`."""
    sampler_args: dict[str, Any] = setting({})
    """Keyword arguments for the sampler's class."""
    max_groups: int | None = setting(None, POSITIVE)
    """Groups held (leased, or complete and not used up) at which leasing pauses. What the current step needs
    is leased all the same. Null: only the staleness bound limits them, to (S + 1) steps."""
    max_tokens: int | None = setting(None, POSITIVE)
    """Sampled tokens in complete groups at which leasing pauses, like `max_groups`."""
    max_bytes: int | None = setting(None, POSITIVE)
    """Bytes of complete groups at which leasing pauses, like `max_groups`."""
    metrics_port: int | None = setting(None, PORT)
    """Port on the loopback interface where Prometheus finds the buffer's metrics. Null: nowhere."""
    keys: str | None = setting(None)
    """Folder of CURVE keys (`scripts/keys.sh` makes one). All sockets of the buffer are then encrypted, and
    open to those keys only. Null: a run with an address beyond the loopback interface makes keys in its own
    folder; others who join it name theirs."""
    stalled_s: float = setting(600.0, POSITIVE)
    """Seconds without progress in its heartbeats after which a role counts as stalled. Others get the leases
    of such a generator; the watchdog does not wait for such a learner. Must be longer than an engine takes to
    load a version, a learner to load its model, and one microbatch to be trained."""
    watchdog_s: float = setting(120.0, POSITIVE)
    """Seconds in which nothing moves and no role is at work before the buffer reports who waits for whom.
    After twice as long the run ends. Work is a step, a load, a publication or a checkpoint."""
