"""Faults that other engines shipped, to be put into this one on purpose, one at a time.

Each takes (patch, group) and breaks the engine on the rank that calls it; `patch(object, name, replacement)` undoes
itself. The name begins with the case in the field (CASES.md) that it stands for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation
from lockstep.engine import draft, speculate
from lockstep.engine.sequence import Sequence
from lockstep.models import decoder, delta_net, delta_rule, mla, model, moe
from lockstep.models.cache import Cache
from lockstep.models.rows import Selection

Patch = Callable[[Any, str, Any], None]
Fault = Callable[[Patch, Group], None]


@contextlib.contextmanager
def put_in(name: str | None, group: Group) -> Iterator[None]:
    """The engine with fault `name` (None: as it is) while the block runs."""
    undo: list[tuple[Any, str, Any]] = []

    def patch(place: Any, attribute: str, replacement: Any) -> None:
        undo.append((place, attribute, getattr(place, attribute)))
        setattr(place, attribute, replacement)

    try:
        if name is not None:
            FAULTS[name](patch, group)
        yield
    finally:
        for place, attribute, original in reversed(undo):
            setattr(place, attribute, original)


def _at(
    patch: Patch, suffix: str, change: Callable[[Callable[..., Activation], Group, Activation, Any, str], Any]
) -> None:
    """Change every conversion at a boundary whose name ends with `suffix`."""
    convert = Group.convert

    def changed(self: Group, x: Activation, to: Any, at: str) -> Any:
        return change(convert, self, x, to, at) if at.endswith(suffix) else convert(self, x, to, at)

    patch(Group, "convert", changed)


def _leave(patch: Patch, change: Callable[[decoder.Exit, Any], decoder.Exit], only: str = "") -> None:
    leave = decoder.leave

    def changed(x: Any, norm: Any, step: Any, at: str) -> decoder.Exit:
        out = leave(x, norm, step, at)
        return change(out, norm) if at.startswith(only) else out

    patch(model, "leave", changed)


def a1_exit_gather_missing(patch: Patch, group: Group) -> None:
    _at(patch, "exit", lambda convert, g, x, to, at: x)


def a1_shard_called_full(patch: Patch, group: Group) -> None:
    _at(patch, "exit", lambda convert, g, x, to, at: Activation(x.data, to, x.tokens))


def a3_hidden_times_ranks(patch: Patch, group: Group) -> None:
    def times(x: Activation) -> Activation:
        return Activation(x.data * group.size, x.layout, x.tokens)

    _leave(patch, lambda out, norm: decoder.Exit(times(out.normed), out.raw))


def a3_reduce_after_gather(patch: Patch, group: Group) -> None:
    def again(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        full = convert(g, x, to, at)
        return convert(g, Activation(full.data, PARTIAL, full.tokens), REPLICATED, at) if to is REPLICATED else full

    _at(patch, "exit", again)


def a4_layout_from_shape(patch: Patch, group: Group) -> None:
    def guess(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        if x.layout is SHARDED and to is REPLICATED and x.tokens == g.size:
            return Activation(x.data, REPLICATED, x.tokens)  # "as many rows as a shard that was gathered"
        return convert(g, x, to, at)

    _at(patch, "", guess)


def a7_equal_shards(patch: Patch, group: Group) -> None:
    def floor(tokens: int, rank: int, size: int) -> tuple[int, int]:
        return rank * tokens // size, (rank + 1) * tokens // size

    from lockstep.comm import group as module

    patch(module, "shard_range", floor)


def a9_shared_expert_sliced_on_shards(patch: Patch, group: Group) -> None:
    """Each rank has a slice of the shared expert and rows of its own, so no sum is ever complete."""
    rowwise = Activation.rowwise

    def sliced(self: Activation, function: Any, at: str) -> Activation:
        if not at.endswith("ffn.shared"):
            return rowwise(self, function, at)

        def part(x: torch.Tensor) -> torch.Tensor:
            half = slice(group.rank * 16, group.rank * 16 + 16)
            mlp = function.__self__.shared_experts
            gate, up = (x @ p.weight[half].T for p in (mlp.gate_proj, mlp.up_proj))
            return (torch.nn.functional.silu(gate) * up) @ mlp.down_proj.weight[:, half].T

        return rowwise(self, part, at)

    patch(Activation, "rowwise", sliced)


def a10_shared_expert_per_rank(patch: Patch, group: Group) -> None:
    """A whole shared expert joins the sum before it is finished, so it is counted once per rank."""
    gathered = moe.MoEFFN._gathered

    def early(self: Any, x: Activation, step: Any, at: str) -> Activation:
        routed = gathered(self, x, step, at)
        if routed.layout is PARTIAL and self.shared_experts is not None and not self.shared_experts.sliced:
            return Activation(
                routed.data + self.shared_experts(x.data) * (group.size - 1) / group.size, PARTIAL, x.tokens
            )
        shared = self.shared_experts(x.data) if self.shared_experts else 0.0
        return Activation(routed.data + (group.size - 1) * shared, routed.layout, x.tokens)

    patch(moe.MoEFFN, "_gathered", early)


def a11_reduction_skipped(patch: Patch, group: Group) -> None:
    def skip(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        if x.layout is PARTIAL and to is REPLICATED:
            return Activation(x.data, REPLICATED, x.tokens)
        return convert(g, x, to, at)

    _at(patch, "attention.out", skip)
    _at(patch, "ffn.out", skip)


def a11_reduced_twice(patch: Patch, group: Group) -> None:
    def twice(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        once = convert(g, x, to, at)
        return convert(g, Activation(once.data, PARTIAL, once.tokens), to, at) if to is REPLICATED else once

    _at(patch, "attention.out", twice)


def a14_full_rows_for_a_shard(patch: Patch, group: Group) -> None:
    def full(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        return convert(g, x, REPLICATED if x.layout is PARTIAL else to, at)

    _at(patch, "attention.out", full)


def a15_reduction_skipped_in_decode(patch: Patch, group: Group) -> None:
    def skip(convert: Any, g: Group, x: Activation, to: Any, at: str) -> Activation:
        if x.layout is PARTIAL and x.tokens < 5:
            x = Activation(x.data, REPLICATED, x.tokens)
        return convert(g, x, to, at)

    _at(patch, "ffn.combine", skip)


def b1_pre_norm_recycled(patch: Patch, group: Group) -> None:
    patch(draft.Drafter, "_recycled", lambda self, out: (out.raw or out.normed).data)


def b2_norm_twice(patch: Patch, group: Group) -> None:
    _leave(patch, lambda out, norm: decoder.Exit(out.normed.rowwise(norm, "again"), out.raw), only="mtp")


def b2_head_without_norm(patch: Patch, group: Group) -> None:
    _leave(patch, lambda out, norm: decoder.Exit(out.raw or out.normed, out.raw), only="mtp")


def b3_position_one_late(patch: Patch, group: Group) -> None:
    run = draft.Drafter._run

    def late(self: Any, j: int, tokens: Any, counts: Any, hidden: Any, shift: Any, *rest: Any) -> Any:
        later = [s + 1 for s in shift] if isinstance(shift, list) else shift
        return run(self, j, tokens, counts, hidden, later, *rest)

    patch(draft.Drafter, "_run", late)


def b4_token_not_shifted(patch: Patch, group: Group) -> None:
    new_rows = draft.Drafter._new_rows

    def unshifted(self: Any, j: int, known: Any, counts: Any, hidden: Any) -> Any:
        return new_rows(self, j, [[ids[0], *ids] for ids in known], counts, hidden)

    patch(draft.Drafter, "_new_rows", unshifted)


def b4_sampled_token_at_chunk_border(patch: Patch, group: Group) -> None:
    """The last row of each prefill chunk joins a wrong token in place of the next prompt token."""
    fill = draft.Drafter.fill
    size = 4

    def wrong(self: Any, sequences: Any) -> None:
        prompts = [s.prompt for s in sequences]
        for s in sequences:
            s.prompt = tuple((t + 1) % 90 if i and i % size == 0 else t for i, t in enumerate(s.prompt))
        fill(self, sequences)
        for s, prompt in zip(sequences, prompts, strict=True):
            s.prompt = prompt

    patch(draft.Drafter, "fill", wrong)


def b6_target_cache_not_rewound(patch: Patch, group: Group) -> None:
    keep = Cache.keep

    def forgetful(self: Any, lengths: Any) -> None:
        if len(self.layers) > 1:
            keep(self, [max(n, held) for n, held in zip(lengths, self.lengths, strict=True)])
        else:
            keep(self, lengths)

    patch(Cache, "keep", forgetful)


def b6_draft_cache_not_filled(patch: Patch, group: Group) -> None:
    def skip(self: Any, sequences: Any) -> None:
        for b, s in enumerate(sequences):
            waiting = sum(len(rows) for rows in self.pending[b])
            count = max(0, min(waiting, len(s.prompt) - self.depth - self.caches[0].lengths[b]))
            for cache in self.caches:
                cache.lengths[b] += count
            self.pending[b] = [torch.cat(self.pending[b])[count:]] if self.pending[b] else []

    patch(draft.Drafter, "fill", skip)


def b7_rejected_rows_stay_in_the_state(patch: Patch, group: Group) -> None:
    """A recurrent state is treated like cache slots: its lengths go back, it does not."""
    patch(delta_net, "write", lambda state, written, counts: delta_rule.write(state, written, counts + 99))


def b7_inputs_not_restored(patch: Patch, group: Group) -> None:
    """The state goes back, the convolution's last inputs do not."""
    settle = delta_net.DeltaNetCache._settle

    def newest(self: Any, lengths: Any) -> None:
        recent = self.recent
        settle(self, lengths)
        if recent is not None and len(recent.rows.present) == len(self.lengths):
            self.inputs = recent.inputs[:, -self.inputs.shape[1] :]

    patch(delta_net.DeltaNetCache, "_settle", newest)


def b10_lengths_not_advanced_per_sequence(patch: Patch, group: Group) -> None:
    """All sequences but the first keep one row too few."""
    keep = Cache.keep
    patch(Cache, "keep", lambda self, lengths: keep(self, [max(0, n - (b > 0)) for b, n in enumerate(lengths)]))


def b13_selection_not_carried(patch: Patch, group: Group) -> None:
    recycled_row = draft.Drafter._recycled_row
    patch(draft.Drafter, "_recycled_row", lambda self, *values: recycled_row(self, *values[:-1], None))


def b14_selection_of_another_row(patch: Patch, group: Group) -> None:
    """Draft step 0 hands on what the first of a sequence's new rows selected, not the last accepted one."""
    new_rows = draft.Drafter._new_rows

    def first(self: Any, j: int, known: Any, counts: Any, hidden: Any) -> Any:
        out, selection = new_rows(self, j, known, counts, hidden)
        rows = [sum(counts[:b]) for b, count in enumerate(counts) for _ in range(count)]
        return out, Selection(selection.slots[rows])

    patch(draft.Drafter, "_new_rows", first)


def b14_last_row_instead_of_last_accepted(patch: Patch, group: Group) -> None:
    def last(self: Any, out: Any, parts: Any, kept: Any) -> None:
        row, hidden = 0, out.rows("recycle")
        for b, (part, count) in enumerate(zip(parts, kept, strict=True)):
            row += len(part)
            if count and self.drafter is not None:
                self.drafter.feed(b, hidden[row - count : row])

    patch(speculate.Batch, "_feed", last)


def b17_rope_halves_for_pairs(patch: Patch, group: Group) -> None:
    rotate = mla.rotate
    patch(mla, "rotate", lambda x, cos, sin, *, interleaved: rotate(x, cos, sin, interleaved=not interleaved))


def b16_draft_rope_unscaled(patch: Patch, group: Group) -> None:
    turn = model.Model.turn

    def plain(self: Any, step: Any, dtype: Any) -> None:
        turn(self, step, dtype)
        if step.rows.positions.numel() and step.rows.positions.min() > step.rows.slots.min():
            step.rows.cos, step.rows.sin = step.rows.cos * 0.5, step.rows.sin * 2.0

    patch(model.Model, "turn", plain)


def b20_hidden_overwritten(patch: Patch, group: Group) -> None:
    """Something writes over the rows that the drafter was given before it uses them."""
    propose = draft.Drafter.propose

    def overwritten(self: Any, sequences: Any) -> Any:
        for rows in self.pending:
            for part in rows:
                part.zero_()
        return propose(self, sequences)

    patch(draft.Drafter, "propose", overwritten)


def c1_tokens_after_eos(patch: Patch, group: Group) -> None:
    def uncut(self: Sequence, tokens: list[int]) -> tuple[list[int], str | None]:
        ends = any(t in self.eos for t in tokens)
        return tokens, "stop" if ends else "length" if len(self.tokens) + len(tokens) >= self.limit else None

    patch(Sequence, "cut", uncut)


FAULTS: dict[str, Fault] = {
    name: value
    for name, value in list(globals().items())
    if name[0] in "abc" and name[1:2].isdigit() and callable(value)
}
