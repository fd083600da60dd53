"""A model and optimizer state whose every element is known, spread over ranks in any way: for the tests of checkpoints."""

from pathlib import Path

import torch

from model.muon import OptimConfig, build_optimizer
from model.state_parts import gather_pieces
from tasks.model_parallel import apply_parallelism
from tasks.parallel import ParallelSettings, current
from tasks.parallel_engine import make_engine
from tasks.resume import ResumeStore
from tests.tasks.lm_case import micro_model


def reference(muon="split", seed=0, dtype=torch.float32):
    """(weights, state) of one process: random, and no two tensors alike."""
    generator = torch.Generator().manual_seed(seed)
    model = micro_model().to(dtype)
    weights = {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in model.state_dict().items()}
    state = {}
    for group in build_optimizer(model, OptimConfig(muon=muon)).param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            for slot in ("momentum_buffer",) if group["kind"] == "muon" else ("exp_avg", "exp_avg_sq"):
                state[f"{name}.{slot}"] = torch.rand(p.shape, generator=generator).to(dtype)
            if group["kind"] == "adamw":
                state[f"{name}.step"] = torch.tensor(float(seed + 3))
    return weights, state


class Spread:
    """This rank's model, layout, optimizer and store."""

    def __init__(self, folder, settings=None, muon="split", dtype=torch.float32, **options):
        settings = settings or ParallelSettings()
        self.ranks = current()
        self.model = micro_model().to(dtype)
        self.layout = apply_parallelism(self.model, settings, self.ranks)
        plain = build_optimizer(self.model, OptimConfig(muon=muon))
        self.optimizer = make_engine(self.model, plain, self.ranks, settings, self.layout) or plain
        self.lines = []
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.store = ResumeStore(Path(folder), 2, self.lines.append, ranks=self.ranks, **options)

    def fill(self, weights, state):
        self.layout.load_weights(self.model, weights)
        self.optimizer.load_state_tensors(state)
        return self

    def files(self):
        return {"model": self.layout.owned_weights(self.model), "optimizer": self.optimizer.owned_state()}

    def save(self, step, **options):
        self.store.save(step, self.files(), {"step": step}, **options)

    def load(self):
        """Of the newest checkpoint: its step, all weights and state (on the first rank), bytes read here."""
        found = self.store.load()
        self.layout.load_weights(self.model, found.files["model"])
        self.optimizer.load_state_tensors(found.files["optimizer"])
        read = {stem: source.bytes_read for stem, source in found.files.items()}
        if self.ranks.world == 1:
            own = self.files()
            whole = [{p.name: p.values for p in own[stem]} for stem in ("model", "optimizer")]
        else:
            whole = [gather_pieces(pieces, self.ranks.control) for pieces in self.files().values()]
        return found.step, whole[0], whole[1], read
