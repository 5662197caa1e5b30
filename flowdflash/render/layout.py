"""Where boxes and lines go: one row of columns per plane, columns by longest path.

Boxes of a column share one range of x, and the gaps between columns hold no box. A line moves up or down only in the
left part of a gap, and runs level elsewhere: through a lane of its own where it passes a column, and past its label
where it enters a box. So no line crosses a box and no label lies on one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from flowdflash.graph import Edge, Graph, Node
from flowdflash.render.labels import capacity, carries, details, elide, flat, planes, replicas

NAME_PX, TYPE_PX, DETAIL_PX, LABEL_PX = 8.4, 6.7, 6.1, 6.2
"""Width of an average letter of each text."""
PADDING, NARROWEST, WIDEST = 14, 132, 250
TURN = 38
"""Part of a gap in which lines change height."""
LANE, BETWEEN, BETWEEN_PLANES, MARGIN, HEADING = 34, 26, 30, 18, 34


@dataclass(frozen=True, slots=True)
class Box:
    """A stage: its corner, its size and the lines of text in it."""

    node: Node
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """A line: path data, where it ends, and how much room its label has left of that."""

    edge: Edge
    path: str
    x: float
    y: float
    room: float


@dataclass(frozen=True, slots=True)
class Band:
    """The frame of a plane."""

    plane: str
    title: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Layout:
    """A drawing without its looks."""

    boxes: dict[str, Box]
    routes: tuple[Route, ...]
    bands: tuple[Band, ...]
    width: float
    height: float


def letters(text: str) -> float:
    """Width of a text in average letters: East Asian and other broad signs count more."""
    broad = sum(unicodedata.east_asian_width(ch) in "WF" for ch in text)
    return len(text) + 0.75 * broad - sum(unicodedata.combining(ch) != 0 for ch in text)


def _fit(text: str, room: float) -> str:
    """The text, cut to a number of average letters."""
    text = flat(text)
    if letters(text) <= room:
        return text
    while text and letters(text) > room - 1:
        text = text[:-1]
    return text + "…"


def label_room(edge: Edge) -> float:
    """Width that the label of a line needs."""
    return max(letters(elide(flat(carries(edge)), 32)), letters(capacity(edge))) * LABEL_PX + 12


Cell = tuple[str, int]
"""What stands in a column: a stage (its name, -1), or the lane of a line that passes ("", number of the edge)."""


class Row:
    """The stages of one plane, in columns."""

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self.graph = graph
        inside = set(names)
        self.edges = {i: e for i, e in enumerate(graph.edges) if e.source in inside and e.target in inside}
        self.column: dict[str, int] = {}
        for name in names:  # topological order, so that what feeds a stage comes first
            feeding = [self.column[edge.source] for edge in graph.nodes[name].inputs if edge.source in self.column]
            self.column[name] = max(feeding, default=-1) + 1
        self.columns: list[list[Cell]] = [[] for _ in range(max(self.column.values()) + 1)]
        for name in names:
            self.columns[self.column[name]].append((name, -1))
        for i, edge in self.edges.items():
            for at in range(self.column[edge.source] + 1, self.column[edge.target]):
                self.columns[at].append(("", i))
        self.lines = {name: _lines(graph, graph.nodes[name]) for name in names}
        self.top: dict[tuple[int, Cell], float] = {}
        self._stack()

    def height(self, cell: Cell) -> float:
        """Height of a cell."""
        if not cell[0]:
            return LANE
        node = self.graph.nodes[cell[0]]
        return max(
            46 + 15 * (len(self.lines[cell[0]]) - 2) + 8, LANE * (len(node.inputs) + 1) if len(node.inputs) > 1 else 0
        )

    def width(self, at: int) -> float:
        """Width of a column: that of its widest box."""
        return max((_width(self.lines[name]) for name, _ in self.columns[at] if name), default=0.0)

    def gap(self, at: int) -> float:
        """Room left of a column: to turn, and for the labels of lines that end there."""
        ending = [edge for name, _ in self.columns[at] if name for edge in self.graph.nodes[name].inputs]
        return TURN + max(map(label_room, ending), default=0.0) + 10 if ending or at else 0.0

    def middle(self, at: int, cell: Cell) -> float:
        """Height at which lines leave a cell."""
        return self.top[at, cell] + self.height(cell) / 2

    def before(self, at: int, cell: Cell) -> list[float]:
        """Heights of what feeds a cell, in the column before."""
        name, passing = cell
        feeding = [i for i, e in self.edges.items() if e.target == name] if name else [passing]
        heights = []
        for i in feeding:
            source = self.edges[i].source
            came_from: Cell = (source, -1) if self.column[source] == at - 1 else ("", i)
            if (at - 1, came_from) in self.top:
                heights.append(self.middle(at - 1, came_from))
        return heights

    def _stack(self) -> None:
        for at, cells in enumerate(self.columns):
            wanted: dict[Cell, float] = {}
            for cell in cells:
                heights = self.before(at, cell)
                wanted[cell] = sum(heights) / len(heights) if heights else float("inf")
            cells.sort(key=lambda cell: wanted[cell])
            last = max((y for y in wanted.values() if y != float("inf")), default=0.0)
            aims = [min(wanted[cell], last) - self.height(cell) / 2 for cell in cells]
            for cell, y in zip(cells, _spread(aims, [self.height(cell) + BETWEEN for cell in cells]), strict=True):
                self.top[at, cell] = y
        highest = min(self.top.values())
        self.top = {key: y - highest for key, y in self.top.items()}

    @property
    def total_height(self) -> float:
        """Height of the tallest column."""
        return max(y + self.height(cell) for (_, cell), y in self.top.items())


def _spread(aims: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Positions as near to ``aims`` as order and distances allow, in the sense of least squares.

    Pool adjacent violators: with the distances taken off, positions only have to be non-decreasing.
    """
    offsets = [sum(steps[:i]) for i in range(len(steps))]
    pools: list[tuple[float, int]] = []
    for aim, offset in zip(aims, offsets, strict=True):
        mean, count = aim - offset, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (mean * count + before * many) / (count + many), count + many
        pools.append((mean, count))
    level = [mean for mean, count in pools for _ in range(count)]
    return [y + offset for y, offset in zip(level, offsets, strict=True)]


def _lines(graph: Graph, node: Node) -> tuple[str, ...]:
    most = WIDEST - 2 * PADDING - (30 if replicas(node) > 1 else 0)
    told = [_fit(line, most / DETAIL_PX) for line in details(graph, node)]
    return (_fit(node.name, most / NAME_PX), _fit(f"{node.kind}/{node.type}", most / TYPE_PX), *told)


def _width(lines: Sequence[str]) -> float:
    sizes = [NAME_PX, TYPE_PX] + [DETAIL_PX] * (len(lines) - 2)
    # The first line leaves room for the count of copies.
    widest = max(letters(line) * px for line, px in zip(lines, sizes, strict=True))
    return max(NARROWEST, widest + 2 * PADDING)


def layout(graph: Graph) -> Layout:
    """Boxes, lines and frames of a graph."""
    boxes: dict[str, Box] = {}
    lefts: dict[str, float] = {}
    bands = []
    rows = {plane: Row(graph, names) for plane, _, names in planes(graph)}
    crossing = [i for i in range(len(graph.edges)) if not any(i in row.edges for row in rows.values())]
    channel = BETWEEN_PLANES + 7 * len(crossing)
    y, right = float(MARGIN), 0.0
    channels = 0.0
    for plane, title, _ in planes(graph):
        row, x = rows[plane], float(MARGIN + 16)
        for at, cells in enumerate(row.columns):
            turn_at, x = x, x + row.gap(at)
            for name, _ in cells:
                if name:
                    top = y + HEADING + row.top[at, (name, -1)]
                    boxes[name] = Box(graph.nodes[name], x, top, row.width(at), row.height((name, -1)), row.lines[name])
                    lefts[name] = turn_at
            x += row.width(at)
        right = max(right, x + 16)
        bands.append(Band(plane, title, y, HEADING + row.total_height + 18))
        y += bands[-1].height
        channels = channels or y
        y += channel
    width = max(right + MARGIN + (12 + 6 * len(crossing) if crossing else 0), 360.0)
    routes = [
        _crossing(graph, boxes, lefts, edge, crossing.index(i), channels + 15 + 7 * crossing.index(i))
        if i in crossing
        else _route(graph, rows, boxes, lefts, edge, i)
        for i, edge in enumerate(graph.edges)
    ]
    return Layout(boxes, tuple(routes), tuple(bands), width, y - channel + MARGIN)


def _entry(graph: Graph, boxes: dict[str, Box], edge: Edge) -> tuple[float, float]:
    """Where a line enters its box: inputs share the left side evenly."""
    box, inputs = boxes[edge.target], graph.nodes[edge.target].inputs
    return box.x, box.y + box.height * (inputs.index(edge) + 1) / (len(inputs) + 1)


def _route(
    graph: Graph, rows: dict[str, Row], boxes: dict[str, Box], lefts: dict[str, float], edge: Edge, number: int
) -> Route:
    row = next(row for row in rows.values() if number in row.edges)
    source = boxes[edge.source]
    x, y = source.x + source.width, source.y + source.height / 2
    base = source.y - row.top[row.column[edge.source], (edge.source, -1)]
    path = f"M{x:.1f} {y:.1f}"
    for at in range(row.column[edge.source] + 1, row.column[edge.target]):
        start = next(lefts[name] for name, _ in row.columns[at] if name)
        lane = base + row.middle(at, ("", number))
        path += _level(start, y) + _turn(start, y, lane) + _level(start + row.gap(at) + row.width(at), lane)
        y = lane
    end_x, end_y = _entry(graph, boxes, edge)
    path += _level(lefts[edge.target], y) + _turn(lefts[edge.target], y, end_y) + _level(end_x, end_y)
    return Route(edge, path, end_x, end_y, end_x - lefts[edge.target] - TURN)


def _level(x: float, y: float) -> str:
    return f" L{x:.1f} {y:.1f}"


def _turn(x: float, y: float, to_y: float) -> str:
    """From one height to another within the part of a gap that is kept free for it."""
    return f" C{x + TURN / 2:.1f} {y:.1f} {x + TURN / 2:.1f} {to_y:.1f} {x + TURN:.1f} {to_y:.1f}"


def _crossing(
    graph: Graph, boxes: dict[str, Box], lefts: dict[str, float], edge: Edge, track: int, channel_y: float
) -> Route:
    """From one plane to another: out into the gap, along the channel between the planes, and in."""
    source = boxes[edge.source]
    x, y = source.x + source.width, source.y + source.height / 2
    out, into = source.x + source.width + 12 + 6 * (track % 4), lefts[edge.target] + 8 + 6 * (track % 4)
    end_x, end_y = _entry(graph, boxes, edge)
    corners = [(x, y), (out, y), (out, channel_y), (into, channel_y), (into, end_y), (end_x, end_y)]
    return Route(edge, _rounded(corners), end_x, end_y, end_x - lefts[edge.target] - TURN)


def _rounded(corners: Sequence[tuple[float, float]]) -> str:
    path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"
    for (ax, ay), (bx, by), (cx, cy) in zip(corners, corners[1:], corners[2:], strict=False):
        first, second = abs(ax - bx) + abs(ay - by), abs(cx - bx) + abs(cy - by)
        radius = min(8.0, first / 2, second / 2)
        in_x, in_y = _toward(bx, by, ax, ay, radius)
        out_x, out_y = _toward(bx, by, cx, cy, radius)
        path += f" L{in_x:.1f} {in_y:.1f} Q{bx:.1f} {by:.1f} {out_x:.1f} {out_y:.1f}"
    return path + f" L{corners[-1][0]:.1f} {corners[-1][1]:.1f}"


def _toward(x: float, y: float, to_x: float, to_y: float, distance: float) -> tuple[float, float]:
    length = max(abs(to_x - x) + abs(to_y - y), 1e-9)
    return x + (to_x - x) * distance / length, y + (to_y - y) * distance / length
