// Conversations and settings, in this browser's local storage.
//
// A conversation is a tree: an edited message and an answer made anew stand beside the old one, not in its place.
// node: {id, parent, role, content, reasoning, calls, finish, stats, error}; `leaf` is the end of the branch shown.

const INDEX = "isthmus-chats", ITEM = "isthmus-chat:", SETTINGS = "isthmus-chat-settings";
const MAX_TITLE = 60;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const write = (name, value) => localStorage.setItem(name, JSON.stringify(value));
const fresh = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

export const settings = {
  load: () => ({...read(SETTINGS, {})}),
  save: (values) => { try { write(SETTINGS, values); } catch { /* full: they hold as long as the page */ } },
};

export const list = () => read(INDEX, []).filter((entry) => entry && typeof entry.id === "string");

export const blank = () => ({id: fresh(), title: "", updated: Date.now(), nodes: [], leaf: null});

export function load(id) {
  const found = read(ITEM + id, null);
  return found && Array.isArray(found.nodes) ? found : null;
}

// Throws where the storage is full.
export function save(chat) {
  chat.updated = Date.now();
  const first = chat.nodes.find((node) => node.role === "user");
  chat.title ||= (first?.content || "").trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
  write(ITEM + chat.id, chat);
  write(INDEX, [{id: chat.id, title: chat.title, updated: chat.updated}, ...list().filter((e) => e.id !== chat.id)]);
}

export function remove(id) {
  localStorage.removeItem(ITEM + id);
  write(INDEX, list().filter((entry) => entry.id !== id));
}

export function removeAll() {
  for (const {id} of list()) remove(id);
}

// ---- the tree

export function add(chat, parent, role, more = {}) {
  const node = {id: fresh(), parent, role, content: "", ...more};
  chat.nodes.push(node);
  chat.leaf = node.id;
  return node;
}

export const find = (chat, id) => chat.nodes.find((node) => node.id === id) || null;

// The nodes from the beginning to the leaf shown.
export function branch(chat, leaf = chat.leaf) {
  const path = [], byId = new Map(chat.nodes.map((node) => [node.id, node]));
  for (let node = byId.get(leaf); node && path.length <= chat.nodes.length; node = byId.get(node.parent))
    path.push(node);
  return path.reverse();
}

export const siblings = (chat, node) => chat.nodes.filter((n) => n.parent === node.parent && n.role === node.role);

// Show another branch: the latest one under `node`.
export function follow(chat, node) {
  let end = node;
  for (let next = node; next; next = chat.nodes.filter((n) => n.parent === next.id).at(-1)) end = next;
  chat.leaf = end.id;
}
