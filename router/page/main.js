// The page's frame: views, colours, the API key, the served model.

import { json, key, setKey } from "./api.js";
import { byId } from "./elements.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";

const THEME = "tutti-theme";
const THEMES = ["auto", "light", "dark"];
const VIEWS = { chat, cluster };
/** Milliseconds until the next request to a server that does not answer or is not ready. */
const RETRY_MS = 2000;

function theme() {
  return localStorage.getItem(THEME) ?? "auto";
}

function showTheme() {
  document.documentElement.dataset.theme = theme();
  byId("theme").textContent = `Colours: ${theme()}`;
}

/** Name of the view that is shown. */
let shown = null;

function showView() {
  const named = location.hash.slice(1);
  // Any other hash is a link to a place within the current view.
  if (shown && !(named in VIEWS)) return;
  shown = named in VIEWS ? named : "chat";
  for (const [name, view] of Object.entries(VIEWS)) {
    const isShown = name === shown;
    byId(name).hidden = !isShown;
    if (isShown) byId(`nav-${name}`).setAttribute("aria-current", "page");
    else byId(`nav-${name}`).removeAttribute("aria-current");
    view.visible?.(isShown);
  }
}

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
  if (shown) byId("key").focus();
}

let retry = 0;

/** Asks for the served model until there is an answer. */
async function readModel() {
  clearTimeout(retry);
  try {
    const { data } = await json("/v1/models");
    byId("model").textContent = data[0]?.id ?? "";
    chat.serve(data[0] ?? null);
  } catch (problem) {
    byId("model").textContent = problem.message;
    // Without a valid key there is no retry. The request is sent again when the user enters another key.
    if (problem.status !== 401) retry = setTimeout(readModel, RETRY_MS);
  }
}

byId("theme").addEventListener("click", () => {
  localStorage.setItem(THEME, THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  showTheme();
});
byId("key-button").addEventListener("click", () => showKeyForm(byId("key-form").hidden));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  showKeyForm(false);
  byId("key-button").focus();
  setKey(byId("key").value.trim());
});
document.addEventListener("key-needed", () => showKeyForm(true));
document.addEventListener("key-changed", readModel);
addEventListener("hashchange", showView);

byId("key").value = key();
showTheme();
Object.values(VIEWS).forEach((view) => view.start());
showView();
readModel();
