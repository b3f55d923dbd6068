"""The expert kernels agree with each other, and refuse what they do not take before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import cached, copy
from quantise import quantise
from runs import expected, job, outcome, run
from torch import Tensor, nn

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.models import kernels
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.experts import RUN
from lockstep.models.kernels import KERNELS, Work

E, H, W, K = 8, 32, 16, 3  # experts, hidden, width, experts per row
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def case(name: str, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, routing weights, ids, and the experts' weights, in float64. `ids` are counted from the first one here."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    ids = torch.rand(rows, E, generator=gen).topk(K).indices
    if name == "all rows to one expert":
        ids = torch.tensor([[5, -1, E]]).expand(rows, K)  # and to two that are elsewhere
    if name == "experts without rows":
        ids = torch.tensor([[0, 3, 7]]).expand(rows, K)
    if name == "some experts here":
        ids = ids - 3  # ids below 0 and from E on belong to other ranks
    if name == "no expert here":
        ids = ids + E
    return normal(rows, H), torch.rand(rows, K, generator=gen), ids, normal(E, 2 * W, H), normal(E, H, W)


def written_out(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            if 0 <= e < len(down):
                hidden = gate_up[e] @ x[t]
                out[t] += weight * (down[e] @ (nn.functional.silu(hidden[:W]) * hidden[W:]))
    return out


CASES = ("any", "all rows to one expert", "experts without rows", "some experts here", "no expert here")


TAKEN = [(name, getattr(torch, dtype)) for name, kernel in KERNELS.items() for dtype in kernel.dtypes["cpu"]]


@pytest.mark.parametrize("rows", (0, 1, 2, 17))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel,dtype", TAKEN)
def test_kernels_agree(kernel: str, name: str, rows: int, dtype: torch.dtype) -> None:
    x, weights, ids, gate_up, down = case(name, rows)
    want = written_out(x, weights, ids, gate_up, down)
    poisoned = torch.full((64, H), torch.nan, dtype=dtype)  # what freed memory may hold
    del poisoned
    got = RUN[kernel](x.to(dtype), weights, ids, gate_up.to(dtype), down.to(dtype))
    assert got.dtype == dtype and got.shape == (rows, H)
    scale = want.abs().max().clamp(min=1.0) if rows else 1.0
    assert torch.allclose(got.double() / scale, want / scale, rtol=0, atol=TOLERANCE[dtype])


def test_every_kernel_is_both_stated_and_written() -> None:
    assert KERNELS.keys() == RUN.keys()
    assert set(kernels.PREFERRED) < KERNELS.keys()


def work(**fields: Any) -> Work:
    config = open_checkpoint(cached("deepseek_v3", overrides={"moe_intermediate_size": 24})).config
    given = {"config": config, "placement": resolve("tp").placement, "tp": 1, "dtype": "float32", "device": "cpu"}
    return Work(**(given | {"keep_fp8": False} | fields))


def test_refused() -> None:
    """Naming what clashes."""
    assert kernels.clash("grouped", work()) is None
    assert kernels.clash("grouped", work(dtype="float64")) == (
        "does not take float64 on cpu; it takes float32, bfloat16, float16"
    )
    assert kernels.clash("grouped", work(dtype="float16", device="cuda")) == (
        "does not take float16 on cuda; it takes bfloat16"
    )
    sliced = "takes rows of multiples of 16 bytes, and here are rows of 6 float32 numbers"
    assert kernels.clash("grouped", work(tp=4)) == sliced
    assert kernels.clash("grouped", work(tp=4, placement=resolve("sp-late").placement)) is None
    for name in KERNELS:
        assert (kernels.clash(name, work(dtype="float64")) is None) is (name != "grouped")


def test_the_refused_layout_is_refused_by_torch() -> None:
    x, weights, ids, gate_up, down = case("any", 4)
    narrow = gate_up[:, :12].float().contiguous(), down[:, :, :6].float().contiguous()
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        RUN["grouped"](x.float(), weights, ids, *narrow)


def test_chosen() -> None:
    assert kernels.choose("auto", work()) == "grouped"
    assert kernels.choose("auto", work(dtype="float64")) == "loop"
    assert kernels.choose("auto", work(tp=4)) == "loop"
    assert kernels.choose("auto", work(device="cuda", dtype="bfloat16")) == "grouped"
    assert kernels.choose("auto", work(device="cuda", dtype="float32")) == "loop"
    assert kernels.choose("dense", work()) == "dense"
    with pytest.raises(UsageError, match="--expert-kernel 'fast' is not known; use auto, loop, grouped, dense"):
        kernels.choose("fast", work())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("strategy", ("tp", "sp-late"))
def test_runs(ranks: Any, kernel: str, strategy: str) -> None:
    """The engine uses the kernel that was asked for, says so, and gives the same tokens."""
    folder = cached("deepseek_v3")
    dtype = "float32" if kernel == "grouped" else "float64"
    for result in ranks(2).run(run, job(folder, strategy, tp=2, draft_tokens=2, dtype=dtype, expert_kernel=kernel)):
        assert outcome(result) == expected(folder, 2)
        assert result["effective"]["expert_kernel"] == kernel


def test_refused_before_loading(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantise(copy(cached("deepseek_v3"), tmp_path / "fp8"))
    monkeypatch.setattr("lockstep.engine.run.load_for", None)
    for fields, words in (
        ({"dtype": "float64"}, "--expert-kernel grouped does not take float64 on cpu"),
        ({"dtype": "float32", "weights": "keep"}, "does not take weights that stay FP8; use --weights dequantise"),
    ):
        with pytest.raises(UsageError, match=words):
            run(Group.local(), job(folder, expert_kernel="grouped", **fields))
