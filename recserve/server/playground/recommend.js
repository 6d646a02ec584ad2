// The tab Recommend: a user's history, one slate or two side by side, and the tree of the search.

import { badge, byId, calm, copy, element, empty, meter, ms, notes, options, plural, suggestions, tile, timing, working } from "./dom.js";
import { FIELDS, call, categoryOf, curl, describe, items, learn, nameOf, users } from "./api.js";
import { treeView } from "./tree.js";

const HISTORY = 40;

/** Returns the body of a request for a slate. Throws if the filter is not JSON. */
function bodyOf(values, strategy) {
  const k = Number(values.k);
  const body = { user: { id: values.user }, k, strategy, beam_width: Math.max(Number(values.beam), k), exclude: { seen: values.seen === "true" }, fields: FIELDS, explain: true };
  const excluded = values.exclude.split(/[\s,]+/).filter(Boolean);
  if (excluded.length) body.exclude.item_ids = excluded;
  const filters = [];
  if (values.category.trim()) filters.push({ eq: ["categories", values.category.trim()] });
  if (values.filter.trim()) {
    try {
      filters.push(JSON.parse(values.filter));
    } catch {
      throw new Error("The filter is not JSON.");
    }
  }
  if (filters.length) body.filter = filters.length === 1 ? filters[0] : { and: filters };
  if (values.cap) body.diversity = { caps: [{ field: values.capped.trim() || "categories", most: Number(values.cap) }] };
  return body;
}

/** Shows a request as a curl command with a button that copies it. */
export function showCurl(card, method, path, bodies) {
  card.hidden = false;
  const parts = bodies.map((body) => {
    const command = curl(method, path, body);
    const button = element("button", { type: "button", class: "plain small", text: "Copy as curl" });
    button.addEventListener("click", () => {
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      return copy(command, button);
    });
    return element("div", { class: "curl" }, element("pre", { text: command, tabindex: "0" }), button);
  });
  card.replaceChildren(card.firstElementChild, ...parts);
}

async function showHistory(user) {
  const history = user ? (await call("GET", `/v1/users/${encodeURIComponent(user)}/history`)).events : [];
  const recent = history.slice(-HISTORY);
  await describe(recent.map((event) => event.item_id));
  const cut = history.length > recent.length ? `, the last ${recent.length} shown` : "";
  byId("history-count").textContent = `${plural(history.length, "event")}, oldest to newest${cut}`;
  const strip = byId("history");
  strip.replaceChildren(...recent.map((event) => {
    const when = event.timestamp ? event.timestamp.slice(0, 10) : "";
    return element("div", { class: "event", title: `${nameOf(event.item_id)}\n${event.item_id}` },
      element("div", { class: "name", text: nameOf(event.item_id) }),
      element("div", { class: "under", text: [event.type, when].filter(Boolean).join(", ") }));
  }));
  if (!recent.length) strip.append(empty("No events yet. This user gets popular items."));
  strip.scrollLeft = strip.scrollWidth;
}

/** Returns the mark of an item against the other slate: the same rank, another rank, or only here. */
function comparison(item, other) {
  const there = other.items.find((one) => one.item_id === item.item_id);
  if (!there) return badge("only here", "warn", "The other slate does not hold this item");
  if (there.rank === item.rank) return badge("same", "good", "The other slate has this item at the same rank");
  return badge(`#${there.rank} there`, "", "The other slate has this item at another rank");
}

/** Returns how likely the model finds an item, with the parts of its score as a title; else the score. */
function scoreText(item) {
  if (item.score === null) return element("span", { text: "" });
  if (!item.parts) return element("span", { text: item.score.toFixed(3) });
  const likely = 100 * Math.exp(item.parts.log_prob);
  const parts = Object.entries(item.parts).map(([name, value]) => `${name} ${value.toFixed(3)}`).join(" + ");
  return element("span", { text: `${Number(likely.toPrecision(2))} %`, title: `How likely the model finds this item next.\nscore ${item.score.toFixed(3)} = ${parts}` });
}

/** Returns a card with one slate. */
function slateCard(answer, other) {
  const scores = answer.items.filter((item) => item.score !== null).map((item) => item.score);
  const [top, low] = [Math.max(...scores), Math.min(...scores)];
  const work = answer.explanation;
  const root = work.root_tokens_cached + work.root_tokens_computed;
  const facts = element("span", { class: "facts" }, badge(answer.strategy, "accent", "The strategy that made the slate"),
    answer.exact && badge("exact", "good", "Equal to full beam search of this width"),
    badge(plural(answer.rounds, "round"), "", `${plural(work.forwards, "forward pass").replace("passs", "passes")} over ${plural(work.nodes, "tree node")}`),
    root > 0 && badge(`${work.root_tokens_cached} of ${root} cached`, "", "Tokens of the history that the prefix cache held"));
  const list = element("ol", { class: "slate" }, ...answer.items.map((item) => {
    const mark = other ? comparison(item, other) : item.source === "model" ? element("code", { text: (item.semantic_id || []).join("·"), title: "semantic id" }) : badge(item.source, "warn");
    return element("li", {}, element("span", { class: "rank", text: item.rank }), tile(nameOf(item.item_id)),
      element("div", {}, element("div", { class: "title", text: nameOf(item.item_id), title: nameOf(item.item_id) }),
        element("div", { class: "under" }, element("code", { text: item.item_id }), ` ${categoryOf(item.item_id)}`)),
      element("div", {}, element("div", { class: "score" }, scoreText(item), mark),
        meter(item.score === null ? 0 : top === low ? 1 : 0.06 + (0.94 * (item.score - low)) / (top - low))));
  }));
  return element("div", { class: "card" }, element("h2", {}, "Slate ", element("span", { class: "count", text: ms(working(answer.timing_ms)), title: "Prefill, draft and verify" }), element("span", { class: "spacer" }), facts),
    timing(answer.timing_ms, "for the explanation that this page asks for"), answer.items.length ? list : empty("No item passes the filter and the exclusions."), notes(answer.degraded));
}

const fromCache = ({ explanation }) => explanation.root_tokens_cached > 0 && explanation.root_tokens_computed === 0;

function verdict(one, other) {
  const ids = new Set(other.items.map((item) => item.item_id));
  const shared = one.items.filter((item) => ids.has(item.item_id)).length;
  const placed = one.items.filter((item, at) => other.items[at] && other.items[at].item_id === item.item_id).length;
  const [fast, slow] = working(one.timing_ms) <= working(other.timing_ms) ? [one, other] : [other, one];
  return element("p", { class: "verdict" }, element("b", { text: `${shared} of ${one.items.length} items are in both slates` }), `, ${placed} at the same rank. `,
    element("b", { text: fast.strategy }), ` took ${ms(working(fast.timing_ms))}, `, element("b", { text: slow.strategy }), ` ${ms(working(slow.timing_ms))} for prefill, draft and verify.`, [one, other].every(fromCache) && " Both found the history in the cache.");
}

function showTrees(answers) {
  const choice = byId("tree-choice");
  const card = byId("tree-card");
  card.hidden = false;
  options(choice, answers.map((answer, at) => [String(at), answer.strategy]));
  choice.value = "0";
  choice.hidden = answers.length === 1;
  const draw = () => {
    const answer = answers[Number(choice.value)];
    byId("tree-count").textContent = `${plural(answer.explanation.tree.length, "node")}, ${plural(answer.rounds, "round")}`;
    byId("tree").replaceChildren(treeView(answer.explanation, answer.items.map((item) => item.item_id)));
  };
  choice.onchange = draw;
  draw();
}

let pool = [];
let running = null;

export const recommend = {
  async start(app) {
    const model = app.models.find((one) => one.recserve.strategies);
    const names = model.recserve.strategies;
    options(byId("strategy"), ["auto", ...names, "similar"]);
    options(byId("compare"), [["", "nothing"], ...names, "similar"]);
    pool = (await users("", 50)).users;
    suggestions(byId("user-list"), pool.map((id) => [id, ""]));
    byId("user").value ||= pool[0] || "";
    const popular = (await items("", 50)).items;
    const categories = [...new Set(popular.flatMap((item) => item.categories || []))].slice(0, 30);
    suggestions(byId("category-list"), categories.map((name) => [name, ""]));
    suggestions(byId("exclude-list"), popular.slice(0, 30).map((item) => [item.item_id, item.title || ""]));
    if (byId("dice").dataset.bound) return;
    byId("dice").dataset.bound = "yes";
    byId("dice").addEventListener("click", () => {
      const others = pool.filter((id) => id !== byId("user").value);
      if (others.length) app.go("recommend", { user: others[Math.floor(Math.random() * others.length)] });
    });
    const suggest = calm((field) => users(field.value.trim(), 20).then((page) => suggestions(byId("user-list"), page.users.map((id) => [id, ""])), () => {}));
    for (const name of ["user", "rank-user"]) byId(name).addEventListener("input", (event) => suggest(event.target));
  },

  async run(app, values) {
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    values.user = values.user.trim();
    if (!values.user) throw new Error("Choose a user first.");
    const strategies = [values.strategy, ...(values.compare ? [values.compare] : [])];
    const bodies = strategies.map((name) => bodyOf(values, name));
    showCurl(byId("recommend-request"), "POST", "/v1/recommend", bodies);
    const past = showHistory(values.user);
    past.catch(() => {});
    const answers = [];
    try {
      // Otherwise the first strategy would pay for the history that the second one finds in the cache.
      if (values.compare) await call("POST", "/v1/recommend", { user: { id: values.user }, k: 1, beam_width: 1 }, signal);
      // One after the other, so that both times are those of a request alone.
      for (const body of bodies) answers.push(await call("POST", "/v1/recommend", body, signal));
      answers.forEach(learn);
      await past;
    } catch (error) {
      if (error.name !== "AbortError") {
        byId("slates").replaceChildren();
        byId("tree-card").hidden = true;
      }
      throw error;
    }
    if (signal.aborted) return;
    app.slate = answers[0].items.map((item) => item.item_id);
    app.user = values.user;
    const [one, other] = answers;
    const cards = element("div", { class: other ? "two" : "" }, slateCard(one, other), ...(other ? [slateCard(other, one)] : []));
    byId("slates").replaceChildren(...(other ? [verdict(one, other)] : []), cards);
    showTrees(answers);
  },

  cancel: () => running?.abort(),
};
