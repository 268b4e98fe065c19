// Rates and latencies of the last minutes, from the router's samples.

import { Chart } from "./chart.js";
import { byId, duration, element, number } from "./elements.js";
import { percentile, total } from "./percentile.js";

/** Seconds of samples over which a point of a latency chart is taken. */
const LATENCY_WINDOW_S = 10;

const perSecond = (value) => `${number(value)}/s`;
const seconds = (value) => duration(value * 1000);
const LATENCIES = [
  { name: "p50", kind: "first", share: 0.5 },
  { name: "p95", kind: "second", share: 0.95 },
  { name: "p99", kind: "third", share: 0.99 },
];

/** Samples, the oldest first. */
let samples = [];
/** The last answer without its samples. */
let about = {};

const charts = {
  tokens: new Chart("Tokens", [{ name: "output", kind: "first" }, { name: "prompt", kind: "second" }], perSecond),
  requests: new Chart("Requests", [{ name: "finished", kind: "first" }, { name: "failed", kind: "second" }, { name: "refused", kind: "third" }], perSecond),
  firstToken: new Chart("Time to first token", LATENCIES, seconds),
  interToken: new Chart("Time between tokens", LATENCIES, seconds),
  queue: new Chart("Requests in progress", [{ name: "in progress", kind: "first" }, { name: "waiting", kind: "second" }], number),
  age: new Chart("Age of the queue", [{ name: "oldest", kind: "first" }], duration),
};

/** Sequence number of the newest known sample. */
const newest = () => samples.at(-1)?.sequence ?? 0;

/** The known samples, as the query of an address. */
export const known = () => `process=${about.process ?? ""}&after=${newest()}`;

/** Prepares the charts. */
export function start() {
  byId("rates").append(...Object.values(charts).map(({ root }) => root));
}

/** Takes an answer with the samples after the known ones. */
export function take({ samples: fresh, ...others }) {
  // Another router, or the same one after a restart, has other samples.
  if (others.process !== about.process) samples = [];
  about = others;
  const last = newest();
  samples.push(...fresh.filter(({ sequence }) => sequence > last));
  const end = samples.at(-1)?.at_ms ?? 0;
  samples = samples.filter(({ at_ms: at }) => end - at < about.kept_s * 1000);
  draw();
}

function draw() {
  const end = samples.at(-1)?.at_ms ?? 0;
  const points = (values) =>
    samples.map((sample, index) => ({ key: sample.sequence, age: (end - sample.at_ms) / 1000, values: values(sample, index) }));
  const show = (chart, values) => chart.draw(points(values), about.kept_s);
  const rate = (sample, count) => (count * 1000) / sample.took_ms;
  show(charts.tokens, (it) => [rate(it, it.generated_tokens), rate(it, it.prompt_tokens)]);
  show(charts.requests, (it) => [rate(it, it.finished), rate(it, it.failed), rate(it, refused(it))]);
  show(charts.firstToken, latencies("first_token"));
  show(charts.interToken, latencies("inter_token"));
  show(charts.queue, (it) => [it.in_flight, it.waiting]);
  show(charts.age, (it) => [it.oldest_waiting_ms]);
  showReasons();
}

const refused = ({ refused: reasons }) => Object.values(reasons).reduce((sum, count) => sum + count, 0);

/** Percentiles of the samples shortly before each one. */
function latencies(field) {
  return (sample, index) => {
    const recent = [];
    for (let at = index; at >= 0 && sample.at_ms - samples[at].at_ms < LATENCY_WINDOW_S * 1000; at -= 1) recent.push(samples[at][field]);
    const counts = total(recent);
    return LATENCIES.map(({ share }) => percentile(about.bounds_s, counts, share));
  };
}

function showReasons() {
  const sums = {};
  for (const { refused: reasons } of samples) {
    for (const [reason, count] of Object.entries(reasons)) sums[reason] = (sums[reason] ?? 0) + count;
  }
  const reasons = Object.entries(sums).sort(([, a], [, b]) => b - a).map(([reason, count]) => `${reason} ${number(count)}`);
  const span = duration(Math.max(0, (samples.at(-1)?.at_ms ?? 0) - (samples[0]?.at_ms ?? 0)));
  byId("refusals").textContent = reasons.length ? `Refused in the last ${span}: ${reasons.join(", ")}` : `Nothing refused in the last ${span}.`;
}
