"""The demo models' shapes, their trainable form, and their checkpoints in the released key layout.

T tokens, R rows of the MTP block, H hidden size. Row r of the MTP block belongs to position r: it takes the hidden of
token r and the embedding of token r+1, and predicts token r+2.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

FAMILIES = ("deepseek_v3", "qwen3_next")
LAYERS = {"deepseek_v3": 3, "qwen3_next": 4}
DEEPSEEK = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
QWEN = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
KEEP_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")


def _sorted_experts(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts with the rows sorted by expert: on a CPU about three times as fast as its own loops."""
    order = index.flatten().argsort(stable=True)
    rows = order // index.shape[-1]
    parts = x[rows].split(torch.bincount(index.flatten(), minlength=self.num_experts).tolist())
    done = []
    for part, gate_up, down in zip(parts, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True):
        gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
        done.append(F.linear(F.silu(gate) * up, down))
    scaled = torch.cat(done) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, rows, scaled.to(x.dtype))


class DraftCache:
    """Keys and values of the MTP block, in the one method of transformers' cache that a decoder layer calls."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, a: Tensor, b: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        if self.kept is not None:
            a, b = torch.cat((self.kept[0], a), dim=2), torch.cat((self.kept[1], b), dim=2)
        self.kept = (a, b)
        return self.kept


class DemoModel(nn.Module):
    """The target, and after its last layer one more of the same class: the body of the MTP block."""

    def __init__(self, family: str, vocab: int, eos: int, pad: int) -> None:
        super().__init__()
        self.family, self.num_layers = family, LAYERS[family]
        fields = dict(
            DEEPSEEK if family == "deepseek_v3" else QWEN,
            num_hidden_layers=self.num_layers + 1,
            vocab_size=vocab,
            max_position_embeddings=1024,
            bos_token_id=eos,
            eos_token_id=eos,
            pad_token_id=pad,
        )
        ALL_EXPERTS_FUNCTIONS.register("sorted", _sorted_experts)
        self.lm = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **fields), dtype=torch.float32, experts_implementation="sorted"
        )
        self.lm.config.num_hidden_layers = self.num_layers  # its forward stops there
        hidden, norm = self.lm.config.hidden_size, type(self.lm.model.norm)
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps=self.lm.config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def target(self, ids: Tensor) -> Tensor:
        """[B, T, H], after the final norm."""
        rows: Tensor = self.lm.model(ids, use_cache=False).last_hidden_state
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm.lm_head(hidden)
        return logits

    def draft(
        self, ids: Tensor, hidden: Tensor, first: int = 0, cache: DraftCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Rows first.. of one draft step: `ids` are the next tokens, [B, R]. The result feeds head and next step."""
        both = torch.cat((self.enorm(self.lm.model.embed_tokens(ids)), self.hnorm(hidden)), dim=-1)
        x = self.eh_proj(both)
        positions = torch.arange(first, first + ids.shape[1])[None]
        x = self.lm.model.layers[self.num_layers](
            x, position_embeddings=self.lm.model.rotary_emb(x, positions), attention_mask=mask, cache=cache
        )
        y: Tensor = self.norm(x)
        return y

    def draft_steps(self, ids: Tensor, hidden: Tensor, steps: int, start: int) -> list[Tensor]:
        """Training form of drafting: step s has rows start+s.. (step 0 all), made from step s-1's rows one earlier.

        As when generating, a row of step s attends to rows of step 0 up to r-s (made from the target's hiddens), to
        one row of each earlier step, and to itself.
        """
        num_rows = ids.shape[1] - 2  # the last row predicts the last token
        cache, at = DraftCache(), torch.arange(num_rows)
        out = [self.draft(ids[:, 1:-1], hidden[:, :num_rows], cache=cache)]
        for s in range(1, steps):
            first = start + s
            row = at[first:, None]
            seen = [at[None] <= row - s] + [at[None, start + e :] == row - s + e for e in range(1, s + 1)]
            previous = out[-1][:, start:-1] if s == 1 else out[-1][:, :-1]
            out.append(self.draft(ids[:, first + 1 : -1], previous, first, cache, torch.cat(seen, dim=1)[None, None]))
        return out

    def _around_the_block(self) -> dict[str, nn.Parameter]:
        """The MTP weights that are not part of its decoder layer, by their released names."""
        pre, names = f"model.layers.{self.num_layers}", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if self.family == "qwen3_next":
            pre, names = "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        modules = (self.enorm, self.hnorm, self.eh_proj, self.norm)
        return {f"{pre}.{name}.weight": m.get_parameter("weight") for name, m in zip(names, modules, strict=True)}

    @classmethod
    def load(cls, folder: Path) -> "DemoModel":
        """The saved weights, computed with in float32."""
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        model = cls(config["model_type"], config["vocab_size"], config["eos_token_id"], config["pad_token_id"])
        with torch.no_grad():
            for name, parameter in model._around_the_block().items():
                parameter.copy_(tensors.pop(name))
        block = f"model.layers.{model.num_layers}."
        tensors = {k.replace("mtp.layers.0.", block): v for k, v in tensors.items()}
        config["num_hidden_layers"] += 1
        if "layer_types" in config:
            config["layer_types"].append("full_attention")
        with tempfile.TemporaryDirectory() as d:
            save_file(tensors, Path(d, "model.safetensors"), metadata={"format": "pt"})
            Path(d, "config.json").write_text(json.dumps(config))
            model.lm = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, experts_implementation="sorted")
        model.lm.config.num_hidden_layers = model.num_layers
        return model

    def save(self, folder: Path) -> None:
        """Released key names, bfloat16. The MTP block shares the target's embedding and head."""
        with tempfile.TemporaryDirectory() as d:
            self.lm.config.num_hidden_layers = self.num_layers + 1
            self.lm.save_pretrained(d, max_shard_size="1GB")
            self.lm.config.num_hidden_layers = self.num_layers
            tensors = load_file(f"{d}/model.safetensors")
            config = json.loads(Path(d, "config.json").read_text())
        if self.family == "qwen3_next":
            tensors = {k.replace(f"model.layers.{self.num_layers}.", "mtp.layers.0."): v for k, v in tensors.items()}
        tensors |= {name: parameter.detach() for name, parameter in self._around_the_block().items()}
        tensors = {k: (v if k.endswith(KEEP_FLOAT32) else v.bfloat16()).contiguous() for k, v in tensors.items()}
        config |= {"num_hidden_layers": self.num_layers, "dtype": "bfloat16", "num_nextn_predict_layers": 1}
        config.pop("num_mtp_layers", None)
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: self.num_layers]
        ends = {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "pad_token_id": config["pad_token_id"],
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, **ends}, indent=1) + "\n")
