// The tab Health: the metrics of the last ten minutes, which the page collects while it is open.

import { byId, count, element, empty, ms, percent } from "./dom.js";
import { call } from "./api.js";
import { barChart, lineChart } from "./charts.js";

const EVERY_MS = 3000;
const KEPT_MS = 600e3;
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const samples = [];
let latest = null;
let timer = null;
let application = null;

function parse(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] || "").matchAll(LABEL)].map(([, name, value]) => [name, value.replaceAll(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one))]));
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}

/** Returns cumulative bucket counts by upper bound, summed over all series that fit. */
function buckets(found, name, keep = () => true) {
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

const less = (now, before) => {
  const earlier = new Map(before);
  return now.map(([bound, sum]) => [bound, Math.max(0, sum - (earlier.get(bound) || 0))]);
};

const isModel = (labels) => /recommend|rank|completions|rerank|scoring/.test(labels.route || "");

async function poll() {
  const found = parse(await call("GET", "/metrics"));
  const sum = (name, keep = () => true) => found.filter((one) => one.name === name && keep(one.labels)).reduce((total, one) => total + one.value, 0);
  const has = (name) => found.some((one) => one.name === name);
  const running = ["recserve_requests_running", "recserve_running_requests"].find(has);
  const now = { at: Date.now(), found, latency: buckets(found, "recserve_request_seconds", isModel), queue: sum("recserve_queue_depth"), running: running ? sum(running) : NaN,
    hits: sum("recserve_prefix_cache_tokens_total", (labels) => labels.result === "hit"), misses: sum("recserve_prefix_cache_tokens_total", (labels) => labels.result === "miss"),
    tokens: sum("recserve_text_tokens_total", (labels) => labels.kind === "completion"), pages: sum("recserve_kv_pages"), used: sum("recserve_kv_pages", (labels) => labels.state !== "free"), failed: sum("recserve_requests_failed_total") };
  const before = samples[samples.length - 1];
  now.requests = now.latency.length ? now.latency[now.latency.length - 1][1] : 0;
  if (before && now.requests >= before.requests) {
    const seconds = (now.at - before.at) / 1e3;
    const fresh = less(now.latency, before.latency);
    now.p50 = 1e3 * quantile(fresh, 0.5);
    now.p99 = 1e3 * quantile(fresh, 0.99);
    now.rate = (now.requests - before.requests) / seconds;
    now.speed = (now.tokens - before.tokens) / seconds;
    const tokens = now.hits + now.misses - before.hits - before.misses;
    now.hitShare = tokens > 0 ? (100 * (now.hits - before.hits)) / tokens : NaN;
  }
  latest = now;
  samples.push(now);
  if (before) before.found = null;
  while (samples.length && samples[0].at < now.at - KEPT_MS) samples.shift();
}

const tell = (name, value, note) => element("div", { class: "stat" }, element("div", { class: "key", text: name }), element("div", { class: "value", text: value }), element("div", { class: "note", text: note }));

function showStats() {
  const now = latest;
  byId("stats").replaceChildren(
    tell("Queue", count(now.queue), "requests waiting"),
    tell("Running", count(now.running), Number.isFinite(now.running) ? "requests in the engine" : "not measured here"),
    tell("Prefix cache", now.hits + now.misses ? percent(now.hits / (now.hits + now.misses)) : "–", `${count(now.hits)} prefix tokens found`),
    tell("KV pages", now.pages ? percent(now.used / now.pages) : "–", `${count(now.used)} of ${count(now.pages)} in use`),
    tell("Failed", count(now.failed), "requests, all reasons"),
    tell("Text", Number.isFinite(now.speed) ? count(now.speed) : "–", "tokens/s now"));
}

function showCharts() {
  const charts = [
    ["Latency of model requests", [["p50", (one) => one.p50], ["p99", (one) => one.p99]], "ms"],
    ["Model requests", [["requests", (one) => one.rate]], "/s"],
    ["Queue and running", [["queue", (one) => one.queue], ["running", (one) => one.running]], ""],
    ["Prefix cache hits", [["hits", (one) => one.hitShare]], "%"],
  ];
  byId("charts").replaceChildren(...charts.map(([title, lines, unit]) => element("div", { class: "card" }, element("h2", { text: title }), lineChart(samples, lines, unit))));
}

function showPositions() {
  const drafters = new Map();
  for (const { name, labels, value } of latest.found) {
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
  for (const { name, labels } of latest.found) {
    if (name === "recserve_request_seconds_bucket") groups.set(`${labels.route}\n${labels.strategy}`, labels);
  }
  byId("routes").replaceChildren(...[...groups].sort(([one], [other]) => (one < other ? -1 : 1)).map(([, { route, strategy }]) => {
    const counts = buckets(latest.found, "recserve_request_seconds", (labels) => labels.route === route && labels.strategy === strategy);
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
  showPositions();
  showRoutes();
}

export const health = {
  start(app) {
    application = app;
    if (timer) return;
    // The page collects from the start, so that the charts have a past when the tab opens.
    timer = setInterval(() => {
      if (document.hidden) return;
      poll().then(() => { if (application.name === "health") draw(); }, () => {});
    }, EVERY_MS);
  },

  async run(app) {
    await poll();
    draw();
    showVersions(app);
  },
};
