"""Block-FP8 checkpoints give what the dequantised ones give, however ranks cut the blocks (CASES E1 - E5, E15)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import cached, copy, drop, session_folder, set_config
from quantise import MTP, dequantised, quantise, spread
from runs import every_strategy, expected, job, label, outcome, run

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.families import FAMILIES
from lockstep.models.fp8 import Scaled, dense, product
from lockstep.models.load import Loaded, load
from lockstep.models.read import Files, Reader
from lockstep.models.scales import join
from lockstep.models.storage import read_header
from lockstep.models.weights import Shard

# Widths of experts that no number of ranks cuts at a block's border: 320, 192 and 576 of blocks of 128, scaled down.
SIZES: dict[str, dict[str, Any]] = {
    "E1": {"moe_intermediate_size": 40},
    "E3": {"moe_intermediate_size": 24, "hidden_size": 72},
    "E4": {"kv_lora_rank": 20, "q_lora_rank": 25, "intermediate_size": 100},
}


@functools.cache
def pair(family: str, sizes: str, **options: Any) -> tuple[Path, Path]:
    """An FP8 checkpoint, and what it stands for."""
    source = cached(family, overrides=SIZES.get(sizes))
    name = "-".join((family, sizes, *map(str, options.values()))).replace("/", "")
    folder = quantise(copy(source, session_folder() / f"fp8-{name}"), **options)
    return folder, dequantised(folder, session_folder() / f"plain-{name}", options.get("block", (16, 16)))


def loaded(
    folder: Path, *, strategy: str = "tp", rank: int = 0, size: int = 1, k: int = 1, keep: bool = False
) -> Loaded:
    return load(
        open_checkpoint(folder), resolve(strategy).placement, Shard(rank, size),
        draft_tokens=k, dtype=torch.float64, device=torch.device("cpu"), keep_fp8=keep,
    )  # fmt: skip


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor | Scaled]:
    kept = {
        f"{path}.{name}": value
        for path, layer in model.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, Scaled)
    }
    return dict(model.named_parameters()) | kept


def assert_same(got: Loaded, want: Loaded) -> None:
    ours, theirs = weights(got.model), weights(want.model)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(dense(ours[name]), dense(theirs[name])), name


# ------------------------------------------------------------------------------------------------- what a rank holds
@pytest.mark.parametrize("size,sizes", ((2, "E1"), (2, "E4"), (4, "E3")))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_holds_the_dequantised_weights(family: str, sizes: str, size: int) -> None:
    """Read, or kept in FP8 and made dense: the same numbers, bit for bit."""
    folder, plain = pair(family, sizes)
    for strategy in ("tp", "sp-late"):
        for rank in {0, size - 1}:
            want = loaded(plain, strategy=strategy, rank=rank, size=size)
            for keep in (False, True):
                assert_same(loaded(folder, strategy=strategy, rank=rank, size=size, keep=keep), want)


@pytest.mark.parametrize("rank", (0, 1))
def test_blocks_of_128(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that models are released with, and rows read a few at a time."""
    monkeypatch.setattr("lockstep.models.read.CHUNK_ELEMENTS", 1000)
    monkeypatch.setitem(SIZES, "128", {"hidden_size": 256, "moe_intermediate_size": 320})
    folder, plain = pair("deepseek_v3", "128", block=(128, 128))
    for keep in (False, True):
        assert_same(loaded(folder, rank=rank, size=2, keep=keep), loaded(plain, rank=rank, size=2))


@pytest.mark.parametrize("block", ((8, 32), (128, 16)))
def test_blocks_of_other_shapes(block: tuple[int, int]) -> None:
    folder, plain = pair("deepseek_v3", "E1", block=block)
    for keep in (False, True):
        assert_same(loaded(folder, rank=1, size=2, keep=keep), loaded(plain, rank=1, size=2))


@pytest.mark.parametrize("scales", (torch.bfloat16, torch.float16, torch.float8_e8m0fnu))
def test_scales_of_other_dtypes(scales: torch.dtype) -> None:
    folder, plain = pair("deepseek_v3", "E1", scales=scales)
    for keep in (False, True):
        assert_same(loaded(folder, rank=1, size=2, keep=keep), loaded(plain, rank=1, size=2))


def test_stacked_experts(tmp_path: Path) -> None:
    """Experts of one tensor have scales [E, blocks, blocks]; the rows of gate and up share a block."""
    torch.manual_seed(0)
    weight, block = torch.randn(4, 20, 24), (16, 16)
    checkpoints.write(tmp_path, {"experts.gate_up_proj": weight})
    (tmp_path / "config.json").write_text("{}")
    quantise(tmp_path, block=block)
    tensors = checkpoints.read(tmp_path)
    want = tensors["experts.gate_up_proj"].double()
    want *= spread(tensors["experts.gate_up_proj_scale_inv"], block, want)
    stored = join({stored.key: stored for stored in read_header(tmp_path / "model.safetensors")})
    for region in ((), (slice(1, 3),), (slice(1, 3), slice(5, 18)), (slice(0, 4), slice(17, 20), slice(15, 24))):
        part = want[region]
        target = torch.full(part.shape, torch.nan, dtype=torch.float64)
        Reader(Files(), block).into(target, stored["experts.gate_up_proj"], region)
        assert torch.equal(target, part)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rounded_once(dtype: torch.dtype) -> None:
    """In a narrow dtype too: number times scale in float32, then rounded, as the model's authors do it."""
    folder, plain = pair("deepseek_v3", "E1")
    want, tensors = checkpoints.read(plain), checkpoints.read(folder)
    key = "model.layers.0.self_attn.o_proj.weight"
    exact = (tensors[key].float() * spread(tensors[f"{key}_scale_inv"], (16, 16), want[key]).float()).to(dtype)
    for keep in (False, True):
        model = load(
            open_checkpoint(folder), resolve("tp").placement, Shard(0, 1),
            draft_tokens=0, dtype=dtype, device=torch.device("cpu"), keep_fp8=keep,
        ).model  # fmt: skip
        assert torch.equal(dense(weights(model)["layers.0.self_attn.o_proj.weight"]), exact)


# ------------------------------------------------------------------------------------------------------------ what runs
@pytest.mark.parametrize("case", every_strategy(), ids=label)
def test_strategies(ranks: Any, case: tuple[str, dict[str, str]]) -> None:
    """With the shared expert sliced and replicated, kept and dequantised (CASES E5)."""
    folder, plain = pair("deepseek_v3", "E1")
    name, fields = case
    keep = "keep" if len(label(case)) % 2 else "dequantise"
    work = job(folder, resolve(name, **fields), tp=2, draft_tokens=3, prefill_chunk=4, weights=keep)
    for result in ranks(2).run(run, work):
        assert outcome(result) == expected(plain, 3)
        assert result["effective"]["weights"] == keep


@pytest.mark.parametrize("shared", ("sliced", "replicated"))
def test_shared_expert(ranks: Any, shared: str) -> None:
    folder, plain = pair("deepseek_v3", "E1")
    for weights in ("keep", "dequantise"):
        work = job(folder, resolve("tp", shared=shared), tp=2, draft_tokens=1, weights=weights)
        assert [outcome(result) for result in ranks(2).run(run, work)] == [expected(plain, 1)] * 2


def test_four_ranks(ranks: Any) -> None:
    folder, plain = pair("deepseek_v3", "E3")
    work = job(folder, resolve("sp-late"), tp=4, draft_tokens=2, weights="keep")
    assert [outcome(result) for result in ranks(4).run(run, work)] == [expected(plain, 2)] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_families(ranks: Any, family: str) -> None:
    folder, plain = pair(family, "E1")
    work = job(folder, "sp-late", tp=2, draft_tokens=2, weights="keep", max_new_tokens=6)
    assert [outcome(result) for result in ranks(2).run(run, work)] == [expected(plain, 2, max_new=6)] * 2


MIXTURES = {
    "MTP not FP8": {"but": f"eh_proj|{MTP}"},
    "only MTP FP8": {"chosen": rf"({MTP}).*proj"},
    "some experts FP8": {"chosen": r"experts\.[0-4]\.(gate|down)_proj"},
    "only gates FP8": {"chosen": r"experts\.\d\.gate_proj"},
    "head and embedding FP8": {"chosen": r"(head|embed_tokens)\.weight"},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures(mixture: str) -> None:
    """Each tensor decides for itself (CASES E15)."""
    folder, plain = pair("deepseek_v3", "E1", **MIXTURES[mixture])
    for weights in ("keep", "dequantise"):
        result = run(Group.local(), job(folder, draft_tokens=3, weights=weights))
        assert outcome(result) == expected(plain, 3)


def test_what_is_kept() -> None:
    """Only what is FP8 as a whole; and it takes less memory."""
    folder, plain = pair("deepseek_v3", "E1")
    kept = {name for name, weight in weights(loaded(folder, keep=True).model).items() if isinstance(weight, Scaled)}
    assert {"layers.0.mlp.up_proj.weight", "layers.1.mlp.experts.down", "mtp.0.block.self_attn.kv_b_proj.weight"} < kept
    assert not any("embed" in name or "norm" in name or name.endswith("gate.weight") for name in kept)
    assert loaded(folder, keep=True).num_bytes < 0.4 * loaded(plain).num_bytes
    assert loaded(folder).num_bytes == loaded(plain).num_bytes
    some, _ = pair("deepseek_v3", "E1", **MIXTURES["some experts FP8"])
    assert not any(isinstance(weight, Scaled) for weight in weights(loaded(some, keep=True).model).values())


def test_what_was_asked_is_said() -> None:
    folder, _ = pair("deepseek_v3", "E1")
    slow = run(Group.local(), job(folder, weights="keep", max_new_tokens=1))
    assert slow["effective"]["weights"] == "keep"
    assert any("slow on a CPU" in note for note in slow["notes"])
    default = run(Group.local(), job(folder, max_new_tokens=1))
    assert default["effective"]["weights"] == "dequantise" and not default["notes"]
    without = run(Group.local(), job(cached("deepseek_v3"), weights="keep", max_new_tokens=1))
    assert without["effective"]["weights"] == "-"
    assert without["notes"] == ["weights keep has no effect: no weight on this rank is kept in FP8"]


@pytest.mark.parametrize("cut,inputs", ((0, 32), (5, 27), (15, 1), (3, 40)))
def test_product(cut: int, inputs: int) -> None:
    """A cut first block, a partial last one, and one expert of several."""
    weight = Scaled.empty(torch.Size((2, 6, inputs)), 16, cut, torch.float64, torch.device("cpu"))
    weight.data.copy_(torch.randn(weight.shape))
    weight.scale.copy_(torch.rand(weight.scale.shape) + 0.5)
    x = torch.randn(3, inputs, dtype=torch.float64)
    column = (torch.arange(inputs) + cut) // 16
    plain = weight.data.double() * weight.scale.double()[..., column]
    for expert in (0, 1):
        assert torch.allclose(product(x, weight[expert]), x @ plain[expert].T, atol=1e-14)
    assert torch.allclose(product(x, plain[0], torch.ones(6).double()), x @ plain[0].T + 1, atol=1e-14)


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return quantise(copy(cached("deepseek_v3"), tmp_path / "fp8"))


def refusal(folder: Path, k: int = 1) -> str:
    with pytest.raises(UsageError) as caught:
        loaded(folder, k=k)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ("layers.1.mlp.experts.6.up_proj.weight", "layers.3.self_attn.o_proj.weight"))
def test_missing_scales(folder: Path, key: str) -> None:
    """Named on every rank, whichever holds the tensor; those of the MTP block only matter to k > 0 (CASES B19)."""
    drop(folder, rf"{key}_scale_inv".replace(".", r"\."))
    file = folder / "model.safetensors"
    want = f"{file}: model.{key} is FP8, and its scales model.{key}_scale_inv are missing"
    assert refusal(folder) == want
    with pytest.raises(UsageError, match="are missing"):
        loaded(folder, strategy="sp-late", rank=0, size=2)
    if "layers.3." in key:
        assert loaded(folder, k=0)


def test_scales_of_another_shape(folder: Path) -> None:
    key = "model.layers.0.mlp.up_proj.weight_scale_inv"
    checkpoints.change(folder, key, torch.ones(8, 3))
    assert refusal(folder).endswith(f"{key} is F32 [8, 3]; blocks of 16 x 16 in [128, 64] have [8, 4] of F32")
    set_config(folder, quantization_config={"quant_method": "fp8"})
    assert "blocks of 128 x 128 in [" in refusal(folder)


def test_scales_without_fp8(folder: Path) -> None:
    key = "model.layers.0.mlp.up_proj.weight"
    checkpoints.change(folder, key, torch.ones(128, 64))
    assert refusal(folder).startswith(f"{folder} holds {key.removeprefix('model.')}_scale_inv, which a ")


def test_fp8_vectors(folder: Path) -> None:
    checkpoints.change(folder, "model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn))
    assert "model.norm.weight is FP8 and no matrix" in refusal(folder)


def test_fp8_that_config_does_not_know(folder: Path) -> None:
    set_config(folder, quantization_config=...)
    assert "is FP8, and config.json has no quantization_config" in refusal(folder)


@pytest.mark.parametrize(
    "fields,message",
    (
        ({"quant_method": "gptq"}, "quant_method 'gptq' with fmt 'e4m3' is not supported; it must be fp8 with e4m3"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size None is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two numbers, like [128, 128]"),
    ),
)
def test_other_quantisations(folder: Path, fields: dict[str, Any], message: str) -> None:
    set_config(folder, quantization_config=fields)
    with pytest.raises(UsageError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(f"{folder / 'config.json'}: ") and message in str(caught.value)


def test_scales_in_another_file(folder: Path) -> None:
    tensors = checkpoints.read(folder)
    order = sorted(tensors, key=lambda key: key.endswith("_scale_inv"))
    checkpoints.write(folder, {key: tensors[key] for key in order}, files=2)
    assert_same(loaded(folder), loaded(pair("deepseek_v3", "")[1]))
