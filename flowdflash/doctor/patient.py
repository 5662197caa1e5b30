"""A draft on disk with all that can be found out about it: its run, its target, rows to try it on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flowdflash.dflash.acceptance import AcceptanceSummary, summarise
from flowdflash.dflash.config import DraftConfig, auto_layers
from flowdflash.dflash.decode import greedy, speculative_decode
from flowdflash.dflash.folder import CONFIG, WEIGHTS, check_tensors, read_json, read_tensors
from flowdflash.dflash.head import Head
from flowdflash.dflash.importing import ImportedDraft, find_draft, load_draft, read_config, read_provenance
from flowdflash.dflash.model import DFlashDraft
from flowdflash.dflash.slots import TargetView
from flowdflash.doctor.fitting import Fit, Fitting, Reading
from flowdflash.doctor.rows import Row, prompts_of, samples
from flowdflash.errors import DataInvalid, FlowdflashError, ModelInvalid, PipelineInvalid
from flowdflash.graph import Graph, Node
from flowdflash.journal import entries
from flowdflash.stage import Report, Vocabulary
from flowdflash.stages.acceptance import AcceptanceSink
from flowdflash.stages.dflash_drafter import DFlashDrafter
from flowdflash.target.load import EmbeddingAndHead, LoadedTarget, find_tokenizer, load_embedding_and_head, load_target
from flowdflash.training.build import choose_mask_token, draft_config, draft_options, target_facts

ROWS, PROMPTS, NEW_TOKENS = 6, 4, 48
"""Samples to look at, prompts to decode, and tokens to decode from each."""


class Patient:
    """What is examined. Everything is read when it is first asked for, and raises what reading it raises.

    Args:
        path: folder of a run (its newest checkpoint), of a checkpoint, or of an export.
        load_pipeline: checks a pipeline, given its text and the folder that its paths start from.
        cache_dir: the user's cache.
        report: told about progress.
        target: the model that the draft is for, where nothing says so, or another name of it.
        prompts: file of prompts that the draft was not trained on; default: those of the run's evaluator.
        device: to compute on.

    Raises:
        FlowdflashError: there is no draft, or nothing says which target it is for.
    """

    def __init__(
        self,
        path: Path,
        load_pipeline: Callable[[str, Path], Any],
        *,
        cache_dir: Path,
        report: Report,
        target: str | None = None,
        prompts: Path | None = None,
        device: str = "auto",
    ) -> None:
        self.folder = find_draft(path.resolve())
        self.cache_dir, self.report, self.device = cache_dir, report, device
        beside, run = self.folder.parent, self.folder.parent.parent.parent
        self.run_dir = run if self.folder.name == "draft" and (run / "run.json").is_file() else None
        saved = self.run_dir or (self.folder.name == "draft" and (beside / "checkpoint.json").is_file())
        self.checkpoint = beside if saved else None
        self.graph: Graph | None = None
        self.no_pipeline = "the draft does not lie in a run of flowdflash"
        self.seed = 0
        if self.run_dir is not None:
            self._read_run(self.run_dir, load_pipeline)
        named_as = read_json(self.folder / CONFIG).get("architectures") or ()
        if other := [kind.architecture for kind in DraftConfig.__subclasses__() if kind.architecture in named_as]:
            raise ModelInvalid(f"{self.folder} is a {other[0]}; only DFlash drafts can be examined")
        named = self.drafting.facts.get("model") if self.drafting else read_provenance(self.folder).get("target")
        if not (target or named):
            raise ModelInvalid(f"{self.folder} does not say which model it drafts for: name it (--target)")
        self.ref = str(target or named)
        self._prompts = prompts

    def _read_run(self, run_dir: Path, load_pipeline: Callable[[str, Path], Any]) -> None:
        try:
            text = (run_dir / "pipeline.yaml").read_text(encoding="utf-8")
            base = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["pipeline_folder"]
            pipeline = load_pipeline(text, Path(base))
        except (OSError, ValueError, KeyError, TypeError, PipelineInvalid) as error:
            self.no_pipeline = f"its run's pipeline cannot be read: {error}"
            return
        types = [node.type for node in pipeline.graph.of_kind("drafter")]
        if types != [DFlashDrafter.type]:
            raise ModelInvalid(
                f"{run_dir}: only drafts of one drafter dflash can be examined, not of {', '.join(types)}"
            )
        self.graph, self.seed = pipeline.graph, pipeline.seed

    @property
    def drafting(self) -> Node | None:
        """The drafter of the run's pipeline."""
        return self.graph.of_kind("drafter")[0] if self.graph else None

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Of the target."""
        return target_facts(self.ref, self.cache_dir, self.report)

    @cached_property
    def borrowed(self) -> EmbeddingAndHead:
        """Embedding and head as a drafter borrows them."""
        return load_embedding_and_head(self.ref, self.cache_dir, self.report)

    @cached_property
    def config(self) -> DraftConfig:
        """As the draft's own file says."""
        return read_config(self.folder, None if self.checkpoint else int(self.facts["num_layers"]))[1]

    @cached_property
    def trained_as(self) -> DraftConfig | None:
        """The config that the run's pipeline trains; None where there is no run."""
        if self.drafting is None:
            return None
        own, table = draft_options(self.drafting.config), self.borrowed.embed.shape
        mask = choose_mask_token(own.mask_token_id, self.ref, self.facts, table[0], self.cache_dir, None)
        told = self.drafting.facts
        layers = tuple(told.get("layers") or auto_layers(int(self.facts["num_layers"]), int(told["num_features"])))
        return draft_config(own, self.ref, self.facts, layers, (table[0], table[1]), mask)

    @cached_property
    def imported(self) -> ImportedDraft:
        """The draft; of a checkpoint in full precision, as it is resumed."""
        return load_draft(self.folder, num_target_layers=self.config.num_target_layers)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The draft's tensors as they are served."""
        if self.checkpoint is None:
            return self.imported.tensors
        tensors = read_tensors(self.folder / WEIGHTS)
        check_tensors(self.config, tensors, str(self.folder / WEIGHTS))
        return tensors

    @cached_property
    def target(self) -> LoadedTarget:
        """The target in fp32."""
        return load_target(self.ref, self.cache_dir, dtype="float32", device=self.device, report=self.report)

    @cached_property
    def view(self) -> TargetView:
        """The target as decoding sees it."""
        return TargetView(self.target.model, self.config.target_layer_ids)

    @cached_property
    def draft(self) -> DFlashDraft:
        """The draft in fp32, with the weights that are served."""
        draft = DFlashDraft(self.config, seed=None)
        draft.load_state_dict({n: t.float() for n, t in self.tensors.items()}, strict=True, assign=True)
        return draft.to(self.target.device).eval()

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Records of the optimizer steps up to the checkpoint's, skipped ones left out."""
        if self.checkpoint is None:
            return []
        sinks = self.graph.of_kind("sink") if self.graph else ()
        names = [node.config.path for node in sinks if node.type == "jsonl"]
        paths = [self.run_dir / name for name in names] if self.run_dir else []
        found = next((e for e in map(entries, [*paths, self.checkpoint / "records.jsonl"]) if e), [])
        last = read_provenance(self.folder).get("step", float("inf"))
        return [e for e in found if e["step"] <= last and not e["skipped"] and e["loss"] is not None]

    @cached_property
    def _sampled(self) -> tuple[list[Row], Vocabulary | None, str]:
        if self.graph is None:
            return [], None, self.no_pipeline
        try:
            return *samples(self.graph, ROWS, self.cache_dir, self.report, self.seed), ""
        except (FlowdflashError, OSError) as error:
            return [], None, str(error)

    @property
    def trained_on(self) -> list[Row]:
        """Samples that the run trains on; empty where they cannot be had."""
        return self._sampled[0]

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Tokens of the data that the run trains on, where they are known."""
        return self._sampled[1]

    @property
    def no_data(self) -> str:
        """Why ``trained_on`` is empty."""
        return self._sampled[2]

    @cached_property
    def tokenizer(self) -> Any | None:
        """Of the target."""
        return find_tokenizer(self.ref, self.cache_dir, self.report)

    @cached_property
    def held_out(self) -> list[Sequence[int]]:
        """Prompts that the draft was not trained on; empty where none are known."""
        nodes = self.graph.of_kind("sink") if self.graph else ()
        known = [node.config.prompts for node in nodes if issubclass(node.cls, AcceptanceSink)]
        path = next(filter(None, [self._prompts, *known]), None)
        if path is None:
            return []
        if self.tokenizer is None:
            raise DataInvalid(f"{self.ref} has no tokenizer to read {path} with")
        told = self.drafting.facts.get("template_options") if self.drafting else None
        return prompts_of(path, self.tokenizer, PROMPTS, told)

    @cached_property
    def answered(self) -> list[Row]:
        """Prompts with the target's own greedy answers: held-out ones, else of training samples, else random tokens."""
        prompts = self.held_out
        if not prompts and self.trained_on:
            prompts = [row.ids[: row.start].tolist() for row in self.trained_on[:PROMPTS]]
        elif not prompts:
            prompts = np.random.default_rng(0).integers(0, self.config.vocab_size, (2, 8)).tolist()
        self.report.info(f"the target answers {len(prompts)} prompts")
        answers = greedy(self.target.model, prompts, **self._decoding)
        return [Row.answered(p, a) for p, a in zip(prompts, answers, strict=True)]

    @cached_property
    def decoded(self) -> AcceptanceSummary:
        """The same prompts, decoded with the draft."""
        prompts = [row.ids[: row.start].tolist() for row in self.answered]
        self.report.info(f"the draft helps with {len(prompts)} prompts")
        results = speculative_decode(self.target.model, self.draft, prompts, **self._decoding)
        return summarise(results, self.config.block_size)

    @property
    def _decoding(self) -> dict[str, Any]:
        from flowdflash.target.generate import stop_ids

        stops = stop_ids(self.target, self.tokenizer) if self.tokenizer is not None and self.held_out else ()
        return {"max_new_tokens": NEW_TOKENS, "stop_ids": stops}

    @cached_property
    def known_rows(self) -> list[Row]:
        """Rows of the kind that the draft was made for; empty where none are known."""
        if self.trained_on or not self.held_out:
            return self.trained_on
        # An answer of a single token holds no block.
        return [row for row in self.answered if len(row.ids) > row.start + 1]

    @cached_property
    def fitting(self) -> Fitting:
        """The draft on those rows."""
        layers = {layer + step for layer in self.config.target_layer_ids for step in (-1, 0, 1)}
        head = Head(self.borrowed.head.to(self.target.device), softcap=self.config.final_logit_softcapping)
        return Fitting(
            self.draft,
            self.target.model,
            head,
            self.known_rows,
            layers=sorted(layers & set(range(self.config.num_target_layers))),
            seed=self.seed,
        )

    @cached_property
    def fit(self) -> Fit:
        """How well it fits them as its config says."""
        return self.fitting.fit(Reading(self.config, self.config.target_layer_ids))
