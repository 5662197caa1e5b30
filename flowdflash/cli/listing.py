"""Texts about stages and plugins for ``flowdflash stages`` and ``flowdflash plugins``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowdflash.plugin.info import PluginInfo
    from flowdflash.plugin.registry import Registered


def stages_text(stages: Sequence[Registered], *, options: bool) -> str:
    """One line per stage; with ``options`` also its options."""
    width = max((len(f"{s.kind} {s.type}") for s in stages), default=0)
    lines = []
    for stage in stages:
        lines.append(f"{f'{stage.kind} {stage.type}':{width}}  {stage.summary}  [{stage.owner}]")
        if options:
            lines += [*_options(stage.cls.Config), ""]
    return "\n".join(lines).rstrip()


def _options(config: Any) -> list[str]:
    lines = []
    for name, field in config.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)}"
        lines.append(f"    {name} ({default}): {field.description}")
    return lines


def plugins_text(infos: Sequence[PluginInfo]) -> str:
    """One line per plugin, and the reason under one that is left out."""
    lines = []
    for info in infos:
        state = "disabled" if info.disabled else "broken" if info.error else f"{info.import_secs * 1000:.0f} ms"
        supplies = ", ".join(f"{s.kind} {s.type}" for s in info.stages) or ", ".join(info.hooks) or "nothing"
        lines.append(f"{info.name} {info.version}  ({info.origin}, {state}): {supplies}".replace("  (", " ("))
        if info.error:
            lines.append(f"    {info.error}")
    return "\n".join(lines)


def plugin_text(info: PluginInfo) -> str:
    """All that is known of one plugin."""
    lines = [
        f"{info.name} {info.version}".rstrip(),
        f"origin: {info.origin}",
        f"import: {info.import_secs * 1000:.0f} ms",
    ]
    if info.error:
        return "\n".join([*lines, f"broken: {info.error}"])
    if info.disabled:
        return "\n".join([*lines, "disabled"])
    lines.append(f"hooks: {', '.join(info.hooks) or 'none'}")
    return "\n".join([*lines, stages_text(info.stages, options=True)]).rstrip()
