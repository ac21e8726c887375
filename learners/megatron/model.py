"""A Hugging Face model built from Megatron-core's layers: one rank's part, with log-probabilities or values
at its end."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from learners import heads
from learners.flops import head_dim
from learners.layout_rules import ParallelSizes, find_megatron_problems
from learners.megatron import stand_ins
from learners.packing import Packed, pad_packed
from learners.routing import ForwardPass
from learners.sequence_ranks import OwnTokens, join_outputs


def find_problems(config: Any, sizes: ParallelSizes, world: int) -> list[str]:
    """Returns why this model cannot be divided so over `world` ranks, or not be built at all.

    `config`: Hugging Face's.
    """
    tensor, pipeline = sizes.tensor_parallel, sizes.pipeline_parallel
    return find_megatron_problems(sizes, config.to_dict()) + [
        f"learner.megatron.tensor_parallel · pipeline_parallel · {key} must divide "
        f"learner.ranks, got {tensor} · {pipeline} · {size} for {world}"
        for key, size in (
            ("expert_parallel", sizes.expert_parallel),
            ("context_parallel", sizes.context_parallel),
        )
        if world % (tensor * pipeline * size)
    ]


def make_transformer_config(
    config: Any, sizes: ParallelSizes, dtype: torch.dtype, activation_checkpointing: bool
) -> TransformerConfig:
    """Translates Hugging Face's `config` for Megatron. `dtype`: of parameters and activations."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type.startswith("qwen3"),
        # Dropout would make every log-probability a random number.
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # All parameters are loaded.
        init_method=_keep_tensor,
        output_layer_init_method=_keep_tensor,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor_parallel,
        pipeline_model_parallel_size=sizes.pipeline_parallel,
        sequence_parallel=sizes.tensor_parallel > 1,
        context_parallel_size=sizes.context_parallel,
        # Each microbatch has a length of its own.
        variable_seq_lengths=True,
        # Variable lengths require this dispatcher, in dense models too.
        moe_token_dispatcher_type="alltoall",
        # Megatron then divides neither loss nor gradients by microbatches or ranks.
        calculate_per_token_loss=True,
        # These are kernels of APEX, or compiled for CUDA.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **(recompute if activation_checkpointing else {}),
        **(_make_mixture_settings(config, sizes) if config.model_type == "qwen3_moe" else {}),
    )


def _make_mixture_settings(config: Any, sizes: ParallelSizes) -> dict[str, Any]:
    dense = set(config.mlp_only_layers)
    sparse = [
        int(layer not in dense and (layer + 1) % config.decoder_sparse_step == 0)
        for layer in range(config.num_hidden_layers)
    ]
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": sparse,
        "moe_router_topk": config.num_experts_per_tok,
        # True: the top k of a softmax; False: a softmax of the top k, which sums to 1.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": sizes.expert_parallel,
        "expert_tensor_parallel_size": sizes.expert_tensor_parallel,
    }


def _keep_tensor(tensor: Tensor) -> Tensor:
    return tensor


class MegatronModel(GPTModel):
    """One rank's part of the model.

    Pipeline stages hand on [T', 1, H]; T' is this rank's part of the padded tokens. Context-parallel ranks
    have one part after another of them, and within such a part tensor-parallel ranks.
    """

    def __init__(
        self,
        config: Any,
        transformer: TransformerConfig,
        *,
        critic: bool,
        temperature: float,
        entropy_gradient: bool,
    ) -> None:
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        super().__init__(
            transformer,
            stand_ins.make_block_spec(transformer),
            config.vocab_size,
            config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=config.tie_word_embeddings and not critic,
            position_embedding_type="rope",
            rotary_base=config.rope_parameters["rope_theta"],
            pg_collection=stand_ins.make_layer_groups(),
        )
        rope = config.rope_parameters["rope_type"]
        if rope != "default":
            self.rotary_pos_emb.inv_freq, _ = ROPE_INIT_FUNCTIONS[rope](
                config, self.rotary_pos_emb.inv_freq.device
            )
        self._hugging_face, self.forward_pass, self.replays = config, ForwardPass(), False
        self._temperature, self._entropy_gradient = temperature, entropy_gradient
        self.score: nn.Linear | None = None
        if critic and last:
            self.output_layer = None
            with torch.random.fork_rng():
                self.score = nn.Linear(config.hidden_size, 1)
                # A folder without such a head gets one as Hugging Face draws it, the same on all ranks.
                torch.manual_seed(0)
                nn.init.normal_(self.score.weight, std=config.initializer_range)
                nn.init.zeros_(self.score.bias)

    def forward(self, packed: Packed) -> Tensor:
        """Returns on the last stage [K, 2]: log-probability, or value, and entropy of each of the K
        `packed.targets`."""
        device, tensor = next(self.parameters()).device, self.config.tensor_model_parallel_size
        context = self.config.context_parallel_size
        padded = pad_packed(packed, tensor * context)
        own = OwnTokens.of_rank(len(padded.tokens), mpu.get_context_parallel_rank(), context)
        place = mpu.get_context_parallel_rank() * tensor + mpu.get_tensor_model_parallel_rank()
        within_layers = OwnTokens.of_rank(len(padded.tokens), place, context * tensor)
        self.forward_pass.begin_pass(
            packed, padded, within_layers.slice, self._hugging_face, self.replays, device
        )
        tokens = padded.tokens[own.slice].to(device)
        hidden = self.embedding(tokens[None], None) if self.pre_process else None
        hidden = self.decoder(
            hidden,
            None,
            rotary_pos_emb=self._find_angles(padded.positions[own.slice].to(device), padded.max_seqlen),
            padding_mask=None if self.forward_pass.valid is None else self.forward_pass.valid[None],
            packed_seq_params=self._describe_sequences(padded, device),
        )
        return self._compute_head(hidden, packed, own) if self.post_process else hidden

    def _find_angles(self, positions: Tensor, longest: int) -> Tensor:
        """Returns [T', 1, 1, d] the angles of rotary embeddings at these positions [T'].

        Megatron keeps the tables of the last 32 lengths, so it is asked for powers of two only.
        """
        table = self.rotary_pos_emb(1 << (longest - 1).bit_length(), packed_seq=True)
        return table.index_select(0, positions)

    def _describe_sequences(self, padded: Packed, device: torch.device) -> PackedSeqParams:
        """Returns the ends of all ranks' sequences for attention, and beside them the one length of this
        rank's tokens, whose angles `_find_angles` has put in order already, for Megatron's rotary embedding.
        """
        cu_seqlens, longest = padded.cu_seqlens.to(device), padded.max_seqlen
        found = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
        if self.config.context_parallel_size > 1:
            size = len(padded.tokens) // self.config.context_parallel_size
            found.cu_seqlens_q_padded = found.cu_seqlens_kv_padded = cu_seqlens.new_tensor([0, size])
        return found

    def _compute_head(self, hidden: Tensor, packed: Packed, own: OwnTokens) -> Tensor:
        if self.config.sequence_parallel:
            # In the backward pass every rank has the whole gradient of a value, but only its own vocabulary's
            # part of the gradient of a log-probability, so only the latter is summed over the ranks.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=self.score is None
            )
        places = own.find_targets(packed.targets)
        targets = packed.targets[places]
        hidden = hidden[:, 0].index_select(0, (targets - 1 - own.start).to(hidden.device))
        out = self._compute_outputs(hidden, packed.tokens[targets].to(hidden.device))
        if self.config.context_parallel_size == 1:
            return out
        spread = out.new_zeros(len(packed.targets), 2).index_copy(0, places.to(out.device), out)
        return join_outputs(spread, mpu.get_context_parallel_group())

    def _compute_outputs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[K, H], [K] int64 -> [K, 2]: log-probability of these tokens, or value, and entropy."""
        if self.score is not None:
            values = self.score(hidden).float()[:, 0]
            return torch.stack([values, torch.zeros_like(values)], -1)
        weight: Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight  # type: ignore[attr-defined]
        )
        return vocab_parallel_logprobs(hidden, weight, tokens, self._temperature, self._entropy_gradient)


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> Tensor:
    """Computes `learners.heads.chunked_logprobs` over a vocabulary whose rows are divided over the
    tensor-parallel ranks.

    Ranks exchange only sums over their own rows, and all compute the same from these sums, so each has the
    gradient of its own logits. Shapes: hidden [K, H], weight [V / ranks, H], targets [K] int64 -> [K, 2]
    float32: log-probability and entropy.
    """
    group = mpu.get_tensor_model_parallel_group()
    first = group.rank() * len(weight)
    reduce = reduce_from_tensor_model_parallel_region

    def compute_chunk(h: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(h, weight).float() / temperature
        largest = logits.detach().amax(-1)
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        logits = logits - largest[:, None]
        odds = logits.exp()
        total = reduce(odds.sum(-1))
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = total.log() - reduce((odds * logits).sum(-1)) / total
        here = (target >= first) & (target < first + len(weight))
        picked = logits.gather(-1, (target - first).clamp(0, len(weight) - 1)[:, None])[:, 0]
        return torch.stack([reduce(picked.where(here, 0.0)) - total.log(), entropy], -1)

    size = max(1, heads.CHUNK_ELEMENTS // len(weight))
    if len(hidden) <= size:
        return compute_chunk(hidden, targets)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat(
        [checkpoint(compute_chunk, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]
    )
