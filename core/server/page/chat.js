// The page: what is shown, what keys do, and the one answer that may be running.

import * as api from "./api.js";
import {$, button, el, grow} from "./dom.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import {article, fill} from "./view.js";

const SAVE_MS = 2000, POLL_MS = 1000, LOOK_MS = 15000, NEAR = 80, MEASURABLE = 0.02;
const IDEAS = ["Write a short poem about a narrow strip of land between two seas.",
  "What should I see in Lisbon in one day?", "Explain to a child why the sky is blue."];
const DTYPES = {f64: "float64", f32: "float32", bf16: "bfloat16", f16: "float16"};

let chat = store.blank();
let running = null; // {node, stop: AbortController}
let info = null, ready = false, timer = 0;

const say = (words) => { $("say").textContent = words; };

// ---- the server

function state(kind, words) {
  $("state").className = kind;
  if ($("state").textContent !== words) $("state").textContent = words;
}

async function look() {
  clearTimeout(timer);
  const found = await api.health(), progress = found.progress;
  const wasReady = ready;
  ready = found.status === "ok" || found.status === "idle";
  $("loading").hidden = !progress;
  if (progress?.total) $("loading").value = progress.done / progress.total;
  else $("loading").removeAttribute("value");
  if (found.status === "ok") state("good", "ready");
  else if (found.status === "idle") state("wait", "asleep: the next message wakes the model");
  else state(progress ? "wait" : "bad", found.reason || "not ready");
  if (ready && (!info || !wasReady)) await describe();
  update();
  timer = setTimeout(look, document.hidden ? LOOK_MS : ready ? LOOK_MS : POLL_MS);
}

async function describe() {
  try {
    const [listed, about] = await Promise.all([api.get("v1/models"), api.get("server_info")]);
    info = {...about.info, name: about.served_model_name, version: about.version};
    const names = listed.data.map((entry) => entry.id);
    if (!names.includes($("models").value)) $("models").replaceChildren(...names.map((name) => el("option", {}, name)));
    $("models").hidden = names.length < 2;
    $("model").hidden = names.length > 1;
    $("model").textContent = info.name;
    $("where").textContent = place();
    $("where").title = (info.report || []).join("\n");
    document.title = `${info.name}, Isthmus`;
    settings.recommend(info.sampling_defaults);
    if (!chat.nodes.length) draw();
  } catch (error) {
    if (error.status === 401) ask();
    else if (error.code !== "unreachable") state("bad", error.message);
  }
}

const size = (bytes) => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`;

function place() {
  const parts = [info.device ? `${info.platform} on ${info.device}` : info.platform, DTYPES[info.dtype] || info.dtype];
  if (info.max_model_len) parts.push(`${info.max_model_len.toLocaleString("en")} tokens of context`);
  return parts.filter(Boolean).join(" · ");
}

function ask() {
  $("wrong").hidden = !api.key.get();
  $("key").value = "";
  if (!$("ask").open) $("ask").showModal();
  $("key").focus();
}

// ---- what is shown

function draw() {
  const path = store.branch(chat);
  $("log").replaceChildren(...(path.length ? path.map(made) : [welcome()]));
  down();
  listChats();
  update();
}

function down() {
  $("log").scrollTop = $("log").scrollHeight;
}

function made(node) {
  const same = store.siblings(chat, node);
  return article(node, {at: same.indexOf(node) + 1, of: same.length}, running ? null : actionsOf(node));
}

function actionsOf(node) {
  const last = node.id === chat.leaf;
  return {edit, go, again: node.role === "assistant" ? again : null, more: last ? more : null,
    results: last ? results : null};
}

function welcome() {
  const facts = info ? [["Weights", info.weight_bytes && size(info.weight_bytes)],
    ["Cache", info.kv_bytes && size(info.kv_bytes)]] : [];
  return el("section", {class: "empty"}, el("h2", {}, "What would you like to know?"),
    el("p", {}, "Messages go to this server and nowhere else."),
    el("ul", {"aria-label": "Ideas"}, ...IDEAS.map((idea) => el("li", {}, button(idea, () => send(idea))))),
    el("dl", {}, ...facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name),
      el("dd", {}, String(value))))));
}

function listChats() {
  $("list").replaceChildren(...store.list().map(({id, title}) => el("li", {class: id === chat.id ? "now" : null},
    button(title || "New chat", () => show(id), {class: "open", title, "aria-current": id === chat.id ? "page" : null}),
    button("×", () => drop(id, title), {class: "drop", "aria-label": `Delete ${title || "this chat"}`}))));
}

function update() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("send").disabled = !ready || !$("input").value.trim();
  $("modes").textContent = settings.modes();
  $("forget").hidden = !api.key.get();
  const path = store.branch(chat);
  const used = path.at(-1)?.error?.edit ? null : path.findLast((node) => node.stats?.prompt)?.stats;
  const most = info?.max_model_len;
  $("room").textContent = used && most ? `${(used.prompt + used.tokens).toLocaleString("en")} of ${
    most.toLocaleString("en")} tokens of context` : "";
}

function keep() {
  if (!chat.nodes.length) return;
  try {
    store.save(chat);
  } catch {
    say("The browser's storage is full.");
    state("bad", "This browser's storage is full: delete old conversations to keep new ones");
  }
}

// ---- conversations

function show(id) {
  stop();
  const found = store.load(id);
  if (found) chat = found;
  draw();
  menu(false);
  $("input").focus();
}

function fresh() {
  stop();
  chat = store.blank();
  draw();
  menu(false);
  $("input").focus();
}

function drop(id, title) {
  if (!confirm(`Delete "${title || "New chat"}"?`)) return;
  store.remove(id);
  if (id === chat.id) fresh();
  else listChats();
}

// ---- messages

// Settings that cannot be sent are shown instead.
function blocked() {
  const wrong = settings.fault();
  if (wrong) {
    panel(true);
    $(wrong.name).focus();
  }
  return Boolean(wrong);
}

function send(text) {
  if (running || !ready || blocked()) return;
  const parent = chat.nodes.length ? chat.leaf : null;
  store.add(chat, parent, "user", {content: text});
  answer();
}

function edit(node, text) {
  if (blocked()) return;
  store.add(chat, node.parent, "user", {content: text});
  answer();
}

function again(node) {
  if (blocked()) return;
  chat.leaf = node.parent;
  answer();
}

function more(node) {
  if (!blocked()) answer(node);
}

function results(node, texts) {
  if (blocked()) return;
  node.calls.forEach(({id, name}, i) => store.add(chat, chat.leaf, "tool", {content: texts[i], call: id, name}));
  answer();
}

function go(node, step) {
  const same = store.siblings(chat, node);
  store.follow(chat, same[same.indexOf(node) + step]);
  keep();
  draw();
}

function body(resumed) {
  const path = store.branch(chat).filter((node) => !node.error || node.content || node.calls?.length);
  const messages = path.map(api.message);
  if (settings.system()) messages.unshift({role: "system", content: settings.system()});
  const more = resumed ? {continue_final_message: true, add_generation_prompt: false} : {};
  return {model: $("models").value || "default", messages, stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}, ...settings.fields(), ...more};
}

// Ask for the answer to the branch shown, or for more of `resumed`, and show it as it comes.
async function answer(resumed = null) {
  const asked = body(resumed), node = resumed || store.add(chat, chat.leaf, "assistant");
  const mine = chat, stopper = new AbortController(), began = performance.now();
  Object.assign(node, {error: null, finish: null, stats: null, usage: null, json: Boolean(asked.response_format)});
  running = {node, stop: stopper};
  keep();
  draw();
  const shown = $("log").lastChild;
  let first = 0, last = 0, counted = 0, drawn = false, saved = began;
  const count = () => {
    const usage = node.usage || {}, spent = (last - first) / 1000, tokens = usage.completion_tokens || counted;
    const speed = spent > MEASURABLE && tokens > 1 ? (tokens - 1) / spent : 0;
    node.stats = first ? {ttft: (first - began) / 1000, tokens, speed,
      prompt: usage.prompt_tokens || 0, cached: usage.prompt_tokens_details?.cached_tokens || 0} : null;
  };
  const paint = () => {
    drawn = false;
    if (running?.node !== node) return;
    const near = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < NEAR;
    count();
    fill(shown, node, {at: 1, of: 1}, null, true);
    if (near) down();
    if (performance.now() - saved > SAVE_MS) { saved = performance.now(); keep(); }
  };
  try {
    for await (const event of api.stream(asked, stopper.signal)) {
      if (api.take(node, event)) {
        last = performance.now();
        first ||= last;
        counted++;
      }
      if (!drawn) { drawn = true; requestAnimationFrame(paint); }
    }
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else fail(node, error);
  }
  count();
  delete node.usage;
  if (running?.node === node) running = null;
  if (mine === chat) {
    keep();
    draw();
    say(node.error ? node.error.message : "The answer is complete.");
    if (!document.activeElement || document.activeElement === document.body) $("input").focus();
  } else try { store.save(mine); } catch { /* told when the next is kept */ }
}

function fail(node, error) {
  node.error = {message: error.message, advice: api.advice(error), edit: api.tooLong(error)};
  if (error.status === 401) ask();
  if (error.param && settings.point(error.param)) panel(true);
  if (error.status === 503 || error.code === "unreachable" || error.code === "engine_dead") look();
}

const stop = () => running?.stop.abort();

// ---- panels and keys

function panel(open) {
  $("panel").hidden = !open;
  $("tune").setAttribute("aria-expanded", open);
}

function menu(open) {
  $("side").classList.toggle("shown", open);
  $("menu").setAttribute("aria-expanded", open);
}

function submit() {
  const text = $("input").value;
  if (!text.trim() || running || !ready || blocked()) return;
  $("input").value = "";
  grow($("input"));
  send(text);
}

const writing = (target) => target.matches?.("input, textarea, select, [contenteditable]");

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (running) stop();
    else if (!$("panel").hidden) { panel(false); $("tune").focus(); }
    else menu(false);
  } else if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    fresh();
  } else if (!writing(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) {
    if (event.key === "/") { event.preventDefault(); $("input").focus(); }
    if (event.key === "?") $("help").showModal();
  }
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
$("input").addEventListener("input", () => { grow($("input")); update(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  if (event.key === "ArrowUp" && !$("input").value && !running) {
    event.preventDefault();
    [...document.querySelectorAll("article.user .edit")].at(-1)?.click();
  }
});
document.addEventListener("keydown", onKey);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", fresh);
$("menu").addEventListener("click", () => menu(!$("side").classList.contains("shown")));
$("tune").addEventListener("click", () => panel($("panel").hidden));
$("close").addEventListener("click", () => { panel(false); $("tune").focus(); });
$("form").addEventListener("submit", (event) => event.preventDefault());
$("keys").addEventListener("click", () => $("help").showModal());
$("erase").addEventListener("click", () => {
  if (!confirm("Delete all conversations in this browser?")) return;
  store.removeAll();
  fresh();
});
$("forget").addEventListener("click", () => { api.key.set(""); info = null; look(); });
$("ask").addEventListener("close", () => {
  const typed = $("key").value.trim();
  if (!typed) return;
  api.key.set(typed);
  describe().then(update);
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
addEventListener("storage", (event) => { if (event.key === "isthmus-chats") listChats(); });
addEventListener("pagehide", keep);

settings.open(update);
const latest = store.list()[0];
if (latest && Date.now() - latest.updated < 3600_000) chat = store.load(latest.id) || chat;
draw();
look();
