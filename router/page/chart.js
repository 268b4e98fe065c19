// A chart of numbers over the last minutes: a line per series, its newest values in the legend.

import { drawing, element } from "./elements.js";

const [WIDTH, HEIGHT] = [300, 70];

/** One chart. `series` are objects with `name` and `kind`, the class of the line. `format` writes a value. */
export class Chart {
  /** Index of the point under the pointer; `null` for the newest. */
  pointed = null;
  points = [];

  constructor(title, series, format) {
    Object.assign(this, { title, series, format });
    this.lines = series.map(({ kind }) => drawing("path", { class: `line ${kind}` }));
    this.marker = drawing("line", { class: "marker", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const view = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.svg = drawing("svg", view, ...this.lines, this.marker);
    this.values = series.map(() => element("dd"));
    this.top = element("p", { class: "top quiet", "aria-hidden": "true" });
    this.when = element("p", { class: "when quiet", "aria-hidden": "true" });
    const legend = series.map(({ name, kind }, index) =>
      element("div", {}, element("dt", {}, this.sample(kind), name), this.values[index]),
    );
    this.root = element("li", {}, element("h3", {}, title), element("dl", {}, ...legend), this.top, this.svg, this.when);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** A short piece of a series' line, for the legend. */
  sample(kind) {
    const line = drawing("path", { class: `line ${kind}`, d: "M0 4H22" });
    return drawing("svg", { viewBox: "0 0 22 8", class: "sample", "aria-hidden": "true" }, line);
  }

  /** Draws points: the age in seconds and a value per series, the oldest first. `null` values leave a gap. */
  draw(points, span) {
    Object.assign(this, { points, span });
    const known = points.flatMap(({ values }) => values).filter((value) => value !== null);
    const highest = Math.max(0, ...known);
    const top = ceiling(highest);
    for (const [index, line] of this.lines.entries()) {
      let [path, pen] = ["", "M"];
      for (const point of points) {
        const value = point.values[index];
        if (value !== null) path += `${pen}${this.x(point).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 6)).toFixed(1)}`;
        pen = value === null ? "M" : "L";
      }
      line.setAttribute("d", path);
    }
    this.top.textContent = known.length ? this.format(top) : "";
    const newest = points.at(-1)?.values ?? [];
    const said = this.series.map(({ name }, index) => `${name} ${this.write(newest[index])}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: now ${said}; at most ${this.format(highest)}`);
    this.read();
  }

  x({ age }) {
    return WIDTH * (1 - age / this.span);
  }

  write(value) {
    return value === null || value === undefined ? "none" : this.format(value);
  }

  /** Shows the values at the pointer, or the newest without one. */
  point(event) {
    this.pointed = null;
    if (event && this.points.length) {
      const box = this.svg.getBoundingClientRect();
      const age = this.span * (1 - (event.clientX - box.left) / box.width);
      const distance = (point) => Math.abs(point.age - age);
      this.pointed = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)).key;
    }
    this.read();
  }

  read() {
    const pointed = this.pointed === null ? null : this.points.find(({ key }) => key === this.pointed);
    const shown = pointed ?? this.points.at(-1);
    this.values.forEach((place, index) => (place.textContent = this.write(shown?.values[index])));
    this.marker.setAttribute("visibility", pointed ? "visible" : "hidden");
    if (pointed) {
      this.marker.setAttribute("x1", this.x(pointed));
      this.marker.setAttribute("x2", this.x(pointed));
    }
    const minutes = Math.round(this.span / 60);
    this.when.textContent = pointed ? `${Math.round(pointed.age)} s ago` : `last ${minutes} minutes`;
  }
}

/** The end of a scale for values up to this one: 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}
