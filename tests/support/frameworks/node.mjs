// A program of Node without a package: forced calls, JSON by a schema, a stop string in a stream.
import { randomUUID } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

const { messages, tools } = JSON.parse(readFileSync(process.env.AGENTRL_TASK, "utf8"));
const schema = {
  type: "object",
  properties: { answer: { enum: [1, 2, 3, 4, 5, 6] }, sure: { enum: ["yes", "no"] } },
  required: ["answer", "sure"],
  additionalProperties: false,
};

async function ask(body) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: process.env.AGENTRL_MODEL, messages, ...body }),
  });
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
  return response;
}

const named = { type: "function", function: { name: tools[0].function.name } };
for (const tool_choice of ["required", named]) {
  const called = await (await ask({ tools, tool_choice })).json();
  if (called.choices[0].message.tool_calls.length !== 1) throw new Error(JSON.stringify(called));
}
const response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
const answer = JSON.parse((await (await ask({ response_format })).json()).choices[0].message.content);
const stream = await (await ask({ stream: true, stop: ["a", "e"] })).text();
const pieces = stream.split("\n").filter((line) => line.startsWith("data: {"));
const text = pieces.map((line) => JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "").join("");
if (/[ae]/.test(text)) throw new Error(text);
writeFileSync(`${process.argv[2]}/${randomUUID()}`, String(answer.answer));
