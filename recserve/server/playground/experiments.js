// The tab Experiments: verdicts, and the arms of running experiments with their clicks and latencies.

import { badge, byId, count, element, empty, ms } from "./dom.js";
import { call } from "./api.js";
import { whiskerChart } from "./charts.js";

const STATES = { running: "good", stopped: "", fallen_back: "warn" };
const VERDICTS = { ship: "good", keep_control: "bad", not_yet: "warn", invalid: "bad" };
const GUARDRAILS = { errors: "errors", empty: "empty answers", p99: "p99 latency" };
const RESULTS = { holds: "good", fails: "bad", unclear: "" };
const EVERY_MS = 5000;
let timer = null;
let shown = null;

/** Returns the interval as text. With few answers only its lower end is known. */
function interval(arm) {
  if (!Number.isFinite(arm.p99_low_ms)) return "–";
  return Number.isFinite(arm.p99_high_ms) ? `${ms(arm.p99_low_ms)} to ${ms(arm.p99_high_ms)}` : `${ms(arm.p99_low_ms)} or more`;
}

function armRow(arm) {
  const cells = [count(arm.weight), count(arm.requests), count(arm.errors), count(arm.empty), ms(arm.p50_ms ?? NaN), ms(arm.p99_ms ?? NaN), interval(arm)];
  return element("tr", {}, element("td", {}, element("b", { text: arm.name })), ...cells.map((text) => element("td", { class: "num", text })));
}

function percent(value) {
  if (!Number.isFinite(value)) return "–";
  return `${value < 0 ? "\u2212" : "+"}${Math.abs(100 * value).toFixed(1)} %`;
}

/** Returns the verdict on an arm with the state of its guardrails. */
function verdictLine(arm, several) {
  const [word, ...rest] = arm.verdict.text.split(": ");
  const guards = arm.verdict.guardrails.map((one) => badge(`${GUARDRAILS[one.name] || one.name}: ${one.result}`, RESULTS[one.result] || "", "Compared with the control; see the guide to experiments"));
  return element("div", { class: "verdict" }, element("p", {}, badge(word, VERDICTS[arm.verdict.kind] || ""), " ", several ? element("b", { text: `${arm.name}: ` }) : null, element("span", { text: rest.join(": ") })), element("div", { class: "facts" }, ...guards));
}

/** Returns a table of the goals' rates, whose intervals hold at every look; null without goals. */
function goalTable(experiment) {
  const heads = ["Goal", "Arm", "Answers", "Events", "Per answer", "Change", "95 % interval at every look"];
  const rows = experiment.arms[0].goals.flatMap((goal, number) => experiment.arms.map((arm, place) => {
    const mine = arm.goals[number];
    const ends = Number.isFinite(mine.change_low) ? `${percent(mine.change_low)} to ${percent(mine.change_high)}` : "–";
    const cells = [count(arm.answers), count(mine.events), Number.isFinite(mine.rate) ? mine.rate.toPrecision(3) : "–", percent(mine.change ?? NaN), ends];
    return element("tr", {}, element("td", { text: place ? "" : goal.type }), element("td", {}, element("b", { text: arm.name })), ...cells.map((text) => element("td", { class: "num", text })));
  }));
  if (!rows.length) return null;
  return element("div", { class: "scroll goals", tabindex: "0", role: "group", "aria-label": `Goals of ${experiment.name}` },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((text, at) => element("th", { class: at > 1 ? "num" : "", text })))), element("tbody", {}, ...rows)));
}

function card(experiment) {
  const heads = ["Arm", "Weight", "Requests", "Errors", "Empty", "p50", "p99", "95 % interval of p99"];
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((text, at) => element("th", { class: at ? "num" : "", text })))), element("tbody", {}, ...experiment.arms.map(armRow)));
  const rows = experiment.arms.map((arm) => ({ name: arm.name, value: arm.p99_ms ?? NaN, low: arm.p99_low_ms ?? NaN, high: arm.p99_high_ms ?? NaN,
    none: arm.requests ? "no recent answers" : "no requests yet" }));
  const judged = experiment.arms.filter((arm) => arm.verdict);
  const p = experiment.sample_ratio_p;
  const facts = element("span", { class: "facts" }, badge(experiment.status.replaceAll("_", " "), STATES[experiment.status] || ""), badge(experiment.mode),
    badge(`${count(100 * experiment.coverage)} % of the traffic`, "", "Share of the requests that take part"),
    Number.isFinite(p) && badge(`sample ratio p = ${p.toPrecision(2)}`, p < 1e-5 ? "bad" : "", "Chi-square test: are requests split as the weights say? Below 0.00001 something is wrong."));
  return element("div", { class: "card experiment" }, element("h2", {}, experiment.name, element("span", { class: "spacer" }), facts), experiment.reason ? element("p", { class: "notes", text: experiment.reason }) : null,
    ...judged.map((arm) => verdictLine(arm, judged.length > 1)), goalTable(experiment),
    element("div", { class: "two" }, element("div", { class: "scroll arms", tabindex: "0", role: "group", "aria-label": `Arms of ${experiment.name}` }, table), element("div", {}, element("h3", { text: "p99 latency with its interval" }), rows.some((row) => Number.isFinite(row.value)) ? whiskerChart(rows, "ms") : empty("No arm has recent answers."))));
}

async function read() {
  const list = byId("experiment-list");
  let found = [];
  try {
    found = (await call("GET", "/v1/experiments")).experiments;
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  // Parts that did not change stay, and with them the focus.
  const said = JSON.stringify(found);
  if (said === shown) return found.length;
  shown = said;
  const none = "No experiment runs on this server. The guide “Load and A/B experiments” shows how to start one.";
  list.replaceChildren(...(found.length ? found.map(card) : [element("div", { class: "card" }, empty(none))]));
  return found.length;
}

export const experiments = {
  start(app) {
    if (byId("experiments-again").dataset.bound) return;
    byId("experiments-again").dataset.bound = "yes";
    byId("experiments-again").addEventListener("click", () => app.guarded(read));
  },

  async run() {
    this.stop();
    if (await read()) timer = setInterval(() => { if (!document.hidden) read().catch(() => {}); }, EVERY_MS);
  },

  stop: () => clearInterval(timer),
};
