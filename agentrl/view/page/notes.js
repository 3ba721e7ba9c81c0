// Notes and labels that people put on a sample or a turn.

import { h, replace } from "./dom.js";

const USUAL = ["good", "bad"];

// What is said of a sample, or of one of its turns, and where more can be said. place: {run, file, row, request}.
// Returns an element with `draw`, which shows what came meanwhile.
export function saidOf(app, place, turn = null) {
  const shown = h("div", { class: "said" });
  const wrong = h("span", { class: "bad", role: "status" });
  const writable = !app.about.frozen && Boolean(place.request);
  const mine = () => {
    const { labels, notes } = app.samples.saidOf(place.run, place.file, place.row);
    return { labels: labels.filter(([, of]) => of === turn).map(([name]) => name), notes: notes.filter((note) => note.turn === turn) };
  };

  async function change(kind, value) {
    try {
      const all = await app.source.note(place.run, { kind, value, turn, request: place.request, file: place.file });
      replace(wrong, "");
      app.samples.say(place.run, all);
      app.update();
      return true;
    } catch (error) {
      replace(wrong, error.message);
      return false;
    }
  }

  const put = (label) => change(mine().labels.includes(label) ? "unlabel" : "label", label);
  const what = turn === null ? "the conversation" : `turn ${turn + 1}`;
  const label = h("input", { "aria-label": `label of ${what}`, placeholder: "another label", size: 12, maxlength: 40 });
  const note = h("textarea", { "aria-label": `note on ${what}`, placeholder: "a note", rows: 2, maxlength: 4000 });
  const sent = (field, kind) => async (event) => {
    event.preventDefault();
    if (field.value.trim() && (await change(kind, kind === "label" ? field.value.trim() : field.value))) field.value = "";
  };
  const usual = h("span", { class: "ways" });
  const form = h("details", { class: "say" }, h("summary", null, turn === null ? "Label, note" : "label, note"),
    usual,
    h("form", { onsubmit: sent(label, "label") }, label, h("button", null, "Add")),
    h("form", { onsubmit: sent(note, "note") }, note, h("button", null, "Write")), wrong);
  const element = h("div", { class: "notes" }, shown, writable ? form : null);
  let drawn;
  element.draw = () => {
    const { labels, notes } = mine();
    const now = JSON.stringify([labels, notes]);
    if (now === drawn) return;
    drawn = now;
    const away = (text, action) => (writable ? h("button", { class: "away", "aria-label": text, title: text, onclick: action }, "×") : null);
    replace(usual, [...new Set([...USUAL, ...labels])].map((name) => h("button", { type: "button", "aria-pressed": String(labels.includes(name)), onclick: () => put(name) }, name)));
    replace(shown, labels.map((name) => h("span", { class: "tag" }, name, away(`take off ${name}`, () => put(name)))),
      notes.map(({ id, text, by, at }) => h("p", { class: "note" }, h("span", { class: "text" }, text), h("span", { class: "soft" }, ` ${by}${at ? `, ${new Date(1000 * at).toLocaleString()}` : ""}`), away("remove the note", () => change("forget", id)))));
  };
  element.put = writable ? put : () => {};
  element.draw();
  return element;
}
