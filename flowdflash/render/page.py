"""A graph as one HTML page: the drawing, and a table of every option of every stage."""

from __future__ import annotations

from html import escape
from typing import Any

from flowdflash.graph import Graph, Node
from flowdflash.render.labels import capacity, carries, counted, titled
from flowdflash.render.svg import svg

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI","Noto Sans",sans-serif;margin:2rem auto;
max-width:76rem;padding:0 1rem}
.drawing{overflow-x:auto}.drawing svg{max-width:100%;height:auto}
table{border-collapse:collapse;width:100%;margin:.4rem 0 1.6rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .7rem;
border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent)}
th{font-weight:600}td.value{font-family:ui-monospace,monospace;overflow-wrap:anywhere}
tr.default td{opacity:.65}
h2{margin:1.6rem 0 .1rem;font-size:1.15rem}h2 small{font-weight:400;opacity:.7}p{margin:.1rem 0}
""".strip()


def page(graph: Graph, name: str) -> str:
    """The page; options that keep their default are paler."""
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(name)}</h1>\n<p>{counted(len(graph.nodes), 'stage')}, {counted(len(graph.edges), 'edge')}</p>",
        f'<div class="drawing">\n{svg(graph, name)}</div>',
    ]
    parts += [_stage(graph, node) for node in graph.nodes.values()]
    return "\n".join([*parts, "</body>\n</html>"]) + "\n"


def _stage(graph: Graph, node: Node) -> str:
    parts = [f"<h2>{escape(node.name)} <small>{escape(titled(node))}</small></h2>"]
    if node.inputs:
        reads = "; ".join(f"{edge.source} ({carries(edge)}, {capacity(edge)})" for edge in node.inputs)
        parts.append(f"<p>reads {escape(reads)}</p>")
    rows = options(node)
    if rows:
        parts.append("<table><tr><th>option</th><th>value</th><th></th></tr>")
        for option, value, is_default, description in rows:
            pale = ' class="default"' if is_default else ""
            cells = f'<td>{escape(option)}</td><td class="value">{escape(value)}</td><td>{escape(description)}</td>'
            parts.append(f"<tr{pale}>{cells}</tr>")
        parts.append("</table>")
    facts = graph.returned.get(node.name, {})
    if facts:
        told = ", ".join(f"{key} = {_plain(value)}" for key, value in facts.items())
        parts.append(f"<p>facts: {escape(told)}</p>")
    return "\n".join(parts)


def _plain(value: Any) -> Any:
    """A fact as a person writes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def options(node: Node) -> list[tuple[str, str, bool, str]]:
    """Name, value, whether it is the default, and description of each option."""
    config: Any = node.config
    written = getattr(config, "model_fields_set", ())
    fields = getattr(type(config), "model_fields", {})
    return [
        (info.alias or name, str(getattr(config, name)), name not in written, info.description or "")
        for name, info in fields.items()
    ]
