"""Prints the plan of a run's memory: a table by GPU and host, and what follows from it in seconds."""

import dataclasses
from collections.abc import Iterable, Sequence

from configs.model import Dtype
from configs.placement import PlacementMode
from configs.schema import Config, Role
from learners.memory import format_bytes
from slipstream.plan_hardware import Hardware, Rates
from slipstream.plan_layout import SHARED, PlannedModel, RoleNeeds, RunPlan
from slipstream.plan_search import Proposal, apply_changes, describe_least, propose_layout

COLUMNS = (70, 11, 11)
"""Widths of a table's columns."""
GB = 1e9
CHAINS_FROM = 9
"""Hosts that fetch from which on the publisher sends two copies (docs/weights.md)."""


def print_plan(config: Config, model: PlannedModel, plan: RunPlan, rates: Rates) -> None:
    sizes, learner = model.sizes, config.learner
    print(
        f"{model.name} ({sizes.model_type}): {sizes.parameters:,} parameters, {sizes.num_layers} layers, "
        f"{sizes.vocabulary:,} words; engine {learner.engine}, {config.model.dtype}"
    )
    note = f" ({plan.hardware.note})" if plan.hardware.note else ""
    print(f"{plan.hardware}{note}\n")
    if plan.roles:
        _print_rows("", "needs", "of")
        _print_gpus(config, plan)
        _print_hosts(plan)
        print()
        for line in [*_describe_kv(config, plan), *_describe_version(config, plan, rates),
                     *_describe_checkpoint(config, plan, rates)]:  # fmt: skip
            print(line)
        print()
    if plan.fits:
        print("The layout fits.")
        return
    print("The layout does not fit:")
    for shortage in plan.shortages:
        print(f"  {shortage}")


def print_proposal(config: Config, model: PlannedModel, hardware: Hardware) -> None:
    """Prints the nearest layout that fits, or what would."""
    proposal = propose_layout(config, model, hardware)
    if proposal is None:
        is_one = config.placement.mode is PlacementMode.colocated
        where = "such a host" if is_one else "such hosts, however many there are"
        print(f"\nNo layout that was looked at fits {where}.")
        if hardware.gpus:
            print(f"  On a GPU {describe_least(config, model, hardware)}.")
            proposal = _propose_half(config, model, hardware)
        if proposal is None:
            return
        hosts = f" and --hosts {proposal.hosts}" if proposal.hosts > hardware.hosts else ""
        print(f"\nWith another model.dtype{hosts} this would:")
    elif proposal.hosts > hardware.hosts:
        given = f"{hardware.hosts} such host{'s' if hardware.hosts > 1 else ''}"
        print(f"\nNothing that was looked at fits {given}. With --hosts {proposal.hosts} this would:")
    else:
        print("\nThe nearest layout that fits:")
    print(f"  {' '.join(proposal.overrides)}")
    gpus = f"{proposal.num_gpus} GPU{'s' if proposal.num_gpus > 1 else ''}"
    print(f"  on {gpus}" if proposal.num_gpus else "  on CPUs")


def _propose_half(config: Config, model: PlannedModel, hardware: Hardware) -> Proposal | None:
    """Returns the nearest layout in bfloat16, where the one at hand is in float32. Generators that join a run
    have its dtype."""
    if config.model.dtype is not Dtype.float32 or config.role is not Role.all:
        return None
    half = apply_changes(config, {"model.dtype": Dtype.bfloat16})
    proposal = propose_layout(half, model, hardware)
    if proposal is None:
        return None
    overrides = ["model.dtype=bfloat16", *proposal.overrides]
    return dataclasses.replace(proposal, overrides=overrides)


# ---- the table


def _print_gpus(config: Config, plan: RunPlan) -> None:
    """Prints each role's parts, once for all GPUs that are alike."""
    takes_turns = config.placement.mode is PlacementMode.colocated
    on_gpu: dict[tuple[int, int], list[RoleNeeds]] = {}
    for role in plan.roles:
        for gpu in role.gpus:
            on_gpu.setdefault((role.host, gpu), []).append(role)
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for place, roles in on_gpu.items():
        key = tuple((_kind(role), tuple(role.parts.items()), role.available) for role in roles)
        alike.setdefault(key, []).append(place)
    for places in alike.values():
        first = on_gpu[places[0]]
        sums = [sum(role.parts.values()) for role in first]
        total = max(sums) if takes_turns else sum(sums)
        _print_rows(_describe_places(places), format_bytes(total), format_bytes(plan.hardware.gpu_bytes))
        for number, role in enumerate(first):
            names = _describe_names(role.name for place in places for role in [on_gpu[place][number]])
            by_turns = ", by turns" if takes_turns and len(first) > 1 else ""
            _print_rows(
                f"  {names}{by_turns}", format_bytes(sum(role.parts.values())), format_bytes(role.available)
            )
            for name, size in role.parts.items():
                if size:
                    _print_rows(f"    {name}", format_bytes(size))


def _print_hosts(plan: RunPlan) -> None:
    alike: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for number, parts in enumerate(plan.hosts):
        alike.setdefault(tuple(parts.items()), []).append(number)
    for key, numbers in alike.items():
        parts = dict(key)
        if not parts:
            continue
        total, whole = sum(parts.values()), plan.hardware.host_bytes
        _print_rows(f"memory of host {_describe_numbers(numbers)}", format_bytes(total), format_bytes(whole))
        for name, size in parts.items():
            limit = format_bytes(plan.hardware.shared_bytes) if name.startswith(SHARED) else ""
            _print_rows(f"    {name}", format_bytes(size), limit)


def _print_rows(*cells: str) -> None:
    first, *others = cells
    print((first.ljust(COLUMNS[0]) + "".join(one.rjust(COLUMNS[1]) for one in others)).rstrip())


def _describe_places(places: Sequence[tuple[int, int]]) -> str:
    """Returns `GPU 0-7 of host 0-3; GPU 0-1 of host 4`."""
    by_host: dict[int, list[int]] = {}
    for host, gpu in places:
        by_host.setdefault(host, []).append(gpu)
    by_gpus: dict[tuple[int, ...], list[int]] = {}
    for host, gpus in by_host.items():
        by_gpus.setdefault(tuple(sorted(gpus)), []).append(host)
    return "; ".join(
        f"GPU {_describe_numbers(gpus)} of host {_describe_numbers(hosts)}" for gpus, hosts in by_gpus.items()
    )


def _describe_names(names: Iterable[str]) -> str:
    """Returns `learner-0 to learner-7`, or `generator-0`."""
    found = list(dict.fromkeys(names))
    return found[0] if len(found) == 1 else f"each of {found[0]} to {found[-1]}"


def _describe_numbers(numbers: Sequence[int]) -> str:
    """Returns `0-3` for numbers in a row, `0, 4` for others."""
    ordered = sorted(numbers)
    if len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return ", ".join(map(str, ordered))


def _kind(role: RoleNeeds) -> str:
    return role.name.rpartition("-")[0]


# ---- what follows


def _describe_kv(config: Config, plan: RunPlan) -> list[str]:
    if plan.kv is None:
        return []
    generators, group = config.generators, config.samples_per_group
    few = f"; fewer than a group has ({group})" if plan.kv.sequences < group else ""
    return [
        f"KV cache: {plan.kv.tokens:,} tokens in an engine, {plan.kv.sequences:,} sequences of "
        f"{generators.max_model_len:,} (generators.max_sequences={generators.max_sequences}{few})"
    ]


def _describe_version(config: Config, plan: RunPlan, rates: Rates) -> list[str]:
    """Says how long a publication takes, until training goes on and until engines have it."""
    size, ranks = plan.version_bytes, config.learner.ranks
    own = size / ranks / GB
    lines = [f"a version: {format_bytes(size)}"]
    if plan.has_learner:
        by, each = ("a rank copies it", "") if ranks == 1 else (f"{ranks} ranks copy their rows", " each")
        lines[0] += f"; training waits {_format_s(own / rates.copy)} for it ({by}, {rates.copy:g} GB/s{each})"
        lines.append(
            f"  written in {_format_s(own / rates.write)} ({rates.write:g} GB/s{each}), beside training"
        )
    if plan.fetching:
        coming_s = max((1 - plan.shares[host]) * size for host in plan.fetching) / GB / rates.network
        chains = 2 if len(plan.fetching) >= CHAINS_FROM else 1
        going_s = chains * max(plan.shares) * size / GB / rates.network
        number = len(plan.fetching)
        who = "1 host with engines fetches" if number == 1 else f"{number} hosts with engines fetch"
        lines.append(
            f"  {who} it in {_format_s(max(coming_s, going_s))} ({rates.network:g} GB/s a host), "
            "beside the engines"
        )
    if plan.has_engines:
        lines.append(
            f"  a host verifies it in {_format_s(size / GB / rates.verify)} ({rates.verify:g} GB/s), "
            "beside the engines"
        )
    return lines


def _describe_checkpoint(config: Config, plan: RunPlan, rates: Rates) -> list[str]:
    if not plan.has_learner:
        return []
    size, keep = plan.checkpoint_bytes, config.learner.keep_checkpoints
    seconds = max(plan.shares, default=1.0) * size / GB / rates.disk
    return [
        f"a checkpoint: {format_bytes(size)} on disk, written and read in {_format_s(seconds)} "
        f"({rates.disk:g} GB/s a host); learner.keep_checkpoints={keep} and the one being written: "
        f"{format_bytes((keep + 1) * size)}"
    ]


def _format_s(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
