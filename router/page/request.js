// One request, as the conductor records it: its state, its cause of failure, its time.

const at = (request, kind) => request.transitions.find((transition) => transition.kind === kind);

/** The request's end; undefined while it runs. */
export const endOf = (request) => at(request, "ended");

/** A word for the state of a request: the outcome of one that has ended. */
export function stateOf(request) {
  const ended = endOf(request);
  if (ended) return ended.outcome;
  const { kind } = request.transitions.at(-1) ?? {};
  if (kind === "accepted" || kind === "replayed") return "waits";
  if (kind === "first_token") return "decodes";
  return "prefill";
}

/** Milliseconds from the request's arrival to its end, or to now on the conductor's clock. */
export const timeOf = ({ took_us: took }) => took / 1000;

/** The times that the request started over. */
export const replaysOf = ({ transitions }) => transitions.filter(({ kind }) => kind === "replayed").length;

/** The reason of a failure; empty without one. */
export const causeOf = (request) => endOf(request)?.cause ?? "";

/** Microseconds since the Unix epoch at which the conductor accepted the request. */
export const acceptedOf = ({ transitions }) => transitions[0]?.at_us ?? 0;
