"""Results of evaluations in words and as metrics. A result is an entry of `summary.json`'s `evaluations`, the
fields of `buffers.evaluation_statistics.EvaluationResult`."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from buffers.run_status import EvaluationRecord
from configs.eval import HELD_OUT

Entry = dict[str, Any]


def make_entry(record: EvaluationRecord) -> Entry:
    """Returns the entry of a record, with numbers of six digits."""
    return _round_numbers(msgspec.to_builtins(record.result))


def upgrade_entry(entry: Entry) -> Entry:
    """Returns an entry of a summary, also one that an older program wrote: it knew held-out prompts only."""
    if "set" in entry:
        return entry
    return {
        "set": HELD_OUT,
        "version": entry["version"],
        "digest": "",
        "prompts": entry["n"],
        "samples": entry["n"],
        "failed": 0,
        "avg": entry["reward"],
        "avg_ci95": entry["ci95"],
        "pass": {},
        "pass_ci95": {},
        "tokens": None,
        "truncated": None,
        "versions": None,
    }


def list_metrics(entry: Entry) -> dict[str, float]:
    """Returns an entry's figures by name: `eval/SET/avg`, `eval/SET/pass@k`."""
    figures = {key: entry[key] for key in ("avg", "tokens", "truncated")}
    figures |= {f"pass@{k}": chance for k, chance in entry["pass"].items()}
    return {f"eval/{entry['set']}/{name}": value for name, value in figures.items() if value is not None}


def describe_entry(entry: Entry) -> str:
    """Returns a line for people."""
    if entry["avg"] is None:
        return (
            f"version {entry['version']} on {entry['set']}: none of {entry['failed']} prompts could be scored"
        )
    figures = [f"{_name_average(entry)} {show_figure(entry['avg'], entry['avg_ci95'])}"]
    # With one sample of each prompt, and rewards of 0 and 1, pass@1 is the average.
    figures += [
        f"pass@{k} {show_figure(chance, entry['pass_ci95'].get(k))}"
        for k, chance in entry["pass"].items()
        if (k, chance) != ("1", entry["avg"])
    ]
    words = [
        f"version {entry['version']} on {entry['set']}: {', '.join(figures)}, {entry['prompts']} prompts"
    ]
    if entry["failed"]:
        words.append(f"{entry['failed']} more could not be scored")
    versions = entry["versions"] or [entry["version"]] * 2
    if set(versions) != {entry["version"]}:
        words.append(f"sampled by versions {versions[0]} to {versions[1]}, which came meanwhile")
    return "; ".join(words)


def describe_change(entries: Sequence[Entry]) -> list[str]:
    """Returns a line for each set: its first result and its last."""
    lines = []
    for name in dict.fromkeys(entry["set"] for entry in entries):
        scored = [entry for entry in entries if entry["set"] == name and entry["avg"] is not None]
        told = [
            f"{show_figure(one['avg'], one['avg_ci95'])} (version {one['version']})"
            for one in (scored[:1] + scored[1:][-1:])
        ]
        if told:
            lines.append(
                f"{name}: {_name_average(scored[-1])} {' → '.join(told)}, {scored[-1]['prompts']} prompts"
            )
    return lines


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the entries in the order of their versions, and of the sets' names, the held-out prompts
    first."""
    return sorted(entries, key=lambda one: (one["version"], one["set"] != HELD_OUT, one["set"]))


def show_figure(value: float, interval: Sequence[float] | None) -> str:
    """Returns a figure with its 95 % interval."""
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval is not None else "")


def _name_average(entry: Entry) -> str:
    each, rest = divmod(entry["samples"], max(1, entry["prompts"]))
    return "avg" if rest else f"avg@{each}"


def _round_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _round_numbers(one) for key, one in value.items()}
    return [_round_numbers(one) for one in value] if isinstance(value, list | tuple) else value
