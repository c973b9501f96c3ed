// The Messages API through Anthropic's own client.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "sekret", maxRetries: 0 });
const tools = [{ name: "weather", input_schema: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const base = { model: "tiny", max_tokens: 300, temperature: 0 };
const ask = (content) => [{ role: "user", content }];

const plain = await client.messages.create({ ...base, messages: ask("Hi") });
assert.ok(plain.content[0].text.startsWith("one two") && plain.stop_reason === "end_turn");
assert.ok((await client.messages.countTokens({ model: "tiny", messages: ask("Hi") })).input_tokens > 0);
for await (const model of client.models.list()) assert.equal(model.id, "tiny");

const thought = await client.messages.stream({ ...base, messages: ask("think") }).finalMessage();
assert.deepEqual(thought.content.map((block) => block.type), ["thinking", "text"]);

const first = await client.messages.stream({ ...base, tools, messages: ask("weather?") }).finalMessage();
const call = first.content.find((block) => block.type === "tool_use");
assert.deepEqual(call.input, { city: "Oslo" });
const second = await client.messages.create({ ...base, tools, messages: [...ask("weather?"),
  { role: "assistant", content: first.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "rain" }] }] });
assert.equal(second.content[0].text, "Rain.");

await assert.rejects(client.messages.create({ ...base, model: "no", messages: ask("Hi") }), Anthropic.NotFoundError);
