// The tab Health: the last ten minutes, of which the server keeps samples, and figures since its start.

import { byId, count, element, empty, ms, percent } from "./dom.js";
import { call } from "./api.js";
import { barChart, lineChart } from "./charts.js";

const EVERY_MS = 5000;
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
let samples = [];
let found = [];
let timer = null;
let application = null;

function parse(text) {
  const parsed = [];
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(LABEL)].map(([, name, value]) => [name, value.replaceAll(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one))]));
    parsed.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return parsed;
}

/** Returns cumulative bucket counts by upper bound, summed over all series that fit. */
function buckets(name, keep) {
  const sums = new Map();
  for (const one of found) {
    if (one.name !== `${name}_bucket` || !keep(one.labels)) continue;
    const bound = one.labels.le === "+Inf" ? Infinity : Number(one.labels.le);
    sums.set(bound, (sums.get(bound) || 0) + one.value);
  }
  return [...sums].sort((one, other) => one[0] - other[0]);
}

/** Returns a quantile of cumulative buckets by linear interpolation, as Prometheus does. */
export function quantile(counts, share) {
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!all) return NaN;
  let [low, before] = [0, 0];
  for (const [bound, sum] of counts) {
    if (sum >= share * all) return bound === Infinity ? low : low + ((bound - low) * (share * all - before)) / Math.max(sum - before, 1e-12);
    [low, before] = [bound, sum];
  }
  return low;
}

const sum = (name, keep = () => true) => found.filter((one) => one.name === name && keep(one.labels)).reduce((total, one) => total + one.value, 0);
const number = (value) => (value === null ? NaN : value);

async function poll() {
  const [recent, text] = await Promise.all([call("GET", "/playground/recent"), call("GET", "/metrics")]);
  found = parse(text);
  samples = recent.map((one) => ({
    ...one, at: 1e3 * one.at_s, p50: number(one.p50_ms), p99: number(one.p99_ms), rate: one.requests / one.seconds, speed: one.tokens / one.seconds,
    failed: Object.values(one.errors).reduce((total, each) => total + each, 0) / one.seconds, hitShare: one.prefix_tokens ? (100 * one.cached_tokens) / one.prefix_tokens : NaN,
  }));
}

const tell = (name, value, note) => element("div", { class: "stat" }, element("div", { class: "key", text: name }), element("div", { class: "value", text: value }), element("div", { class: "note", text: note }));

function showStats() {
  const hits = sum("recserve_prefix_cache_tokens_total", (labels) => labels.result === "hit");
  const tokens = sum("recserve_prefix_cache_tokens_total");
  const [pages, used] = [sum("recserve_kv_pages"), sum("recserve_kv_pages", (labels) => labels.state !== "free")];
  const last = samples[samples.length - 1];
  byId("stats").replaceChildren(
    tell("Queue", count(sum("recserve_queue_depth")), "requests waiting"),
    tell("Running", count(sum("recserve_requests_running")), "requests in the engine"),
    tell("Prefix cache", tokens ? percent(hits / tokens) : "–", `${count(hits)} prefix tokens found`),
    tell("Cache memory", pages ? percent(used / pages) : "–", `${count(used)} of ${count(pages)} pages of cached histories and texts`),
    tell("Failed", count(sum("recserve_requests_failed_total")), "requests, all reasons"),
    ...(found.some((one) => one.name === "recserve_catalog_lag_seconds") ? [tell("Shared catalogue", `${sum("recserve_catalog_lag_seconds").toFixed(1)} s`,
      `since the log was read; ${count(sum("recserve_catalog_losses_total"))} losses of the log, ${count(sum("recserve_catalog_conflicts_total"))} conflicts`)] : []),
    ...(application.available.text ? [tell("Text", last ? count(last.speed) : "–", "tokens/s now")] : []));
}

function showCharts() {
  const charts = [
    ["Latency of model requests", [["p50", (one) => one.p50], ["p99", (one) => one.p99]], "ms"],
    ["Model requests", [["requests", (one) => one.rate]], "/s"],
    ["Errors", [["errors", (one) => one.failed]], "/s"],
    ["Queue and running", [["queue", (one) => one.queue_depth], ["running", (one) => one.running]], ""],
    ["Prefix cache hits", [["hits", (one) => one.hitShare]], "%"],
    ...(application.available.text ? [["Text", [["tokens", (one) => one.speed]], "tokens/s"]] : []),
  ];
  byId("charts").replaceChildren(...charts.map(([title, lines, unit]) => element("div", { class: "card" }, element("h2", { text: title }, element("span", { class: "count", text: unit })), lineChart(samples, lines, unit))));
}

/** Shows each code of an error: how often in the last ten minutes, when last, and since the start. */
function showErrors() {
  const codes = new Map();
  for (const { name, labels, value } of found) {
    if (name === "recserve_errors_total" && value) codes.set(labels.code, { recent: 0, last: NaN, all: value });
  }
  for (const sample of samples) {
    for (const [code, times] of Object.entries(sample.errors)) {
      const known = codes.get(code);
      if (known) [known.recent, known.last] = [known.recent + times, sample.at];
    }
  }
  const rows = [...codes].sort(([, one], [, other]) => other.recent - one.recent || other.all - one.all);
  byId("errors").replaceChildren(...rows.map(([code, { recent, last, all }]) => element("tr", {}, element("td", { class: "mono", text: code }), element("td", { class: "num", text: count(recent) }),
    element("td", { class: "num", text: Number.isFinite(last) ? new Date(last).toLocaleTimeString("en-GB") : "–" }), element("td", { class: "num", text: count(all) }))));
  byId("no-errors").hidden = rows.length > 0;
  byId("errors-table").hidden = !rows.length;
}

function showPositions() {
  const drafters = new Map();
  for (const { name, labels, value } of found) {
    if (name !== "recserve_spec_accepted_per_position_total") continue;
    if (!drafters.has(labels.drafter)) drafters.set(labels.drafter, []);
    drafters.get(labels.drafter).push([Number(labels.position), value]);
  }
  const cards = [...drafters].map(([drafter, pairs]) => {
    const sorted = pairs.sort((one, other) => one[0] - other[0]).map(([position, value]) => [String(position + 1), value]);
    return element("div", {}, element("h3", { text: drafter }), barChart(sorted, "accepted tokens", "position in the draft"));
  });
  byId("positions").replaceChildren(cards.length ? element("div", { class: "two" }, ...cards) : empty("No text was drafted yet."));
}

function showRoutes() {
  const groups = new Map();
  for (const { name, labels } of found) {
    if (name === "recserve_request_seconds_bucket") groups.set(`${labels.route}\n${labels.strategy}`, labels);
  }
  byId("routes").replaceChildren(...[...groups].sort(([one], [other]) => (one < other ? -1 : 1)).map(([, { route, strategy }]) => {
    const counts = buckets("recserve_request_seconds", (labels) => labels.route === route && labels.strategy === strategy);
    return element("tr", {}, element("td", { class: "mono", text: route.replaceAll(":path}", "}") }), element("td", { text: strategy === "none" ? "–" : strategy }), element("td", { class: "num", text: count(counts[counts.length - 1][1]) }),
      element("td", { class: "num", text: ms(1e3 * quantile(counts, 0.5)) }), element("td", { class: "num", text: ms(1e3 * quantile(counts, 0.99)) }));
  }));
}

function showVersions(app) {
  byId("models").replaceChildren(...app.models.map((model) => element("tr", {}, element("td", { text: model.id }), element("td", { class: "mono", text: model.recserve.model_version || "–" }),
    element("td", { class: "mono", text: model.recserve.catalog_version || "–" }), element("td", { class: "num", text: model.recserve.parameters ? count(model.recserve.parameters) : "–" }))));
  const { kernels, ...versions } = app.version;
  byId("versions").textContent = Object.entries(versions).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
  byId("kernels").replaceChildren(...Object.entries(kernels || {}).flatMap(([model, works]) => Object.entries(works).map(([work, kernel]) =>
    element("tr", {}, element("td", { class: "mono", text: model }), element("td", { text: work }), element("td", { text: kernel })))));
}

function draw() {
  showStats();
  showCharts();
  showErrors();
  showPositions();
  showRoutes();
}

export const health = {
  async run(app) {
    application = app;
    await poll();
    draw();
    showVersions(app);
    timer ??= setInterval(() => {
      if (!document.hidden) poll().then(draw, () => {});
    }, EVERY_MS);
  },

  stop() {
    clearInterval(timer);
    timer = null;
  },
};
