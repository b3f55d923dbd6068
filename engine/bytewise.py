"""A tokenizer for models that have none: a token per byte, so that any text can be read. No torch here."""

from __future__ import annotations

import json
from typing import Any

SPECIAL = {"bos_token_id": "<bos>", "eos_token_id": "<eos>", "pad_token_id": "<pad>"}
NUM_BYTES = 256


def tokenizer_files(raw: dict[str, Any]) -> dict[str, str]:
    """tokenizer.json and its config, by name, for a config.json; nothing where the vocabulary is too small."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    text = raw.get("text_config") or raw
    vocab = text["vocab_size"]
    special: dict[int, str] = {}
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for field, token in SPECIAL.items():
        ids = text.get(field, raw.get(field))
        number = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(number, int) and 0 <= number < vocab:
            special.setdefault(number, token)
            fields[field.removesuffix("_id")] = special[number]
    if vocab < NUM_BYTES + len(special):
        return {}
    others = iter([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{i}>" for i in range(vocab))])
    words = {special.get(i) or next(others): i for i in range(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys(special.values())))
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(fields, indent=2) + "\n"}
