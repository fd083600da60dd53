"""The labeller against a real HTTP server on loopback: faults, budget, cache, a killed run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.labeller import RUBRICS, Labeller, LabellerConfig, LabellerError, parse_answer, prompt, retry_after

ROOT = Path(__file__).resolve().parents[2]
RUBRIC = RUBRICS["knowledge"]
KEY = "sk-very-secret"


class Endpoint(ThreadingHTTPServer):
    """A chat-completions endpoint: the answer is the digit in the text; `faults` maps a text to what happens first."""

    daemon_threads = True

    def __init__(self, faults=None, delay=0.0, usage=True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults = {text: list(kinds) for text, kinds in (faults or {}).items()}
        self.delay, self.usage = delay, usage
        self.asked, self.times, self.headers = [], [], []
        self.active = self.most_active = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def config(self, **more):
        fast = {"backoff_s": 0.01, "timeout_s": 5.0, "retries": 3, "concurrency": 4}
        return LabellerConfig(base_url=f"http://127.0.0.1:{self.server_port}/v1", model="org/judge", **(fast | more))

    def handle_error(self, request, client_address):
        pass  # clients that went away are part of the tests

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.released.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"].partition("<text>\n")[2].partition("\n</text>")[0]
        with server.lock:
            server.asked.append(text)
            server.times.append(time.monotonic())
            server.headers.append(dict(self.headers))
            server.active += 1
            server.most_active = max(server.active, server.most_active)
            fault = server.faults[text].pop(0) if server.faults.get(text) else None
        try:
            assert self.path == "/v1/chat/completions" and body["temperature"] == 0 and body["model"] == "org/judge"
            self.answer(server, text, fault)
        finally:
            with server.lock:
                server.active -= 1

    def answer(self, server, text, fault):
        time.sleep(server.delay)
        if fault == "hang":
            server.released.wait(20)
        elif fault == "drop":
            self.connection.close()
        elif fault == "half":
            self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choi')
            self.close_connection = True
        elif fault == "garbage":
            self.send(200, b"<html>not json</html>")
        elif fault == "empty":
            self.send(200, b'{"choices": []}')
        elif isinstance(fault, tuple):
            status, retry = fault
            self.send(status, f"no, {KEY}".encode(), {"retry-after": retry} if retry else {})
        else:
            digit = next((c for c in text if c.isdigit()), "?")
            value = {"choices": [{"message": {"role": "assistant", "content": digit}}]}
            if server.usage:
                value["usage"] = {"total_tokens": 100}
            self.send(200, json.dumps(value).encode())

    def send(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("4", 4), (" 0\n", 0), ("Score: 5", 5), ("3.", 3)]
    + [(bad, None) for bad in ("6", "-1", "3.5", "4 or 5", "four", "", "10", "Score: 4/5 because", "٣", None, 4)],
)
def test_answers_are_parsed_strictly(answer, score):
    assert parse_answer(answer) == score


def test_scores_are_in_order_and_a_second_run_asks_nothing(tmp_path):
    texts = [f"text {i % 6}" for i in range(20)]
    with Endpoint(delay=0.02) as server:
        labeller = Labeller(server.config(), tmp_path)
        first = labeller.label(texts, RUBRIC)
        assert first.scores == [i % 6 for i in range(20)] and first.stopped == ""
        assert len(server.asked) == 6 == first.counts["asked"], "equal prompts are asked once"
        assert first.counts["tokens"] == 600 and 1 < server.most_active <= 4
        again = Labeller(server.config(), tmp_path).label(texts, RUBRIC)
        assert again.scores == first.scores and again.counts["cached"] == 6 and len(server.asked) == 6
        Labeller(server.config(), tmp_path).label(texts, RUBRICS["educational"])
        assert len(server.asked) == 12, "another rubric is another prompt"


def test_every_passing_fault_is_repeated(tmp_path):
    faults = {
        "a 1": [(429, None)],
        "b 2": [(500, None), (503, None)],
        "c 3": ["garbage"],
        "d 4": ["drop"],
        "e 5": ["empty"],
        "f 0": ["half"],
        "g 1": ["hang"],
    }
    with Endpoint(faults) as server:
        result = Labeller(server.config(timeout_s=1.0), tmp_path).label(list(faults), RUBRIC)
    assert result.scores == [1, 2, 3, 4, 5, 0, 1] and result.stopped == ""
    assert result.counts["retries"] == 8 and result.counts["requests"] == 15 and result.counts["failed"] == 0


def test_retry_after_is_kept(tmp_path):
    with Endpoint({"a 1": [(429, "1")]}) as server:
        assert Labeller(server.config(), tmp_path).label(["a 1"], RUBRIC).scores == [1]
        assert server.times[1] - server.times[0] >= 1.0
    assert retry_after("2.5") == 2.5 and retry_after(None) == 0 and retry_after("soon") == 0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    with Endpoint({"a 1": [(429, "3600")]}) as server:
        start = time.monotonic()
        assert Labeller(server.config(max_backoff_s=0.05), tmp_path / "b").label(["a 1"], RUBRIC).scores == [1]
        assert time.monotonic() - start < 60


def test_what_never_succeeds_is_counted_and_asked_again_next_time(tmp_path):
    faults = {"bad 3": [(500, None)] * 4, "long 4": [(400, None)]}
    with Endpoint(faults) as server:
        result = Labeller(server.config(), tmp_path).label(["bad 3", "good 2", "long 4"], RUBRIC)
        assert result.scores == [None, 2, None] and result.counts["failed"] == 2
        assert server.asked.count("long 4") == 1, "a refused request is not repeated"
        assert Labeller(server.config(), tmp_path).label(["bad 3", "good 2", "long 4"], RUBRIC).scores == [3, 2, 4]


def test_an_answer_that_is_no_score_is_recorded_and_not_asked_again(tmp_path):
    with Endpoint() as server:
        for _ in range(2):
            result = Labeller(server.config(), tmp_path).label(["no digit", "one 1"], RUBRIC)
            assert result.scores == [None, 1] and result.counts["unparsable"] == 1
        assert len(server.asked) == 2


@pytest.mark.parametrize("budget", [{"max_requests": 5}, {"max_tokens": 500}])
def test_budget_stops_cleanly_and_the_next_run_goes_on(tmp_path, budget):
    texts = [f"t{chr(97 + i)} {i % 6}" for i in range(12)]
    with Endpoint() as server:
        labeller = Labeller(server.config(concurrency=1, **budget), tmp_path)
        result = labeller.label(texts, RUBRIC)
        assert result.scores == [i % 6 for i in range(5)] + [None] * 7
        assert "budget" in result.stopped and next(iter(budget)) in result.stopped and len(server.asked) == 5
        assert labeller.label(texts, RUBRIC).scores[:10] == [i % 6 for i in range(10)]
        assert Labeller(server.config(), tmp_path).label(texts, RUBRIC).stopped == ""
        assert sorted(server.asked) == sorted(texts), "no text was asked twice"


def test_tokens_are_estimated_for_an_endpoint_that_does_not_count(tmp_path):
    with Endpoint(usage=False) as server:
        assert Labeller(server.config(), tmp_path).label(["a 1"], RUBRIC).counts["tokens"] > 50


def test_a_wrong_key_ends_at_once_and_the_key_is_in_no_message(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    texts = [f"t{i}" for i in range(30)]
    with Endpoint({t: [(401, None)] for t in texts}) as server:
        with pytest.raises(LabellerError, match="401") as error:
            Labeller(server.config(api_key_env="JUDGE_KEY"), tmp_path).label(texts, RUBRIC)
        assert KEY not in str(error.value) and "[key]" in str(error.value) and len(server.asked) <= 8
        assert all(h.get("authorization") == f"Bearer {KEY}" for h in server.headers)
    assert all(KEY not in p.read_text() for p in tmp_path.rglob("*") if p.is_file())


def test_an_endpoint_that_is_gone_is_given_up(tmp_path):
    with Endpoint() as server:
        config = server.config(retries=1)
    result = Labeller(config, tmp_path).label([f"t{i} 1" for i in range(500)], RUBRIC)
    assert result.scores == [None] * 500 and "ConnectError" in result.stopped and result.counts["requests"] < 60


def test_a_torn_line_of_the_cache_is_dropped(tmp_path):
    with Endpoint() as server:
        Labeller(server.config(), tmp_path).label(["a 1", "b 2"], RUBRIC)
        path = tmp_path / "org-judge.jsonl"
        path.write_bytes(path.read_bytes()[:-9])
        for asked in (3, 3):
            assert Labeller(server.config(), tmp_path).label(["a 1", "b 2"], RUBRIC).scores == [1, 2]
            assert len(server.asked) == asked


def test_a_killed_run_resumes_without_asking_twice(tmp_path):
    texts = [f"w{chr(97 + i)} {i % 6}" for i in range(24)]
    with Endpoint(delay=0.1) as server:
        code = (
            "import sys, json; from tasks.labeller import *\n"
            "a = json.loads(sys.argv[1]); Labeller(LabellerConfig(**a[0]), a[1]).label(a[2], RUBRICS['knowledge'])"
        )
        argument = json.dumps([server.config(concurrency=2).model_dump(), str(tmp_path), texts])
        process = subprocess.Popen([sys.executable, "-c", code, argument], cwd=ROOT)
        while len(server.asked) < 8:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        answered = (tmp_path / "org-judge.jsonl").read_bytes().count(b"\n")
        assert answered >= 4
        before = len(server.asked)
        result = Labeller(server.config(), tmp_path).label(texts, RUBRIC)
        assert result.scores == [i % 6 for i in range(24)] and result.counts["cached"] == answered
        assert len(server.asked) - before == 24 - answered


def test_one_process_per_cache(tmp_path):
    with Endpoint({"a 1": ["hang"]}) as server:
        thread = threading.Thread(target=lambda: Labeller(server.config(), tmp_path).label(["a 1"], RUBRIC))
        thread.start()
        while not server.asked:
            time.sleep(0.01)
        with pytest.raises(LabellerError, match="another process"):
            Labeller(server.config(), tmp_path).label(["b 2"], RUBRIC)
        server.released.set()
        thread.join()


def test_settings_that_cannot_work_are_refused(tmp_path, monkeypatch):
    for bad, message in (
        ({"base_url": "http://127.0.0.1:1/v1"}, "name the model"),
        ({"base_url": "file:///etc", "model": "m"}, "http"),
        ({"base_url": "https://user:pw@host/v1", "model": "m"}, "environment variable"),
        ({"base_url": "http://far.example/v1", "model": "m", "api_key_env": "K"}, "unencrypted"),
    ):
        with pytest.raises(ValidationError, match=message):
            LabellerConfig(**bad)
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    with pytest.raises(LabellerError, match="ABSENT_KEY"):
        Labeller(LabellerConfig(base_url="https://h/v1", model="m", api_key_env="ABSENT_KEY"), tmp_path)
    with pytest.raises(ValueError, match="no endpoint"):
        Labeller(LabellerConfig(), tmp_path)


def test_prompt_cuts_long_texts():
    assert len(prompt(RUBRIC, "x" * 9000, 100)[1]["content"]) < 150
