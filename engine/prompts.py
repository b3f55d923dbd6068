"""Text to token ids and back: a checkpoint's tokenizer, its chat template, text in pieces, and answers in texts.

Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.comm.errors import UsageError

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no character (yet)


class Tokenizer:
    """The tokenizer in a checkpoint folder. Raises UsageError where its files cannot be read."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"{path} cannot be read: {error}") from None
        self._folder = folder
        config = _read_json(folder / "tokenizer_config.json")
        self.special = {k: t for k, v in config.items() if k.endswith("_token") and (t := _token_text(v))}
        self._chat_template = _chat_template(folder, config)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """None where the folder has no tokenizer.json."""
        return cls(folder) if (folder / "tokenizer.json").is_file() else None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """`special_tokens`: with the BOS that tokenizer.json puts first, if any. A chat template writes its own."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half a surrogate pair, or bytes of a command line that were no text
            raise UsageError("the text is not valid UTF-8") from None
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens (EOS and the like) are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, up to where the model's turn begins."""
        if self._chat_template is None:
            raise UsageError(
                f"{self._folder} has no chat template; give the text as the model reads it, without --chat"
            )
        try:
            template = _environment().from_string(self._chat_template)
            text = template.render(messages=messages, add_generation_prompt=True, **self.special)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"the chat template of {self._folder} refuses the messages: {error}") from None
        return self.encode(text, special_tokens=False)


class TextStream:
    """The text of a growing sequence in pieces that stay; bytes of an unfinished character are held back."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the tokens of the last piece, and those after it
        self._num_shown = 0  # how many of them are in pieces already
        self._shown = ""  # and their text

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        return "" if text.endswith(REPLACEMENT) else self._piece(text)

    def flush(self) -> str:
        """What was held back; no more tokens come."""
        return self._piece(self._decode(self._ids))

    def _piece(self, text: str) -> str:
        # A token's text can depend on its left neighbour (a leading space), so it is decoded together with that.
        grown = text.startswith(self._shown)
        piece = text[len(self._shown) :] if grown else self._decode(self._ids[self._num_shown :])
        if piece:
            self._ids = self._ids[self._num_shown :]
            self._num_shown, self._shown = len(self._ids), self._decode(self._ids)
        return piece


def is_right(text: str, answer: str) -> bool:
    """Whether a text ends at the answer: the number after `####` (GSM8K's mark), or else its last number."""
    expected = _final_number(answer)
    return text.strip() == answer.strip() if expected is None else _final_number(text) == expected


def _final_number(text: str) -> float | None:
    number = r"-?\d[\d,]*(?:\.\d+)?"
    marked = re.search(rf"####\s*\$?({number})", text)
    found = [marked[1]] if marked else re.findall(number, text)
    return float(found[-1].replace(",", "")) if found else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds a {type(value).__name__}; it should hold an object")
    return value


def _token_text(value: object) -> str | None:
    """A special token is written as text, or as an object with its text as `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json; of several named ones, `default`."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template if isinstance(template, str) else None


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model wrote, for training. Here it is only its text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        statements: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return statements


def _environment() -> ImmutableSandboxedEnvironment:
    """What the chat templates of released checkpoints expect to find, and nothing that reaches out of the sandbox."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env
