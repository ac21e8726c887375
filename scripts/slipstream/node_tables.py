"""The tables in which `scripts/check.sh` shows the nodes of a cluster and the links between them."""

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from slipstream.check import CheckOutcome, CheckResult
from slipstream.links import MeasuredLink
from slipstream.node_facts import NodeFacts

WIDE = 9
"""Most nodes of a matrix of links; for more there is a row for each node."""
COLORS = {CheckOutcome.ok: "green", CheckOutcome.failed: "bold red", CheckOutcome.not_here: "dim"}
UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def print_node(console: Console, name: str, facts: NodeFacts | None, results: Sequence[CheckResult]) -> None:
    table = Table("", "", show_header=False, title=name, title_justify="left")
    for fact, words in (facts.words if facts else {"": "it has not answered"}).items():
        table.add_row(fact, escape_markup(words))
    table.add_section()
    for result in results:
        outcome = f"[{COLORS[result.outcome]}]{result.outcome}[/]"
        table.add_row(result.name, f"{outcome}: {escape_markup(result.words)}")
    console.print(table)


def print_links(
    console: Console, names: Sequence[str], links: Mapping[tuple[str, str], MeasuredLink]
) -> None:
    """Prints the bytes that went from each node to each other, and the latency of the two."""
    if not links:
        return
    rates, latencies = list_rates(links), list_latencies(links)
    if len(names) <= WIDE:
        table = Table("from \\ to", *names, title="Links", title_justify="left")
        for one in names:
            cells = [
                f"{say_rate(rates[one, other])}, {say_latency(latencies[one, other])}"
                if (one, other) in rates
                else "" if one == other else "not measured"
                for other in names
            ]  # fmt: skip
            table.add_row(one, *cells)
    else:
        columns = ("node", "links", "sends, slowest", "sends, median", "receives, slowest", "latency, worst")
        table = Table(*columns, title="Links", title_justify="left")
        for name in names:
            sent = [rate for (one, _), rate in rates.items() if one == name]
            received = [rate for (_, other), rate in rates.items() if other == name]
            if not sent:
                table.add_row(name, "0")
                continue
            worst = max(latency for (one, _), latency in latencies.items() if one == name)
            table.add_row(
                name, str(len(sent)), say_rate(min(sent)), say_rate(median(sent)), say_rate(min(received)),
                say_latency(worst),
            )  # fmt: skip
    console.print(table)


def list_rates(links: Mapping[tuple[str, str], MeasuredLink]) -> dict[tuple[str, str], float]:
    """Returns the bytes a second from each node to each other, as far as they are measured."""
    return {pair: link.sent_bytes_per_s for pair, link in links.items()} | {
        (other, one): link.received_bytes_per_s for (one, other), link in links.items()
    }


def list_latencies(links: Mapping[tuple[str, str], MeasuredLink]) -> dict[tuple[str, str], float]:
    """Returns the seconds there and back, for both directions of each link."""
    return {pair: link.latency_s for pair, link in links.items()} | {
        (other, one): link.latency_s for (one, other), link in links.items()
    }


def say_rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    least, unit = next((unit for unit in UNITS if bits >= unit[0]), UNITS[-1])
    return f"{bits / least:.3g} {unit}"


def say_latency(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def escape_markup(words: str) -> str:
    return words.replace("[", r"\[")
