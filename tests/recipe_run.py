"""Short runs of recipes in one process: one vLLM engine samples for all of them, one after the other.

A run has a real buffer and a real generator in threads, and a real learner in a process of its own, which is
forked from the server of `ranks.py`. It misses what Ray does, which whole runs try.
"""

import multiprocessing as mp
import threading
from pathlib import Path
from types import TracebackType

import ranks
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from buffers import messages as m
from buffers.client import BufferClient
from buffers.server import BufferServer
from configs.load import to_yaml
from configs.schema import Config
from learners.tiny import _make_tokenizer

LONGEST = 2048
"""Tokens of the longest prompt and reply that the model takes."""
PATIENCE_S = 300.0


def make_speaking_model(folder: Path) -> None:
    """Writes a model of the tiny model's size, which reads any text and says anything."""
    tokenizer: PreTrainedTokenizerFast = _make_tokenizer(["Sort these names", "a secret word", "the answer"])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=128,
            tie_word_embeddings=False,
            max_position_embeddings=LONGEST,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_learner(config: Config, folder: Path, address: str) -> None:
    """Trains in a process of its own."""
    from learners.startup import start_learner

    client = BufferClient(address, timeout_s=PATIENCE_S)
    start_learner(config, folder, client, 0, f"file://{folder}/rendezvous", None).run()


class RecipeEngine:
    """An engine for the runs of recipes with one model."""

    def __init__(self, model: Path) -> None:
        from generators.vllm_engine import VllmEngine

        self.model = model
        self._set_num_threads, self._disabled = torch.set_num_threads, torch._dynamo.config.disable
        self._engine = VllmEngine(
            str(model), dtype="float32", max_model_len=LONGEST, max_sequences=64, kv_cache_mb=64
        )

    def __enter__(self) -> "RecipeEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        torch.set_num_threads, torch._dynamo.config.disable = self._set_num_threads, self._disabled

    def run_recipe(self, config: Config, folder: Path) -> m.RunNews:
        """Runs to the last step. Returns the state of the run then, and its evaluations.

        Raises what a role has raised.
        """
        from generators.joining import make_episodes, make_subscriber
        from generators.worker import Generator

        server = BufferServer(config, folder / "journal", config_text=to_yaml(config))
        failed: list[BaseException] = []
        client = BufferClient(server.address, timeout_s=60.0)
        self._engine.version = None
        generator = Generator(
            "generator-0",
            config,
            BufferClient(server.address, timeout_s=60.0),
            self._engine,
            make_episodes(config),
            make_subscriber(config, server.address, None),
        )
        ranks.warm_up()
        learner = mp.get_context("forkserver").Process(
            target=run_learner, args=(config, folder, server.address), daemon=True
        )
        learner.start()

        def run_role(run: object) -> None:
            try:
                run()
            except BaseException as error:
                failed.append(error)
                learner.kill()

        threads = [threading.Thread(target=run_role, args=(one,)) for one in (server.run, generator.run)]
        for thread in threads:
            thread.start()
        try:
            learner.join(PATIENCE_S)
            assert not failed and learner.exitcode == 0, (failed, learner.exitcode)
            return client.call(m.WatchRun(after=0, wait_s=0.0), m.RunNews)
        finally:
            learner.kill()
            client.call(m.StopRun(reason="over"), m.Acknowledged)
            threads[1].join(timeout=PATIENCE_S)
            client.close()
            server.stop()
            threads[0].join(timeout=PATIENCE_S)
