"""TRL's trainers as they are: SFT, DPO, and GRPO whose policy generates."""

import gc
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.programs.card_parts import show

WORDS = 32000
tokenizer = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", bos_token="w2")


def text(number: int, length: int) -> str:
    """So many words."""
    return " ".join(f"w{3 + (number * 7919 + place * 104729) % (WORDS - 3)}" for place in range(length))


def make(folder: str) -> str:
    """A small policy, kept."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=WORDS, pad_token_id=0, eos_token_id=None, bos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def lengths(completions: list[str], **_: object) -> list[float]:
    """A reward."""
    return [float(len(each)) for each in completions]


class Show(TrainerCallback):
    """The peaks of each step."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the trainer."""
        show(f"{self.what} step")


COMMON = {
    "per_device_train_batch_size": 4, "max_steps": 3, "bf16": True, "report_to": [], "save_strategy": "no",
    "disable_tqdm": True, "logging_strategy": "no", "gradient_checkpointing": False,
}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    texts = Dataset.from_list([{"text": text(number, 512)} for number in range(32)])
    pairs = [{"prompt": text(n, 64), "chosen": text(n + 100, 192), "rejected": text(n + 200, 128)} for n in range(32)]
    prompts = Dataset.from_list([{"prompt": text(number, 64)} for number in range(32)])
    sft, dpo = SFTConfig(folder, max_length=512, **COMMON), DPOConfig(folder, **COMMON)
    grpo = GRPOConfig(
        folder, num_generations=4, max_completion_length=32, generation_kwargs={"min_new_tokens": 32}, beta=0.04,
        **COMMON,
    )  # fmt: skip
    for what, start in {
        "sft": lambda **more: SFTTrainer(make(folder), sft, train_dataset=texts, **more),
        "dpo": lambda **more: DPOTrainer(make(folder), None, dpo, train_dataset=Dataset.from_list(pairs), **more),
        "grpo": lambda **more: GRPOTrainer(make(folder), lengths, grpo, train_dataset=prompts, **more),
    }.items():
        trainer = start(processing_class=words, callbacks=[Show(what)])
        trainer.remove_callback(PrinterCallback)
        show(f"{what} made")
        trainer.train()
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
