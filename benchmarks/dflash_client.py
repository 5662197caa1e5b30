"""The method's authors' own inference code on a draft of ours: ``python benchmarks/dflash_client.py runs/first``.

The PyPI package ``dflash`` (``pip install dflash==0.1.0``) loads the export; it, our decode loop and plain greedy
decoding then answer the same held-out prompts with the real target, in fp32. Exits with 1 if a token differs from plain
greedy decoding, or an acceptance length from ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dflash import model as theirs

from flowdflash.cache import cache_dir
from flowdflash.data.prompts import load_prompts
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.export import export_zlab, load_zlab
from flowdflash.dflash.importing import load_draft
from flowdflash.target.load import load_target, load_tokenizer
from flowdflash.target.quiet import quiet

HELD_OUT = Path(__file__).resolve().parents[1] / "data" / "held_out.jsonl.gz"
Answer = tuple[list[int], list[int]]
"""Tokens, and how many each verification pass committed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a run, of a checkpoint or of an export")
    parser.add_argument("--target", help="the target; default: what the checkpoint says")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="chat rows")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    draft = load_draft(given.checkpoint)
    ref = given.target or draft.provenance["target"]
    tokenizer = load_tokenizer(ref, cache_dir())
    prompts = [p.input_ids.tolist() for p in load_prompts(given.prompts, tokenizer, limit=given.num_prompts)]
    target = load_target(ref, cache_dir(), dtype="float32", device="cpu").model
    with tempfile.TemporaryDirectory() as folder, quiet():
        export = export_zlab(Path(folder) / "draft", draft.config, draft.tensors)
        own = load_zlab(export)[1].float()
        other = theirs.DFlashDraftModel.from_pretrained(export, dtype=torch.float32).eval()
    return compare(target, own, other, prompts, given.max_new_tokens, [tokenizer.eos_token_id])


def compare(target: Any, own: Any, other: Any, prompts: list[list[int]], limit: int, stop_ids: list[int]) -> int:
    """Decode one prompt at a time in three ways, and print the table."""
    # Their clock waits for a GPU; without return_stats, acceptance lengths are not told.
    theirs._cuda_time = time.perf_counter

    def plain(prompt: list[int]) -> Answer:
        return list(greedy(target, [prompt], max_new_tokens=limit, stop_ids=stop_ids)[0]), []

    def ours(prompt: list[int]) -> Answer:
        (result,) = speculative_decode(target, own, [prompt], max_new_tokens=limit, stop_ids=stop_ids)
        return list(result.tokens), list(result.produced)

    def reference(prompt: list[int]) -> Answer:
        ids = torch.tensor([prompt])
        out = theirs.dflash_generate(other, target, ids, limit, stop_ids, temperature=0.0, return_stats=True)
        return out.output_ids[0, len(prompt) :].tolist(), list(out.acceptance_lengths)

    print(f"{'decoder':<18}{'tokens':>8}{'equal to plain':>16}{'passes':>8}{'τ':>8}{'τ pooled':>10}{'secs':>8}")
    ways: dict[str, Callable[[list[int]], Answer]] = {"plain greedy": plain, "flowdflash": ours, "dflash": reference}
    answers: dict[str, list[Answer]] = {}
    for name, decode in ways.items():
        began = time.monotonic()
        answers[name] = [decode(prompt) for prompt in prompts]
        row(name, answers[name], answers["plain greedy"], time.monotonic() - began)
    same = all([t for t, _ in found] == [t for t, _ in answers["plain greedy"]] for found in answers.values())
    return 0 if same and answers["flowdflash"] == answers["dflash"] else 1


def row(name: str, found: list[Answer], plain: list[Answer], secs: float) -> None:
    equal = sum(tokens == wanted for (tokens, _), (wanted, _) in zip(found, plain, strict=True))
    passes = [n for _, produced in found for n in produced]
    means = [sum(produced) / len(produced) for _, produced in found if produced]
    taus = f"{sum(means) / len(means):>8.3f}{sum(passes) / len(passes):>10.3f}" if passes else f"{'':>18}"
    tokens = sum(len(t) for t, _ in found)
    print(f"{name:<18}{tokens:>8}{f'{equal} of {len(plain)}':>16}{len(passes) or '':>8}{taus}{secs:>8.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
