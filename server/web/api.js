// Calls to this server, with the key where one is needed. Addresses are relative to the page, so
// that it works behind a proxy that adds a prefix.

const keyName = "moeserve-api-key";
// Longest server-sent event, in characters. The largest are routing records of long prompts in
// models with many layers.
const maxEventLength = 1 << 26;

export class ApiError extends Error {
  // `status`: of HTTP, 0 where there is none. `code`: the server's name for the error, or null.
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(keyName) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(keyName, value);
    else sessionStorage.removeItem(keyName);
  },
};

// Told of every 401; set by the page.
let onUnauthorized = () => {};
export function setUnauthorizedHandler(handler) {
  onUnauthorized = handler;
}

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
    // Not an error of the server's own; the status says what there is to say.
  }
  return new ApiError(status, `the server answered ${status}`);
}

export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

export async function getText(path, signal) {
  return (await call(path, { signal })).text();
}

// The JSON of each event of a streamed completion, as it comes. An error within the stream is
// thrown.
export async function* streamCompletion(body, signal) {
  const response = await call("v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the answer broke off");
    // Only the end of what was there before can be part of a separator.
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
    if (buffer.length > maxEventLength) throw new ApiError(0, "an event of the answer is too long");
  }
}
