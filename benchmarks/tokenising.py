"""What building a token store costs: rows to tokens, against the tokenizers library alone, in one run on one machine.

The library alone gets the texts ready rendered, in large calls. The store reads the file, renders each row with the
chat template (twice per answer), tokenises, works out the loss mask, checks it and writes; the processes that it starts
for a large file are in its time. Rounds of both alternate, so that a change of load meets both alike; medians count.
The ratio of CPU times is given too. Rendering a row costs the same whether it is short or long, so two kinds of rows
are measured: such as the shipped ones, a question and an answer, and conversations of the length that people have with
an assistant. CPU shares are of the encoding of some of the rows in one process, phase by phase. Exits with 1 if the
store is below the limit on either.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flowdflash.cache import cache_dir
from flowdflash.data import encode
from flowdflash.data.align import tokenise
from flowdflash.data.encode import ChatEncoder, EncodeOptions, RowResult
from flowdflash.data.packed import pack
from flowdflash.data.rows import chunks, read_jsonl
from flowdflash.data.store import open_or_build, store_key
from flowdflash.data.store_writer import StoreWriter
from flowdflash.target.load import load_tokenizer

LIMIT = 0.8
DATA = Path(__file__).resolve().parents[1] / "data" / "train.jsonl.gz"
SOME_ROWS = 3000
CALL_ROWS = 10_000
PHASES = ("read", "render", "tokenise", "align", "write")


def shipped(answers: list[str], count: int, rng: random.Random) -> Iterator[list[str]]:
    """Questions and answers as long as the shipped ones, with other words in them."""
    for n in range(count):
        words = answers[n % len(answers)].split(" ")
        rng.shuffle(words)
        yield [f"Give me three facts about {words[0]}.", " ".join(words).strip()]


def conversations(answers: list[str], count: int, rng: random.Random) -> Iterator[list[str]]:
    """Four questions with answers of three paragraphs each."""
    for _ in range(count):
        yield [text for _ in range(4) for text in (rng.choice(answers)[:200], "\n\n".join(rng.sample(answers, 3)))]


def write(path: Path, rows: Iterator[list[str]]) -> None:
    roles = ("user", "assistant")
    with path.open("w", encoding="utf-8") as out:
        for turns in rows:
            messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
            out.write(json.dumps({"messages": messages}) + "\n")


def build(path: Path, encoder: ChatEncoder) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        key, size = store_key(encoder, [path]), path.stat().st_size
        store = open_or_build(Path(folder), key, partial(read_jsonl, path), encoder, nbytes=size)
        assert store.accounts.rows_kept == store.accounts.rows_read > 0


def tokenised(library: Any, texts: list[str]) -> None:
    """What the library alone does, in calls that keep memory bounded and all cores busy."""
    for start in range(0, len(texts), CALL_ROWS):
        library.encode_batch(texts[start : start + CALL_ROWS])


def both(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the wall, and of CPU time, that of child processes included."""
    begin, busy = time.perf_counter(), sum(os.times()[:4])
    work()
    return time.perf_counter() - begin, sum(os.times()[:4]) - busy


def shares(path: Path, encoder: ChatEncoder) -> dict[str, float]:
    """Share of each phase in the CPU time of building a store of some rows, in this process."""
    spent = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args)
            finally:
                spent[phase] += time.process_time() - begin

        return measured

    def written(folder: str) -> None:
        with StoreWriter(Path(folder)) as writer:
            writer.add(rows, pack(results))

    some = partial(read_jsonl, path, limit=SOME_ROWS)
    rows, results = list(some()), list[RowResult]()
    spent["read"] = both(lambda: list(some()))[1]
    render = timed("render", encoder._drafts)
    with patch.object(encoder, "_drafts", render), patch.object(encode, "tokenise", timed("tokenise", tokenise)):
        encoded = both(lambda: [results.extend(encoder.encode(chunk)) for chunk in chunks(rows)])[1]
    spent["align"] = encoded - spent["render"] - spent["tokenise"]
    with tempfile.TemporaryDirectory() as folder:
        spent["write"] = both(lambda: written(folder))[1]
    return {phase: secs / sum(spent.values()) for phase, secs in spent.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--megabytes", type=float, default=150.0, help="about so much text per kind of row")
    parser.add_argument("--tokenizer", default="SmolLM2-135M-Instruct", help="a model, as in a pipeline")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer, cache_dir())
    encoder = ChatEncoder(tokenizer, EncodeOptions(max_length=1 << 20))
    answers = [row.value["messages"][-1]["content"] for row in read_jsonl(DATA)]
    columns = f"{'rows':<14} {'MB':>5} {'chars':>6} {'library':>9} {'store':>9} {'ratio':>6} {'of CPU':>6}"
    print(f"{columns}  CPU of the store: {', '.join(PHASES)}")
    worst = 1e9
    for kind in (shipped, conversations):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            count = round(args.megabytes * 1e6 / (700 if kind is shipped else 7000))
            write(path, kind(answers, count, random.Random(7)))
            messages = [row.value["messages"] for row in read_jsonl(path)]
            texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in messages]
            library = partial(tokenised, tokenizer._tokenizer, texts)
            del messages
            gc.collect()
            gc.freeze()  # the texts, which no store build would have in memory
            rounds = [(both(library), both(partial(build, path, encoder))) for _ in range(args.rounds)]
            ratio, cpu = (statistics.median(one[n] / other[n] for one, other in rounds) for n in (0, 1))
            told = ", ".join(f"{share:.0%}" for share in shares(path, encoder).values())
            size = sum(map(len, texts))
            rates = "".join(f" {size / statistics.median(r[n][0] for r in rounds) / 1e6:>5.1f}MB/s" for n in (0, 1))
            print(
                f"{kind.__name__:<14} {size / 1e6:>5.0f} {size // count:>6}{rates} {ratio:>6.0%} {cpu:>6.0%}  {told}",
                flush=True,
            )
            worst = min(worst, ratio)
    print(f"{worst:.0%} of the library alone, limit {LIMIT:.0%}")
    return 0 if worst >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
