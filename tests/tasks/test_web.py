"""Stage web on a miniature corpus: funnel and exclusions add up, bad records are set aside, processes change nothing."""

import csv
import json
import os
from collections import Counter

import pytest

from tasks import acquire, mapshuffle, web
from tasks.documents import read_documents, read_exclusions
from tasks.fetch import PipIndexes
from tasks.files import list_files, sha256_file
from tasks.records import Record, write_records
from tasks.stage import run_stage_for_test
from tasks.web_pages import ReadTask, Rules, read_unit
from tests.tasks.corpus_fixtures import ENGLISH, archives, corpus_list, train_language_model, write_list
from tests.tasks.package_index import serve

CONFIG = {
    "judges": {"machine_text": None},  # the pages of this corpus are made from templates: test_web_judges.py
    "workers": 1,
    "min_lang_score": 0.2,
    "max_reject_share": 0.2,
    "filters": {"words": [20, None], "policy_lines": [None, 0.5], "lorem_ipsum": [None, 0]},
    "quality": {
        "sources": {
            "encyclopedia": {"items": ["wiki"], "kind": "edited"},
            "forms": {"items": ["logins"], "kind": "furniture"},
        },
        "weights": {"surface": 1.0, "fasttext": 0.25},
        "bucket_count": 4,
        "drop_buckets": 1,
    },
}


@pytest.fixture(scope="module")
def acquired(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("acquired")
    files = archives(train_language_model(tmp / "lid"))
    with pytest.MonkeyPatch.context() as patch, serve() as index:
        index.files.update(files)
        patch.setenv("PIP_INDEX_URL", index.url)
        patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        patch.delenv("PIP_FIND_LINKS", raising=False)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("ARCLINE_CACHE", str(tmp / "cache"))
        patch.setattr(PipIndexes, "from_pip", lambda: PipIndexes.from_config_text("", dict(os.environ)))
        corpus = write_list(tmp / "list.yaml", corpus_list(files))
        run_stage_for_test(
            acquire,
            {"sets": {"base": True}, "max_reject_share": 0.5},
            deps={"conf/corpus.yaml": corpus},
            outs=["data/acquire"],
            tmp=tmp,
        )
    return tmp / "data/acquire"


@pytest.fixture(scope="module")
def default(acquired, tmp_path_factory):
    """(output directory, metrics) of one run with CONFIG."""
    return run(tmp_path_factory.mktemp("default"), acquired)


def run(tmp_path, acquired, records=(), **change):
    write_records(tmp_path / "ingest", records)
    deps = {"data/acquire": acquired, "data/ingest": tmp_path / "ingest"}
    run_stage_for_test(web, CONFIG | change, deps=deps, outs=["data/web"], tmp=tmp_path)
    return tmp_path / "data/web", json.loads((tmp_path / "metrics/web.json").read_text())


def test_documents_scores_and_provenance(default):
    out, metrics = default
    documents = list(read_documents(out))
    assert Counter(d["domain"] for d in documents) == metrics["documents"]
    assert metrics["documents"]["encyclopedia"] == 32
    pages = {d["url"]: d for d in documents if d["domain"] == "web"}
    page = next(d for url, d in pages.items() if url.startswith("package:pip/articles/1.0/doc/1"))
    meta = json.loads(page["meta"])
    assert page["source"] == "pip/articles/1.0" and page["lang"] == "en"
    assert (meta["licence"], meta["licence_file"]) == ("MIT", "LICENSE") and meta["title"]
    assert "sailors saw of the coast" in page["text"] and "page\n" not in page["text"]  # main content, no menu
    assert all(0 <= d["quality"] <= 1 and d["lang_score"] > 0 for d in documents)
    assert all(d["quality_bucket"] is None for d in documents if d["domain"] == "encyclopedia")


def test_funnel_and_exclusions_add_up(default):
    out, metrics = default
    with open(out / "audit/funnel.csv") as file:
        table = list(csv.DictReader(file))
    funnel = [(row["step"], int(row["documents_left"])) for row in table]
    assert dict(funnel) == metrics["funnel"]
    assert {row["step"]: int(row["bytes_left"]) for row in table} == metrics["funnel_bytes"]
    removed = Counter(r["reason"] for r in read_exclusions(out))
    assert dict(removed) == metrics["removed"]
    for (_, before), (name, after) in zip(funnel, funnel[1:], strict=False):
        assert before - after == removed[name]
    pages = [d for d in read_documents(out) if d["domain"] == "web"]
    assert metrics["funnel_bytes"]["quality_bucket"] == sum(len(d["text"].encode()) for d in pages)
    assert funnel[0][1] == 27 + 24 + 2 and funnel[-1][1] == metrics["documents"]["web"]
    assert removed["policy_lines"] + removed["words"] + removed["quality_bucket"] > 0
    assert removed["lorem_ipsum"] == 1 and removed["min_chars"] >= 1


def test_log_in_pages_score_below_articles(acquired, tmp_path):
    out, metrics = run(tmp_path, acquired, filters={})
    scores = {"articles": [], "logins": []}
    for row in read_documents(out):
        if row["domain"] == "web" and row["lang"] == "en":
            scores[row["source"].split("/")[1]].append(row["quality"])
    low = [r["score"] for r in read_exclusions(out) if r["reason"] == "quality_bucket" and "logins" in r["source"]]
    assert min(scores["articles"]) > max(scores["logins"] + low)
    assert metrics["quality"]["held_out_auc"] > 0.9


def test_wrongly_declared_french_pages_are_read(default):
    out, _ = default
    french = [d for d in read_documents(out) if d["domain"] == "web" and d["lang"] == "fr"]
    assert french and all("été construit" in d["text"] for d in french)


def test_what_is_no_page_is_rejected_and_the_rest_goes_on(default):
    out, _ = default
    lines = [json.loads(line) for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()]
    assert ("package:pip/articles/1.0/doc/broken.html", "not_text") in [(x["id"], x["reason"]) for x in lines]
    assert [x["reason"] for x in lines if "en.json" in x["id"]] == ["no_text"]


def test_processes_change_nothing(acquired, tmp_path):
    import shutil

    copied = tmp_path / "acquired"
    shutil.copytree(acquired, copied)
    shutil.copy(copied / "warc/part-00000.warc.gz", copied / "warc/part-00001.warc.gz")
    outs = [run(tmp_path / str(n), copied, workers=n)[0] for n in (1, 2)]
    hashes = [{p.relative_to(o): sha256_file(p) for p in list_files(o) if p.name != "manifest.json"} for o in outs]
    assert hashes[0] == hashes[1]


def test_truncated_and_empty_warc_files_cost_only_what_they_lost(acquired, tmp_path):
    import shutil

    copied = tmp_path / "acquired"
    shutil.copytree(acquired, copied)
    shard = copied / "warc/part-00000.warc.gz"
    shard.write_bytes(shard.read_bytes()[:-600])
    (copied / "warc/part-00001.warc.gz").write_bytes(b"")
    out, metrics = run(tmp_path, copied)
    reasons = {json.loads(line)["reason"] for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()}
    assert "empty_file" in reasons and reasons & {"truncated_record", "truncated_file"}
    assert 40 < metrics["funnel"]["pages"] < 53


def test_too_many_bad_records_fail_the_stage(acquired, tmp_path):
    with pytest.raises(ValueError, match="above max_reject_share"):
        run(tmp_path, acquired, max_reject_share=0.0)
    assert not (tmp_path / "data/web").exists()


def test_languages_can_be_chosen(acquired, tmp_path):
    out, metrics = run(tmp_path, acquired, languages=["fr"])
    assert {d["lang"] for d in read_documents(out) if d["domain"] == "web"} == {"fr"}
    assert metrics["removed"]["language_not_wanted"] > 20


def test_mistakes_in_parameters_are_named(acquired, tmp_path):
    with pytest.raises(ValueError, match="no filter 'wrods'"):
        run(tmp_path, acquired, filters={"wrods": [1, 2]})
    with pytest.raises(ValueError, match="web.quality.drop: unknown key"):
        run(tmp_path, acquired, quality=CONFIG["quality"] | {"drop": 1})


def test_a_corpus_without_quality_examples_is_not_scored(acquired, tmp_path):
    out, metrics = run(
        tmp_path, acquired, quality=CONFIG["quality"] | {"sources": {"none": {"items": ["nothing"], "kind": "mail"}}}
    )
    assert metrics["quality"]["trained"] == 0 and "quality_bucket" not in metrics["removed"]
    assert {d["quality"] for d in read_documents(out)} == {None}


def test_user_text_lines_become_documents(acquired, tmp_path):
    """JSON lines of an item of domain web: what `How to put in your own data` promises."""
    from tasks.texts import BadFile, file_documents

    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jsonl").write_text(json.dumps({"text": ENGLISH, "url": "http://x/"}) + "\n{broken\n[1]\n")
    row = {"path": "files/a.jsonl", "kind": "jsonl", "member": "a.jsonl", "url": "local:a"}
    found = list(file_documents(tmp_path, row))
    assert (found[0]["text"], found[0]["url"]) == (ENGLISH.strip(), "http://x/")
    assert [(type(f), f.reason) for f in found[1:]] == [(BadFile, "bad_json_line"), (BadFile, "no_text")]


def test_tagged_prose_is_untagged():
    from tasks.texts import untag

    tagged = "\n\n\tThe/at jury/nn said/vbd ``/`` no/at evidence/nn ''/'' ,/, and/cc left/vbd ./.\n\n\n\tIt/pps ended/vbd ./.\n"
    assert untag(tagged) == 'The jury said "no evidence", and left.\n\nIt ended.'
    assert untag("and/or he said, 50 km/h is fine here and there") == "and/or he said, 50 km/h is fine here and there"


def test_records_of_the_user_go_the_way_of_pages(acquired, tmp_path):
    long = " ".join(ENGLISH.replace("lighthouse", word) for word in ("chapel", "inn", "dock"))
    records = [
        Record("r1", "html", f"<html><title>T</title><body><p>{long}</p></body></html>".encode(), "a.html", "http://u/1", "mine"),
        Record("r2", "text", long.replace("harbour", "bay").encode("utf-16"), "b.txt", "", "mine", licence="CC0-1.0"),
        Record("r3", "text", b"too short", "c.txt", "", "mine"),
        Record("r4", "html", b"%PDF-1.7", "d.html", "", "mine"),
        Record("r5", "code", b"print(1)", "e.py", "", "mine"),
        Record("r6", "text", b"a short verse", "f.txt", "", "verse", meta={"domain": "prose"}),
    ]  # fmt: skip
    out, metrics = run(tmp_path, acquired, records, quality=CONFIG["quality"] | {"drop_buckets": 0})
    mine = {d["url"]: d for d in read_documents(out) if d["source"] == "mine"}
    assert set(mine) == {"http://u/1", "b.txt"} and all(d["lang"] == "en" for d in mine.values())
    assert (
        json.loads(mine["b.txt"]["meta"])["licence"] == "CC0-1.0" and "at the end of the bay" in mine["b.txt"]["text"]
    )
    assert [r["reason"] for r in read_exclusions(out) if r["source"] == "mine"] == ["min_chars"]
    (verse,) = (
        d for d in read_documents(out) if d["source"] == "verse"
    )  # its source names a domain: no rules for pages
    assert (verse["text"], verse["domain"]) == ("a short verse", "prose")
    lines = [json.loads(line) for line in (out / "rejects/part-00000.jsonl").read_text().splitlines()]
    assert [(x["id"], x["reason"]) for x in lines if x["id"][0] == "r"] == [("r4", "not_text")]


def test_a_killed_run_resumes_by_unit(acquired, tmp_path, monkeypatch):
    """The first try dies in the second pass: the second try reads no unit again and gives the output of an undisturbed run."""
    whole = run(tmp_path / "whole", acquired)[0]
    calls = []
    real_read, real_score = web.read_unit, web.score_unit
    monkeypatch.setattr(web, "read_unit", lambda task: calls.append(task.name) or real_read(task))
    monkeypatch.setattr(mapshuffle.LocalEngine, "_run", in_this_process)

    def dies(task):
        raise KeyboardInterrupt

    monkeypatch.setattr(web, "score_unit", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", acquired)
    assert calls and not (tmp_path / "killed/data/web").exists()
    monkeypatch.setattr(web, "score_unit", real_score)
    done = len(calls)
    out = run(tmp_path / "killed", acquired)[0]
    assert len(calls) == done
    assert contents(out) == contents(whole)


def in_this_process(self, tasks):
    for name, arguments in tasks:
        mapshuffle.run_shard(*arguments)
        yield name


def contents(out):
    return {p.relative_to(out): sha256_file(p) for p in list_files(out) if p.name != "manifest.json"}


def test_audit_shows_texts_on_both_sides_of_a_threshold(default):
    out, _ = default
    samples = json.loads((out / "audit/samples.json").read_text())
    assert samples["lorem_ipsum"]["removed"][0][1] == 2.0 and samples["lorem_ipsum"]["kept"]
    kept = [value for _, value, *_ in samples["quality"]["kept"]]
    assert max(value for _, value, *_ in samples["quality"]["removed"]) < min(kept)
    page = (out / "audit/index.html").read_text()
    assert ENGLISH[:60] in page and "<h2>Funnel</h2>" in page and "<h2>lorem_ipsum</h2>" in page
    licences = (out / "audit/licences.csv").read_text().splitlines()
    assert licences[0].startswith("licence,documents,tokens,bytes") and any(
        line.startswith("CC-BY-SA-4.0,32,") for line in licences
    )


def test_spam_mails_teach_and_are_no_documents(acquired, tmp_path):
    (tmp_path / "m.txt").write_text("From: a@b\nReceived: by c\nSubject: Offer\n\n" + ENGLISH.replace(". ", ".\n"))
    row = {"item": "mails", "use": "negative", "path": "m.txt", "sha256": "ab12", "kind": "text", "domain": "prose"}
    model, rules = str(acquired / "models/lid.176.ftz"), Rules(200, 0.2, (), {})
    sources = {"mails": ("spam", "mail")}
    task = ReadTask("t", "texts", str(tmp_path), (row,), model, str(tmp_path / "out"), rules, sources, 10)
    found = read_unit(task)
    assert (found["seen"], found["pages"]) == (0, 0)
    example = json.loads((tmp_path / "out/t.examples.jsonl").read_text())
    assert (example["source"], example["good"]) == ("spam", False)
    assert "Received" not in example["text"] and "sailors saw of the coast" in example["text"]


def test_tokens_go_through_the_funnel_beside_documents(default):
    from tasks.token_estimate import estimate_tokens

    out, metrics = default
    documents = list(read_documents(out))
    total = Counter()
    for d in documents:
        total[d["domain"]] += estimate_tokens(d["text"])
    assert metrics["tokens"] == total and metrics["funnel_tokens"]["quality_bucket"] == total["web"] > 0
    lost = metrics["funnel_tokens"]["pages"] - metrics["funnel_tokens"]["quality_bucket"]
    assert sum(metrics["removed_tokens"].values()) == lost > 0
    with open(out / "audit/funnel.csv") as file:
        assert {r["step"]: int(r["tokens_left"]) for r in csv.DictReader(file)} == metrics["funnel_tokens"]


def test_lines_and_bad_words_are_dropped_when_asked_for(acquired, tmp_path):
    listed = tmp_path / "words.txt"
    listed.write_text("sailors\n")
    plain, before = run(tmp_path / "plain", acquired)
    out, metrics = run(tmp_path / "cut", acquired, lines={"words": 4}, bad_words={"en": str(listed)})
    assert metrics["bad_words_listed"] == {"en": 1} and "dropped_lines" not in before
    rows = Counter(r["reason"] for r in read_exclusions(out))
    assert metrics["removed"]["bad_words"] == rows["bad_words"] > 0 and rows["line_words"] > 0
    assert metrics["dropped_lines"]["words"] == sum(
        r["score"] for r in read_exclusions(out) if r["reason"] == "line_words"
    )
    pages = [d for d in read_documents(out) if d["domain"] == "web"]
    assert pages and not any("sailors" in d["text"] and d["lang"] == "en" for d in pages)
    assert all(len(line.split()) >= 4 for d in pages for line in d["text"].splitlines() if line.strip())
    others = [[d for d in read_documents(o) if d["domain"] != "web"] for o in (plain, out)]
    assert [d["text"] for d in others[0]] == [d["text"] for d in others[1]]  # books keep their lines
    with pytest.raises(ValueError, match="no rule 'short'"):
        run(tmp_path / "wrong", acquired, lines={"short": 3})
    with pytest.raises(ValueError, match="absent.txt: cannot be read"):
        run(tmp_path / "absent", acquired, bad_words={"en": "absent.txt"})


@pytest.mark.slow
def test_ray_changes_no_byte(acquired, tmp_path):
    pytest.importorskip("ray")
    outs = [run(tmp_path / engine, acquired, engine=engine, workers=2)[0] for engine in ("local", "ray")]
    hashes = [{p.relative_to(o): sha256_file(p) for p in list_files(o) if p.name != "manifest.json"} for o in outs]
    assert hashes[0] == hashes[1] and len(hashes[0]) > 5
