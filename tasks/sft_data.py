"""SFT data: worked problems of every family and short chat, rendered with the GLM-5 template, tokenized with a loss mask.

All families are mixed in one set, because a task that SFT leaves out cannot be brought back by the RL and distillation
that follow (a policy explores only what it already does now and then).

Everything passes a gate: no conversation holds a held-out problem (tasks/problem_gate.py) or a passage of an evaluation set
(tasks/overlap.py: what conf/corpus.yaml marks as evaluation material, `optional_items`), and no worked problem asks what a
held-out one does; nor does any of the first `rl_problems` that RL draws of each family. What is found is left out, counted in
metrics/sft_data.json and named in data/sft_data/leaks.jsonl.

    dvc repro sft_data          python -m tasks sft_data
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks import chat, decontaminate
from tasks.problem_gate import ProblemGate, evaluated, known_families
from tasks.problems import build, mix, samples
from tasks.sft_set import CHAT, SftWriter
from tasks.stage import Stage, StageConfig


class FamilyShare(StageConfig):
    """How much of one family goes in."""

    train: int = Field(ge=1, description="worked problems of the train split")
    heldout: int = Field(32, ge=1, description="worked problems of the held-out split, for the validation loss")
    options: dict[str, Any] = Field(default_factory=dict, description="fields of the family: ranges, lengths")


class Config(StageConfig):
    families: dict[str, FamilyShare] = Field(description="problem families by name")
    chat_pairs: int = Field(0, ge=0, description="short conversations out of the acquired corpus, 0 for none")
    chat_glob: str = Field("**/chatterbot_corpus/data/english/*.yml", description="where they are, below files/")
    chat_max_chars: int = Field(80, ge=10, description="longest turn of a conversation that is taken")
    heldout_of_ten: int = Field(1, ge=1, le=5, description="tenths of the conversations kept for validation")
    heldout_problems: int = Field(200, ge=0, description="held-out problems of each family that the gate searches for")
    rl_problems: int = Field(1000, ge=0, description="problems of each family, as RL draws them, that pass the gate")
    optional_items: tuple[str, ...] = Field((), description="evaluation sets read where they exist (see decontaminate)")


def conversations(root: Path, pattern: str, max_chars: int) -> Iterator[tuple[str, list[str]]]:
    """(where, turns) of the YAML conversation files below `root`; long turns end a conversation before them.

    Raises ValueError naming the file when it is not such a file.
    """
    import yaml

    for path in sorted(Path(root).glob(pattern)):
        where = path.relative_to(root).as_posix()
        try:
            # the base loader keeps every scalar a string: "Yes" is an answer, not a boolean
            entries = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)["conversations"]
        except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: expected a YAML mapping with a list 'conversations' ({error})") from error
        for number, turns in enumerate(entries):
            turns = [" ".join(str(turn).split()) for turn in turns or []]
            short = next(
                (i for i, turn in enumerate(turns) if not 0 < len(turn) <= max_chars or "<" in turn), len(turns)
            )
            if short >= 2:
                yield f"{where}:{number}", turns[: short - short % 2]


def chat_messages(turns: list[str]) -> list[dict[str, str]]:
    """Alternating user and assistant messages."""
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


class Gate:
    """What must not be trained on, and what was found of it: `leaks` are (where, items, text)."""

    def __init__(self, stage: Stage) -> None:
        config: Config = stage.config
        self.families = known_families({name: share.options for name, share in config.families.items()})
        self.problems = ProblemGate()
        for name, text in evaluated(self.families, config.heldout_problems):
            self.problems.add(name, text)
        listed = (stage.dep(decontaminate.ACQUIRED) / "index.parquet").is_file()  # of which files are for evaluation
        sets = decontaminate.Config(
            items=(decontaminate.ACQUIRED,) if listed else (), optional_items=config.optional_items
        )
        extra, self.optional = decontaminate.read_all_items(stage, sets)
        self.items = decontaminate.build_index(sets.model_copy(update={"heldout_problems": False}), extra)
        self.leaks: list[dict[str, Any]] = []
        self.searched: dict[str, int] = {}

    def passes(self, where: str, found: list[str], text: str) -> bool:
        """Count one text that was searched; False when something was found in it."""
        kind = where.partition(":")[0]
        self.searched[kind] = self.searched.get(kind, 0) + 1
        if found:
            self.leaks.append({"where": where, "items": found, "text": text[:200]})
        return not found

    def conversation(self, where: str, messages: list[dict[str, str]]) -> bool:
        """Whether a conversation holds none of the items."""
        text = "\n".join(m["content"] for m in messages)
        found = {hit.item for hit in self.items.search(text)}
        return self.passes(where, sorted(found.union(self.problems.find_in(messages))), text)

    def problem(self, where: str, problem: Any) -> bool:
        """Whether a problem is none of the held-out ones."""
        return self.passes(where, self.problems.find_problem(problem), problem.key)

    def metrics(self) -> dict[str, Any]:
        """Items, texts searched and leaks found, by kind of text."""
        kinds = [leak["where"].partition(":")[0] for leak in self.leaks]
        return {
            "items": len(self.problems.names) + len(self.items.names),
            "searched": dict(sorted(self.searched.items())),
            "leaks": {kind: kinds.count(kind) for kind in sorted(self.searched)},
            "optional_items": self.optional,
        }


def run(stage: Stage) -> None:
    """Write train/, heldout/, families.json and examples.txt (one of each family, as text)."""
    from tokenizers import Tokenizer

    config: Config = stage.config
    tokenizer = Tokenizer.from_file(str(stage.dep("data/tokenizer") / "tokenizer.json"))
    out = stage.out("data/sft_data")
    names = [*config.families, CHAT]
    writers = {split: SftWriter(names, tokenizer.get_vocab_size()) for split in ("train", "heldout")}
    examples = []
    gate = Gate(stage)

    def add(split: str, family: str, messages: list[dict[str, Any]]) -> None:
        ids, mask = chat.render_tokens(tokenizer, messages, close=True)
        writers[split].add(family, ids, mask)

    for name, share in config.families.items():
        family = build(name, **share.options)
        for split, count in (("train", share.train), ("heldout", share.heldout)):
            drawn = samples(family, split, 0, count)
            for i, problem in enumerate(stage.progress(drawn, label=f"{name} {split}")):
                if split == "train" and not gate.problem(f"problems:{name}:{i}", problem):
                    continue
                add(split, name, [*problem.messages, *problem.solution])
        examples.append(chat.render([*drawn[0].messages, *drawn[0].solution], close=True))

    counts = {"train": 0, "heldout": 0}
    found = conversations(stage.dep("data/acquire") / "files", config.chat_glob, config.chat_max_chars)
    for where, turns in sorted(found, key=lambda item: mix(stage.seed, item[0])) if config.chat_pairs else ():
        if counts["train"] >= config.chat_pairs:
            break
        if not gate.conversation(f"{CHAT}:{where}", chat_messages(turns)):
            continue
        split = "heldout" if mix(CHAT, turns[0].lower()) % 10 < config.heldout_of_ten else "train"
        counts[split] += 1
        add(split, CHAT, chat_messages(turns))
        if sum(counts.values()) == 1:
            examples.append(chat.render(chat_messages(turns), close=True))
    if config.chat_pairs and not counts["train"]:
        stage.print(f"no conversations match files/{config.chat_glob}: the set has problems only")

    for family in gate.families:
        for i, problem in enumerate(samples(family, "train", 0, config.rl_problems)):
            gate.problem(f"rl:{family.name}:{i}", problem)
    lines = (json.dumps(leak, ensure_ascii=False, sort_keys=True) + "\n" for leak in gate.leaks)
    (out / "leaks.jsonl").write_text("".join(lines), encoding="utf-8")
    written = {split: writer.write(out / split, stage.rng_seed("order", split)) for split, writer in writers.items()}
    families = {name: share.options for name, share in config.families.items()}
    (out / "families.json").write_text(json.dumps({"names": names, "options": families}, indent=2) + "\n")
    (out / "examples.txt").write_text("\n\n".join(examples) + "\n", encoding="utf-8")
    stage.rows(**{f"{split}_{key}": value for split, numbers in written.items() for key, value in numbers.items()})
    per_family = {name: sum(names[f] == name for f, *_ in writers["train"].rows) for name in names}
    stage.metric(**written, families=per_family, gate=gate.metrics())
    if gate.leaks:
        stage.print(f"left out: {len(gate.leaks)} texts that hold evaluation items, see leaks.jsonl")
