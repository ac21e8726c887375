"""Configurations of public models by their numbers, as their pages' `config.json` have them."""

from typing import Any

QWEN3: dict[str, Any] = dict(
    model_type="qwen3",
    head_dim=128,
    num_key_value_heads=8,
    vocab_size=151936,
    attention_bias=False,
    hidden_act="silu",
    tie_word_embeddings=False,
    max_position_embeddings=40960,
)
PUBLIC_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | dict(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": QWEN3
    | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
    "Qwen3-32B": QWEN3
    | dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
    "Qwen3-235B-A22B": QWEN3
    | dict(
        model_type="qwen3_moe",
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "Llama-3.1-70B": dict(
        model_type="llama",
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        attention_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
    "DeepSeek-V3": dict(
        model_type="deepseek_v3",
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        vocab_size=129280,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attention_bias=False,
        hidden_act="silu",
        tie_word_embeddings=False,
        max_position_embeddings=163840,
        num_nextn_predict_layers=1,
    ),
}
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-70B": 70_553_706_496,
    "DeepSeek-V3": 671_026_404_352,
}
"""Parameters that the pages name, to the last one (DeepSeek-V3 without its layer for predicting two
tokens)."""
