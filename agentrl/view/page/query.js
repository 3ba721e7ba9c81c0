// The language of the field above the table: `reward<1 AND (tool:search OR "left over") NOT label:good`. A name that is no
// word is quoted: `"question type":trip`.

// What can be asked for, and what it is. Reward parts are `part.NAME`; fields of the tasks' data by their names.
export const NAMES = {
  step: "the step after which it was sampled", split: "train, or the split that was evaluated", task: "the task's id",
  group: "the task among those of its step", sample: "the sample among those of its task", environment: "of the task",
  reward: "weighted sum of the parts", advantage: "mean over its trained tokens", solved: "true or false: the environment's word",
  finish: "why it ended", left_out: "why it was not trained on", boundary: "of a failed sample, whose error it was",
  tool: "a tool that it called", failed_tool: "a tool of which a call failed", tool_errors: "calls that failed",
  calls: "calls of tools", turns: "of the model", tokens: "all tokens", sampled_tokens: "trained ones", branches: "segments of a tree",
  total_s: "seconds in all", engine_s: "seconds of the engine", tools_s: "seconds of tools", environment_s: "seconds of the environment",
  hooks_s: "seconds of hooks", scan: "a scanner that found something", label: "a label that somebody gave it",
  notes: "how many notes it has", note: "a word of its notes",
};
const SETS = new Set(["tool", "failed_tool", "scan", "label"]); // columns that hold several names, with spaces between
const ALIASES = { errors: "tool_errors", time: "total_s", seconds: "total_s", length: "tokens" };
const NAME = String.raw`[\p{L}_][^\s()"<>=!:]*`;
const BARE = new RegExp(`^${NAME}$`, "u");
const ASKED = String.raw`(${NAME}|"[^"]+")(<=|>=|!=|:|=|<|>)`; // a name and what follows it
const TOKEN = new RegExp(String.raw`\s*(?:(\()|(\))|(AND|OR|NOT)(?![^\s()])|${ASKED}("[^"]*"?|[^\s()]*)|("[^"]*"?)|([^\s()"]+))`, "uy");

class QueryError extends Error {}

const bare = (text) => {
  if (text.startsWith('"') && (text.length < 2 || !text.endsWith('"'))) throw new QueryError('a " is not closed');
  return text.replace(/^"(.*)"$/s, "$1");
};

// A value as it is typed; a " in it cannot be, and * stands for anything.
export const quoted = (value) => (/[\s()"]/.test(value) || value === "" ? `"${value.replaceAll('"', "*")}"` : value);
const quotedName = (name) => (BARE.test(name) ? name : `"${name}"`);

function lexed(text) {
  const found = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const m = TOKEN.exec(text);
    const at = TOKEN.lastIndex;
    if (m[1] || m[2]) found.push({ kind: m[1] ?? m[2] });
    else if (m[3]) found.push({ kind: m[3] });
    else if (m[4]) found.push({ kind: "is", name: bare(m[4]), sign: m[5], value: bare(m[6]), text: m[0].trim() });
    else found.push({ kind: "text", text: bare(m[7] ?? m[8]) });
    TOKEN.lastIndex = at;
  }
  return found;
}

// What was typed as a tree: {kind: "and" | "or", parts}, {kind: "not", part}, {kind: "is", ...}, {kind: "text", text};
// null for nothing. Throws QueryError.
function parsed(text) {
  const tokens = lexed(text);
  let at = 0;
  const missing = (after) => new QueryError(`${after}: something is missing after it`);

  function either() {
    const parts = [both()];
    while (tokens[at]?.kind === "OR") {
      at++;
      if (at >= tokens.length) throw missing("OR");
      parts.push(both());
    }
    return parts.length === 1 ? parts[0] : { kind: "or", parts };
  }

  function both() {
    const parts = [one()];
    while (at < tokens.length && tokens[at].kind !== "OR" && tokens[at].kind !== ")") {
      if (tokens[at].kind === "AND" && ++at >= tokens.length) throw missing("AND");
      parts.push(one());
    }
    return parts.length === 1 ? parts[0] : { kind: "and", parts };
  }

  function one() {
    const token = tokens[at++];
    if (token === undefined) throw missing(tokens.at(-1)?.kind ?? "");
    if (token.kind === "NOT") return { kind: "not", part: one() };
    if (token.kind === "(") {
      const found = either();
      if (tokens[at++]?.kind !== ")") throw new QueryError("a ( is not closed");
      return found;
    }
    if (token.kind === "AND" || token.kind === "OR") throw new QueryError(`${token.kind}: something is missing before it`);
    if (token.kind === ")") throw new QueryError("a ) has no (");
    return token;
  }

  if (!tokens.length) return null;
  const found = either();
  if (at < tokens.length) throw new QueryError("a ) has no (");
  return found;
}

function distance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, k) => k);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let k = 1; k <= b.length; k++) next.push(Math.min(next[k - 1] + 1, row[k] + 1, row[k - 1] + (a[i - 1] !== b[k - 1])));
    row = next;
  }
  return row[b.length];
}

// "; did you mean 'reward'?", or nothing where none is alike.
function nearest(name, known) {
  const wanted = name.toLowerCase();
  const [best] = [...known].map((one) => [distance(wanted, String(one).toLowerCase().slice(0, 60)), one]).sort((a, b) => a[0] - b[0]);
  return best && best[0] <= Math.min(3, Math.max(1, name.length / 2)) ? `; did you mean ${best[1]}?` : "";
}

export function names(samples) {
  const parts = Object.keys(samples.column).filter((name) => name.startsWith("part."));
  const fields = [...samples.fields.keys()].map((name) => fieldName(samples, name));
  return new Map([...Object.entries(NAMES), ...parts.map((name) => [name, "a part of the reward"]), ...fields.map((name) => [name, "a field of the task's data"])]);
}

// The name of a field of the tasks, where a column has it too: `data.NAME`.
function fieldName(samples, name) {
  return Object.hasOwn(samples.column, name) || Object.hasOwn(ALIASES, name) ? `data.${name}` : name;
}

// The condition that a field of the tasks has a value, as it is typed.
export const fieldIs = (samples, name, value) => `${quotedName(fieldName(samples, name))}:${quoted(value)}`;

// A function from a sample to its value, or null for an unknown name.
export function valueOf(samples, given) {
  const name = ALIASES[given] ?? given;
  if (Object.hasOwn(samples.column, name)) return (i) => samples.column[name][i];
  const field = name.replace(/^data\./, "");
  return samples.fields.has(field) ? (i) => samples.data(i)[field] ?? null : null;
}

// Of a condition, what it says of one value. Values are looked up once each: columns hold few different ones.
function matcher({ name, sign, value, text }) {
  const order = { "<": (v, n) => v < n, ">": (v, n) => v > n, "<=": (v, n) => v <= n, ">=": (v, n) => v >= n }[sign];
  if (order) {
    const limit = Number(value);
    if (value.trim() === "" || Number.isNaN(limit)) throw new QueryError(`${text}: ${value ? `"${value}" is no number` : "a number is missing"}`);
    return (v) => typeof v === "number" && order(v, limit);
  }
  if (value === "" && !text.endsWith('"')) throw new QueryError(`a value is missing after ${text} (none: no value, *: any)`);
  const wanted = value.toLowerCase();
  const wild = wanted.includes("*") ? new RegExp(`^${wanted.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`, "s") : null;
  const number = value.trim() === "" ? NaN : Number(value);
  const same = (v) => (typeof v === "number" && v === number) || (wild ? wild.test(String(v).toLowerCase()) : String(v).toLowerCase() === wanted);
  const none = (v) => v === null || v === undefined || v === "";
  const many = SETS.has(name) ? (v) => v.split(" ").some(same) : name === "note" ? (v) => v.toLowerCase().includes(wanted) : same;
  const holds = wanted === "none" ? none : (v) => !none(v) && many(v);
  return sign === "!=" ? (v) => !holds(v) : holds;
}

function remembered(test) {
  const known = new Map();
  return (value) => {
    let found = known.get(value);
    if (found === undefined) known.set(value, (found = test(value)));
    return found;
  };
}

// What was typed, ready to ask: {test(i, hits), texts, error}. hits: text -> the samples in which it was found. Texts are
// looked for elsewhere. hint: why no sample fits, where a value is one that none has.
export function query(text, samples) {
  const texts = new Set();
  const conditions = [];

  function made(tree) {
    if (tree.kind === "text") {
      texts.add(tree.text);
      return (i, hits) => hits.get(tree.text)?.has(i) ?? false;
    }
    if (tree.kind === "not") {
      const inner = made(tree.part);
      return (i, hits) => !inner(i, hits);
    }
    if (tree.kind === "is") {
      const value = valueOf(samples, tree.name);
      const known = names(samples);
      if (value === null) throw new QueryError(`${tree.name}: no such column, reward part or field of the tasks${nearest(tree.name, known.keys()) || "."} To look for the text, write "${tree.text.replaceAll('"', "")}"`);
      const fits = remembered(matcher({ ...tree, name: ALIASES[tree.name] ?? tree.name }));
      conditions.push([tree, value, fits]);
      return (i) => fits(value(i));
    }
    const parts = tree.parts.map(made);
    return tree.kind === "and" ? (i, hits) => parts.every((part) => part(i, hits)) : (i, hits) => parts.some((part) => part(i, hits));
  }

  try {
    const tree = parsed(text);
    const test = tree === null ? null : made(tree);
    const hint = () => {
      for (const [{ name, sign, value }, of, fits] of conditions) {
        if ((sign !== ":" && sign !== "=") || value === "none") continue;
        const every = valuesOf(samples, ALIASES[name] ?? name, of);
        if (every.size && ![...every.keys()].some(fits)) return `No sample has ${name} ${value}${nearest(value, every.keys())}`;
      }
      return "";
    };
    return { test, texts: [...texts], error: "", hint };
  } catch (error) {
    if (!(error instanceof QueryError)) throw error;
    return { test: null, texts: [], error: error.message, hint: () => "" };
  }
}

// The values of a column or field, and how many samples have each.
function valuesOf(samples, name, of = valueOf(samples, name)) {
  const found = new Map();
  for (let i = 0; i < samples.count; i++) {
    const value = of(i);
    if (value === null || value === undefined || value === "") continue;
    for (const one of SETS.has(name) ? value.split(" ") : [value]) found.set(one, (found.get(one) ?? 0) + 1);
  }
  return found;
}

const MOST = 12; // suggestions
const OPEN = new RegExp(`^${ASKED}"?([^"]*)$`, "u"); // a condition that is being typed

// What may stand where the cursor is: {from, options: [[text, meaning]]}; `from` is where the text begins that one replaces.
export function suggestions(text, cursor, samples) {
  const before = text.slice(0, cursor);
  const typed = /(?:[^\s()"]|"[^"]*"?)*$/.exec(before)[0];
  const from = cursor - typed.length;
  const m = OPEN.exec(typed);
  if (m) {
    const name = bare(ALIASES[m[1]] ?? m[1]);
    const of = valueOf(samples, name);
    if (of === null || name === "note" || /[<>]/.test(m[2])) return { from, options: [] };
    const every = [...valuesOf(samples, name, of)].filter(([value]) => String(value).toLowerCase().includes(m[3].toLowerCase()));
    every.sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
    const given = every.filter(([value]) => String(value).length <= 80).slice(0, MOST);
    return { from, options: given.map(([value, count]) => [`${m[1]}${m[2]}${quoted(String(value))}`, `${count.toLocaleString("en-US")} samples`]) };
  }
  if (typed.startsWith('"')) return { from, options: [] };
  const wanted = typed.toLowerCase();
  const known = [...names(samples)].filter(([name, what]) => name.toLowerCase().includes(wanted) || (wanted.length > 3 && what.includes(wanted)));
  known.sort((a, b) => b[0].startsWith(wanted) - a[0].startsWith(wanted));
  const words = [["AND", "both"], ["OR", "one of both"], ["NOT", "what is not like that"]].filter(([word]) => typed && from > 0 && word.startsWith(typed));
  const numeric = (name) => {
    const first = samples.column[name]?.find((v) => v !== null);
    return typeof first === "number" && name !== "step";
  };
  return { from, options: [...words, ...known.filter(([name]) => !name.includes('"')).map(([name, what]) => [`${quotedName(name)}${numeric(name) ? "<" : ":"}`, what])].slice(0, MOST) };
}
