"""A pipeline rank's part of the model, and its stages' forward, backward and weight-gradient passes.

    local = RankModel(cfg, [specs[0], specs[2]]).init_weights(seed=0)      # parameters under the whole model's names
    stage = ModelStage(local, specs[0], work, ledger)
    y = stage.forward(micro, None, batch, share);   dx = stage.backward(micro, dy);   stage.weight(micro)

The loss is a sum of terms that arise where they are computed: balance and indexer losses on the stage of their layers, the
language-model losses on the last. Each stage adds its own term to what arrives from the next, so gradients are the whole
model's and no loss has to travel.

Check it:  python -m pytest tests/model/test_pipeline.py
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kernels.deferred import WeightQueue, deferring
from kernels.rope import rope_cis
from model.block import BlockArgs
from model.config import ModelConfig
from model.pipeline_memory import Held, Ledger, storage_of
from model.pipeline_place import StageSpec, stage_names
from model.transformer import GlmMoeDsa

Batch = Mapping[str, Tensor]
EVEN: Mapping[str, float] = {}  # no term of the loss needs a weight of its own


@dataclass(frozen=True)
class Work:
    """What is computed in a step; the fields mean what they mean in GlmMoeDsa.forward and in the language-model objective.

    head(model, hidden [B,S,H], MTP hidden per depth, batch, weights) -> (loss, numbers to log): the last stage's term of the
    loss; weights are the micro-batch's, as given to Pipeline.run.
    """

    head: Callable[[nn.Module, Tensor, list[Tensor], Batch, Mapping[str, float]], tuple[Tensor, dict[str, Any]]]
    attention: str = "dense"
    mtp_depth: int = 0
    balance_coef: float = 0.0
    index_rows: int | str | None = None
    index_coef: float = 1.0
    rows_seed: int = 0
    rows_of: tuple[int, ...] = (0, 1)
    recompute: bool = False


class RankModel(nn.Module):
    """The modules of some stages, under the names that they have in GlmMoeDsa.

    whole: the model whose modules they are, weights and all; None makes them anew, uninitialised: init or load them.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        specs: Sequence[StageSpec],
        device: torch.device | str = "cpu",
        whole: GlmMoeDsa | None = None,
    ) -> None:
        super().__init__()
        self.cfg, self.specs = cfg, list(specs)
        new = whole is None
        if whole is None:
            with torch.device("meta"):
                whole = GlmMoeDsa(cfg)
        needed = {name for name in whole.state_dict() if any(stage_names(cfg, s, name) for s in specs)}
        self.model = nn.Module()
        if "model.embed_tokens.weight" in needed:
            self.model.embed_tokens = whole.model.embed_tokens
        self.model.layers = nn.ModuleDict()
        for i, layer in enumerate(whole.model.layers):
            if any(i in s.layers or (s.mtp and i >= cfg.num_hidden_layers) for s in specs):
                if i >= cfg.num_hidden_layers and not any(s.head for s in specs):
                    layer = _without(layer, "shared_head")
                self.model.layers[str(i)] = layer
            elif i >= cfg.num_hidden_layers and any(s.head for s in specs):
                self.model.layers[str(i)] = nn.Module()
                self.model.layers[str(i)].shared_head = layer.shared_head
        if any(s.norm for s in specs):
            self.model.norm = whole.model.norm
        if any(s.head for s in specs):
            self.lm_head = whole.lm_head
        if new:
            self.to_empty(device=device)
            if cfg.tie_word_embeddings and any(s.head for s in specs):
                self.lm_head.weight = self.model.embed_tokens.weight
        buffers = {name for name, _ in self.named_buffers()} - set(self.state_dict())
        assert not buffers, f"buffers outside the state have no values here: {buffers}"
        assert set(self.state_dict()) == needed

    def init_weights(self, seed: int) -> RankModel:
        """The values that GlmMoeDsa.init_weights(seed) gives these parameters. Returns self."""
        GlmMoeDsa.init_weights(self, seed)
        return self

    def load(self, state: Mapping[str, Tensor]) -> RankModel:
        """Take this rank's part of a whole model's state. Returns self; ValueError names what is missing."""
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"the state lacks {', '.join(missing[:3])} (and {len(missing)} in all)")
        self.load_state_dict({name: state[name] for name in self.state_dict()})
        return self

    def parameters_of(self, spec: StageSpec) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.named_parameters() if stage_names(self.cfg, spec, n)}

    def mtp_layers(self) -> list[nn.Module]:
        first, count = self.cfg.num_hidden_layers, self.cfg.num_nextn_predict_layers
        return [self.model.layers[str(i)] for i in range(first, first + count)]


def _without(module: nn.Module, name: str) -> nn.Module:
    """A module with the same children and tensors but one, which `module` itself keeps."""
    found = copy.copy(module)
    found._modules = {key: child for key, child in module._modules.items() if key != name}
    return found


class _Entry(torch.autograd.Function):
    """Lets a received tensor into the graph: its gradient goes to `box`, and no leaf keeps its values alive."""

    @staticmethod
    def forward(ctx, handle, x, box):
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.box.append(gradient)
        return gradient.new_zeros(()), None, None


class _Exit(torch.autograd.Function):
    """A zero that stands for a sent tensor: in backward it takes the received gradient from `box`. Its values are not kept."""

    @staticmethod
    def forward(ctx, out, box):
        ctx.box = box
        return out.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.box.pop(), None


@dataclass
class _Passed:
    """One micro-batch between its forward and its last backward operation."""

    held: Held
    batch: Batch
    share: float
    weights: Mapping[str, float]
    root: Tensor | None = None
    handle: Tensor | None = None
    kept_input: int | None = None
    gradient_in: list[Tensor] = field(default_factory=list)
    gradient_out: list[Tensor] = field(default_factory=list)
    queue: WeightQueue | None = None


class ModelStage:
    """Runs one virtual stage. `split`: backward leaves the weight gradients to `weight`.

    After a run: `loss` (this stage's terms), `logs` (numbers), `counts` {MoE layer: tokens per expert}.
    """

    def __init__(self, local: RankModel, spec: StageSpec, ledger: Ledger, split: bool, stream: Any = None) -> None:
        self.local, self.spec, self.ledger, self.split, self.stream = local, spec, ledger, split, stream
        self.parameters = local.parameters_of(spec)
        self.passed: dict[int, _Passed] = {}

    def begin(self, work: Work) -> None:
        """Start a step. The weights that modules hold now are the ones this step computes with."""
        assert not self.passed, "the step before left micro-batches behind"
        self.work = work
        self.loss, self.logs, self.counts = 0.0, Counter(), {}
        self.weights = {storage_of(p) for p in self.local.parameters()}
        self.weights |= {storage_of(b) for b in self.local.buffers()}
        for module in self.local.modules():  # copies in another precision, see tasks.trainer.computing_in
            self.weights |= {storage_of(p) for p in module._parameters.values() if p is not None}

    # ---- the operations

    def forward(
        self, micro: int, x: Tensor | None, batch: Batch, share: float, weights: Mapping[str, float] = EVEN
    ) -> Tensor | None:
        """Activations for the next stage, without graph (None on the last). x: what the stage before sent, or None.

        share: of the micro-batch's loss in the step's. weights: of its terms that are means over something else; "rows" is
        that of the balance and indexer losses.
        """
        constants = self.weights | {storage_of(t) for t in batch.values()}
        now = self.passed[micro] = _Passed(Held(self.ledger, constants), batch, share, weights)
        if not self.work.recompute:
            return self._run(now, x)
        if x is not None:
            now.kept_input = now.held.keep(x)
        with torch.no_grad():
            out, _, _, _ = self._compute(x, batch, weights)
        return out

    def backward(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """Gradient for the stage before (None on the first). gradient: what the next stage sent, or None."""
        now = self.passed[micro]
        if self.work.recompute:
            self._run(now, None if now.kept_input is None else now.held.get(now.kept_input))
        if gradient is not None:
            now.gradient_out.append(gradient)
        root, now.root = now.root, None
        if root is not None and self.split:
            self._split_backward(now, root)
        elif root is not None:
            root.backward()
        del root
        if self.split:
            kept = self._waiting(now)
            new = self.ledger.uncounted(kept)
            self.ledger.add_bytes("deferred", new)  # for a moment both are there
            now.held.release()
            self.ledger.add_bytes("deferred", -new)
            self.ledger.add("deferred", kept)
        else:
            now.held.release()
            del self.passed[micro]
        return now.gradient_in.pop() if now.gradient_in else None

    def weight(self, micro: int) -> None:
        """The weight gradients that `backward` left."""
        now = self.passed.pop(micro)
        kept = self._waiting(now)
        now.queue.run()
        self.ledger.drop(kept)

    def _waiting(self, now: _Passed) -> list[Tensor]:
        return [t for t in now.queue.kept() if storage_of(t) not in self.weights]

    def offload(self, micro: int) -> None:
        self.passed[micro].held.offload(self.stream)

    def load(self, micro: int) -> None:
        self.passed[micro].held.load(self.stream)

    # ---- how

    def _run(self, now: _Passed, x: Tensor | None) -> Tensor | None:
        """Forward with graph; keeps the root of its backward pass and collects loss, logs and counts."""
        now.queue = WeightQueue() if self.split else None
        with now.held, deferring(now.queue):
            if x is not None:
                now.handle = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
                x = _Entry.apply(now.handle, x, now.gradient_in)
            out, loss, logs, counts = self._compute(x, now.batch, now.weights)
            terms = []
            if loss is not None:
                terms.append(loss * now.share)
                self.loss += float(loss.detach()) * now.share
            if out is not None and out.requires_grad:
                terms.append(_Exit.apply(out, now.gradient_out))
            if terms:
                now.root = torch.stack([t.float() if t.dtype != torch.float64 else t for t in terms]).sum()
                now.root = now.root if now.root.requires_grad else None
        for key, value in logs.items():
            self.logs[key] += float(value) * now.share
        for layer, counts_e in counts.items() if now.share else ():  # a micro-batch that fills up a step does not count
            self.counts[layer] = self.counts[layer] + counts_e if layer in self.counts else counts_e
        return None if out is None else out.detach()

    def _split_backward(self, now: _Passed, root: Tensor) -> None:
        """Input gradients now; what came out for parameters on the way (norms, biases, the head) waits with the rest."""
        params = [p for p in self.parameters.values() if p.requires_grad]
        # There is no parameter beyond the entry: its handle is one more input, so that the pass goes that far. The graph is
        # kept because weights that are functions of parameters (joined, or in another precision) are passed through again.
        entry = [] if now.handle is None else [now.handle]
        gradients = torch.autograd.grad(root, params + entry, allow_unused=True, retain_graph=True)
        for param, gradient in zip(params, gradients):
            if gradient is not None:
                now.queue.put((param,), _as_is, (gradient,))

    def _compute(
        self, x: Tensor | None, batch: Batch, weights: Mapping[str, float]
    ) -> tuple[Tensor | None, Tensor | None, dict, dict]:
        """(out, loss term, logs, counts by layer); mirrors GlmMoeDsa.forward for this stage's modules."""
        local, spec, work, cfg = self.local, self.spec, self.work, self.local.cfg
        ids_bs = batch["input_ids_bs"]
        positions_bs = torch.arange(ids_bs.shape[1], device=ids_bs.device)[None]
        cis_bsr = rope_cis(positions_bs, cfg.qk_rope_head_dim, cfg.rope_theta)
        mask_bs = batch.get("token_mask_bs")
        args = BlockArgs(work.attention, False, token_mask_bs=mask_bs)
        if work.index_rows is not None:
            rows_of = (*work.rows_of, int(batch.get("first_row", 0)))
            args.rows_br = GlmMoeDsa._draw_rows(work.index_rows, work.rows_seed, *ids_bs.shape, rows_of)
            args.rows_br = args.rows_br.to(ids_bs.device)
            args.row_weight_br = torch.ones(args.rows_br.shape, device=ids_bs.device)
            if mask_bs is not None:
                args.row_weight_br = mask_bs.gather(1, args.rows_br).float()
        results: list[tuple[int, Any, float]] = []  # layer, result, weight of its losses
        hidden = local.model.embed_tokens(ids_bs) if spec.embed else x
        depths: list[Tensor] = []
        if spec.head and not spec.norm:  # the MTP block ran one stage earlier
            hidden, *depths = x.unbind(0)
        masks = None
        for layer in spec.layers:
            result = local.model.layers[str(layer)](hidden, cis_bsr, args, masks)
            hidden, masks = result.hidden_bsh, result.masks
            results.append((layer, result, 1.0))
        if spec.norm:
            hidden = local.model.norm(hidden)
        if spec.mtp and work.mtp_depth:
            layers, previous, ids = local.mtp_layers(), hidden, ids_bs
            for k in range(work.mtp_depth):
                which = min(k, len(layers) - 1)
                layer = layers[which]
                ids = torch.cat([ids[:, 1:], ids.new_zeros(ids.shape[0], 1)], dim=1)
                result = layer(layer.merge(local.model.embed_tokens(ids), previous), cis_bsr, args)
                previous = result.hidden_bsh
                depths.append(previous)
                results.append((cfg.num_hidden_layers + which, result, 1.0 / work.mtp_depth))
        counts: dict[int, Tensor] = {}
        terms, logs = [], {}
        for layer, result, weight in results:
            if result.counts_e is not None:
                counts[layer] = counts[layer] + result.counts_e if layer in counts else result.counts_e
            for name, coef, part in (
                ("balance_loss", work.balance_coef, result.aux_loss),
                ("index_kl", work.index_coef if work.index_rows is not None else 0.0, result.index_loss),
            ):
                if coef and part is not None:
                    part = weight * weights.get("rows", 1.0) * part
                    terms.append(coef * part)
                    logs[name] = logs.get(name, 0.0) + part.detach()
        if not spec.head:
            out = torch.stack([hidden, *depths]) if spec.norm else hidden
            return out, sum(terms) if terms else None, logs, counts
        layers = local.mtp_layers() if depths else []
        normed = [layers[min(k, len(layers) - 1)].shared_head.norm(h) for k, h in enumerate(depths)]
        loss, numbers = work.head(local, hidden, normed, batch, weights)
        return None, sum(terms, loss), logs | numbers, counts


def _as_is(gradient: Tensor) -> tuple[Tensor]:
    return (gradient,)
