"""Cached generation for every kind of attention: what each kind keeps per row is what makes it cheap to decode (notes A.6).

    completions = StateDecoder(model).generate(prompts, SamplingParams(max_new_tokens=32))

Full MLA keeps latents and indexer keys of all tokens, GQA keys and values; a window keeps a ring of `sliding_window` entries;
the recurrences keep one matrix per head, and gdn the last inputs of its convolutions: their step costs the same at any length.
The model's own modules are run, in their dtype; for MLA models without other kinds model/decode.py is the faster decoder.
IndexShare needs that one (ValueError here). Sampling, random streams and stop rules are the same in all decoders.

Run its tests: `python -m pytest tests/model/test_state_decode.py`
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.gdn import chunked_gdn, recurrent_gdn
from kernels.topk import topk_mask
from model.attention import MLAProjections
from model.config import ModelConfig
from model.gdn import GdnGQA, GdnMLA, SimpleGdnGQA, SimpleGdnMLA
from model.sampling import Completion, RowSampler, SamplingParams, row_params
from model.swa import SlidingGQA, SlidingMLA
from model.transformer import GlmMoeDsa

State = dict[str, torch.Tensor]  # one layer's, each [B, ...]
CONVOLVED = (GdnMLA, GdnGQA)
RECURRENT = (*CONVOLVED, SimpleGdnMLA, SimpleGdnGQA)
SLIDING = (SlidingMLA, SlidingGQA)


def check_prompt(cfg: ModelConfig, row: int, ids: Sequence[int], new_tokens: int) -> None:
    """ValueError that names the row and what is wrong with it."""
    if not ids:
        raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
    if len(ids) + new_tokens > cfg.max_position_embeddings:
        raise ValueError(
            f"prompt {row}: {len(ids)} prompt tokens + {new_tokens} new tokens exceed max_position_embeddings "
            f"{cfg.max_position_embeddings}"
        )
    bad = [t for t in ids if not 0 <= t < cfg.vocab_size]
    if bad:
        raise ValueError(f"prompt {row}: token id {bad[0]} is outside [0, {cfg.vocab_size})")


def take(out: Completion, token: int, logp: float, params: SamplingParams, eos_ids: Sequence[int]) -> bool:
    """Append a sampled token to a row's completion; True when it ends the row."""
    out.output_ids.append(token)
    out.output_logprobs.append(logp)
    out.weight_runs = [(0, len(out.output_ids))]
    if token in params.stop_token_ids or (token in eos_ids and not params.ignore_eos):
        out.finish_reason, out.matched = "stop", token
        return True
    return len(out.output_ids) >= params.max_new_tokens


def _entries(attn, x_bsh, cis_bsr) -> State:
    """What a layer with softmax attention caches per token: MLA's latents (and indexer keys), GQA's keys and values."""
    if not isinstance(attn, MLAProjections):
        _, k, v = attn.project_qkv(x_bsh, cis_bsr)
        return {"k": k, "v": v}
    entries = {"kv": torch.cat(attn.project_kv_latent(x_bsh, cis_bsr), dim=-1)}
    if getattr(attn, "indexer", None) is not None:
        entries["index"] = attn.indexer.keys(x_bsh, cis_bsr)
    return entries


def prefill_layer(attn, x_bsh, cis_bsr, lengths_b, capacity: int, attention: str) -> tuple[torch.Tensor, State]:
    """(output [B,S,hidden], state after each row's own length); rows are right-padded."""
    batch, size = x_bsh.shape[:2]
    real_bs = torch.arange(size, device=x_bsh.device) < lengths_b[:, None]
    if isinstance(attn, RECURRENT):
        q, k, v, log_a, b = attn.recurrence(x_bsh, *attn.mixed(x_bsh, cis_bsr))
        b = b * real_bs[..., None]  # padding writes nothing and does not decay
        log_a = None if log_a is None else log_a * real_bs[..., None]
        o_bshv, memory = chunked_gdn(q, k, v, log_a, b)
        state = {"memory": memory}
        if isinstance(attn, CONVOLVED):
            kept = attn.q_conv1d.weight.shape[1] - 1
            at_bk = lengths_b[:, None] + torch.arange(-kept, 0, device=x_bsh.device)
            for name, part in zip("qkv", attn.project_qkv(x_bsh, None), strict=True):
                flat_bsc = part.flatten(-2)
                picked = flat_bsc.gather(1, at_bk.clamp(min=0)[..., None].expand(-1, -1, flat_bsc.shape[-1]))
                state[name] = picked * (at_bk >= 0)[..., None]
        return attn.output(attn.gated(o_bshv, x_bsh)), state
    room = attn.window if isinstance(attn, SLIDING) else capacity
    state = {}
    for name, entry in _entries(attn, x_bsh, cis_bsr).items():
        state[name] = entry.new_zeros(batch, min(room, capacity), *entry.shape[2:])
        for row, length in enumerate(lengths_b.tolist()):  # a ring: position t lies at t % room
            positions = torch.arange(max(0, length - room), length, device=x_bsh.device)
            state[name][row, positions % room] = entry[row, positions]
    return attn(x_bsh, cis_bsr, attention=attention)[0], state


def step_layer(attn, x_b1h, cis_b1r, lengths_b, state: State, attention: str) -> torch.Tensor:
    """One token per row at position lengths_b: output [B,1,hidden]; the state is brought up to date in place."""
    rows_b = torch.arange(len(lengths_b), device=x_b1h.device)
    if isinstance(attn, RECURRENT):
        if isinstance(attn, CONVOLVED):
            mixed = []
            for name, part in zip("qkv", attn.project_qkv(x_b1h, None), strict=True):
                mixed.append(getattr(attn, f"{name}_conv1d")(part, state[name]))
                state[name] = torch.cat([state[name][:, 1:], part.flatten(-2)], dim=1)
        else:
            mixed = attn.mixed(x_b1h, cis_b1r)
        o_b1hv, state["memory"] = recurrent_gdn(*attn.recurrence(x_b1h, *mixed), state["memory"])
        return attn.output(attn.gated(o_b1hv.to(x_b1h.dtype), x_b1h))
    entries = _entries(attn, x_b1h, cis_b1r)
    room = next(iter(state.values())).shape[1]
    for name, entry in entries.items():
        state[name][rows_b, lengths_b % room] = entry[:, 0]
    longest = min(int(lengths_b.max()) + 1, room)
    allowed_bt = torch.arange(longest, device=x_b1h.device) <= lengths_b[:, None]
    if not isinstance(attn, MLAProjections):
        q_bhd = attn.project_qkv(x_b1h, cis_b1r)[0][:, 0]
        q_bgnd = q_bhd.unflatten(1, (attn.groups, -1))
        logits_bgnt = torch.einsum("bgnd,btgd->bgnt", q_bgnd, state["k"][:, :longest]).float() * attn.softmax_scale
        probs = logits_bgnt.masked_fill(~allowed_bt[:, None, None], -torch.inf).softmax(-1).to(x_b1h.dtype)
        o_bhv = torch.einsum("bgnt,btgv->bgnv", probs, state["v"][:, :longest]).flatten(1, 2)
        return attn.output(o_bhv[:, None])
    c_q = attn.project_q_latent(x_b1h)
    if "index" in state and attention == "sparse" and longest > attn.topk:
        scores_bt = attn.indexer.scores(c_q, x_b1h, cis_b1r, state["index"][:, :longest])[:, 0]
        allowed_bt &= topk_mask(scores_bt.masked_fill(~allowed_bt, -torch.inf), attn.topk)
    q_nope, q_rope = attn.project_q(c_q, cis_b1r)
    w_uk_hnc, w_uv_hvc = attn.absorbed_weights()
    q_bhc = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope[:, 0], w_uk_hnc), q_rope[:, 0]], dim=-1)
    kv_btc = state["kv"][:, :longest]
    logits_bht = torch.einsum("bhc,btc->bht", q_bhc, kv_btc).float() * attn.softmax_scale
    probs = logits_bht.masked_fill(~allowed_bt[:, None], -torch.inf).softmax(-1).to(x_b1h.dtype)
    o_bhv = torch.einsum("bht,btc,hvc->bhv", probs, kv_btc[..., : attn.kv_lora], w_uv_hvc)
    return attn.output(o_bhv[:, None])


class StateDecoder:
    """Decoding with a state per layer. attention: "sparse" (MLA's default) or "dense", as in the model's forward."""

    def __init__(self, model: GlmMoeDsa, attention: str | None = None) -> None:
        if model.cfg.indexer_types is not None:
            raise ValueError("model.indexer_types has shared layers: model.decode.Decoder decodes them")
        self.model = model
        self.attention = attention or ("sparse" if model.cfg.attention == "mla" else "dense")
        self.states: list[State] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(t.numel() * t.element_size() for state in self.states for t in state.values())

    def _blocks(self, hidden: torch.Tensor, attend) -> torch.Tensor:
        for layer, block in enumerate(self.model.blocks):
            hidden = hidden + attend(layer, block.self_attn, block.input_layernorm(hidden))
            y = block.mlp(block.post_attention_layernorm(hidden))
            hidden = hidden + (y[0] if isinstance(y, tuple) else y)
        return self.model.model.norm(hidden)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], capacity: int) -> torch.Tensor:
        """Logits [B,V] after each prompt; states for up to `capacity` positions."""
        embed = self.model.model.embed_tokens
        lengths_b = torch.tensor([len(ids) for ids in prompts], device=embed.weight.device)
        longest = int(lengths_b.max())
        ids_bs = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in prompts], device=embed.weight.device)
        cis_bsr = self.model.rope(torch.arange(longest, device=ids_bs.device)[None])
        self.states, self.lengths_b = [], lengths_b

        def attend(layer, attn, x_bsh):
            out, state = prefill_layer(attn, x_bsh, cis_bsr, lengths_b, capacity, self.attention)
            self.states.append(state)
            return out

        hidden_bsh = self._blocks(embed(ids_bs), attend)
        return self.model.logits(hidden_bsh[torch.arange(len(prompts), device=ids_bs.device), lengths_b - 1]).float()

    @torch.inference_mode()
    def step(self, ids_b: torch.Tensor) -> torch.Tensor:
        """Logits [B,V] after one more token per row."""
        cis_b1r = self.model.rope(self.lengths_b[:, None])

        def attend(layer, attn, x_b1h):
            return step_layer(attn, x_b1h, cis_b1r, self.lengths_b, self.states[layer], self.attention)

        hidden_b1h = self._blocks(self.model.model.embed_tokens(ids_b[:, None]), attend)
        self.lengths_b = self.lengths_b + 1
        return self.model.logits(hidden_b1h[:, 0]).float()

    def select(self, keep: torch.Tensor) -> None:
        """Keep rows by int64 index."""
        self.lengths_b = self.lengths_b[keep]
        self.states = [{name: t.index_select(0, keep) for name, t in state.items()} for state in self.states]

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Continue each prompt. params: one for all rows, or one per row.

        ValueError for empty prompts, ids outside the vocabulary and prompts too long for max_position_embeddings.
        """
        per_row, seeds = row_params(params, len(prompts))
        for row, (ids, one) in enumerate(zip(prompts, per_row, strict=True)):
            check_prompt(self.model.cfg, row, ids, one.max_new_tokens)
        completions = [Completion() for _ in prompts]
        live = [row for row, one in enumerate(per_row) if one.max_new_tokens > 0]
        if not live:
            return completions
        logits_bv = self.prefill(
            [prompts[r] for r in live], max(len(prompts[r]) + per_row[r].max_new_tokens for r in live)
        )
        while True:
            sampler = RowSampler([per_row[r] for r in live], [seeds[r] for r in live], logits_bv.device)
            counters_b = np.array([len(completions[r].output_ids) for r in live], dtype=np.int64)
            ids_b, logp_b = sampler.sample(logits_bv, counters_b)
            going = []
            for at, (row, token, logp) in enumerate(zip(live, ids_b.tolist(), logp_b.tolist(), strict=True)):
                if not take(completions[row], token, logp, per_row[row], self.model.cfg.eos_token_ids):
                    going.append(at)
            if not going:
                return completions
            if len(going) < len(live):
                keep = torch.tensor(going, device=ids_b.device)
                self.select(keep)
                ids_b, live = ids_b[keep], [live[at] for at in going]
            logits_bv = self.step(ids_b)
