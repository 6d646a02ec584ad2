// Elements, numbers and small parts that all tabs share. Text enters the page as textContent only.

export const byId = (id) => document.getElementById(id);

/** Returns an element. Options: class, text, title, click, attributes of any name, and `on` handlers. */
export function element(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "click") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Returns an SVG element with attributes; `text` becomes its textContent. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function ms(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? `${value.toFixed(0)} ms` : value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return String(Math.round(value * 100) / 100);
}

export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");
export const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export function badge(text, kind = "", title = "") {
  return element("span", { class: `badge ${kind}`, text, title: title || undefined });
}

/** Returns a horizontal bar whose filled part is a share from 0 to 1. */
export function meter(share) {
  const fill = element("i");
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return element("div", { class: "meter", "aria-hidden": "true" }, fill);
}

export function empty(text) {
  return element("p", { class: "empty", text });
}

/** Returns a square with the initials of a title. */
export function tile(title) {
  const words = String(title).split(/\s+/).filter((word) => /^[\p{L}\p{N}]/u.test(word));
  const letters = words.slice(0, 2).map((word) => [...word][0]).join("").toUpperCase();
  return element("span", { class: "tile", text: letters || "?", "aria-hidden": "true" });
}

const STAGES = ["queue", "features", "prefill", "draft", "verify"];

/** Returns the time that a request spent in the models and in the search. */
export const working = (times) => times.prefill + times.draft + times.verify;

/** Returns a bar with the share of each stage of a request, and its legend. `rest` says what the time outside of the
 * stages went to; it is then beside the bar. */
export function timing(times, rest = "") {
  const known = STAGES.reduce((sum, stage) => sum + times[stage], 0);
  const outside = Math.max(0, times.total - known);
  const parts = STAGES.map((stage) => [stage, times[stage]]);
  if (!rest) parts.push(["other", outside]);
  const whole = Math.max(rest ? known : times.total, known, 1e-9);
  const said = parts.map(([stage, value]) => `${stage} ${ms(value)}`).join(", ");
  const bar = element("div", { class: "stages", role: "img", "aria-label": `Time by stage: ${said}` });
  const legend = element("div", { class: "legend" });
  for (const [stage, value] of parts) {
    const piece = element("i", { class: `stage-${stage}`, title: `${stage} ${ms(value)}` });
    piece.style.width = `${(100 * value) / whole}%`;
    if (value > 0) bar.append(piece);
    legend.append(element("span", {}, element("i", { class: `stage-${stage}` }), `${stage} `, element("b", { text: ms(value) })));
  }
  if (rest) legend.append(element("span", { class: "outside", text: `and ${ms(outside)} ${rest}` }));
  return element("div", { class: "timing" }, bar, legend);
}

const NOTES = {
  no_recommender: "No recommender is trained yet: the slate holds popular items.",
  cold_start: "No known events: the slate holds popular items.",
  length_penalty: "The score divides by the length of ids; a better item may be missing.",
  fewer_than_k: "The filter or the exclusions leave fewer items than requested.",
  deadline_passed: "The model was not ready at the deadline; a list answered.",
  no_model_items: "The model found no allowed item; popular items fill the slate.",
  hurried: "Little time was left, so the server chose a faster strategy.",
  unknown_filter_values: "No item has one of the values of the filter.",
  unknown_excluded_items: "Some excluded ids are not in the catalogue.",
  seen_within_s_ignored: "Some events have no timestamp, so all seen items are left out.",
  shown_unavailable: "What the user was shown could not be read; nothing is left out for it.",
  history_unavailable: "The history store does not answer; the history counts as empty.",
};

/** Returns one note per entry of `degraded`. */
export function notes(degraded) {
  const list = degraded.map((name) => element("li", { text: NOTES[name] || name.replaceAll("_", " ") }));
  return list.length ? element("ul", { class: "notes" }, ...list) : null;
}

/** Fills a select with options; keeps the chosen value if it is still there. */
export function options(select, values) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => {
    const [name, label] = Array.isArray(value) ? value : [value, value];
    return element("option", { value: name, text: label });
  }));
  if ([...select.options].some((option) => option.value === before)) select.value = before;
}

/** Fills a datalist with values. */
export function suggestions(list, values) {
  list.replaceChildren(...values.map(([value, label]) => element("option", { value, label })));
}

/** Calls a function once the calls have stopped for a while. */
export function calm(work, wait = 180) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), wait);
  };
}

/** Copies a text, and says what to press where the browser allows no copying. */
export async function copy(text, button) {
  const before = button.textContent;
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    done = false;
  }
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = before; }, 1600);
}
