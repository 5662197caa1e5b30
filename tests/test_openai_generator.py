"""The generator that asks an OpenAI-compatible server, against a server of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowdflash.errors import DataInvalid, FlowdflashError
from flowdflash.items import Answer, BatchInfo, TokenBatch
from flowdflash.stage import Check, OpenContext, SilentReport
from flowdflash.stages import openai_generator
from flowdflash.stages.openai_generator import OpenAIGenerator

pytestmark = pytest.mark.timeout(60)
KEY = "sk-very-secret"
Reply = tuple[int, Any, dict[str, str]]


def completion(text: str | None, reason: str | None = "stop", tokens: int = 3, **message: Any) -> Reply:
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}, {}


class Server:
    """Answers by ``reply(request)``; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[dict[str, Any]], Reply | None] = lambda body: completion(last(body))
        self.trickle: threading.Event | None = None
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append(body)
                    server.headers.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
                if server.trickle:  # headers, and then a byte now and again
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                    with suppress(OSError):  # the other side has hung up
                        while not server.trickle.wait(0.02):
                            self.wfile.write(b" ")
                    self.close_connection = True
                    return
                reply = server.reply(body)
                if reply is None:  # cut off in the middle of an answer
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                    self.close_connection = True
                    return
                status, value, headers = reply
                text = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                for name, content in {"Content-Length": str(len(text)), **headers}.items():
                    self.send_header(name, content)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def last(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"]) + "!"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Server()
    yield made
    made.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time does not pass, and chance is always in the middle; the waits that were asked for."""
    asked: list[float] = []

    async def sleep(secs: float) -> None:
        asked.append(secs)

    monkeypatch.setattr(openai_generator, "sleep", sleep)
    monkeypatch.setattr(openai_generator, "now", lambda: 1_000_000.0)
    monkeypatch.setattr(openai_generator, "draw", lambda: 0.5)
    return asked


def stage(url: str, **options: Any) -> OpenAIGenerator:
    return OpenAIGenerator(OpenAIGenerator.Config(base_url=url, model="m", **options))


def batch(*rows: Any, first_id: int = 0) -> TokenBatch:
    """Rows by their messages, or by the text of the one question."""
    made = [row if isinstance(row, dict) else {"messages": [{"role": "user", "content": row}]} for row in rows]
    n = len(made)
    ids = tuple(range(first_id, first_id + n))
    info = BatchInfo(0, 0, 0, 0, ids, (1,) * n, (0,) * n, n, n, 1.0)
    return TokenBatch(info, np.ones((n, 1), np.int64), np.zeros((n, 1), bool), np.ones(n, np.int64), tuple(made))


def answered(made: OpenAIGenerator, given: TokenBatch, seed: int = 7, **facts: Any) -> list[Answer]:
    """First answers of a stage that is opened, asked once and closed."""
    report = SilentReport()
    made.open(OpenContext("generator", Path(), Path(), seed=seed, facts=facts, report=report))
    try:
        return [turns[-1] for turns in made.generate(given).answers]
    finally:
        made.close()
        assert not [line for line in report.lines if KEY in line]


def test_answers_come_in_the_order_of_the_prompts_with_the_tokens_the_server_counted(server: Server) -> None:
    reasons = {"a!": "stop", "b!": "length"}
    server.reply = lambda body: completion(last(body), reasons[last(body)], tokens=len(server.requests))
    made = stage(server.url + "/", max_new_tokens=9, concurrency=1)
    assert answered(made, batch("a", "b")) == [Answer("a!", 1), Answer("b!", 2, "length")]
    assert server.headers[0]["path"] == "/v1/chat/completions" and "authorization" not in server.headers[0]
    assert server.requests[0] == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "messages": [{"role": "user", "content": "a"}],
    }
    summary = made.summary()
    assert (summary["responses"], summary["responses_cut"], summary["retries"]) == (2, 1, 0)
    assert (summary["response_tokens"], summary["prompt_tokens"]) == (3, 10)


def test_as_many_requests_as_allowed_are_in_flight_at_once(server: Server) -> None:
    together = threading.Barrier(4)
    flying, most = 0, 0

    def reply(body: dict[str, Any]) -> Reply:
        nonlocal flying, most
        with server.lock:
            flying += 1
            most = max(most, flying)
        together.wait(30)  # passes only when four are there
        with server.lock:
            flying -= 1
        return completion(last(body))

    server.reply = reply
    texts = [answer.text for answer in answered(stage(server.url, concurrency=4), batch(*"abcdefgh"))]
    assert texts == [f"{name}!" for name in "abcdefgh"]
    assert most == 4


def test_turns_are_asked_one_after_the_other_with_the_answers_in_between(server: Server) -> None:
    row = {"messages": [{"role": "user", "content": text} for text in "ab"]}
    made = stage(server.url)
    made.open(OpenContext("generator", Path(), Path()))
    ((first, second),) = made.generate(batch(row)).answers
    made.close()
    assert (first.text, second.text) == ("a!", "b!")
    assert [message["content"] for message in server.requests[1]["messages"]] == ["a", "a!", "b"]


def test_sampling_is_seeded_per_row_whatever_the_batch(server: Server) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    answered(stage(server.url, **options), batch("a", "b"))
    seeds = {last(body): body["seed"] for body in server.requests}
    assert len(set(seeds.values())) == 2 and all(0 <= seed < 1 << 31 for seed in seeds.values())
    body = server.requests[0]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 40)
    assert (body["min_p"], body["repetition_penalty"]) == (0.0, 1.0)
    answered(stage(server.url, **options), batch("b", first_id=1))
    assert server.requests[-1]["seed"] == seeds["b!"]
    answered(stage(server.url, **options), batch("b", first_id=1), seed=8)
    assert server.requests[-1]["seed"] != seeds["b!"]


def test_no_default_of_the_server_decides_how_it_samples(server: Server) -> None:
    made = stage(server.url, temperature=1.0)
    answered(made, batch("a"))
    sent = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert sent.items() <= server.requests[0].items()
    assert sent.items() <= made.summary()["request"].items()
    bare = stage(server.url, temperature=1.0, extensions=False)
    answered(bare, batch("a"))
    assert server.requests[1].keys() == {"model", "max_tokens", "temperature", "top_p", "seed", "messages"}
    answered(stage(server.url, extensions=False), batch("a"))
    assert server.requests[2].keys() == {"model", "max_tokens", "temperature", "messages"}


def test_tools_and_switches_of_the_template_are_sent(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    answered(
        stage(server.url),
        batch({"messages": messages, "tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1, "y": 2}}),
        template_options={"enable_thinking": False, "x": 0},
    )
    (body,) = server.requests
    assert body["tools"] == [{"type": "function"}]
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "x": 1, "y": 2}


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (completion("a", "end_turn"), Answer("a", 3)),
        (completion("a", "max_tokens"), Answer("a", 3, "length")),
        (completion("a", reasoning="hm"), Answer("a", 3, reasoning="hm")),
        (completion(None, "length", reasoning_content="hm"), Answer("", 3, "length", reasoning="hm")),
        (completion("a", "content_filter"), Answer("", 3, rejected="finish_reason content_filter")),
        (completion("a", None), Answer("", 3, rejected="finish_reason None")),
        (completion(None, "tool_calls", tool_calls=[{}]), Answer("", 3, rejected="answered by a tool call")),
    ],
)
def test_how_an_answer_ended_is_mapped_or_named(server: Server, reply: Reply, answer: Answer) -> None:
    server.reply = lambda body: reply
    assert answered(stage(server.url), batch("a")) == [answer]


FAULTS: list[Reply | None] = [
    (429, {"error": "slow down"}, {}),
    (500, "oops", {}),
    (503, "", {}),
    (408, "", {}),
    (200, "<html>a proxy</html>", {}),
    (200, {"choices": []}, {}),
    None,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_pass_is_tried_again_with_longer_and_longer_waits(
    server: Server, waits: list[float], fault: Reply | None
) -> None:
    server.reply = lambda body: fault if len(server.requests) <= 4 else completion("a")
    made = stage(server.url, first_wait_secs=2, max_wait_secs=10)
    assert answered(made, batch("a")) == [Answer("a", 3)]
    assert waits == [1.5, 3.0, 6.0, 7.5], "2, 4, 8, 10 seconds, less a quarter"
    assert made.summary()["retries"] == 4
    assert server.requests == [server.requests[0]] * 5


def test_an_answer_must_be_whole_within_the_time_however_it_trickles_in(server: Server, waits: list[float]) -> None:
    server.trickle = done = threading.Event()
    made = stage(server.url, timeout_secs=0.3, retries=1)
    try:
        with pytest.raises(FlowdflashError, match=r"in 2 tries, at last: no answer within timeout_secs, 0\.3"):
            answered(made, batch("a"))
    finally:
        done.set()
    assert len(waits) == 1


@pytest.mark.parametrize("header", ["7", formatdate(1_000_007, usegmt=True)])
def test_retry_after_is_honoured(server: Server, waits: list[float], header: str) -> None:
    server.reply = lambda body: (429, "", {"Retry-After": header}) if len(server.requests) == 1 else completion("a")
    assert answered(stage(server.url), batch("a")) == [Answer("a", 3)]
    assert waits == [7.0]


def test_a_wait_that_is_too_long_ends_the_run(server: Server, waits: list[float]) -> None:
    server.reply = lambda body: (429, "daily limit", {"Retry-After": "3600"})
    with pytest.raises(FlowdflashError, match=r"daily limit; it asks to wait 3,600 s, more than max_wait_secs 120"):
        answered(stage(server.url), batch("a", "b", "c"))
    assert waits == []


def test_a_server_that_stays_away_is_an_error_that_says_what_it_last_said(server: Server, waits: list[float]) -> None:
    server.reply = lambda body: (503, "loading", {})
    with pytest.raises(FlowdflashError, match=r"no answer in 3 tries, at last: status 503 loading"):
        answered(stage(server.url, retries=2), batch("a"))
    assert len(waits) == 2
    server.close()
    with pytest.raises(FlowdflashError, match=r"no answer in 2 tries, at last: ConnectError"):
        answered(stage(server.url, retries=1), batch("a"))


BEYOND = ('{"choices": [{"message": {}}], "usage": {"completion_tokens": 1e999}}', "[" * 200_000)


@pytest.mark.parametrize("text", BEYOND, ids=["number", "depth"])
def test_a_reply_beyond_all_bounds_is_tried_again_and_told_of(server: Server, waits: list[float], text: str) -> None:
    server.reply = lambda body: (200, text, {})
    with pytest.raises(FlowdflashError, match=r"no answer in 2 tries, at last: .*no chat completion with usage"):
        answered(stage(server.url, retries=1), batch("a"))


def test_a_prompt_that_the_server_refuses_is_an_error_or_a_named_rejection(server: Server, waits: list[float]) -> None:
    server.reply = lambda body: (400, {"error": "too long"}, {}) if last(body) == "b!" else completion(last(body))
    with pytest.raises(DataInvalid, match=r"status 400 .*too long.*on_bad_row: skip"):
        answered(stage(server.url), batch("a", "b"))
    good, bad = answered(stage(server.url, on_bad_row="skip"), batch("a", "b"))
    assert (good.text, bad.rejected) == ("a!", "refused by the server with status 400")
    assert "too long" in bad.detail and waits == []


@pytest.mark.parametrize("status", [401, 403, 404, 301])
def test_a_fault_of_all_rows_always_ends_the_run(server: Server, waits: list[float], status: int) -> None:
    server.reply = lambda body: (status, "no", {})
    with pytest.raises(FlowdflashError, match=rf"status {status} no \(check base_url, model and api_key_env\)"):
        answered(stage(server.url, on_bad_row="skip"), batch("a"))
    assert waits == []


def test_the_key_comes_from_the_environment_and_is_told_to_nobody_but_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage(server.url, api_key_env="TEST_KEY")
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(FlowdflashError, match="TEST_KEY is not set"):
        answered(made, batch("a"))
    monkeypatch.setenv("TEST_KEY", KEY)
    server.reply = lambda body: (401, f"wrong key {KEY}", {})
    with pytest.raises(FlowdflashError) as caught:
        answered(made, batch("a"))
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert KEY not in str(caught.value) and "***" in str(caught.value)
    assert KEY not in made.config.model_dump_json() + str(made.summary())
    server.reply = lambda body: (401, "-" * 290 + KEY, {})
    with pytest.raises(FlowdflashError) as caught:
        answered(made, batch("a"))
    assert KEY[:4] not in str(caught.value)
    monkeypatch.setenv("TEST_KEY", f"{KEY}\n{KEY}")
    with pytest.raises(FlowdflashError, match="TEST_KEY is no plain text") as caught:
        answered(made, batch("a"))
    assert KEY not in str(caught.value)


def test_half_a_surrogate_pair_in_an_answer_does_not_end_the_conversation(server: Server) -> None:
    server.reply = lambda body: completion("cut \ud83d", reasoning_content="\ud83d")
    asked = [{"role": "user", "content": text} for text in "ab"]
    made = stage(server.url)
    assert answered(made, batch({"messages": asked})) == [Answer("cut \ufffd", 3, "stop", "\ufffd")]
    assert server.requests[1]["messages"][1]["content"] == "cut \ufffd"


@pytest.mark.parametrize(
    ("options", "facts", "path"),
    [
        ({"base_url": "localhost:8000"}, {}, "base_url"),
        ({"base_url": "ftp://host/v1"}, {}, "base_url"),
        ({"base_url": "http://me:secret@host/v1"}, {}, "base_url"),
        ({"base_url": "http://host:99999/v1"}, {}, "base_url"),
        ({"top_p": 0.5}, {}, "top_p"),
        ({"temperature": 1.0, "top_k": 5, "extensions": False}, {}, "top_k"),
        ({}, {"task": "train"}, ""),
        ({"first_wait_secs": 300}, {}, "first_wait_secs"),
    ],
)
def test_what_cannot_work_is_refused_without_asking_anybody(
    options: dict[str, Any], facts: dict[str, Any], path: str
) -> None:
    check = Check("generator", facts)
    config = {"base_url": "http://nobody.invalid/v1", "model": "m", **options}
    OpenAIGenerator(OpenAIGenerator.Config(**config)).check(check)
    assert [problem.path for problem in check.problems] == [path]
