"""The command: what it refuses and how it says so, what it prints and writes, and how it starts its ranks."""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from rich.console import Console
from typer.main import get_command

from lockstep.cli import app, generate, jsonfile, launch, summary
from lockstep.cli.inputs import Prompt
from lockstep.cli.show import Display, Loading
from lockstep.comm.errors import PeerLost, UsageError
from lockstep.comm.world import RankFailed
from lockstep.engine.requests import Committed, Job, Progress

ROOT = Path(__file__).parent.parent
LOCKSTEP = [sys.executable, "-m", "lockstep.cli"]
IDS = ["--prompt-ids", "5,7,9", "--prompt-ids", "50,96,3,4,11"]
RUN = [*IDS, "--max-new-tokens", "12", "--dtype", "float64", "--ignore-eos"]


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoints.cached("deepseek_v3")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(map(str, arguments), capture_output=True, text=True, env=environment, timeout=120, **options)


def result_of(model: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    assert app.main(["generate", str(model), *RUN, *options, "--json", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


# ------------------------------------------------------------------------------------------------ start and options
LIGHT = """
import contextlib, io, json, sys
from lockstep.cli.app import main
results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    heavy = sorted({"torch", "transformers", "deepspeed", "jinja2"} & set(sys.modules))
    results.append([code, out.getvalue(), err.getvalue(), heavy])
json.dump(results, sys.stdout)
"""


def without_torch(*command_lines: list[str]) -> list[tuple[int, str, str, list[str]]]:
    """Exit code, output, errors and heavy modules imported so far of each command line, in one fresh process."""
    ran = run(sys.executable, "-c", LIGHT, input=json.dumps(command_lines))
    assert ran.returncode == 0, ran.stderr
    return [tuple(r) for r in json.loads(ran.stdout)]


def test_help_imports_nothing_heavy() -> None:
    for code, out, err, heavy in without_torch(
        ["--help"], ["generate", "--help"], ["inspect", "--help"], ["--version"]
    ):
        assert (code, err, heavy) == (0, "", [])
        assert "lockstep" in out


def test_help_answers_in_half_a_second() -> None:
    """In processor time, which other work on the machine does not lengthen much."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(*LOCKSTEP, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_no_arguments_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([]) == 2
    shown = capsys.readouterr()
    assert "Usage: lockstep" in shown.out + shown.err


def test_options_are_frozen() -> None:
    """Scripts depend on these names: adding one is a decision, renaming or dropping one breaks somebody."""
    command = get_command(app.app)
    assert {name: [p.opts for p in c.params] for name, c in command.commands.items()} == {  # type: ignore[attr-defined]
        "generate": [
            ["model"],
            ["--prompt"],
            ["--prompt-file"],
            ["--prompt-ids"],
            ["--chat"],
            ["--max-new-tokens"],
            ["--draft-tokens"],
            ["--batch"],
            ["--prefill-chunk"],
            ["--ignore-eos"],
            ["--recycle"],
            ["--dtype"],
            ["--device"],
            ["--load-format"],
            ["--num-layers"],
            ["--weights"],
            ["--expert-kernel"],
            ["--tp"],
            ["--strategy"],
            ["--exit"],
            ["--experts"],
            ["--dispatch"],
            ["--dense"],
            ["--shared"],
            ["--head"],
            ["--comm"],
            ["--comm-algorithm"],
            ["--comm-log"],
            ["--check-ranks"],
            ["--timeout"],
            ["--json"],
            ["--traceback"],
        ],
        "compare": [
            ["model"],
            ["--strategies"],
            ["--tp"],
            ["--draft-tokens"],
            ["--reference"],
            ["--repeat"],
            ["--prompts"],
            ["--num-prompts"],
            ["--chat"],
            ["--max-new-tokens"],
            ["--batch"],
            ["--prefill-chunk"],
            ["--ignore-eos"],
            ["--recycle"],
            ["--dtype"],
            ["--device"],
            ["--load-format"],
            ["--num-layers"],
            ["--weights"],
            ["--expert-kernel"],
            ["--comm"],
            ["--comm-algorithm"],
            ["--timeout"],
            ["--out"],
            ["--resume"],
            ["--trace"],
            ["--traceback"],
        ],
        "report": [["results"], ["--markdown"], ["--traceback"]],
        "inspect": [
            ["model"],
            ["--tp"],
            ["--strategy"],
            ["--draft-tokens"],
            ["--dtype"],
            ["--load-format"],
            ["--num-layers"],
            ["--weights"],
            ["--json"],
            ["--traceback"],
        ],
        "make-checkpoint": [
            ["config"],
            ["--out"],
            ["--num-layers"],
            ["--dtype"],
            ["--fp8"],
            ["--seed"],
            ["--max-shard-size"],
            ["--traceback"],
        ],
        "launch": [
            ["arguments"],
            ["--launcher"],
            ["--hostfile"],
            ["--nnodes"],
            ["--node-rank"],
            ["--master-addr"],
            ["--master-port"],
            ["--dry-run"],
        ],
        "comm-bench": [
            ["--tp"],
            ["--collectives"],
            ["--sizes"],
            ["--dtypes"],
            ["--calls"],
            ["--comm"],
            ["--comm-algorithm"],
            ["--device"],
            ["--timeout"],
            ["--json"],
            ["--traceback"],
        ],
    }
    assert [p.opts for p in command.params] == [["--version"], ["--local_rank", "--local-rank"]]


# ------------------------------------------------------------------------------------------------------- bad input
def test_bad_input_is_one_line_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    m = str(model)
    unknown, truncated, wordless = (checkpoints.copy(model, tmp_path / n) for n in ("unknown", "truncated", "wordless"))
    checkpoints.set_config(unknown, model_type="gpt2")
    checkpoints.truncate(truncated)
    (wordless / "tokenizer.json").unlink()
    headless = checkpoints.copy(model, tmp_path / "headless")
    checkpoints.drop(headless, "eh_proj")
    heads = checkpoints.copy(checkpoints.cached("glm4_moe"), tmp_path / "heads")
    empty = tmp_path / "empty"
    empty.mkdir()
    toml = tmp_path / "mine.toml"
    toml.write_text('base = "sp-late"\nexits = "gather-sum"\n')
    ids = ["--prompt-ids", "5"]
    table: list[tuple[list[str], str]] = [
        ([], "Missing argument 'MODEL'."),
        (["/no/such", *ids], "model /no/such is not a folder; give a checkpoint folder, or the built-in model `demo`"),
        ([str(empty), *ids], f"{empty} has no config.json; give the folder of a Hugging Face checkpoint"),
        ([str(unknown), *ids], f"{unknown}/config.json: model_type 'gpt2' is not one of deepseek_v3, *"),
        ([str(truncated), *ids], f"{truncated}/model.safetensors is damaged or incomplete (*); download it again"),
        ([m], "no prompt: give --prompt TEXT, --prompt-ids 5,77,130 or --prompt-file F.jsonl"),
        ([m, "--prompt", " "], "--prompt is empty; give some text"),
        ([m, "--prompt-ids", ""], "--prompt-ids '' is empty; give at least one token"),
        ([m, "--prompt-ids", "5,x"], "--prompt-ids '5,x': 'x' is not a token id; give ids like 5,77,130"),
        ([m, "--prompt-ids", "5,97"], "--prompt-ids '5,97': token id 97 is out of the vocabulary; use 0 to 96"),
        ([m, "--prompt-ids=-1"], "--prompt-ids '-1': token id -1 is out of the vocabulary; use 0 to 96"),
        (
            [m, "--prompt-ids", ",".join(["5"] * 256)],
            "--prompt-ids * has 256 tokens; the model has 256 positions, one of them for an answer at least",
        ),
        (
            [str(wordless), "--prompt", "a"],
            f"--prompt: {wordless} has no tokenizer.json to read text with; use --prompt-ids 5,77,130",
        ),
        (
            [m, "--prompt", "a", "--chat"],
            f"--prompt: {m} has no chat template; give the text as the model reads it, without --chat",
        ),
        ([m, *ids, "--draft-tokens", "9"], "--draft-tokens 9 is out of range; use 0 to 8"),
        ([m, *ids, "--draft-tokens", "-1"], "--draft-tokens -1 is out of range; use 0 to 8"),
        ([m, *ids, "--max-new-tokens", "0"], "--max-new-tokens 0 is out of range; use 1 or more"),
        ([m, *ids, "--tp", "0"], "--tp 0 is out of range; use 1 or more"),
        ([m, *ids, "--timeout", "nan"], "--timeout nan is out of range; use 1 or more"),
        ([m, *ids, "--tp", "3"], "--tp 3 does not divide the 4 attention heads: use one of 1, 2, 4"),
        ([str(heads), *ids, "--tp", "8"], "--tp 8 does not divide the 4 attention heads: use one of 1, 2, 4"),
        ([m, *ids, "--dtype", "int8"], "--dtype 'int8' is not known; use auto, float32, bfloat16, float16 or float64"),
        ([m, *ids, "--device", "tpu"], "--device 'tpu' is not known; use auto, cpu or cuda"),
        (
            [m, *ids, "--strategy", "sp"],
            "unknown strategy 'sp': use one of tp, sp-chunk, sp-early, sp-late, sp-dense, or the path of a .toml file",
        ),
        (
            [m, *ids, "--strategy", "sp-late:gather"],
            "strategy field exit = 'gather' is not one of gather-pair, gather-sum, gather-norm",
        ),
        ([m, *ids, "--exit", "gather"], "--exit 'gather' is not known; use gather-pair, gather-sum or gather-norm"),
        ([m, *ids, "--strategy", "none.toml"], "strategy file none.toml does not exist"),
        ([m, *ids, "--strategy", str(toml)], f"{toml}: unknown field 'exits'; the fields are *"),
        (
            [m, *ids, "--strategy", "sp-late", "--experts", "sliced"],
            "experts = sliced excludes ffn_in = sharded: *; use experts = owned, or ffn_in = replicated",
        ),
        (
            [m, *ids, "--strategy", "sp-late", "--recycle", "pre-norm"],
            "recycle = pre-norm excludes exit = gather-norm, *; use exit gather-pair or gather-sum",
        ),
        ([m, *ids, "--json", "/no/such/file"], "--json /no/such/file cannot be written; give a file in a folder *"),
        ([m, *ids, "--json", str(tmp_path)], f"--json {tmp_path} is a folder; give the path of a file"),
        ([m, *ids, "--tokens", "3"], "No such option: --tokens*"),
        (
            [m, *ids, "--num-layers", "2"],
            "--num-layers cuts a model that is not there: use it with --load-format dummy",
        ),
        (
            [m, *ids, "--load-format", "dummy", "--num-layers", "9"],
            "--num-layers 9 is not between 1 and the 3 of config.json",
        ),
        ([m, *ids, "--load-format", "fake"], "--load-format 'fake' is not known; use auto or dummy"),
        (
            [m, *ids, "--device", "cpu", "--dtype", "float64", "--expert-kernel", "grouped"],
            "--expert-kernel grouped does not take float64 on cpu; it takes float32, bfloat16, float16",
        ),
        ([str(headless), *ids], f"{headless} lacks layers.3.eh_proj.weight; without its MTP weights it runs with *"),
    ]
    results = without_torch(*(["generate", *arguments] for arguments, _ in table))
    for (arguments, expected), (code, out, err, heavy) in zip(table, results, strict=True):
        lines = err.splitlines()
        assert (code, out, len(lines)) == (2, "", 1), (arguments, out, err)
        assert matches(lines[0], "lockstep: " + expected), (arguments, err)
        assert set(heavy) <= {"jinja2"}, (arguments, heavy)


def matches(line: str, pattern: str) -> bool:
    """`*` stands for anything; nothing else is special."""
    first, *rest = pattern.split("*")
    position = len(first)
    for part in rest:
        found = line.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return line.startswith(first) and (pattern.endswith("*") or position == len(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ("{}", "line 2: has no prompt; give one of prompt, question, messages, prompt_ids"),
        ('{"prompt": "a", "question": "b"}', "line 2: has both prompt and question; give one of"),
        ('{"prompt": ""}', "line 2 is empty; give some text"),
        ('{"prompt": 5}', "line 2: prompt is a int; it must be text"),
        ('{"prompt": "\\ud800"}', "line 2: the text is not valid UTF-8"),
        ('{"prompt_ids": [97]}', "line 2: token id 97 is out of the vocabulary; use 0 to 96"),
        ('{"prompt_ids": []}', "line 2 is empty; give at least one token"),
        ('{"prompt_ids": [1.0]}', "line 2: prompt_ids must be a list of token ids, like [5, 77, 130]"),
        ('{"messages": ["a"]}', "line 2: messages must be a list of objects like"),
        ('{"prompt": "a", "answer": [7]}', "line 2: answer is a list; it must be text or a number"),
        ("\udcff", "line 2: not valid UTF-8"),
    ],
)
def test_a_bad_line_of_a_prompt_file_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n', errors="surrogateescape")
    assert app.main(["generate", str(model), "--prompt-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lockstep: {file}, {expected}")
    assert err.count("\n") == 1


def test_what_only_a_rank_finds_is_bad_input_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise UsageError("the file was cut\nmeanwhile")

    monkeypatch.setattr("lockstep.engine.run.load", refuse)
    assert app.main(["generate", str(model), *RUN, "--tp", "2"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "lockstep: the file was cut meanwhile\n")


# --------------------------------------------------------------------------------------------------------- results
def test_json_has_the_documented_form(model: Path, tmp_path: Path) -> None:
    result = result_of(model, tmp_path, "--tp", "2", "--strategy", "sp-early", "--draft-tokens", "2")
    assert list(result) == ["model", "effective", "requests", "acceptance", "timings", "ledger", "notes"]
    assert result["model"] == str(model)
    expected = {
        "name": "sp-early",
        "stream": "replicated",
        "mid": "sharded",
        "ffn_in": "sharded",
        "experts": "owned",
        "tp": 2,
        "dtype": "float64",
        "device": "cpu",
        "draft_tokens": 2,
    }
    assert expected.items() <= result["effective"].items()
    assert {"dispatch", "dense", "shared", "exit", "head"} <= result["effective"].keys()
    assert [r["prompt_ids"] for r in result["requests"]] == [[5, 7, 9], [50, 96, 3, 4, 11]]
    for request in result["requests"]:
        assert list(request) == ["prompt_ids", "tokens", "text", "finish_reason", "rounds"]
        assert (len(request["tokens"]), request["finish_reason"]) == (12, "length")
        assert isinstance(request["text"], str)
        assert 1 + sum(r["accepted"] + 1 for r in request["rounds"]) >= 12
        assert all(list(r) == ["drafts", "accepted"] and r["accepted"] <= len(r["drafts"]) for r in request["rounds"])
    positions = result["acceptance"]["per_position"]
    assert [list(p) for p in positions] == [["drafted", "accepted"]] * 2
    assert positions[0]["accepted"] == sum(r["accepted"] > 0 for q in result["requests"] for r in q["rounds"])
    assert result["ledger"]
    for row in result["ledger"]:
        assert {"boundary", "collective", "calls", "rows", "bytes"} <= row.keys()
    assert not [f for f in tmp_path.iterdir() if f.name != "result.json"]


def test_json_to_standard_output_is_alone_there(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["generate", str(model), *RUN, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert [r["prompt_ids"] for r in json.loads(shown.out)["requests"]] == [[5, 7, 9], [50, 96, 3, 4, 11]]
    assert "strategy" in shown.err


def test_text_goes_to_standard_output_and_the_summary_to_standard_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = result_of(model, tmp_path)
    shown = capsys.readouterr()
    texts = [r["text"] for r in result["requests"]]
    assert shown.out == f"[1/2] ids 5,7,9\n{texts[0]}\n\n[2/2] ids 50,96,3,4,11\n{texts[1]}\n"
    assert "moved" in shown.err
    assert app.main(["generate", str(model), "--prompt-ids", "5,7,9", *RUN[4:]]) == 0
    assert capsys.readouterr().out == texts[0] + "\n"


def test_without_a_tokenizer_there_are_ids_and_no_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.copy(model, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    result = result_of(folder, tmp_path)
    assert [r["text"] for r in result["requests"]] == [None, None]
    assert " ".join(map(str, result["requests"][0]["tokens"])) in capsys.readouterr().out


def test_prompts_of_every_kind_in_order(model: Path, tmp_path: Path) -> None:
    folder = checkpoints.copy(model, tmp_path / "model")
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"question": "b", "answer": 7, "id": "anything else is passed over"},
        {"prompt_ids": [9, 8]},
        {"messages": [{"role": "user", "content": "c"}]},
    ]
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    out = tmp_path / "out.json"
    arguments = [str(folder), "--prompt-ids", "5 7", "--prompt-file", str(file), "--prompt", "a"]
    letters = {c: i + 2 for i, c in enumerate(map(chr, range(32, 127)))}
    for chat in ([], ["--chat"]):
        assert app.main(["generate", *arguments, *chat, "--max-new-tokens", "1", "--json", str(out)]) == 0
        ids = [r["prompt_ids"] for r in json.loads(out.read_text())["requests"]]
        texts = ["<a>", "<b>"] if chat else ["a", "b"]
        assert ids == [[letters[c] for c in t] for t in texts] + [[9, 8], [letters[c] for c in "<c>"], [5, 7]]


# ----------------------------------------------------------------------------------------------------------- ranks
def test_ranks_and_launchers_agree(model: Path, tmp_path: Path) -> None:
    """In process, forked and under torchrun: the same tokens, drafts and effective strategy."""
    one = result_of(model, tmp_path)
    two = result_of(model, tmp_path, "--tp", "2", "--strategy", "sp-late", "--timeout", "30")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["generate", str(model), *RUN, "--strategy", "sp-late", "--json", "-"]
    launched = run(*torchrun, "-m", "lockstep.cli", *arguments)
    assert launched.returncode == 0, launched.stderr
    three = json.loads(launched.stdout)
    assert one["requests"] == two["requests"] == three["requests"]
    assert two["effective"] == three["effective"]
    assert two["ledger"] == three["ledger"]
    assert launched.stderr.count("strategy  sp-late") == 1


def test_tp_must_be_what_the_launcher_started(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.ranks(None) == launch.ranks(1) == 1
    assert app.main(["generate", str(model), *RUN, "--tp", "2"]) == 2
    assert "the launcher started 1 rank, but --tp is 2: start 2 of them" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert app.main(["generate", str(model), *RUN, "--tp", "2"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", [["--local_rank=1"], ["--local-rank", "0"]])
def test_the_rank_that_deepspeed_injects_is_accepted(
    model: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert app.main([*option, "generate", str(model), "--prompt-ids", "5", "--max-new-tokens", "1"]) == 0


def fail(group: Any, emit: Any, job: Job) -> None:
    if group.rank == group.size - 1:
        raise ValueError("first line\nsecond line")
    emit(Committed(0, (5,), 0))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_fails_is_one_line_and_no_result(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tp: int
) -> None:
    monkeypatch.setattr("lockstep.engine.run.generate", fail)
    file = tmp_path / "result.json"
    file.write_text("old")
    arguments = ["generate", str(model), *RUN, "--tp", str(tp), "--json", str(file)]
    assert app.main(arguments) == 3
    where = "; last seen on * in start, before its first collective" if tp > 1 else ""
    message = f"lockstep: rank {tp - 1}: ValueError: first line second line{where}"
    assert matches(capsys.readouterr().err, f"{message} (run again with --traceback to see where)\n")
    assert app.main([*arguments, "--traceback"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert matches(err, f"*{message}\n")
    assert 'raise ValueError("first line\\nsecond line")' in err
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


def test_a_lost_peer_has_its_own_exit_code(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(*arguments: object, **options: object) -> None:
        raise PeerLost("rank 0 lost a peer in layers.0.attention.out")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("lockstep.comm.world.run_as_rank", lose)
    assert app.main(["generate", str(model), *RUN]) == 75
    assert "lost a peer in layers.0.attention.out" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all_ranks(model: Path, number: signal.Signals) -> None:
    arguments = [*LOCKSTEP, "generate", str(model), "--prompt-ids", "5", "--max-new-tokens", "200", "--tp", "2"]
    process = subprocess.Popen(
        [*arguments, "--ignore-eos", "--draft-tokens", "0", "--dtype", "float64"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdout.read(1)  # the first token: ranks are at work
    children = children_of(process.pid)
    assert len(children) == 2
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (128 + number, b"")
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "MODEL", *RUN]])
def test_a_reader_that_has_left_ends_the_run_quietly(model: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [str(model) if a == "MODEL" else a for a in arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*LOCKSTEP, *arguments], env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---------------------------------------------------------------------------------------------------- the terminal
def letters(tokens: Any) -> str:
    return bytes(tokens).decode(errors="replace")


@contextlib.contextmanager
def display(count: int, *, terminal: bool, answers: tuple[str | None, ...] = (None, None, None)) -> Iterator[Any]:
    stream = io.StringIO()
    colors: Any = "standard" if terminal else None
    console = Console(file=stream, force_terminal=terminal, color_system=colors, width=40, highlight=False)
    prompts = [Prompt((5,), f"prompt {i}", answers[i]) for i in range(count)]
    shown = Display(console, Loading(Console(file=io.StringIO())), prompts, letters)
    try:
        yield shown, stream
    finally:
        shown.close()


def commit(request: int, text: str, accepted: int = 0, reason: str | None = None) -> Committed:
    return Committed(request, tuple(text.encode()), accepted, reason)


def test_accepted_drafts_look_different_on_a_terminal() -> None:
    with display(1, terminal=True) as (shown, stream):
        shown.on_event(0, commit(0, "a"))
        shown.on_event(0, commit(0, "bcd", accepted=2, reason="length"))
        shown.on_event(1, commit(0, "x"))
        shown.finish()
    assert stream.getvalue() == "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0md\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    with display(1, terminal=True) as (shown, stream):
        shown.on_event(0, commit(0, "a\x1b[2J\x07\r\nb\tc[bold]d[/bold]:smile:\x9b"))
        shown.finish()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("a\ufffd[2J\ufffd\nb")
    assert "[bold]d[/bold]:smile:" in stream.getvalue()


def test_a_pipe_gets_exactly_the_text_in_order_as_soon_as_it_can() -> None:
    with display(3, terminal=False, answers=("1", None, "4")) as (shown, stream):
        shown.on_event(0, commit(1, "late\t\x1b"))
        assert stream.getvalue() == ""
        shown.on_event(0, commit(0, "one", accepted=2))
        assert stream.getvalue() == "[1/3] prompt 0\none"
        shown.on_event(0, commit(0, " #### 1", reason="stop"))
        first = "[1/3] prompt 0\none #### 1\n(right)\n\n[2/3] prompt 1\nlate\t\x1b"
        assert stream.getvalue() == first
        shown.on_event(0, commit(2, "#### 3\n", reason="stop"))
        assert stream.getvalue() == first
        shown.on_event(0, commit(1, "r", reason="length"))
        shown.finish()
    assert stream.getvalue() == first + "r\n\n[3/3] prompt 2\n#### 3\n(wrong: the answer is 4)\n"


def test_several_requests_move_on_a_terminal_and_stay_when_complete() -> None:
    with display(3, terminal=True) as (shown, stream):
        for i in range(3):
            shown.on_event(0, commit(i, f"text{i}\n", accepted=2))
        time.sleep(0.3)  # rows are drawn eight times a second
        assert "\x1b[32mt\x1b[0m\x1b[32me\x1b[0mxt2 " in stream.getvalue()
        for i in range(3):
            shown.on_event(0, commit(i, "end", reason="length"))
        shown.finish()
    shown_last = stream.getvalue().rpartition("prompt 0")[2]
    assert shown_last.index("prompt 1") < shown_last.index("prompt 2")
    assert "end" in shown_last


def test_characters_are_never_cut() -> None:
    with display(1, terminal=False) as (shown, stream):
        for byte in "\U0001f600".encode():
            shown.on_event(0, Committed(0, (byte,), 0))
            assert stream.getvalue() in ("", "\U0001f600")
        shown.on_event(0, Committed(0, (0xE2,), 0, "length"))
        shown.finish()
    assert stream.getvalue() == "\U0001f600\ufffd\n"


def test_a_bar_comes_only_when_loading_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    loading = Loading(Console(file=stream, force_terminal=True, width=60))
    loading.update(Progress("load", 1, 10))
    assert stream.getvalue() == ""
    monkeypatch.setattr("lockstep.cli.show.BAR_AFTER_S", 0.0)
    loading.update(Progress("load", 5, 10))
    loading.stop()
    assert "load" in stream.getvalue()
    assert "50 %" in stream.getvalue()


def test_the_summary_says_what_ran_and_what_moved() -> None:
    fields = ("stream", "mid", "ffn_in", "experts", "dispatch", "dense", "shared", "exit", "head")
    result = {
        "effective": {"name": "sp-late"}
        | dict.fromkeys(fields, "x")
        | {"tp": 2, "dtype": "float32", "device": "cpu", "draft_tokens": 2}
        | {"load_format": "dummy", "weights": "keep", "layers": 4, "expert_kernel": "loop"},
        "requests": [{"tokens": list(b"#### 7")}, {"tokens": list(b"8")}],
        "acceptance": {
            "per_position": [{"drafted": 4, "accepted": 3}, {"drafted": 0, "accepted": 0}],
            "mean_accepted": 0.75,
        },
        "timings": {"prefill_s": 0.5, "decode_s": 1.5, "tokens": 7, "tokens_per_s": 3.5},
        "ledger": [
            {"boundary": f"layers.{i}.out", "collective": "all-reduce", "calls": 7, "bytes": 7000, "wire_bytes": 3500}
            for i in range(2)
        ],
        "notes": ["exit x has no effect"],
    }
    prompts = [Prompt((1,), "a", "7"), Prompt((2,), "b", "7")]
    assert summary.lines(result, prompts, letters)[1:] == [
        ("run", "tp 2, float32, cpu, 2 drafts per round"),
        ("weights", "random, FP8 kept, 4 layers, experts by loop"),
        ("speed", "7 tokens of 2 requests in 2.00 s: 3.5 tokens/s"),
        ("accepted", "0.75 drafts per round on average; by position 75%, -"),
        ("answers", "1 of 2 right"),
        ("moved", "2.0 collectives and 2 kB per token (1 kB sent by each rank)"),
    ]
    stream = io.StringIO()
    Console(file=stream, width=100).print(summary.table(result, prompts, letters))
    text = stream.getvalue()
    assert "sp-late: stream x, mid x" in text
    assert "exit x has no effect" in text
    assert "layers.*.out  all-reduce         2.00         2 kB" in text


# ------------------------------------------------------------------------------------------------------------ files
def test_a_result_file_is_whole_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    file.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(file)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
        jsonfile.write({"a": 1}, str(link))
    assert file.read_text() == "old"
    jsonfile.write({"a": 1}, str(link))
    assert (file.read_text(), link.is_symlink()) == ('{"a": 1}\n', True)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["link.json", "r.json"]
    jsonfile.write({"a": 1}, os.devnull)
    assert not Path(os.devnull).is_file()
    jsonfile.check(os.devnull)


def test_an_error_of_ours_is_one_line_too(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(generate, "_document", broken)
    assert app.main(["generate", str(model), *RUN, "--json", "-"]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lockstep: KeyError: 'oops' (run again with --traceback to see where)"
    )


def test_errors_that_ranks_raise_keep_their_kind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(str(model), ((5,),), strategy=None, max_new_tokens=1)  # type: ignore[arg-type]
    for error, seen in ((UsageError("u"), UsageError), (BrokenPipeError(), BrokenPipeError), (OSError(), RankFailed)):

        def generate_(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("lockstep.engine.run.generate", generate_)
        with pytest.raises(seen):
            launch.run(job, timeout_s=5, on_event=lambda rank, event: None, deliver=lambda result: None)


def test_finished_requests_outlive_a_run_that_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, partial = tmp_path / "result.json", tmp_path / "result.json.partial.jsonl"
    arguments = ["generate", str(model), *RUN, "--json", str(file)]

    def full(document: dict[str, Any], name: str) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jsonfile, "write", full)
        assert app.main(arguments) == 3
    assert "no space left on device" in capsys.readouterr().err
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    assert app.main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    requests = json.loads(file.read_text())["requests"]
    assert sorted(kept, key=lambda line: int(line["request"])) == [
        {"request": i} | {key: r[key] for key in ("prompt_ids", "tokens", "text", "finish_reason")}
        for i, r in enumerate(requests)
    ]


def test_a_request_is_kept_once_it_is_finished_and_not_before(tmp_path: Path) -> None:
    partial = tmp_path / "r.json.partial.jsonl"
    finished = jsonfile.Finished(str(tmp_path / "r.json"), [[5], [6]], None)
    finished.on_event(Committed(1, (7, 8), 1))
    assert not partial.exists()
    finished.on_event(Committed(1, (9,), 0, "stop"))
    line = {"request": 1, "prompt_ids": [6], "tokens": [7, 8, 9], "text": None, "finish_reason": "stop"}
    assert [json.loads(text) for text in partial.read_text().splitlines()] == [line]
    finished.remove()
    assert not partial.exists()
    jsonfile.Finished("-", [[5]], None).on_event(Committed(0, (7,), 0, "stop"))
    assert list(tmp_path.iterdir()) == []
