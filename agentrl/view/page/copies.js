// A conversation as Markdown, and commands of the terminal about it.

import { number } from "./dom.js";

const sh = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// The commands about a sample, by what they do. file: its file of trajectories, as the run's state names it.
export function commands(folder, file, sample) {
  const found = [];
  if (file && file.step >= 0) found.push(["why", "why samples like it are unsolved", `agentrl why ${sh(folder)} --split ${sh(file.evaluation ? file.split : "train")} --step ${file.step}`]);
  if (sample.request && file?.step >= 0) found.unshift(["replay", "play it again: its turns are given, calls run live", `agentrl replay ${sh(folder)} --id ${sh(sample.request)}`]);
  return found;
}

// The command that keeps the turns before this one, and samples it and what follows anew.
export function goOn(folder, sample, turn) {
  return `agentrl continue ${sh(folder)} --id ${sh(sample.request)} --turn ${turn} -n 4`;
}

// A fence that the text does not hold.
function fenced(text, kind = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${kind}\n${text}\n${fence}`;
}

const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1)) ?? "";

function said(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === null || content === undefined ? "" : fenced(json(content), "json");
  return content.map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`)).join("\n\n");
}

function message(one) {
  const calls = (Array.isArray(one.tool_calls) ? one.tool_calls : []).map((call) => `Calls \`${call?.function?.name ?? "?"}\`:\n\n${fenced(json(call?.function?.arguments), "json")}`);
  const thought = one.reasoning_content ? `Thinking:\n\n${fenced(json(one.reasoning_content))}` : "";
  const text = one.role === "tool" ? fenced(said(one.content)) : said(one.content);
  return [`## ${one.role}${one.name ? ` ${one.name}` : ""}`, thought, text, ...calls].filter(Boolean).join("\n\n");
}

export function markdown(title, sample) {
  const facts = [["request", sample.request], ["reward", sample.reward === null ? "none" : number(sample.reward)], ["finish", sample.finish]].filter(([, value]) => value !== undefined);
  const parts = sample.told.flatMap((told) => [told.heading && `# ${told.heading}`, ...told.messages.map(message)]);
  return `${[`# ${title}`, facts.map(([name, value]) => `- ${name}: ${value}`).join("\n"), ...parts].filter(Boolean).join("\n\n")}\n`;
}
