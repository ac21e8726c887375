"""Turns: learner and engines have the same GPUs one after the other (`placement.mode=colocated`).

A GPU has one *turn*, a lock of the kernel: its engines hold it together (shared), or one rank of the learner
holds it alone (exclusive). The rank's *call*, a second lock, says that it wants the turn or has it.

    engine    ASLEEP ── no call, and all turns that it needs are free: takes them, wakes ─────▶ AWAKE
                ▲                                                                                 │
                └── a call: ends the round of its loop, sleeps (samples kept), gives up all ──────┘

    rank      ELSEWHERE ── has a batch: calls ──▶ CALLING ── no engine has the turn: loads ──▶ WORKING
                ▲                                                                                 │
                └── the version is announced: offloads, gives up turn and call ───────────────────┘

A rank also calls to load its models and publish the first version of its life, to compare a parity probe, and
to copy a checkpoint. An engine starts with the turn too. Where there is no GPU, the host's turn of each rank
takes its place, and an engine needs those of all ranks.

Nobody waits for ever, because waits have no circle. A sleeping engine holds nothing: it takes all turns that
it needs or none, so nobody waits for it. One that is awake looks for calls in each round of its loop, and a
round (one step, one load of weights, or the start) waits for no role; so a call is answered. A working rank
waits for the other ranks, which call at the same places of the same program, for the buffer and for the disk,
which wait for nobody; so its turn ends. What only engines make (a batch, the sample of a probe, the last
evaluation) a rank awaits ELSEWHERE, without turn or call. Told to stop, a rank ends its turn as always, and
an engine that leaves gives up what it holds.

Nobody starves. An engine takes no turn that is called for, so a rank waits for one round. A rank that finds
the next batch complete calls at once; but no group due later than S versions ahead is ever leased, so after
S + 1 turns it has no batch left, and waits ELSEWHERE. At S = 0 the engines have nothing to do when it calls.

A role that dies, in whatever way, loses its locks: the kernel drops them. One that is stopped keeps them, and
those who wait name it (`TurnLocks.find_holders`).
"""

import fcntl
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from sync.folders import leave_folder, lock_shared_folder, shared_memory_folder

LOOK_S = 0.005
"""Seconds between two tries of a role that waits for a turn."""
SAY_S = 10.0
"""Seconds of waiting for a turn after which the log names who has it; again after twice as long each time."""


class TurnClaim(msgspec.Struct):
    """Text of a holder's file."""

    role: str
    pid: int
    doing: str
    turns: list[str]


@dataclass(frozen=True, slots=True)
class TurnHolder:
    """A living role that has a turn."""

    role: str
    pid: int
    doing: str
    held_s: float
    """Seconds since it took the turn."""

    def __str__(self) -> str:
        return f"{self.role} (process {self.pid}, {self.doing}, for {self.held_s:.0f} s)"


class TurnLocks:
    """One role's hold on the turns that it needs. Not thread-safe."""

    def __init__(self, folder: Path, turns: Iterable[str], role: str) -> None:
        """`turns` names what the role needs: a GPU each, or a rank's stand-in for one. The folder is made
        where it is missing; its last user removes it.

        Raises ValueError where the folder is not private (`sync.folders.check_private`).
        """
        self._role, self.folder = role, folder
        self._owner = lock_shared_folder(folder)
        # In one order everywhere.
        self.turns = sorted({re.sub(r"[^\w-]", "_", turn) for turn in turns})
        self._turn_files = [_open_file(folder / f"turn-{turn}") for turn in self.turns]
        self._call_files = [_open_file(folder / f"turn-{turn}-call") for turn in self.turns]
        self._claim = _open_file(folder / f"turn-of-{os.getpid()}-{role}")
        self.is_holding = self._is_calling = False

    # ---- an engine

    def take_together(self, doing: str) -> bool:
        """Takes all turns beside other engines, or none; returns whether it has them. None is taken that a
        rank calls for."""
        return not self.is_called() and self._take_all(fcntl.LOCK_SH, doing)

    def is_called(self) -> bool:
        """True while a rank of the learner wants one of these turns, or has it."""
        for file in self._call_files:
            if not _try_lock(file, fcntl.LOCK_SH):
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
        return False

    # ---- a rank of the learner

    def call_and_take(self, doing: str) -> bool:
        """Calls for the turns, and takes them for itself alone once no engine has them; returns whether it
        has them. Call it again until it does."""
        if not self._is_calling:
            # One that fails may have met an engine's look at the call, or another life of this rank.
            self._is_calling = self._lock_all(self._call_files, fcntl.LOCK_EX)
        return self._is_calling and self._take_all(fcntl.LOCK_EX, doing)

    # ---- both

    def give_up(self) -> None:
        """Gives up all turns, and the call."""
        fcntl.flock(self._claim, fcntl.LOCK_UN)
        for file in (*self._turn_files, *self._call_files):
            fcntl.flock(file, fcntl.LOCK_UN)
        self.is_holding = self._is_calling = False

    def find_holders(self) -> list[TurnHolder]:
        """Returns the other living roles that have one of these turns."""
        found = []
        for path in sorted(self.folder.glob("turn-of-*")):
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                if os.path.sameopenfile(file, self._claim) or _try_lock(file, fcntl.LOCK_SH):
                    continue
                claim = msgspec.json.decode(os.pread(file, 1 << 16, 0), type=TurnClaim)
                held_s = max(0.0, time.time() - os.fstat(file).st_mtime)
            # It is being written.
            except msgspec.MsgspecError:
                continue
            finally:
                os.close(file)
            if set(claim.turns) & set(self.turns):
                found.append(TurnHolder(claim.role, claim.pid, claim.doing, held_s))
        return found

    def close(self) -> None:
        """Gives up everything; the last user removes the folder."""
        for file in (*self._turn_files, *self._call_files, self._claim):
            os.close(file)
        self._turn_files, self._call_files = [], []
        (self.folder / f"turn-of-{os.getpid()}-{self._role}").unlink(missing_ok=True)
        leave_folder(self.folder, self._owner)

    def _take_all(self, kind: int, doing: str) -> bool:
        if not self._lock_all(self._turn_files, kind):
            return False
        # Waits for no more than a look at it.
        fcntl.flock(self._claim, fcntl.LOCK_EX)
        claim = msgspec.json.encode(TurnClaim(self._role, os.getpid(), doing, self.turns))
        os.pwrite(self._claim, claim, 0)
        os.ftruncate(self._claim, len(claim))
        self.is_holding = True
        return True

    def _lock_all(self, files: Sequence[int], kind: int) -> bool:
        """Locks all files or none."""
        for number, file in enumerate(files):
            if not _try_lock(file, kind):
                for locked in files[:number]:
                    fcntl.flock(locked, fcntl.LOCK_UN)
                return False
        return True


def open_turn_locks(run: Path, role: str, rank: int | None, num_ranks: int, *, on_gpus: bool) -> TurnLocks:
    """Opens the turns that a role of the run in this folder needs: those of the GPUs that its process sees.
    Without GPUs those are a rank's own, and for an engine (`rank` is None) those of all ranks.

    Raises as `TurnLocks`.
    """
    if on_gpus:
        # Ray names the devices of all roles of a node in the same way.
        turns = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    else:
        turns = [f"rank-{one}" for one in ([rank] if rank is not None else range(num_ranks))]
    name = f"turns-{run.name}-{xxhash.xxh32_hexdigest(str(run).encode())}"
    return TurnLocks(shared_memory_folder(name), turns, role)


def _open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
