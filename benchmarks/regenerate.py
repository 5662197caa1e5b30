"""Answers of a target: one prompt at a time against prompts in batches sorted by length, in one run on one machine.

    python benchmarks/regenerate.py

The default target answers prompts greedily, in rounds: all of them in batches, then a part of them one at a time,
another in each round, so that a change of clock or load meets both alike; the median of the ratios of tokens/s counts.
Exits with 1 if it is below the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flowdflash.cache import cache_dir
from flowdflash.data.prompts import load_prompts
from flowdflash.dflash.sampling import Sampling
from flowdflash.items import Answer, IntArray
from flowdflash.stage import SilentReport
from flowdflash.target.generate import generate_answers, stop_ids
from flowdflash.target.load import load_target, load_tokenizer

LIMIT = 5.0
DATA = Path(__file__).resolve().parents[1] / "data" / "prompts.train.jsonl.gz"


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--model", default="SmolLM2-135M-Instruct")
    parse.add_argument("--prompts", type=int, default=48)
    parse.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parse.add_argument("--batch", type=int, default=48, help="prompts in a batch")
    parse.add_argument("--alone", type=int, default=8, help="prompts that go one at a time in a round")
    parse.add_argument("--rounds", type=int, default=3)
    options = parse.parse_args()

    report = SilentReport()
    target = load_target(options.model, cache_dir(), dtype="float32", report=report)
    tokenizer = load_tokenizer(options.model, cache_dir(), report)
    stops = stop_ids(target, tokenizer)
    every = load_prompts(DATA, tokenizer)
    prompts = [prompt.input_ids for prompt in every[:: max(len(every) // options.prompts, 1)][: options.prompts]]
    by_length = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))

    def answers(chosen: Sequence[IntArray]) -> list[Answer]:
        return generate_answers(
            target,
            tokenizer,
            chosen,
            stops=stops,
            max_new_tokens=options.tokens,
            sampling=Sampling(),
            seeds=[0] * len(chosen),
        )

    def timed(groups: Sequence[Sequence[int]]) -> tuple[float, dict[int, Answer]]:
        begin = time.perf_counter()
        made: dict[int, Answer] = {}
        for group in groups:
            made |= zip(group, answers([prompts[n] for n in group]), strict=True)
        return time.perf_counter() - begin, made

    answers(prompts[:1])  # warm
    batches = [by_length[n : n + options.batch] for n in range(0, len(by_length), options.batch)]
    single: dict[int, Answer] = {}
    ratios, rows = [], []
    for number in range(options.rounds):
        places = range(number, len(prompts), max(len(prompts) // options.alone, 1))
        batch_secs, batched = timed(batches)
        secs, made = timed([[place] for place in places])
        single |= made
        rates = [sum(a.tokens for a in some.values()) / took for some, took in ((made, secs), (batched, batch_secs))]
        ratios.append(rates[1] / rates[0])
        rows.append(rates)
    same = sum(single[place].text == batched[place].text for place in single)
    threads = torch.get_num_threads()
    print(f"{options.model}, {target.device}, {threads} threads, {len(prompts)} prompts, {options.tokens} tokens each")
    print("round  one at a time, tokens/s  batches by length, tokens/s  ratio")
    for number, (rates, ratio) in enumerate(zip(rows, ratios, strict=True), 1):
        print(f"{number:5}  {rates[0]:23.1f}  {rates[1]:27.1f}  {ratio:5.2f}")
    median = statistics.median(ratios)
    print(f"median ratio {median:.2f} (limit {LIMIT:g}); {same} of {len(single)} answers the same both ways")
    return 0 if median >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
