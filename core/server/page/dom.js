// Elements are made, never parsed: no text can become markup.

export const $ = (id) => document.getElementById(id);

// An element with attributes; a function is a listener, true an attribute without a value, false or null none. A child
// may be a list of children.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child != null && child !== "") made.append(child);
  return made;
}

export function button(words, action, more = {}) {
  return el("button", {type: "button", click: action, ...more}, words);
}

// A text that can be copied wherever the page comes from: the clipboard is there on trusted origins only.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", {class: "unseen", "aria-hidden": "true"});
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export function copier(text, label = "Copy") {
  const made = button(label, async () => {
    made.textContent = await copy(text()) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = label; }, 1500);
  });
  return made;
}

export function grow(area, most = 0.4) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * most)}px`;
}
