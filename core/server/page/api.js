// This server's API, and errors in words for people.

const KEY = "isthmus-api-key"; // the dashboard's too

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY),
};

export class ApiError extends Error {
  constructor(message, {status = 0, code = "", param = "", after = 0} = {}) {
    super(message);
    Object.assign(this, {status, code, param, after});
  }
}

const headers = () => key.get() ? {Authorization: `Bearer ${key.get()}`} : {};

async function refuse(answer) {
  const text = await answer.text().catch(() => "");
  let error = {};
  try { error = JSON.parse(text).error || {}; } catch { /* something between us and the server answers */ }
  if (typeof error === "string") error = {message: error};
  return new ApiError(error.message || `The server answers ${answer.status}.`, {
    status: answer.status, code: error.code || "", param: error.param || "",
    after: Number(answer.headers.get("retry-after")) || 0});
}

function unreachable(error) {
  if (error.name === "AbortError" || error instanceof ApiError) return error;
  return new ApiError("The server does not answer. Is it still running?", {code: "unreachable"});
}

export async function get(path) {
  try {
    const answer = await fetch(path, {headers: headers(), cache: "no-store", signal: AbortSignal.timeout(15000)});
    if (!answer.ok) throw await refuse(answer);
    return await answer.json();
  } catch (error) {
    throw unreachable(error);
  }
}

// {status: "ok" | "idle" | "unavailable" | "unreachable", reason, progress}
export async function health() {
  try {
    const answer = await fetch("health", {cache: "no-store", signal: AbortSignal.timeout(15000)});
    return await answer.json();
  } catch {
    return {status: "unreachable", reason: "The server does not answer."};
  }
}

// The events of one streamed answer, as objects. Throws `ApiError`; also for one that comes in the stream.
export async function* stream(body, signal) {
  let answer;
  try {
    answer = await fetch("v1/chat/completions", {
      method: "POST", headers: {"Content-Type": "application/json", ...headers()}, body: JSON.stringify(body), signal});
  } catch (error) {
    throw unreachable(error);
  }
  if (!answer.ok) throw await refuse(answer);
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, {code: event.error.code || ""});
      yield event;
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError("The connection was lost in the middle of the answer.",
      {code: "unreachable"}) : error;
  }
  throw new ApiError("The answer ended too early.", {code: "unreachable"});
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Take one event into its node: content, reasoning, calls, finish, usage. True if it brought tokens.
export function take(message, event) {
  if (event.usage) message.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return false;
  const delta = choice.delta || {}, thought = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content) message.content += delta.content;
  if (delta.refusal) message.content += delta.refusal;
  if (thought) message.reasoning = (message.reasoning || "") + thought;
  for (const part of delta.tool_calls || []) {
    const calls = message.calls ||= [], place = part.index ?? calls.length;
    const call = calls[place] ||= {id: "", name: "", arguments: ""};
    if (part.id) call.id = part.id;
    call.name += part.function?.name || "";
    call.arguments += part.function?.arguments || "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  return Boolean(delta.content || thought || delta.tool_calls);
}

// A node as a message of the API.
export function message(node) {
  if (node.role === "tool") return {role: "tool", tool_call_id: node.call, content: node.content};
  if (!node.calls?.length) return {role: node.role, content: node.content};
  return {role: node.role, content: node.content || null, ...(node.reasoning ? {reasoning_content: node.reasoning} : {}),
    tool_calls: node.calls.map((call) => ({id: call.id, type: "function",
      function: {name: call.name, arguments: call.arguments}}))};
}

// Is it the conversation that has no room, and not the answer's limit?
export const tooLong = (error) => error.code === "context_length_exceeded" && error.param !== "max_tokens";

// What a person can do about it.
export function advice(error) {
  if (tooLong(error)) return "Make the message shorter, or start a new chat.";
  if (error.code === "context_length_exceeded") return "Ask for fewer tokens in the settings.";
  if (error.code === "engine_dead") return "The server has to be started anew.";
  if (error.status === 429) return "The server has much to do. Try again in a moment.";
  if (error.status === 400 && error.param) return "The settings, or the message, need a change.";
  if (error.status === 503 || error.code === "unreachable") return "Try again in a moment.";
  return "";
}
