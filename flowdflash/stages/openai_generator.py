"""Lets a model behind an OpenAI-compatible server write the responses: vLLM, SGLang, llama.cpp or a hosted one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from flowdflash.data.chat import OPTIONS_KEY, SURROGATE
from flowdflash.errors import DataInvalid, FlowdflashError
from flowdflash.generation import (
    Message,
    SamplingOptions,
    answer_in_turn,
    answer_seed,
    check_generator,
    checked_rows,
)
from flowdflash.items import Answer, GeneratedBatch, TokenBatch
from flowdflash.stage import Check, Generator, OpenContext, Report, SilentReport

if TYPE_CHECKING:
    import httpx

BUSY = frozenset({408, 425, 429})
"""Statuses besides 5xx that pass."""
OF_ALL_ROWS = frozenset({401, 402, 403, 404, 405, 407})
"""Statuses that speak of key, address or model, and not of one row."""
FINISH: Mapping[str, Literal["stop", "length"]] = {
    "stop": "stop",
    "eos": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "length": "length",
    "max_tokens": "length",
}
"""Names in use for how an answer ended."""
CONNECT_SECS = 30.0
"""Longest wait for a connection."""
sleep, now, draw = asyncio.sleep, time.time, random.random


class OpenAIGenerator(Generator):
    """Asks an OpenAI-compatible server for chat completions, many at once.

    What may pass (a lost connection, a timeout, 429, 5xx) is tried again, after a wait that doubles from
    ``first_wait_secs`` and is never shorter than the server's ``Retry-After``. Tokens are counted by the server, and a
    template that writes the date has the server's.

    What decides how the server samples is sent with every prompt and told in the summary, so that neither its defaults
    nor those that come with the model count: temperature, repetition penalty 1, and where it samples, top-p, top-k and
    min-p 0.
    """

    type = "openai"
    safe_to_change = frozenset(
        {"base_url", "api_key_env", "concurrency", "timeout_secs", "retries", "first_wait_secs", "max_wait_secs"}
    )

    class Config(SamplingOptions):
        """Options of the generator."""

        base_url: str = Field(description="Address up to and with the version, such as http://127.0.0.1:8000/v1.")
        model: str = Field(min_length=1, description="Name of the model, as the server knows it.")
        api_key_env: str = Field(
            "", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", description="Environment variable with the key; empty for none."
        )
        concurrency: int = Field(16, ge=1, le=1024, description="Most requests in flight at once, within a batch.")
        timeout_secs: float = Field(600.0, gt=0, description="Longest wait for an answer, in seconds.")
        retries: int = Field(6, ge=0, description="Times that a request is tried again.")
        first_wait_secs: float = Field(1.0, gt=0, description="Seconds before the first of them; doubled each time.")
        max_wait_secs: float = Field(
            120.0, gt=0, description="Longest wait in seconds; a server that asks for a longer one ends the run."
        )
        extensions: bool = Field(
            True,
            description="Send top_k, min_p and repetition_penalty too, which vLLM and SGLang know. A server "
            "that knows OpenAI's options alone refuses them: with false they are left out, and its own values count.",
        )
        on_bad_row: Literal["skip", "error"] = Field(
            "error", description="Leave prompts that the server refuses (4xx) out, counted, or end the run."
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._runner: asyncio.Runner | None = None
        self._client: httpx.AsyncClient | None = None
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._key = ""
        self._fixed: dict[str, Any] = {}
        self._seed = 0
        self._report: Report = SilentReport()
        self._counts = dict.fromkeys(("responses", "responses_cut", "response_tokens", "prompt_tokens", "retries"), 0)
        self._secs = 0.0

    def check(self, check: Check) -> Mapping[str, Any]:
        """The address makes sense and holds no secret; nobody is asked."""
        config = self.config
        check_generator(check, config)
        try:
            parts = urlsplit(config.base_url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable, parts = False, urlsplit("")
        if not usable:
            check.refuse("base_url", "it is no http(s) address", "write it as http://127.0.0.1:8000/v1")
        elif parts.username or parts.password or parts.query:
            check.refuse("base_url", "a key does not belong into the address", "name a variable in api_key_env")
        if config.top_k and not config.extensions:
            check.refuse("top_k", "it is one of the extensions that are not sent", "set extensions: true, or remove it")
        if config.first_wait_secs > config.max_wait_secs:
            check.refuse("first_wait_secs", f"it is above max_wait_secs, {config.max_wait_secs:g}", "lower it")
        return {"model": config.model, "max_new_tokens": config.max_new_tokens}

    def open(self, ctx: OpenContext) -> None:
        """Read the key; nothing is sent before the first batch."""
        import httpx

        config = self.config
        if config.api_key_env:
            self._key = os.environ.get(config.api_key_env, "").strip()
            if not self._key:
                raise FlowdflashError(f"environment variable {config.api_key_env} is not set (set it to the API key)")
            if not (self._key.isascii() and self._key.isprintable()):  # the client would repeat it in its error
                raise FlowdflashError(f"environment variable {config.api_key_env} is no plain text (set it anew)")
        self._report = ctx.report
        self._seed = ctx.seed if config.seed == "pipeline" else config.seed
        sampled = config.temperature > 0
        self._fixed = {"model": config.model, "max_tokens": config.max_new_tokens, "temperature": config.temperature}
        self._fixed |= {"top_p": config.top_p} if sampled else {}
        if config.extensions:  # top_k -1: vLLM, SGLang and llama.cpp take it for no limit
            self._fixed |= {"top_k": config.top_k or -1, "min_p": 0.0} if sampled else {}
            self._fixed["repetition_penalty"] = 1.0
        if template := ctx.facts.get("template_options"):
            self._fixed[OPTIONS_KEY] = dict(template)
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECS),
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )

    def generate(self, batch: TokenBatch) -> GeneratedBatch:
        """The answers to each prompt, turn by turn."""
        assert self._runner is not None, "generate before open"
        runner, rows, info = self._runner, checked_rows(batch.rows, batch.info.samples), batch.info
        started = time.monotonic()

        def ask(turn: int, places: Sequence[int], said: Sequence[Sequence[Message]]) -> list[Answer]:
            bodies = []
            for place, messages in zip(places, said, strict=True):
                body = {**self._fixed, "messages": [_sendable(message) for message in messages]}
                if self.config.temperature > 0:
                    # Within 31 bits: some servers hold a seed in an int.
                    body["seed"] = answer_seed(self._seed, info.epoch, info.sample_ids[place], turn) % (1 << 31)
                if tools := rows[place].get("tools"):
                    body["tools"] = tools
                if own := rows[place].get(OPTIONS_KEY):
                    body[OPTIONS_KEY] = {**body.get(OPTIONS_KEY, {}), **own}
                bodies.append(body)
            return runner.run(self._ask_all(bodies))

        answers = answer_in_turn(rows, ask)
        self._secs += time.monotonic() - started
        for answer in (answer for turns in answers for answer in turns if not answer.rejected):
            self._counts["responses"] += 1
            self._counts["responses_cut"] += answer.finish_reason == "length"
            self._counts["response_tokens"] += answer.tokens
        return GeneratedBatch(info, answers, batch.rows)

    async def _ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        free = asyncio.Semaphore(self.config.concurrency)

        async def one(body: Mapping[str, Any]) -> Answer:
            async with free:
                return await self._ask(body)

        tasks = [asyncio.ensure_future(one(body)) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, body: Mapping[str, Any]) -> Answer:
        """One answer, after as many tries as it takes and may take."""
        import httpx

        assert self._client is not None
        why, asked_secs = "", 0.0
        for attempt in range(self.config.retries + 1):
            if attempt:
                await self._wait(attempt, asked_secs, why)
            try:
                async with asyncio.timeout(self.config.timeout_secs):  # the client's own counts anew with every byte
                    response = await self._client.post(self._url, json=body)
            except TimeoutError:
                why, asked_secs = f"no answer within timeout_secs, {self.config.timeout_secs:g}", 0.0
                continue
            except httpx.RequestError as error:
                why, asked_secs = f"{type(error).__name__} {error}".strip(), 0.0
                continue
            if response.status_code in BUSY or response.status_code >= 500:
                why, asked_secs = self._said(response), _retry_after_secs(response.headers.get("retry-after", ""))
                continue
            if not response.is_success:
                return self._refused(response)
            answer = self._read(response)
            if isinstance(answer, Answer):
                return answer
            why, asked_secs = answer, 0.0
        raise FlowdflashError(f"{self._url}: no answer in {self.config.retries + 1} tries, at last: {why}")

    async def _wait(self, attempt: int, asked_secs: float, why: str) -> None:
        """Wait before a try: by chance up to a half less than in full, so that requests do not come all at once."""
        config = self.config
        if asked_secs > config.max_wait_secs:
            raise FlowdflashError(
                f"{self._url}: {why}; it asks to wait {asked_secs:,.0f} s, more than max_wait_secs "
                f"{config.max_wait_secs:g} (raise it, or go on with the run later)"
            )
        full = min(config.first_wait_secs * 2 ** min(attempt - 1, 32), config.max_wait_secs)
        secs = max(full * (1 - draw() / 2), asked_secs)
        self._counts["retries"] += 1
        if attempt > 1:
            self._report.info(f"{self._url}: {why}; try {attempt + 1} of {config.retries + 1} in {secs:.0f} s")
        await sleep(secs)

    def _refused(self, response: httpx.Response) -> Answer:
        status, said = response.status_code, self._said(response)
        if status in OF_ALL_ROWS or status < 400:
            raise FlowdflashError(f"{self._url}: {said} (check base_url, model and api_key_env)")
        if self.config.on_bad_row == "error":
            raise DataInvalid(f"{self._url}: {said} (correct the prompt, or set on_bad_row: skip to leave it out)")
        return Answer("", 0, rejected=f"refused by the server with status {status}", detail=said)

    def _said(self, response: httpx.Response) -> str:
        """Status and what the server says of it; never the key, whatever is sent back."""
        text = " ".join(response.text.split())
        text = text.replace(self._key, "***") if self._key else text
        return f"status {response.status_code} {text[:300]}".strip()

    def _read(self, response: httpx.Response) -> Answer | str:
        """The answer in a response, or why there is none."""
        try:
            data = response.json()
            choice, usage = data["choices"][0], data["usage"]
            message, ended = choice["message"], str(choice.get("finish_reason"))
            text, tokens = message.get("content") or "", int(usage["completion_tokens"])
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            if not (isinstance(text, str) and isinstance(reasoning, str)):
                raise TypeError("content is not text")
            self._counts["prompt_tokens"] += int(usage.get("prompt_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            return f"{self._said(response)}: no chat completion with usage ({error!r})"
        if message.get("tool_calls"):
            return Answer("", tokens, rejected="answered by a tool call")
        if ended not in FINISH:
            return Answer("", tokens, rejected=f"finish_reason {ended}")
        # JSON may bring half a surrogate pair, where an answer was cut; no UTF-8 writer takes it.
        return Answer(SURROGATE.sub("\ufffd", text), tokens, FINISH[ended], SURROGATE.sub("\ufffd", reasoning))

    def close(self) -> None:
        """Hang up."""
        if self._runner is not None:
            if self._client is not None:
                self._runner.run(self._client.aclose())
            self._runner.close()
        self._runner = self._client = None

    def summary(self) -> Mapping[str, Any]:
        """How much was written, how fast, and how often a request had to be tried again."""
        rate = self._counts["response_tokens"] / self._secs if self._secs else 0.0
        return {**self._counts, "tokens_per_sec": round(rate, 1), "request": self._fixed}


def _sendable(message: Message) -> Message:
    """A message as servers take it: the arguments of a tool call are JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _retry_after_secs(header: str) -> float:
    """Seconds of a ``Retry-After`` header, which is a number or a date; 0 where there is none that can be read."""
    try:
        return max(float(header), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(header).timestamp() - now(), 0.0)
    except ValueError:
        return 0.0
