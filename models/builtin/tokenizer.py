"""The demo models' tokenizer: the words of the problems, single digits (" 4" and "4"), every byte as a fallback."""

import json
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from lockstep.models.builtin.problems import END, completion, problems, prompt

PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\n"
    "{% else %}A: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def build(samples: int = 20000) -> Tokenizer:
    """Whole words are looked up in the vocabulary (`ignore_merges`), anything else is spelled in bytes."""
    split = _pre_tokenizer()
    words: Counter[str] = Counter()
    for p in problems("train", samples):
        text = prompt(p) + completion(p).removesuffix(END)
        words.update(piece for piece, _ in split.pre_tokenize_str(text) if len(piece) > 1)
    listed = [END, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(listed)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (END, PAD)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n")
