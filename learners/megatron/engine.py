"""The Megatron-core engine: tensor, pipeline, sequence, context, expert and data parallelism with the
distributed optimizer.

On a CPU everything is float32. On a GPU with `dtype=bfloat16` parameters are bfloat16, and the optimizer
keeps float32 copies divided over the data-parallel ranks; gradients are added up in float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor, nn
from transformers import AutoConfig

from configs.learner import ADAM_BETAS
from configs.model import Dtype
from learners.checkpoint import StateWriter
from learners.device_memory import DeviceMemory
from learners.engine import LossFn, ModelKind, Share
from learners.layout_rules import ParallelSizes
from learners.megatron import stand_ins
from learners.megatron.checkpoint import (
    STATE_KEYS,
    OptimizerSlice,
    RankHeader,
    SavedState,
    ShardRange,
    write_rank_file,
)
from learners.megatron.columns import stream_columns
from learners.megatron.model import MegatronModel, find_problems, make_transformer_config
from learners.megatron.names import Parameter, ParameterNames, ShardLayout
from learners.megatron.routers import watch_routers
from learners.model_source import ModelSource
from learners.packing import Packed
from learners.routing import LoadBalance, check_replay
from learners.world import join_pool
from sync.stream import BUCKET_BYTES, TensorPart, absent_part, choose_rows, stream_rows

_groups: tuple[ParallelSizes, Any] | None = None
"""The sizes that Megatron's process groups were made for, and the default group that they were made in."""


def _make_process_groups(sizes: ParallelSizes) -> None:
    """Makes Megatron's process groups, once: all engines of a process share them.

    Raises ValueError for other sizes than before.
    """
    global _groups
    if _groups is not None and _groups[1] is dist.group.WORLD:
        for field in ParallelSizes.__slots__:
            wanted, made = getattr(sizes, field), getattr(_groups[0], field)
            if wanted != made:
                raise ValueError(
                    f"learner.megatron.{field} must be {made} as in the first engine, got {wanted}"
                )
        return
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_parallel,
        pipeline_model_parallel_size=sizes.pipeline_parallel,
        context_parallel_size=sizes.context_parallel,
        expert_model_parallel_size=sizes.expert_parallel,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng():
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    _groups = sizes, dist.group.WORLD


def _reduce_gradients(model: list[nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Adds gradients up over the ranks.

    Megatron would divide by tokens, but this loss has its denominator already.
    """
    finalize_model_grads(model, None, **kwargs)


class MegatronEngine:
    """Implements `learners.engine.Engine` in torch's default process group, which must exist already."""

    def __init__(
        self,
        path: str | Path,
        *,
        kind: ModelKind = ModelKind.policy,
        dtype: Dtype = Dtype.float32,
        temperature: float = 1.0,
        betas: tuple[float, float] = ADAM_BETAS,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        entropy_gradient: bool = False,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        aux_loss_coefficient: float = 0.0,
        router_replay: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`bucket_bytes`: size of the weights that are published at a time. `entropy_gradient`: a loss may
        have a gradient through the entropy. `aux_loss_coefficient` is for a mixture's load balancing, and
        with `router_replay` tokens go to the experts that a batch records (`learners.routing`). `on_progress`
        is called whenever some of the model has been read.

        Raises ValueError for a model that Megatron does not know, or that these sizes do not divide.
        """
        config, cuda = AutoConfig.from_pretrained(path), torch.cuda.is_available()
        self._sizes = ParallelSizes(tensor_parallel, pipeline_parallel, expert_parallel, context_parallel)
        if found := find_problems(config, self._sizes, dist.get_world_size()):
            raise ValueError("\n".join(found))
        self._publish_dtype, self._bucket_bytes = getattr(torch, dtype), bucket_bytes
        self._weight_decay, self._max_grad_norm = weight_decay, max_grad_norm
        self._is_trained = kind is not ModelKind.frozen
        self._source = ModelSource(Path(path), join_pool(), on_progress, everywhere=True)
        self._names = ParameterNames(
            config, self._source.files, pipeline_parallel, critic=kind is ModelKind.critic
        )
        self._experts = getattr(config, "num_experts", 0) // expert_parallel
        self._balance = LoadBalance(config, aux_loss_coefficient)
        if router_replay:
            check_replay(config)
        stand_ins.install_stand_ins()
        with stand_ins.use_available_device():
            _make_process_groups(self._sizes)
            self._transformer = make_transformer_config(
                config, self._sizes, self._publish_dtype if cuda else torch.float32, activation_checkpointing
            )
            self._transformer.finalize_model_grads_func = _reduce_gradients
            self._model = MegatronModel(
                config,
                self._transformer,
                critic=kind is ModelKind.critic,
                temperature=temperature,
                entropy_gradient=entropy_gradient,
            )
            self._model.replays = router_replay
            watch_routers(self._model, config, self._balance)
            self._model.to("cuda" if cuda else "cpu", self._transformer.params_dtype)
            self._local = self._names.name_parameters(
                self._model, mpu.get_expert_model_parallel_rank() * self._experts
            )
            self._load_model()
            self._slices: list[OptimizerSlice] = []
            if kind is ModelKind.frozen:
                self._model.requires_grad_(False)
            else:
                self._make_optimizer(betas)
        self._memory = DeviceMemory(self._list_tensors, self._list_gradients)
        self.share = Share(
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
            holds_results=mpu.is_pipeline_last_stage() and mpu.get_tensor_and_context_parallel_rank() == 0,
            pad_multiple=tensor_parallel * context_parallel,
        )

    def _load_model(self) -> None:
        owned = self._names.parameters.items()
        due = {name for name, parameter in owned if dist.get_rank() in self._find_owners(parameter)}
        with self._source.note_failure():
            if unknown := sorted(due - self._local.keys()):
                raise ValueError(
                    f"model.path must hold no parameters but those of its config.json, got {unknown[0]}"
                )
        for name, local in self._local.items():
            self._source.on_progress()
            with self._source.note_failure():
                parameter, index, count = self._find_shard(name)
                self._names.check_shape(parameter, count, local.shape)
                if (read := self._names.read_shard(parameter, index, count)) is not None:
                    local.data.copy_(read)
        self._source.raise_failures()

    def _make_optimizer(self, betas: tuple[float, float]) -> None:
        self._ddp = DistributedDataParallel(
            self._transformer,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            self._model,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=1e-8,
            use_distributed_optimizer=True,
            bf16=self._transformer.bf16,
            params_dtype=self._transformer.params_dtype,
        )
        self._optimizer = get_megatron_optimizer(
            settings, [self._ddp], config_overrides={}, use_gloo_process_groups=False
        )
        for group in self._optimizer.param_groups:
            group |= {"weight_decay": self._weight_decay, "fused": True}
        self._slices = list(self._list_own_slices())
        # Where parameters are bfloat16, the optimizer's copies take the file's full precision.
        for held in self._slices if self._transformer.bf16 else ():
            read = self._names.read_shard(held.parameter, held.range.index, held.range.count)
            if read is not None:
                held.state["param"].copy_(read.reshape(-1)[held.range.start : held.range.end])

    def _list_own_slices(self) -> Iterator[OptimizerSlice]:
        """Yields the slices that the distributed optimizer holds on this rank: a range of each parameter's
        elements, or nothing."""
        names = {local: name for name, local in self._local.items()}
        for optimizer in self._optimizer.chained_optimizers:
            for local in optimizer.model_param_gbuf_map:
                elements = optimizer._get_model_param_range_map(local)["param"]
                group, place = optimizer.model_param_group_index_map[local]
                main = optimizer.optimizer.param_groups[group]["params"][place]
                # AdamW makes this state at its first step. Made now, a fresh engine has a place to load a
                # checkpoint into.
                state = optimizer.optimizer.state[main] = {
                    "step": torch.zeros((), device=main.device),
                    "exp_avg": torch.zeros_like(main),
                    "exp_avg_sq": torch.zeros_like(main),
                }
                parameter, index, count = self._find_shard(names[local])
                replica = (
                    parameter.layout is ShardLayout.replicated and mpu.get_tensor_model_parallel_rank() > 0
                )
                yield OptimizerSlice(
                    parameter,
                    ShardRange(index, count, elements.start, elements.end),
                    {"param": main.detach(), **state},
                    is_written=names[local] == parameter.name and not replica,
                )

    def _find_shard(self, name: str) -> tuple[Parameter, int, int]:
        """Returns the model's parameter that a local one belongs to, the number of its shard, and how many
        shards there are. Raises ValueError for a parameter that the files lack."""
        tied = name == "output_layer.weight" and name not in self._names.parameters
        parameter = self._names.parameters.get("embedding.word_embeddings.weight" if tied else name)
        if parameter is None:
            raise ValueError(f"model.path must hold all parameters of its config.json, got none for {name}")
        count = self._count_shards(parameter)
        return parameter, mpu.get_tensor_model_parallel_rank() if count > 1 else 0, count

    def _count_shards(self, parameter: Parameter) -> int:
        if parameter.layout is ShardLayout.replicated:
            return 1
        return self._sizes.tensor_parallel if parameter.expert is None else self._sizes.expert_tensor_parallel

    def _find_owners(self, parameter: Parameter) -> list[int]:
        """Returns the rank that publishes each shard, by shard: the first rank of those that hold it."""
        first = parameter.stage * (dist.get_world_size() // self._sizes.pipeline_parallel)
        if parameter.expert is not None:
            first += parameter.expert // self._experts
        return list(range(first, first + self._count_shards(parameter)))

    def _run_schedule(
        self, model: nn.Module, microbatches: Sequence[Packed], step: Any, forward_only: bool
    ) -> list[Any]:
        """Runs Megatron's schedule with `step` as its forward step; returns the step's results on the last
        stage, by microbatch."""
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            # Megatron does not use this length where lengths are variable.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        def step(batches: Iterator[Packed], model: nn.Module) -> tuple[Tensor, None]:
            return model(next(batches)), None

        with stand_ins.use_available_device():
            outs = self._run_schedule(self._model, microbatches, step, forward_only=True)
        if not mpu.is_pipeline_last_stage():
            return [torch.zeros(len(packed.tokens)) for packed in microbatches]
        return [_spread_outputs(out, packed)[0] for out, packed in zip(outs, microbatches, strict=True)]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """Raises FloatingPointError, and updates nothing, when the gradient is not finite."""

        def step(batches: Iterator[Packed], model: nn.Module) -> tuple[Tensor, Any]:
            packed = next(batches)

            def loss(out: Tensor) -> tuple[Tensor, Tensor, None]:
                return loss_fn(*_spread_outputs(out, packed), packed), torch.ones((), dtype=torch.int32), None

            return model(packed), loss

        self._balance.begin_update(next(self._model.parameters()).device)
        if self._balance.needs_counting:
            self.infer(microbatches)
            self._balance.finish_counting()
        with stand_ins.use_available_device():
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            self._run_schedule(self._ddp, microbatches, step, forward_only=False)
            self._balance.end_update()
            self._optimizer.prepare_grads()
            norm = self._optimizer.get_grad_norm()
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient norm must be finite, got {norm}: nothing was updated")
            main = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            if norm > self._max_grad_norm:
                torch._foreach_mul_(
                    [parameter.grad for parameter in main], self._max_grad_norm / (norm + 1e-6)
                )
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
        return norm

    @property
    def routing_metrics(self) -> dict[str, float]:
        return self._balance.metrics

    def stream_weights(self) -> Iterator[TensorPart]:
        """Ranks that hold the same rows divide these among themselves. The ranks with a layer's first experts
        tell where the others stand."""
        positions = {name: number for number, name in enumerate(self._names.parameters)}
        for name, local in self._local.items():
            if name not in self._names.parameters:  # a tied head: the first stage publishes it
                continue
            yield from self._stream_shard(name, local.detach())
            if mpu.get_expert_model_parallel_rank() == 0:
                for later in islice(self._names.parameters, positions[name] + 1, None):
                    if self._names.parameters[later].expert is None or later in self._local:
                        break
                    for source, shape in self._names.list_sources(later):
                        yield absent_part(source, shape, self._publish_dtype)

    def _stream_shard(self, name: str, local: Tensor) -> Iterator[TensorPart]:
        parameter, index, count = self._find_shard(name)
        is_expert = parameter.expert is not None
        if parameter.layout is ShardLayout.columns and count > 1:
            group = (
                mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()
            )
            yield from stream_columns(
                parameter.sources[0],
                local,
                group,
                self._find_replica(is_expert),
                self._publish_dtype,
                self._bucket_bytes,
            )
            return
        number, copies = self._find_replica(is_expert)
        if count == 1 and not is_expert:
            # Tensor-parallel ranks have copies of it too.
            size = self._sizes.tensor_parallel
            number, copies = number * size + mpu.get_tensor_model_parallel_rank(), copies * size
        parts = self._names.split_shard(parameter.layout, local, count)
        for source, rows in zip(parameter.sources, parts, strict=True):
            row_bytes = rows[:1].numel() * self._publish_dtype.itemsize
            begin, end = choose_rows(len(rows), row_bytes, number, copies)
            yield from stream_rows(
                source,
                (len(rows) * count, *rows.shape[1:]),
                len(rows) * index + begin,
                rows[begin:end],
                self._publish_dtype,
                self._bucket_bytes,
            )

    def _find_replica(self, is_expert: bool) -> tuple[int, int]:
        """Returns this rank's number among those that hold the same shard, and how many these are."""
        if is_expert:
            return mpu.get_expert_data_parallel_rank(), mpu.get_expert_data_parallel_world_size()
        return (
            mpu.get_data_parallel_rank(with_context_parallel=True),
            mpu.get_data_parallel_world_size(with_context_parallel=True),
        )

    def copy_state(self) -> StateWriter:
        tensors = {f"random.{name}": state.clone() for name, state in self._read_random_states().items()}
        ranges = {}
        for held in self._slices:
            if held.is_written:
                ranges[held.parameter.name] = held.range
                tensors |= {
                    f"{key}.{held.parameter.name}": held.state[key].to("cpu", copy=True) for key in STATE_KEYS
                }
        step = int(self._slices[0].state["step"]) if self._slices else 0
        header, rank = RankHeader(dist.get_world_size(), self._sizes, step, ranges), dist.get_rank()
        return lambda folder: write_rank_file(folder, rank, header, tensors)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """Raises FileNotFoundError, or ValueError, when the folder is no whole checkpoint of this model."""
        saved = SavedState(folder, self._names)
        for name, local in self._local.items():
            parameter, index, count = self._find_shard(name)
            local.copy_(
                saved.read_range("param", parameter, ShardRange(index, count, 0, local.numel())).view_as(
                    local
                )
            )
        for held in self._slices:
            held.state["step"].fill_(saved.step)
            for key in STATE_KEYS:
                held.state[key].copy_(saved.read_range(key, held.parameter, held.range))
        random = saved.read_random_states(dist.get_rank(), dist.get_world_size(), self._sizes)
        # With ranks in another layout, or on another kind of device, than those that wrote it, each keeps its
        # own random state.
        if random.keys() == self._read_random_states().keys():
            torch.set_rng_state(random.pop("cpu"))
            if "cuda" in random:
                torch.cuda.set_rng_state(random.pop("cuda"))
            get_cuda_rng_tracker().set_states(random)

    # ---- turns

    def _list_tensors(self) -> Iterator[Tensor]:
        """Yields all that the engine keeps between two calls."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        for held in self._slices:
            yield from held.state.values()

    def _list_gradients(self) -> Iterator[Tensor]:
        """Yields the buffers of gradients, which an update empties before it fills them."""
        if self._is_trained:
            for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers):
                yield buffer.grad_data

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def _read_random_states(self) -> dict[str, Tensor]:
        """Returns torch's random states, and those that Megatron keeps of its own, by name."""
        cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
        return {"cpu": torch.get_rng_state(), **cuda, **get_cuda_rng_tracker().get_states()}


def _spread_outputs(out: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Spreads the outputs [K, 2] of `packed.targets` over all tokens: [T] and [T] on the CPU, 0 elsewhere."""
    spread = torch.zeros(len(packed.tokens), 2).index_copy(0, packed.targets, out.cpu())
    return spread[:, 0], spread[:, 1]
