// One request as a waterfall of its phases.

import { json } from "./api.js";
import { byId, duration, element, number } from "./elements.js";
import { causeOf, stateOf, timeOf } from "./request.js";

let conductor = () => null;
/** Number of the request shown. Each new list of requests updates its picture. */
let shown = null;
/** Requests by number, from the last list. */
let known = new Map();

/** Prepares the form that asks for a number. `which` returns the chosen conductor's name. */
export function start(which) {
  conductor = which;
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const number = byId("request-number").value.trim();
    if (number !== "") find(Number(number));
  });
}

/** Forgets all requests, before another conductor's are shown. */
export function forget() {
  shown = null;
  known = new Map();
  byId("waterfall").replaceChildren();
}

/** Takes the newest requests, and draws the one that is shown again. */
export function take({ requests }) {
  known = new Map(requests.map((request) => [request.request, request]));
  if (shown !== null && known.has(shown)) show(known.get(shown));
}

/** Shows a request by its number. */
export async function find(request) {
  shown = request;
  byId("request-number").value = request;
  const own = known.get(request);
  if (own) return show(own, true);
  const name = conductor();
  try {
    const which = name === null ? "" : `?conductor=${encodeURIComponent(name)}`;
    show(await json(`/cluster/requests/${request}${which}`), true);
  } catch (problem) {
    byId("waterfall").replaceChildren(element("p", { class: "error" }, problem.message));
  }
}

/** Cuts a request's life into phases: where each begins and ends, in milliseconds since its arrival. */
export function phases(request) {
  const { transitions } = request;
  const begin = transitions[0]?.at_us ?? 0;
  const ms = (us) => (us - begin) / 1000;
  const end = timeOf(request);
  const found = [];
  let running = null;
  const open = (kind, name, from) => {
    if (running) found.push({ ...running, to: from });
    running = kind && { kind, name, from };
  };
  let prefillWorker = null;
  for (const it of transitions) {
    const now = ms(it.at_us);
    if (it.kind === "accepted") open("queue", "waits for a worker", now);
    else if (it.kind === "replayed") open("queue", "starts over", now);
    else if (it.kind === "launched") {
      if (it.role !== "decode") prefillWorker = it.worker;
      const doing = { decode: "room for the decode", encode: "encoding" }[it.role] ?? "queue and prefill";
      open(it.role === "decode" ? "queue" : "prefill", `${doing}, worker ${it.worker}`, now);
    } else if (it.kind === "prefill_chunk") {
      const from = Math.max(0, now - it.took_us / 1000);
      found.push({ kind: "chunk", name: `chunk of ${number(it.tokens)} tokens, worker ${it.worker}`, from, to: now });
    } else if (it.kind === "first_token") open("decode", `decode after worker ${prefillWorker ?? "?"}'s prefill`, now);
    else if (it.kind === "handed_over") found.push({ kind: "mark", name: "handed over", from: now, to: now });
    else if (it.kind === "ended") open(null, "", now);
  }
  if (running) found.push({ ...running, to: Math.max(end, running.from), open: true });
  return { found: found.sort((a, b) => a.from - b.from || b.to - a.to), end };
}

function show(request, focus = false) {
  const { found, end } = phases(request);
  const place = byId("waterfall");
  const share = (ms) => `${(100 * ms) / Math.max(end, 0.001)}%`;
  const rows = found.map(({ kind, name, from, to, open }) => {
    const bar = element("div", { class: kind });
    bar.style.marginLeft = `min(${share(from)}, calc(100% - 3px))`;
    bar.style.width = share(to - from);
    const time = kind === "mark" ? `after ${duration(from)}` : open ? `${duration(to - from)}, goes on` : duration(to - from);
    return element("li", {}, element("p", {}, `${name}: ${time}`), element("div", { class: "track", "aria-hidden": "true" }, bar));
  });
  const title = element("h3", { tabindex: "-1" }, `Request ${request.request}: ${stateOf(request)}`);
  const facts = `${number(request.prompt_tokens)} prompt tokens, ${number(request.generated)} output tokens, ${duration(timeOf(request))}${request.request_id && `, id ${request.request_id}`}`;
  const cause = causeOf(request);
  place.replaceChildren(
    title,
    element("p", { class: "quiet" }, facts),
    cause ? element("p", { class: "error" }, cause) : "",
    element("ol", {}, ...rows),
  );
  if (focus) title.focus();
}
