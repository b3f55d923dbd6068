"""Tokenizer, chat template, text in pieces, answers: transformers is the oracle where it has an opinion."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from lockstep.comm.errors import UsageError
from lockstep.engine import prompts
from lockstep.engine.prompts import TextStream, is_right

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = {"__type": "AddedToken", "content": "</s>", "special": True}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "<{{ m.role }}>{{ m.content | trim }}{% if loop.last %}{% break %}{% endif %}{% endfor %}\n"
    "{% generation %}<ai>{% endgeneration %}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y')[:0] }}"
    "{% if add_generation_prompt %}go{% endif %}"
)


def byte_level() -> Tokenizer:
    """Every byte, and merges that cut through characters of two to four bytes."""
    pairs = [(BYTES[i], BYTES[(i * 7 + 3) % 256]) for i in range(0, 256, 5)]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *BYTES, *dict.fromkeys(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama's decoder: spaces as a mark on the next word, bytes as a fallback, one leading space removed."""
    words = ["\u2581", "\u2581a", "\u2581\u2581", "a", "b", "."] + [f"<0x{b:02X}>" for b in range(256)]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("\u2581", "\u2581")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | config))
    return folder


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> prompts.Tokenizer:
    return prompts.Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), request.param()))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> prompts.Tokenizer:
    return prompts.Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), byte_level()))


def streamed(tokenizer: prompts.Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer.decode)
    return [*map(stream.push, ids), stream.flush()]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_streams_as_it_decodes(ours: prompts.Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    pieces = streamed(ours, ids)
    assert "".join(pieces) == ours.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_round_trips(byte_tokenizer: prompts.Tokenizer, text: str) -> None:
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=30))
def test_any_bytes_stream_as_they_decode(byte_tokenizer: prompts.Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


def test_pieces_come_as_soon_as_they_are_characters(ours: prompts.Tokenizer) -> None:
    ids = ours.encode("a a\U0001f600.")
    pieces = streamed(ours, ids)
    assert pieces[0] == "a"
    assert "\U0001f600" in pieces  # its four bytes come at once, with the last of them
    assert pieces[-1] == ""


def test_bytes_that_stay_no_character_are_shown_in_the_end(ours: prompts.Tokenizer) -> None:
    ids = ours.encode("a\u00e9")[:-1]
    assert "".join(streamed(ours, ids)) == ours.decode(ids) == "a\ufffd"


def test_special_tokens_are_no_text(ours: prompts.Tokenizer) -> None:
    assert "".join(streamed(ours, [0, *ours.encode("a"), 1, *ours.encode("b")])).replace(" ", "") == "ab"


@pytest.mark.parametrize("first", ["", "<s> "])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_the_first_token_is_that_of_transformers(tmp_path: Path, first: str, config: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(single=f"{first}$A", pair=None, special_tokens=[("<s>", 0)])
    folder = save(tmp_path, tokenizer, **config)
    expected = AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
    assert prompts.Tokenizer(folder).encode("ab") == expected
    assert (expected[0] == 0) == bool(first)


@pytest.mark.parametrize("place", ["config", "list", "jinja", "json"])
def test_a_chat_is_that_of_transformers(tmp_path: Path, place: str) -> None:
    from transformers import AutoTokenizer

    folder = save(tmp_path, byte_level(), **({"chat_template": TEMPLATE} if place != "list" else {}))
    theirs = AutoTokenizer.from_pretrained(folder, chat_template=TEMPLATE)
    if place == "list":
        named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
        save(tmp_path, byte_level(), chat_template=named)
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        save(tmp_path, byte_level(), chat_template="not this one")
    if place == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        save(tmp_path, byte_level())
    messages = [{"role": "system", "content": " be brief\n"}, {"role": "user", "content": "a < \u00e9"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompts.Tokenizer(folder).chat(messages) == expected


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UsageError, match="refuses the messages"):
        prompts.Tokenizer(save(tmp_path, byte_level(), chat_template=escape)).chat([{"role": "user", "content": "a"}])


def test_what_a_template_refuses_is_said(tmp_path: Path) -> None:
    tokenizer = prompts.Tokenizer(save(tmp_path, byte_level(), chat_template=TEMPLATE))
    with pytest.raises(UsageError, match="refuses the messages: no tools"):
        tokenizer.chat([{"role": "tool", "content": "a"}])


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        prompts.Tokenizer(save(tmp_path, byte_level())).chat([{"role": "user", "content": "a"}])


def test_no_tokenizer_and_a_damaged_one(tmp_path: Path) -> None:
    assert prompts.Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        prompts.Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" 3+4=7\n#### 7", "7", True),
        (" 3+4=7\n#### 7", "It is 3+4 = <<3+4=7>>7\n#### 7", True),
        ("#### 7\nQ: 9", "7", True),
        ("so 7 apples", "7", True),
        ("#### $1,070.00", "1070", True),
        ("#### -7", "-7", True),
        ("#### 70", "7", False),
        ("nothing", "7", False),
        (" Paris\n", "Paris", True),
        ("London", "Paris", False),
    ],
)
def test_answers(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right
