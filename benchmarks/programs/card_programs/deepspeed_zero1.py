"""DeepSpeed's ZeRO stage 1, one rank: bfloat16 with its own optimizer around torch's."""

from benchmarks.programs.card_parts import train_with_deepspeed

train_with_deepspeed(29551, {"stage": 1})
