"""`lockstep compare`: the same prompts through several strategies, judged against one of them, and what each cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lockstep.cli import options
from lockstep.comm import world
from lockstep.comm.errors import UsageError
from lockstep.engine.requests import MAX_DRAFT_TOKENS, Job

if TYPE_CHECKING:
    from lockstep.cli.inputs import Prompt
    from lockstep.engine.compare import Outcome, Plan
    from lockstep.engine.prompts import Tokenizer
    from lockstep.models.checkpoint import Checkpoint

NUM_BUILTIN = 16


def command(
    model: options.Model,
    strategies: options.Strategies = "tp,sp-late",
    tp: options.Tps = "1,2",
    draft_tokens: options.DraftTokensList = "0,3",
    reference: options.Reference = "any@1+0",
    repeat: options.Repeat = 5,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 128,
    batch: options.Batch = 16,
    prefill_chunk: options.PrefillChunk = 512,
    ignore_eos: options.IgnoreEos = False,
    recycle: options.Recycle = "post-norm",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    num_layers: options.NumLayers = None,
    weights: options.Weights = "auto",
    expert_kernel: options.ExpertKernel = "auto",
    comm: options.Comm = "torch",
    comm_algorithm: options.CommAlgorithm = "auto",
    timeout: options.Timeout = 60.0,
    out: options.Out = Path("lockstep-comparison"),
    resume: options.Resume = False,
    trace: options.Trace = False,
    traceback: options.Traceback = False,
) -> None:
    """Run the same prompts through several strategies: is the output right, where did it break, what did it cost?"""
    from lockstep.cli import launch
    from lockstep.cli.inputs import model_folder
    from lockstep.engine import choices
    from lockstep.engine.compare import Plan
    from lockstep.engine.grid import grid
    from lockstep.engine.prompts import Tokenizer

    names = _listed("--strategies", strategies)
    ranks, drafts = _numbers("--tp", tp, 1, 1024), _numbers("--draft-tokens", draft_tokens, 0, MAX_DRAFT_TOKENS)
    cells, judge = grid(names, ranks, drafts, reference)
    num_ranks = launch.ranks(max(cell.tp for cell in cells))
    wiring = launch.wiring(comm, comm_algorithm, log=False, check=False)
    if comm == "mpi" and launch.alone():
        raise UsageError("--comm mpi needs ranks that an mpiexec has started: lockstep launch --launcher mpi -- ...")
    job = Job(
        model=str(model_folder(model)),
        prompts=(),
        strategy=cells[0].strategy,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        recycle=recycle,
        prefill_chunk=prefill_chunk,
        batch=batch,
        ignore_eos=ignore_eos,
        load_format=load_format,
        num_layers=num_layers,
        weights=weights,
        expert_kernel=expert_kernel,
    )
    checkpoint = choices.checkpoint_of(job)
    tokenizer = Tokenizer.load(checkpoint.folder)
    given = _prompts(checkpoint, tokenizer, prompts, num_prompts, chat=chat)
    checkpoint.tensors()  # a damaged file is found here, not in the first ranks
    chosen = launch.device(device, 1 if launch.alone() else num_ranks)
    job = replace(job, prompts=tuple(p.ids for p in given), device=chosen)
    plan = Plan(job, cells, judge, checkpoint.config, repeat, trace, timeout, _devices(chosen), wiring)
    code = 0

    def deliver(outcomes: list[Outcome]) -> None:
        nonlocal code
        code = _report(model, plan, outcomes, given, tokenizer, out)

    _run(plan, out, resume, num_ranks, deliver)
    raise typer.Exit(code)


def _run(plan: Plan, out: Path, resume: bool, num_ranks: int, deliver: Callable[[list[Outcome]], None]) -> None:
    """A launcher's first rank opens the store and delivers; the others wait until it has."""
    from rich.console import Console

    from lockstep.cli import launch
    from lockstep.cli.progress import Steps
    from lockstep.engine.compare import compare, compare_here
    from lockstep.engine.store import Store

    err = Console(stderr=True, highlight=False)
    steps, open_store = Steps(err), partial(Store, out, resume=resume)

    def done(outcomes: list[Outcome]) -> None:
        steps.close()
        deliver(outcomes)

    try:
        if launch.alone() or num_ranks == 1:
            done(compare(plan, open_store(), on_step=steps.begin, on_event=steps.on_event))
            return
        where = num_ranks, plan.job.device, plan.timeout_s
        launch.start(compare_here, (plan, open_store), *where, steps.on_event, plan.wiring, done)
    except KeyboardInterrupt:
        if launch.is_root():
            err.print(f"interrupted: what has finished is in {out}; go on with --resume", soft_wrap=True)
        raise
    finally:
        steps.close()


def _report(
    model: str, plan: Plan, outcomes: list[Outcome], given: Sequence[Prompt], tokenizer: Tokenizer | None, out: Path
) -> int:
    from rich.console import Console

    from lockstep.cli.comparison import show
    from lockstep.engine import report, report_files

    texts = report.Texts(model, [p.answer for p in given], tokenizer.decode if tokenizer else None)
    document = report.build(plan, outcomes, texts)
    files = report_files.write(out, document)
    if plan.trace:
        files.append(report_files.write_trace(out, {o.cell.label: o.runs[0]["trace"] for o in outcomes if o.runs}))
    console = Console(highlight=False)
    show(console, document)
    console.print(f"written: {', '.join(str(file) for file in files)}", soft_wrap=True)
    return int(document["exit_code"])


def _prompts(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, source: str | None, count: int | None, *, chat: bool
) -> list[Prompt]:
    from lockstep.cli.inputs import BUILTIN, Reader

    config, folder = checkpoint.config, checkpoint.folder
    reader = Reader(tokenizer, folder, config.vocab, config.max_position, chat=chat)
    if source is None and folder.parent != BUILTIN:
        raise UsageError("no prompt: give --prompts F.jsonl, or --prompts builtin for the built-in problems")
    if source in (None, "builtin"):
        return reader.problems(count or NUM_BUILTIN)
    assert source is not None
    return reader.read([], Path(source), [])[:count]


def _devices(device: str) -> int | None:
    if device != "cuda" or world.rank_of_launcher() is not None:
        return None
    import torch

    return torch.cuda.device_count()


def _listed(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{flag} {text!r} has an empty place; put one comma between two values")
    return list(dict.fromkeys(parts))


def _numbers(flag: str, text: str, low: int, high: int) -> list[int]:
    numbers = []
    for part in _listed(flag, text):
        if not part.isdecimal() or not low <= int(part) <= high:
            raise UsageError(f"{flag} {text!r}: {part!r} is not a number from {low} to {high}")
        numbers.append(int(part))
    return numbers
