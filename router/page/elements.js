// Elements of the page. Text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element with attributes and children (elements or text). A `null` attribute or child is left out. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Like `element`, for SVG. */
export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** The element of index.html with this id. */
export const byId = (id) => document.getElementById(id);

const digits = new Intl.NumberFormat("en");

/** A number with separators, and with few decimals if it is small. */
export function number(value) {
  return digits.format(Math.abs(value) < 10 ? Math.round(value * 100) / 100 : Math.round(value));
}

/** A duration, given in milliseconds, in a unit that suits it. */
export function duration(ms) {
  if (ms === 0) return "0 ms";
  if (ms < 1) return `${number(ms * 1000)} µs`;
  if (ms < 1000) return `${number(ms)} ms`;
  return `${number(ms / 1000)} s`;
}

/** A long duration, given in seconds, in its two largest units. */
export function age(seconds) {
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const index = Math.max(0, units.findIndex(([, size]) => seconds >= size));
  const parts = [];
  for (const [unit, size] of seconds < 1 ? [["s", 1]] : units.slice(index, index + 2)) {
    parts.push(`${Math.floor(seconds / size)} ${unit}`);
    seconds %= size;
  }
  return parts.join(" ");
}

/** A size in bytes, in a unit that suits it. */
export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(size, 1)) / 10));
  return `${number(size / 1024 ** power)} ${units[power]}`;
}

/** Fills a list of descriptions with names and values. A `null` value is left out. */
export function facts(place, pairs) {
  const shown = pairs.filter(([, value]) => value !== null);
  place.replaceChildren(...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** Scrolls to the end of the page. */
export function toEnd() {
  const page = document.documentElement;
  page.scrollTop = page.scrollHeight;
}

/** Makes a change of the page. The end stays in view if it was, and a reader who has scrolled up stays there. */
export function atEnd(change) {
  const page = document.documentElement;
  const follows = page.scrollHeight - page.scrollTop - page.clientHeight < 200;
  change();
  if (follows) toEnd();
}
