"""Clocks of hosts that may be set, and disks that sync slowly: a small library (`clock.c`) that programs load
before the C library."""

import shutil
import subprocess
from pathlib import Path

import psutil

SOURCE = Path(__file__).with_name("clock.c")
WORD = 8
"""Bytes of each of the numbers in the file that programs read: clock, delay, delayed syncs."""


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


class HostClock:
    """The time of day on one host, as its Python programs see it, and how long they wait for `fsync`.
    Monotonic clocks and times of files are the machine's."""

    def __init__(self, folder: Path, host: str) -> None:
        """Compiles the library into `folder`. Without a compiler the clock cannot be set."""
        self._file, library, compiler = folder / f"{host}.clock", folder / "clock.so", find_compiler()
        self._file.write_bytes(bytes(3 * WORD))
        self.environment: dict[str, str] = {}
        """Environment that a program of the host needs; empty where the clock cannot be set."""
        if compiler is not None:
            if not library.exists():
                subprocess.run(
                    [compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True
                )
            self.environment = {"LD_PRELOAD": str(library), "SLIPSTREAM_CLOCK": str(self._file)}

    def is_read_by(self, process: psutil.Process) -> bool:
        """True for a program that has this clock. Raises FileNotFoundError or ProcessLookupError for one that
        has ended."""
        return str(self._file) in Path(f"/proc/{process.pid}/maps").read_text()

    def set_ahead(self, seconds: float) -> None:
        """Sets the clock to the machine's time and `seconds` more, or less."""
        self._write_number(0, int(seconds * 1e9))

    def delay_syncs(self, seconds: float) -> None:
        """Makes each sync of a file that begins from now on take so much longer."""
        self._write_number(1, int(seconds * 1e9))

    def count_delayed_syncs(self) -> int:
        return int.from_bytes(self._file.read_bytes()[2 * WORD :], "little")

    def _write_number(self, place: int, number: int) -> None:
        with open(self._file, "r+b", buffering=0) as file:
            file.seek(place * WORD)
            file.write(number.to_bytes(WORD, "little", signed=True))
