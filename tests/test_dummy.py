"""Dummy weights: the same tensors whatever the ranks, the same as their written copy, and finite at any depth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import cached, read, session_folder, set_config
from runs import expected, job, outcome, run

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine.settings import Settings
from lockstep.models import dummy, write
from lockstep.models.checkpoint import Checkpoint, open_checkpoint, open_dummy
from lockstep.models.edit import truncate, with_dtype, with_fp8
from lockstep.models.families import FAMILIES
from lockstep.models.fp8 import dense
from lockstep.models.load import load
from lockstep.models.noise import LENGTH, Noise
from lockstep.models.weights import Shard

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}


def config_only(family: str, to: Path, **fields: Any) -> Path:
    """A folder with nothing but a config.json."""
    to.mkdir(parents=True)
    shutil.copyfile(cached(family, mtp_layers=2) / "config.json", to / "config.json")
    return set_config(to, **fields)


def written(family: str, **fields: Any) -> tuple[Path, Path]:
    """A config.json alone, and the checkpoint that is written from it."""
    base = session_folder() / f"dummy-{family}-{'-'.join(fields)}"
    if not base.exists():
        source = config_only(family, base / "config", **fields)
        write.write(open_dummy(source), base / "written", max_shard_bytes=100_000)
    return base / "config", base / "written"


def parameters(checkpoint: Checkpoint, rank: int, size: int, strategy: str, *, keep: bool = False) -> dict[str, Any]:
    loaded = load(
        checkpoint, resolve(strategy).placement, Shard(rank, size),
        draft_tokens=2, dtype=torch.float64, device=torch.device("cpu"), keep_fp8=keep,
    )  # fmt: skip
    assert loaded.notes == tuple(note for note in loaded.notes if "text only" in note)
    names = [
        (path, name) for path, layer in loaded.model.named_modules() for name in ("gate_up", "down", "weight", "bias")
    ]
    scaled = {(p, n): getattr(loaded.model.get_submodule(p), n, None) for p, n in names}
    kept = {f"{p}.{n}": dense(value) for (p, n), value in scaled.items() if value is not None}
    return dict(loaded.model.named_parameters()) | kept


@pytest.mark.parametrize("fields", ({}, FP8), ids=("plain", "fp8"))
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_the_written_checkpoint(family: str, fields: dict[str, Any]) -> None:
    """On every rank, also where a shard cuts the blocks of FP8 tensors."""
    source, folder = written(family, **fields)
    for rank, size, strategy in ((0, 1, "tp"), (1, 2, "tp"), (3, 4, "sp-late")):
        ours = parameters(open_dummy(source), rank, size, strategy)
        theirs = parameters(open_checkpoint(folder), rank, size, strategy, keep=bool(fields))
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_written_as_released(family: str) -> None:
    """transformers finds every tensor that it wants, and no other; and the engine agrees with it."""
    _, folder = written(family)
    result = run(Group.local(), job(folder, draft_tokens=2, max_new_tokens=5))
    assert outcome(result) == expected(folder, 2, max_new=5)
    others = {key for key in set(read(folder)) ^ set(read(cached(family, mtp_layers=2))) if "visual" not in key}
    assert not others


@pytest.mark.parametrize("family", ("deepseek_v3", "qwen3_next"))
def test_ranks_see_one_model(ranks: Any, family: str) -> None:
    source, folder = written(family)
    work = job(source, "sp-late", tp=2, draft_tokens=2, max_new_tokens=5, load_format="dummy")
    for result in ranks(2).run(run, work):
        assert outcome(result) == expected(folder, 2, max_new=5)
        assert result["effective"]["load_format"] == "dummy"


@pytest.mark.parametrize("family", ("deepseek_v3", "glm4_moe", "qwen3_next"))
def test_finite_at_depth(family: str, tmp_path: Path) -> None:
    """In bfloat16 through 61 layers and an MTP block, and not the same for every token."""
    source = config_only(family, tmp_path / "deep", num_hidden_layers=61, layer_types=..., dtype="bfloat16")
    config = open_dummy(source).config
    loaded = load(
        open_dummy(source), resolve("tp").placement, Shard(0, 1),
        draft_tokens=1, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    settings = Settings(Group.local(), resolve("tp"))
    with torch.inference_mode():
        cache = loaded.model.new_cache(1, 16)
        tokens = torch.arange(12) * 7 % config.vocab
        out = loaded.model(tokens, settings.step(cache.rows([12], torch.device("cpu"))), cache)
        assert out.raw is not None
        stream, hidden = out.raw.data.float(), out.normed.data
        draft = loaded.model.mtp[0].new_cache(1, 16)
        step = settings.step(draft.rows([12], torch.device("cpu")))
        drafted = loaded.model.draft(0, tokens, out.normed, step, draft).normed.data
    size = stream.square().mean().sqrt()
    print(f"{family}: root mean square of the stream after 61 layers {size:.2f}")
    assert 0.5 < size < 100
    for rows in (hidden, drafted):
        assert rows.isfinite().all() and 0.3 < rows.float().std() < 3
    assert len(set(loaded.model.lm_head.logits(hidden).argmax(-1).tolist())) > 3


def test_laws() -> None:
    """Each kind of tensor has the spread that it should; no two tensors or experts are alike."""
    config = open_dummy(written("qwen3_next")[0]).config
    tensors = open_dummy(written("qwen3_next")[0]).tensors()
    noise = Noise(config)
    rows = {key: noise.rows(stored, 0, stored.shape).double() for key, stored in tensors.items()}
    assert rows["embed_tokens.weight"].std() == pytest.approx(1.0, rel=0.05)
    assert rows["layers.0.mlp.experts.3.up_proj.weight"].std() == pytest.approx(64**-0.5, rel=0.05)
    assert rows["layers.0.input_layernorm.weight"].abs().max() == pytest.approx(0.7, rel=0.1)
    assert rows["layers.0.linear_attn.norm.weight"].mean() == pytest.approx(1.0, abs=0.5)
    experts = torch.stack([rows[f"layers.0.mlp.experts.{e}.up_proj.weight"].flatten() for e in range(8)])
    assert torch.corrcoef(experts).fill_diagonal_(0).abs().max() < 0.1
    assert rows["layers.3.self_attn.q_proj.weight"].unique(dim=0).shape[0] == 256


def test_seeds() -> None:
    source, _ = written("deepseek_v3")
    one, two = (open_dummy(source, seed=seed) for seed in (0, 1))
    assert parameters(one, 0, 1, "tp")["norm.weight"].ne(parameters(two, 0, 1, "tp")["norm.weight"]).any()


def test_numbers_do_not_change() -> None:
    """A dummy checkpoint means the same model in every version and on every machine."""
    source, _ = written("deepseek_v3")
    checkpoint = open_dummy(source)
    stored = checkpoint.tensors()["layers.1.mlp.experts.5.down_proj.weight"]
    assert stored.offset == 155006183097039
    got = Noise(checkpoint.config).rows(stored, 31, (3,)).tolist()
    assert got == pytest.approx([0.292781919240951, 0.034230951219797, -0.153885826468468], abs=1e-7)


def test_windows_wrap_around() -> None:
    source, _ = written("deepseek_v3")
    checkpoint = open_dummy(source)
    noise, stored = Noise(checkpoint.config), checkpoint.tensors()["embed_tokens.weight"]
    long = noise.rows(stored, 0, (3 * LENGTH,))
    for first in (0, LENGTH - stored.offset % LENGTH - 2, LENGTH + 5, 2 * LENGTH - 7):
        assert torch.equal(noise.rows(stored, first, (5, 2)).flatten(), long[first : first + 10])


# --------------------------------------------------------------------------------------------------- fewer layers
RELEASED = {"num_hidden_layers": 61, "first_k_dense_replace": 3}


@pytest.mark.parametrize("layers,dense", ((61, 3), (60, 3), (30, 1), (4, 1), (2, 1), (1, 0)))
def test_dense_layers_keep_their_share(layers: int, dense: int) -> None:
    assert truncate(RELEASED, layers) == {"num_hidden_layers": layers, "first_k_dense_replace": dense}
    kinds = ["dense"] * 3 + ["sparse"] * 58
    shorter = truncate(RELEASED | {"mlp_layer_types": kinds}, layers)
    assert shorter["mlp_layer_types"] == ["dense"] * dense + ["sparse"] * (layers - dense)
    assert RELEASED["num_hidden_layers"] == 61


def test_lists_by_layer() -> None:
    types = ["linear_attention"] * 3 + ["full_attention"]
    nested = {"text_config": {"num_hidden_layers": 8, "layer_types": types * 2, "mlp_only_layers": [0, 5]}}
    assert truncate(nested, 5)["text_config"] == {
        "num_hidden_layers": 5, "layer_types": [*types, types[0]], "mlp_only_layers": [0]
    }  # fmt: skip
    indexers = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
    assert truncate(indexers, 3)["indexer_types"] == ["full", "shared", "full"]


def test_dtype_and_fp8() -> None:
    nested = {"torch_dtype": "float32", "text_config": {"dtype": "float32", "quantization_config": {"a": 1}}}
    assert with_dtype(nested, "bfloat16") == {
        "dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "quantization_config": {"a": 1}}
    }  # fmt: skip
    assert with_fp8(nested, True)["quantization_config"] == {"a": 1}
    assert "quantization_config" not in json.dumps(with_fp8(nested, False))
    assert with_fp8({}, True)["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("layers", (0, 62, -1))
def test_layers_out_of_range(layers: int) -> None:
    with pytest.raises(UsageError, match=f"--num-layers {layers} is not between 1 and the 61 of config"):
        truncate(RELEASED, layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_run(family: str) -> None:
    source, _ = written(family)
    for layers in (1, 2):
        work = job(source, draft_tokens=1, max_new_tokens=2, load_format="dummy", num_layers=layers, dtype="float32")
        assert run(Group.local(), work)["effective"]["layers"] == layers


# ---------------------------------------------------------------------------------------------------------- writing
def test_files_and_index() -> None:
    _, folder = written("deepseek_v3")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read(folder).values())
    largest = max((folder / name).stat().st_size for name in files)
    assert largest < 100_000 + 20_000


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source, _ = written("deepseek_v3")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists already, and nothing is overwritten"):
        write.write(open_dummy(source), tmp_path / "there", max_shard_bytes=1 << 30)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    source, _ = written("deepseek_v3")
    with pytest.raises(UsageError, match=r"has room for 0\.0 GB"):
        write.write(open_dummy(source), tmp_path / "new" / "deep", max_shard_bytes=1 << 30)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    source, _ = written("deepseek_v3")
    with pytest.raises(KeyboardInterrupt):
        write.write(open_dummy(source), tmp_path / "new", max_shard_bytes=1 << 30, progress=fail)
    assert not list(tmp_path.iterdir())


def test_fp8_where_models_are_released_so() -> None:
    tensors = open_dummy(written("qwen3_next", **FP8)[0]).tensors()
    kinds = {key: stored.dtype for key, stored in tensors.items()}
    assert kinds["layers.0.linear_attn.in_proj_qkvz.weight"] == kinds["layers.3.self_attn.o_proj.weight"] == dummy.FP8
    for key in ("mtp.fc", "layers.0.linear_attn.in_proj_ba", "layers.0.mlp.gate", "lm_head", "norm", "embed_tokens"):
        assert kinds[f"{key}.weight"] == "F32"
