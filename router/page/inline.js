// Markdown within a line: code, emphasis, links. Text of a model becomes text nodes, never HTML.

import { element } from "./elements.js";

/** Characters of a text above which it is shown as it is. A bound on the work for a text without line ends. */
const MOST_PARSED = 10_000;
/** Characters of a link's address above which it is no link. */
const LONGEST_ADDRESS = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BARE_ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
/** Emphasis by its mark: the element of one mark and of two. */
const EMPHASIS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

/** The address as a link target, or `null` if it is no absolute http or https URL, or hides its host behind a name. */
export function safeAddress(text) {
  if (text.length > LONGEST_ADDRESS || !URL.canParse(text)) return null;
  const url = new URL(text);
  const isWeb = url.protocol === "http:" || url.protocol === "https:";
  return isWeb && url.username === "" && url.password === "" ? url.href : null;
}

/** A link that opens in another tab, which learns nothing of this one. */
function link(address, children) {
  const href = safeAddress(address);
  if (href === null) return null;
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** The nodes of a text. A line end becomes a line break. */
export function inline(text) {
  if (text.length > MOST_PARSED) return [text];
  return emphasise(new Scanner(text).tokens());
}

/** Cuts a text into tokens: nodes, texts, and runs of emphasis marks. */
class Scanner {
  constructor(text, links = true) {
    this.text = text;
    this.links = links;
    this.found = [];
    this.plain = "";
    this.at = 0;
    /** Lengths of runs of backticks that no later run closes. */
    this.unclosed = new Set();
    this.brackets = links ? matching(text) : new Map();
  }

  tokens() {
    while (this.at < this.text.length) {
      const char = this.text[this.at];
      if (!(this.take(char) ?? false)) {
        this.plain += char;
        this.at += 1;
      }
    }
    this.flush();
    return this.found;
  }

  /** Takes what begins here. `false` if it is plain text. */
  take(char) {
    if (char === "\\" && PUNCTUATION.test(this.text[this.at + 1] ?? "")) {
      this.plain += this.text[this.at + 1];
      this.at += 2;
      return true;
    }
    if (char === "\n") return this.put(element("br"), this.at + 1);
    if (char === "`") return this.code();
    if (char in EMPHASIS) return this.marks(char);
    if (!this.links) return false;
    if (char === "[") return this.link(this.at, this.at);
    if (char === "!" && this.text[this.at + 1] === "[") return this.link(this.at + 1, this.at);
    if (char === "<") return this.angled();
    if (char === "h" && !/\w/.test(this.text[this.at - 1] ?? "")) return this.bare();
    return false;
  }

  flush() {
    if (this.plain) this.found.push(this.plain);
    this.plain = "";
  }

  put(token, end) {
    this.flush();
    this.found.push(token);
    this.at = end;
    return true;
  }

  /** The end of a run of one character. */
  runEnd(char, from = this.at) {
    let end = from;
    while (this.text[end] === char) end += 1;
    return end;
  }

  code() {
    const begin = this.runEnd("`");
    const length = begin - this.at;
    if (!this.unclosed.has(length)) {
      for (let close = this.text.indexOf("`", begin); close >= 0; ) {
        const end = this.runEnd("`", close);
        if (end - close === length) {
          const inner = this.text.slice(begin, close).replaceAll("\n", " ");
          const padded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
          return this.put(element("code", {}, padded ? inner.slice(1, -1) : inner), end);
        }
        close = this.text.indexOf("`", end);
      }
      this.unclosed.add(length);
    }
    this.plain += this.text.slice(this.at, begin);
    this.at = begin;
    return true;
  }

  marks(char) {
    const end = this.runEnd(char);
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[end] ?? " "];
    const spaced = (neighbour) => /\s/.test(neighbour);
    const soft = (neighbour) => spaced(neighbour) || PUNCTUATION.test(neighbour);
    const left = !spaced(after) && (!PUNCTUATION.test(after) || soft(before));
    const right = !spaced(before) && (!PUNCTUATION.test(before) || soft(after));
    const opens = left && (char !== "_" || !right || PUNCTUATION.test(before));
    const closes = right && (char !== "_" || !left || PUNCTUATION.test(after));
    return this.put({ char, count: end - this.at, opens, closes }, end);
  }

  /** `[text](address)`; with `!` before it an image, which is shown as a link to it. */
  link(open, from) {
    const close = this.brackets.get(open);
    if (close === undefined || this.text[close + 1] !== "(") return false;
    let [end, depth] = [close + 2, 0];
    for (; end < this.text.length && end - close < LONGEST_ADDRESS; end += 1) {
      const char = this.text[end];
      if (char === "\n" || (char === ")" && depth === 0)) break;
      depth += Number(char === "(") - Number(char === ")");
    }
    if (this.text[end] !== ")") return false;
    const address = this.text.slice(close + 2, end).trim().replace(/^<|>$/g, "").split(/\s/, 1)[0];
    // Before the text is read, which may be long.
    if (safeAddress(address) === null) return false;
    const name = this.text.slice(open + 1, close) || address;
    const made = link(address, emphasise(new Scanner(name, false).tokens()));
    return made !== null && this.put(made, end + 1);
  }

  angled() {
    const end = this.text.indexOf(">", this.at);
    if (end < 0 || end - this.at > LONGEST_ADDRESS) return false;
    const address = this.text.slice(this.at + 1, end);
    const made = /\s/.test(address) ? null : link(address, [address]);
    return made !== null && this.put(made, end + 1);
  }

  bare() {
    BARE_ADDRESS.lastIndex = this.at;
    let address = BARE_ADDRESS.exec(this.text)?.[0];
    if (!address || address.length > LONGEST_ADDRESS) return false;
    address = address.replace(/[\].,;:!?*_~}]+$/, "");
    while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
    const made = link(address, [address]);
    return made !== null && this.put(made, this.at + address.length);
  }
}

/** The closing bracket of each opening one, by their indices. */
function matching(text) {
  const [pairs, open] = [new Map(), []];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) pairs.set(open.pop(), at);
  }
  return pairs;
}

/** Wraps what stands between two matching marks, and makes text of the others. */
function emphasise(tokens) {
  const done = [];
  /** Indices in `done` of marks that may open. */
  let openers = [];
  for (const token of tokens) {
    if (typeof token === "string" || token instanceof Node) {
      done.push(token);
      continue;
    }
    while (token.closes && token.count > 0) {
      const found = openers.findLastIndex((at) => done[at].char === token.char && width(done[at], token) > 0);
      if (found < 0) break;
      const at = openers[found];
      const used = width(done[at], token);
      const children = done.splice(at + 1).map(plain);
      done.push(element(EMPHASIS[token.char][used - 1], {}, ...children));
      openers = openers.slice(0, found + 1);
      done[at].count -= used;
      token.count -= used;
      if (done[at].count === 0) {
        done.splice(at, 1);
        openers.pop();
      }
    }
    if (token.count === 0) continue;
    if (token.opens) openers.push(done.length);
    done.push(token);
  }
  return done.map(plain);
}

/** Number of marks that an opening and a closing run share in one element: 2, 1, or 0 if they do not match. */
function width(opener, closer) {
  const most = Math.min(opener.count, closer.count, 2);
  return EMPHASIS[closer.char][most - 1] ? most : 0;
}

const plain = (token) => (token.char ? token.char.repeat(token.count) : token);
