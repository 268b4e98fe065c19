// Requests to the server that the page came from: the API key, errors, and server-sent events.

const KEY = "tutti-api-key";

/** The API key of this tab; empty without one. */
export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  document.dispatchEvent(new Event("key-changed"));
}

/** The error of a request that the server does not answer with success. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request. Resolves with the response if it is a success, and throws an `ApiError` otherwise. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (options.body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error, reason } = await response.json();
    message = error?.message ?? reason ?? message;
  } catch {
    // The body is not JSON, for example because a proxy has answered. The message is then the status.
  }
  if (response.status === 401) document.dispatchEvent(new Event("key-needed"));
  throw new ApiError(response.status, message);
}

/** Fetches JSON. */
export const json = async (path, options) => (await request(path, options)).json();

/** Posts `body` as JSON. */
export const post = (path, body) => request(path, { method: "POST", body: JSON.stringify(body) });

/** Posts `body` and yields the JSON events of a stream that ends with [DONE]. */
export async function* events(path, body, signal) {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the stream broke off");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length === 0) continue;
      const text = data.join("\n");
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}
