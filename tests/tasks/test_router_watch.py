"""Load statistics: right numbers for known loads, alarms for experts that starve, the same after a resume."""

import math

import pytest
import torch

from tasks.router_watch import RouterWatch, moe_layers
from tests.tasks.lm_case import micro_model


def watch(window=4, lines=None, layers=(3, 5)):
    return RouterWatch(layers, window, 0.05, (lines if lines is not None else []).append)


def test_curves_of_known_loads():
    logs = watch().add([torch.tensor([25, 25, 25, 25]), torch.tensor([50, 50, 0, 0])])
    assert logs["router/layer_3/max_load"] == 1 and logs["router/layer_3/entropy"] == pytest.approx(1)
    assert logs["router/layer_5/max_load"] == 2
    assert logs["router/layer_5/entropy"] == pytest.approx(math.log(2) / math.log(4))
    assert "router/layer_3/dead_share" not in logs, "no window has passed"
    assert watch().add([torch.tensor([7, 0, 0, 0])])["router/layer_3/entropy"] == 0


def test_dead_experts_raise_an_alarm_that_names_them():
    lines = []
    one = watch(lines=lines)
    load = torch.tensor([400, 398, 2, 0])
    for _ in range(4):
        logs = one.add([torch.tensor([200, 200, 200, 200]), load])
    assert logs["router/layer_3/dead_share"] == 0 and logs["router/layer_5/dead_share"] == 0.5
    assert len(lines) == 1 and one.alarms == 2
    assert lines[0].startswith("warning: dead experts in layer 5 (4 steps") and "expert 2 1.0%" in lines[0]
    assert "expert 3 0.0%" in lines[0]
    for _ in range(3):
        one.add([load, load])
    assert len(lines) == 1, "the next window is not over"


def test_small_loads_are_no_evidence():
    lines = []
    one = watch(lines=lines)
    for _ in range(8):
        one.add([torch.tensor([8, 0, 0, 0])])
    assert not lines


def test_a_layer_that_runs_now_and_then_has_its_own_window():
    lines = []
    one = watch(lines=lines)
    for step in range(8):
        counts = [torch.tensor([100, 100])] + ([torch.tensor([400, 0])] if step % 2 else [])
        one.add(counts)
    assert len(lines) == 1 and "layer 5 (4 steps" in lines[0]


@pytest.mark.parametrize("cut", [1, 4, 6])
def test_resumed_watch_says_the_same(cut):
    generator = torch.Generator().manual_seed(0)
    loads = [torch.tensor([300, 5, 300, 300]) + torch.randint(0, 6, (4,), generator=generator) for _ in range(10)]
    whole, parts = [], []
    one = watch(lines=whole)
    expected = [one.add([load]) for load in loads]
    two = watch(lines=parts)
    found = [two.add([load]) for load in loads[:cut]]
    three = watch(lines=parts)
    three.load_state(two.state())
    found += [three.add([load]) for load in loads[cut:]]
    assert found == expected and parts == whole and three.alarms == one.alarms > 0


def test_layers_are_named_by_their_number_in_the_model():
    assert moe_layers(micro_model()) == [1, 2], "one dense layer, one MoE layer, the MTP layer"
