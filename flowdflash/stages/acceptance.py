"""The built-in evaluator: acceptance length of checkpoints on held-out prompts, by real speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import Checkpoint
from flowdflash.stage import Check, ModelRef, OpenContext, PipelinePath, Sink, StageConfig
from flowdflash.training.acceptance import Acceptance, AcceptanceMeter


class AcceptanceSink(Sink):
    """Measures the acceptance length of drafts on held-out prompts by real speculative decoding."""

    type = "acceptance"
    reads = (Checkpoint,)
    saves = False

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
        device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")

    def check(self, check: Check) -> Mapping[str, Any]:
        """The prompts are there and the target is known."""
        if self.config.prompts is not None and not self.config.prompts.is_file():
            check.refuse("prompts", f"there is no file {self.config.prompts}")
        if self.config.model is None and "model" not in check.facts:
            check.refuse("model", "no stage upstream says which target the draft is for", "name it here")
        if not (self.config.at_start or self.config.at_end or self.config.every_steps):
            check.refuse("", "nothing is ever measured: at_start and at_end are off and every_steps is 0")
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Read the prompts; the target is loaded when the first checkpoint comes."""
        self.ctx = ctx
        self.ref = self.config.model or ctx.facts["model"]
        self.path = ctx.run_dir / "evaluations.jsonl"
        self.meter: AcceptanceMeter | None = None
        self.results: list[Acceptance] = []
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
        return [list(p.input_ids) for p in prompts], {int(tokenizer.eos_token_id)}

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
        if reason in ("start", "final"):
            return bool(self.config.at_start if reason == "start" else self.config.at_end)
        return reason == "every" and self.config.every_steps > 0 and step % self.config.every_steps == 0

    def measure(self, item: Checkpoint) -> Acceptance:
        """Acceptance of one checkpoint's draft."""
        from flowdflash.dflash.export import config_from_zlab
        from flowdflash.dflash.model import DFlashDraft

        meter = self._loaded()
        draft = DFlashDraft(config_from_zlab(item.draft_config), seed=None)
        draft.load_state_dict(dict(item.draft_tensors), strict=True, assign=True)
        weight = meter.target.get_input_embeddings().weight
        return meter.measure(draft.to(weight.device, weight.dtype).eval(), item.step)

    def write(self, item: Checkpoint) -> None:
        """Measure one checkpoint, and append the result to ``evaluations.jsonl``."""
        result = self.measure(item)
        self.results.append(result)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.as_dict()) + "\n")
        self.ctx.report.info(
            f"step {item.step}: acceptance length {result.tau:.3f} on {result.prompts} prompts, "
            f"{result.identical} identical to plain greedy decoding"
        )

    def close(self) -> None:
        """Let the target go."""
        self.meter = None

    def summary(self) -> Mapping[str, Any]:
        """Every evaluation, in order."""
        return {"evaluations": [result.as_dict() for result in self.results]}


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, in order; empty if there are none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
