"""DeepSpeed's ZeRO stage 2 with its optimizer on the host, one rank: bfloat16 with its own optimizer around torch's."""

from benchmarks.programs.card_parts import train_with_deepspeed

train_with_deepspeed(
    29554, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, zero_force_ds_cpu_optimizer=False
)
