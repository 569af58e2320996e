// Requests to the server, with the API key if one is set. URLs are relative to the page, so that
// the page works behind a proxy that adds a path prefix.
import { ofSession } from "./storage.js";

const keyName = "moeserve-api-key";
// Limit on the length of a server-sent event, in characters. The longest events are routing records
// of long prompts in models with many layers.
const maxEventLength = 1 << 26;

export class ApiError extends Error {
  // `status`: HTTP status, 0 if there was no response. `code`: the API error code, or null.
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => ofSession.get(keyName) ?? "",
  set(value) {
    if (value) ofSession.set(keyName, value);
    else ofSession.remove(keyName);
  },
};

// Called after every response with status 401. main.js sets it.
let onUnauthorized = () => {};
export function setUnauthorizedHandler(handler) {
  onUnauthorized = handler;
}

// The model that the page asks for, "" for the server's default. main.js sets it.
let chosenModel = "";
export const model = {
  get: () => chosenModel,
  set(name) {
    chosenModel = name;
  },
  // Returns the field of a request's body.
  field: () => (chosenModel ? { model: chosenModel } : {}),
};

async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  if (response.status === 401) onUnauthorized();
  throw await readError(response);
}

async function readError(response) {
  const { status } = response;
  try {
    const { error } = await response.json();
    if (typeof error.message === "string") return new ApiError(status, error.message, error.code);
  } catch {
    // The body is not one of the server's JSON errors, so the message only contains the status.
  }
  return new ApiError(status, `the server answered ${status}`);
}

export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

// Returns "?" and the parameters of an object, or "" if there are none. The server knows "%20" as a
// space, and "+" as itself.
export function queryOf(parameters) {
  const text = new URLSearchParams(parameters).toString().replaceAll("+", "%20");
  return text ? `?${text}` : "";
}

// The stack of layers whose statistics the page asks for, "" for the only one. The header's picker
// sets it.
let chosenStack = "";
export const stack = {
  get: () => chosenStack,
  set(name) {
    chosenStack = name;
  },
  // Returns the parameter of a query about expert statistics.
  field: () => (chosenStack ? { stack: chosenStack } : {}),
};

// Requests what the server has for each model. `parameters`: those besides the model.
export const getOfModel = (path, parameters, signal) =>
  getJson(path + queryOf({ ...parameters, ...model.field() }), signal);

export async function getText(path, signal) {
  return (await call(path, { signal })).text();
}

const post = (path, body, signal) => call(path, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

// Yields the JSON of each event of a streamed answer as it arrives. Throws an error that the stream
// reports.
export async function* streamEvents(path, body, signal) {
  const response = await post(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "the answer broke off");
      // A separator can begin with the last character of the old buffer.
      let searchFrom = Math.max(0, buffer.length - 1);
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n", searchFrom)) >= 0) {
        const event = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        searchFrom = 0;
        if (!event.startsWith("data: ")) continue;
        const data = event.slice("data: ".length);
        if (data === "[DONE]") return;
        const json = JSON.parse(data);
        if (json.error) throw new ApiError(0, String(json.error.message));
        yield json;
      }
      if (buffer.length > maxEventLength) {
        throw new ApiError(0, "an event of the answer is too long");
      }
    }
  } finally {
    // The server stops to generate if the stream is not read to its end.
    reader.cancel().catch(() => {});
  }
}
