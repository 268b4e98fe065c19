#!/usr/bin/env python3
"""Draws a worker's step trace (conductor --trace-steps FILE) as an SVG: who ran when, and how full each step was.

    tests/trace/draw.py FILE.rank0 > steps.svg
    tests/trace/draw.py FILE.rank0 --from-ms 120 --until-ms 300 --requests 20 --title "mixed steps" > steps.svg

Time goes from left to right. Above, a bar for each step: as high as its token budget is full, coloured by what kinds of
rows it mixed; below it the KV pages held. Then a lane for each request: a tall block is a piece of its prompt, with the
number of tokens where there is room; a low one is a decode. A black edge marks a row that sampled a token. A thin line
runs from a request's first row to its last, so that a gap in the blocks is a step that ran without the request.
"""

import argparse
import html
import json
import sys

PREFILL, DECODE, MIXED, FAILED = "#e8833a", "#3b78b8", "#8a5fb0", "#c8102e"
INK, FAINT, PAPER = "#222222", "#d9d9d9", "#ffffff"
LEFT, RIGHT, WIDTH = 120, 24, 1400
LANE, LANE_GAP, FILL_HEIGHT, KV_HEIGHT = 18, 5, 90, 36


def read(path):
    """(budget, steps) of the last process in the file."""
    budget, steps = None, []
    for line in open(path, encoding="utf-8"):
        entry = json.loads(line)
        if "pid" in entry:
            budget, steps = entry["budget_tokens"], []
        else:
            steps.append(entry)
    return budget, steps


class Drawing:
    def __init__(self):
        self.parts = []

    def rect(self, x, y, width, height, fill, title=None, **more):
        attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        inside = f"<title>{html.escape(title)}</title>" if title else ""
        self.parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{height:.2f}" fill="{fill}"{attributes}>{inside}</rect>')

    def line(self, x1, y1, x2, y2, stroke, width=1.0):
        self.parts.append(f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}" stroke-width="{width}"/>')

    def text(self, x, y, words, size=11, anchor="start", fill=INK, weight="normal"):
        self.parts.append(f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{html.escape(str(words))}</text>')

    def svg(self, height):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif">'
        return "\n".join([head, f'<rect width="100%" height="100%" fill="{PAPER}"/>', *self.parts, "</svg>", ""])


def is_decode(row):
    return row["range"][1] - row["range"][0] == 1 and "decode" in row["walk"]


def mixture(step):
    kinds = {is_decode(row) for row in step["rows"]}
    return MIXED if len(kinds) == 2 else DECODE if True in kinds else PREFILL


def tick_ms(span_ms):
    """The distance of marks: 1, 2 or 5 times a power of ten, about ten marks in all."""
    size = 1e-3
    while True:
        for factor in (1, 2, 5):
            if span_ms / (size * factor) <= 12:
                return size * factor
        size *= 10


def draw(steps, budget, lanes_wanted, title):
    origin, end = steps[0]["start_us"], max(s["start_us"] + s["plan_us"] + s["run_us"] + s["commit_us"] for s in steps)
    scale = (WIDTH - LEFT - RIGHT) / max(end - origin, 1)
    x = lambda us: LEFT + (us - origin) * scale
    out, y = Drawing(), 28
    out.text(LEFT, y, title, 16, weight="bold")
    y += 12
    legend = LEFT
    for colour, words in ((PREFILL, "prefill"), (DECODE, "decode"), (MIXED, "both in one step")):
        out.rect(legend, y, 12, 12, colour)
        out.text(legend + 17, y + 10, words)
        legend += 34 + 7 * len(words)
    out.rect(legend, y, 10, 12, PREFILL)
    out.rect(legend + 10, y, 2.5, 12, INK)
    out.text(legend + 19, y + 10, "sampled a token")
    y += 34

    requests = []
    seen = set()
    for step in steps:
        for row in step["rows"]:
            if row["request"] not in seen:
                seen.add(row["request"])
                requests.append(row["request"])
    shown, left_out = requests[:lanes_wanted], len(requests) - lanes_wanted
    top, bottom = y, y + FILL_HEIGHT + 14 + KV_HEIGHT + 26 + len(shown) * (LANE + LANE_GAP)

    # Step boundaries behind everything, where they are not so close that they would be all there is.
    if len(steps) <= (WIDTH - LEFT - RIGHT) / 4:
        for step in steps:
            out.line(x(step["start_us"]), top, x(step["start_us"]), bottom, "#ececec", 0.7)

    out.text(LEFT - 8, y + 10, f"{budget} tokens", anchor="end", size=10)
    out.text(LEFT - 8, y + FILL_HEIGHT / 2, "step budget", anchor="end", weight="bold")
    out.text(LEFT - 8, y + FILL_HEIGHT, "0", anchor="end", size=10)
    out.line(LEFT, y, WIDTH - RIGHT, y, FAINT)
    out.line(LEFT, y + FILL_HEIGHT, WIDTH - RIGHT, y + FILL_HEIGHT, INK)
    for step in steps:
        begin, length = step["start_us"], step["plan_us"] + step["run_us"] + step["commit_us"]
        fill = min(step["tokens"] / step["budget_tokens"], 1.0) * FILL_HEIGHT
        decodes = sum(is_decode(row) for row in step["rows"])
        words = f'step {step["step"]}, {step["batch_walk"]}: {step["tokens"]} of {step["budget_tokens"]} tokens, {decodes} decodes, {len(step["rows"]) - decodes} prefills, plan {step["plan_us"]} us ({step["plan_ahead_us"]} us more beside the step before), run {step["run_us"]} us, commit {step["commit_us"]} us'
        out.rect(x(begin), y + FILL_HEIGHT - fill, length * scale - 0.3, max(fill, 1.5), mixture(step), words)
        if step["tokens"] > step["budget_tokens"] and length * scale > 60:
            out.text(x(begin) + 5, y + 14, f'{step["tokens"]} tokens', 10, fill=PAPER, weight="bold")
    y += FILL_HEIGHT + 14

    total = max(steps[-1]["kv_pages"][1], 1)
    most = max(max(step["kv_pages"][0] for step in steps), 1)
    out.text(LEFT - 8, y + KV_HEIGHT / 2 + 4, "KV pages", anchor="end", weight="bold")
    out.text(LEFT - 8, y + KV_HEIGHT / 2 + 16, f"to {most} of {total}", anchor="end", size=9)
    points = [f"{x(origin):.1f},{y + KV_HEIGHT:.1f}"]
    for step in steps:
        height = y + KV_HEIGHT * (1 - step["kv_pages"][0] / most)
        points += [f'{x(step["start_us"]):.1f},{height:.1f}', f'{x(step["start_us"] + step["run_us"]):.1f},{height:.1f}']
    points.append(f"{x(end):.1f},{y + KV_HEIGHT:.1f}")
    out.parts.append(f'<polygon points="{" ".join(points)}" fill="#cfe3cf" stroke="#5b965b" stroke-width="0.7"/>')
    y += KV_HEIGHT + 26

    lane_of = {request: y + i * (LANE + LANE_GAP) for i, request in enumerate(shown)}
    first, last = {}, {}
    for step in steps:
        for row in step["rows"]:
            first.setdefault(row["request"], step["start_us"])
            last[row["request"]] = step["start_us"] + step["plan_us"] + step["run_us"]
    for request, lane in lane_of.items():
        out.text(LEFT - 8, lane + LANE - 5, f"request {request}", anchor="end")
        out.line(x(first[request]), lane + LANE - 3, x(last[request]), lane + LANE - 3, "#9a9a9a", 0.8)
    for step in steps:
        begin, width = x(step["start_us"] + step["plan_us"]), step["run_us"] * scale
        for row in step["rows"]:
            if row["request"] not in lane_of:
                continue
            lane, (low, high), decode = lane_of[row["request"]], row["range"], is_decode(row)
            height = LANE * 0.5 if decode else LANE
            colour = FAILED if row.get("failed") else DECODE if decode else PREFILL
            words = f'request {row["request"]}.{row["incarnation"]}, {row["walk"]} [{low}, {high}) in step {step["step"]}'
            top_of = lane + LANE - height
            out.rect(begin, top_of, width - 0.6, height, colour, words)
            if row["terminal"] and width > 4:
                out.rect(begin + width - 2.6, top_of, 2, height, INK)
            if not decode and width > 7 * len(str(high - low)) + 6:
                out.text(begin + 4, lane + LANE - 5, high - low, 10, fill="#ffffff", weight="bold")
    y = bottom + 4

    out.line(LEFT, y, WIDTH - RIGHT, y, INK)
    mark = tick_ms((end - origin) / 1e3)
    for i in range(int((end - origin) / 1e3 / mark) + 1):
        at = x(origin + i * mark * 1e3)
        out.line(at, y, at, y + 5, INK)
        out.text(at, y + 18, f"{i * mark:g}", anchor="middle", size=10)
    out.text(LEFT - 8, y + 18, "ms", anchor="end", size=10)
    if left_out > 0:
        out.text(WIDTH - RIGHT, y + 34, f"{left_out} more requests are not drawn (--requests)", anchor="end", size=10)
    return out.svg(y + 44)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--from-ms", type=float, default=0.0, help="since the first step")
    parser.add_argument("--until-ms", type=float, default=float("inf"))
    parser.add_argument("--requests", type=int, default=40, help="the most lanes")
    parser.add_argument("--title")
    asked = parser.parse_args()
    budget, steps = read(asked.file)
    if steps:
        began = steps[0]["start_us"]
        steps = [s for s in steps if asked.from_ms <= (s["start_us"] - began) / 1e3 <= asked.until_ms]
    if not steps:
        sys.exit(f"{asked.file}: no steps in that time")
    sys.stdout.write(draw(steps, budget, asked.requests, asked.title or f"steps of {asked.file}"))


if __name__ == "__main__":
    main()
