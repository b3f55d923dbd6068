"""`lockstep inspect` and `lockstep make-checkpoint`: what they say, what they write, what they refuse, how fast."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import cached, copy, drop, set_config
from quantise import quantise

from lockstep.cli import app
from lockstep.comm.strategy import resolve
from lockstep.engine import choices
from lockstep.engine.inspect import inspect, is_sound
from lockstep.engine.requests import Job
from lockstep.models import inventory
from lockstep.models.checkpoint import open_checkpoint, open_dummy
from lockstep.models.families import FAMILIES
from lockstep.models.load import load
from lockstep.models.storage import ITEM_BYTES, header
from lockstep.models.weights import Shard

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def document(folder: Path, *, tp: int = 1, strategy: str = "tp", k: int = 8, **fields: Any) -> dict[str, Any]:
    job = Job(str(folder), (), resolve(strategy), 1, draft_tokens=k, tp=tp, **fields)
    return json.loads(json.dumps(inspect(job, choices.checkpoint_of(job))))


# --------------------------------------------------------------------------------------------------- what it finds
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_what_a_rank_takes(family: str, tmp_path: Path) -> None:
    """Weights, kept in FP8 or not, and the cache: against a model that is loaded."""
    folder = quantise(copy(cached(family), tmp_path / "fp8"))
    for tp, strategy, dtype in ((1, "tp", "bfloat16"), (4, "sp-late", "float64")):
        said = document(folder, tp=tp, strategy=strategy, dtype=dtype)["rank"]
        for keep in (False, True):
            loaded = load(
                open_checkpoint(folder), resolve(strategy).placement, Shard(0, tp),
                draft_tokens=8, dtype=getattr(torch, dtype), device=torch.device("cpu"), keep_fp8=keep,
            )  # fmt: skip
            assert loaded.num_bytes == said["weights_bytes_kept_fp8" if keep else "weights_bytes"]
        caches = [loaded.model.new_cache(1, 1000), *(block.new_cache(1, 1000) for block in loaded.model.mtp)]
        held = said["cache_bytes_per_1000_tokens"] + said["cache_bytes_per_sequence"]
        assert held == sum(cache.num_bytes() for cache in caches)
        assert (said["cache_bytes_per_sequence"] > 0) is family.startswith("qwen")


def test_a_released_model_by_its_config(tmp_path: Path) -> None:
    """What is known of DeepSeek-V3: 671 and 37 billion parameters, 91991 tensors, 14 billion in the MTP module."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    said = document(tmp_path, load_format="dummy", tp=8)
    assert said["parameters"] == {"total": 671026419200, "active": 37552297472, "mtp": 11610068224}
    assert sum(entry["tensors"] for entry in said["dtypes"].values()) == 91991
    assert said["rank"]["cache_bytes_per_1000_tokens"] == 62 * 576 * 2 * 1000
    assert said["weights"] == "none: random numbers" and is_sound(said)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_there(family: str) -> None:
    said = document(cached(family, mtp_layers=2))
    assert is_sound(said)
    assert [block["found"] == block["needed"] > 10 for block in said["mtp"]] == [True, True]
    numbered = not family.startswith("qwen")
    assert said["mtp"][1]["where"] == (f"model.layers.{said['shapes']['layers'] + 1}." if numbered else "mtp.layers.1.")
    assert len(said["mtp"][0]["vocabulary"]) == (2 if numbered else 0)
    assert len(said["ignored"]) == (1 if family == "qwen3_5_moe" else 0)
    stored = checkpoints.read(cached(family, mtp_layers=2))
    assert said["dtypes"] == {"F32": {"tensors": len(stored), "bytes": sum(t.nbytes for t in stored.values())}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy(cached("deepseek_v3"), tmp_path / "checkpoint")


def test_findings_are_listed(folder: Path) -> None:
    drop(folder, r"layers\.1\.mlp\.experts\.[34]\.up_proj")
    checkpoints.change(folder, "model.extra.weight", torch.ones(2))
    checkpoints.change(folder, "model.norm.weight", torch.ones(63))
    said = document(folder)
    assert said["missing"] == [f"layers.1.mlp.experts.{e}.up_proj.weight" for e in (3, 4)]
    assert said["unexpected"] == ["extra.weight"]
    assert [line.rpartition("/")[2] for line in said["unusable"]] == [
        "model.safetensors: model.norm.weight has shape [63], config.json says [64]"
    ]
    assert not is_sound(said)


def test_missing_mtp_weights_matter_to_drafts(folder: Path) -> None:
    drop(folder, r"layers\.3\.(eh_proj|self_attn)")
    said = document(folder)
    assert said["mtp"][0]["found"] == said["mtp"][0]["needed"] - len(said["missing"])
    assert len(said["missing"]) == 8 and not is_sound(said)
    assert is_sound(document(folder, k=0))


def test_what_can_run(folder: Path) -> None:
    def able(said: dict[str, Any], what: str) -> set[str]:
        return {f"{v['name']}/{v['device']}" if "device" in v else v["name"] for v in said[what] if v["runs"]}

    everything = {"tp", "sp-chunk", "sp-early", "sp-late", "sp-dense"}
    assert able(document(folder, tp=4), "strategies") == everything
    assert able(document(folder, tp=3), "strategies") == set()
    # 8 ranks cannot share 6 experts, but they can share the experts' columns.
    few = cached(
        "deepseek_v3", overrides={"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "num_attention_heads": 8}
    )
    said = document(few, tp=8)
    assert able(said, "strategies") == {"tp", "sp-dense"}
    assert {v["why"] for v in said["strategies"] if not v["runs"]} == {
        "--tp 8 does not divide the 6 experts: use one of 1, 2, 3, 6"
    }
    assert "refused" not in said["rank"] and "refused" in document(few, tp=8, strategy="sp-late")["rank"]
    assert able(document(folder), "kernels") == {
        "loop/cpu", "grouped/cpu", "dense/cpu", "loop/cuda", "dense/cuda",
    }  # fmt: skip
    why = next(v["why"] for v in said["kernels"] if v["name"] == "grouped" and v["device"] == "cuda")
    assert why == "does not take float32 on cuda; it takes bfloat16"


# ------------------------------------------------------------------------------------------------------ the command
def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    assert app.main(["inspect", str(folder), "--tp", "2", "--strategy", "sp-late", "--json", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "deepseek_v3, 3 layers (1 dense), hidden 64, vocabulary 97",
        "8 of width 32 in 2 layers, 2 per token, shared width 32",
        "block 0 at model.layers.3.: 42 of 42 tensors",
        "tp 2, sp-late, float32, 1 MTP block weights ",
        "at tp 2: tp, sp-chunk, sp-early, sp-late, sp-dense",
        "not grouped: does not take float32 on cuda; it takes bfloat16",
    ):
        assert words in shown, words
    assert json.loads(file.read_text()) == document(folder, tp=2, strategy="sp-late")


def test_exit_codes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drop(folder, "eh_proj")
    assert app.main(["inspect", str(folder), "--draft-tokens", "0"]) == 0
    assert app.main(["inspect", str(folder)]) == 1
    assert "missing layers.3.eh_proj.weight" in " ".join(capsys.readouterr().out.split())
    checkpoints.truncate(folder)
    assert app.main(["inspect", str(folder)]) == 2
    assert app.main(["inspect", str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("given", ("folder", "file"))
def test_config_alone(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    path = tmp_path if given == "folder" else tmp_path / "config.json"
    assert app.main(["inspect", str(path), "--num-layers", "4", "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["shapes"]["layers"], said["shapes"]["dense_layers"]) == (4, 1)
    assert said["weights"] == "none: random numbers"


FAST = """
import sys
from lockstep.cli.app import main
assert main(["inspect", sys.argv[1], "--tp", "8"]) == 0
assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
"""


def test_fast_for_a_checkpoint_of_any_size(tmp_path: Path) -> None:
    """DeepSeek-V3's 91991 tensors in files of its size, all holes but the headers."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    outputs = []
    for stored in open_dummy(tmp_path).tensors().values():
        outputs += [stored, *([stored.scale] if stored.scale else [])]
    names = [f"model-{i + 1:05d}.safetensors" for i in range(163)]
    for i, name in enumerate(names):
        part = outputs[i::163]
        start = header((stored.key, stored.dtype, stored.shape) for stored in part)
        with (tmp_path / name).open("wb") as file:
            file.write(start)
            file.truncate(len(start) + sum(math.prod(s.shape) * ITEM_BYTES[s.dtype] for s in part))
    index = {"weight_map": {stored.key: names[i % 163] for i, stored in enumerate(outputs)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", FAST, str(tmp_path)], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    best = min(seconds() for _ in range(2))
    print(f"{best:.2f} s of processor time")
    assert best < 2.0


# -------------------------------------------------------------------------------------------------- make-checkpoint
def test_make_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config.json alone: a folder that generates, and is the same model as the dummy."""
    source = tmp_path / "config.json"
    source.write_text(json.dumps(json.loads((cached("deepseek_v3", vocab=300) / "config.json").read_text())))
    out = tmp_path / "made"
    options = ["--num-layers", "2", "--dtype", "bfloat16", "--max-shard-size", "50kB"]
    assert app.main(["make-checkpoint", str(source), "--out", str(out), *options]) == 0
    assert f"{out}: " in capsys.readouterr().out
    raw = json.loads((out / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["dtype"], raw["first_k_dense_replace"]) == (2, "bfloat16", 1)
    assert len(list(out.glob("*.safetensors"))) > 3
    run = ["--prompt", "Hi", "--max-new-tokens", "4", "--json", "-"]
    assert app.main(["generate", str(out), *run]) == 0
    made = json.loads(capsys.readouterr().out)
    (tmp_path / "tokenizer.json").write_text((out / "tokenizer.json").read_text())
    dummy = ["--load-format", "dummy", "--num-layers", "2", "--dtype", "bfloat16"]
    set_config(tmp_path, dtype="bfloat16")
    assert app.main(["generate", str(source), *run, *dummy]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == made["requests"]
    assert made["requests"][0]["prompt_ids"] == [tokens(out)["H"], tokens(out)["i"]]


def tokens(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return vocabulary


def test_byte_tokenizer_reads_any_text(tmp_path: Path) -> None:
    from lockstep.engine.bytewise import tokenizer_files
    from lockstep.engine.prompts import Tokenizer

    for name, text in tokenizer_files({"vocab_size": 260, "bos_token_id": 0, "eos_token_id": [257, 3]}).items():
        (tmp_path / name).write_text(text)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    text = "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600\n\x00"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert {0, 257}.isdisjoint(ids) and tokenizer.special == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer_files({"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 1}) == {}


def test_fp8_as_config_says_or_as_asked(tmp_path: Path) -> None:
    folder = cached("glm4_moe")
    for name, options, kind in (("a", [], "F32"), ("b", ["--fp8"], "F8_E4M3")):
        assert app.main(["make-checkpoint", str(folder), "--out", str(tmp_path / name), *options]) == 0
        found = document(tmp_path / name)["dtypes"]
        assert kind in found and ("F8_E4M3" in found) is (kind == "F8_E4M3")
    assert app.main(["make-checkpoint", str(tmp_path / "b"), "--no-fp8", "--out", str(tmp_path / "c")]) == 0
    assert "F8_E4M3" not in document(tmp_path / "c")["dtypes"]
    assert (tmp_path / "a" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    "options,message",
    (
        (["--out", "."], ". exists already, and nothing is overwritten; give another --out"),
        (["--out", "new", "--max-shard-size", "5"], "--max-shard-size '5' is not a size such as 5GB or 500MB"),
        (["--out", "new", "--max-shard-size", "0GB"], "--max-shard-size '0GB' is not a size such as 5GB or 500MB"),
        (["--out", "new", "--num-layers", "7"], "--num-layers 7 is not between 1 and the 3 of config.json"),
        (["--out", "new", "--dtype", "int8"], "--dtype 'int8' is not known; use float32, bfloat16, float16 or float64"),
        ([], "Missing option '--out'."),
    ),
)
def test_make_checkpoint_refuses(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["make-checkpoint", str(cached("deepseek_v3")), *options]) == 2
    assert capsys.readouterr().err == f"lockstep: {message}\n"
    assert not list(tmp_path.iterdir())


def test_entries_know_their_mtp_block() -> None:
    config = open_checkpoint(cached("qwen3_next", mtp_layers=2)).config
    blocks = {entry.name: entry.mtp for entry in inventory.whole(config, 2)}
    assert blocks["mtp.fc.weight"] == 0 and blocks["mtp.layers.1.mlp.gate.weight"] == 1
    assert blocks["layers.0.mlp.gate.weight"] is None
