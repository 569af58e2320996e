// A button that copies the page's address.
import { setText } from "./dom.js";

const shownMilliseconds = 6000;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers provide the clipboard only to pages with focus on https or on the same machine.
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "off-screen";
  document.body.append(field);
  const before = document.activeElement;
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}

// `update()` brings the address up to date and returns the names of the options that are too long
// for it. The result is shown in `status`.
export function setUpLinkButton(button, status, update) {
  let timer = 0;
  button.addEventListener("click", async () => {
    const omitted = update().map((name) => name.replaceAll("_", " "));
    const copied = await copy(location.href);
    setText(status, !copied ? "Copy the link from the address bar."
      : omitted.length > 0 ? `Link copied without ${omitted.join(", ")}: too long.`
        : "Link copied.");
    clearTimeout(timer);
    timer = setTimeout(() => setText(status, ""), shownMilliseconds);
  });
}
