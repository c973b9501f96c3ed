// Ollama's API through its own client.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2], headers: { authorization: "Bearer sekret" } });
const base = { model: "tiny", options: { temperature: 0 } };
const ask = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: { name: "weather", description: "of a city", parameters: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

const plain = await client.chat({ ...base, messages: ask("Hi") });
assert.ok(plain.message.content.startsWith("one two"));
let text = "";
for await (const part of await client.chat({ ...base, messages: ask("Hi"), stream: true })) text += part.message.content;
assert.equal(text, plain.message.content);
assert.equal((await client.generate({ ...base, prompt: "Hi" })).response, text);
assert.equal((await client.list()).models[0].name, "tiny:latest");
assert.ok((await client.show({ model: "tiny" })).capabilities.includes("tools"));

const first = await client.chat({ ...base, messages: ask("weather?"), tools });
assert.deepEqual(first.message.tool_calls[0].function.arguments, { city: "Oslo" });
const second = await client.chat({ ...base, tools, messages: [...ask("weather?"), first.message,
  { role: "tool", tool_name: "weather", content: "rain" }] });
assert.equal(second.message.content, "Rain.");
await assert.rejects(client.chat({ ...base, model: "no", messages: ask("Hi") }), (error) => error.status_code === 404);
