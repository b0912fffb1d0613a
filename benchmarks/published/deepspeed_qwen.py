"""Qwen2.5-1.5B under ZeRO-3, as the Trainer of transformers hands it to DeepSpeed 0.16.9.

Source: the log of LLaMA-Factory in OpenDCAI/Dataflow-LoopAI (January 2026), which prints the model's configuration and
DeepSpeed's: bfloat16, a batch of 1 on 4 ranks, two micro-batches, buckets by the model's width ("auto"), AdamW of torch
with and without weight decay.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import HfDeepSpeedConfig

WIDTH = 1536
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": 1_000_000_000,
        "reduce_bucket_size": WIDTH * WIDTH,
        "stage3_prefetch_bucket_size": int(0.9 * WIDTH * WIDTH),
        "stage3_param_persistence_threshold": 10 * WIDTH,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    },
}

deepspeed.init_distributed()
kept = HfDeepSpeedConfig(CONFIG)
sizes = Qwen2Config(
    vocab_size=151936,
    hidden_size=WIDTH,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
with deepspeed.zero.Init(config_dict_or_path=CONFIG, dtype=torch.bfloat16):
    model = Qwen2ForCausalLM(sizes)
plain = {name for name, _ in model.named_parameters() if "norm" in name or name.endswith("bias")}
groups = [
    {"params": [each for name, each in model.named_parameters() if name not in plain], "weight_decay": 0.1},
    {"params": [each for name, each in model.named_parameters() if name in plain], "weight_decay": 0.0},
]
deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-5, fused=True), config=CONFIG)
