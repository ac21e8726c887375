"""The components of the reward are figures of a step: means over episodes, bounded in number and length."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from branched_episodes import ModelColumns, draw_episodes, make_branched_batch, run_scripted_step
from training_steps import configure_step

from buffers.trajectory import Trajectory
from learners.packing import MAX_COMPONENTS


def give_components(rows: list[Trajectory], seed: int) -> list[Trajectory]:
    """Gives each episode some components, the same on all its branches."""
    rng, components, given = np.random.default_rng(seed), {}, []
    for row in rows:
        if row.branch == 0:
            components = {
                name: float(rng.normal()) for name in ("math", "seconds/math") if rng.random() < 0.7
            }
            components["always"] = float(rng.normal())
        given.append(replace(row, rewards=components))
    return given


@pytest.mark.parametrize("seed", range(3))
def test_a_component_has_the_mean_over_the_episodes_that_have_it_however_many_branches(seed: int) -> None:
    rows = give_components(draw_episodes(seed), seed)
    episodes = [row for row in rows if row.branch == 0]
    assert len(episodes) < len(rows)
    expected = {
        name: np.mean([row.rewards[name] for row in episodes if name in row.rewards])
        for name in ("always", "math", "seconds/math")
    }
    assert make_branched_batch(rows).component_means == pytest.approx(expected, rel=1e-5)


def test_the_figures_of_a_step_have_the_components_and_none_hides_the_rewards_own(fixed_model: Path) -> None:
    rows = draw_episodes(0)
    plain = make_branched_batch(rows)
    batch = make_branched_batch(
        [replace(row, rewards={"mean": 99.0, "seconds/math": 0.5, "n" * 200: 1.0}) for row in rows]
    )
    config, columns = configure_step(fixed_model), ModelColumns.draw(rows, 0)
    without, found = (run_scripted_step(config, one, columns).metrics for one in (plain, batch))
    assert found["reward/mean"] == without["reward/mean"]
    assert {name: value for name, value in found.items() if name not in without} == {
        "reward/seconds/math": 0.5, "reward/" + "n" * 193: 1.0,
    }  # fmt: skip


def test_a_task_that_names_components_without_end_gets_a_bounded_number_of_figures() -> None:
    rows = [
        replace(row, rewards={"often": 1.0} | {f"{i} {j}": 2.0 for j in range(60)})
        for i, row in enumerate(draw_episodes(0))
    ]
    means = make_branched_batch(rows).component_means
    assert len(means) == MAX_COMPONENTS and means["often"] == 1.0


def test_rows_without_components_have_no_such_figures() -> None:
    assert make_branched_batch([replace(row, rewards={}) for row in draw_episodes(0)]).component_means == {}
