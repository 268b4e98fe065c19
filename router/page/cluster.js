// The cluster at work: conductors, workers, their last steps, and the last requests.

import { json } from "./api.js";
import { byId, duration, element, number } from "./elements.js";
import * as steps from "./steps.js";
import * as waterfall from "./waterfall.js";

/** Milliseconds between two polls of the server. */
const PERIOD_MS = 1000;

/** The chosen conductor's name; `null` until one is known. */
let conductor = null;
/** Cards of the workers by rank. */
const cards = new Map();
let timer = 0;
/** Incremented whenever the view is shown or hidden, or shows another conductor. Polls of an earlier turn then end. */
let turn = 0;

/** Prepares the view. */
export function start() {
  byId("conductor").addEventListener("change", (event) => choose(event.target.value));
  byId("pause").addEventListener("click", () => {
    const paused = byId("pause").getAttribute("aria-pressed") === "true";
    byId("pause").setAttribute("aria-pressed", String(!paused));
    run(paused);
  });
  document.addEventListener("visibilitychange", () => visible(!byId("cluster").hidden && !document.hidden));
  document.addEventListener("key-changed", () => visible(!byId("cluster").hidden));
  steps.legend(byId("legend"));
  waterfall.start(() => conductor);
}

/** Polls the server while the view is shown. */
export function visible(shown) {
  run(shown && byId("pause").getAttribute("aria-pressed") !== "true");
}

function run(on) {
  clearTimeout(timer);
  turn += 1;
  if (on) ask(turn);
}

function choose(name) {
  conductor = name;
  cards.clear();
  byId("workers").replaceChildren();
  steps.forget();
  waterfall.forget();
  visible(true);
}

async function ask(mine) {
  try {
    const { conductors } = await json("/cluster/state");
    if (mine !== turn) return;
    showConductors(conductors);
    const chosen = conductors.find(({ name }) => name === conductor) ?? conductors[0];
    if (chosen) {
      conductor = chosen.name;
      showState(chosen);
      const which = `conductor=${encodeURIComponent(conductor)}`;
      const [last, recent] = await Promise.all([
        json(`/cluster/steps?${which}&after=${steps.newest()}`),
        json(`/cluster/requests?${which}`),
      ]);
      if (mine !== turn) return;
      steps.take(last.steps);
      for (const [rank, card] of cards) steps.draw(card.steps, rank);
      waterfall.list(recent.requests);
    }
    trouble("");
  } catch (problem) {
    if (mine !== turn) return;
    trouble(problem.message);
    // Polling stops without a valid key. It begins again when the user enters another key.
    if (problem.status === 401) return;
  }
  timer = setTimeout(() => ask(mine), PERIOD_MS);
}

function trouble(text) {
  if (byId("cluster-trouble").textContent !== text) byId("cluster-trouble").textContent = text;
}

function showConductors(conductors) {
  const select = byId("conductor");
  const names = conductors.map(({ name }) => name);
  if (names.join("\n") !== [...select.options].map(({ value }) => value).join("\n")) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (names.includes(conductor)) select.value = conductor;
  }
  byId("conductor-box").hidden = names.length < 2;
}

function showState({ ready, reason, requests_in_flight: requests, workers }) {
  const sum = (field) => workers.reduce((total, worker) => total + worker[field], 0);
  const total = sum("kv_pages_total");
  const figures = [
    ["Conductor", ready ? "ready" : `not ready: ${reason}`],
    ["Requests", number(requests)],
    ["Workers ready", `${workers.filter(({ state }) => state === "ready").length} of ${workers.length}`],
    ["Running", number(sum("running"))],
    ["Waiting", number(sum("waiting"))],
    ["KV pages in use", total ? `${number((sum("kv_pages_used") * 100) / total)} %` : "none yet"],
  ];
  byId("figures").replaceChildren(
    ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
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

function addCard(rank) {
  const title = element("h3", { id: `worker-${rank}` }, `Worker ${rank}`);
  const phase = element("p", { class: "phase" });
  const detail = element("p", { class: "error", hidden: "" });
  const kv = element("div", { class: "bar", role: "img" }, element("div", { class: "used" }), element("div", { class: "cached" }));
  const facts = element("dl", { class: "facts" });
  const picture = element("div", { class: "steps" });
  const root = element("li", { "aria-labelledby": title.id }, title, phase, detail, kv, facts, picture);
  byId("workers").append(root);
  cards.set(rank, { root, phase, detail, kv, facts, steps: picture });
}

function fillCard(card, { worker, state: phase, group, role, pid, detail, ...load }) {
  if (card.pid !== pid) steps.forgetWorker(worker);
  card.pid = pid;
  card.root.dataset.phase = phase;
  card.phase.textContent = [phase, group && `group ${group}`, role !== "unknown" && role, pid && `process ${pid}`].filter(Boolean).join(" · ");
  card.detail.hidden = detail === "";
  card.detail.textContent = detail;
  const { kv_pages_used: used, kv_pages_cached: cached, kv_pages_total: total } = load;
  const share = (pages) => (total ? (100 * pages) / total : 0);
  const [usedBar, cachedBar] = card.kv.children;
  usedBar.style.width = `${share(used)}%`;
  cachedBar.style.width = `${Math.min(share(cached), 100 - share(used))}%`;
  card.kv.setAttribute("aria-label", `KV pages: ${used} in use, ${cached} cached, of ${total}`);
  const facts = [
    ["KV", `${number(used)} + ${number(cached)} of ${number(total)}`],
    ["running", number(load.running)],
    ["waiting", load.waiting ? `${number(load.waiting)}, ${duration(load.oldest_waiting_ms)}` : "0"],
    ["slots", `${number(load.slots_used)} of ${number(load.slots_total)}`],
    ["steps", number(load.steps)],
    ["preempted", number(load.preemptions)],
    ["from cache", load.prefill_tokens ? `${number((100 * load.cached_tokens) / load.prefill_tokens)} %` : "0 %"],
  ];
  card.facts.replaceChildren(
    ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}
