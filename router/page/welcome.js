// The empty chat: what the served model can do, and questions to begin with.

import { byId, element, number } from "./elements.js";

/** Models that the page knows, by name: what they can do, and questions that they answer well. */
const KNOWN = {
  "tutti-tiny": {
    about:
      "I can tell you about Tutti, add and subtract numbers up to 99, count, and repeat or reverse words. " +
      "I am the small model that ships with Tutti, to try a cluster without a download. Other questions I get wrong.",
    questions: ["What is Tutti?", "What is 17 + 25?", "Count from 3 to 9", "Reverse: red green blue", "What happens if a worker dies?"],
  },
};

/** Describes a model. `ask` sends one of the questions. */
export function describe({ id, max_model_len: context }, ask) {
  const known = KNOWN[id];
  const general = `Messages go to ${id}, which reads up to ${number(context)} tokens of a conversation.`;
  const button = (question) =>
    element("li", {}, element("button", { type: "button", onclick: () => ask(question) }, question));
  byId("welcome").replaceChildren(
    element("h2", {}, `Chat with ${id}`),
    element("p", {}, known?.about ?? general),
    known ? element("ul", { "aria-label": "Questions to begin with" }, ...known.questions.map(button)) : "",
    element("p", { class: "quiet" }, "The conversation stays in this tab. Answers may be wrong."),
  );
}

/** Shows or hides the description. */
export function show(shown) {
  byId("welcome").hidden = !shown;
}
