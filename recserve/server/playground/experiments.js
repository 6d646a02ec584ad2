// The tab Experiments: verdicts, and the arms of running experiments with their clicks and latencies.

import { badge, byId, count, element, empty, ms } from "./dom.js";
import { call } from "./api.js";
import { whiskerChart } from "./charts.js";

const STATES = { running: "good", stopped: "", fallen_back: "warn", unknown: "warn" };
const VERDICTS = { ship: "good", keep_control: "bad", not_yet: "warn", invalid: "bad" };
const GUARDRAILS = { errors: "errors", empty: "empty answers", p99: "p99 latency" };
const RESULTS = { holds: "good", fails: "bad", unclear: "" };
const WORDS = { holds: "not worse", fails: "worse", unclear: "too few requests" };
const EVERY_MS = 5000;
let timer = null;
let shown = null;

/** Returns the interval as text. With few answers only its lower end is known. */
function interval(arm) {
  if (!Number.isFinite(arm.p99_low_ms)) return "–";
  return Number.isFinite(arm.p99_high_ms) ? `${ms(arm.p99_low_ms)} to ${ms(arm.p99_high_ms)}` : `${ms(arm.p99_low_ms)} or more`;
}

function armRow(arm) {
  const cells = [count(arm.weight), arm.users === null ? "–" : count(arm.users), count(arm.requests), count(arm.errors), count(arm.empty), ms(arm.p50_ms ?? NaN), ms(arm.p99_ms ?? NaN), interval(arm)];
  return element("tr", {}, element("td", {}, element("b", { text: arm.name })), ...cells.map((text) => element("td", { class: "num", text })));
}

function percent(value) {
  if (!Number.isFinite(value)) return "–";
  return `${value < 0 ? "\u2212" : "+"}${Math.abs(100 * value).toFixed(1)} %`;
}

/** Returns the verdict on an arm with the state of its guardrails. */
function verdictLine(arm, several) {
  const [word, ...rest] = arm.verdict.text.split(": ");
  const guards = arm.verdict.guardrails.map((one) => badge(`${GUARDRAILS[one.name] || one.name}: ${WORDS[one.result] || one.result}`, RESULTS[one.result] || "", "Compared with the control; see the guide to experiments"));
  return element("div", { class: "verdict" }, element("p", {}, badge(word, VERDICTS[arm.verdict.kind] || ""), " ", several ? element("b", { text: `${arm.name}: ` }) : null, element("span", { text: rest.join(": ") })),
    arm.first_verdict ? element("p", { class: "hint", text: firstVerdict(arm.first_verdict) }) : null, element("div", { class: "facts" }, ...guards));
}

const moment = (time) => `${time.slice(0, 16).replace("T", " ")} UTC`;

/** Returns the first verdict with its time and counts. A later interval may say less. */
function firstVerdict(first) {
  return `First verdict (${moment(first.time)}, ${count(first.answers + first.control_answers)} answers, ${count(first.events + first.control_events)} events): ${first.text}`;
}

/** Returns whether the users are divided as planned, in words; null if nobody knows. */
function division(experiment) {
  const p = experiment.sample_ratio_p;
  if (!Number.isFinite(p)) return null;
  const [words, kind] = p < 1e-5 ? ["users not split as planned", "bad"] : p < 1e-3 ? ["users hardly split as planned", "warn"] : ["users split as planned", ""];
  return badge(words, kind, `Chi-square test of the users of each arm against the weights: p = ${p.toPrecision(2)}`);
}

/** Returns a table of the goals' rates, whose intervals hold at every look; null without goals. */
function goalTable(experiment) {
  const heads = ["Goal", "Arm", "Change", "95 % interval", "Per answer", "Events", "Answers"];
  const rows = experiment.arms[0].goals.flatMap((goal, number) => experiment.arms.map((arm, place) => {
    const mine = arm.goals[number];
    const ends = Number.isFinite(mine.change_low) ? `${percent(mine.change_low)} to ${percent(mine.change_high)}` : "–";
    const cells = [percent(mine.change ?? NaN), ends, Number.isFinite(mine.rate) ? mine.rate.toPrecision(3) : "–", count(mine.events), count(arm.answers)];
    return element("tr", {}, element("td", { text: place ? "" : goal.type }), element("td", {}, element("b", { text: arm.name })), ...cells.map((text) => element("td", { class: "num", text })));
  }));
  if (!rows.length) return null;
  return element("div", { class: "scroll goals", tabindex: "0", role: "group", "aria-label": `Goals of ${experiment.name}` },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((text, at) => element("th", { class: at > 1 ? "num" : "", text })))), element("tbody", {}, ...rows)));
}

/** Returns what the sums of several servers lack; null if nothing. */
function serversNote(experiment) {
  if (!experiment.uncounted) return null;
  const total = experiment.arms.reduce((sum, arm) => sum + arm.requests, experiment.uncounted);
  const share = (100 * experiment.uncounted / total).toFixed(2);
  return element("p", { class: "notes", text: `About ${count(experiment.uncounted)} requests (${share} %) are not counted, because a server was killed or Redis has lost them.` });
}

function card(experiment) {
  const heads = ["Arm", "Weight", "Users", "Requests", "Errors", "Empty", "p50", "p99", "95 % interval of p99"];
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((text, at) => element("th", { class: at ? "num" : "", text })))), element("tbody", {}, ...experiment.arms.map(armRow)));
  const rows = experiment.arms.map((arm) => ({ name: arm.name, value: arm.p99_ms ?? NaN, low: arm.p99_low_ms ?? NaN, high: arm.p99_high_ms ?? NaN,
    none: arm.requests ? "no recent answers" : "no requests yet" }));
  const judged = experiment.arms.filter((arm) => arm.verdict);
  const facts = element("span", { class: "facts" }, badge(experiment.status.replaceAll("_", " "), STATES[experiment.status] || ""), badge(experiment.mode),
    badge(`${count(100 * experiment.coverage)} % of the traffic`, "", "Share of the requests that take part"),
    division(experiment), experiment.servers === null ? null : badge(`sums of ${count(experiment.servers)} servers`), badge(`since ${moment(experiment.started)}`));
  return element("div", { class: "card experiment" }, element("h2", {}, experiment.name, element("span", { class: "spacer" }), facts), experiment.reason ? element("p", { class: "notes", text: experiment.reason }) : null,
    experiment.warning ? element("p", { class: "notes", role: "note", text: experiment.warning }) : null,
    serversNote(experiment),
    experiment.durable || experiment.servers !== null ? null : element("p", { class: "notes", text: "A restart forgets this state and these counts." }),
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
