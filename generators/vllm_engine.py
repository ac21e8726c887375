"""vLLM as a rollout engine, in this process: our loop calls its engine core step by step.

Between two steps nothing is in flight inside vLLM, so that is where weights change: no pausing, no second process. The
core is driven below vLLM's request front end (tokenizing, text, streaming), which a loop over token ids has no use for.

Importing this module changes the process: vLLM takes `torch.set_num_threads` away and binds memory. Keep learners out.
Written against vLLM 0.32; single GPU or CPU (tensor parallel size 1).
"""

import logging
import os
import warnings
from copy import copy
from dataclasses import dataclass, field
from typing import Any

# All of this counts only before torch and vLLM are imported.
os.environ |= {
    "OMP_NUM_THREADS": "1",  # more of them spin against each other and against other roles
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # how a sequence is split depends on what else is in the batch
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
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

from configs.sizes import sizes_of  # noqa: E402
from configs.sync import KvCache  # noqa: E402
from generators.engine import Completion, Sample  # noqa: E402
from generators.shared_gpu import kv_cache_bytes  # noqa: E402
from sync.manifest import DigestMismatch, EngineMismatch, Manifest  # noqa: E402
from sync.snapshot import Snapshot  # noqa: E402
from sync.transports.nccl import NcclBroadcast  # noqa: E402
from sync.vllm_plugin import keep_weights_unpacked  # noqa: E402

CPU_KV_CACHE_MB = 64


@dataclass(slots=True)
class Running:
    """A sample in the engine, with what it has so far."""

    sample: Sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    """[n, layers, k] each, of consecutive tokens"""

    def completion(self, finish_reason: str) -> Completion:
        return Completion(
            id=self.sample.id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            experts=self._experts() if self.experts else None,
        )

    def _experts(self) -> np.ndarray:
        """[prompt + sampled, layers · k]: the last sampled token, and what an aborted sample lacks, went into no layer."""
        found = np.concatenate(self.experts)
        whole = np.full((len(self.sample.prompt) + len(self.tokens), found[0].size), -1, np.int16)
        whole[: len(found)] = found.reshape(len(found), -1)[: len(whole)]
        return whole


class VllmEngine:
    """`generators.engine.Engine` on vLLM.

    The model folder gives architecture and end-of-sequence ids only: weights come from snapshots, so nothing that has
    not been attested can be sampled from.

    A sample depends on its prompt, its seed and the weights only; on a CPU to the last bit, whatever runs beside it, as
    long as the KV cache is large enough (a sample that was pushed out and computed again may differ in the last bits),
    the prefix cache is off, and attention is not latent (`deepseek_v3`: the last bits depend on what runs beside). Log-probabilities are those of the distribution that was sampled from: after
    temperature, top-p, top-k and min-p (greedy samples: temperature 1).
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        max_sequences: int,
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
    ) -> None:
        """`kv_cache_mb`: None is 64 on a CPU; on a GPU what is left of the engine's part of the memory, measured by vLLM, or by arithmetic
        where other processes are on the device (`shares_gpu`). `gpu_memory_fraction`: that part (None: as vLLM has it). `seed`: for
        what no sample's seed decides.

        `transfer`: on a GPU, which of vLLM's weight-transfer engines to have at hand, `ipc` or `nccl`.

        `record_experts`: of a mixture, for every token the experts that it was sent to.

        `map_weights`: on a CPU, use the snapshot's memory itself, which all engines of the host share, and copy nothing.
        """
        self.version: int | None = None
        self._max_model_len = max_model_len
        self._prefix_cache = prefix_cache
        self._kv_cache = kv_cache
        self._map_weights = map_weights
        self._captures = record_experts and current_platform.is_cpu()  # elsewhere vLLM does it
        self._salt: str | None = None
        self._running: dict[str, Running] = {}
        """By vLLM's request id, which is never used twice."""
        self._request_ids: dict[str, str] = {}
        """By sample id."""
        self._num_requests = 0

        platform: dict[str, Any] = {}
        if gpu_memory_fraction is not None:
            platform["gpu_memory_utilization"] = gpu_memory_fraction
        if current_platform.is_cpu():
            platform = _cpu_arguments(kv_cache_mb or CPU_KV_CACHE_MB, max_model_len)
        else:
            if transfer is not None:
                platform["weight_transfer_config"] = WeightTransferConfig(backend=transfer)
            if kv_cache_mb is not None:
                platform["kv_cache_memory_bytes"] = kv_cache_mb << 20
            platform["enable_return_routed_experts"] = record_experts
            platform["moe_backend"] = (
                "triton"  # others keep a mixture's experts in layouts that cannot be attested
            )
        for name, value in float32_environment(dtype).items():
            os.environ.setdefault(name, value)
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
            distributed_executor_backend="uni",
            async_scheduling=False,  # weights change between two steps: nothing may run ahead
            disable_log_stats=True,
            worker_extension_cls="sync.vllm_plugin.WeightSync",
            **platform,
        ).create_engine_config()
        if shares_gpu and kv_cache_mb is None:
            budget = (
                config.cache_config.gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory
            )
            config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, budget)
        self._core = InprocClient(config, Executor.get_class(config), log_stats=False)
        self._core.collective_rpc("prepare_model")
        if self._captures:
            self._core.collective_rpc("capture_experts")
        self._core.set_weight_version("none")

        self._vocab_size = config.model_config.get_vocab_size()
        stop = _end_of_sequence(config.model_config)
        self._sampled = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop_token_ids=stop,
            logprobs=0,
            detokenize=False,
        )
        self._forced = SamplingParams(temperature=temperature, ignore_eos=True, logprobs=0, detokenize=False)
        self._greedy = SamplingParams(temperature=0.0, stop_token_ids=stop, logprobs=0, detokenize=False)

    def add(self, sample: Sample) -> None:
        """Raises ValueError for a prompt that the model cannot take."""
        assert self.version is not None, "load must succeed before the first sample"
        assert sample.id not in self._request_ids, f"sample {sample.id} is in the engine already"
        needed = len(sample.prompt) + sample.max_tokens
        if not sample.prompt or needed > self._max_model_len:
            raise ValueError(
                f"prompt + max_tokens must be 1 .. generators.max_model_len={self._max_model_len} tokens, "
                f"got {len(sample.prompt)} + {sample.max_tokens}"
            )
        if not 0 <= min(sample.prompt) <= max(sample.prompt) < self._vocab_size:
            found = f"{min(sample.prompt)} .. {max(sample.prompt)}"
            raise ValueError(f"prompt must have token ids in 0 .. {self._vocab_size - 1}, got {found}")
        self._submit(sample)

    def abort(self, ids: list[str]) -> list[Completion]:
        requests = [self._request_ids[id] for id in ids if id in self._request_ids]
        self._core.abort_requests(requests)
        return [self._remove(request).completion("abort") for request in requests]

    def step(self) -> list[Completion]:
        if not self._running:
            return []
        assert self.version is not None, (
            "weights are not what was published: load must succeed before the next step"
        )
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
                finished.append(self._remove(output.request_id).completion(str(output.finish_reason)))
        return finished

    def progress(self) -> dict[str, int]:
        return {running.sample.id: len(running.tokens) for running in self._running.values()}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def load(self, source: Snapshot | NcclBroadcast) -> None:
        manifest = source.manifest
        held, self.version = self.version, None
        try:
            self._core.collective_rpc("load_version", args=(source, self._map_weights))
        except EngineMismatch:
            raise
        except (FileNotFoundError, DigestMismatch):  # before anything was touched
            self.version = held
            raise
        if self._kv_cache is KvCache.recompute:
            self._core.reset_prefix_cache(reset_running_requests=True)
        self._core.set_weight_version(str(manifest.version))
        self.version = manifest.version
        if self._prefix_cache and self._salt != manifest.digest:
            self._salt = manifest.digest
            self._restart_unsampled()

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Digests of what the engine's parameters hold now, by the names of the manifest's tensors."""
        return self._core.collective_rpc("held_digests", args=(manifest,))[0]

    def shutdown(self) -> None:
        self._core.shutdown()

    def _submit(self, sample: Sample) -> None:
        request = str(self._num_requests)
        self._num_requests += 1
        params = self._greedy if sample.greedy else self._forced if sample.forced else self._sampled
        params = copy(params)  # making one anew costs 30 times as much
        params.max_tokens = sample.max_tokens
        params.seed = None if sample.greedy else sample.seed
        self._core.add_request(
            EngineCoreRequest(
                request_id=request,
                prompt_token_ids=sample.prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=self._salt,  # the weights' digest: only samples of the same weights share KV
                data_parallel_rank=None,
            )
        )
        self._running[request] = Running(sample)
        self._request_ids[sample.id] = request

    def _remove(self, request: str) -> Running:
        running = self._running.pop(request)
        if self._captures:
            running.experts = self._core.collective_rpc("take_experts", args=(request,))[0]
        del self._request_ids[running.sample.id]
        return running

    def _restart_unsampled(self) -> None:
        """Samples without a token begin anew, lest they read prompt KV that other weights have left in the cache."""
        requests = [request for request, running in self._running.items() if not running.tokens]
        self._core.abort_requests(requests)
        for request in requests:
            self._submit(self._remove(request).sample)


def _kv_cache_bytes(config: Any, budget: float) -> int:
    """For vLLM's `config`. Raises ValueError for a model that cannot be counted, or leaves nothing of `budget` bytes."""
    try:
        sizes = sizes_of(config.model_config.hf_text_config.to_dict())
    except KeyError as error:
        raise ValueError(
            f"generators.kv_cache_mb must be set for an engine that shares its GPU, for a model of this kind (no {error} in its "
            "configuration, so that its memory cannot be counted), got null"
        ) from None
    return kv_cache_bytes(
        sizes,
        budget=budget,
        element_bytes=config.model_config.dtype.itemsize,
        max_sequences=config.scheduler_config.max_num_seqs,
        tokens_per_step=config.scheduler_config.max_num_batched_tokens,
    )


def _cpu_arguments(kv_cache_mb: int, max_model_len: int) -> dict[str, Any]:
    """Engine arguments for a CPU; switches off what must be off there before a model is built."""
    torch.set_num_threads(1)  # where torch was imported before this module, OMP_NUM_THREADS came too late
    torch._dynamo.config.disable = True  # a compiler for one line of the sampler: 10 s before the first token
    keep_weights_unpacked()
    return {
        "enforce_eager": True,
        "attention_backend": "CPU_MLA",  # of latent attention: the other one packs its weights away
        "kv_cache_memory_bytes": kv_cache_mb << 20,
        "block_size": 32,  # the least; the default of 128 wastes most of a block on short samples
        "enable_chunked_prefill": False,  # a prompt in two pieces is summed in another order than in one
        "max_num_batched_tokens": max(max_model_len, 8192),
    }


def float32_environment(dtype: str) -> dict[str, str]:
    """Environment variables that make an engine compute float32 in float32. vLLM takes its Triton attention for it on a GPU, whose
    products Triton rounds to TF32 (11 bits) unless told otherwise: about half of the log-probabilities were off by more than 1e-4."""
    return {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}


def _end_of_sequence(model_config: Any) -> list[int]:
    """End-of-sequence ids of the model's generation config (where it has none: of its config)."""
    ids = model_config.try_get_generation_config().get(
        "eos_token_id", model_config.hf_text_config.eos_token_id
    )
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
