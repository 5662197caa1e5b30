"""A graph as SVG: one file without anything from elsewhere, legible on a light and on a dark page."""

from __future__ import annotations

from html import escape

from flowdflash.graph import Graph
from flowdflash.render.labels import (
    PLANNING_KINDS,
    capacity,
    carries,
    details,
    elide,
    flat,
    is_planning,
    replicas,
    titled,
)
from flowdflash.render.layout import Band, Box, Layout, Route, layout

_STYLE = """
.ff text{font-family:system-ui,-apple-system,"Segoe UI","Noto Sans","DejaVu Sans",sans-serif;fill:#1f2328}
.ff .page{fill:#fff;stroke:#d1d9e0}
.ff .band{fill:#f6f8fa;stroke:#d1d9e0}.ff .band.planning{stroke-dasharray:5 4}
.ff .title{font-size:12px;fill:#59636e;text-anchor:end;paint-order:stroke;stroke:#f6f8fa;stroke-width:5px}
.ff .box{fill:#fff;stroke:#8c959f;stroke-width:1.2}.ff .planning .box{stroke:#0969da}.ff .data .box{stroke:#1a7f37}
.ff .strip{fill:#1a7f37}.ff .planning .strip{fill:#0969da}.ff .sink .strip{fill:#9a6700}.ff .sink .box{stroke:#9a6700}
.ff .name{font-size:14px;font-weight:600}.ff .type{font-size:12px;fill:#59636e}.ff .detail{font-size:11px;fill:#59636e}
.ff .many{font-size:12px;font-weight:600;text-anchor:end}
.ff .line{fill:none;stroke:#1a7f37;stroke-width:1.8}
.ff .line.planning{stroke:#0969da;stroke-dasharray:5 4;stroke-width:1.4}
.ff .tip{fill:#1a7f37}.ff .tip.planning{fill:#0969da}
.ff .carries{font-size:11px;text-anchor:end}.ff .capacity{font-size:10px;fill:#59636e;text-anchor:end}
@media (prefers-color-scheme:dark){
.ff text{fill:#e6edf3}.ff .page{fill:#0d1117;stroke:#3d444d}.ff .band{fill:#151b23;stroke:#3d444d}
.ff .box{fill:#0d1117}.ff .planning .box{stroke:#4493f8}.ff .data .box{stroke:#3fb950}.ff .sink .box{stroke:#d29922}
.ff .strip{fill:#3fb950}.ff .planning .strip{fill:#4493f8}.ff .sink .strip{fill:#d29922}
.ff .title{stroke:#151b23}.ff .title,.ff .type,.ff .detail,.ff .capacity{fill:#9198a1}
.ff .line{stroke:#3fb950}.ff .line.planning{stroke:#4493f8}.ff .tip{fill:#3fb950}.ff .tip.planning{fill:#4493f8}
}
""".strip()


def svg(graph: Graph, name: str) -> str:
    """The drawing. Dashed blue lines carry numbers, solid green ones tensors; copies of a stage are stacked."""
    plan = layout(graph) if graph.nodes else Layout({}, (), (), 360, 120)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="ff" role="img" '
        f'viewBox="0 0 {plan.width:.0f} {plan.height:.0f}" '
        f'width="{plan.width:.0f}" height="{plan.height:.0f}">',
        f"<title>{_x(name)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{plan.width - 1:.0f}" height="{plan.height - 1:.0f}" rx="10"/>',
    ]
    parts += [_band(band, plan.width) for band in plan.bands]
    parts += [_line(route) for route in plan.routes]
    parts += [_box(graph, box) for box in plan.boxes.values()]
    parts += [_label(route) for route in plan.routes]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(text: object) -> str:
    return escape(flat(text), quote=True)


def _band(band: Band, width: float) -> str:
    return (
        f'<rect class="band {band.plane}" x="12" y="{band.y:.1f}" width="{width - 24:.1f}" '
        f'height="{band.height:.1f}" rx="8"/>'
        f'<text class="title" x="{width - 26:.1f}" y="{band.y + 21:.1f}">{_x(band.title)}</text>'
    )


def _line(route: Route) -> str:
    plane = " planning" if is_planning(route.edge) else ""
    x, y = route.x, route.y
    tip = f"M{x - 8:.1f} {y - 4:.1f} L{x - 0.5:.1f} {y:.1f} L{x - 8:.1f} {y + 4:.1f} Z"
    return f'<path class="line{plane}" d="{route.path}"/><path class="tip{plane}" d="{tip}"/>'


def _label(route: Route) -> str:
    x, y, edge = route.x - 12, route.y, route.edge
    return (
        f'<text class="carries" x="{x:.1f}" y="{y - 5:.1f}">{_x(elide(flat(carries(edge)), 32))}</text>'
        f'<text class="capacity" x="{x:.1f}" y="{y + 13:.1f}">{_x(capacity(edge))}</text>'
    )


def _box(graph: Graph, box: Box) -> str:
    node, x, y, width, height = box.node, box.x, box.y, box.width, box.height
    plane = "planning" if node.kind in PLANNING_KINDS else "data"
    kind = " sink" if node.kind == "sink" else ""
    told = "\n".join([node.name, titled(node), *details(graph, node)])
    copies = min(replicas(node), 4)
    shape = f'width="{width:.1f}" height="{height:.1f}" rx="6"'
    parts = [f'<g class="{plane}{kind}"><title>{escape(told)}</title>']
    parts += [f'<rect class="box" x="{x + 4 * i:.1f}" y="{y - 4 * i:.1f}" {shape}/>' for i in range(copies - 1, -1, -1)]
    parts.append(f'<rect class="strip" x="{x:.1f}" y="{y + 6:.1f}" width="4" height="{height - 12:.1f}" rx="1.5"/>')
    classes = ["name", "type"] + ["detail"] * (len(box.lines) - 2)
    below = y + 22
    for cls, line in zip(classes, box.lines, strict=True):
        parts.append(f'<text class="{cls}" x="{x + 14:.1f}" y="{below:.1f}">{_x(line)}</text>')
        below += 16 if cls == "name" else 15
    if replicas(node) > 1:
        parts.append(f'<text class="many" x="{x + width - 10:.1f}" y="{y + 22:.1f}">×{replicas(node)}</text>')
    return "".join(parts) + "</g>"
