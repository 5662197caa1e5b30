"""The built-in evaluator: acceptance length of checkpoints on held-out prompts, by real speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from flowdflash.data.files import file_problem
from flowdflash.errors import DataInvalid
from flowdflash.items import Checkpoint
from flowdflash.journal import cut_back, entries
from flowdflash.stage import Check, ModelRef, OpenContext, PipelinePath, Sink, StageConfig
from flowdflash.training.acceptance import Acceptance, AcceptanceMeter, Paused


class AcceptanceSink(Sink):
    """Measures the acceptance length of drafts on held-out prompts by real speculative decoding."""

    type = "acceptance"
    reads = (Checkpoint,)
    saves = False
    safe_to_change = frozenset(
        {"num_prompts", "max_new_tokens", "batch_size", "alone", "block_size", "temperature", "top_p", "top_k"}
        | {"at_start", "at_end", "every_steps", "when_busy", "device"}
    )

    class Config(StageConfig):
        """Options of the sink ``acceptance``."""

        prompts: PipelinePath | None = Field(
            None,
            description="Chat rows, of which the first answer is left out (and looked at for eal), rows with a prompt, "
            "or a .txt file of one prompt per line; none: random tokens, for toy targets.",
        )
        model: ModelRef | None = Field(None, description="The target; default: the one the draft is trained for.")
        num_prompts: int = Field(32, ge=0, description="Prompts to decode, the first of the file; 0 for all.")
        max_new_tokens: int = Field(64, ge=1, description="Most tokens generated per prompt, and looked at per answer.")
        batch_size: int = Field(32, ge=1, description="Prompts decoded at once.")
        alone: bool = Field(False, description="Decode every prompt by itself too: the speed that one user sees.")
        block_size: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
            "auto", description="Slots per block; auto: as the draft is trained."
        )
        temperature: float = Field(0.0, ge=0, description="0 decodes greedily; above, tokens are sampled.")
        top_p: float = Field(1.0, gt=0, le=1, description="Sample from the fewest tokens that reach this probability.")
        top_k: int = Field(0, ge=0, description="Sample from so many most likely tokens; 0 for all.")
        at_start: bool = Field(True, description="Measure the untrained draft too.")
        at_end: bool = Field(True, description="Measure when training has ended.")
        every_steps: int = Field(0, ge=0, description="Measure every so many optimizer steps; 0 for never on the way.")
        when_busy: Literal["skip", "wait"] = Field(
            "skip",
            description="When a measurement on the way is due and one is going on: leave it out and say so, or let it "
            "wait, and training with it. A stopped run waits for its measurements only with wait.",
        )
        dtype: Literal["auto", "float32", "bfloat16"] = Field(
            "float32", description="Of target and draft while decoding; only float32 is exactly lossless."
        )
        draft_dtype: Literal["bfloat16", "float32"] = Field(
            "bfloat16",
            description="Format that the draft's weights are rounded to before they are measured: that of the export.",
        )
        device: str = Field("auto", description="auto, cpu, cuda or cuda:N; auto is the last GPU if there is one.")

    def check(self, check: Check) -> Mapping[str, Any]:
        """The prompts are there and the target is known."""
        config = self.config
        if config.prompts is not None and (problem := file_problem(config.prompts)):
            check.refuse("prompts", problem)
        elif config.prompts is not None and config.prompts.resolve() in check.facts.get("files", ()):
            check.warn(
                "prompts",
                "the draft is trained on rows of this file, so what is measured is not what it does on new prompts",
                "name a file of held-out prompts; a source with split: held_out and a sink of type responses write one",
            )
        if config.prompts is None and not config.num_prompts:
            check.refuse("num_prompts", "there is no end of random prompts", "say how many, or name a file of prompts")
        if config.model is None and "model" not in check.facts and check.complete:
            check.refuse("model", "no stage upstream says which target the draft is for", "name it here")
        if not (config.at_start or config.at_end or config.every_steps):
            check.refuse("", "nothing is ever measured: at_start and at_end are off and every_steps is 0")
        for name in ("top_p", "top_k"):
            if not config.temperature and name in config.model_fields_set:
                check.refuse(name, "greedy decoding does not sample", "set a temperature, or remove it")
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Read the prompts; the target is loaded when the first checkpoint comes."""
        from flowdflash.target.load import choose_device, gpu_count

        self.ctx = ctx
        self.results: list[Acceptance] = []
        self.earlier: list[dict[str, Any]] = []  # of the run that this one goes on with
        self.promised: set[int] = set()
        self.left_out: list[int] = []
        # Not the first GPU, where a drafter trains by default, if there is another.
        last = f"cuda:{gpu_count() - 1}" if gpu_count() else "cpu"
        self.device = choose_device(last if self.config.device == "auto" else self.config.device)
        self.ref = self.config.model or ctx.facts["model"]
        self.path = ctx.run_dir / "evaluations.jsonl"
        self.meter: AcceptanceMeter | None = None
        self.busy_with: int | None = None
        if ctx.resumed_at_step is not None:
            cut_back(self.path, ctx.resumed_at_step)
            self.earlier = [e for e in entries(self.path) if e.pop("stage", "") == ctx.stage]
        self._read_prompts()

    def _read_prompts(self) -> None:
        cfg = self.config
        self.answers: list[tuple[list[int], int] | None] = []
        self.tokenizer: Any = None
        if cfg.prompts is None:
            import numpy as np

            rows = int(self.ctx.facts.get("vocab_size", 64))
            rng = np.random.default_rng(self.ctx.seed)
            self.prompts = [rng.integers(0, rows, 8).tolist() for _ in range(cfg.num_prompts)]
            return
        from flowdflash.data.prompts import load_prompts
        from flowdflash.target.load import load_tokenizer

        self.tokenizer = load_tokenizer(self.ref, self.ctx.cache_dir, self.ctx.report)
        prompts = load_prompts(
            cfg.prompts,
            self.tokenizer,
            limit=cfg.num_prompts,
            template_options=self.ctx.facts.get("template_options"),
            answer_tokens=cfg.max_new_tokens,
            warn=self.ctx.report.warn,
        )
        if len(prompts) < cfg.num_prompts:
            raise DataInvalid(f"{cfg.prompts}: {len(prompts)} usable prompts, num_prompts asks for {cfg.num_prompts}")
        self.prompts = [p.input_ids.tolist() for p in prompts]
        self.answers = [p.answered and (p.answered[0].tolist(), p.answered[1]) for p in prompts]

    def _loaded(self) -> AcceptanceMeter:
        if self.meter is None:
            from flowdflash.dflash.sampling import Sampling
            from flowdflash.target.generate import stop_ids
            from flowdflash.target.load import load_target

            cfg = self.config
            target = load_target(
                self.ref,
                self.ctx.cache_dir,
                dtype=cfg.dtype,
                device=self.device,
                report=self.ctx.report,
                while_running=True,
            )
            self.meter = AcceptanceMeter(
                target.model,
                self.prompts,
                self.answers,
                max_new_tokens=cfg.max_new_tokens,
                stop_ids=stop_ids(target, self.tokenizer) if self.tokenizer is not None else (),
                batch_size=cfg.batch_size,
                alone=cfg.alone,
                block_size=None if cfg.block_size == "auto" else cfg.block_size,
                sampling=Sampling(cfg.temperature, cfg.top_p, cfg.top_k, self.ctx.seed),
            )
        return self.meter

    def wants(self, step: int, reason: str) -> bool:
        """True for the steps that the options name. An interrupted run is not kept waiting."""
        if any(e["step"] == step for e in self.earlier):
            return False
        if reason == "start":
            wanted = bool(self.config.at_start)
        else:
            # A drafter may ask about the last step as such alone, even where its turn has come anyway.
            turn = step > 0 and self.config.every_steps > 0 and step % self.config.every_steps == 0
            wanted = turn if reason == "every" else reason == "final" and (turn or bool(self.config.at_end))
        if reason == "final" and self.config.at_end and step in self.left_out:
            self.left_out.remove(step)  # on the way; the end is measured whatever else goes on
        if not wanted or step in self.left_out:  # asked twice of each step: what was said once stays
            return False
        if reason == "every" and self.config.when_busy == "skip" and self.busy_with not in (None, step):
            self._leave_out(step, f"that of step {self.busy_with} is going on")
            return False
        self.busy_with = step
        self.promised.add(step)
        return True

    def _leave_out(self, step: int, why: str) -> None:
        self.left_out.append(step)
        self.ctx.report.info(f"{self.ctx.stage}: step {step} is not measured: {why}")

    def measure(self, item: Checkpoint) -> Paused[Acceptance]:
        """Acceptance of one checkpoint's draft, as exported: with weights rounded to ``draft_dtype``."""
        import torch

        from flowdflash.dflash.export import config_from_zlab

        yield "loading the target", 0
        meter = self._loaded()
        draft = config_from_zlab(item.draft_config).new_draft(seed=None)
        stored = getattr(torch, self.config.draft_dtype)
        draft.load_state_dict({n: t.to(stored) for n, t in item.draft_tensors.items()}, strict=True, assign=True)
        trained = draft.config.block_size
        if not self.results and (meter.block_size or 0) > trained:
            self.ctx.report.warn(f"block_size {meter.block_size}: the draft was trained with blocks of {trained} only")
        weight = meter.target.get_input_embeddings().weight
        return (yield from meter.measure(draft.to(weight.device, weight.dtype).eval(), item.step))

    def write(self, item: Checkpoint) -> Iterator[None]:
        """Measure one checkpoint, and append the result to ``evaluations.jsonl``; each step once."""
        if any(result.step == item.step for result in self.results):
            return
        pieces = self.measure(item)
        while True:
            if self.config.when_busy == "skip" and self.ctx.stopping():
                self._leave_out(item.step, "the run is to stop")
                return
            try:
                next(pieces)
            except StopIteration as end:
                self._keep(end.value)
                return
            yield

    def _keep(self, result: Acceptance) -> None:
        self.results.append(result)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.ctx.stage, **result.as_dict()}, allow_nan=False) + "\n")
        if self.busy_with == result.step:
            self.busy_with = None
        same = "" if result.identical is None else f", {result.identical} identical to plain greedy decoding"
        self.ctx.report.info(
            f"step {result.step}: acceptance length {result.tau_gen:.3f} on {result.prompts} prompts{same}"
        )

    @property
    def on_cpu(self) -> bool:
        """It computes on the CPU."""
        return self.device.type == "cpu"

    def close(self) -> None:
        """Let the target go."""
        self.meter = None

    def summary(self) -> Mapping[str, Any]:
        """Every evaluation, in order, and the steps that were left out."""
        made = [*self.earlier, *(result.as_dict() for result in self.results)]
        self._leave_out_lost({e["step"] for e in made} | self.promised)
        return {"evaluations": made, "steps_left_out": sorted(set(self.left_out))}

    def _leave_out_lost(self, known: set[int]) -> None:
        """Tell which steps the run before this one had not measured when it was killed, and had not saved either."""
        every, resumed = self.config.every_steps, self.ctx.resumed_at_step or 0
        for step in range(every, resumed + 1, every) if every else ():
            if step not in known and step not in self.left_out:
                self._leave_out(step, f"no checkpoint of it was left when the run was resumed at step {resumed}")
