// The parameters of a chat request, as a form. An empty field is not sent, so that the server uses its default.

import { byId, element } from "./elements.js";

const KEPT = "tutti-parameters";

const FIELDS = [
  { name: "system", label: "System message", rows: 2 },
  { name: "temperature", label: "Temperature (0 to 2)", type: "number", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p (above 0, up to 1)", type: "number", min: 0, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k (0 keeps all)", type: "number", min: -1, step: 1 },
  { name: "max_tokens", label: "Most tokens", type: "number", min: 1, step: 1 },
  { name: "seed", label: "Seed", type: "number", step: 1 },
  { name: "stop", label: "Stop text" },
  { name: "tools", label: "Tools (a JSON list)", rows: 3, json: true },
  { name: "more", label: "Further parameters (a JSON object)", rows: 3, json: true },
];

/** Builds the form, with the values that were entered before in this tab. */
export function show() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
  for (const { name, label, rows, json, ...attributes } of FIELDS) {
    const id = `parameter-${name}`;
    const input = rows
      ? element("textarea", { id, rows, spellcheck: json ? "false" : null })
      : element("input", { id, type: "text", ...attributes });
    input.value = kept[name] ?? "";
    input.addEventListener("change", keep);
    const note = element("p", { id: `${id}-error`, class: "error", hidden: "" });
    input.setAttribute("aria-describedby", note.id);
    byId("parameters").append(element("div", { class: rows ? "wide" : null }, element("label", { for: id }, label), input, note));
  }
}

function keep() {
  const values = FIELDS.map(({ name }) => [name, byId(`parameter-${name}`).value]);
  sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(values)));
}

/** Reads the form: the system message, and the members of the request. `null` if a field has a mistake. */
export function read() {
  const values = {};
  let wrong = null;
  for (const { name, type, json } of FIELDS) {
    const input = byId(`parameter-${name}`);
    const problem = check(input, type, json, values, name);
    const note = byId(`${input.id}-error`);
    note.hidden = problem === null;
    note.textContent = problem ?? "";
    input.setAttribute("aria-invalid", String(problem !== null));
    if (problem !== null) wrong ??= input;
  }
  if (wrong) {
    byId("parameters-box").open = true;
    wrong.focus();
    return null;
  }
  const { system, more, ...body } = values;
  return { system, body: { ...body, ...more } };
}

/** Puts a field's value into `values`. Returns the field's mistake as text, or `null`. */
function check(input, type, json, values, name) {
  if (!input.validity.valid) return input.validationMessage;
  const text = input.value;
  if (text.trim() === "") return null;
  if (!json) {
    values[name] = type === "number" ? Number(text) : text;
    return null;
  }
  try {
    values[name] = JSON.parse(text);
  } catch (problem) {
    return `This is not JSON: ${problem.message}`;
  }
  return null;
}
