"""An engine on the learner's GPU starts after the learner, and keeps as much KV as arithmetic leaves it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from public_models import PUBLIC_MODELS
from runs import SIMULATED, StartedRun, assert_accounts_close

from configs.sizes import count_sizes
from generators.shared_gpu import OVERHEAD_BYTES, compute_kv_cache_bytes
from slipstream.cluster import start_node
from slipstream.own_generators import OwnGenerators


@pytest.mark.timeout(300)
def test_a_generator_on_the_learners_gpu_starts_after_the_learner_and_the_run_ends_well(
    start: Callable[..., StartedRun],
) -> None:
    """Ray believes that there is one GPU, and there is none. The roles compute nothing."""
    node = start_node(num_cpus=4, num_gpus=1)
    try:
        shares = ["learner.gpus=0.5", "generators.gpus=0.5", f"cluster.address={node.gcs_address}"]
        run = start(*SIMULATED, *shares, "run.steps=5")
        status, said = run.finish()
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)
    assert status == 0, said
    assert "GPU 0: learner-0 (45 % of memory), generator-0 (45 % of memory)" in said
    assert "the learner has loaded: the generators that share its GPU start" in said
    assert_accounts_close(run.summary())


@pytest.mark.parametrize(
    ("activity", "version", "starts"),
    [
        (None, 0, False),  # a run that is resumed has a version, and as yet no learner
        ("loading the model", 0, False),
        ("verifying step_4", 0, False),
        ("publishing version 0", -1, False),
        ("waiting for the batch of step 0", 0, True),
    ],
)
def test_what_shares_the_learners_gpu_waits_until_it_has_loaded(
    activity: str | None, version: int, starts: bool
) -> None:
    roles = {} if activity is None else {"learner-0": SimpleNamespace(activity=activity)}
    generators: Any = object.__new__(OwnGenerators)
    generators._say, begun = lambda text: None, []
    generators._starts_after_learner = [lambda: begun.append(0), lambda: begun.append(1)]
    for _ in range(2):
        generators.start_beside_learner(SimpleNamespace(version=version, roles=roles))
    assert begun == ([0, 1] if starts else [])


def test_kv_is_what_weights_activations_logits_and_overhead_leave() -> None:
    sizes = count_sizes(PUBLIC_MODELS["Qwen3-8B"])
    assert sizes.parameters == pytest.approx(8.19e9, rel=0.01)
    tokens, sequences = 8192, 256
    rest = (
        2 * sizes.parameters + 2 * tokens * sizes.layer_activations + 12 * sequences * 151936 + OVERHEAD_BYTES
    )
    common: dict[str, Any] = dict(element_bytes=2, max_sequences=sequences, tokens_per_step=tokens)
    assert compute_kv_cache_bytes(sizes, budget=rest + 12345, **common) == 12345
    assert rest < 0.3 * 80 * 2**30, "an engine of 8B fits into a third of 80 GB"
    with pytest.raises(
        ValueError, match=r"must leave room for KV .* got 16.0 GiB for weights 15.3 \+ activations 1.8 \+"
    ):
        compute_kv_cache_bytes(sizes, budget=16 * 2**30, **common)
