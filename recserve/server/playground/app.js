// The frame of the page: tabs, the address, theme, key, errors. Each tab is one module with `start` and `run`.

import { byId } from "./dom.js";
import { call, key } from "./api.js";
import { recommend } from "./recommend.js";
import { rank } from "./rank.js";
import { text } from "./text.js";
import { browse } from "./browse.js";
import { experiments } from "./experiments.js";
import { health } from "./health.js";

const PANELS = { recommend, rank, text, browse, experiments, health };
const app = { name: "", defaults: {}, models: [], version: {}, available: {}, go, guarded, slate: [], user: "" };

/** Runs work of a tab and shows its error. Work that was aborted says nothing. */
async function guarded(work) {
  const bar = byId("error");
  bar.hidden = true;
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    bar.textContent = error.message;
    bar.hidden = false;
  }
}

const formOf = (name) => byId(`${name}-form`);

function fieldsOf(name) {
  const form = formOf(name);
  return form ? [...form.elements].filter((field) => field.name) : [];
}

/** Returns the inputs of a tab by name. */
function inputs(name) {
  const values = {};
  for (const field of fieldsOf(name)) {
    if (field.type === "radio" && !field.checked) continue;
    values[field.name] = field.type === "checkbox" ? String(field.checked) : field.value;
  }
  return values;
}

function setInputs(name, values) {
  for (const field of fieldsOf(name)) {
    const value = values[field.name];
    if (value === undefined) continue;
    if (field.type === "checkbox") field.checked = value === "true";
    else if (field.type === "radio") field.checked = field.value === value;
    else field.value = value;
    field.dispatchEvent(new Event("restore"));
  }
}

/** Returns the address of a tab: its name, and the inputs that differ from the defaults. */
function address(name) {
  const changed = Object.entries(inputs(name)).filter(([field, value]) => value !== app.defaults[name][field]);
  const query = new URLSearchParams(changed).toString();
  return `#${name}${query ? `?${query}` : ""}`;
}

function remember(replace) {
  const wanted = address(app.name);
  if (wanted === location.hash) return;
  if (replace) history.replaceState(null, "", wanted);
  else history.pushState(null, "", wanted);
}

/** Shows a tab with the given inputs and runs it. */
function go(name, values = {}, replace = false) {
  show(name);
  setInputs(name, { ...inputs(name), ...values });
  remember(replace);
  return guarded(() => PANELS[name].run(app, inputs(name)));
}

function show(name) {
  if (app.name && app.name !== name) PANELS[app.name].stop?.();
  app.name = name;
  byId("error").hidden = true;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const on = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    byId(tab.dataset.tab).hidden = !on;
    if (on) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** Restores tab and inputs from the address. */
function restore() {
  const [name, query] = location.hash.slice(1).split("?");
  const first = Object.keys(PANELS).find((panel) => app.available[panel]);
  const tab = app.available[name] ? name : first;
  setInputs(tab, { ...app.defaults[tab], ...Object.fromEntries(new URLSearchParams(query || "")) });
  return go(tab, {}, true);
}

function bindTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => { if (app.name !== tab.dataset.tab) go(tab.dataset.tab); });
    tab.addEventListener("keydown", (event) => {
      const shown = tabs.filter((other) => !other.hidden);
      const at = shown.indexOf(tab);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = shown[(to + shown.length) % shown.length];
      next.focus();
      go(next.dataset.tab);
    });
  }
}

function bindForms() {
  for (const name of Object.keys(PANELS)) {
    const form = formOf(name);
    if (!form) continue;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      go(name);
    });
    for (const range of form.querySelectorAll("input[type=range]")) {
      const output = form.querySelector(`output[for=${range.id}]`);
      const tell = () => { output.textContent = range.value; };
      range.addEventListener("input", tell);
      range.addEventListener("restore", tell);
      tell();
    }
    for (const field of form.querySelectorAll("[data-runs]")) {
      field.addEventListener("change", () => go(name));
    }
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") PANELS[app.name]?.cancel?.();
  });
}

function bindTheme() {
  const stored = localStorage.getItem("theme");
  if (stored) document.documentElement.dataset.theme = stored;
  byId("theme").addEventListener("click", () => {
    const set = document.documentElement.dataset.theme;
    const dark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  });
}

function bindKey() {
  const field = byId("key");
  const button = byId("key-button");
  const box = byId("key-box");
  field.value = key.get();
  button.addEventListener("click", () => {
    box.hidden = !box.hidden;
    button.setAttribute("aria-expanded", String(!box.hidden));
    if (!box.hidden) field.focus();
  });
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    box.hidden = true;
    button.setAttribute("aria-expanded", "false");
    button.focus();
    guarded(load);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    box.hidden = true;
    button.setAttribute("aria-expanded", "false");
    button.focus();
  });
}

async function ready() {
  const answer = await fetch("/health/ready").catch(() => null);
  byId("dot").className = `dot ${answer && answer.ok ? "good" : "bad"}`;
  byId("state").textContent = answer ? (answer.ok ? "ready" : "not ready") : "unreachable";
}

/** Reads what the server offers, fills the forms and restores the address. */
async function load() {
  const [version, models] = await Promise.all([call("GET", "/version"), call("GET", "/v1/models")]);
  app.version = version;
  app.models = models.data;
  const items = Boolean(version.catalog_version);
  const ranks = app.models.some((model) => model.recserve.scorer);
  const writes = app.models.some((model) => model.recserve.drafters);
  const recommends = app.models.some((model) => model.recserve.strategies);
  app.available = { recommend: recommends, rank: ranks, text: writes, browse: items, experiments: true, health: true };
  for (const tab of document.querySelectorAll("[role=tab]")) tab.hidden = !app.available[tab.dataset.tab];
  for (const [name, panel] of Object.entries(PANELS)) {
    if (app.available[name]) await panel.start?.(app);
    app.defaults[name] = inputs(name);
  }
  byId("main").hidden = false;
  await restore();
}

bindTheme();
bindKey();
bindTabs();
bindForms();
addEventListener("popstate", () => restore());
setInterval(ready, 5000);
ready();
guarded(load);
