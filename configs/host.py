"""The identity of this host."""

from pathlib import Path


def boot_id() -> str:
    """Returns a name of this host that stays the same until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
