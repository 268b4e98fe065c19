// The groups and workers of a conductor.

import { byId, bytes, duration, element, facts, number } from "./elements.js";
import * as steps from "./steps.js";

/** Cards of the workers by rank. */
const cards = new Map();

/** Forgets all workers, before another conductor's are shown. */
export function forget() {
  cards.clear();
  byId("workers").replaceChildren();
  byId("absent").replaceChildren();
}

/** Shows the groups that miss workers, and all workers. */
export function show({ groups, workers }) {
  showAbsent(groups);
  const present = new Set(workers.map(({ worker }) => worker));
  for (const [rank, card] of cards) {
    if (present.has(rank)) continue;
    card.root.remove();
    cards.delete(rank);
  }
  for (const worker of workers) {
    if (!cards.has(worker.worker)) addCard(worker.worker);
    fillCard(cards.get(worker.worker), worker);
  }
}

/** Draws the last steps of each worker. */
export function drawSteps() {
  for (const [rank, card] of cards) steps.draw(card.steps, rank);
}

/** Names the ranks that groups wait for. */
function showAbsent(groups) {
  const said = groups.filter(({ joined, ranks }) => joined < ranks).map(({ name, first_rank: first, joined, ranks, spawned }) => {
    const missing = `Group ${name}: ${joined} of ${ranks} workers have joined`;
    const last = first + ranks - 1;
    const range = first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
    return spawned ? `${missing}; the conductor starts ${range}.` : `${missing}; ${range} must be started by hand.`;
  });
  const place = byId("absent");
  if (said.join("\n") === [...place.children].map((item) => item.textContent).join("\n")) return;
  place.replaceChildren(...said.map((text) => element("li", {}, text)));
}

function addCard(rank) {
  const title = element("h3", { id: `worker-${rank}` }, `Worker ${rank}`);
  const phase = element("p", { class: "phase" });
  const device = element("p", { class: "phase" });
  const detail = element("p", { class: "error", hidden: "" });
  const kv = element("div", { class: "bar", role: "img" }, element("div", { class: "used" }), element("div", { class: "cached" }));
  const figures = element("dl", { class: "facts" });
  const picture = element("div", { class: "steps" });
  const root = element("li", { "aria-labelledby": title.id }, title, phase, device, detail, kv, figures, picture);
  byId("workers").append(root);
  cards.set(rank, { root, phase, device, detail, kv, figures, steps: picture });
}

function fillCard(card, { worker, state: phase, group, role, pid, device, detail, ...load }) {
  if (card.pid !== pid) steps.forgetWorker(worker);
  card.pid = pid;
  card.root.dataset.phase = phase;
  card.phase.textContent = [phase, group && `group ${group}`, role !== "unknown" && role, pid && `process ${pid}`].filter(Boolean).join(" · ");
  card.device.textContent = device;
  card.detail.hidden = detail === "";
  card.detail.textContent = detail;
  const { kv_pages_used: used, kv_pages_cached: cached, kv_pages_total: total } = load;
  const share = (pages) => (total ? (100 * pages) / total : 0);
  const [usedBar, cachedBar] = card.kv.children;
  usedBar.style.width = `${share(used)}%`;
  cachedBar.style.width = `${Math.min(share(cached), 100 - share(used))}%`;
  card.kv.setAttribute("aria-label", `KV pages: ${used} in use, ${cached} cached, of ${total}`);
  const { resident_bytes: resident } = load;
  facts(card.figures, [
    ["KV", `${number(used)} + ${number(cached)} of ${number(total)}`],
    ["running", number(load.running)],
    ["waiting", load.waiting ? `${number(load.waiting)}, ${duration(load.oldest_waiting_ms)}` : "0"],
    ["slots", `${number(load.slots_used)} of ${number(load.slots_total)}`],
    ["steps", number(load.steps)],
    ["preempted", number(load.preemptions)],
    ["from cache", load.prefill_tokens ? `${number((100 * load.cached_tokens) / load.prefill_tokens)} %` : "0 %"],
    ["memory", resident ? bytes(resident) : null],
    ["restarts", number(load.restarts)],
  ]);
}
