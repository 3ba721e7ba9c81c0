// One conversation: as chat, as tokens, as a tree; and several side by side.

import { copyButton, h, later, number, percent, replace, seconds } from "./dom.js";
import { commands, goOn, markdown } from "./copies.js";
import { saidOf } from "./notes.js";
import { mark } from "./samples.js";

const WAYS = ["chat", "tokens", "text", "tree", "data"];
const MOST_FOUND = 500; // places of a text that is looked for
const PICTURE = /^data:image\/(png|jpeg|gif|webp);/;
const FIRST = 20000; // tokens that are drawn at once

function picture(url) {
  return typeof url === "string" && PICTURE.test(url) ? h("img", { src: url, alt: "image of the conversation" }) : null;
}

function content(value) {
  if (typeof value === "string") return value ? [h("div", { class: "text" }, value)] : [];
  if (!Array.isArray(value)) return value === null || value === undefined ? [] : [h("div", { class: "text" }, JSON.stringify(value, null, 1))];
  return value.map((part) => {
    if (typeof part?.text === "string") return h("div", { class: "text" }, part.text);
    const url = part?.image_url?.url ?? part?.image_url ?? part?.image;
    return picture(url) ?? h("div", { class: "text soft" }, `[${part?.type ?? "part"}: ${String(typeof url === "string" ? url : JSON.stringify(part)).slice(0, 80)}]`);
  });
}

function called(call) {
  const { name, arguments: given } = call?.function ?? {};
  const short = JSON.stringify(given);
  const text = typeof given === "string" ? given : (short?.length ?? 0) < 90 ? short : JSON.stringify(given, null, 1);
  return h("div", { class: "call" }, h("b", null, `${name ?? "?"}`), h("span", { class: "text" }, ` ${text ?? ""}`));
}

function reasoning(message) {
  const text = message.reasoning_content;
  return text ? h("details", { class: "thought", open: true }, h("summary", null, "thinking"), h("div", { class: "text" }, typeof text === "string" ? text : JSON.stringify(text))) : null;
}

function mean(values, start, end) {
  let sum = 0;
  for (let k = start; k < end; k++) sum += values[k];
  return end > start ? sum / (end - start) : null;
}

// What is known of each message of a conversation beside its text: {about, turn}. Turns are matched from the end: an
// opening may hold messages of an assistant that were not sampled.
export function notes(sample, told) {
  const own = told.segments.map((i) => sample.segments[i]);
  const inside = (turn) => own.length === 0 || own.some(({ start, end }) => turn.start >= start && turn.start < end);
  const turns = (sample.turns ?? []).map((turn, index) => ({ ...turn, index })).filter(inside);
  let next = turns.length - told.messages.filter((message) => message.role === "assistant").length;
  let uses = [];
  return told.messages.map((message) => {
    let found = [];
    let of = null;
    if (message.role === "assistant") {
      const turn = turns[next++];
      of = turn?.index ?? null;
      uses = turn ? (sample.tool_uses ?? []).filter((use) => use.turn === turn.index) : [];
      if (turn) found = ofTurn(sample, turn);
    } else if (message.role === "tool") {
      const use = uses.shift();
      if (use) found = [seconds(use.seconds), use.cut && "cut", use.error && h("span", { class: "bad" }, use.error)];
    }
    return { about: found.filter(Boolean).flatMap((text, i) => (i ? [" · ", text] : [text])), turn: of };
  });
}

function ofTurn(sample, turn) {
  const found = [];
  if (sample.logprobs && turn.end > turn.start) {
    found.push(`${turn.end - turn.start} tokens`, `${percent(Math.exp(mean(sample.logprobs, turn.start, turn.end)))} a token`);
    if (sample.advantages) found.push(`advantage ${number(mean(sample.advantages, turn.start, turn.end))}`);
  }
  if (turn.reward) found.push(`step reward ${number(turn.reward)}`);
  const call = sample.calls?.[turn.index];
  if (call?.role) found.unshift(`seat ${call.role}`);
  if (call?.asked && Object.keys(call.asked).length) found.push(`asked for ${JSON.stringify(call.asked)}`);
  if (turn.trained === false) found.push(call?.untrained ? `not trained: ${call.untrained.replaceAll("_", " ")}` : "not trained");
  return found;
}

export function bubble(message, about, below) {
  const role = String(message.role);
  const kind = ["user", "system", "assistant", "tool"].includes(role) ? role : "other";
  return h("div", { class: `message ${kind}` },
    h("div", { class: "who" }, h("b", null, role), message.name && ` ${message.name}`, h("span", { class: "soft" }, " ", about)),
    reasoning(message), content(message.content), (Array.isArray(message.tool_calls) ? message.tool_calls : []).map(called), below);
}

// below: what stands below a turn of the model, by its number.
export function chat(sample, below = () => null) {
  return h("div", { class: "chat" }, sample.told.map((told, i) => {
    const beside = notes(sample, told);
    return h("section", { "data-told": i }, told.heading && h("h3", null, told.heading), told.messages.map((message, k) => bubble(message, beside[k].about, beside[k].turn === null ? null : below(beside[k].turn))));
  }));
}

// What the model read and wrote, as the chat template made it: tool schemas and all special tokens in it.
function templateText(sample) {
  if (!sample.pieces) return h("p", { class: "empty" }, sample.ids ? `Its text cannot be shown: ${sample.pieces_missing}.` : "Its tokens are not stored: an older version wrote it, or its step is not whole.");
  const starts = new Map((sample.segments ?? []).map((segment, i) => [segment.start, i]));
  const found = [];
  let run = "", of = null;
  const flush = () => run && found.push(h("span", { class: of ? "sampled" : null }, run));
  for (let k = 0; k < sample.pieces.length; k++) {
    const sampled = sampledAt(sample, k);
    if (sampled !== of || starts.has(k)) {
      flush();
      run = "";
      of = sampled;
      if (starts.has(k)) found.push(h("b", { class: "soft" }, `${k ? "\n\n" : ""}segment ${starts.get(k)}\n`));
    }
    const image = imageAt(sample, k);
    run += !image ? sample.pieces[k] : k === image.start ? `[image ${image.hash.slice(0, 12)}]` : "";
  }
  flush();
  return h("div", null, h("p", { class: "soft" }, "What the model read, and in green what it wrote, with all that the chat template adds."), h("pre", { class: "data", tabindex: 0, "aria-label": "text of the template" }, found));
}

// --- tokens ---------------------------------------------------------------------------------------------------------

const GAP = (one, k) => Math.abs(Math.exp(one.trainer_logprobs[k]) - Math.exp(one.logprobs[k]));
const sampledAt = (one, k) => one.weight_version[k] >= 0;
const MEASURES = {
  trained: {
    label: "trained or not",
    there: () => true,
    legend: () => [["sampled and trained", "var(--good-tint)"], ["sampled, not trained", "var(--warn-tint)"], ["read", "transparent"]],
    colour: (one, k) => (one.loss_mask[k] ? "var(--good-tint)" : sampledAt(one, k) ? "var(--warn-tint)" : null),
  },
  logprob: {
    label: "probability when sampled",
    there: () => true,
    legend: () => [["1", "var(--bad-0)"], ["0.5", "var(--bad-2)"], ["0.1", "var(--bad-3)"], ["below 0.01", "var(--bad-4)"]],
    colour: (one, k) => sampledAt(one, k) && `var(--bad-${Math.min(4, Math.round(-one.logprobs[k] * 1.3 + (one.logprobs[k] < -0.05 ? 0.6 : 0)))})`,
  },
  gap: {
    label: "gap to the trainer",
    there: (one) => Boolean(one.trainer_logprobs),
    legend: () => [["equal", "var(--bad-0)"], ["0.001", "var(--bad-1)"], ["0.01", "var(--bad-2)"], ["0.05", "var(--bad-3)"], ["0.2 and more", "var(--bad-4)"]],
    colour: (one, k) => one.loss_mask[k] === 1 && `var(--bad-${[0.001, 0.01, 0.05, 0.2].filter((edge) => GAP(one, k) >= edge).length})`,
  },
  advantage: {
    label: "advantage",
    there: (one) => Boolean(one.advantages),
    legend: () => [["+", "var(--plus-3)"], ["0", "transparent"], ["-", "var(--minus-3)"]],
    colour: (one, k, most) => {
      const share = one.advantages[k] / (most || 1);
      return one.loss_mask[k] === 1 && share !== 0 && `var(--${share > 0 ? "plus" : "minus"}-${Math.max(1, Math.ceil(Math.abs(share) * 3))})`;
    },
  },
  version: {
    label: "weight version",
    there: () => true,
    legend: (one) => [...new Set(one.weight_version)].filter((v) => v >= 0).sort((a, b) => a - b).slice(0, 8).map((v) => [`after ${v} updates`, `var(--tint-${v % 8})`]),
    colour: (one, k) => sampledAt(one, k) && `var(--tint-${one.weight_version[k] % 8})`,
  },
};

// The image whose placeholder a token is.
function imageAt(sample, k) {
  return (sample.images ?? []).find(({ start, tokens }) => k >= start && k < start + tokens);
}

function facts(sample, k) {
  const found = [["token", `${k} of ${sample.ids.length}`], ["id", sample.ids[k]], ["text", JSON.stringify(sample.pieces?.[k] ?? "")]];
  const image = imageAt(sample, k);
  if (image) found.push(["image", `${image.hash.slice(0, 12)}, ${k - image.start + 1} of ${image.tokens}`]);
  const sampled = sampledAt(sample, k);
  found.push(["kind", sample.loss_mask[k] ? "trained" : sampled ? "sampled, not trained" : "read"]);
  if (sampled) found.push(["log-prob", `${number(sample.logprobs[k], 4)} (${percent(Math.exp(sample.logprobs[k]))})`], ["weights", `after ${sample.weight_version[k]} updates`]);
  if (sample.trainer_logprobs && sample.loss_mask[k]) found.push(["trainer", `${number(sample.trainer_logprobs[k], 4)} (${percent(Math.exp(sample.trainer_logprobs[k]))})`], ["gap", `${number(GAP(sample, k))} in probability`]);
  if (sample.advantages && sample.loss_mask[k]) found.push(["advantage", number(sample.advantages[k], 4)]);
  return found;
}

export function tokens(sample, how, changed) {
  if (!sample.ids) return h("p", { class: "empty" }, "Its tokens are not stored: an older version wrote it, or its step is not whole.");
  const measures = Object.entries(MEASURES).filter(([, measure]) => measure.there(sample));
  let name = measures.some(([key]) => key === how) ? how : "trained";
  const most = sample.advantages ? sample.advantages.reduce((m, v) => Math.max(m, Math.abs(v)), 0) : 0;
  const about = h("div", { class: "facts", role: "status" }, h("span", { class: "soft" }, "Point at a token, or walk with the arrow keys."));
  const legend = h("div", { class: "legend" });
  const body = h("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "tokens" });
  let at = -1;

  function pick(k) {
    if (k < 0 || k >= body.children.length) return;
    body.children[at]?.classList.remove("at");
    at = k;
    body.children[k].classList.add("at");
    replace(about, facts(sample, k).map(([key, value]) => h("span", null, h("span", { class: "soft" }, `${key} `), h("b", null, value))));
  }

  function paint() {
    const { colour } = MEASURES[name];
    for (let k = 0; k < body.children.length; k++) body.children[k].style.backgroundColor = colour(sample, k, most) || "";
    replace(legend, MEASURES[name].legend(sample).map(([text, c]) => h("span", null, h("i", { style: { background: c } }), text)));
  }

  function more(until) {
    const starts = new Map((sample.segments ?? []).map((segment, i) => [segment.start, i]));
    for (let k = body.children.length; k < Math.min(until, sample.ids.length); k++) {
      const image = imageAt(sample, k);
      const text = image ? (k === image.start ? `[image ${image.hash.slice(0, 12)}] ▪` : "▪") : sample.pieces ? sample.pieces[k] : `${sample.ids[k]} `;
      body.append(h("span", { class: starts.has(k) ? "start" : null, "data-segment": starts.has(k) ? `segment ${starts.get(k)}` : null }, text.replaceAll("\n", "⏎\n") || "·"));
    }
    paint();
    rest.hidden = body.children.length >= sample.ids.length;
  }

  body.addEventListener("pointerover", (event) => event.target !== body && pick([...body.children].indexOf(event.target)));
  body.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    pick(at + by);
    body.children[at]?.scrollIntoView({ block: "nearest" });
  });
  const rest = h("button", { onclick: () => more(body.children.length + FIRST) }, "Draw more tokens");
  const choices = h("div", { class: "ways", role: "group", "aria-label": "colour by" }, measures.map(([key, measure]) => h("button", { "aria-pressed": String(key === name), onclick: (event) => {
    name = key;
    for (const other of choices.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
    paint();
    changed(key);
  } }, measure.label)));
  more(FIRST);
  const missing = [!sample.trainer_logprobs && "the trainer's log-probs and the gap (they are of what was trained on)", !sample.advantages && "advantages", "entropy (a run does not store it)"].filter(Boolean);
  return h("div", null, choices, legend, about, sample.pieces ? null : h("p", { class: "soft" }, `Shown as ids: ${sample.pieces_missing}.`), body, rest, h("p", { class: "soft" }, `Not stored here: ${missing.join(", ")}.`));
}

// --- tree -----------------------------------------------------------------------------------------------------------

function owner(sample, segment) {
  return sample.told.findIndex((told) => told.segments.includes(segment));
}

export function tree(sample) {
  const segments = sample.segments ?? [];
  if (!segments.length) return h("p", { class: "empty" }, "This rollout is one conversation: it never branched.");
  const children = (parent) => segments.map((segment, i) => [segment, i]).filter(([segment]) => segment.parent === parent).map(([, i]) => i);
  const depths = sample.extra?.depths ?? [];
  const all = sample.ids ? sample.ids.length : Math.max(...segments.map((segment) => segment.end));
  const calls = (i) => (sample.turns ?? []).map((turn, k) => [turn, k]).filter(([turn]) => turn.start >= segments[i].start && turn.start < segments[i].end).map(([, k]) => k);
  const branch = (i) => {
    const { start, end } = segments[i];
    const trained = sample.loss_mask ? sample.loss_mask.slice(start, end).reduce((sum, v) => sum + v, 0) : 0;
    const below = children(i);
    const leads = owner(sample, i);
    const turns = calls(i);
    const seats = [...new Set(turns.map((k) => sample.calls?.[k]?.role).filter(Boolean))];
    const tools = [...new Set((sample.tool_uses ?? []).filter((use) => turns.includes(use.turn)).map((use) => use.name))];
    const rewards = turns.map((k) => sample.turns[k].reward).filter(Boolean);
    return h("li", null,
      h("div", { class: "node" },
        h("a", { href: "#", onclick: (event) => {
          event.preventDefault();
          event.currentTarget.dispatchEvent(new CustomEvent("show", { bubbles: true, detail: leads }));
        } }, h("b", null, `segment ${i}`)),
        depths[i] ? h("span", { class: "tag" }, `sub-agent${depths[i] > 1 ? `, depth ${depths[i]}` : ""}`) : null,
        seats.map((seat) => h("span", { class: "tag" }, `seat ${seat}${sample.seats?.[seat] === undefined ? "" : `, reward ${number(sample.seats[seat])}`}`)),
        tools.map((tool) => h("span", { class: "tag tool" }, tool)),
        h("span", { class: "soft" }, ` ${end - start} tokens, ${trained} trained, from ${start}`, rewards.length ? ` · step rewards ${rewards.map((value) => number(value)).join(", ")}` : ""),
        h("span", { class: "extent", "aria-hidden": "true" }, h("i", { style: { "margin-left": `${(100 * start) / all}%`, width: `${Math.max(0.5, (100 * (end - start)) / all)}%` } })),
        messagesOf(sample, leads, i).map((message) => h("details", null, h("summary", null, h("b", null, String(message.role)), ` ${shortened(message)}`), bubble(message)))),
      below.length ? h("ul", null, below.map(branch)) : null);
  };
  const seats = Object.entries(sample.seats ?? {}).map(([seat, value]) => `${seat} ${number(value)}`);
  return h("div", { class: "tree" }, h("p", { class: "soft" }, `${segments.length} segments, ${sample.told.length} conversations. The bar shows where among all ${all} tokens a segment was sampled; a click shows its conversation.`, seats.length ? ` Rewards by seat: ${seats.join(", ")}.` : ""), h("ul", null, children(-1).map(branch)));
}

// The messages that a segment adds to its conversation.
function messagesOf(sample, leads, segment) {
  const told = sample.told[leads];
  const at = told?.segments.indexOf(segment) ?? -1;
  const counts = told?.counts;
  if (at < 0 || !counts) return [];
  const before = counts.slice(0, at).reduce((sum, count) => sum + count, 0);
  return told.messages.slice(before, before + counts[at]);
}

// The beginning of a message as one line.
function shortened(message) {
  const { content: said, tool_calls: calls } = message;
  const text = typeof said === "string" ? said : Array.isArray(said) ? said.map((part) => part?.text ?? `[${part?.type ?? "part"}]`).join(" ") : "";
  const called = (Array.isArray(calls) ? calls : []).map((call) => `${call?.function?.name ?? "?"}(${JSON.stringify(call?.function?.arguments) ?? ""})`).join(" ");
  const line = `${text} ${called}`.replace(/\s+/g, " ").trim();
  return line.length > 120 ? `${line.slice(0, 119)}…` : line;
}

function data(sample) {
  const { ids, loss_mask, logprobs, trainer_logprobs, advantages, weight_version, pieces, told, ...rest } = sample;
  return h("pre", { class: "data", tabindex: 0, "aria-label": "data of the sample" }, JSON.stringify(rest, null, 2));
}

// --- one ------------------------------------------------------------------------------------------------------------

function summary(sample, i, column) {
  const parts = Object.entries(sample.rewards ?? {}).map(([name, value]) => `${name} ${number(value)}${(sample.weights?.[name] ?? 1) === 1 ? "" : ` × ${number(sample.weights[name])}`}`);
  const found = [["reward", sample.reward === null ? "none" : number(sample.reward)]];
  if (parts.length > 1 || (parts.length === 1 && Object.values(sample.weights ?? {}).some((w) => w !== 1))) found.push(["parts", parts.join(", ")]);
  if (i !== undefined && column.advantage[i] !== null) found.push(["advantage", number(column.advantage[i])]);
  for (const [name, note] of Object.entries(sample.scan ?? {})) found.push([`scan: ${name}`, note]);
  found.push(["finish", sample.finish], ["tokens", `${sample.tokens?.all ?? "?"}, ${sample.tokens?.sampled ?? "?"} trained`]);
  if (sample.left_out) found.push(["not trained on", sample.left_out]);
  const times = Object.entries(sample.seconds ?? {}).filter(([, v]) => v > 0).map(([name, v]) => `${name} ${seconds(v)}`);
  if (times.length) found.push(["time", times.join(", ")]);
  const own = Object.entries(sample.data ?? {}).filter(([, v]) => ["string", "number", "boolean"].includes(typeof v) && String(v).length <= 60);
  if (own.length) found.push(["task data", own.map(([name, v]) => `${name} ${v}`).join(", ")]);
  return h("dl", { class: "summary" }, found.map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value))));
}

function over(app, i) {
  const { column } = app.samples;
  const same = app.samples.over(i);
  const runs = new Set(same.map((k) => column.run[k])).size > 1;
  if (!runs && new Set(same.map((k) => column.step[k])).size < 2) return null;
  return h("nav", { class: "over", "aria-label": "the same task over the steps" }, h("span", { class: "soft" }, "this task: "), same.slice(0, 200).map((k) =>
    h("a", { href: app.linkOf(k), "aria-current": k === i ? "true" : null, title: `reward ${number(column.reward[k])}` }, runs && `${app.runs[column.run[k]].name} `, `step ${column.step[k]}`, column.sample[k] ? ` #${column.sample[k]}` : "", " ", mark(column, k), column.solved[k] === null ? ` ${number(column.reward[k])}` : "")));
}

// Mark where a text was said in an element; returns the marks.
function marked(element, text) {
  for (const old of element.querySelectorAll("mark")) old.replaceWith(...old.childNodes);
  element.normalize();
  const wanted = text.toLowerCase();
  const found = [];
  if (!wanted) return found;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (walker.currentNode.parentElement.closest(".text, .call, .data")) nodes.push(walker.currentNode);
  for (let node of nodes) {
    for (let at; found.length < MOST_FOUND && (at = node.data.toLowerCase().indexOf(wanted)) >= 0; ) {
      const hit = node.splitText(at);
      if (hit.data.toLowerCase().slice(0, wanted.length) !== wanted) break; // a letter that changes its length in lower case
      node = hit.splitText(wanted.length);
      const one = h("mark");
      hit.replaceWith(one);
      one.append(hit);
      found.push(one);
    }
  }
  return found;
}

// The tools that a sample had, and on demand their schemas.
function offered(app, run, file, sample) {
  const names = sample.tools ?? [];
  if (!names.length) return null;
  const body = h("div");
  const read = async () => {
    if (body.firstChild) return;
    try {
      const found = (await app.source.tools(run, file)).filter((one) => names.includes(one.function?.name));
      const missing = names.filter((name) => !found.some((one) => one.function.name === name));
      replace(body, found.map((one) => h("pre", { class: "data", tabindex: 0, "aria-label": `schema of ${one.function.name}` }, JSON.stringify(one.function, null, 2))),
        missing.length ? h("p", { class: "soft" }, `Not stored: the schema of ${missing.join(", ")}.`) : null);
    } catch (error) {
      replace(body, h("p", { class: "bad" }, error.message));
    }
  };
  return h("details", { class: "more", ontoggle: read }, h("summary", null, `Tools: ${names.join(", ")}`), body);
}

export function sampleView(app, params) {
  const run = Number(params.run ?? 0), row = Number(params.row ?? 0);
  let way = WAYS.includes(params.way) ? params.way : "chat";
  const element = h("div", { class: "view" }, h("p", { class: "empty" }, "Reading…"));
  let sample = null, drawn;
  const index = () => app.samples.at(run, params.file, row);
  const body = h("div");
  let talks = []; // where notes are shown and written
  let hits = [], hitAt = -1;
  const found = h("span", { class: "soft", role: "status" });
  const box = h("input", { type: "search", value: params.find ?? "", placeholder: "find in it", "aria-label": "find in the conversation", oninput: later(150, () => find(true)), onkeydown: (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1) });

  function find(go) {
    params.find = box.value;
    if (go) app.remember(params);
    hits = way === "tokens" ? [] : marked(body, box.value);
    hitAt = -1;
    replace(found, way === "tokens" && box.value ? "not among tokens: take chat or text" : "");
    if (hits.length) step(1, go);
    else if (box.value && way !== "tokens") replace(found, "not found");
  }

  function step(by, go = true) {
    if (!hits.length) return;
    hits[hitAt]?.classList.remove("at");
    hitAt = (hitAt + by + hits.length) % hits.length;
    hits[hitAt].classList.add("at");
    hits[hitAt].closest("details")?.setAttribute("open", "");
    if (go) hits[hitAt].scrollIntoView({ block: "center" });
    replace(found, `${hitAt + 1} of ${hits.length}${hits.length === MOST_FOUND ? " or more" : ""}`);
  }

  const ways = h("div", { class: "ways", role: "group", "aria-label": "shown as" }, WAYS.map((name) => h("button", { onclick: () => show(name) }, name)));

  function show(name, at) {
    way = name;
    params.way = name === "chat" ? "" : name;
    app.remember(params);
    [...ways.children].forEach((button, i) => button.setAttribute("aria-pressed", String(WAYS[i] === name)));
    const parts = { text: () => templateText(sample), chat: () => chat(sample, below), tokens: () => tokens(sample, params.by, (by) => app.remember(Object.assign(params, { by }))), tree: () => tree(sample), data: () => data(sample) };
    talks = talks.slice(0, 1);
    replace(body, parts[name]());
    find(false);
    if (at !== undefined) body.querySelector(`[data-told="${at}"]`)?.scrollIntoView();
  }

  const folder = () => app.runs[run].state.folder;
  const place = () => ({ run, file: params.file, row, request: sample.request });

  // Below a turn of the model: what was said of it, and how to go on from it.
  function below(turn) {
    const talk = saidOf(app, place(), turn);
    talks.push(talk);
    if (sample.request && sample.ids) talk.querySelector(".say")?.append(copyButton("Copy: continue from here", () => goOn(folder(), sample, turn), goOn(folder(), sample, turn)));
    return talk;
  }

  function draw() {
    const i = (drawn = index());
    const { column } = app.samples;
    const group = i === undefined ? [] : app.samples.group(i);
    const walk = app.list.indexOf(i);
    const title = `${sample.split ?? params.file}${sample.step === null || sample.step === undefined ? "" : `, step ${sample.step}`} · task ${sample.task} · sample ${sample.sample ?? 0}`;
    const links = [
      h("a", { href: app.back ?? "#samples" }, "all samples"),
      group.length > 1 && h("a", { href: app.link("side", { run, file: params.file, row }) }, `its group of ${group.length} side by side`),
      i !== undefined && over(app, i) && h("a", { href: app.link("side", { run, file: params.file, row, over: 1 }) }, "this task over the steps"),
      walk >= 0 && h("span", { class: "soft" }, `${(walk + 1).toLocaleString("en-US")} of ${app.list.length.toLocaleString("en-US")}`),
    ].filter(Boolean);
    body.addEventListener("show", (event) => show("chat", event.detail));
    const failed = sample.failure ? h("p", { class: "bad" }, `failed (${sample.failure.boundary}): ${sample.failure.message}`) : null;
    const file = app.runs[run].state.files.find((one) => one.name === params.file);
    const copies = h("div", { class: "ways" }, copyButton("Copy Markdown", () => markdown(title, sample)),
      app.about.frozen ? null : copyButton("Copy link", () => app.source.link(), "for another browser of yours"),
      commands(folder(), file, sample).map(([name, what, command]) => copyButton(`Copy: agentrl ${name}`, () => command, `${what}: ${command}`)));
    const talk = saidOf(app, place());
    talks = [talk];
    replace(element, h("div", { class: "links" }, links), h("h1", null, i !== undefined && mark(column, i), " ", app.runs.length > 1 ? `${app.runs[run].name} · ` : "", title), failed, summary(sample, i, column), i !== undefined && over(app, i), copies, talk, offered(app, run, params.file, sample), h("div", { class: "bar" }, ways, box, found), body, workspace(sample));
    show(way);
  }

  function walk(by) {
    const at = app.list.indexOf(index());
    const next = app.list[at + by];
    if (next !== undefined) location.hash = app.linkOf(next, { way: params.way, by: params.by });
  }

  app.source.sample(run, params.file ?? "", row).then((found) => {
    sample = found;
    draw();
  }).catch((error) => replace(element, h("p", { class: "empty bad" }, error.message)));
  const keys = {
    j: () => walk(1),
    k: () => walk(-1),
    g: () => app.go("side", { run, file: params.file, row }),
    t: () => app.go("side", { run, file: params.file, row, over: 1 }),
    "+": () => talks[0]?.put("good"),
    "-": () => talks[0]?.put("bad"),
    v: () => sample && show(WAYS[(WAYS.indexOf(way) + 1) % WAYS.length]),
    Escape: () => (location.hash = app.back ?? "#samples"),
  };
  const update = () => { // its group and its marks are known once its file was read
    if (sample && drawn === undefined && index() !== undefined) draw();
    for (const talk of talks) talk.draw();
  };
  return { element, title: "Conversation", keys, update, search: box };
}

// What the rollout changed in its workspace.
function workspace(sample) {
  const kept = sample.extra?.workspace;
  if (!kept) return null;
  const changes = kept.changes ?? [];
  const count = `${changes.length.toLocaleString("en-US")}${kept.more ? " or more" : ""} ${changes.length === 1 ? "file" : "files"} changed`;
  const lines = (kept.diff ?? "").split("\n").map((line) => h("span", { class: line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "" }, `${line}\n`));
  return h("section", { class: "workspace" },
    h("h2", null, `Workspace: ${count}`),
    h("ul", null, changes.map(([kind, path, size]) => h("li", null, `${kind} `, h("code", null, path), size ? ` ${size.toLocaleString("en-US")} bytes` : ""))),
    kept.diff ? h("pre", { class: "diff", tabindex: "0" }, lines) : null);
}
