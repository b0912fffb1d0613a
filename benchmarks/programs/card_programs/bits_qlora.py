"""bitsandbytes: a Llama loaded in 4 bits, adapters of peft, checkpointed, its paged optimizer; then LLM.int8."""

import gc
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.programs.card_parts import show

config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
four = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for what, quantized in (("4bit", four), ("8bit", BitsAndBytesConfig(load_in_8bit=True))):
        import bitsandbytes

        torch.cuda.reset_peak_memory_stats()
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantized, device_map={"": 0}, dtype=torch.bfloat16
        )
        show(f"{what} loaded")
        model = prepare_model_for_kbit_training(model)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        show(f"{what} prepared")
        optimizer = bitsandbytes.optim.PagedAdamW32bit([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for step in range(3):
            ids = torch.randint(0, 32000, (4, 512), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            show(f"{what} {step}")
        del model, optimizer, loss
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
