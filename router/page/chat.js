// The chat: messages, the streamed answer with its tool calls, and a button that stops the answer.

import { ApiError, events } from "./api.js";
import { byId, duration, element, number } from "./elements.js";
import * as parameters from "./parameters.js";

/** The conversation so far, in the API's format. */
let messages = [];
/** The `AbortController` of the running answer; `null` if none runs. */
let running = null;
/** The served model's name, once it is known. */
let model = null;

/** Prepares the view. */
export function start() {
  parameters.show();
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
    status("");
    byId("prompt").focus();
  });
}

/** Sets the model that requests name. */
export function serve(name) {
  model = name;
}

function status(text) {
  byId("chat-status").textContent = text;
}

async function send() {
  const text = byId("prompt").value;
  if (running || text.trim() === "") return;
  const settings = parameters.read();
  if (settings === null) return;
  byId("prompt").value = "";
  messages.push({ role: "user", content: text });
  show("user", "You").body.textContent = text;
  await answer(settings);
}

/** Requests an answer to the conversation, and shows it as it comes. */
async function answer({ system, body }) {
  const conversation = messages;
  const shown = show("assistant", "Answer");
  const reply = new Reply(shown);
  running = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  status("Waiting for the first token");
  const sent = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  const request = { ...body, messages: sent, stream: true, stream_options: { include_usage: true } };
  if (model) request.model ??= model;
  let end = "";
  try {
    for await (const event of events("/v1/chat/completions", request, running.signal)) reply.take(event);
    end = reply.finish;
  } catch (problem) {
    if (problem.name === "AbortError") end = "stopped";
    else if (problem instanceof ApiError) reply.fail(problem.message);
    else throw problem;
  } finally {
    running = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
    shown.item.setAttribute("aria-busy", "false");
  }
  const figures = reply.figures(end);
  shown.foot.textContent = figures;
  status(reply.failed ? "The answer failed" : `Answer complete: ${figures}`);
  // An answer without content is not added, because the API would refuse the next request. An answer to an earlier
  // conversation is not added either.
  if (conversation === messages && !reply.failed && (reply.text || reply.calls.length)) messages.push(reply.message());
}

/** Adds a message to the list. */
function show(kind, title) {
  const body = element("div", { class: "body" });
  const foot = element("p", { class: "quiet foot" });
  const busy = kind === "assistant" ? "true" : null;
  const item = element("li", { class: kind, "aria-busy": busy }, element("h2", {}, title), body, foot);
  byId("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return { item, body, foot };
}

/** An answer in progress. */
class Reply {
  text = "";
  calls = [];
  finish = "";
  usage = null;
  failed = false;
  began = performance.now();
  first = null;
  last = null;

  constructor({ item, body, foot }) {
    this.item = item;
    this.body = body;
    this.foot = foot;
    this.content = element("div", { class: "text" });
    this.tools = element("div");
    body.append(this.content, this.tools);
  }

  /** Takes one event of the stream. */
  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.find((choice) => choice.index === 0);
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, tool_calls: calls } = choice.delta ?? {};
    if (!content && !calls) return;
    if (this.first === null) status("Answering");
    this.last = performance.now();
    this.first ??= this.last;
    if (content) {
      this.text += content;
      this.content.append(content);
    }
    for (const call of calls ?? []) this.takeCall(call);
    // If the user has scrolled up, the view stays where it is.
    const end = document.documentElement;
    if (end.scrollHeight - end.scrollTop - end.clientHeight < 200) this.item.scrollIntoView({ block: "end" });
  }

  /** Takes a piece of a tool call. The first piece has the name. The arguments come in several pieces. */
  takeCall({ index = 0, id, function: { name, arguments: piece } = {} }) {
    let call = this.calls[index];
    if (!call) {
      call = this.calls[index] = { id, name: "", arguments: "", title: element("h3"), code: element("pre", { tabindex: "0" }) };
      this.tools.append(element("section", { class: "tool", "aria-label": "Tool call" }, call.title, call.code));
    }
    call.name += name ?? "";
    call.arguments += piece ?? "";
    call.title.textContent = `Calls ${call.name}`;
    call.code.textContent = call.arguments;
  }

  fail(message) {
    this.failed = true;
    this.body.append(element("p", { class: "error", role: "alert" }, `Error: ${message}`));
  }

  /** The answer as a message of the conversation. */
  message() {
    const message = { role: "assistant", content: this.text };
    const calls = this.calls.filter(Boolean);
    if (calls.length) {
      const call = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
      message.tool_calls = calls.map(call);
    }
    return message;
  }

  /** A line of figures about the answer. */
  figures(end) {
    const parts = [];
    const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage ?? {};
    if (this.usage) parts.push(`${number(prompt)} + ${number(tokens)} tokens`);
    if (this.first !== null) parts.push(`first after ${duration(this.first - this.began)}`);
    const rest = this.last - this.first;
    if (tokens > 1 && rest > 0) parts.push(`${number(((tokens - 1) * 1000) / rest)} tokens per second`);
    if (end) parts.push(end);
    return parts.join(" · ");
  }
}
