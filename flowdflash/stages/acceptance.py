"""The built-in evaluator: acceptance length of checkpoints on held-out prompts, by real speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import Checkpoint
from flowdflash.journal import cut_back, entries
from flowdflash.stage import Check, ModelRef, OpenContext, PipelinePath, Sink, StageConfig
from flowdflash.training.acceptance import Acceptance, AcceptanceMeter


class AcceptanceSink(Sink):
    """Measures the acceptance length of drafts on held-out prompts by real speculative decoding."""

    type = "acceptance"
    reads = (Checkpoint,)
    saves = False
    safe_to_change = frozenset(
        {"num_prompts", "max_new_tokens", "batch_size", "at_start", "at_end", "every_steps", "device"}
    )

    class Config(StageConfig):
        """Options of the sink ``acceptance``."""

        prompts: PipelinePath | None = Field(
            None, description="Chat rows whose last answer is left out; none: random tokens, for toy targets."
        )
        model: ModelRef | None = Field(None, description="The target; default: the one the draft is trained for.")
        num_prompts: int = Field(32, ge=1, description="Prompts to decode, the first of the file.")
        max_new_tokens: int = Field(64, ge=1, description="Most tokens generated per prompt.")
        batch_size: int = Field(32, ge=1, description="Prompts decoded at once.")
        at_start: bool = Field(True, description="Measure the untrained draft too.")
        at_end: bool = Field(True, description="Measure when training has ended.")
        every_steps: int = Field(0, ge=0, description="Measure every so many optimizer steps; 0 for never on the way.")
        dtype: Literal["auto", "float32", "bfloat16"] = Field(
            "float32", description="Of target and draft while decoding; only float32 is exactly lossless."
        )
        draft_dtype: Literal["bfloat16", "float32"] = Field(
            "bfloat16",
            description="Format that the draft's weights are rounded to before they are measured: that of the export.",
        )
        device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")

    def check(self, check: Check) -> Mapping[str, Any]:
        """The prompts are there and the target is known."""
        if self.config.prompts is not None and not self.config.prompts.is_file():
            check.refuse("prompts", f"there is no file {self.config.prompts}")
        if self.config.model is None and "model" not in check.facts and check.complete:
            check.refuse("model", "no stage upstream says which target the draft is for", "name it here")
        if not (self.config.at_start or self.config.at_end or self.config.every_steps):
            check.refuse("", "nothing is ever measured: at_start and at_end are off and every_steps is 0")
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Read the prompts; the target is loaded when the first checkpoint comes."""
        from flowdflash.target.load import choose_device

        self.ctx = ctx
        self.device = choose_device(self.config.device)
        self.ref = self.config.model or ctx.facts["model"]
        self.path = ctx.run_dir / "evaluations.jsonl"
        self.meter: AcceptanceMeter | None = None
        self.results: list[Acceptance] = []
        self.earlier: list[dict[str, Any]] = []  # of the run that this one goes on with
        if ctx.resumed_at_step is not None:
            cut_back(self.path, ctx.resumed_at_step)
            self.earlier = [e for e in entries(self.path) if e.pop("stage", "") == ctx.stage]
        self.prompts, self.stop_ids = self._read_prompts()

    def _read_prompts(self) -> tuple[list[list[int]], set[int]]:
        cfg = self.config
        if cfg.prompts is None:
            import numpy as np

            rows = int(self.ctx.facts.get("vocab_size", 64))
            rng = np.random.default_rng(self.ctx.seed)
            return [rng.integers(0, rows, 8).tolist() for _ in range(cfg.num_prompts)], set()
        from flowdflash.data.prompts import load_prompts
        from flowdflash.target.load import load_tokenizer

        tokenizer = load_tokenizer(self.ref, self.ctx.cache_dir, self.ctx.report)
        prompts = load_prompts(
            cfg.prompts, tokenizer, limit=cfg.num_prompts, template_options=self.ctx.facts.get("template_options")
        )
        if len(prompts) < cfg.num_prompts:
            raise DataInvalid(f"{cfg.prompts}: {len(prompts)} usable prompts, num_prompts asks for {cfg.num_prompts}")
        end = tokenizer.eos_token_id
        return [p.input_ids.tolist() for p in prompts], set() if end is None else {int(end)}

    def _loaded(self) -> AcceptanceMeter:
        if self.meter is None:
            from flowdflash.target.load import load_target

            target = load_target(
                self.ref,
                self.ctx.cache_dir,
                dtype=self.config.dtype,
                device=self.config.device,
                report=self.ctx.report,
                while_running=True,
            )
            self.meter = AcceptanceMeter(
                target.model,
                self.prompts,
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=self.stop_ids,
                batch_size=self.config.batch_size,
            )
        return self.meter

    def wants(self, step: int, reason: str) -> bool:
        """True for the steps that the options name. An interrupted run is not kept waiting."""
        if any(e["step"] == step for e in self.earlier):
            return False
        if reason == "start":
            return bool(self.config.at_start)
        # The last step is only ever asked about as such, even where its turn has come anyway.
        turn = step > 0 and self.config.every_steps > 0 and step % self.config.every_steps == 0
        return turn if reason == "every" else reason == "final" and (turn or bool(self.config.at_end))

    def measure(self, item: Checkpoint) -> Acceptance:
        """Acceptance of one checkpoint's draft, as exported: with weights rounded to ``draft_dtype``."""
        import torch

        from flowdflash.dflash.export import config_from_zlab
        from flowdflash.dflash.model import DFlashDraft

        meter = self._loaded()
        draft = DFlashDraft(config_from_zlab(item.draft_config), seed=None)
        stored = getattr(torch, self.config.draft_dtype)
        draft.load_state_dict({n: t.to(stored) for n, t in item.draft_tensors.items()}, strict=True, assign=True)
        weight = meter.target.get_input_embeddings().weight
        return meter.measure(draft.to(weight.device, weight.dtype).eval(), item.step)

    def write(self, item: Checkpoint) -> None:
        """Measure one checkpoint, and append the result to ``evaluations.jsonl``; each step once."""
        if any(result.step == item.step for result in self.results):
            return
        result = self.measure(item)
        self.results.append(result)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.ctx.stage, **result.as_dict()}, allow_nan=False) + "\n")
        self.ctx.report.info(
            f"step {item.step}: acceptance length {result.tau:.3f} on {result.prompts} prompts, "
            f"{result.identical} identical to plain greedy decoding"
        )

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self.device.type == "cpu"

    def close(self) -> None:
        """Let the target go."""
        self.meter = None

    def summary(self) -> Mapping[str, Any]:
        """Every evaluation, in order."""
        return {"evaluations": [*self.earlier, *(result.as_dict() for result in self.results)]}


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order; empty if there are none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
