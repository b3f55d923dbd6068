"""Checkpoints as people have them: sharded, renamed, tied, incomplete, damaged; and the memory that loading takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import cached, copy, drop, rename
from runs import expected, job, outcome, run

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.models.checkpoint import Checkpoint, open_checkpoint
from lockstep.models.families import FAMILIES
from lockstep.models.load import Loaded, load
from lockstep.models.read import Files, Reader
from lockstep.models.storage import read_header
from lockstep.models.weights import Shard


def loaded(folder: Path, *, strategy: str = "tp", rank: int = 0, size: int = 1, k: int = 1) -> Loaded:
    return load(
        open_checkpoint(folder), resolve(strategy).placement, Shard(rank, size),
        draft_tokens=k, dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip


def refusal(folder: Path, k: int = 1) -> str:
    with pytest.raises(UsageError) as caught:
        loaded(folder, k=k)
    message = str(caught.value)
    assert "\n" not in message
    return message


def generated(folder: Path, **fields: Any) -> dict[str, Any]:
    return run(Group.local(), job(folder, **fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy(cached("deepseek_v3"), tmp_path / "checkpoint")


# ------------------------------------------------------------------------------------------------------- what is read
@pytest.mark.parametrize("size,strategy", ((1, "tp"), (2, "tp"), (2, "sp-late"), (4, "sp-late")))
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_hold_every_element(family: str, strategy: str, size: int) -> None:
    """Each as it is stored, on one rank, on all, or on those that share a head."""
    folder = cached(family)
    stored = {checkpoint_name(key): value.double() for key, value in checkpoints.apart(folder).items()}
    held = {key: torch.zeros(value.shape) for key, value in stored.items()}
    for rank in range(size):
        model = loaded(folder, strategy=strategy, rank=rank, size=size).model
        for key, layer, piece in model.placed_pieces():
            here = layer.get_parameter(piece.parameter)[piece.target or ...]
            assert torch.equal(here, stored[key][piece.source or ...]), key
            held[key][piece.source or ...] += 1
    unplaced = [key for key in held if not held[key].all()]
    assert all(re.search(r"layers\.\d+\.(embed_tokens|shared_head\.head)|visual", key) for key in unplaced), unplaced
    copies = {int(n) for key in held.keys() - set(unplaced) for n in held[key].unique()}
    assert copies <= {1, 2, 4} and max(copies) == size


def checkpoint_name(key: str) -> str:
    return key.removeprefix("model.").removeprefix("language_model.")


def test_shards_are_one_checkpoint(folder: Path) -> None:
    assert same(loaded(checkpoints.shard(folder, 3)), loaded(cached("deepseek_v3")))


@pytest.mark.parametrize("prefix", ("", "model.", "model.language_model.", "language_model.model."))
def test_prefixes_mean_nothing(folder: Path, prefix: str) -> None:
    """CASES E7."""
    if prefix != "model.":
        rename(folder, r"^model\.", prefix)
    assert same(loaded(folder), loaded(cached("deepseek_v3")))


def test_one_tensor_under_two_names(folder: Path) -> None:
    checkpoints.change(folder, "norm.weight", torch.ones(64))
    assert "stands for norm.weight, which" in refusal(folder)


def test_rows_longer_than_a_chunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.models.read.CHUNK_ELEMENTS", 100)
    assert same(loaded(folder, rank=1, size=2), loaded(cached("deepseek_v3"), rank=1, size=2))


@pytest.mark.parametrize("chunk", (1, 100, 1 << 20))
def test_regions_of_any_rank(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.models.read.CHUNK_ELEMENTS", chunk)
    shapes = {"a": (7,), "b": (5, 6), "c": (4, 5, 6), "d": (3, 0), "e": (2, 3, 4, 5)}
    tensors = {key: torch.randn(shape) for key, shape in shapes.items()}
    checkpoints.write(tmp_path, tensors)
    reader = Reader(Files())
    for stored in read_header(tmp_path / "model.safetensors"):
        value = tensors[stored.key]
        for region in ((), (slice(1, 3),), (slice(2, 2),), tuple(slice(1, size) for size in value.shape)):
            part = value[region]
            target = torch.full(part.shape, torch.nan)
            reader.into(target, stored, region)
            assert torch.equal(target, part), (stored.key, region)
            assert reader.equals(part, stored, region)
            assert part.numel() == 0 or not reader.equals(part + 1, stored, region)


def same(a: Loaded, b: Loaded) -> bool:
    ours, theirs = dict(a.model.named_parameters()), dict(b.model.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ----------------------------------------------------------------------------------------------- vocabulary, own or not
@pytest.mark.parametrize("head", ("absent", "equal", "different"))
def test_tied_embeddings(ranks: Any, tmp_path: Path, head: str) -> None:
    """With and without lm_head.weight; the embedding is the head either way (CASES E10)."""
    folder = copy(cached("glm4_moe", draft="random", overrides={"tie_word_embeddings": True}), tmp_path / "tied")
    want = expected(folder, 2)
    embedding = checkpoints.read(folder)["model.embed_tokens.weight"]
    if head != "absent":
        checkpoints.change(folder, "lm_head.weight", embedding if head == "equal" else -embedding)
    for result in ranks(2).run(run, job(folder, tp=2, draft_tokens=2)):
        assert outcome(result) == want
        assert any("lm_head.weight differs" in note for note in result["notes"]) is (head == "different")


@pytest.mark.parametrize("part", ("embed_tokens", "shared_head.head"))
@pytest.mark.parametrize("which", ("absent", "duplicate", "own"))
def test_mtp_vocabulary(folder: Path, part: str, which: str) -> None:
    """The target's where the MTP block has none, or the same; its own where it has another, and that is said."""
    key = f"model.layers.3.{part}.weight"
    if which == "absent":
        drop(folder, key)  # CASES E8
    if which == "own":
        checkpoints.change(folder, key, lambda weight: weight.flip(0))  # CASES E13
    result = generated(folder, draft_tokens=3)
    assert outcome(result) == expected(folder, 3)
    assert [key in note for note in result["notes"]] == [True] * (which == "own")
    assert loaded(folder).num_bytes - loaded(cached("deepseek_v3")).num_bytes == (97 * 64 * 8 if which == "own" else 0)


# --------------------------------------------------------------------------------------- missing, unexpected, misshapen
@pytest.mark.parametrize("pattern", (r"layers\.3\.", r"layers\.3\.eh_proj", r"layers\.3\.mlp\.experts\.5\.up_proj"))
def test_missing_mtp_weights(folder: Path, pattern: str) -> None:
    """k > 0 is refused and names them; k = 0 runs (CASES E6, E12)."""
    dropped = drop(folder, pattern)
    message = refusal(folder)
    assert message.startswith(f"{folder} lacks {sorted(map(checkpoint_name, dropped))[0]}")
    assert message.endswith("without its MTP weights it runs with --draft-tokens 0")
    assert outcome(generated(folder, draft_tokens=0)) == expected(cached("deepseek_v3"), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_needed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, also where another rank holds the tensor (CASES E12, E14)."""
    folder = cached(family)
    tensors = open_checkpoint(folder).tensors()
    optional = {
        key for key in tensors if key.startswith("layers.") and key.endswith(("embed_tokens.weight", "head.weight"))
    }
    assert optional or family not in ("deepseek_v3", "glm4_moe")
    ignored = {key for key in tensors if key.startswith("visual.")}
    for gone in tensors.keys() - optional - ignored:
        monkeypatch.setattr(
            Checkpoint, "tensors", lambda self, gone=gone: {k: v for k, v in tensors.items() if k != gone}
        )
        with pytest.raises(UsageError, match=f"lacks {gone}"):
            loaded(folder, strategy="sp-late", rank=1, size=2)


def test_missing_keys_are_counted(folder: Path) -> None:
    drop(folder, r"layers\.1\.")
    assert "lacks layers.1.input_layernorm.weight, " in refusal(folder)
    assert refusal(folder).endswith(" more tensors")


@pytest.mark.parametrize(
    "key", ("layers.1.mlp.gate.bias", "layers.3.enorm.bias", "layers.4.enorm.weight", "visual.proj")
)
def test_unexpected_keys(folder: Path, key: str) -> None:
    """Also within an MTP block that is used, and past the last one."""
    checkpoints.change(folder, f"model.{key}", torch.ones(3))
    assert refusal(folder) == (f"{folder} holds {key}, which a deepseek_v3 model of its config.json has no place for")


def test_unused_mtp_blocks_are_not_read(tmp_path: Path) -> None:
    folder = copy(cached("deepseek_v3", mtp_layers=2), tmp_path / "two")
    checkpoints.change(folder, "model.layers.4.enorm.bias", torch.ones(3))
    assert loaded(folder, k=1)
    assert "layers.4.enorm.bias" in refusal(folder, k=2)


@pytest.mark.parametrize("key", ("layers.0.self_attn.o_proj.weight", "norm.weight", "layers.3.embed_tokens.weight"))
def test_misshapen(folder: Path, key: str) -> None:
    checkpoints.change(folder, f"model.{key}", lambda weight: weight[1:])
    shape = list(checkpoints.read(folder)[f"model.{key}"].shape)
    right = [shape[0] + 1, *shape[1:]]
    file = folder / "model.safetensors"
    assert refusal(folder) == f"{file}: model.{key} has shape {shape}, config.json says {right}"


def test_unreadable_dtype(folder: Path) -> None:
    checkpoints.change(folder, "model.norm.weight", torch.ones(64, dtype=torch.int32))
    assert "model.norm.weight is I32; readable are " in refusal(folder)


# ------------------------------------------------------------------------------------------------------------- damage
def header_of(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def shorten(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["shape"] = [63]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no bytes": lambda file: file.write_bytes(b""),
    "7 bytes": lambda file: file.write_bytes(b"\x10" * 7),
    "in the header": lambda file: file.write_bytes(file.read_bytes()[:200]),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "all but one byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "one byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "a pointer of git lfs": lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "no JSON": lambda file: file.write_bytes(b"\x04" + b"\0" * 7 + b"{{{{"),
    "a list": lambda file: file.write_bytes(b"\x02" + b"\0" * 7 + b"[]"),
    "a wrong shape": lambda file: header_of(file, shorten),
    "no offsets": lambda file: header_of(file, lambda header: header["model.norm.weight"].pop("data_offsets")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file(folder: Path, damage: str) -> None:
    file = checkpoints.shard(folder, 3) / "model-00002-of-00003.safetensors"
    if damage in ("a wrong shape", "no offsets"):
        file = next(f for f in folder.glob("model-*") if b'"model.norm.weight"' in f.read_bytes())
    DAMAGE[damage](file)
    message = refusal(folder)
    assert message.startswith(f"{file} is damaged or incomplete (")
    assert message.endswith("download it again")


def test_missing_files(folder: Path) -> None:
    checkpoints.shard(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusal(folder) == (
        f"{folder} lacks model-00002-of-00003.safetensors, which model.safetensors.index.json names; download it again"
    )
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    assert refusal(folder) == f"{index} names no files (weight_map); download it again"
    index.write_text("{")
    assert refusal(folder).startswith(f"{index} cannot be read: ")
    index.unlink()
    assert refusal(folder) == f"{folder} has no model.safetensors and no model.safetensors.index.json"


# ------------------------------------------------------------------------------------------------------------- memory
MEASURE = """
import os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lockstep.comm.strategy import resolve
from lockstep.models.checkpoint import open_checkpoint, open_dummy
from lockstep.models.load import load
from lockstep.models.weights import Shard

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

def place(folder, rank, size, strategy, dtype, source):
    return load(
        source(folder), resolve(strategy).placement, Shard(rank, size),
        draft_tokens=1, dtype=getattr(torch, dtype), device=torch.device("cpu"),
    )

tiny, folder = sys.argv[1:]
for case in (
    (0, 1, "tp", "float32", open_checkpoint),
    (0, 2, "tp", "bfloat16", open_checkpoint),
    (1, 2, "sp-late", "float32", open_checkpoint),
    (0, 1, "tp", "bfloat16", open_dummy),
):
    if os.fork() == 0:  # each from the same, small process
        place(tiny, *case)  # code that is paged in at its first use is not the checkpoint's
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        weights = place(folder, *case).num_bytes
        print(*case[2:4], weights, status("VmHWM") - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets the peak there")
def test_memory_while_loading(tmp_path: Path) -> None:
    """The peak stays below 1.3 times the rank's own weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512}
    folder = checkpoints.make(tmp_path / "larger", "deepseek_v3", vocab=4099, draft="random", overrides=sizes)
    command = [sys.executable, "-c", MEASURE, str(cached("deepseek_v3")), str(folder)]
    cases = [line.split() for line in subprocess.check_output(command, text=True).splitlines()]
    assert len(cases) == 4
    for strategy, dtype, weights, peak in cases:
        print(
            f"{strategy} {dtype}: weights {int(weights) / 1e6:.0f} MB, peak {int(peak) / int(weights):.2f} times that"
        )
        assert int(weights) > 30e6
        assert int(peak) < 1.3 * int(weights), (strategy, dtype)
