// Elements. Text from runs only ever becomes text nodes and attribute values, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else if (key === "value" || key === "checked") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  put(element, children);
  return element;
}

function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  put(element, children);
  return element;
}

// 12,300 or 0.25 or 3.1e-6
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function percent(value) {
  return value === null || value === undefined ? "" : `${(100 * value).toFixed(1)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0 s";
  if (value < 0.0005) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1000)} ms`;
  return value < 120 ? `${number(value)} s` : `${Math.round(value / 60)} min`;
}

// A field to pick one of several: [value, text] each. Where the first is no value, each text says what it is of.
export function choice(label, options, value, change) {
  const select = h("select", { "aria-label": label, onchange: () => change(select.value) });
  const filter = options[0]?.[0] === "";
  for (const [key, text] of options) select.append(h("option", { value: key }, filter && !text.includes(": ") ? `${label}: ${text}` : text));
  select.value = value ?? "";
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  return h("label", { class: "field" }, filter ? null : h("span", null, label), select);
}

// Put a text where it can be pasted from; where the browser forbids it, select it in a window of its own.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { "aria-label": "to copy", rows: 6, readonly: true });
    const box = h("dialog", { "aria-label": "Copy", onclose: () => box.remove() }, h("p", null, "Copy this text:"), area, h("form", { method: "dialog" }, h("button", null, "Close")));
    area.value = text;
    document.body.append(box);
    box.showModal();
    area.select();
    return false;
  }
}

// A button that copies what `made` returns, and says so for a moment.
export function copyButton(label, made, title) {
  const said = h("span", { role: "status" }, label);
  const button = h("button", { title, onclick: async () => {
    if (!(await copy(await made()))) return;
    replace(said, "copied");
    setTimeout(() => replace(said, label), 1200);
  } }, said);
  return button;
}

// Give a file to the reader.
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

export function later(wait, action) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), wait);
  };
}

// A list of any length, of which only the rows in sight are in the document.
export class LongList {
  constructor(rowHeight, render, props) {
    this.rowHeight = rowHeight;
    this.render = render;
    this.count = 0;
    this.shown = new Map();
    this.room = h("div", { class: "room", role: "presentation" });
    this.element = h("div", { class: "long", ...props, onscroll: () => this.draw() }, this.room);
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.element);
  }

  reset(count) {
    this.count = count;
    this.room.style.height = `${count * this.rowHeight}px`;
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.draw();
  }

  range() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - 6);
    const last = Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.rowHeight) + 6;
    return [first, Math.min(this.count, last)];
  }

  draw() {
    const [first, last] = this.range();
    for (const [index, row] of this.shown) {
      if (index < first || index >= last) {
        row.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (this.shown.has(index)) continue;
      const row = this.render(index);
      row.style.transform = `translateY(${index * this.rowHeight}px)`;
      this.shown.set(index, row);
      this.room.append(row);
    }
  }

  again(index) {
    const row = this.shown.get(index);
    if (row === undefined) return;
    row.remove();
    this.shown.delete(index);
    this.draw();
  }

  reveal(index) {
    const top = index * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = top + this.rowHeight - clientHeight;
  }
}
