// The AI SDK, which checks every answer and every event against schemas of its own.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const models = {
  responses: createOpenAI({ baseURL: url + "/v1", apiKey: "sekret" }).responses("tiny"),
  messages: createAnthropic({ baseURL: url + "/v1", apiKey: "sekret" })("tiny"),
};
const weather = tool({ description: "of a city", inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { assert.equal(city, "Oslo"); return "rain"; } });

for (const [name, model] of Object.entries(models)) {
  const base = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
  const plain = await generateText({ ...base, prompt: "Hi" });
  assert.ok(plain.text.startsWith("one two"), name);
  assert.equal(plain.finishReason, "stop");
  assert.equal(plain.usage.cachedInputTokens ?? plain.usage.inputTokenDetails?.cacheReadTokens, 4);

  const streamed = streamText({ ...base, prompt: "Hi", onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, plain.text);

  const looped = await generateText({ ...base, prompt: "weather?", tools: { weather }, stopWhen: stepCountIs(3) });
  assert.equal(looped.text, "Rain.", name);
  assert.equal(looped.steps.length, 2);
  const again = streamText({ ...base, prompt: "weather?", tools: { weather }, stopWhen: stepCountIs(3),
    onError: ({ error }) => { throw error; } });
  assert.equal(await again.text, "Rain.", name);

  if (name === "responses") {
    const made = await generateText({ ...base, prompt: "city as JSON",
      output: Output.object({ schema: z.object({ city: z.string() }) }) });
    assert.deepEqual(made.output, { city: "Oslo" });
  } else {
    assert.equal((await generateText({ ...base, prompt: "think" })).reasoningText, "hm");
  }
}
