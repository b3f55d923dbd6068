"""Names, files and overrides of strategies; impossible ones are refused with both fields named. Nothing loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import NAMED, check_recycle, resolve


def test_defaults_place_weights_where_their_rows_are() -> None:
    placements = {name: resolve(name).placement for name in NAMED}
    assert {n: (p.experts, p.dense, p.shared) for n, p in placements.items()} == {
        "tp": ("sliced", "sliced", "sliced"),
        "sp-chunk": ("owned", "replicated", "replicated"),
        "sp-early": ("owned", "replicated", "replicated"),
        "sp-late": ("owned", "replicated", "replicated"),
        "sp-dense": ("sliced", "sliced", "sliced"),
    }


@pytest.mark.parametrize(
    "spec,fields,message",
    [
        (
            "sp",
            {},
            "unknown strategy 'sp': use one of tp, sp-chunk, sp-early, sp-late, sp-dense, or the path of a .toml",
        ),
        ("sp-late:gather", {}, "strategy field exit = 'gather' is not one of gather-pair, gather-sum, gather-norm"),
        ("sp-late", {"experts": "sliced"}, "experts = sliced excludes ffn_in = sharded"),
        ("sp-early", {"experts": "sliced"}, "experts = sliced excludes ffn_in = sharded"),
        ("sp-late", {"shared": "sliced", "dispatch": "all-to-all"}, "shared = sliced excludes dispatch = all-to-all"),
        ("nope.toml", {}, "strategy file nope.toml does not exist"),
    ],
)
def test_impossible(spec: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(spec, **fields)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text,message",
    [
        ('stream = "sharded"\nmid = "sharded"', "field 'ffn_in' is missing"),
        ('base = "tp"\nfnn_in = "sharded"', "unknown field 'fnn_in'"),
        ('base = "sp"', "unknown base 'sp'"),
        ('base = "tp"\nhead = "top"', "strategy field head = 'top' is not one of gather, argmax"),
        ("stream = ", "cannot be read"),
        ('base = "tp"\nname = 3', "name must be a string"),
        ('base = "tp"\nstream = 3', "strategy field stream = 3 is not one of"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        resolve(str(file))


def test_file_with_base_and_override(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "sp-late"\nexit = "gather-sum"\nhead = "argmax"\n')
    strategy = resolve(str(file), exit="gather-pair")
    assert (strategy.name, strategy.stream, strategy.exit, strategy.head) == (
        "mine",
        "sharded",
        "gather-pair",
        "argmax",
    )


def test_what_has_no_effect_is_said() -> None:
    assert resolve("tp").notes == ()
    assert "exit gather-pair has no effect" in resolve("tp", exit="gather-pair").notes[0]
    assert "dispatch all-to-all has no effect" in resolve("sp-dense", dispatch="all-to-all").notes[0]
    assert resolve("tp", exit="gather-pair").as_dict()["exit"] == "-"
    assert resolve("sp-late").as_dict()["exit"] == "gather-norm"


def test_pre_norm_recycling_needs_the_raw_rows() -> None:
    check_recycle(resolve("sp-late:gather-sum"), "pre-norm")
    check_recycle(resolve("tp"), "pre-norm")
    with pytest.raises(UsageError, match="recycle = pre-norm excludes exit = gather-norm"):
        check_recycle(resolve("sp-late:gather-norm"), "pre-norm")


def test_torch_is_not_imported() -> None:
    code = "import sys, lockstep.comm.strategy, lockstep.models.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
