"""Decoding speed against transformers' generate: same weights, prompts and topk, one thread, one process, prefill included.

    python -m tests.bench.decode_speed                      # batch 128, prompt 32 + 32 new, topk 64 and 32
    python -m tests.bench.decode_speed --batch 32 --new 64

Both sample at temperature 1 from different prompts; the unit is new tokens per CPU second of the process. transformers runs
its indexer at every step; ours computes index scores only where a query sees more than topk keys (topk 32: all new tokens).
"""

import argparse
import time
from dataclasses import replace

import torch

from model.decode import Decoder
from model.sampling import SamplingParams
from model.transformer import GlmMoeDsa
from tests.bench.train_speed import tiny

REQUIRED = 2.0
BATCH, PROMPT, NEW = 128, 32, 32


def theirs(model: GlmMoeDsa, attention: str):
    """transformers' model with our weights."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    hf = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**model.cfg.to_hf(), attn_implementation=attention)).float().eval()
    hf.load_state_dict(model.state_dict())
    return hf.requires_grad_(False)


def measure(topk: int, batch: int = BATCH, prompt: int = PROMPT, new: int = NEW, repeats: int = 3) -> dict[str, float]:
    """New tokens per CPU second (best of repeats, contestants in turn), and `ratio` = ours / the better of theirs."""
    torch.set_num_threads(1)
    model = GlmMoeDsa(replace(tiny(), index_topk=topk)).init_weights(0).requires_grad_(False)
    ids_bs = torch.randint(0, model.cfg.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    decoder, params = Decoder(model), SamplingParams(max_new_tokens=new, seed=0, ignore_eos=True)
    hf = {f"hf_{name}": theirs(model, name) for name in ("eager", "sdpa")}
    if prompt + new <= topk:
        scored = decoder.score(ids_bs[:2].tolist())
        logp = torch.log_softmax(hf["hf_sdpa"](ids_bs[:2]).logits, -1)[:, :-1].gather(2, ids_bs[:2, 1:, None])
        torch.testing.assert_close(torch.tensor(scored), logp.squeeze(2), atol=1e-4, rtol=0)  # it is the same model

    def run(name: str) -> None:
        if name == "ours":
            out = decoder.generate(ids_bs.tolist(), params)
            assert all(len(completion.output_ids) == new for completion in out)
        else:
            torch.manual_seed(0)
            with torch.inference_mode():
                out = hf[name].generate(ids_bs, do_sample=True, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
            assert out.shape == (batch, prompt + new)

    names = ["ours", *hf]
    best = dict.fromkeys(names, float("inf"))
    for turn in range(repeats + 1):
        for name in names:
            start = time.process_time()
            run(name)
            if turn:
                best[name] = min(best[name], time.process_time() - start)
    row = {"topk": topk, **{name: batch * new / seconds for name, seconds in best.items()}}
    row["ratio"] = row["ours"] / max(row["hf_eager"], row["hf_sdpa"])
    print("  ".join(f"{k} {v:.2f}" if k == "ratio" else f"{k} {v:.0f}" for k, v in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topk", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for topk in args.topk:
        measure(topk, args.batch, args.prompt, args.new, args.repeats)


if __name__ == "__main__":
    main()
