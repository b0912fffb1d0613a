"""DeepSpeed's ZeRO stage 2, one rank: bfloat16 with its own optimizer around torch's."""

from benchmarks.programs.card_parts import train_with_deepspeed

train_with_deepspeed(29552, {"stage": 2})
