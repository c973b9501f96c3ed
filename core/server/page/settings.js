// The settings panel: what is asked of each answer besides the messages.

import {$, el} from "./dom.js";
import {settings as kept} from "./store.js";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1], ["top_p", "Top-p", 0, 1, 0.05], ["top_k", "Top-k", 0, null, 1],
  ["min_p", "Min-p", 0, 1, 0.01], ["repetition_penalty", "Repetition penalty", 0.01, 10, 0.05],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1], ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
  ["max_tokens", "Longest answer", 1, null, 1], ["seed", "Seed", null, null, 1]];
const TEXTS = ["system", "stops", "format", "schema", "tools", "choice", "theme"];
const SCHEMA = {type: "object", properties: {answer: {type: "string"}, confidence: {type: "number"}},
  required: ["answer", "confidence"], additionalProperties: false};
const TOOL = [{type: "function", function: {name: "get_weather", description: "The weather at a place now.",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];

let values = {};
let changed = () => {};

export function open(onChange) {
  changed = onChange;
  values = kept.load();
  for (const [name, label, least, most, step] of NUMBERS) {
    const input = el("input", {id: `set-${name}`, type: "number", min: least, max: most, step: step === 1 ? 1 : "any",
      inputmode: "decimal", placeholder: "–"});
    $("sampling").append(el("div", {}, el("label", {for: input.id}, label), input));
    input.value = values[name] ?? "";
    input.addEventListener("input", () => set(name, input.value === "" ? null : Number(input.value)));
  }
  for (const name of TEXTS) {
    if (typeof values[name] === "string") $(name).value = values[name];
    $(name).addEventListener("input", () => set(name, $(name).value));
  }
  $("sample-tool").addEventListener("click", () => {
    $("tools").value = JSON.stringify(TOOL, null, 2);
    set("tools", $("tools").value);
  });
  update();
}

function set(name, value) {
  values[name] = value;
  kept.save(values);
  update();
  changed();
}

function update() {
  document.documentElement.dataset.theme = $("theme").value;
  const schema = $("format").value === "json_schema";
  $("schema-part").hidden = !schema;
  if (schema && !$("schema").value) $("schema").value = JSON.stringify(SCHEMA, null, 2);
  complain("schema", schema ? problem($("schema").value, "object") : "");
  complain("tools", $("tools").value.trim() ? problem($("tools").value, "array") : "");
}

function complain(name, words) {
  $(`${name}-wrong`).textContent = words;
  $(`${name}-wrong`).hidden = !words;
  $(name).setAttribute("aria-invalid", Boolean(words));
}

function problem(text, kind) {
  try {
    const found = JSON.parse(text);
    if (kind === "array" ? Array.isArray(found) : typeof found === "boolean" || (found && !Array.isArray(found)
        && typeof found === "object")) return "";
    return kind === "array" ? "A list of tools is expected: [ ... ]" : "An object is expected: { ... }";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

// Why nothing can be asked with these settings, and where; null when it can.
export function fault() {
  for (const name of ["schema", "tools"])
    if (!$(`${name}-wrong`).hidden) return {name, words: $(`${name}-wrong`).textContent};
  const wrong = NUMBERS.find(([name]) => !$(`set-${name}`).checkValidity());
  return wrong ? {name: `set-${wrong[0]}`, words: `${wrong[1]}: ${$(`set-${wrong[0]}`).validationMessage}`} : null;
}

export const system = () => $("system").value.trim();

// The fields of a request that the settings make.
export function fields() {
  const body = {}, stops = $("stops").value.split("\n").filter(Boolean);
  for (const [name] of NUMBERS) if (values[name] != null && !Number.isNaN(values[name])) body[name] = values[name];
  if (stops.length) body.stop = stops;
  if ($("format").value === "json_object") body.response_format = {type: "json_object"};
  if ($("format").value === "json_schema") body.response_format = {type: "json_schema",
    json_schema: {name: "answer", strict: true, schema: JSON.parse($("schema").value)}};
  if ($("tools").value.trim()) {
    body.tools = JSON.parse($("tools").value);
    body.tool_choice = $("choice").value;
  }
  return body;
}

// What is switched on, in a few words.
export function modes() {
  const found = [];
  if ($("format").value !== "text") found.push($("format").value === "json_object" ? "JSON" : "JSON Schema");
  if ($("tools").value.trim()) found.push("tools");
  if (system()) found.push("system message");
  const set = NUMBERS.filter(([name]) => values[name] != null).length + ($("stops").value.trim() ? 1 : 0);
  if (set) found.push(`${set} sampling ${set === 1 ? "setting" : "settings"}`);
  return found.join(", ");
}

// The model's own values, shown where nothing is set.
export function recommend(defaults) {
  for (const [name] of NUMBERS) {
    const plain = {temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0,
      frequency_penalty: 0};
    const value = defaults?.[name] ?? plain[name];
    $(`set-${name}`).placeholder = value == null ? (name === "seed" ? "drawn" : "what fits") : String(value);
  }
}

// Show which field the server complains of.
export function point(param) {
  const id = {response_format: "schema", tools: "tools", tool_choice: "choice", stop: "stops",
    max_completion_tokens: "set-max_tokens"}[param.split(/[.[]/)[0]] || `set-${param}`;
  const field = $(id);
  if (!field) return false;
  field.setAttribute("aria-invalid", "true");
  field.addEventListener("input", () => field.removeAttribute("aria-invalid"), {once: true});
  return true;
}
