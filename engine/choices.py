"""What the defaults of a job become, and what is refused before a rank is started or a weight read. No torch here."""

from __future__ import annotations

from lockstep.comm.errors import UsageError
from lockstep.engine.requests import Job
from lockstep.models import kernels, names
from lockstep.models.checkpoint import Checkpoint, open_checkpoint, open_dummy
from lockstep.models.config import Config, check
from lockstep.models.kernels import Work


def checkpoint_of(job: Job) -> Checkpoint:
    """The model's checkpoint, by headers only. Raises UsageError."""
    if job.load_format == "dummy":
        return open_dummy(job.model, num_layers=job.num_layers)
    if job.num_layers is not None:
        raise UsageError("--num-layers cuts a model that is not there: use it with --load-format dummy")
    return open_checkpoint(job.model)


def refuse(job: Job, checkpoint: Checkpoint) -> None:
    """Raises UsageError where ranks, strategy or drafts do not suit the model, or its tensors do not."""
    check(checkpoint.config, job.tp, job.strategy.placement, job.draft_tokens)
    names.check(checkpoint, checkpoint.tensors(), num_mtp(job, checkpoint.config))


def num_mtp(job: Job, config: Config) -> int:
    """MTP blocks in use: drafts beyond their number go around."""
    return min(job.draft_tokens, len(config.mtp))


def dtype_of(job: Job, config: Config) -> str:
    return config.dtype if job.dtype == "auto" else job.dtype


def keeps_fp8(job: Job) -> bool:
    """By default where memory is short: on CUDA. A product then makes its weight dense, which a CPU is slow at."""
    return job.weights == "keep" or (job.weights == "auto" and job.device == "cuda")


def kernel_of(job: Job, config: Config) -> str:
    """The expert kernel to use. Raises UsageError where the one that is asked for cannot run this model so."""
    work = Work(config, job.strategy.placement, job.tp, dtype_of(job, config), job.device, keeps_fp8(job))
    return kernels.choose(job.expert_kernel, work)
