// Markdown of answers: paragraphs, headings, lists, quotes, tables, code. It makes elements, never HTML.

import { copyButton } from "./copy.js";
import { element } from "./elements.js";
import { inline } from "./inline.js";

/** Lists and quotes within one another above which their text is shown as it is. */
const DEEPEST = 8;
/** Most columns of a table. A wider one is shown as text. */
const MOST_COLUMNS = 64;

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/s;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;

const isBlank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

/** Text that grows, such as a streamed answer. Blocks that are complete are made once. */
export class Growing {
  /** Text of the last blocks, which may still change. */
  rest = "";
  /** Elements of the last blocks. */
  tail = [];
  drawn = true;
  /** Milliseconds that the last drawing took. */
  took = 0;

  /** `around` makes each change of the page, which it gets as a function. */
  constructor(place, around = (change) => change()) {
    this.place = place;
    this.around = around;
  }

  /** Adds a text. It is drawn with the next frame. */
  append(text) {
    // A line end of two characters may come in two pieces.
    this.rest += text.replaceAll("\r", "");
    if (!this.drawn) return;
    this.drawn = false;
    // Most of the time is left to the reader, who may select and press buttons in what is drawn again.
    setTimeout(() => requestAnimationFrame(() => this.draw()), 4 * this.took);
  }

  /** Draws what has been added. */
  draw() {
    if (this.drawn) return;
    this.drawn = true;
    const began = performance.now();
    const lines = this.rest.split("\n");
    const blocks = [...cut(lines, 0)];
    // The last line has not ended. A block that begins in it, or as a table in the line before, may become a part of
    // the block before.
    const open = blocks.at(-1)?.from >= lines.length - 2 ? 2 : 1;
    const last = blocks.splice(-open);
    this.around(() => {
      this.tail.forEach((node) => node.remove());
      this.tail = last.map(({ make }) => make());
      this.place.append(...blocks.map(({ make }) => make()), ...this.tail);
    });
    if (blocks.length) this.rest = lines.slice(last[0].from).join("\n");
    this.took = performance.now() - began;
  }
}

/** Cuts lines into blocks, each with its first line and a function that makes its element. */
function* cut(lines, depth) {
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { end, make } = block(lines, at, depth);
    yield { from: at, make };
    at = end;
  }
}

/** The block that begins at a line: the line after its last one, and a function that makes its element. */
function block(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fenced(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return { end: at + 1, make: () => headingOf(heading) };
  if (RULE.test(line)) return { end: at + 1, make: () => element("hr") };
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !begins(lines, end)) end += 1;
  const text = lines.slice(at, end).map((text) => text.trim()).join("\n");
  return { end, make: () => element("p", {}, ...inline(text)) };
}

/** True if a block other than a paragraph begins at this line. */
function begins(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line)) || isTable(lines, at);
}

/** All headings of an answer are one level below the heading of the message, so that none is left out in between. */
function headingOf([, marks, text = ""]) {
  return element("h3", { class: `level-${marks.length}` }, ...inline(text.trim().replace(/ #+$/, "")));
}

function fenced(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const strip = indent(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(strip, indent(line)))).join("\n");
  return { end: Math.min(end + 1, lines.length), make: () => codeBlock(code, info.trim().split(/\s/, 1)[0]) };
}

function codeBlock(code, language) {
  const head = element("figcaption", {}, element("span", {}, language || "code"), copyButton("Copy code", () => code));
  return element("figure", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, code)));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, make: () => element("blockquote", {}, ...nodes(inner, depth + 1)) };
}

const nodes = (lines, depth) => [...cut(lines, depth)].map(({ make }) => make());

/** A list: items of one kind. Lines that are indented by two or more belong to the item above them. */
function list(lines, at, depth) {
  const isOrdered = (line) => /\d/.test(ITEM.exec(line)[2]);
  const ordered = isOrdered(lines[at]);
  const base = indent(lines[at]);
  const starts = (line) => ITEM.test(line) && !RULE.test(line) && indent(line) < base + 2 && isOrdered(line) === ordered;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (starts(line)) {
      const [marker] = ITEM.exec(line);
      items.push({ width: Math.max(marker.length, 2), lines: [line.slice(marker.length)] });
    } else if (isBlank(line)) {
      let next = end;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      if (next === lines.length || !(starts(lines[next]) || indent(lines[next]) >= base + 2)) break;
      for (; end < next; end += 1) items.at(-1).lines.push("");
      continue;
    } else if (indent(line) >= base + 2) {
      items.at(-1).lines.push(line.slice(Math.min(indent(line), base + items.at(-1).width)));
    } else if (!isBlank(lines[end - 1]) && !begins(lines, end)) {
      items.at(-1).lines.push(line.trim());
    } else break;
    end += 1;
  }
  const number = ordered ? Number.parseInt(lines[at].trim(), 10) : null;
  return {
    end,
    make: () =>
      element(ordered ? "ol" : "ul", { start: number === 1 ? null : number }, ...items.map((item) => itemOf(item, depth))),
  };
}

/** An item. A first paragraph stands in it without an element of its own, so that short lists are close together. */
function itemOf({ lines }, depth) {
  const [first, ...others] = nodes(lines, depth + 1);
  if (first?.localName !== "p") return element("li", {}, first, ...others);
  return element("li", {}, ...first.childNodes, ...others);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function isTable(lines, at) {
  const under = lines[at + 1] ?? "";
  if (!lines[at].includes("|") || !under.includes("|")) return false;
  const marks = cells(under);
  return marks.length <= MOST_COLUMNS && marks.length === cells(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes("|")) end += 1;
  const sides = cells(lines[at + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const row = (line, name) => {
    const given = cells(line);
    return element("tr", {}, ...sides.map((side, index) => element(name, { class: side }, ...inline(given[index] ?? ""))));
  };
  return {
    end,
    make: () => {
      const rows = lines.slice(at + 2, end).map((line) => row(line, "td"));
      const made = element("table", {}, element("thead", {}, row(lines[at], "th")), element("tbody", {}, ...rows));
      return element("div", { class: "wide-table", tabindex: "0" }, made);
    },
  };
}
