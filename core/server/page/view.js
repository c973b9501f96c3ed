// One message on the page.

import {button, copier, el, grow} from "./dom.js";
import {show} from "./markdown.js";

const FENCE = "~~~~~~~~";
const NAMES = {user: "You", assistant: "Answer", tool: "Tool result"};
const number = (n) => n.toLocaleString("en");

// "31.5 tokens/s, first after 0.12 s, 80 of 96 prompt tokens cached, 42 tokens"
export function figures(stats) {
  if (!stats) return [];
  const found = [];
  if (stats.speed) found.push([`${stats.speed.toFixed(1)} tokens/s`, "tokens a second, from the first token on"]);
  if (stats.ttft != null) found.push([`first token ${stats.ttft.toFixed(2)} s`, "time to the first token (TTFT)"]);
  if (stats.prompt) found.push([`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`,
    "what of the prompt was found in the prefix cache and not computed again"]);
  const s = stats.tokens === 1 ? "" : "s";
  if (stats.tokens) found.push([`${number(stats.tokens)} token${s}`, "length of the answer"]);
  return found;
}

const ENDS = {length: "cut: the longest answer, or the end of the context", stopped: "stopped",
  content_filter: "filtered"};

// An article for a node. actions: {edit, again, go, results, more}, what its buttons do.
export function article(node, place, actions) {
  const made = el("article", {class: node.role, "data-id": node.id, "aria-label": NAMES[node.role] || node.role});
  made.append(el("div", {class: "body"}), el("p", {class: "figures"}), el("div", {class: "tools"}));
  fill(made, node, place, actions, false);
  return made;
}

// Bring an article up to its node. running: the answer still comes.
export function fill(made, node, place, actions, running) {
  const [body, figs, bar] = made.children;
  made.setAttribute("aria-busy", running);
  made.classList.toggle("running", running);
  if (node.role === "assistant") answer(body, node, running, actions);
  else if (node.role === "tool") {
    body.replaceChildren(el("details", {}, el("summary", {}, `Result of ${node.name || "a tool"}`),
      el("pre", {}, node.content)));
  } else body.replaceChildren(el("div", {class: "plain"}, node.content));
  const notes = figures(node.stats).map(([words, title]) => el("span", {title}, words));
  if (!running && ENDS[node.finish]) notes.push(el("span", {class: "cut"}, ENDS[node.finish]));
  figs.replaceChildren(...notes);
  bar.replaceChildren(...(running ? [] : buttons(made, node, place, actions)));
}

function answer(body, node, running, actions) {
  part(body, "thought", node.reasoning, () => {
    const made = el("details", {class: "thought"}, el("summary", {}, "Thinking"), el("div", {class: "text"}));
    made.open = running;
    made.firstChild.addEventListener("click", () => { made.dataset.chosen = "yes"; });
    return made;
  }, (made) => {
    show(made.lastChild, node.reasoning);
    const done = !running || node.content || node.calls;
    made.firstChild.textContent = done ? "Thoughts" : "Thinking";
    if (done && !made.dataset.chosen) made.open = false;
  });
  const text = node.json ? `${FENCE}json\n${node.content}\n${FENCE}` : node.content;
  part(body, "text", node.content, () => el("div", {class: "text"}), (made) => show(made, text));
  part(body, "calls", node.calls?.length, () => el("div", {class: "calls"}), (made) =>
    made.replaceChildren(...node.calls.map((call) => callCard(call)),
      ...(!running && actions?.results ? [resultForm(node, actions)] : [])));
  const waits = running && !node.content && !node.reasoning && !node.calls;
  part(body, "waits", waits, () => el("p", {class: "waits"}, el("span"), el("span"), el("span")), () => {});
  part(body, "failed", node.error, () => el("div", {class: "failed", role: "alert"}), (made) => {
    const advice = node.error.advice ? [el("p", {}, node.error.advice)] : [];
    const asked = () => document.querySelector(`article[data-id="${node.parent}"] .edit`);
    const way = node.error.edit ? button("Edit the message", () => asked()?.click())
      : button("Try again", () => actions.again(node));
    made.replaceChildren(el("p", {}, node.error.message), ...advice, ...(actions?.again ? [way] : []));
  });
}

const ORDER = ["thought", "text", "calls", "waits", "failed"];

// The child of that class: made where it is wanted and missing, removed where it is not wanted.
function part(body, name, wanted, make, update) {
  let found = [...body.children].find((child) => child.classList.contains(name));
  if (!wanted) return found?.remove();
  if (!found) {
    found = make();
    const after = ORDER.slice(ORDER.indexOf(name) + 1);
    const next = [...body.children].find((child) => after.some((name) => child.classList.contains(name)));
    body.insertBefore(found, next || null);
  }
  update(found);
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function callCard(call) {
  return el("section", {class: "call", "aria-label": `Call of ${call.name}`},
    el("h3", {}, "Calls ", el("code", {}, call.name)),
    el("pre", {tabindex: "0"}, pretty(call.arguments)));
}

// One box for the result of each call; they go back to the model together.
function resultForm(node, actions) {
  const areas = node.calls.map((call, i) => {
    const id = `result-${node.id}-${i}`;
    return [el("label", {for: id}, `Result of ${call.name}`), el("textarea", {id, rows: "2", class: "code"})];
  });
  return el("form", {class: "results", submit: (event) => {
    event.preventDefault();
    actions.results(node, areas.map(([, area]) => area.value));
  }}, ...areas.flat(), el("button", {type: "submit"}, "Send the results"));
}

function buttons(made, node, place, actions) {
  if (!actions) return node.content ? [copier(() => node.content)] : [];
  const found = [];
  if (place.of > 1) found.push(el("span", {class: "branches", role: "group", "aria-label": "Versions"},
    button("‹", () => actions.go(node, -1), {"aria-label": "the version before", disabled: place.at === 1}),
    `${place.at} of ${place.of}`,
    button("›", () => actions.go(node, 1), {"aria-label": "the next version", disabled: place.at === place.of})));
  if (node.content) found.push(copier(() => node.content));
  if (node.role === "user") found.push(button("Edit", () => edit(made, node, place, actions), {class: "edit"}));
  if (node.role === "assistant" && actions.again && !node.error?.edit) found.push(button("Regenerate", () => actions.again(node)));
  if (actions.more && ["length", "stopped"].includes(node.finish) && node.content && !node.calls)
    found.push(button("Continue", () => actions.more(node)));
  return found;
}

// The message in a box; what was sent before stays as another version.
function edit(made, node, place, actions) {
  const [body, , bar] = made.children, area = el("textarea", {class: "edit-box", "aria-label": "Edit the message"});
  const back = () => { fill(made, node, place, actions, false); made.querySelector(".edit")?.focus(); };
  const send = () => area.value.trim() && actions.edit(node, area.value);
  area.value = node.content;
  area.addEventListener("input", () => grow(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); back(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  body.replaceChildren(area);
  bar.replaceChildren(button("Send", send, {class: "main"}), button("Cancel", back));
  grow(area);
  area.focus();
}
