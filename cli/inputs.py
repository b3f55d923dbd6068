"""Prompts from the command line, a file or the built-in problems, as token ids. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.errors import UsageError
from lockstep.engine.prompts import Tokenizer
from lockstep.models import builtin

BUILTIN = Path(builtin.__path__[0])
NUM_BUILTIN_PROBLEMS = 4
FIELDS = ("prompt", "question", "messages", "prompt_ids")


@dataclass(frozen=True)
class Prompt:
    """One request: its ids, one line to call it by, and the right answer where that is known."""

    ids: tuple[int, ...]
    title: str
    answer: str | None = None


def model_folder(model: str) -> Path:
    """A built-in model goes by its name; a folder of that name is ./demo."""
    shipped = Path(model).name == model and (BUILTIN / model / "config.json").is_file()
    return BUILTIN / model if shipped else Path(model)


class Reader:
    """Turns what the user gave into prompts, and refuses what the model could not read."""

    def __init__(self, tokenizer: Tokenizer | None, folder: Path, vocab: int, max_position: int, *, chat: bool) -> None:
        self._tokenizer, self._folder, self._chat = tokenizer, folder, chat
        self._vocab, self._max_position = vocab, max_position

    def read(self, texts: list[str], file: Path | None, ids: list[str]) -> list[Prompt]:
        """Texts first, then the file, then ids. With none of them, a built-in model gets built-in problems."""
        prompts = [self._text(text, "--prompt") for text in texts]
        if file is not None:
            prompts += [self._line(value, f"{file}, line {number}") for number, value in _lines(file)]
        prompts += [self._ids(_parse_ids(given), f"--prompt-ids {_short(given)!r}") for given in ids]
        if not prompts and file is None and self._folder.parent == BUILTIN:
            prompts = self.problems(NUM_BUILTIN_PROBLEMS)
        if not prompts:
            where = f"{file} has no prompts" if file is not None else "no prompt"
            raise UsageError(f"{where}: give --prompt TEXT, --prompt-ids 5,77,130 or --prompt-file F.jsonl")
        return prompts

    def problems(self, count: int) -> list[Prompt]:
        """The first `count` of the built-in problems that no built-in model was trained on."""
        from lockstep.models.builtin.problems import problems, prompt

        return [
            self._text(p.question if self._chat else prompt(p), "a built-in problem", str(p.answer))
            for p in problems("heldout", count)
        ]

    def _line(self, value: dict[str, Any], where: str) -> Prompt:
        given = [field for field in FIELDS if field in value]
        if len(given) != 1:
            problem = f"has both {' and '.join(given)}" if given else "has no prompt"
            raise UsageError(f"{where}: {problem}; give one of {', '.join(FIELDS)}")
        (field,), content = given, value[given[0]]
        answer = value.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            raise UsageError(f"{where}: answer is a {type(answer).__name__}; it must be text or a number")
        answer = None if answer is None else str(answer)
        if field == "prompt_ids":
            return self._ids(content, where, answer)
        if field == "messages":
            return self._messages(content, where, answer)
        if not isinstance(content, str):
            raise UsageError(f"{where}: {field} is a {type(content).__name__}; it must be text")
        return self._text(content, where, answer)

    def _text(self, text: str, where: str, answer: str | None = None) -> Prompt:
        if not text.strip():
            raise UsageError(f"{where} is empty; give some text")
        if self._chat:
            return self._messages([{"role": "user", "content": text}], where, answer)
        return self._checked(self._encode(where, lambda t: t.encode(text)), where, text, answer)

    def _messages(self, messages: Any, where: str, answer: str | None) -> Prompt:
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise UsageError(f'{where}: messages must be a list of objects like {{"role": "user", "content": "..."}}')
        title = str(messages[-1]["content"])
        return self._checked(self._encode(where, lambda t: t.chat(messages)), where, title, answer)

    def _ids(self, ids: Any, where: str, answer: str | None = None) -> Prompt:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UsageError(f"{where}: prompt_ids must be a list of token ids, like [5, 77, 130]")
        return self._checked(ids, where, "ids " + ",".join(map(str, ids[:20])) + ",..." * (len(ids) > 20), answer)

    def _checked(self, ids: list[int], where: str, title: str, answer: str | None) -> Prompt:
        if not ids:
            raise UsageError(f"{where} is empty; give at least one token")
        for i in ids:
            if not 0 <= i < self._vocab:
                raise UsageError(f"{where}: token id {i} is out of the vocabulary; use 0 to {self._vocab - 1}")
        if len(ids) >= self._max_position:
            raise UsageError(
                f"{where} has {len(ids)} tokens; the model has {self._max_position} positions, one of "
                "them for an answer at least"
            )
        return Prompt(tuple(ids), " ".join(title.split()), answer)

    def _encode(self, where: str, encode: Callable[[Tokenizer], list[int]]) -> list[int]:
        if self._tokenizer is None:
            raise UsageError(
                f"{where}: {self._folder} has no tokenizer.json to read text with; use --prompt-ids 5,77,130"
            )
        try:
            return encode(self._tokenizer)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def _parse_ids(given: str) -> list[int]:
    ids = []
    for part in given.replace(",", " ").split():
        try:
            ids.append(int(part))
        except ValueError:
            raise UsageError(
                f"--prompt-ids {_short(given)!r}: {part!r} is not a token id; give ids like 5,77,130"
            ) from None
    return ids


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a file of JSON lines, each with its line number. Blank lines are passed over."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"prompt file {file} cannot be read: {error.strerror}") from None
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            raise UsageError(f"{file}, line {number}: not valid UTF-8") from None
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise UsageError(f'{file}, line {number}: not an object; give one like {{"prompt": "..."}}')
        yield number, value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
