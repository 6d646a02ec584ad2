// Calls of the server: JSON, pages of items and users, streams, and the same call as a curl command.

const KEY = "recserve-api-key";
export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The server's own error: its message, its code and the HTTP status. */
export class ServerError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.code = error.code;
  }
}

function headers(body) {
  const given = body === undefined ? {} : { "Content-Type": "application/json" };
  if (key.get()) given.Authorization = `Bearer ${key.get()}`;
  return given;
}

async function failure(answer) {
  try {
    return new ServerError(answer.status, (await answer.json()).error);
  } catch {
    return new ServerError(answer.status, { message: `the server answered HTTP ${answer.status}`, code: "" });
  }
}

/** Sends a request and returns the decoded JSON, or the text of another type. Throws ServerError. */
export async function call(method, path, body, signal) {
  const answer = await fetch(path, { method, headers: headers(body), body: body && JSON.stringify(body), signal });
  if (!answer.ok) throw await failure(answer);
  const isJson = (answer.headers.get("content-type") || "").startsWith("application/json");
  return isJson ? answer.json() : answer.text();
}

/** Calls `take` with every event of a stream until it ends. Throws ServerError, also for error events. */
export async function stream(path, body, signal, take) {
  const answer = await fetch(path, { method: "POST", headers: headers(body), body: JSON.stringify(body), signal });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new ServerError(200, chunk.error);
      take(chunk);
    }
  }
}

const quoted = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;

/** Returns a request as a curl command. A key is named, not shown. */
export function curl(method, path, body) {
  const parts = ["curl -s"];
  if (method !== "GET" && !(method === "POST" && body !== undefined)) parts.push(`-X ${method}`);
  parts.push(quoted(location.origin + path));
  if (key.get()) parts.push(`-H "authorization: Bearer $RECSERVE_KEY"`);
  if (body !== undefined) parts.push("-H 'content-type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return parts.join(" ");
}

const query = (fields) => new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== "" && value !== null)).toString();

/** Returns a page of items. A server that looks at many items per call is asked again while a page is empty. */
export async function items(text, limit, after = 0) {
  let page = await call("GET", `/v1/items?${query({ query: text, limit, after: after || "" })}`);
  for (let more = 0; more < 20 && !page.items.length && page.next !== null; more += 1) {
    page = await call("GET", `/v1/items?${query({ query: text, limit, after: page.next })}`);
  }
  for (const item of page.items) known.set(item.item_id, item);
  return page;
}

let samples = null;

/** Returns a page of users: from the store, or from the bundle's samples where the store cannot list them. */
export async function users(prefix, limit, after = null) {
  try {
    let page = await call("GET", `/v1/users?${query({ prefix, limit, after })}`);
    for (let more = 0; more < 20 && !page.users.length && page.next !== null; more += 1) {
      page = await call("GET", `/v1/users?${query({ prefix, limit, after: page.next })}`);
    }
    return page;
  } catch (error) {
    if (error.code !== "listing_unsupported") throw error;
    samples ??= call("GET", "/playground/samples");
    return { users: (await samples).users.filter((id) => id.startsWith(prefix)).slice(0, limit), next: null };
  }
}

const known = new Map();
const MOST_KNOWN = 5000;

const AT_ONCE = 20;

/** What slates and rankings show of each item, see `learn`. */
export const FIELDS = ["title", "categories"];

/** Remembers the titles of the items of an answer that was requested with FIELDS. */
export function learn(answer) {
  if (known.size > MOST_KNOWN) known.clear();
  for (const { item_id, fields } of answer.items) known.set(item_id, { item_id, ...fields });
}

/** Reads the titles of items that the page does not know yet, several with a call. */
export async function describe(ids) {
  if (known.size > MOST_KNOWN) known.clear();
  const unknown = [...new Set(ids)].filter((id) => !known.has(id));
  const calls = [];
  for (let at = 0; at < unknown.length; at += AT_ONCE) {
    const joined = unknown.slice(at, at + AT_ONCE).map((id) => id.replace(/[\\,]/g, "\\$&")).join(",");
    calls.push(call("GET", `/v1/items?${query({ ids: joined })}`));
  }
  for (const page of await Promise.all(calls)) {
    for (const item of page.items) known.set(item.item_id, item);
    for (const id of page.missing_item_ids) known.set(id, { item_id: id, title: null, categories: [] });
  }
}

export const itemOf = (id) => known.get(id) || { item_id: id, title: null, categories: [] };
export const nameOf = (id) => itemOf(id).title || id;

export function categoryOf(id) {
  const all = itemOf(id).categories || [];
  return all.length ? String(all[0]).replaceAll(">", " › ").replace(/\s+/g, " ") : "";
}
