"""Agents on the real engine: vLLM samples their replies, vLLM's parsers read the calls, weights change in
between.

A small model has learned a conversation by heart, so that it calls tools. vLLM changes its process; the
fixture puts back what it can.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_tasks import ADD, ANSWER, CALL, COUNTED, COUNTING, QUESTION, RESULT
from template_families import family_tokenizer
from test_agents import tasks_can_be_imported  # noqa: F401
from test_episodes import EpisodeRun, assert_ledger_closes, make_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from buffers import messages as m
from generators.engine import Completion
from generators.rendering import choose_renderer
from generators.vllm_engine import VllmEngine
from sync.stream import whole_parts

MAX_LENGTH = 1024
Weights = dict[str, torch.Tensor]


class NotingEngine(VllmEngine):
    """Keeps what it has sampled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answered: dict[str, Completion] = {}

    def step(self) -> list[Completion]:
        return self._note(super().step())

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        return self._note(super().abort_samples(ids))

    def _note(self, completions: list[Completion]) -> list[Completion]:
        self.answered |= {one.id: one for one in completions}
        return completions


class RealRun(EpisodeRun):
    """Publishes weights that an engine can hold: version 1 says what version 0 says, with other numbers."""

    weights: Weights

    def publish_version(self, version: int) -> None:
        scaled = {name: weight * (1 + version / 64) for name, weight in self.weights.items()}
        manifest = self.publisher.publish_version(version, whole_parts(scaled))
        announced = self.publisher.announce_version(manifest)
        self.client.call(m.PublishVersion(version=version, manifest_locator=announced), m.Acknowledged)


@pytest.fixture(scope="module")
def spared_process() -> Iterator[None]:
    set_num_threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    yield
    torch.set_num_threads, torch._dynamo.config.disable = set_num_threads, disabled


def make_agent_config(folder: Path) -> Any:
    return make_config(
        "X", "task.name=agent_tasks:ToolCaller", f"task.args={{folder: {folder}}}", "run.steps=2",
        "learner.groups_per_step=1", "episodes.worker_memory_mb=65536", "episodes.max_concurrent=8",
        f"generators.max_model_len={MAX_LENGTH}", "sampling.max_tokens=100", "sampling.top_k=1",
        "sampling.accept_truncation_bias=true",
        "episodes.renderer=difference", "episodes.tool_parser=hermes",
    )  # fmt: skip


def learn_by_heart(config: Any, tokenizer: Any) -> Qwen3ForCausalLM:
    """Returns a model whose most probable replies are those of the conversations below."""
    renderer = choose_renderer(tokenizer, config.episodes)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False)) + [tokenizer.eos_token_id]

    asked = renderer.render_first([QUESTION], [ADD])
    called = [*asked, *encode(CALL)]
    told = renderer.extend_prompt(called, [{**RESULT, "tool_call_id": "any"}], [ADD])
    counting = renderer.render_first([COUNTING], [])
    assert told is not None
    turns = [(asked, encode(CALL)), (told, encode(ANSWER)), (counting, encode(COUNTED))]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        margins, loss = [], torch.zeros(())
        for prompt, reply in turns:
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            wanted = torch.tensor(reply)
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted)
            right = logits.gather(1, wanted[:, None])[:, 0]
            others = logits.scatter(1, wanted[:, None], float("-inf")).max(1).values
            margins.append((right - others).min().item())
        if min(margins) > 2:
            return model.eval()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the model must know the conversations by heart, got margins {margins}")


def test_an_agent_calls_tools_on_the_real_engine_and_one_session_carries_two_versions(
    tmp_path: Path,
    spared_process: None,
) -> None:
    tokenizer, config = family_tokenizer("qwen3"), make_agent_config(tmp_path)
    model = learn_by_heart(config, tokenizer)
    model.save_pretrained(tmp_path / "model")
    RealRun.weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
    engine = NotingEngine(
        str(tmp_path / "model"), dtype="float32", max_model_len=MAX_LENGTH, max_sequences=8, kv_cache_mb=64,
        top_k=1, prefix_cache=True,
    )  # fmt: skip
    run: Any = RealRun(config, tmp_path, engine, tokenizer)
    try:
        run.publish_version(0)
        run.take_step(0)
        # The agents of the second row have called their tools, and wait.
        run.wait_for(lambda status: len(list(tmp_path.glob("called-1-*"))) == 2)
        run.publish_version(1)
        run.wait_for(lambda status: status.generators["g0"].version == 1)
        (tmp_path / "go").touch()
        run.take_step(1)
    finally:
        status = run.close()
        engine.shutdown()
    assert not status.quarantined, status.quarantined
    rows = run.list_rows()
    assert {(row["prompt_id"], row["reward"], row["stop"]) for row in rows} == {
        (0, 1.0, "completed"),
        (1, 1.0, "completed"),
    }
    for row in rows:
        said = check_row(row, engine, tokenizer)
        assert dict(row["rewards"])["pieces"] >= 1
        if row["branch"] == 0:
            later = row["prompt_id"]
            assert said == {0: (CALL + "<|im_end|>", {0}), 1: (ANSWER + "<|im_end|>", {later})}
        elif row["branch"] == 1:
            assert {text for text, _ in said.values()} == {COUNTED + "<|im_end|>"}
        else:
            assert {text for text, _ in said.values()} == {COUNTED[: COUNTED.index(" four") + len(" four")]}
    assert {row["branch"] for row in rows} == {0, 1, 2}
    sampled = sum(len(one.tokens) for one in engine.answered.values())
    kept = sum(sum(row["sampled"]) for row in rows)
    assert status.discarded_tokens == sampled - kept >= 0
    assert_ledger_closes(status)


def check_row(row: dict[str, Any], engine: NotingEngine, tokenizer: Any) -> dict[int, tuple[str, set[int]]]:
    """Each sampled token is the engine's. Returns text and versions by turn."""
    said: dict[int, tuple[str, set[int]]] = {}
    turns = np.array(row["turn"])
    for turn in sorted(set(turns.tolist()) - {-1}):
        places = np.flatnonzero(turns == turn)
        tokens = [row["tokens"][place] for place in places]
        versions = [row["versions"][place] for place in places]
        logprobs = [row["logprobs"][place] for place in places]
        found = [
            one
            for id, one in engine.answered.items()
            if id.endswith(f"/{row['sample']}/{turn}") and one.tokens[: len(tokens)] == tokens
            and one.versions[: len(tokens)] == versions
        ]  # fmt: skip
        assert found and found[0].logprobs[: len(tokens)] == pytest.approx(logprobs, abs=1e-6)
        said[turn] = tokenizer.decode(tokens), set(versions)
    return said
