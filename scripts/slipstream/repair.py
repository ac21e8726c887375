"""Saves what can be saved of a journal that refuses to open, and lists the rest.

    scripts/repair.sh outputs/RUN          or the folder of a journal

The run goes on afterwards with `run.resume`. Nothing is thrown away: what was damaged stays beside what is
mended, as `<name>.damaged`. A journal without damage is left as it is.
"""

import argparse
import sys
from pathlib import Path

from buffers.repair import RepairReport, repair_journal


def find_journal(folder: Path) -> Path:
    """Raises ValueError for a folder that holds no journal."""
    for journal in (folder / "journal", folder):
        if (journal / "log").is_dir() or (journal / "state").is_dir():
            return journal
    raise ValueError(f"the folder must be that of a run or of a journal, got {folder} without one")


def checkpoint_steps(journal: Path) -> list[int]:
    """Steps of the checkpoints that the run has, by the names of their folders."""
    names = (path.name.partition("step_")[2] for path in (journal.parent / "checkpoints").glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def print_report(report: RepairReport, journal: Path) -> None:
    for title, texts in (("damaged", report.damage), ("saved", report.saved), ("lost", report.lost)):
        print(f"{title}: {len(texts)}")
        for text in texts:
            print(f"  {text}")
    if report.lost_groups:
        print(f"groups that were accepted and are lost: {', '.join(map(str, sorted(report.lost_groups)))}")
    print(f"{report.step} steps count as trained")
    steps = checkpoint_steps(journal)
    beyond = [step for step in steps if step > report.step]
    if beyond:
        print(
            f"checkpoints of steps that the journal has lost: {', '.join(map(str, beyond))}. To go on from "
            "an earlier one, "
            "move their folders away first"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a run, or of its journal")
    options = parser.parse_args(arguments)
    try:
        journal = find_journal(options.folder)
        report = repair_journal(journal)
    except ValueError as error:
        print(f"Slipstream cannot repair:\n{error}", file=sys.stderr)
        return 2
    if not report.damage:
        print(f"{journal} is not damaged: nothing was changed")
        return 0
    print_report(report, journal)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
