// Pictures and recordings that are sent with the next message, if the served model takes them.

import { byId, bytes, element } from "./elements.js";

/** Kinds of files by their types and by the ends of their names. Browsers know no type for some. */
const KINDS = [
  { modality: "image", format: "png", types: ["image/png"], ends: [".png"] },
  { modality: "image", format: "jpeg", types: ["image/jpeg"], ends: [".jpg", ".jpeg"] },
  { modality: "image", format: "webp", types: ["image/webp"], ends: [".webp"] },
  {
    modality: "audio",
    format: "wav",
    types: ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"],
    ends: [".wav"],
  },
  { modality: "audio", format: "mp3", types: ["audio/mpeg", "audio/mp3"], ends: [".mp3"] },
  { modality: "audio", format: "flac", types: ["audio/flac", "audio/x-flac"], ends: [".flac"] },
];
/** Bytes of a request that are left for what is no file. */
const REST_BYTES = 64 << 10;

/**
 * The files of the next message: `{ name, modality, part, url, size }`. `size` is the number of bytes that a file takes
 * in a request.
 */
let attached = [];
/** Kinds that the served model takes. */
let taken = [];
/** Maximum size of a request in bytes. */
let limit = 0;
/** Returns the bytes of the conversation so far, which each request sends again. */
let sentBefore = () => 0;

/** Prepares the button and the list. `conversationBytes` returns the size of what a request sends besides new files. */
export function start(conversationBytes) {
  sentBefore = conversationBytes;
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    // Otherwise a browser reports no change if the same file is chosen again.
    event.target.value = "";
    await add(files);
  });
  byId("prompt").addEventListener("paste", (event) => {
    if (taken.length && event.clipboardData.files.length) {
      event.preventDefault();
      add([...event.clipboardData.files]);
    }
  });
}

/** Offers the kinds that the model takes, as `/v1/models` describes it. */
export function offer({ input_modalities: modalities = [], max_body_bytes: most = 0 } = {}) {
  taken = KINDS.filter((kind) => modalities.includes(kind.modality));
  limit = most;
  byId("attach").hidden = taken.length === 0;
  byId("files").accept = taken.flatMap((kind) => kind.ends).join(",");
  const names = { image: "picture", audio: "recording" };
  byId("attach").textContent = `Attach a ${[...new Set(taken.map((kind) => names[kind.modality]))].join(" or ")}`;
}

/** Adds files, or says why one is refused. */
async function add(files) {
  complain("");
  for (const file of files) {
    const name = file.name.toLowerCase();
    const kind = taken.find(({ types, ends }) => types.includes(file.type) || ends.some((end) => name.endsWith(end)));
    if (!kind) {
      complain(`${file.name} is not attached: the model takes ${taken.map(({ format }) => format).join(", ")}.`);
      return;
    }
    // Base64 has four characters for three bytes.
    const size = Math.ceil(file.size / 3) * 4;
    const others = sentBefore() + attached.reduce((sum, { size }) => sum + size, 0);
    if (others + size + REST_BYTES > limit) {
      const of = others > 0 ? `, and the conversation's files ${bytes(others)}` : "";
      const takes = `it takes ${bytes(size)} of a request${of}; the limit is ${bytes(limit)}`;
      complain(`${file.name} is not attached: ${takes}.`);
      return;
    }
    let data;
    try {
      data = await base64(file);
    } catch (problem) {
      complain(`${file.name} cannot be read: ${problem.message}`);
      return;
    }
    const url = URL.createObjectURL(file);
    attached.push({ name: file.name, modality: kind.modality, part: part(kind, data), url, size });
    show();
  }
}

function part({ modality, format }, data) {
  if (modality === "audio") return { type: "input_audio", input_audio: { data, format } };
  return { type: "image_url", image_url: { url: `data:image/${format};base64,${data}` } };
}

/** A file's bytes as base64. */
function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function complain(text) {
  byId("attach-error").textContent = text;
}

/** Shows the files of the next message. */
function show() {
  const remove = (file) => () => {
    attached = attached.filter((other) => other !== file);
    URL.revokeObjectURL(file.url);
    complain("");
    show();
    byId("prompt").focus();
  };
  const item = (file) => {
    const settings = { type: "button", class: "small", onclick: remove(file) };
    return element("li", {}, preview(file), element("button", settings, `Remove ${file.name}`));
  };
  byId("attached").replaceChildren(...attached.map(item));
}

/** The picture, or the recording with its controls. */
export function preview({ name, modality, url }) {
  if (modality === "image") return element("img", { src: url, alt: name });
  return element("audio", { src: url, controls: "", "aria-label": name });
}

/** True if a file is attached. */
export const any = () => attached.length > 0;

/** Takes the files for a message that is sent. They stay visible in the conversation. */
export function take() {
  const files = attached;
  attached = [];
  complain("");
  show();
  return files;
}

/** Puts the files of a refused message back, so that one of them can be removed. */
export function giveBack(files) {
  attached = [...files, ...attached];
  show();
}
