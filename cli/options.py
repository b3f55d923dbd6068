"""The command line's options, each defined once for every command that takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.comm.errors import UsageError
from lockstep.comm.launchers import LAUNCHERS
from lockstep.comm.strategy import CHOICES, NAMED
from lockstep.comm.wiring import ALGORITHMS, COMMS
from lockstep.engine.requests import MAX_DRAFT_TOKENS
from lockstep.models.kernels import KERNELS

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("auto", "cpu", "cuda")
RECYCLES = ("post-norm", "pre-norm")
LOAD_FORMATS = ("auto", "dummy")
WEIGHTS = ("auto", "keep", "dequantise")


def _option(panel: str, flag: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel, **more)


def _number(panel: str, flag: str, metavar: str, low: int, high: int | None, text: str) -> Any:
    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= (1e9 if high is None else high):
            usable = f"{low} or more" if high is None else f"{low} to {high}"
            raise UsageError(f"{flag} {value:g} is out of range; use {usable}")
        return value

    return _option(panel, flag, text, metavar, callback=check)


def _choice(panel: str, flag: str, choices: Sequence[str], text: str) -> Any:
    return _option(panel, flag, f"{text}: {_listed(choices)}.", "NAME", callback=one_of(flag, choices))


def one_of(flag: str, choices: Sequence[str]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise UsageError(f"{flag} {value!r} is not known; use {_listed(choices)}")
        return value

    return check


def _listed(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a built-in model: demo, demo-qwen.")
]

P = "Prompts"
PromptTexts = Annotated[list[str] | None, _option(P, "--prompt", "A prompt. May be given again.", "TEXT")]
PromptFile = Annotated[
    Path | None,
    _option(
        P,
        "--prompt-file",
        "JSON lines with `prompt`, `question`, `messages` or `prompt_ids`, and perhaps an `answer`.",
        "F.jsonl",
    ),
]
PromptIds = Annotated[list[str] | None, _option(P, "--prompt-ids", "A prompt as ids. May be given again.", "5,77,130")]
Chat = Annotated[bool, _option(P, "--chat", "Put texts through the checkpoint's chat template.")]

D = "Decoding"
MaxNewTokens = Annotated[int, _number(D, "--max-new-tokens", "N", 1, None, "Tokens per request.")]
DraftTokens = Annotated[
    int, _number(D, "--draft-tokens", "K", 0, MAX_DRAFT_TOKENS, "Drafts per round; 0 decodes without speculation.")
]
Batch = Annotated[int, _number(D, "--batch", "B", 1, None, "Requests decoded together.")]
PrefillChunk = Annotated[int, _number(D, "--prefill-chunk", "N", 1, None, "Prompt tokens per forward pass.")]
IgnoreEos = Annotated[bool, _option(D, "--ignore-eos", "Go on to --max-new-tokens whatever comes.")]
Recycle = Annotated[str, _choice(D, "--recycle", RECYCLES, "Which hidden state feeds the MTP head's next step")]
Dtype = Annotated[str, _choice(D, "--dtype", DTYPES, "auto is the checkpoint's own")]
Device = Annotated[str, _choice(D, "--device", DEVICES, "auto is cuda where there is one")]

W = "Weights"
LoadFormat = Annotated[
    str, _choice(W, "--load-format", LOAD_FORMATS, "auto reads the checkpoint; dummy needs a config.json only")
]
NumLayers = Annotated[int | None, _number(W, "--num-layers", "N", 1, None, "Of a dummy model, only N decoder layers.")]
Weights = Annotated[
    str, _choice(W, "--weights", WEIGHTS, "FP8 weights in memory. auto keeps them on cuda, where memory is short")
]
ExpertKernel = Annotated[
    str, _choice(W, "--expert-kernel", ("auto", *KERNELS), "How routed experts run. auto is the first that can")
]

R = "Ranks and strategy"
Tp = Annotated[
    int | None, _number(R, "--tp", "P", 1, None, "Ranks that share the model. Default: the launcher's, or 1.")
]
Strategy = Annotated[str, _option(R, "--strategy", f"One of {', '.join(NAMED)}; NAME:EXIT; or a TOML file.", "NAME")]
Exit = Annotated[
    str | None, _choice(R, "--exit", CHOICES["exit"], "How MTP output becomes full rows when they are sharded")
]
Experts = Annotated[str | None, _choice(R, "--experts", CHOICES["experts"], "Expert weights on each rank")]
Dispatch = Annotated[str | None, _choice(R, "--dispatch", CHOICES["dispatch"], "How sharded rows reach owned experts")]
Dense = Annotated[str | None, _choice(R, "--dense", CHOICES["dense"], "Weights of the dense layers")]
Shared = Annotated[str | None, _choice(R, "--shared", CHOICES["shared"], "Weights of the shared expert")]
Head = Annotated[
    str | None, _choice(R, "--head", CHOICES["head"], "What travels of the logits, all or each shard's best")
]
Comm = Annotated[str, _choice(R, "--comm", COMMS, "The library that moves bytes between ranks")]
CommAlgorithm = Annotated[
    str, _choice(R, "--comm-algorithm", ALGORITHMS, "What gloo does behind a conversion, auto by size")
]
CommLog = Annotated[bool, _option(R, "--comm-log", "With --comm deepspeed: its own log of collectives, at the end.")]
CheckRanks = Annotated[
    bool, _option(R, "--check-ranks", "Before each collective, compare what all ranks are about to do. Slow.")
]
Timeout = Annotated[float, _number(R, "--timeout", "S", 1, None, "Seconds that a rank waits for the others.")]

B = "Measuring"
Collectives = Annotated[str, _option(B, "--collectives", "Which, separated by commas.", "NAME,...")]
Sizes = Annotated[str, _option(B, "--sizes", "Bytes of the whole value, separated by commas.", "N,...")]
Dtypes = Annotated[str, _option(B, "--dtypes", "Types, separated by commas.", "NAME,...")]
Calls = Annotated[int, _number(B, "--calls", "N", 1, None, "Calls that are timed, of each case.")]

L = "Where the ranks run"
CommandLine = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND ...", help="The command to run on every rank, with its --tp.")
]
Launcher = Annotated[str, _choice(L, "--launcher", LAUNCHERS, "What starts the ranks")]
Hostfile = Annotated[Path | None, _option(L, "--hostfile", "The hosts: lines `NAME slots=N`.", "FILE")]
NumNodes = Annotated[int | None, _number(L, "--nnodes", "N", 1, None, "Hosts, with --tp / N ranks on each.")]
NodeRank = Annotated[int | None, _number(L, "--node-rank", "I", 0, None, "Which of the hosts this one is.")]
MasterAddr = Annotated[str | None, _option(L, "--master-addr", "The first host's address, where ranks meet.", "HOST")]
MasterPort = Annotated[
    int | None,
    _number(L, "--master-port", "PORT", 1, 65535, "The port there. Default: a free one; of several hosts, 29500."),
]
DryRun = Annotated[bool, _option(L, "--dry-run", "Print the command line and stop.")]

O = "Output"  # noqa: E741
JsonFile = Annotated[
    str | None,
    _option(
        O, "--json", "Write the result there; - is standard output, all else then goes to standard error.", "FILE|-"
    ),
]
Traceback = Annotated[bool, _option(O, "--traceback", "On failure, show where in the code it was.")]

InspectedDrafts = Annotated[
    int | None,
    _number(D, "--draft-tokens", "K", 0, MAX_DRAFT_TOKENS, "Drafts per round. Default: with every MTP block in use."),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json, or a folder that has one.")]
NewFolder = Annotated[Path, _option(O, "--out", "The folder to make. It must not exist.", "DIR")]
StoredDtype = Annotated[str | None, _choice(W, "--dtype", DTYPES[1:], "Default: config.json's")]
Fp8 = Annotated[
    bool | None, _option(W, "--fp8/--no-fp8", "In blocks of FP8 with scales. Default: as config.json says.")
]
Seed = Annotated[int, _number(W, "--seed", "S", 0, None, "Another model for each. --load-format dummy has 0.")]
MaxShardSize = Annotated[str, _option(O, "--max-shard-size", "Start another file where one would be larger.", "SIZE")]

C = "Comparison"
Strategies = Annotated[
    str, _option(C, "--strategies", "Strategies, with commas between: names, NAME:EXIT, TOML files.", "LIST")
]
Tps = Annotated[str, _option(C, "--tp", "Numbers of ranks, with commas between.", "LIST")]
DraftTokensList = Annotated[str, _option(C, "--draft-tokens", "Drafts per round, with commas between.", "LIST")]
Prompts = Annotated[
    str | None, _option(P, "--prompts", "A file of JSON lines as for generate, or `builtin`.", "F.jsonl|builtin")
]
NumPrompts = Annotated[int | None, _number(P, "--num-prompts", "N", 1, None, "Only the first N. Of `builtin`: 16.")]
Reference = Annotated[str, _option(C, "--reference", "The run to judge by, STRATEGY@P+K: P ranks, K drafts.", "SPEC")]
Repeat = Annotated[int, _number(C, "--repeat", "R", 0, None, "Clocked repetitions, beside the one that is counted.")]
Out = Annotated[Path, _option(O, "--out", "The folder for results and reports.", "DIR")]
Resume = Annotated[bool, _option(O, "--resume", "Keep what an earlier call with this --out has finished.")]
Trace = Annotated[bool, _option(O, "--trace", "Write trace.json too, for Perfetto or chrome://tracing.")]
Markdown = Annotated[Path | None, _option(O, "--markdown", "Write it as Markdown there too.", "FILE")]
Results = Annotated[
    list[Path], typer.Argument(metavar="DIR|FILE.json...", help="One result to draw again, or two: before and after.")
]
