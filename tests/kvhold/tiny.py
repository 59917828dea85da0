"""A random model small enough for a test, as a folder that transformers loads, and text for it."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvhold.model import LanguageModel
from kvhold.model_attention import NAME, register

WORDS = tuple(f"w{number}" for number in range(120))


def config() -> LlamaConfig:
    """Three layers, four query heads over two KV heads; weights wide enough that pages matter."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=NAME,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: number for number, word in enumerate(("?", *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106 - a word
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")  # noqa: S106 - a word


def network(dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights every time."""
    register()
    torch.manual_seed(3)
    return LlamaForCausalLM(config()).to(dtype)


def model(dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    """The model, in memory."""
    return LanguageModel(network(dtype), tokenizer(), name="tiny", revision="0")


def folder(path: Path) -> Path:
    """The model's files."""
    network(torch.float32).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def text(path: Path, *, documents: int, words: int) -> Path:
    """A file of random documents, one a line."""
    draw = random.Random(5)
    lines = (" ".join(draw.choices(WORDS, k=words)) for _ in range(documents))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
