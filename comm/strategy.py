"""A strategy is a choice of layouts, named points of that space, and the checks that refuse the impossible.

Nothing here imports torch: an unknown or impossible strategy is refused before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.errors import UsageError

R, S = "replicated", "sharded"
CHOICES: dict[str, tuple[str, ...]] = {
    "stream": (R, S),
    "mid": (R, S),
    "ffn_in": (R, S),
    "experts": ("sliced", "owned"),
    "dispatch": ("gather", "all-to-all"),
    "dense": ("sliced", "replicated"),
    "shared": ("sliced", "replicated"),
    "exit": ("gather-pair", "gather-sum", "gather-norm"),
    "head": ("gather", "argmax"),
}
EXITS = CHOICES["exit"]

# The named points: stream, mid, ffn_in. Costs per MoE layer and sources: DESIGN section 3.
NAMED: dict[str, tuple[str, str, str]] = {
    "tp": (R, R, R),
    "sp-chunk": (R, R, S),  # vLLM before #46635
    "sp-early": (R, S, S),  # vLLM #46635, #47881, #48429
    "sp-late": (S, S, S),  # vLLM #47006, #51434
    "sp-dense": (S, S, R),  # Megatron sequence parallelism (Korthikanti et al., 2022)
}


@dataclass(frozen=True)
class Placement:
    """How the weights lie on the ranks: fixed when they are loaded, and shared by every strategy that names it."""

    experts: str
    dense: str
    shared: str


@dataclass(frozen=True)
class Strategy:
    """Where each boundary's rows lie, and what moves them (DESIGN section 3 lists the fields)."""

    name: str
    stream: str
    mid: str
    ffn_in: str
    experts: str
    dispatch: str
    dense: str
    shared: str
    exit: str
    head: str
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        return Placement(self.experts, self.dense, self.shared)

    def as_dict(self) -> dict[str, str]:
        """The effective strategy as every result shows it; a field that has no effect here reads `-`."""
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "notes"}
        if not self.dispatches:
            shown["dispatch"] = "-"
        if self.stream == R:
            shown["exit"] = "-"
        return shown

    @property
    def dispatches(self) -> bool:
        """Whether rows travel to the ranks that own their experts."""
        return self.ffn_in == S and self.experts == "owned"


def resolve(spec: str, **overrides: str | None) -> Strategy:
    """The strategy that `spec` names: a name, `name:exit`, or the path of a TOML file; with fields overridden.

    Raises UsageError for an unknown name, field or choice, and for fields that exclude each other.
    """
    name, fields = _read(spec)
    asked = fields | {k: v for k, v in overrides.items() if v is not None}
    for key, value in asked.items():
        if value not in CHOICES[key]:
            raise UsageError(f"strategy field {key} = {value!r} is not one of {', '.join(CHOICES[key])}")
    strategy = Strategy(name=name, **_with_defaults(asked), notes=())
    _refuse_impossible(strategy)
    return dataclasses.replace(strategy, notes=tuple(_without_effect(strategy, asked)))


def _read(spec: str) -> tuple[str, dict[str, str]]:
    if spec.endswith(".toml"):
        return _read_toml(Path(spec))
    name, _, exit_name = spec.partition(":")
    if name not in NAMED:
        raise UsageError(f"unknown strategy {name!r}: use one of {', '.join(NAMED)}, or the path of a .toml file")
    fields = dict(zip(("stream", "mid", "ffn_in"), NAMED[name], strict=True))
    return name, fields | ({"exit": exit_name} if exit_name else {})


def _read_toml(path: Path) -> tuple[str, dict[str, str]]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"strategy file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"strategy file {path} cannot be read: {error}") from None
    base = table.pop("base", None)
    name = table.pop("name", path.stem)
    unknown = sorted(set(table) - set(CHOICES))
    if unknown:
        raise UsageError(f"{path}: unknown field {unknown[0]!r}; the fields are name, base, {', '.join(CHOICES)}")
    if not isinstance(name, str):
        raise UsageError(f"{path}: name must be a string")
    if base is not None:
        if base not in NAMED:
            raise UsageError(f"{path}: unknown base {base!r}: use one of {', '.join(NAMED)}")
        table = dict(zip(("stream", "mid", "ffn_in"), NAMED[base], strict=True)) | table
    missing = [key for key in ("stream", "mid", "ffn_in") if key not in table]
    if missing:
        raise UsageError(f'{path}: field {missing[0]!r} is missing (or name a base = "tp" to start from)')
    return name, table


def _with_defaults(asked: dict[str, str]) -> dict[str, str]:
    """A weight is sliced where its input is REPLICATED and whole where it is SHARDED, unless asked otherwise."""
    weights = "sliced" if asked["ffn_in"] == R else "replicated"
    defaults = {
        "experts": "sliced" if asked["ffn_in"] == R else "owned",
        "dispatch": "gather",
        "dense": weights,
        "shared": weights,
        "exit": "gather-norm",
        "head": "gather",
    }
    return defaults | asked


def _refuse_impossible(s: Strategy) -> None:
    if s.ffn_in == S and s.experts == "sliced":
        raise UsageError(
            "experts = sliced excludes ffn_in = sharded: each rank would hold other rows than its slices' partners; "
            "use experts = owned, or ffn_in = replicated"
        )
    if s.dispatches and s.dispatch == "all-to-all" and s.shared == "sliced":
        raise UsageError(
            "shared = sliced excludes dispatch = all-to-all: no rank holds all rows that the slices must see; "
            "use shared = replicated, or dispatch = gather"
        )


def _without_effect(s: Strategy, asked: dict[str, str]) -> list[str]:
    notes = []
    if "exit" in asked and s.stream == R:
        notes.append(f"exit {s.exit} has no effect: the stream is replicated, so the exit is its own conversion")
    if "dispatch" in asked and not s.dispatches:
        why = "rows are replicated where they enter the experts" if s.ffn_in == R else "experts are sliced"
        notes.append(f"dispatch {s.dispatch} has no effect: {why}")
    return notes


def check_recycle(s: Strategy, recycle: str) -> None:
    """Refuse recycling rows from before the norm where the exit moves only normed rows."""
    if recycle == "pre-norm" and s.stream == S and s.exit == "gather-norm":
        raise UsageError(
            "recycle = pre-norm excludes exit = gather-norm, which moves only normed rows; "
            "use exit gather-pair or gather-sum"
        )
