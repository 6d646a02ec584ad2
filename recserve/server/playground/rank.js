// The tab Rank: candidates that the user gathers, and their scores per task.

import { badge, byId, calm, element, empty, meter, ms, notes, options, plural, tile, timing } from "./dom.js";
import { FIELDS, call, categoryOf, items, learn, nameOf } from "./api.js";
import { showCurl } from "./recommend.js";

const MOST = 4096;
const idsOf = (text) => [...new Set(text.split(/\s+/).filter(Boolean))];

function candidates() {
  return idsOf(byId("candidates").value);
}

function setCandidates(ids) {
  byId("candidates").value = [...new Set(ids)].slice(0, MOST).join("\n");
  tell();
}

function tell() {
  byId("candidate-count").textContent = String(candidates().length);
}

async function search(text) {
  const found = byId("candidate-found");
  if (!text.trim()) {
    found.replaceChildren();
    return;
  }
  const page = await items(text, 20);
  found.replaceChildren(...page.items.map((item) => element("li", {}, element("button", {
    type: "button", title: "Add to the candidates", click: () => setCandidates([...candidates(), item.item_id]),
  }, element("span", { class: "title", text: nameOf(item.item_id) }), element("span", { class: "side-note", text: "add" }), element("span", { class: "under", text: item.item_id })))));
  if (!page.items.length) found.append(element("li", {}, empty("No item has this text in title or id.")));
}

function table(answer) {
  const tasks = Object.keys(answer.items[0]?.scores || {});
  const span = Object.fromEntries(tasks.map((task) => {
    const values = answer.items.map((item) => item.scores[task]);
    return [task, [Math.min(...values), Math.max(...values)]];
  }));
  const head = element("tr", {}, element("th", { class: "num", text: "#" }), element("th", { text: "Item" }), ...tasks.map((task) => element("th", { text: task })));
  const rows = answer.items.map((item) => element("tr", {}, element("td", { class: "num rank", text: item.rank }),
    element("td", { class: "named" }, element("div", { class: "title", text: nameOf(item.item_id) }), element("div", { class: "under" }, element("code", { text: item.item_id }), ` ${categoryOf(item.item_id)}`)),
    ...tasks.map((task) => {
      const [low, high] = span[task];
      return element("td", { class: "grown" }, element("div", { class: "score", text: item.scores[task].toFixed(4) }), meter(high === low ? 1 : 0.04 + (0.96 * (item.scores[task] - low)) / (high - low)));
    })));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Ranking" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

export const rank = {
  async start(app) {
    options(byId("scorer"), ["auto", ...app.models.map((model) => model.recserve.scorer).filter(Boolean)]);
    const popular = (await items("", 20)).items.map((item) => item.item_id);
    if (!byId("candidates").value) setCandidates(popular);
    byId("rank-user").value ||= byId("user").value;
    if (byId("rank-go").dataset.bound) return;
    byId("rank-go").dataset.bound = "yes";
    byId("candidate-search").addEventListener("input", calm(() => app.guarded(() => search(byId("candidate-search").value))));
    byId("candidate-search").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      byId("candidate-found").querySelector("button")?.focus();
    });
    for (const kind of ["input", "restore"]) byId("candidates").addEventListener(kind, tell);
    byId("candidates").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) app.go("rank");
    });
    byId("take-popular").addEventListener("click", () => { setCandidates(popular); app.go("rank"); });
    byId("take-none").addEventListener("click", () => { setCandidates([]); byId("candidates").focus(); });
    byId("take-slate").addEventListener("click", () => {
      if (!app.slate.length) {
        app.guarded(async () => { throw new Error("Make a slate in the tab Recommend first."); });
        return;
      }
      setCandidates(app.slate);
      app.go("rank", { user: app.user });
    });
  },

  async run(app, values) {
    const results = byId("rank-results");
    const ids = idsOf(values.candidates);
    tell();
    if (!ids.length) {
      results.replaceChildren(element("div", { class: "card" }, empty("Find items on the left and add them as candidates.")));
      return;
    }
    const user = values.user.trim();
    const body = { candidates: ids.map((item_id) => ({ item_id })), scorer: values.scorer, fields: FIELDS, ...(user ? { user: { id: user } } : { history: [] }) };
    const answer = await call("POST", "/v1/rank", body);
    learn(answer);
    const facts = element("span", { class: "facts" }, badge(answer.scorer, "accent"), badge(plural(answer.items.length, "item")));
    const missing = answer.missing_item_ids.length > 0 && element("p", { class: "notes" }, `Not in the catalogue: ${answer.missing_item_ids.join(", ")}`);
    const card = element("div", { class: "card" }, element("h2", {}, "Ranking ", element("span", { class: "count", text: ms(answer.timing_ms.total) }), element("span", { class: "spacer" }), facts),
      timing(answer.timing_ms), missing, notes(answer.degraded), answer.items.length ? table(answer) : empty("None of the candidates is in the catalogue."));
    const request = element("details", { class: "card", id: "rank-request" }, element("summary", { id: "rank-request-open", text: "Request" }));
    showCurl(request, "POST", "/v1/rank", [body]);
    results.replaceChildren(card, request);
  },
};
