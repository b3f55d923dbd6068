"""The oracle: transformers in float64 as the target, and an uncached MTP reference, both recomputed from scratch.

Nothing here is shared with the engine. Everything is a pure function of (checkpoint, tokens), memoised.

    T rows, H hidden size, V vocabulary, k drafts, n MTP layers; tokens t_0..t_c are committed, so c = len(tokens) - 1
"""

import copy
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import checkpoints
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

R = TypeVar("R")


class TrueFloat64(TorchFunctionMode):
    """Lifts the float32 islands of transformers (norms, softmax, router, indexer, delta rule): float64 stays float64.

    RoPE angles stay float32, because they start from integer positions. Top-k ties go to the lowest index, in every
    dtype: an index score is exactly zero for every key that no head likes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            return lowest_index_topk(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if len(args) > 1:
                args = tuple([torch.float64 if a is torch.float32 else a for a in args])
            if kwargs:
                kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in kwargs.items()}
        return func(*args, **kwargs)


def lowest_index_topk(x: Tensor, k: int, dim: int = -1, sorted: bool = True) -> Any:
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


class Forward(NamedTuple):
    logits: Tensor  # [T, V]
    hidden: Tensor  # [T, H] after the final norm
    layers: list[Tensor]  # per layer [T, H], the residual stream after it


class Draft(NamedTuple):
    tokens: tuple[int, ...]  # k drafts
    logits: Tensor  # [k, V]
    blocks: list[Tensor]  # per step: [rows, H], the MTP block's output before the final norm (last row drafts)
    outputs: list[Tensor]  # the same rows after the final norm; steps s < n compute all rows, later ones a single row


class Generation(NamedTuple):
    tokens: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    rounds: tuple[tuple[tuple[int, ...], int], ...]  # (drafts, accepted)


class Rows(NamedTuple):
    """The input rows of one MTP layer."""

    x: Tensor  # [rows, H] after the projection
    positions: tuple[int, ...]


@dataclass(frozen=True)
class MtpLayer:
    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    block: nn.Module
    norm: nn.Module
    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]


class Oracle:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        """`dtype` is float64 or float32 (then with transformers' own numerics)."""
        self.folder, self.dtype = Path(folder), dtype
        self.model = load_target(self.folder, dtype)
        self.config = self.model.config.get_text_config()
        self.raw = raw_config(self.folder)
        self.mtp = load_mtp(self.folder, self.model, self.raw, dtype)
        self.memo: dict[Any, Any] = {}

    # ------------------------------------------------------------------------------------------------- the target
    def forward(self, tokens: Sequence[int]) -> Forward:
        """One uncached forward over all the tokens."""
        return self.remember(("forward", tuple(tokens)), lambda: self.run_target(tuple(tokens)))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.forward(tokens).logits

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        return self.forward(tokens).hidden

    def layers(self, tokens: Sequence[int]) -> list[Tensor]:
        return self.forward(tokens).layers

    def greedy(self, prompt: Sequence[int], n: int, eos: Iterable[int] = ()) -> tuple[int, ...]:
        """At most n new tokens; an EOS is kept and is the last one."""
        tokens, stop = list(prompt), set(eos)
        while len(tokens) < len(prompt) + n and not (len(tokens) > len(prompt) and tokens[-1] in stop):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])

    @torch.no_grad()
    def run_target(self, tokens: tuple[int, ...]) -> Forward:
        layers: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _m, _a, out: layers.append(first(out)[0]))
            for layer in self.model.model.layers
        ]
        try:
            with TrueFloat64():
                hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
                return Forward(self.model.lm_head(hidden), hidden, layers)
        finally:
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------------ the MTP reference
    def draft(
        self, tokens: Sequence[int], k: int, recycle: str = "post-norm", forced: Sequence[int] | None = None
    ) -> Draft:
        """k drafts after the committed tokens. `forced` drafts are fed to later steps in place of the argmax."""
        key = ("draft", tuple(tokens), k, recycle, None if forced is None else tuple(forced))
        return self.remember(key, lambda: self.run_draft(list(tokens), k, recycle, forced))

    def draft_logits(
        self, tokens: Sequence[int], k: int, recycle: str = "post-norm", forced: Sequence[int] | None = None
    ) -> Tensor:
        return self.draft(tokens, k, recycle, forced).logits

    @torch.no_grad()
    def run_draft(self, tokens: list[int], k: int, recycle: str, forced: Sequence[int] | None) -> Draft:
        if not self.mtp or len(tokens) < 2:
            raise ValueError(f"drafting needs MTP layers ({len(self.mtp)}) and two committed tokens ({len(tokens)})")
        c, used = len(tokens) - 1, min(len(self.mtp), k)
        recycled = self.hidden(tokens[:c])  # [c, H]: row i is the target's hidden of token i
        rows: list[Rows] = []
        selection: Tensor | None = None
        known, drafts, logits, blocks, outputs = list(tokens), [], [], [], []
        with TrueFloat64():
            for step in range(k):
                j = step % used
                layer = self.mtp[j]
                if step < used:  # all rows of layer j: row i takes token i + 1 + j
                    ids, positions = known[1 + j : 1 + j + c], tuple(range(1 + j, 1 + j + c))
                    rows.append(Rows(self.project(layer, ids, recycled), positions))
                else:  # one row more: the last draft, with the previous step's output
                    x = self.project(layer, known[-1:], recycled[-1:])
                    rows[j] = Rows(torch.cat([rows[j].x, x]), (*rows[j].positions, c + step))
                out, chosen = self.run_block(layer, rows[j], c, selection)
                selection = chosen if step == 0 and self.raw.get("index_share_for_mtp_iteration") else selection
                block = out if step < used else out[-1:]
                normed = layer.norm(block)
                recycled = normed if recycle == "post-norm" else block
                logits.append(F.linear(normed[-1], layer.head))
                drafts.append(int(logits[-1].argmax()))
                known.append(drafts[-1] if forced is None else forced[step])
                blocks.append(block)
                outputs.append(normed)
        return Draft(tuple(drafts), torch.stack(logits), blocks, outputs)

    def project(self, layer: MtpLayer, ids: Sequence[int], hidden: Tensor) -> Tensor:
        embedding = layer.embed[torch.tensor(ids)]
        joined: Tensor = layer.eh_proj(torch.cat([layer.enorm(embedding), layer.hnorm(hidden)], -1))
        return joined

    def run_block(self, layer: MtpLayer, rows: Rows, c: int, selection: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The decoder layer over all its rows, causally, and which keys row c - 1 attends to (sparse attention).

        A `selection` of draft step 0 is what the rows appended later attend to, and nothing else.
        """
        num, x, chosen = len(rows.x), rows.x[None], []
        mask = torch.full((num, num), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        positions = torch.tensor([rows.positions])

        def select(_module: nn.Module, _args: Any, indices: Tensor) -> Tensor:
            chosen.append(indices[0, c - 1][indices[0, c - 1] < c])
            if selection is None or num == c:
                return indices
            indices = indices.clone()
            indices[:, c:] = selection[torch.arange(indices.shape[-1]) % len(selection)]
            return indices

        attention: Any = getattr(layer.block, "self_attn")  # noqa: B009 (nn.Module attributes are untyped)
        indexer = getattr(attention, "indexer", None)
        hook = indexer.register_forward_hook(select) if indexer is not None else None
        try:
            embeddings = self.model.model.rotary_emb(x, positions)
            out = layer.block(x, attention_mask=mask, position_ids=positions, position_embeddings=embeddings)
        finally:
            if hook is not None:
                hook.remove()
        return first(out)[0], chosen[0] if chosen else None

    # -------------------------------------------------------------------------------------- speculative generation
    def speculative(
        self,
        prompt: Sequence[int],
        max_new: int,
        k: int,
        eos: Iterable[int] = (),
        max_position: int | None = None,
        recycle: str = "post-norm",
    ) -> Generation:
        """Greedy speculative decoding: prefill gives the first token, each round drafts and verifies."""
        key = ("speculative", tuple(prompt), max_new, k, tuple(sorted(eos)), max_position, recycle)
        return self.remember(key, lambda: self.run_speculative(*key[1:]))

    def run_speculative(
        self,
        prompt: tuple[int, ...],
        max_new: int,
        k: int,
        eos: tuple[int, ...],
        max_position: int | None,
        recycle: str,
    ) -> Generation:
        limit = max_new if max_position is None else min(max_new, max_position - len(prompt))
        if limit < 1:
            raise ValueError(f"no room for a token: max_new {max_new}, prompt {len(prompt)}, limit {max_position}")
        tokens = list(self.greedy(prompt, 1))
        rounds: list[tuple[tuple[int, ...], int]] = []
        while len(tokens) < limit and tokens[-1] not in eos:
            num = min(k, limit - len(tokens) - 1)
            committed = (*prompt, *tokens)
            drafts = self.draft(committed, num, recycle).tokens if num else ()
            # What plain decoding says after every draft that still agrees with it, and one token more.
            truth = self.greedy(committed, num + 1)
            accepted = next((i for i, d in enumerate(drafts) if d != truth[i]), num)
            kept = truth[: accepted + 1]
            stop = next((i + 1 for i, t in enumerate(kept) if t in eos), len(kept))
            tokens += kept[:stop]
            rounds.append((drafts, min(accepted, stop)))
        return Generation(tuple(tokens), "stop" if tokens[-1] in eos else "length", tuple(rounds))

    def remember(self, key: Any, compute: Callable[[], R]) -> R:
        if key not in self.memo:
            self.memo[key] = compute()
        value: R = self.memo[key]
        return value


def oracle(folder: Path, dtype: torch.dtype = torch.float64) -> Oracle:
    """One Oracle, with its memo, per checkpoint and session (a checkpoint that was edited since is another one)."""
    files = tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(folder).iterdir()))
    return oracle_of(Path(folder), dtype, files)


@functools.lru_cache(maxsize=64)
def oracle_of(folder: Path, dtype: torch.dtype, _files: tuple[Any, ...]) -> Oracle:
    return Oracle(folder, dtype)


# ----------------------------------------------------------------------------------------------------------- loading
def first(out: Any) -> Tensor:
    """GLM-5's decoder layer returns (hidden, indices), the others the hidden alone."""
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


def raw_config(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw.get("text_config") or raw


def num_mtp_layers(raw: dict[str, Any]) -> int:
    return int(raw.get("mtp_num_hidden_layers", raw.get("num_nextn_predict_layers", 0)))


def load_target(folder: Path, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForCausalLM  # its annotations leave out the loading info
    model, info = auto.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    layers = raw_config(folder)["num_hidden_layers"]
    ours = tuple(f"model.layers.{layers + j}." for j in range(num_mtp_layers(raw_config(folder))))
    unexpected = [key for key in info["unexpected_keys"] if not key.startswith((*ours, "mtp."))]
    if info["missing_keys"] or info["mismatched_keys"] or unexpected:
        raise ValueError(f"{folder}: transformers does not take this checkpoint as it is: {info}")
    return to_dtype(model.eval(), dtype)


def to_dtype(module: nn.Module, dtype: torch.dtype) -> Any:
    """Parameters and stored buffers (transformers keeps some in float32); the RoPE frequencies stay float32."""
    for tensor in module.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module.requires_grad_(False)


def load_mtp(folder: Path, model: Any, raw: dict[str, Any], dtype: torch.dtype) -> list[MtpLayer]:
    """The MTP layers around the family's own decoder layer; [] when the checkpoint has no weights for them."""
    num, tensors = num_mtp_layers(raw), checkpoints.read(folder)
    qwen = model.config.get_text_config().model_type in checkpoints.QWEN
    config = mtp_config(model.config.get_text_config(), num)
    norm_cls, eps = type(model.model.norm), config.rms_norm_eps

    def linear(key: str) -> Any:
        weight = tensors[key]
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module.load_state_dict({"weight": weight})
        return to_dtype(module, dtype)

    def norm(key: str) -> Any:
        module = norm_cls(config.hidden_size, eps=eps)
        module.load_state_dict({"weight": tensors[key]})
        return to_dtype(module, dtype)

    layers = []
    for j in range(num):
        pre = f"mtp.layers.{j}." if qwen else f"model.layers.{raw['num_hidden_layers'] + j}."
        if pre + "input_layernorm.weight" not in tensors:
            return []
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        if not qwen:
            names = (pre + "enorm", pre + "hnorm", pre + "eh_proj", pre + "shared_head.norm")
        enorm, hnorm, projection, final = (name + ".weight" for name in names)
        outside = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
        state = {k.removeprefix(pre): v for k, v in tensors.items() if k.startswith(pre)}
        state = {k: v for k, v in state.items() if not k.startswith(outside)}
        block = type(model.model.layers[-1])(config, j).eval()
        block.load_state_dict(fuse_experts(state))
        embed = tensors.get("mtp.embed_tokens.weight" if qwen else pre + "embed_tokens.weight")
        head = tensors.get("mtp.lm_head.weight" if qwen else pre + "shared_head.head.weight")
        layers.append(
            MtpLayer(
                enorm=norm(enorm),
                hnorm=norm(hnorm),
                eh_proj=linear(projection),
                block=to_dtype(block, dtype),
                norm=norm(final),
                embed=model.model.embed_tokens.weight if embed is None else embed.to(dtype),
                head=model.lm_head.weight if head is None else head.to(dtype),
            )
        )
    return layers


def mtp_config(config: Any, num: int) -> Any:
    """As the family's layer class wants it: every MTP layer has experts, full attention and its own indexer."""
    config = copy.deepcopy(config)
    kinds = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}
    if "dsa" in config.model_type or config.model_type == "deepseek_v32":
        kinds["layer_types"] = "indexed_attention"
    for field, kind in kinds.items():
        if getattr(config, field, None) is not None:
            setattr(config, field, [kind] * num)
    config.num_hidden_layers = num
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def fuse_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Released files have one tensor per expert and projection; transformers computes with stacked ones."""
    num = sum(k.startswith("mlp.experts.") and k.endswith(".down_proj.weight") for k in state)
    if not num:
        return state
    names = {p: [f"mlp.experts.{e}.{p}.weight" for e in range(num)] for p in ("gate_proj", "up_proj", "down_proj")}
    gate, up, down = (torch.stack([state[key] for key in keys]) for keys in names.values())
    rest = {k: v for k, v in state.items() if not k.startswith("mlp.experts.")}
    return rest | {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}
