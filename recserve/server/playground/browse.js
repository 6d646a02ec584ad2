// The tab Browse: items and users, with search and pages, and what the server knows about one of them.

import { badge, byId, calm, element, empty, plural } from "./dom.js";
import { call, categoryOf, describe, items, nameOf, users } from "./api.js";

const PAGE = 30;
const next = { items: null, users: null };
const shown = { items: null, users: null };
let application = null;

function itemRow(item) {
  return element("li", {}, element("button", { type: "button", "data-item": item.item_id, click: () => application.go("browse", { item: item.item_id, user: "" }) },
    element("span", { class: "title", text: item.title || item.item_id }), element("span", { class: "side-note", text: `popularity ${item.popularity.toLocaleString("en")}` }),
    element("span", { class: "under" }, element("code", { text: item.item_id }), ` ${categoryOf(item.item_id)}`)));
}

function userRow(id) {
  return element("li", {}, element("button", { type: "button", "data-user": id, click: () => application.go("browse", { user: id, item: "" }) }, element("span", { class: "title", text: id })));
}

async function readItems(text, more) {
  const page = await items(text, PAGE, more ? next.items : 0);
  if (!more) byId("item-found").replaceChildren();
  byId("item-found").append(...page.items.map(itemRow));
  if (!byId("item-found").childElementCount) byId("item-found").append(element("li", {}, empty("No item has this text in title or id.")));
  next.items = page.next;
  byId("item-more").hidden = page.next === null;
  byId("item-count").textContent = `${page.num_items.toLocaleString("en")} in the catalogue, most popular first`;
}

async function readUsers(prefix, more) {
  const page = await users(prefix, PAGE, more ? next.users : null);
  if (!more) byId("user-found").replaceChildren();
  byId("user-found").append(...page.users.map(userRow));
  if (!byId("user-found").childElementCount) byId("user-found").append(element("li", {}, empty("No user id begins like this.")));
  next.users = page.next;
  byId("user-more").hidden = page.next === null;
  byId("user-count").textContent = "with stored events";
}

function facts(pairs) {
  return element("dl", { class: "facts-list" }, ...pairs.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));
}

async function showItem(id) {
  const item = await call("GET", `/v1/items/${encodeURIComponent(id)}`);
  const attributes = Object.entries(item.attributes).filter(([, value]) => value !== null);
  const add = element("button", { type: "button", class: "plain", id: "rank-this", text: "Rank it", click: () => {
    const known = byId("candidates").value.split(/\s+/).filter(Boolean);
    application.go("rank", { candidates: [...new Set([id, ...known])].join("\n") });
  } });
  byId("browse-detail").replaceChildren(element("h2", { text: item.title || id }),
    facts([["id", id], ["categories", item.categories.join("; ") || "none"], ["semantic id", item.semantic_id.join(" · ")], ["popularity", item.popularity.toLocaleString("en")],
      ...attributes.map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]), ["catalogue", item.catalog_version]]),
    application.available.rank ? add : "");
}

async function showUser(id) {
  const { events } = await call("GET", `/v1/users/${encodeURIComponent(id)}/history`);
  const latest = events.slice(-30).reverse();
  await describe(latest.map((event) => event.item_id));
  const rows = latest.map((event) => element("li", {}, element("button", { type: "button", click: () => application.go("browse", { item: event.item_id, user: "" }) },
    element("span", { class: "title", text: nameOf(event.item_id) }), element("span", { class: "side-note", text: event.timestamp ? event.timestamp.slice(0, 10) : "" }), element("span", { class: "under", text: event.type }))));
  const ask = element("button", { type: "button", class: "plain", id: "recommend-this", text: "Recommend", click: () => application.go("recommend", { user: id }) });
  byId("browse-detail").replaceChildren(element("h2", {}, id, " ", badge(plural(events.length, "event"))), application.available.recommend ? ask : "",
    element("h3", { text: latest.length < events.length ? `The last ${latest.length} events, latest first` : "Latest first" }), latest.length ? element("ul", { class: "found tall" }, ...rows) : empty("No events."));
}

function mark(values) {
  for (const [name, chosen] of [["item", values.item], ["user", values.user]]) {
    for (const row of document.querySelectorAll(`#browse [data-${name}]`)) {
      if (row.dataset[name] === chosen) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }
}

export const browse = {
  start(app) {
    application = app;
    if (byId("item-more").dataset.bound) return;
    byId("item-more").dataset.bound = "yes";
    const again = calm(() => app.go("browse", {}, true));
    byId("item-query").addEventListener("input", again);
    byId("user-query").addEventListener("input", again);
    byId("item-more").addEventListener("click", () => app.guarded(() => readItems(byId("item-query").value, true)));
    byId("user-more").addEventListener("click", () => app.guarded(() => readUsers(byId("user-query").value, true)));
  },

  async run(app, values) {
    const lists = [];
    if (shown.items !== values.items) lists.push(readItems(values.items, false).then(() => { shown.items = values.items; }));
    if (shown.users !== values.users) lists.push(readUsers(values.users, false).then(() => { shown.users = values.users; }));
    await Promise.all(lists);
    if (values.item) await showItem(values.item);
    else if (values.user) await showUser(values.user);
    else byId("browse-detail").replaceChildren(empty("Choose an item or a user."));
    mark(values);
  },
};
