"""A plan as one HTML page with drawings: lengths, buckets, the order of batches, how far it strays. No script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from flowdflash.render.plan_plots import colour, discrepancy, lengths, shares, strips

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--page:#fff;--card:#f6f8fa;--rule:#d1d9e0;--mark:#9a6700;
--bar:#8c959f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--page:#0d1117;--card:#151b23;--rule:#3d444d;
--mark:#d29922;--bar:#656c76}}
*{box-sizing:border-box}
body{font:15px/1.55 system-ui,-apple-system,"Segoe UI","Noto Sans","DejaVu Sans",sans-serif;margin:0 auto;
max-width:70rem;padding:2rem 1.25rem 4rem;color:var(--ink);background:var(--page)}
h1{font-size:1.7rem;margin:0;letter-spacing:-.01em}h2{font-size:1.12rem;margin:0 0 .15rem}
p{margin:.2rem 0;color:var(--soft);max-width:62rem}
.finding{border-left:4px solid var(--mark);background:var(--card);color:var(--ink);font-size:1.12rem;
padding:.6rem 1rem;margin:1.2rem 0;border-radius:0 8px 8px 0}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:1.1rem 1.25rem;margin:1.2rem 0}
svg{display:block;width:100%;height:auto;margin-top:.7rem;overflow:visible}
svg text{font-family:inherit;font-size:12px;fill:var(--soft)}svg .strong{fill:var(--ink);font-weight:600}
svg .axis,svg .grid{stroke:var(--rule);stroke-width:1}svg .grid{stroke-dasharray:2 4}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .line{fill:none;stroke-width:2;stroke-linejoin:round}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin:.5rem 0 0;padding:0;list-style:none;color:var(--soft);
font-size:.85rem}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:3px;margin-right:.4rem;
vertical-align:-.08rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums;margin-top:.6rem}
th,td{text-align:right;padding:.28rem .7rem;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0;color:var(--soft)}th{font-weight:600;vertical-align:bottom}
th small{display:block;font-weight:400;color:var(--soft)}tr:last-child td{border-bottom:0}
ul.notes{margin:.4rem 0 0;padding-left:1.1rem;color:var(--soft)}
""".strip()


def page(
    told: Mapping[str, Any],
    drawn: Mapping[str, Any],
    *,
    headline: str,
    finding: str,
    rows: Sequence[tuple[str, Sequence[str]]],
    notes: Sequence[str],
) -> str:
    """The page.

    Args:
        told: the figures of each strategy, and which of them is the pipeline's own.
        drawn: what is plotted: classes of length, a histogram, and series per strategy.
        headline: what an epoch is made of, in one sentence.
        finding: what is wrong with it, if anything is.
        rows: labels, and a cell per strategy.
        notes: lines about memory.
    """
    title = escape(f"Plan of {told['name']}")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{title}</h1>\n<p>{escape(headline)}.</p>",
    ]
    if finding:
        parts.append(f'<div class="finding">{escape(finding[0].upper() + finding[1:])}.</div>')
    parts += _plots(told, drawn)
    table = _table(told["strategies"], rows)
    parts.append(_section("Figures", "Per epoch; a dash where a figure has no meaning.", table))
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(_section("Memory", "From the options alone.", f'<ul class="notes">{items}</ul>'))
    return "\n".join([*parts, "</body>\n</html>"]) + "\n"


def _plots(told: Mapping[str, Any], drawn: Mapping[str, Any]) -> list[str]:
    strategies, series, classes = told["strategies"], drawn["series"], drawn["classes"]
    return [
        _section(
            "Lengths of samples",
            "Samples by length in tokens. Dashed lines are the upper bounds of the pipeline's buckets, whose colours "
            "the whole page uses.",
            lengths(drawn["histogram"], classes) + _key(classes),
        ),
        _section(
            "Share of samples, share of batches",
            f"Per bucket of {told['chosen']}. Where the two differ, a random order is mostly batches of one kind.",
            shares(strategies[told["chosen"]]["buckets"]),
        ),
        _section(
            "The first batches of the epoch",
            "One tick per batch, coloured by its mean length; each strategy reads like lines of text. "
            f"An optimizer step averages {told['window']} neighbours. Below the name: noise between steps, 1 being "
            "that of random order, and padding.",
            strips({name: series[name]["strip"] for name in strategies}, classes, _captions(strategies)),
        ),
        _section(
            "How far the mix strays",
            "Over the epoch, the most batches by which any class of length is ahead of its share or behind it "
            "(logarithmic). Flat and low is good; a hump is a stretch of the epoch that is unlike the rest.",
            discrepancy({name: series[name] for name in strategies}),
        ),
    ]


def _section(title: str, text: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n{body}\n</section>"


def _captions(strategies: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: f"noise {f['noise_ratio']:.2f}, padding {f['padding_waste']:.0%}" for name, f in strategies.items()}


def _key(classes: Sequence[int]) -> str:
    lows = [0, *classes]
    items = [
        f'<li><i style="background:{colour(k, len(classes))}"></i>{lows[k] + 1:,}–{high:,} tokens</li>'
        for k, high in enumerate(classes)
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


def _table(strategies: Mapping[str, Mapping[str, Any]], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(
        f"<th>{escape(f['bucketer'])}<small>{escape(f['interleaver'] or 'no interleaver')}</small></th>"
        for f in strategies.values()
    )
    body = "".join(
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for label, cells in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>\n{body}</table></div>'
