"""vLLM as a rollout engine, in this process: our loop calls vLLM's engine core step by step.

Nothing is in flight inside vLLM between two steps, so that is where weights change. That needs no pause and
no second process. Our loop drives the core below vLLM's request front end (tokenizing, text, streaming),
because a loop over token ids has no use for that.

Importing this module changes the process: vLLM takes `torch.set_num_threads` away and binds memory. So no
learner may import it. The code is written against vLLM 0.32. An engine of several GPUs has a worker process
for each (`vllm_workers`), and its core here.
"""

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# These variables count only when they are set before torch and vLLM are imported.
os.environ |= {
    # Several threads would spin against each other and against other roles.
    "OMP_NUM_THREADS": "1",
    # How vLLM splits a sequence depends on what else is in the batch, and a sum's last bits depend on the
    # split.
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    # Threads of worker processes are bound to no processor: they are few, and may be on any.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A fork of this process would have its threads' locks, and not its threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# A step of an engine whose ranks hang ends before the buffer's watchdog ends the run.
os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "180")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config.weight_transfer import WeightTransferConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core_client import InprocClient  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402

from configs.sizes import count_sizes  # noqa: E402
from configs.sync import KvCache  # noqa: E402
from generators.engine import Completion, Sample, check_sample  # noqa: E402
from generators.shared_gpu import compute_kv_cache_bytes  # noqa: E402
from sync.manifest import DigestMismatch, EngineMismatch, Manifest  # noqa: E402
from sync.snapshot import Snapshot, expect_digests  # noqa: E402
from sync.vllm_plugin import keep_weights_unpacked  # noqa: E402
from sync.weight_source import WeightSource  # noqa: E402

if TYPE_CHECKING:
    from generators.vllm_workers import WorkerProcesses

CPU_KV_CACHE_MB = 64


@dataclass(slots=True)
class RunningSample:
    """A sample in the engine, with the tokens that it has so far."""

    sample: Sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    """[n, layers, k] each, of n consecutive tokens."""

    def make_completion(self, finish_reason: str) -> Completion:
        return Completion(
            id=self.sample.id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            experts=self._join_experts() if self.experts else None,
        )

    def _join_experts(self) -> np.ndarray:
        """Returns [prompt + sampled, layers · k]. It holds -1 for tokens that went into no layer: the last
        sampled one, and those whose experts an aborted sample lacks."""
        found = np.concatenate(self.experts)
        whole = np.full((len(self.sample.prompt) + len(self.tokens), found[0].size), -1, np.int16)
        whole[: len(found)] = found.reshape(len(found), -1)[: len(whole)]
        return whole


class VllmEngine:
    """`generators.engine.Engine` on vLLM.

    The model folder gives architecture and end-of-sequence ids only. Weights come from snapshots, so the
    engine cannot sample from weights that were not attested.

    A sample depends on its prompt, its seed and the weights only. On a CPU this holds to the last bit,
    whatever runs beside it, under three conditions: the KV cache is large enough (a sample that was pushed
    out and computed again may differ in the last bits), the prefix cache is off, and attention is not latent
    (`deepseek_v3`: the last bits depend on what runs beside it).

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
        tensor_parallel: int = 1,
        kv_cache_mb: int | None = None,
        prefix_cache: bool = False,
        kv_cache: KvCache = KvCache.keep,
        map_weights: bool = True,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        seed: int = 0,
        gpu_memory_fraction: float | None = None,
        shares_gpu: bool = False,
        transfer: str | None = None,
        record_experts: bool = False,
        sleeps: bool = False,
    ) -> None:
        """`tensor_parallel`: GPUs (on a CPU: processes) that share each layer's matrices; the memory below is
        that of each of them.

        `kv_cache_mb`: None is 64 on a CPU. On a GPU it is what remains of the engine's part of the memory:
        measured by vLLM, or computed where other processes are on the device (`shares_gpu`).
        `gpu_memory_fraction` is that part (None: vLLM's default).

        `seed` decides whatever no sample's seed decides.

        `transfer`: the weight-transfer engine of vLLM to start on a GPU, `ipc` or `nccl`.

        `record_experts`: record, for every token of a mixture, the experts that it was sent to.

        `sleeps`: `sleep` gives the GPU's memory away. A CPU engine keeps it.

        `map_weights`: on a CPU, use the snapshot's memory itself, which all engines of the host share, and
        copy nothing.
        """
        self.version: int | None = None
        self._max_model_len = max_model_len
        self._prefix_cache = prefix_cache
        self._kv_cache = kv_cache
        self._map_weights = map_weights
        # On a GPU vLLM records experts itself.
        self._captures_experts = record_experts and current_platform.is_cpu()
        self._cache_salt: str | None = None
        self._running: dict[str, RunningSample] = {}
        """By vLLM's request id, which is never used twice."""
        self._request_ids: dict[str, str] = {}
        """By sample id."""
        self._num_requests = 0
        self._workers: WorkerProcesses | None = None
        """Processes of an engine of several GPUs."""
        self._sleeps, self._lacks_kv_cache = sleeps and not current_platform.is_cpu(), False

        if current_platform.is_cpu():
            platform = _make_cpu_arguments(kv_cache_mb or CPU_KV_CACHE_MB, max_model_len)
        else:
            platform = _make_gpu_arguments(kv_cache_mb, gpu_memory_fraction, transfer, record_experts)
        for name, value in make_float32_environment(dtype).items():
            os.environ.setdefault(name, value)
        if tensor_parallel > 1:
            platform |= _make_parallel_arguments(tensor_parallel)
        config = EngineArgs(
            model=model,
            dtype=str(dtype),
            max_model_len=max_model_len,
            max_num_seqs=max_sequences,
            enable_prefix_caching=prefix_cache,
            seed=seed % 2**31,
            load_format="dummy",
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            # Weights change between two steps, so no step may run ahead.
            async_scheduling=False,
            disable_log_stats=True,
            enable_sleep_mode=self._sleeps,
            **{"distributed_executor_backend": "uni", "worker_extension_cls": "sync.vllm_plugin.WeightSync"}
            | platform,
        ).create_engine_config()
        if shares_gpu and kv_cache_mb is None:
            config.cache_config.kv_cache_memory_bytes = _compute_kv_cache_bytes(config)
        self._core = InprocClient(config, _choose_executor(config), log_stats=False)
        if tensor_parallel > 1:
            self._workers = self._core.engine_core.model_executor
        self._call_workers("prepare_model")
        if self._captures_experts:
            self._call_workers("capture_experts")
        if self._workers is not None:
            self._workers.forget_names()
        self._core.set_weight_version("none")

        self._vocab_size = config.model_config.get_vocab_size()
        stop = _read_end_of_sequence_ids(config.model_config)
        common: dict[str, Any] = {"logprobs": 0, "detokenize": False}
        self._sampled = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_token_ids=stop, **common
        )
        self._forced = SamplingParams(temperature=temperature, ignore_eos=True, **common)
        self._greedy = SamplingParams(temperature=0.0, stop_token_ids=stop, **common)

    def add_sample(self, sample: Sample) -> None:
        """Raises ValueError for a prompt that the model cannot take."""
        assert self.version is not None, "load_version must succeed before the first sample"
        assert sample.id not in self._request_ids, f"sample {sample.id} is in the engine already"
        check_sample(sample, self._max_model_len, self._vocab_size)
        self._submit_sample(sample)

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        request_ids = [self._request_ids[id] for id in ids if id in self._request_ids]
        self._core.abort_requests(request_ids)
        return [self._remove_request(request_id).make_completion("abort") for request_id in request_ids]

    def step(self) -> list[Completion]:
        if not self._running:
            return []
        assert self.version is not None, (
            "weights are not what was published: load_version must succeed before the next step"
        )
        with self._naming_dead():
            outputs = self._core.get_output()
        version = int(outputs.weight_version or self.version)
        finished = []
        for output in outputs.outputs:
            running = self._running[output.request_id]
            if getattr(output, "routed_experts", None) is not None:
                running.experts.append(output.routed_experts)
            running.tokens += output.new_token_ids
            running.versions += [version] * len(output.new_token_ids)
            if output.new_logprobs is not None:
                running.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                running = self._remove_request(output.request_id)
                finished.append(running.make_completion(str(output.finish_reason)))
        return finished

    def count_sampled_tokens(self) -> dict[str, int]:
        return {running.sample.id: len(running.tokens) for running in self._running.values()}

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        request_id = self._request_ids.get(sample_id)
        return [] if request_id is None else self._running[request_id].tokens[start:]

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def load_version(self, source: WeightSource) -> None:
        manifest = source.manifest
        held, self.version = self.version, None
        try:
            if self._workers is None:
                self._call_workers("load_version", source, self._map_weights)
            else:
                self._load_parts(source)
        except EngineMismatch:
            raise
        # These are raised before any parameter is touched, so the old version stays in service.
        except (FileNotFoundError, DigestMismatch):
            self.version = held
            raise
        if self._lacks_kv_cache:
            self._core.wake_up(["kv_cache"])
            self._lacks_kv_cache = False
        if self._kv_cache is KvCache.recompute:
            self._core.reset_prefix_cache(reset_running_requests=True)
        self._core.set_weight_version(str(manifest.version))
        self.version = manifest.version
        if self._prefix_cache and self._cache_salt != manifest.digest:
            self._cache_salt = manifest.digest
            self._restart_unsampled()

    def _load_parts(self, source: WeightSource) -> None:
        """Has every rank take up its parts. All ranks can before any of them does."""
        assert isinstance(source, Snapshot), "an engine of several GPUs takes versions from its host's memory"
        source.attest()
        self._call_workers("check_version", source.manifest.locator, source.manifest.digest)
        self._call_workers("take_version")

    def sleep(self, *, keep_weights: bool) -> None:
        """On a GPU, samples under way lose their KV, and it is computed again. Weights go to the host's
        memory with `keep_weights`; else they are dropped, because `load_version` brings them anew."""
        if not self._sleeps:
            return
        self._core.sleep(level=1 if keep_weights else 2, mode="keep")
        if not keep_weights:
            self.version = None

    def wake(self) -> None:
        """Without weights there is memory for them alone, so that `load_version` has room; it brings the rest
        back."""
        if not self._sleeps:
            return
        self._lacks_kv_cache = self.version is None
        self._core.wake_up(["weights"] if self._lacks_kv_cache else None)

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Returns the digests of what the engine's parameters hold now, by the names of the manifest's
        tensors. With several GPUs they are those of the ranks' parts, by `RANK: NAME`."""
        if self._workers is None:
            digests: dict[str, str] = self._call_workers("held_digests", manifest)[0]
            return digests
        parts = self._call_workers("part_digests")
        return {f"{rank}: {name}": digest for rank, held in enumerate(parts) for name, digest in held.items()}

    def check_held(self, manifest: Manifest) -> None:
        """Raises EngineMismatch, with the rank if there are several, unless the parameters hold the
        manifest's tensors now."""
        if self._workers is None:
            expect_digests(manifest, self.held_digests(manifest), "the engine", EngineMismatch)
        else:
            self._call_workers("check_held", manifest.locator, manifest.digest)

    def shutdown(self) -> None:
        self._core.shutdown()

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of `sync.vllm_plugin.WeightSync`, on every rank if there are several, and returns
        the results."""
        if self._workers is None:
            return self._core.collective_rpc(method, args=arguments)
        return self._workers.ask_ranks(method, *arguments)

    def _naming_dead(self) -> AbstractContextManager[None]:
        return nullcontext() if self._workers is None else self._workers.naming_dead()

    def _submit_sample(self, sample: Sample) -> None:
        request_id = str(self._num_requests)
        self._num_requests += 1
        parameters = self._greedy if sample.greedy else self._forced if sample.forced else self._sampled
        # A copy, because making parameters anew costs 30 times as much.
        parameters = copy(parameters)
        parameters.max_tokens = sample.max_tokens
        if sample.temperature is not None:
            parameters.temperature = sample.temperature
        parameters.seed = None if sample.greedy else sample.seed
        if sample.stop_tokens:
            own_stops = parameters.stop_token_ids or []
            parameters.stop_token_ids = sorted(sample.stop_tokens.union(own_stops))
        self._core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=sample.prompt,
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                # The digest of the weights: only samples of the same weights share KV.
                cache_salt=self._cache_salt,
                data_parallel_rank=None,
            )
        )
        self._running[request_id] = RunningSample(sample)
        self._request_ids[sample.id] = request_id

    def _remove_request(self, request_id: str) -> RunningSample:
        running = self._running.pop(request_id)
        if self._captures_experts:
            running.experts = self._call_workers("take_experts", request_id)[0]
        del self._request_ids[running.sample.id]
        return running

    def _restart_unsampled(self) -> None:
        """Begins samples without a token anew. They could read prompt KV that other weights have left in the
        cache otherwise."""
        request_ids = [request_id for request_id, running in self._running.items() if not running.tokens]
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._submit_sample(self._remove_request(request_id).sample)


def _compute_kv_cache_bytes(config: Any) -> int:
    """Returns the bytes for KV that vLLM's `config` leaves of its part of a shared GPU.

    Raises ValueError for a model whose memory cannot be counted, or when nothing remains.
    """
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    try:
        sizes = count_sizes(config.model_config.hf_text_config.to_dict())
    except ValueError as error:
        raise ValueError(
            "generators.kv_cache_mb must be set for an engine that shares its GPU, for a model of this kind "
            f"(its memory cannot be counted: {error}), got null"
        ) from None
    return compute_kv_cache_bytes(
        sizes,
        budget=config.cache_config.gpu_memory_utilization * device_bytes,
        element_bytes=config.model_config.dtype.itemsize,
        max_sequences=config.scheduler_config.max_num_seqs,
        tokens_per_step=config.scheduler_config.max_num_batched_tokens,
        ranks=config.parallel_config.tensor_parallel_size,
    )


def _make_gpu_arguments(
    kv_cache_mb: int | None, gpu_memory_fraction: float | None, transfer: str | None, record_experts: bool
) -> dict[str, Any]:
    """Returns engine arguments for a GPU."""
    arguments: dict[str, Any] = {
        "enable_return_routed_experts": record_experts,
        # Other backends keep a mixture's experts in layouts that cannot be attested.
        "moe_backend": "triton",
    }
    if gpu_memory_fraction is not None:
        arguments["gpu_memory_utilization"] = gpu_memory_fraction
    if transfer is not None:
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=transfer)
    if kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_mb << 20
    return arguments


def _choose_executor(config: Any) -> type[Executor]:
    if config.parallel_config.world_size == 1:
        return Executor.get_class(config)
    from generators.vllm_workers import WorkerProcesses

    return WorkerProcesses


def _make_parallel_arguments(tensor_parallel: int) -> dict[str, Any]:
    """Returns engine arguments for several GPUs of one host."""
    return {
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "sync.vllm_ranks.RankSync",
    }


def _make_cpu_arguments(kv_cache_mb: int, max_model_len: int) -> dict[str, Any]:
    """Returns engine arguments for a CPU. It also switches off what must be off there before a model is
    built."""
    # Where torch was imported before this module, OMP_NUM_THREADS came too late.
    torch.set_num_threads(1)
    # vLLM compiles one line of its sampler otherwise, which takes 10 s before the first token.
    torch._dynamo.config.disable = True
    keep_weights_unpacked()
    return {
        "enforce_eager": True,
        # Counts for latent attention only, whose other backend packs its weights away.
        "attention_backend": "CPU_MLA",
        "kv_cache_memory_bytes": kv_cache_mb << 20,
        # The least. The default of 128 wastes most of a block on short samples.
        "block_size": 32,
        # A prompt in two pieces is summed in another order than in one.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, 8192),
    }


def make_float32_environment(dtype: str) -> dict[str, str]:
    """Returns environment variables that make an engine compute float32 in float32.

    On a GPU vLLM takes its Triton attention for float32. Triton rounds the products there to TF32 (11 bits)
    by default, and then about half of the log-probabilities were off by more than 1e-4.
    """
    return {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}


def _read_end_of_sequence_ids(model_config: Any) -> list[int]:
    """Returns the end-of-sequence ids of the model's generation config; of its config where the generation
    config has none."""
    ids = model_config.try_get_generation_config().get(
        "eos_token_id", model_config.hf_text_config.eos_token_id
    )
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
