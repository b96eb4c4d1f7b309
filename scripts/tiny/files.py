"""Write the embedded model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from corpus import BEGIN, END, PAD, VOCAB_SIZE
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_async.models.config import ModelConfig
from megatron_async.models.gpt import GPTModel


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def special_tokens() -> list[str]:
    """Contents of the token ids from 256 on."""
    named = {END: "<|endoftext|>", BEGIN: "<|begin|>", PAD: "<|pad|>"}
    return [named.get(i, f"<|reserved_{i - PAD - 1}|>") for i in range(256, VOCAB_SIZE)]


def byte_tokenizer() -> Tokenizer:
    """The id of byte b is b; no merges.

    Raises:
        RuntimeError: the tokenizers library encodes otherwise.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(content, special=True, normalized=False) for content in special_tokens()]
    )
    text = "".join(map(chr, range(1, 0x500))) + "\n\tdef f(x):\r\n    \u4e2d\U0001f600  "
    encoded = tokenizer.encode(text)
    if encoded.ids != list(text.encode()) or tokenizer.decode(encoded.ids) != text:
        raise RuntimeError("tokenizers: ids are not the bytes of the text")
    for i, content in enumerate(special_tokens(), start=256):
        if tokenizer.token_to_id(content) != i:
            raise RuntimeError(f"tokenizers: {content} did not get id {i}")
    return tokenizer


def write_model(out: Path, config: ModelConfig, model: GPTModel) -> None:
    """``config.json``, ``model.safetensors`` (bfloat16) and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    write_json(
        out / "config.json",
        {
            "format": "megatron_async",
            "format_version": 1,
            "model": config.to_dict(),
            "eos_token_ids": [END],
            "bos_token_id": BEGIN,
            "dtype": "bfloat16",
        },
    )
    byte_tokenizer().save(str(out / "tokenizer.json"))
    named = special_tokens()
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": named[END - 256],
            "bos_token": named[BEGIN - 256],
            "pad_token": named[PAD - 256],
            "model_max_length": config.max_sequence_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_json(path: Path, value: Any) -> None:
    """Indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
