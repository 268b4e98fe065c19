// The cluster at work: conductors, rates, workers with their last steps, and the last requests.

import { json } from "./api.js";
import { age, byId, element, facts, number } from "./elements.js";
import * as rates from "./rates.js";
import * as requests from "./requests.js";
import * as steps from "./steps.js";
import * as waterfall from "./waterfall.js";
import * as workers from "./workers.js";

/** Milliseconds between two polls of the server. */
const PERIOD_MS = 1000;

/** The chosen conductor's name; `null` until one is known. */
let conductor = null;
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
  rates.start();
  requests.start(() => conductor);
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
  workers.forget();
  steps.forget();
  requests.forget();
  waterfall.forget();
  visible(true);
}

async function ask(mine) {
  try {
    const { conductors, may_cancel: mayCancel } = await json("/cluster/state");
    if (mine !== turn) return;
    showConductors(conductors);
    const chosen = conductors.find(({ name }) => name === conductor) ?? conductors[0];
    // The router knows its own rates, also while no conductor answers.
    const history = json(`/cluster/history?${rates.known()}`).then((fresh) => mine === turn && rates.take(fresh));
    if (chosen) {
      conductor = chosen.name;
      showFigures(chosen);
      workers.show(chosen);
      const which = `conductor=${encodeURIComponent(conductor)}`;
      const [last, recent] = await Promise.all([
        json(`/cluster/steps?${which}&after=${steps.newest()}`),
        json(`/cluster/requests?${which}`),
      ]);
      if (mine !== turn) return;
      steps.take(last.steps);
      workers.drawSteps();
      requests.list(recent, mayCancel);
      waterfall.take(recent);
    }
    await history;
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

function showFigures({ ready, reason, workers: all, ...cluster }) {
  const sum = (field) => all.reduce((total, worker) => total + worker[field], 0);
  const total = sum("kv_pages_total");
  facts(byId("figures"), [
    ["Conductor", ready ? "ready" : `not ready: ${reason}`],
    ["Version", cluster.build || null],
    ["Up for", cluster.up_s === null ? null : age(cluster.up_s)],
    ["Workers ready", `${all.filter(({ state }) => state === "ready").length} of ${all.length}`],
    ["Requests", number(cluster.requests_in_flight)],
    ["Running", number(sum("running"))],
    ["Waiting", number(sum("waiting"))],
    ["KV pages in use", total ? `${number((sum("kv_pages_used") * 100) / total)} %` : "none yet"],
    ["Replays", number(cluster.replays)],
    ["Restarts", number(sum("restarts"))],
  ]);
}
