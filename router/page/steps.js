// The last steps of each worker, as its scheduler packed them: a bar per step, decodes below, each prefill above.

import { drawing, duration, element, number } from "./elements.js";

/** Steps shown per worker. */
const SHOWN = 60;
const BAR = 6;
const HEIGHT = 90;

/** Steps by rank, the oldest first. */
const kept = new Map();
let sequence = 0;

/** Sequence number of the newest known step. */
export const newest = () => sequence;

/** Forgets all steps, before another conductor's are shown. */
export function forget() {
  kept.clear();
  sequence = 0;
}

/** Forgets the steps of a worker whose process has been replaced. */
export function forgetWorker(rank) {
  kept.delete(rank);
}

/** Takes new steps. */
export function take(steps) {
  for (const step of steps) {
    const own = kept.get(step.worker) ?? [];
    own.push(step);
    if (own.length > SHOWN) own.shift();
    kept.set(step.worker, own);
    sequence = Math.max(sequence, step.sequence);
  }
}

/** Explains the colours. */
export function legend(place) {
  const names = { decode: "decode", prefill: "prefill, one block per prompt", padding: "padding", budget: "budget of a step" };
  place.append(...Object.entries(names).map(([kind, name]) => element("li", {}, element("span", { class: `swatch ${kind}` }), name)));
}

/** Draws a worker's steps. */
export function draw(place, rank) {
  const steps = kept.get(rank) ?? [];
  if (steps.length === 0) {
    if (place.dataset.newest !== "") place.replaceChildren(element("p", { class: "quiet" }, "No step since this view was opened."));
    place.dataset.newest = "";
    return;
  }
  const last = steps.at(-1);
  if (place.dataset.newest === String(last.sequence)) return;
  place.dataset.newest = String(last.sequence);
  const budget = Math.max(...steps.map((step) => step.budget_tokens));
  const most = Math.max(...steps.map((step) => step.tokens + step.padding_tokens));
  // Heights are square roots of token numbers. On a linear scale, a few decodes would not be visible next to a budget
  // of thousands.
  const scale = Math.sqrt(Math.max(budget, most, 1));
  const y = (tokens) => HEIGHT - (Math.sqrt(tokens) / scale) * (HEIGHT - 4);
  const name = summary(rank, steps, last);
  const svg = drawing("svg", { viewBox: `0 0 ${SHOWN * BAR} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": name });
  steps.forEach((step, index) => svg.append(bar(step, (SHOWN - steps.length + index) * BAR, y)));
  svg.append(drawing("line", { class: "budget", x1: 0, x2: SHOWN * BAR, y1: y(budget), y2: y(budget) }));
  const caption = `${number(last.tokens)} of ${number(last.budget_tokens)} tokens in ${duration(last.took_us / 1000)}`;
  place.replaceChildren(svg, element("p", { class: "quiet" }, `Step ${number(last.step)}: ${caption}`));
}

function bar(step, x, y) {
  const { decode_rows: decodes, padding_tokens: padding, prefills, tokens } = step;
  const requests = prefills.map(({ request, tokens: share }) => `request ${request}: ${share}`);
  const title = [
    `step ${step.step}: ${tokens} of ${step.budget_tokens} tokens, ${duration(step.took_us / 1000)}`,
    decodes && `decodes: ${decodes}`,
    ...requests,
    padding && `padding: ${padding}`,
  ];
  const group = drawing("g", {}, drawing("title", {}, title.filter(Boolean).join("\n")));
  let top = 0;
  const block = (kind, size) => {
    if (size <= 0) return;
    const [low, high] = [y(top), y(top + size)];
    group.append(drawing("rect", { class: kind, x, y: high, width: BAR - 1, height: Math.max(low - high, 0.5) }));
    top += size;
  };
  block("decode", decodes);
  for (const { tokens: share } of prefills) block("prefill", share);
  block("padding", padding);
  return group;
}

/** The picture's content as text, for screen readers. */
function summary(rank, steps, last) {
  const prefill = steps.filter((step) => step.prefills.length > 0).length;
  return `The last ${steps.length} steps of worker ${rank}: ${prefill} with prefill, ${last.decode_rows} decodes in the last one, budget ${last.budget_tokens} tokens`;
}
