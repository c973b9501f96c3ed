// The Responses API through OpenAI's own client.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "sekret", maxRetries: 0 });
const tools = [{ type: "function", name: "weather", strict: true, parameters: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false } }];
const base = { model: "tiny", temperature: 0 };

const plain = await client.responses.create({ ...base, input: "Hi" });
assert.ok(plain.output_text.startsWith("one two"));
assert.equal((await client.responses.retrieve(plain.id)).output_text, plain.output_text);
for await (const item of client.responses.inputItems.list(plain.id)) assert.equal(item.content[0].text, "Hi");

const stream = client.responses.stream({ ...base, input: "think" });
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const thought = await stream.finalResponse();
assert.equal(thought.output_text, "so be it");
assert.equal(thought.output[0].content[0].text, "hm");
assert.ok(kinds.includes("response.reasoning_text.delta") && kinds.at(-1) === "response.completed");

const first = await client.responses.stream({ ...base, input: "weather?", tools }).finalResponse();
const call = first.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
const second = await client.responses.create({ ...base, tools, previous_response_id: first.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "rain" }] });
assert.equal(second.output_text, "Rain.");

await assert.rejects(client.responses.create({ ...base, input: "Hi", tools: [{ type: "web_search" }] }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "tools[0].type");
await client.responses.delete(plain.id);
await assert.rejects(client.responses.retrieve(plain.id), OpenAI.NotFoundError);
