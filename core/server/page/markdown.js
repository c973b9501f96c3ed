// The part of Markdown that models write, as elements. Nothing of a text becomes markup: there is no HTML and no
// image, and a link leads to http, https or mailto. Time grows linearly with the text.

import {copier, el} from "./dom.js";

// None of these tries two ways through a line: a text chosen to make them would hold the page.
const FENCE = /^\s{0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/s, HEAD = /^ {0,3}(#{1,6})\s+(.*)$/s;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s, QUOTE = /^ {0,3}>/, ROW = /^\s*\|.*\|\s*$/;
const RULED = /^\|?( *:?-+:? *\|)+( *:?-+:?)?$/;
const MAX_DEPTH = 6, MAX_MARKS = 8, MAX_LINKS = 500; // lists and quotes, marks inside marks, links of a paragraph
const SAFE = /^(https?:\/\/|mailto:)/i;

// Show `text` in `place`. Blocks that are there already stay as they are, so that a growing text costs little.
export function show(place, text) {
  const sources = blocks(text), kept = place.sources || [];
  let same = 0;
  while (same < kept.length && same < sources.length && kept[same] === sources[same]) same++;
  while (place.childNodes.length > same) place.lastChild.remove();
  for (const source of sources.slice(same)) place.append(block(source, 0));
  place.sources = sources;
}

// The text of each block.
function blocks(text) {
  const found = [];
  let lines = [], fence = null, kind = "", ordered = false;
  const end = () => { if (lines.length) found.push(lines.join("\n")); lines = []; kind = ""; };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (closes(line, fence)) { fence = null; end(); }
      continue;
    }
    const opens = FENCE.exec(line);
    if (opens && !(kind === "list" && /^\s\s/.test(line))) {
      end();
      fence = opens[1] || opens[3];
      lines.push(line);
      continue;
    }
    const next = kindOf(line), counts = /^\d/.test(line);
    if (kind === "list" && (next === "" || (next === "list" && counts === ordered) || /^\s\s/.test(line))) {
      lines.push(line);
      continue;
    }
    if (next === "") { end(); continue; }
    if (next === "head" || next === "rule") { end(); lines = [line]; end(); continue; }
    if (next === "list" && kind === "list") end();
    if (next === "list") ordered = counts;
    if (next !== kind && !(kind === "text" && next === "list" && !/^\s*([-*+]|1[.)])\s/.test(line))) {
      end();
      kind = next;
    }
    lines.push(line);
  }
  end();
  return found;
}

const closes = (line, fence) => {
  const bare = line.trim();
  return bare.length >= fence.length && bare === fence[0].repeat(bare.length);
};

function kindOf(line) {
  if (!line.trim()) return "";
  if (HEAD.test(line)) return "head";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  return ROW.test(line) ? "table" : "text";
}

function block(source, depth) {
  const lines = source.split("\n"), first = lines[0], fence = FENCE.exec(first);
  if (fence) return code(fence, lines);
  const head = HEAD.exec(first);
  if (head) return el(`h${Math.min(6, head[1].length + 2)}`, {}, inline(unhashed(head[2])));
  if (RULE.test(first)) return el("hr");
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    const inside = lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n");
    return el("blockquote", {}, blocks(inside).map((part) => block(part, depth + 1)));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return items(lines, depth);
  const ruled = lines.length > 1 && lines[1].length < MAX_LABEL && RULED.test(lines[1].trim());
  if (ruled && ROW.test(first)) return table(lines);
  return el("p", {}, paragraph(lines));
}

// A heading without the hashes that may close it.
function unhashed(words) {
  let end = words.trimEnd().length;
  const whole = end;
  while (end && words[end - 1] === "#") end--;
  return end === whole || (end && words[end - 1] !== " ") ? words.trimEnd() : words.slice(0, end).trimEnd();
}

function code(fence, lines) {
  const mark = fence[1] || fence[3], language = (fence[2] ?? fence[4]).trim().split(/\s/)[0].slice(0, 30);
  const body = lines.slice(1, lines.length > 1 && closes(lines.at(-1), mark) ? -1 : undefined).join("\n");
  return el("figure", {class: "code"},
    el("figcaption", {}, el("span", {}, language || "text"), copier(() => body)),
    el("pre", {tabindex: "0"}, el("code", {}, body)));
}

function items(lines, depth) {
  const base = ITEM.exec(lines[0]), ordered = /\d/.test(base[2]), indent = base[1].length;
  const made = el(ordered ? "ol" : "ul", ordered && parseInt(base[2], 10) !== 1 ? {start: parseInt(base[2], 10)} : {});
  let inside = [];
  const end = () => {
    if (!inside.length) return;
    const parts = blocks(inside.join("\n"));
    const plain = (part) => kindOf(part.split("\n", 1)[0]) === "text" && !FENCE.test(part.split("\n", 1)[0]);
    made.append(el("li", {}, parts.flatMap((part, i) => i === 0 && plain(part) ? paragraph(part.split("\n"))
      : [block(part, depth + 1)])));
    inside = [];
  };
  let width = 2;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) {
      end();
      width = line.length - item[3].length;
      inside.push(item[3]);
    } else inside.push(line.slice(0, width).trim() ? line.trimStart() : line.slice(width));
  }
  end();
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) => /^-.*:$/.test(cell) ? "right" : /^:.*:$/.test(cell) ? "center" : "");
  const row = (line, kind) => el("tr", {}, cells(line).map((cell, i) => el(kind, {class: sides[i] || null},
    inline(cell))));
  return el("div", {class: "table", tabindex: "0"}, el("table", {}, el("thead", {}, row(lines[0], "th")),
    el("tbody", {}, lines.slice(2).map((line) => row(line, "td")))));
}

function paragraph(lines) {
  return lines.flatMap((line, i) => [...inline(line.trimEnd()),
    ...(i < lines.length - 1 ? [line.endsWith("  ") || line.endsWith("\\") ? el("br") : "\n"] : [])]);
}

// ---- inside a line

const TOKEN = /(\\[!-/:-@[-`{-~])|(`+)|(\*{1,3}|_{1,3}|~~)|(!?\[)|(https?:\/\/[^\s<>"'`|*]+)/g;
const MARKS = {"*": "em", _: "em", "**": "strong", __: "strong", "~~": "del"};

function inline(text) {
  const stack = [{mark: "", nodes: []}];
  const put = (...more) => {
    const {nodes} = stack.at(-1);
    for (const node of more.flat())
      if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes[nodes.length - 1] += node;
      else nodes.push(node);
  };
  // An opened mark that never closes is text.
  const fold = (to) => { while (stack.length > to) { const {mark, nodes} = stack.pop(); put(mark, nodes); } };
  let at = 0, tries = 0, ticks = null, match;
  const scan = new RegExp(TOKEN);
  while ((match = scan.exec(text))) {
    put(text.slice(at, match.index));
    at = scan.lastIndex;
    const [whole, escaped, tick, mark, bracket, address] = match;
    if (escaped) put(escaped[1]);
    else if (tick) {
      ticks ??= runs(text);
      const places = ticks.get(tick.length);
      while (places.length && places.at(-1) < at) places.pop();
      if (!places.length) put(tick);
      else {
        put(el("code", {}, unpadded(text.slice(at, places.at(-1)))));
        at = places.at(-1) + tick.length;
      }
    } else if (mark) emphasis(mark, text, match.index, stack, put, fold);
    else if (bracket) {
      const link = tries++ < MAX_LINKS ? linkAt(text, at) : null;
      if (!link) put(whole);
      else {
        put(anchor(link.label, link.address));
        at = link.end;
      }
    } else {
      let end = address.length;
      while (".,;:!?)]".includes(address[end - 1])) end--;
      const bare = address.slice(0, end);
      put(anchor(bare, bare), address.slice(end));
    }
    scan.lastIndex = at;
  }
  put(text.slice(at));
  fold(1);
  return stack[0].nodes.filter((node) => node !== "");
}

// Where runs of so many backticks begin, the last first.
function runs(text) {
  const found = new Map();
  for (const {0: run, index} of [...text.matchAll(/`+/g)].reverse()) {
    if (!found.has(run.length)) found.set(run.length, []);
    found.get(run.length).push(index);
  }
  return found;
}

const unpadded = (words) => words.startsWith(" ") && words.endsWith(" ") && words.trim() ? words.slice(1, -1) : words;

function emphasis(mark, text, place, stack, put, fold) {
  const before = text[place - 1] || " ", after = text[place + mark.length] || " ";
  const inWord = mark[0] === "_" && /\w/.test(before) && /\w/.test(after);
  const open = stack.findLastIndex((entry) => entry.mark === mark);
  if (open > 0 && /\S/.test(before) && !inWord) {
    fold(open + 1);
    const {nodes} = stack.pop();
    put(mark.length === 3 ? el("strong", {}, el("em", {}, nodes)) : el(MARKS[mark], {}, nodes));
  } else if (/\S/.test(after) && !inWord && stack.length < MAX_MARKS) stack.push({mark, nodes: []});
  else put(mark);
}

const MAX_LABEL = 500, MAX_ADDRESS = 2000;

// [label](address "title") after its bracket.
function linkAt(text, at) {
  const close = text.slice(at, at + MAX_LABEL).indexOf("](");
  if (close < 0) return null;
  const label = text.slice(at, at + close), rest = text.slice(at + close + 2, at + close + 2 + MAX_ADDRESS);
  const found = /^\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)?)>?(?:\s+"[^"]*")?\s*\)/.exec(rest);
  return found && !label.includes("[") ? {label, address: found[1], end: at + close + 2 + found[0].length} : null;
}

function anchor(label, address) {
  if (!SAFE.test(address)) return label;
  const more = {rel: "noopener noreferrer nofollow", target: "_blank", title: address};
  return el("a", {href: address, ...more}, label || address);
}
