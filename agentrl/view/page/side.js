// Several samples side by side, message by message: a group, or a task over the steps of training.

import { h, number, replace } from "./dom.js";
import { bubble, notes } from "./sample.js";
import { mark } from "./samples.js";

const MOST = 32; // samples

// What a sample said in one line of messages: {message, about, turn, heading, key}; equal keys: the same was said.
function spoken(sample) {
  return sample.told.flatMap((told) => {
    const beside = notes(sample, told);
    return told.messages.map((message, k) => {
      const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => call?.function);
      const key = JSON.stringify([message.role, message.name, message.content, message.reasoning_content, calls]);
      return { message, ...beside[k], heading: k === 0 ? told.heading : "", key };
    });
  });
}

// How many messages at the beginning two have in common.
function alike(one, other) {
  let k = 0;
  while (k < one.length && k < other.length && one[k].key === other[k].key) k++;
  return k;
}

export function sideView(app, params) {
  const run = Number(params.run ?? 0), row = Number(params.row ?? 0);
  const element = h("div", { class: "view full" }, h("p", { class: "empty" }, "Reading…"));
  let drawn = false;

  async function draw() {
    const i = app.samples.at(run, params.file, row);
    if (i === undefined) {
      if (app.ready) replace(element, h("p", { class: "empty" }, "That sample is not stored any more."));
      return;
    }
    drawn = true;
    const { column } = app.samples;
    const all = params.over ? app.samples.over(i) : [i, ...app.samples.group(i).filter((k) => k !== i)];
    const shown = all.slice(0, MOST);
    if (!shown.includes(i)) shown[MOST - 1] = i;
    const title = params.over ? `Task ${column.task[i]} (${column.split[i]}) over the steps` : `Group of task ${column.task[i]}, ${column.split[i]}, step ${column.step[i]}`;
    const top = [h("div", { class: "links" }, h("a", { href: app.linkOf(i) }, "back to the conversation"), h("a", { href: app.back ?? "#samples" }, "all samples")), h("h1", null, title),
      all.length > shown.length ? h("p", { class: "soft" }, `${shown.length} of ${all.length}`) : null];
    replace(element, top, h("p", { class: "empty" }, "Reading…"));
    const read = await Promise.all(shown.map((k) => app.source.sample(column.run[k], column.file[k], column.row[k]).then((sample) => [spoken(sample), null], (error) => [[], error.message])));
    const own = shown.indexOf(i);
    const whole = read.filter(([, error]) => error === null).map(([talk]) => talk);
    const common = whole.length > 1 ? Math.min(...whole.map((talk) => alike(whole[0], talk))) : 0;
    const longest = whole.reduce((most, talk) => Math.max(most, talk.length), 0);
    const differ = common < longest;
    const [first] = whole.length ? [whole[0].slice(0, common)] : [[]];
    const turn = whole.map((talk) => talk[common]?.turn).find((one) => one !== null && one !== undefined);

    const name = (k) => (params.over ? `step ${column.step[k]}${column.sample[k] ? ` #${column.sample[k]}` : ""}` : `sample ${column.sample[k]}`);
    const cell = (one, k, at) => {
      if (one === undefined) return h("div", { class: "cell" });
      const leaves = at !== own && k === alike(read[own][0], read[at][0]);
      return h("div", { class: `cell${leaves ? " leaves" : ""}` }, leaves ? h("p", { class: "tag" }, `differs from ${name(i)} from here`) : null, one.heading ? h("h3", null, one.heading) : null, bubble(one.message, one.about));
    };
    const places = shown.map((k, at) => {
      const [talk, error] = read[at];
      return h("section", { class: `column chat${at === own ? " at" : ""}`, style: { "grid-row": `1 / span ${1 + longest - common}` } },
        h("div", { class: "top" }, h("h2", null, mark(column, k), " ", h("a", { href: app.linkOf(k) }, name(k))),
          h("p", { class: "soft" }, app.runs.length > 1 && params.over ? `${app.runs[column.run[k]].name} · ` : "", `reward ${column.reward[k] === null ? "none" : number(column.reward[k])}`, column.advantage[k] === null ? "" : ` · advantage ${column.advantage[k] > 0 ? "+" : ""}${number(column.advantage[k])}`, ` · ${column.finish[k]} · ${column.turns[k]} turns`, column.label[k] ? ` · ${column.label[k]}` : ""),
          error ? h("p", { class: "bad" }, error) : null),
        Array.from({ length: longest - common }, (_, n) => cell(talk[common + n], common + n, at)));
    });
    const said = !differ && whole.length > 1 ? `All ${whole.length} say the same.` : common ? `They differ first in message ${common + 1}${turn === undefined ? "" : `, turn ${turn + 1} of the model`}.` : "";
    replace(element, top,
      common ? h("details", { class: "common", open: common < 3 || !differ }, h("summary", null, `The same in all: ${common} ${common === 1 ? "message" : "messages"}`), h("div", { class: "chat" }, first.map((one) => bubble(one.message)))) : null,
      said ? h("p", { class: "differ" }, said) : null,
      h("div", { class: "side", tabindex: 0, role: "region", "aria-label": title }, places));
  }

  draw();
  return { element, title: "Side by side", update: () => drawn || draw(), ready: () => drawn || draw(), keys: { Escape: () => history.back() } };
}
