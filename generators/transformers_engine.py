"""transformers' continuous batching as a rollout engine, in this process: for architectures that vLLM lacks.

transformers runs its batches in a thread of its own, in which `pause()` makes room for new weights. Our loop
runs that thread's three calls itself, batch by batch: it prepares a batch, computes it, and takes the tokens
over. So nothing is in flight between two steps, which is where weights change; each token's version is known
for certain; and whatever fails in the library raises in `step`. No thread is ever started.

The code is written against transformers 5.19.
"""

import logging
from collections import deque

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from configs.sizes import count_sizes
from configs.sync import KvCache
from generators.engine import Completion, Sample, check_sample
from generators.paged_attention import choose_attention
from generators.shared_gpu import MAX_BATCH_TOKENS, PAGE_TOKENS, compute_kv_cache_bytes
from generators.token_draw import DrawingSample, TokenDraw
from generators.transformers_check import check_numbers
from generators.transformers_model import build_model, count_page_token_bytes, read_end_tokens
from sync.manifest import DigestMismatch, EngineMismatch, Manifest
from sync.transformers_weights import TransformersWeights
from sync.weight_source import WeightSource

CPU_KV_CACHE_MB = 64
GPU_MEMORY_FRACTION = 0.9

# transformers logs each failure that it passes on, with its traceback; so does the generator.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


class TransformersEngine:
    """`generators.engine.Engine` on transformers' continuous batching.

    The model folder gives architecture and end-of-sequence ids only. Weights come from snapshots, so the
    engine cannot sample from weights that were not attested.

    A sample depends on its prompt, its seed and the weights only. On a CPU this holds to the last bit,
    whatever runs beside it, under two conditions: the KV cache is large enough (a sample that was pushed out
    and computed again may differ in the last bits), and the model is no mixture, whose experts' sums depend
    on how many tokens they get.

    Log-probabilities are those of the distribution that was sampled from: after temperature, top-p, top-k and
    min-p (greedy samples: temperature 1).
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        max_sequences: int,
        kv_cache_mb: int | None = None,
        kv_cache: KvCache = KvCache.keep,
        map_weights: bool = True,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        gpu_memory_fraction: float | None = None,
    ) -> None:
        """`kv_cache_mb`: None is 64 on a CPU. On a GPU it is what remains of the engine's part of the memory,
        `gpu_memory_fraction` (None: 0.9), by arithmetic.

        `map_weights`: on a CPU, use the snapshot's memory itself, which all engines of the host share, and
        copy nothing.

        Raises ValueError for a model that continuous batching cannot serve, and for too small a cache. The
        first `load_version` raises it for a model whose samples differ from its own forward pass.
        """
        self.version: int | None = None
        self._max_model_len, self._max_sequences = max_model_len, max_sequences
        self._max_batch_tokens = max(max_model_len, MAX_BATCH_TOKENS) + max_sequences
        self._kv_cache, self._map_weights = kv_cache, map_weights
        self._running: dict[str, DrawingSample] = {}
        """By sample id: those that wait, and those in batches."""
        self._waiting: deque[DrawingSample] = deque()
        self._num_requests = 0
        self._is_checked = False
        """True once samples of the first version were compared with the model's own forward pass."""

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            # Several threads would spin against each other and against other roles.
            torch.set_num_threads(1)
        self._model = build_model(model, dtype, device)
        self._weights = TransformersWeights(self._model)
        self._config = self._model.config.get_text_config()
        self._end_tokens = read_end_tokens(model, self._config)
        self._draw = TokenDraw(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        page = PAGE_TOKENS[device.type]
        kv_bytes = self._count_kv_bytes(device, dtype, kv_cache_mb, gpu_memory_fraction)
        # More pages than all sequences can fill would never be used.
        needed = max_sequences * -(-max_model_len // page)
        num_pages = min(kv_bytes // (page * count_page_token_bytes(self._config, dtype)), needed)
        self._batches = self._open_batches(page, num_pages)
        self._check_cache(num_pages * page, kv_cache_mb)

    def add_sample(self, sample: Sample) -> None:
        """Raises ValueError for a prompt that the model cannot take."""
        assert self.version is not None, "load_version must succeed before the first sample"
        assert sample.id not in self._running, f"sample {sample.id} is in the engine already"
        check_sample(sample, self._max_model_len, self._config.vocab_size)
        drawing = DrawingSample(sample, request_id=str(self._num_requests))
        self._num_requests += 1
        self._running[sample.id] = drawing
        self._waiting.append(drawing)

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        aborted = [self._running.pop(id) for id in ids if id in self._running]
        scheduler = self._batches.scheduler
        for drawing in aborted:
            if self._draw.running.pop(drawing.request_id, None) is None:
                self._waiting.remove(drawing)
            else:
                scheduler.set_request_cancellation(drawing.request_id)
        scheduler.clear_cancelled_requests()
        if not scheduler.active_requests:
            # transformers waits for a request to end before it begins others, once its cache was full.
            scheduler.block_new_requests = False
        return [drawing.make_completion("abort") for drawing in aborted]

    def step(self) -> list[Completion]:
        if not self._running:
            return []
        assert self.version is not None, (
            "weights are not what was published: load_version must succeed before the next step"
        )
        self._admit_samples()
        self._draw.version = self.version
        if not self._batches.prepare_next_batch():
            raise RuntimeError(f"transformers has taken none of {len(self._running)} samples into a batch")
        self._batches._generation_step(self._model)
        self._batches.update_batch()
        return self._take_finished()

    def count_sampled_tokens(self) -> dict[str, int]:
        return {id: len(drawing.tokens) for id, drawing in self._running.items()}

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        drawing = self._running.get(sample_id)
        return [] if drawing is None else drawing.tokens[start:]

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def load_version(self, source: WeightSource) -> None:
        held, self.version = self.version, None
        try:
            self._weights.load_version(source, self._map_weights)
        except EngineMismatch:
            raise
        # These are raised before any parameter is touched, so the old version stays in service.
        except (FileNotFoundError, DigestMismatch):
            self.version = held
            raise
        if self._kv_cache is KvCache.recompute:
            self._drop_pages()
        self.version = source.manifest.version
        if not self._is_checked:
            check_numbers(self, self._model, self._max_model_len, self._draw.temperature)
            self._is_checked = True

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Returns the digests of what the engine's parameters hold now, by the names of the manifest's
        tensors."""
        return self._weights.held_digests(manifest)

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives nothing back: `placement.mode=colocated` takes vLLM alone."""

    def wake(self) -> None:
        """Has lost nothing."""

    def shutdown(self) -> None:
        """Gives the memory of the cache back. No thread and no process is left to end."""
        del self._batches, self._manager

    def _open_batches(self, page: int, num_pages: int) -> ContinuousBatchProcessor:
        """Makes the cache, and what transformers keeps for its batches, without its thread."""
        limits = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=max(1, num_pages),
            max_batch_tokens=self._max_batch_tokens,
            max_requests_per_batch=self._max_sequences,
            # It checks an estimate that counts masks, which our attention does not make.
            max_memory_percent=1e6,
            # Requests are begun as long as there are pages, as vLLM does.
            safety_margin=0.0,
            # Blocks are found by their tokens alone: they could be of other weights.
            allow_block_sharing=False,
            # Tokens are drawn on the host's word, between two batches.
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(generation, limits)
        self._manager.logit_processor = self._draw.make_list()
        self._model.set_attn_implementation(choose_attention(self._model))
        # Makes the cache. Without graphs there is nothing to warm up.
        self._manager.warmup()
        return self._manager.batch_processor

    def _check_cache(self, num_tokens: int, kv_cache_mb: int | None) -> None:
        """Raises ValueError for a cache that cannot hold one sequence."""
        cache = self._batches.cache
        needed = sum(
            pages.needs_new_sectors("", 0, self._max_model_len) for pages in cache.cache_allocators.values()
        )
        if num_tokens < self._max_model_len or needed > cache.num_sectors:
            raise ValueError(
                f"generators.kv_cache_mb must hold generators.max_model_len={self._max_model_len} tokens, "
                f"got {'what is left' if kv_cache_mb is None else kv_cache_mb}: {num_tokens} tokens of this "
                "model"
            )

    def _count_kv_bytes(
        self, device: torch.device, dtype: str, kv_cache_mb: int | None, gpu_memory_fraction: float | None
    ) -> int:
        """Returns the bytes for keys and values. Raises ValueError where they cannot be counted."""
        if kv_cache_mb is not None or device.type == "cpu":
            return (kv_cache_mb or CPU_KV_CACHE_MB) << 20
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        try:
            sizes = count_sizes(self._config.to_dict())
        except ValueError as error:
            raise ValueError(
                "generators.kv_cache_mb must be set on a GPU for a model of this kind (its memory cannot be "
                f"counted: {error}), got null"
            ) from None
        return compute_kv_cache_bytes(
            sizes,
            budget=(gpu_memory_fraction or GPU_MEMORY_FRACTION) * device_bytes,
            element_bytes=getattr(torch, dtype).itemsize,
            max_sequences=self._max_sequences,
            tokens_per_step=self._max_batch_tokens,
        )

    def _admit_samples(self) -> None:
        """Gives transformers the samples that the next batch has room for. It would divide a prompt that does
        not fit, and a prompt in two pieces is summed in another order than in one."""
        scheduler = self._batches.scheduler
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        room = self._max_sequences - len(states)
        tokens = self._max_batch_tokens - sum(len(state.remaining_prefill_tokens) or 1 for state in states)
        while self._waiting and room > 0 and len(self._waiting[0].sample.prompt) <= tokens:
            drawing = self._waiting.popleft()
            sample = drawing.sample
            room, tokens = room - 1, tokens - len(sample.prompt)
            self._draw.running[drawing.request_id] = drawing
            taken = self._manager.add_request(
                sample.prompt,
                request_id=drawing.request_id,
                max_new_tokens=sample.max_tokens,
                eos_token_id=[-1] if sample.forced else [*self._end_tokens, *sample.stop_tokens],
            )
            assert taken is not None, "transformers takes requests as long as nobody stops it"

    def _take_finished(self) -> list[Completion]:
        """Returns the samples that have ended. Raises RuntimeError for one that transformers has failed."""
        finished = []
        while (output := self._manager.get_result(timeout=0)) is not None:
            drawing = self._draw.running.pop(output.request_id)
            sample = drawing.sample
            if output.error is not None or len(drawing.tokens) != len(output.generated_tokens):
                raise RuntimeError(
                    f"transformers has ended sample {sample.id} with {len(output.generated_tokens)} of its "
                    f"{len(drawing.tokens)} tokens: {output.error}"
                )
            del self._running[sample.id]
            has_stopped = not sample.forced and drawing.tokens[-1] in sample.stop_tokens.union(
                self._end_tokens
            )
            finished.append(drawing.make_completion("stop" if has_stopped else "length"))
        return finished

    def _drop_pages(self) -> None:
        """Lets transformers read all running samples' tokens anew, as it does with those that find no
        page."""
        scheduler = self._batches.scheduler
        for state in list(scheduler.active_requests.values()):
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(state.create_equivalent_initial_request())
        scheduler.block_new_requests = False
