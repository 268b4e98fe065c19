// The chat: the conversation, its requests, and the buttons that stop an answer or ask for another one.

import { ApiError, events } from "./api.js";
import * as attachments from "./attachments.js";
import { atEnd, byId, element, toEnd } from "./elements.js";
import * as parameters from "./parameters.js";
import { Reply } from "./reply.js";
import * as welcome from "./welcome.js";

/** The conversation so far, in the API's format. */
let messages = [];
/** The `AbortController` of the running answer; `null` if none runs. */
let running = null;
/** The served model's name, once it is known. */
let model = null;
/** The button that asks for another answer. It stands below the last answer. */
const again = element("button", { type: "button", class: "small", onclick: () => regenerate() }, "Regenerate");

/** Prepares the view. */
export function start() {
  parameters.show();
  attachments.start(() => messages.reduce((sum, message) => sum + fileBytes(message), 0));
  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("messages").replaceChildren();
    welcome.show(true);
    status("");
    byId("prompt").focus();
  });
}

/** Sets the model that requests name, as `/v1/models` describes it; `null` if none is known. */
export function serve(served) {
  model = served?.id ?? null;
  if (!served) return;
  welcome.describe(served, ask);
  attachments.offer(served);
}

/** Characters of a message's files in the API's format. */
function fileBytes({ content }) {
  if (!Array.isArray(content)) return 0;
  const data = (part) => part.image_url?.url ?? part.input_audio?.data ?? "";
  return content.reduce((sum, part) => sum + data(part).length, 0);
}

function status(text) {
  byId("chat-status").textContent = text;
}

/** Sends one of the questions of the empty chat. */
function ask(question) {
  byId("prompt").value = question;
  byId("prompt").focus();
  send();
}

async function send() {
  const text = byId("prompt").value;
  const hasText = text.trim() !== "";
  if (running || !(hasText || attachments.any())) return;
  const settings = parameters.read();
  if (settings === null) return;
  byId("prompt").value = "";
  welcome.show(false);
  const files = attachments.take();
  const said = hasText ? [{ type: "text", text }] : [];
  const message = { role: "user", content: files.length ? [...files.map(({ part }) => part), ...said] : text };
  const conversation = messages;
  messages.push(message);
  const shown = show("user", "You");
  shown.body.append(...files.map(attachments.preview), text);
  toEnd();
  const isRefused = await answer(settings);
  // A file that is refused once would be refused with every further message, so the message leaves the conversation.
  if (!isRefused || !files.length || conversation !== messages) return;
  messages = messages.filter((other) => other !== message);
  again.remove();
  shown.foot.textContent = "This message was refused and is not part of the conversation.";
  attachments.giveBack(files);
  if (byId("prompt").value === "") byId("prompt").value = text;
}

/** Drops the last answer and asks for another one. */
async function regenerate() {
  if (running) return;
  const settings = parameters.read();
  if (settings === null) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  again.closest("li").remove();
  await answer(settings, "focus");
}

/**
 * Requests an answer to the conversation, and shows it as it comes. Resolves with true if the server refuses the
 * request.
 */
async function answer({ system, body }, focus) {
  const conversation = messages;
  const shown = show("assistant", "Answer");
  if (focus) shown.item.focus({ preventScroll: true });
  const reply = new Reply(shown);
  running = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  again.remove();
  status("Waiting for the first token");
  const sent = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const request = { ...body, messages: sent, stream: true, stream_options: { include_usage: true } };
  if (model) request.model ??= model;
  let end = "";
  let isRefused = false;
  try {
    for await (const event of events("/v1/chat/completions", request, running.signal)) {
      if (reply.take(event)) status("Answering");
    }
    end = reply.finish;
  } catch (problem) {
    if (problem.name === "AbortError") end = "stopped";
    else if (problem instanceof ApiError) {
      reply.fail(problem.message);
      isRefused = problem.status === 400 || problem.status === 413;
    } else throw problem;
  } finally {
    running = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
  }
  const figures = reply.end(end);
  status(reply.failed ? "The answer failed" : `Answer complete: ${figures}`);
  // An answer to an earlier conversation is not added.
  if (conversation !== messages) return isRefused;
  atEnd(() => shown.tools.append(again));
  const message = reply.message();
  if (message) messages.push(message);
  return isRefused;
}

/** Adds a message to the list. */
function show(kind, title) {
  const body = element("div", { class: "body" });
  const foot = element("p", { class: "quiet foot" });
  const tools = element("div", { class: "tools" });
  const isAnswer = kind === "assistant";
  const attributes = { class: kind, "aria-busy": isAnswer ? "true" : null, tabindex: isAnswer ? "-1" : null };
  const item = element("li", attributes, element("h2", {}, title), body, foot, isAnswer ? tools : null);
  byId("messages").append(item);
  toEnd();
  return { item, body, foot, tools };
}
