"""Every pipeline technique against one process: loss, all gradients, router counts; and what is held when."""

import functools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kernels.cross_entropy import linear_cross_entropy
from model.pipeline import Grid, Pipeline
from model.pipeline_place import allowed_cuts, place
from model.pipeline_schedule import build, in_flight, with_offload, with_reductions
from model.pipeline_stage import Work
from model.transformer import GlmMoeDsa
from tasks.objectives import LanguageModeling
from tests.model.ranks import run_ranks
from tests.model.sizes import micro, spread

ROWS, SIZE = 2, 12
BALANCE = 0.03


def config(**changes):
    return micro(num_hidden_layers=5, **changes)


def head(depth_weight, model, hidden, depths, batch, weights):
    from tasks.objectives import shift_targets

    def loss(h, targets):
        return linear_cross_entropy(h.flatten(0, 1), model.lm_head.weight, targets.flatten())

    total = main = loss(hidden, batch["targets_bs"])
    if depths:
        parts = [loss(h, shift_targets(batch["targets_bs"], k)) for k, h in enumerate(depths, 1)]
        total = total + depth_weight * torch.stack(parts).mean()
    return total, {"lm_loss": main.detach()}


def batches(count, vocab=96):
    generator = torch.Generator().manual_seed(3)
    found = []
    for i in range(count):
        ids = torch.randint(3, vocab, (ROWS, SIZE + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, : i % 4] = -100
        found.append({"input_ids_bs": ids[:, :-1].contiguous(), "targets_bs": targets})
    weights = [float((b["targets_bs"] != -100).sum()) for b in found]
    return found, [w / sum(weights) for w in weights]


def one_process(cfg, micros, attention, depth, rows):
    """Loss, logs, router counts and gradients of the whole model by the objective that the stages train with."""
    model = spread(GlmMoeDsa(cfg))
    objective = LanguageModeling(
        attention, depth, mtp_lambda=0.3, balance_coef=BALANCE, index_rows=rows, index_coef=0.7, row_seed=5
    )
    loss, counts = 0.0, None
    data, shares = batches(micros)
    for batch, share in zip(data, shares):
        part, logs = objective(model, batch, 0)
        (part * share).backward()
        loss += float(part.detach()) * share
        new = logs["router_counts"]
        counts = new if counts is None else [a + b for a, b in zip(counts, new)]
    return loss, counts, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, model.state_dict()


def check_rank(rank, world, case, reference):
    """One rank of one case; raises when its loss, counts or gradients are not the reference's."""
    loss, counts, gradients, state = reference
    cfg, options = case["cfg"], case["options"]
    grid = Grid.create(case["pipeline"])
    schedule = build(case["name"], ranks=case["pipeline"], micros=case["micros"] // grid.data, virtual=case["virtual"])
    schedule = with_reductions(schedule) if options.get("shards") else schedule
    schedule = with_offload(schedule) if options.get("offload") else schedule
    specs = place(
        cfg.num_hidden_layers,
        schedule.stages,
        mtp=cfg.num_nextn_predict_layers > 0,
        flexible=options.get("flexible", True),
        cuts=allowed_cuts(cfg),
    )
    pipe = Pipeline(cfg, schedule, specs, grid)
    pipe.local.load(state)
    data, shares = batches(case["micros"])
    mine = slice(grid.replica * schedule.micros, (grid.replica + 1) * schedule.micros)
    work = Work(
        functools.partial(head, 0.3),
        *(case[k] for k in ("attention", "depth")),
        BALANCE,
        case["rows"],
        0.7,
        5,
        recompute=options.get("recompute", False),
    )
    result = pipe.run(work, data[mine], shares[mine])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert [c.tolist() for c in result.router_counts] == [c.tolist() for c in counts]
    found = pipe.whole_gradients()
    held = {n for n, p in pipe.local.named_parameters()}
    assert set(found) == held & set(gradients), set(found) ^ (held & set(gradients))
    for n, gradient in found.items():
        limit = 1e-5 * float(gradients[n].abs().max())
        torch.testing.assert_close(gradient, gradients[n], rtol=1e-5, atol=limit, msg=lambda m, n=n: f"{n}: {m}")
    assert pipe.ledger.now["activations"] == pipe.ledger.now["deferred"] == pipe.ledger.host == 0
    full = sum(p.numel() for n, p in pipe.local.named_parameters() if n not in pipe.shared and n in gradients)
    return {
        "names": sorted(found),
        "most": dict(pipe.ledger.most),
        "host": pipe.ledger.host_peak,
        "in_flight": in_flight(schedule)[grid.place],
        "gradient_bytes": 4 * full,
        "stage_bytes": [4 * sum(p.numel() for p in s.values()) for s in pipe.gradients.stages.values()],
        "reductions": getattr(pipe.gradients, "reductions", 0),
        "placement": [str(s) for s in specs],
    }


def check_cases(rank, world, cases, file):
    """Several cases in one start of the ranks, which costs more than any of them."""
    found, references = {}, torch.load(file)
    for label, case in cases.items():
        try:
            found[label] = check_rank(rank, world, case, references[case["key"]])
        except Exception as error:
            raise AssertionError(f"case {label!r} on rank {rank}") from error
    return found


def case(name, virtual, micros, pipeline, *, cfg=None, attention="dense", depth=2, rows=None, **options):
    values = locals() | {"cfg": config() if cfg is None else cfg}
    values["key"] = repr((values["cfg"], micros, attention, depth, rows))
    return values


def run(world, cases, tmp_path):
    """{case: [each rank's findings]}; every parameter's gradient was compared on some rank."""
    references = {
        c["key"]: one_process(c["cfg"], c["micros"], c["attention"], c["depth"], c["rows"]) for c in cases.values()
    }
    file = tmp_path / "references.pt"
    torch.save(references, file)
    ranks = [check_cases(0, 1, cases, file)] if world == 1 else run_ranks(world, check_cases, cases, file)
    for label, c in cases.items():
        assert {n for r in ranks for n in r[label]["names"]} == set(references[c["key"]][2]), label
    return {label: [r[label] for r in ranks] for label in cases}


TWO_RANKS = {
    "gpipe": case("gpipe", 1, 4, 2),
    "1f1b": case("1f1b", 1, 4, 2),
    "zero bubble": case("zero_bubble", 2, 4, 2),
    "zero bubble, one stage per rank": case("zero_bubble", 1, 5, 2),
    "recompute and deferral": case("zero_bubble", 2, 4, 2, recompute=True),
    "shards": case("interleaved", 2, 8, 2, shards=True),
    "MTP with its head": case("interleaved", 2, 4, 2, flexible=False),
    "no MTP step": case("interleaved", 2, 4, 2, depth=0),
    "no MTP layer": case("1f1b", 1, 4, 2, cfg=config(num_nextn_predict_layers=0), depth=0),
    "one MTP layer per depth": case("interleaved", 2, 4, 2, cfg=config(num_nextn_predict_layers=2), depth=3),
    "tied embeddings": case("interleaved", 2, 4, 2, cfg=config(tie_word_embeddings=True)),
    "indexer": case("interleaved", 2, 4, 2, attention="sparse", rows=4),
    "shared selections": case(
        "1f1b",
        1,
        4,
        2,
        cfg=config(indexer_types=("full", "shared", "full", "shared", "shared")),
        attention="sparse",
        rows=4,
        flexible=False,
    ),
    "other attentions": case(
        "zero_bubble", 2, 4, 2, cfg=config(layer_types=("full", "swa", "gdn", "simple_gdn", "full"), sliding_window=5)
    ),
}
DEEP = micro(num_hidden_layers=7)
FOUR_RANKS = {
    "eight stages on four ranks": case("interleaved", 2, 8, 4, cfg=DEEP),
    "deferred and offloaded": case("zero_bubble", 2, 8, 4, cfg=DEEP, offload=True),
    "2 x 2, whole gradients": case("interleaved", 2, 8, 2),
    "2 x 2, three stages per rank": case("interleaved", 3, 8, 2, cfg=DEEP, shards=True),
    "2 x 2, everything": case(
        "zero_bubble", 2, 8, 2, shards=True, offload=True, recompute=True, attention="sparse", rows=4
    ),
}


def test_two_ranks_equal_one_process(tmp_path):
    found = run(
        2,
        {
            "interleaved": case("interleaved", 2, 4, 2),
            "offload": case("interleaved", 2, 4, 2, offload=True),
            "recompute": case("interleaved", 2, 4, 2, recompute=True),
            "indexer, everything on": case(
                "zero_bubble", 2, 4, 2, attention="sparse", rows="all", shards=True, offload=True
            ),
        },
        tmp_path,
    )
    assert found["interleaved"][0]["placement"] == ["embed+0-1", "2-3", "4+mtp", "head"]
    # The first rank holds five micro-batches; with offload never more than two of them at once.
    plain, moved = found["interleaved"][0], found["offload"][0]
    assert plain["in_flight"] == 5 and moved["in_flight"] == 2 and plain["host"] == 0 < moved["host"]
    assert moved["most"]["activations"] < 0.6 * plain["most"]["activations"]
    assert found["recompute"][0]["most"]["activations"] < 0.6 * plain["most"]["activations"]


def test_four_ranks_equal_one_process(tmp_path):
    cases = {"four stages in a row": case("1f1b", 1, 6, 4), "2 x 2, shards": case("interleaved", 2, 8, 2, shards=True)}
    check_shards(run(4, cases, tmp_path)["2 x 2, shards"])


def check_shards(ranks):
    for rank in ranks:
        stages = rank["stage_bytes"]
        # two full buffers as large as the largest stage, and half of every stage
        assert rank["most"]["gradients"] == 2 * -(-max(stages) // 8) * 8 + sum(-(-s // 8) * 4 for s in stages)
        assert rank["reductions"] == len(stages) * 8 // 2 // 2  # once per stage and group of two micro-batches


@pytest.mark.slow
def test_more_cases_on_two_ranks(tmp_path):
    found = run(2, TWO_RANKS, tmp_path)
    assert found["MTP with its head"][0]["placement"][-1].endswith("mtp+head")


@pytest.mark.slow
def test_more_cases_on_four_ranks(tmp_path):
    check_shards(run(4, FOUR_RANKS, tmp_path)["2 x 2, three stages per rank"])


class Alive(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive, found by weak references."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.known[storage._cdata] = weakref.ref(storage)
        return out

    def bytes(self):
        alive = [(key, ref()) for key, ref in self.known.items()]
        self.known = {key: self.known[key] for key, storage in alive if storage is not None}
        return {key: storage.nbytes() for key, storage in alive if storage is not None}


@pytest.mark.parametrize("split, offload", [(False, True), (True, False), (True, True)])
def test_the_ledger_counts_what_is_alive(split, offload):
    """Beside what the ledger lists, only weights, gradients, batches and messages between stages exist."""
    cfg, micros = config(), 3
    schedule = build("zero_bubble" if split else "gpipe", ranks=1, micros=micros, virtual=3)
    schedule = with_offload(schedule) if offload else schedule
    pipe = Pipeline(cfg, schedule, place(5, 3, mtp=True), Grid(1, 1, 0, 0))
    data, shares = batches(micros)
    work = Work(functools.partial(head, 0.3), "dense", 2, BALANCE)
    found, alive = [], Alive()

    class Look(list):
        def append(self, event):
            op = event[0]
            live = alive.bytes()
            for p in pipe.local.parameters():
                live.pop(p.untyped_storage()._cdata, None)
                if p.grad is not None:
                    live.pop(p.grad.untyped_storage()._cdata, None)
            counted = pipe.ledger.now["activations"] + pipe.ledger.now["deferred"] + pipe.ledger.host
            found.append((str(op), sum(live.values()) - counted))

    pipe.trace = Look()
    pipe.local.init_weights(0)
    with alive:
        pipe.run(work, data, shares)
    message = ROWS * SIZE * cfg.hidden_size * 4 * 3  # hidden states of the main model and of two depths
    assert pipe.ledger.most["activations"] + pipe.ledger.host_peak > 20 * message
    for op, more in found:
        assert 0 <= more <= message * (micros + 2), (op, more, found)


def test_one_rank_with_several_stages(tmp_path):
    run(
        1,
        {
            "interleaved": case("interleaved", 3, 4, 1),
            "zero bubble": case("zero_bubble", 2, 4, 1, recompute=True, offload=True),
        },
        tmp_path,
    )


def test_sizes_that_do_not_fit():
    cfg = config()
    with pytest.raises(ValueError, match="2 ranks and 4 stages, the grid 1 ranks"):
        Pipeline(cfg, build("interleaved", ranks=2, micros=4, virtual=2), place(5, 4, mtp=True), Grid(1, 1, 0, 0))
    pipe = Pipeline(cfg, build("gpipe", ranks=1, micros=4), place(5, 1, mtp=True), Grid(1, 1, 0, 0))
    with pytest.raises(ValueError, match="for 4 micro-batches, got 3"):
        pipe.run(Work(functools.partial(head, 0.3)), *(x[:3] for x in batches(4)))
    with pytest.raises(ValueError, match="lacks model.embed_tokens.weight"):
        pipe.local.load({n: p for n, p in pipe.local.state_dict().items() if "embed" not in n})
