"""Adapters of peft on a frozen model, gradients checkpointed."""

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000, use_cache=False,
)  # fmt: skip
targets = ["q_proj", "v_proj", "down_proj"]
kinds = {
    "lora": LoraConfig(r=16, lora_dropout=0.05, target_modules=targets),
    "dora": LoraConfig(r=16, use_dora=True, target_modules=targets),
    "rslora all": LoraConfig(r=64, use_rslora=True, target_modules="all-linear"),
    "ia3": IA3Config(target_modules=targets, feedforward_modules=["down_proj"]),
}
for name, kind in kinds.items():
    for checkpoints in (False, True):
        torch.cuda.empty_cache()
        model = LlamaForCausalLM(config).cuda().bfloat16()
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        model = get_peft_model(model, kind).train()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(0, 32000, (2, 512), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(name, checkpoints, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        del model, optimizer, ids
