// The table of the last requests: sorted and filtered, each with a button for its waterfall and one that cancels it.

import { post } from "./api.js";
import { byId, duration, element, number } from "./elements.js";
import { acceptedOf, causeOf, endOf, replaysOf, stateOf, timeOf } from "./request.js";
import * as waterfall from "./waterfall.js";

/** Columns: the value that sorts them and their text. */
const COLUMNS = [
  { name: "Request", sort: (it) => it.request },
  { name: "State", sort: stateOf, text: stateOf },
  { name: "Prompt", sort: (it) => it.prompt_tokens, text: (it) => number(it.prompt_tokens) },
  { name: "Output", sort: (it) => it.generated, text: (it) => number(it.generated) },
  { name: "Time", sort: timeOf, text: (it) => duration(timeOf(it)) },
  { name: "Replays", sort: replaysOf, text: (it) => number(replaysOf(it)) },
  { name: "Cause", sort: causeOf, text: causeOf },
];

/** Choices of the filter by state. */
const STATES = {
  "": () => true,
  running: (it) => !endOf(it),
  finished: (it) => stateOf(it) === "finished",
  failed: (it) => endOf(it) && stateOf(it) !== "finished",
};

let conductor = () => null;
/** The last list. */
let requests = [];
let order = { column: 0, descending: true };
let mayCancel = false;

/** Prepares the table. `which` returns the chosen conductor's name. */
export function start(which) {
  conductor = which;
  const heads = COLUMNS.map(({ name }, column) =>
    element("th", { scope: "col" }, element("button", { type: "button", class: "link", onclick: () => sort(column) }, name)),
  );
  byId("request-columns").append(...heads, element("th", { scope: "col", id: "cancel-column", hidden: "" }, element("span", { class: "hidden" }, "Cancel")));
  byId("request-state").addEventListener("change", draw);
  byId("request-filter").addEventListener("input", draw);
  byId("keep").addEventListener("click", () => byId("cancel").close());
  showOrder();
}

/** Forgets all requests, before another conductor's are shown. */
export function forget() {
  requests = [];
  byId("requests").replaceChildren();
  byId("cancel").close();
}

/** Shows requests. */
export function list(answer, allowed) {
  requests = answer.requests;
  mayCancel = allowed;
  byId("cancel-column").hidden = !mayCancel;
  byId("cancel-note").hidden = mayCancel;
  draw();
}

function sort(column) {
  // The largest come first, and requests with a cause before those without one.
  order = { column, descending: order.column !== column || !order.descending };
  showOrder();
  draw();
}

function showOrder() {
  [...byId("request-columns").children].slice(0, COLUMNS.length).forEach((head, column) => {
    if (column === order.column) head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
}

function chosen() {
  const isState = STATES[byId("request-state").value];
  const words = byId("request-filter").value.trim().toLowerCase();
  const text = (it) => `${it.request} ${it.request_id} ${stateOf(it)} ${causeOf(it)}`.toLowerCase();
  const found = requests.filter((it) => isState(it) && text(it).includes(words));
  const { sort } = COLUMNS[order.column];
  const compare = (a, b) => (sort(a) < sort(b) ? -1 : Number(sort(a) > sort(b))) || a.request - b.request;
  found.sort(compare);
  return order.descending ? found.reverse() : found;
}

/** Draws the rows. A row is kept as long as its request is shown, so that it keeps the focus. */
function draw() {
  const body = byId("requests");
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const rows = new Map([...body.children].map((row) => [row.dataset.request, row]));
  const shown = chosen().map((request) => {
    const row = rows.get(String(request.request)) ?? newRow(request.request);
    fill(row, request);
    return row;
  });
  if (shown.length !== body.children.length || shown.some((row, index) => row !== body.children[index])) {
    body.replaceChildren(...shown);
    // A row that has moved has lost the focus.
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }
  const message = requests.length === 0 ? "No request yet." : "No request is like that.";
  byId("no-requests").textContent = message;
  byId("no-requests").hidden = shown.length > 0;
}

function newRow(request) {
  const open = element("button", { type: "button", class: "link", onclick: () => waterfall.find(request) }, String(request));
  const cells = COLUMNS.slice(1).map(() => element("td"));
  const cancel = element("button", { type: "button", class: "small", "aria-label": `Cancel request ${request}` }, "Cancel");
  const row = element("tr", { "data-request": request }, element("th", { scope: "row" }, open), ...cells, element("td", {}, cancel));
  cancel.addEventListener("click", () => confirmCancel(row.request));
  return row;
}

function fill(row, request) {
  row.request = request;
  COLUMNS.slice(1).forEach(({ text }, index) => {
    const cell = row.children[index + 1];
    if (cell.textContent !== text(request)) cell.textContent = text(request);
  });
  const last = row.lastElementChild;
  last.hidden = !mayCancel;
  last.firstElementChild.hidden = Boolean(endOf(request));
}

/** Asks whether a request is to be cancelled. */
function confirmCancel(request) {
  byId("cancel-question").textContent = `Cancel request ${request.request}? Its client gets an error.`;
  byId("cancel-it").onclick = () => {
    byId("cancel").close();
    cancel(request);
  };
  byId("cancel").showModal();
}

async function cancel(request) {
  // After a restart of the conductor, the number may be that of another request. The time tells them apart.
  const which = new URLSearchParams({ conductor: conductor(), accepted_us: acceptedOf(request) });
  const say = (text) => (byId("cancel-status").textContent = text);
  try {
    await post(`/cluster/requests/${request.request}/cancel?${which}`, {});
    say(`Request ${request.request} is cancelled.`);
  } catch (problem) {
    say(`Request ${request.request} is not cancelled: ${problem.message}`);
  }
}
