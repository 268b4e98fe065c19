// Buttons that copy a text.

import { byId, element } from "./elements.js";

/** Milliseconds for which a button says that it has copied. */
const SAID_MS = 1500;

/** A button that copies the text that `read` returns. */
export function copyButton(name, read) {
  const button = element("button", { type: "button", class: "small" }, name);
  button.addEventListener("click", async () => {
    const done = await copy(read(), button);
    button.textContent = done ? "Copied" : "Not copied";
    byId("chat-status").textContent = done ? "Copied" : "The browser does not let this page copy";
    setTimeout(() => (button.textContent = name), SAID_MS);
  });
  return button;
}

/** Copies a text. Browsers have the clipboard only at https and localhost; elsewhere a selected field is copied. */
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "hidden", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    button.focus();
    return done;
  }
}
