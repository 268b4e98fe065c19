// An answer in progress: its reasoning, its text, its tool calls, and figures about it.

import { copyButton } from "./copy.js";
import { atEnd, duration, element, number } from "./elements.js";
import { Growing } from "./markdown.js";

export class Reply {
  text = "";
  thought = "";
  calls = [];
  finish = "";
  usage = null;
  failed = false;
  began = performance.now();
  first = null;
  last = null;

  constructor({ item, body, foot, tools }) {
    this.item = item;
    this.body = body;
    this.foot = foot;
    this.buttons = tools;
    this.content = element("div", { class: "text" });
    this.shown = new Growing(this.content, atEnd);
    this.tools = element("div");
    body.append(this.content, this.tools);
  }

  /** Takes one event of the stream. Returns true if it is the first with a part of the answer. */
  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.find((choice) => choice.index === 0);
    if (!choice) return false;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (!content && !thought && !calls) return false;
    const isFirst = this.first === null;
    this.last = performance.now();
    this.first ??= this.last;
    if (thought) atEnd(() => this.takeThought(thought));
    if (content) {
      this.text += content;
      this.shown.append(content);
    }
    for (const call of calls ?? []) atEnd(() => this.takeCall(call));
    return isFirst;
  }

  /** Takes a piece of the reasoning, which stands folded in front of the text. */
  takeThought(piece) {
    if (!this.thinking) {
      this.thinking = element("pre", { tabindex: "0" });
      this.body.prepend(element("details", { class: "tool" }, element("summary", {}, "Reasoning"), this.thinking));
    }
    this.thought += piece;
    this.thinking.textContent = this.thought;
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

  /** Ends the answer. `how` is the reason of the end. Returns the figures, as a line of text. */
  end(how) {
    this.shown.draw();
    this.item.setAttribute("aria-busy", "false");
    const figures = this.figures(how);
    atEnd(() => {
      this.foot.textContent = figures;
      // The text of an answer is copied as the model wrote it, with the marks of its Markdown.
      if (this.text) this.buttons.prepend(copyButton("Copy", () => this.text));
    });
    return figures;
  }

  /** The answer as a message of the conversation; `null` if it has nothing that a further request could name. */
  message() {
    const calls = this.calls.filter(Boolean);
    // An answer without content is left out, because the API would refuse the next request.
    if (this.failed || !(this.text || calls.length)) return null;
    const message = { role: "assistant", content: this.text };
    const call = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
    if (calls.length) message.tool_calls = calls.map(call);
    return message;
  }

  figures(how) {
    const parts = [];
    const { completion_tokens: tokens, prompt_tokens: prompt } = this.usage ?? {};
    if (this.usage) parts.push(`${number(prompt)} + ${number(tokens)} tokens`);
    if (this.first !== null) parts.push(`first after ${duration(this.first - this.began)}`);
    const rest = this.last - this.first;
    if (tokens > 1 && rest > 0) parts.push(`${number(((tokens - 1) * 1000) / rest)} tokens per second`);
    if (how) parts.push(how);
    return parts.join(" · ");
  }
}
