"""`lockstep generate`: decode prompts speculatively and show what came, how fast, and what moved between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.cli import jsonfile, options
from lockstep.comm import strategy as strategies

if TYPE_CHECKING:
    from lockstep.cli.inputs import Prompt
    from lockstep.comm.wiring import Wiring
    from lockstep.engine.prompts import Decode
    from lockstep.engine.requests import Job


def command(
    model: options.Model,
    prompt: options.PromptTexts = None,
    prompt_file: options.PromptFile = None,
    prompt_ids: options.PromptIds = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 128,
    draft_tokens: options.DraftTokens = 3,
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
    tp: options.Tp = None,
    strategy: options.Strategy = "tp",
    exit: options.Exit = None,
    experts: options.Experts = None,
    dispatch: options.Dispatch = None,
    dense: options.Dense = None,
    shared: options.Shared = None,
    head: options.Head = None,
    comm: options.Comm = "torch",
    comm_algorithm: options.CommAlgorithm = "auto",
    comm_log: options.CommLog = False,
    check_ranks: options.CheckRanks = False,
    timeout: options.Timeout = 60.0,
    json_file: options.JsonFile = None,
    traceback: options.Traceback = False,
) -> None:
    """Decode prompts speculatively with a model's MTP head, on P ranks, and show what it cost."""
    from lockstep.cli import launch
    from lockstep.cli.inputs import Reader, model_folder
    from lockstep.engine import choices
    from lockstep.engine.prompts import Tokenizer
    from lockstep.engine.requests import Job
    from lockstep.models.config import check

    chosen = strategies.resolve(
        strategy, exit=exit, experts=experts, dispatch=dispatch, dense=dense, shared=shared, head=head
    )
    strategies.check_recycle(chosen, recycle)
    num_ranks = launch.ranks(tp)
    wiring = launch.wiring(comm, comm_algorithm, log=comm_log, check=check_ranks)
    if json_file is not None:
        jsonfile.check(json_file)
    job = Job(
        model=str(model_folder(model)),
        prompts=(),
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        strategy=chosen,
        tp=num_ranks,
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
    check(checkpoint.config, num_ranks, chosen.placement, draft_tokens)
    tokenizer = Tokenizer.load(checkpoint.folder)
    reader = Reader(tokenizer, checkpoint.folder, checkpoint.config.vocab, checkpoint.config.max_position, chat=chat)
    prompts = reader.read(prompt or [], prompt_file, prompt_ids or [])
    choices.refuse(job, checkpoint)  # a damaged file is found here, and not after torch is imported
    job = replace(job, prompts=tuple(p.ids for p in prompts), device=launch.device(device, num_ranks))
    choices.kernel_of(job, checkpoint.config)
    if not launch.is_root():
        silent: dict[str, Any] = {"on_event": lambda rank, event: None, "deliver": lambda result: None}
        launch.run(job, timeout_s=timeout, wiring=wiring, **silent)
        return
    decode = tokenizer.decode if tokenizer else None
    finished = jsonfile.Finished(json_file, job.prompts, decode)

    def write(result: dict[str, Any]) -> None:
        if json_file is not None:
            jsonfile.write(_document(model, result, decode), json_file)
        finished.remove()

    _run_and_show(job, prompts, decode, timeout, wiring, finished, write, to_stdout=json_file != "-")


def _run_and_show(
    job: Job,
    prompts: Sequence[Prompt],
    decode: Decode | None,
    timeout: float,
    wiring: Wiring,
    finished: jsonfile.Finished,
    write: Callable[[dict[str, Any]], None],
    *,
    to_stdout: bool,
) -> None:
    """Run the job and write its result; texts go to standard output as they come, the rest to standard error."""
    from rich.console import Console

    from lockstep.cli import launch, summary
    from lockstep.cli.show import Display, Loading

    err = Console(stderr=True, highlight=False)
    out = Console(highlight=False) if to_stdout else err
    display = Display(out, Loading(err), prompts, decode)

    def on_event(rank: int, event: object) -> None:
        finished.on_event(event)
        display.on_event(rank, event)

    def deliver(result: dict[str, Any]) -> None:
        display.finish()
        display.close()
        err.print()
        err.print(summary.table(result, prompts, decode))
        write(result)

    try:
        launch.run(job, timeout_s=timeout, on_event=on_event, deliver=deliver, wiring=wiring)
    finally:
        display.close()


def _document(model: str, result: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """The result as --json writes it (README, "The JSON form")."""
    requests = [
        {
            "prompt_ids": r["prompt_ids"],
            "tokens": r["tokens"],
            "text": decode(r["tokens"]) if decode else None,
            "finish_reason": r["finish_reason"],
            "rounds": r["rounds"],
        }
        for r in result["requests"]
    ]
    keys = ("acceptance", "timings", "ledger", "notes")
    return {"model": model, "effective": result["effective"], "requests": requests} | {k: result[k] for k in keys}
