"""``flowdflash export``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash.cli.common import exit_codes, load_all_plugins

if TYPE_CHECKING:
    from flowdflash.dflash.folder import ExportDtype
    from flowdflash.stage import Report


@click.command("export")
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--format",
    "style",
    type=click.Choice(["zlab", "speculators"]),
    default="zlab",
    show_default=True,
    help="zlab: vLLM, SGLang, the authors' own code; speculators: vLLM and speculators.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--target", metavar="MODEL", help="The target, as servers are to know it; default: what the checkpoint says."
)
@click.pass_context
def command(
    ctx: click.Context, /, checkpoint: Path, style: str, output: Path, dtype: ExportDtype, target: str | None
) -> None:
    """Write the draft of a run, of a checkpoint or of another export in a format that inference engines load."""
    from flowdflash.cli.console import ConsoleReport

    with exit_codes(), ConsoleReport() as report:
        load_all_plugins(ctx)  # they may add kinds of drafts
        folder = export_draft(checkpoint, output, report, style=style, dtype=dtype, target=target)
    click.echo(folder)


def export_draft(
    source: Path, output: Path, report: Report, *, style: str, dtype: ExportDtype, target: str | None = None
) -> Path:
    """Read a draft of any format, compare it with its target as far as that is known here, and write it.

    Raises:
        ModelInvalid: the draft, the target or the folder cannot be used.
    """
    from flowdflash import __version__
    from flowdflash.cache import cache_dir
    from flowdflash.dflash.export import export_zlab
    from flowdflash.dflash.importing import check_borrowed, find_draft, load_draft, read_provenance
    from flowdflash.dflash.speculators import export_speculators
    from flowdflash.errors import ModelInvalid
    from flowdflash.target.load import load_embedding_and_head

    provenance = read_provenance(find_draft(source))
    ref = target or provenance.get("target")
    facts, told = _known(ref) if ref else ({}, {})
    provenance |= {**told, "version": __version__}
    if not facts:
        report.warn(f"the draft is not compared with its target: {ref or 'which it is'} is not known on this machine")
    draft = load_draft(source, num_target_layers=facts.get("num_layers"))
    if ref is None and (style == "speculators" or draft.borrowed):
        raise ModelInvalid(f"{draft.folder} does not say which model it drafts for: name it (--target)")
    if draft.borrowed:
        matrices = load_embedding_and_head(str(ref), cache_dir(), report)
        check_borrowed(draft, matrices.embed, matrices.head)
        report.info(f"left out, as they are the target's: {', '.join(draft.borrowed)}")
    options: Any = {"dtype": dtype, "target_facts": facts, "provenance": provenance}
    if style == "speculators":
        name, architectures = _verifier(str(ref), report)
        options |= {"target": name, "architectures": architectures}
    folder = (export_zlab if style == "zlab" else export_speculators)(output, draft.config, draft.tensors, **options)
    config = draft.config
    report.info(
        f"{style}, {dtype}: {len(draft.tensors)} tensors, {config.num_parameters / 1e6:.1f} M parameters, block size "
        f"{config.block_size}, target layers {list(config.target_layer_ids)}, mask token {config.mask_token_id}"
    )
    return folder


def _on_hub(ref: str) -> bool:
    from flowdflash.target.catalogue import is_folder
    from flowdflash.target.toy import PREFIX

    return "/" in ref and not is_folder(ref) and not ref.startswith(PREFIX)


def _cached(ref: str) -> Path | None:
    """Where the config of a model of the Hugging Face Hub lies on this machine, if it does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(ref, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _known(ref: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Facts of a target that can be had without fetching anything, and what to write of it into the export."""
    from flowdflash.target.catalogue import facts_of

    folder = _cached(ref) if _on_hub(ref) else None
    facts = facts_of(str(folder)) if folder else facts_of(ref)
    return facts or {}, {"target": ref, **({"target_revision": folder.name} if folder else {})}


def _verifier(ref: str, report: Report) -> tuple[str, list[str]]:
    """What whoever loads the draft can load the target by, and the target's architectures."""
    from flowdflash.cache import cache_dir
    from flowdflash.dflash.folder import CONFIG, read_json
    from flowdflash.target.load import resolve_model

    folder = _cached(ref) if _on_hub(ref) else Path(resolve_model(ref, cache_dir(), report))
    architectures = read_json(folder / CONFIG).get("architectures") if folder else []
    return ref if _on_hub(ref) else str(folder), list(architectures or [])
