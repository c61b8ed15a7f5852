"""Sizes of the small model and pools of the CPU run, shared by ranks, oracle and driver. Standard library only."""

from __future__ import annotations

PAGE = 256
WINDOW = 128
HIDDEN = 512
STREAMS = 4
LAYERS = 4
CAPTURED_LAYERS = (1, 2, 3)
STAGES = 3
BLOCK = 5
"""Tokens that a draft proposes."""
ROW = 512
NOPE = 448
ROPE = ROW - NOPE
VOCAB = 1024
POSITIONS = 8192
"""Longest prompt that the small model's position table and rope table cover."""
NORM_EPS = 1e-6
ROPE_THETA = 10000.0
TARGET_RATIOS = (0, 4, 128)
"""Compression ratios of the target pool's layers; its content is a tag, no target attention runs."""
POOL_PAGES = 96
CONTEXT = POSITIONS

MODEL_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": ROW,
    "v_head_dim": ROW,
    "kv_lora_rank": ROW,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 8,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 1,
    "n_hash_layers": 1,
    "swiglu_limit": 10.0,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": ROPE_THETA,
    "compress_rope_theta": 40000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": POSITIONS // 4,
    },
    "max_position_embeddings": POSITIONS,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "compress_ratios": [0, 0, 4, 128],
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": STAGES,
    "dspark_block_size": BLOCK,
    "dspark_markov_rank": 32,
    "dspark_noise_token_id": 1000,
    "dspark_target_layer_ids": list(CAPTURED_LAYERS),
}
"""`config.json` of the run: a DeepSeek-V4 with bundled DSpark draft in miniature."""
