// The API of this server, from its own description.

import * as api from "./api.js";
import {$, copier, el} from "./dom.js";

const GROUPS = [["OpenAI", /^\/v1\/(chat|completions|responses|models|embeddings)/], ["Anthropic", /^\/v1\/messages/],
  ["Ollama", /^\/api\//],
  ["Health, numbers, pages", /^\/(health|ready|metrics|(get_)?server_info|version|openapi|docs|dashboard|$)/],
  ["Native, and what others have too", /./]];

// These are looked for first; what a body needs stands before them.
const FIRST = ["model", "messages", "prompt", "input", "text", "query", "documents", "system", "instructions", "stream",
  "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "tools",
  "tool_choice", "response_format", "logprobs", "top_logprobs", "reasoning_effort", "stream_options"];

async function load() {
  try {
    show(await api.get("openapi.json"));
  } catch (error) {
    if (error.status === 401) ask();
    else $("about").textContent = error.message;
  }
}

function show(spec) {
  $("about").textContent = `${spec.info.title} ${spec.info.version}`;
  const left = Object.entries(spec.paths), parts = [];
  for (const [name, pattern] of GROUPS) {
    const mine = left.filter(([path]) => pattern.test(path));
    for (const entry of mine) left.splice(left.indexOf(entry), 1);
    const shown = mine.flatMap(([path, methods]) => Object.entries(methods).map(([method, about]) =>
      operation(spec, method.toUpperCase(), path, about)));
    if (shown.length) parts.push(el("section", {}, el("h2", {}, name), shown));
  }
  $("list").replaceChildren(...parts);
  filter();
}

function operation(spec, method, path, about) {
  const schema = resolve(spec, about.requestBody?.content["application/json"].schema);
  const words = command(spec, method, path, schema);
  return el("details", {"data-path": path}, el("summary", {}, el("b", {}, method), el("code", {}, path),
    el("span", {}, ...marked(about.summary))), el("div", {class: "inside"}, el("pre", {tabindex: "0"}, words),
    copier(() => words), schema ? fields(spec, schema) : null));
}

// Words between backticks are code.
const marked = (text) => text.split("`").map((part, i) => i % 2 ? el("code", {}, part) : part);

const resolve = (spec, schema) => schema?.$ref ? spec.components.schemas[schema.$ref.split("/").at(-1)] : schema;

function fields(spec, schema) {
  const needed = new Set(schema.required || []), place = (name) => (FIRST.indexOf(name) + 1) || FIRST.length + 1;
  const rows = Object.entries(schema.properties || {}).sort(([a], [b]) =>
    needed.has(b) - needed.has(a) || place(a) - place(b));
  return el("table", {}, el("thead", {}, el("tr", {}, ["field", "type", "meaning"].map((name) =>
    el("th", {scope: "col"}, name)))), el("tbody", {}, rows.map(([name, field]) => el("tr", {},
    el("td", {}, name, needed.has(name) ? " *" : ""), el("td", {}, type(spec, field)),
    el("td", {}, meaning(spec, field))))));
}

// What a field means, its range, and the fields inside it.
function meaning(spec, field) {
  const inside = kinds(field).flatMap((kind) => Object.keys(resolve(spec, kind.$ref && kind)?.properties || {}));
  const limits = range(field);
  return [field.description || "", limits && `${limits[0].toUpperCase()}${limits.slice(1)}.`,
    inside.length ? `Fields: ${inside.join(", ")}.` : ""].filter(Boolean).join(" ");
}

const kinds = (field) => field.anyOf || field.oneOf || [field];

function type(spec, field) {
  const name = (kind) => kind.$ref ? "object"
    : kind.type === "array" ? `list of ${type(spec, kind.items || {})}` : kind.type || "any";
  return [...new Set(kinds(field).filter((kind) => kind.type !== "null").map(name))].join(" or ") || "any";
}

// Beyond that, numbers are read as others, and are no limit that anybody meets.
const exact = (number) => number != null && Math.abs(number) < 2 ** 53;

function range(field) {
  const words = kinds(field).flatMap((kind) => [
    exact(kind.minimum) ? `from ${kind.minimum}` : "", exact(kind.exclusiveMinimum) ? `over ${kind.exclusiveMinimum}` : "",
    exact(kind.maximum) ? `to ${kind.maximum}` : "", exact(kind.exclusiveMaximum) ? `below ${kind.exclusiveMaximum}` : "",
    kind.enum ? kind.enum.join(", ") : "",
    kind.maxLength ? `at most ${kind.maxLength} characters` : ""]);
  return words.filter(Boolean).join(" ");
}

const SAMPLES = {messages: [{role: "user", content: "Hi"}], prompt: "Once upon a time", text: "Once upon a time",
  input: "Once upon a time", model: "default", max_tokens: 64, query: "What is it?", documents: ["One.", "Another."],
  tokens: [1, 2], ttl: 60};

function command(spec, method, path, schema) {
  const address = new URL(path.slice(1) || ".", new URL(".", location.href)).href;
  const key = spec.security ? " -H \"Authorization: Bearer $OPENAI_API_KEY\"" : "";
  if (method !== "POST") return `curl ${method === "GET" ? "" : `-X ${method} `}${address}${key}`;
  const wanted = new Set([...(schema?.required || []), "messages", "prompt", "input", "text"]);
  const body = Object.fromEntries(Object.keys(schema?.properties || {}).filter((name) => wanted.has(name))
    .map((name) => [name, SAMPLES[name] ?? "..."]));
  return `curl ${address}${key} -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body)}'`;
}

function filter() {
  const words = $("filter").value.trim().toLowerCase();
  for (const entry of document.querySelectorAll("details"))
    entry.hidden = !entry.dataset.path.toLowerCase().includes(words);
  for (const part of document.querySelectorAll("section"))
    part.hidden = ![...part.querySelectorAll("details")].some((entry) => !entry.hidden);
}

function ask() {
  $("wrong").hidden = !api.key.get();
  $("key").value = "";
  if (!$("ask").open) $("ask").showModal();
}

$("ask").addEventListener("close", () => {
  const typed = $("key").value.trim();
  if (!typed) return;
  api.key.set(typed);
  load();
});
$("filter").addEventListener("input", filter);
load();
