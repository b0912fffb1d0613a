"""Transformers' Trainer with LoRA by peft and gradient checkpointing, on a Llama of four layers."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(0, 32_000, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, hidden_size=1024, intermediate_size=2816))
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_checkpointing=True,
    max_steps=20,
    logging_steps=1,
    report_to=[],
    bf16=True,
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
