// The tree of a search: prefixes of semantic ids, by how they came into the tree.

import { count, element, empty, plural, svg } from "./dom.js";
import { nameOf } from "./api.js";

const KINDS = {
  verified: "drafted, verified, in the slate",
  draft: "drafted, not in the slate",
  search: "scored by beam search",
  repair: "repaired: the draft lacked it",
  unscored: "needs no score",
};
const RADIUS = 5;
const STEP = 14;
const LEVEL = 62;

/** Returns the nodes with what the picture needs: kind, children, sums, items below. */
function nodesOf(explained) {
  const nodes = explained.map((node, index) => ({ ...node, index, children: [], sum: 0, known: true, ranks: [] }));
  for (const node of nodes) {
    const above = node.parent === null ? null : nodes[node.parent];
    if (above) above.children.push(node);
    node.known = node.log_prob !== null && (!above || above.known);
    node.sum = node.known ? node.log_prob + (above ? above.sum : 0) : null;
  }
  for (const node of nodes) {
    if (node.rank === null) continue;
    for (let at = node; at; at = at.parent === null ? null : nodes[at.parent]) at.ranks.push(node.rank);
  }
  for (const node of nodes) node.kind = node.origin === "draft" && node.ranks.length ? "verified" : node.origin;
  return nodes;
}

const best = (node) => Math.min(...node.ranks, 1e9);
const inOrder = (one, other) => best(one) - best(other) || one.code - other.code;

/** Sets the places: leaves side by side, the best items first, parents above the middle of their children.
 * Returns the number of leaves. */
function place(top) {
  let leaves = 0;
  top.sort(inOrder);
  const walk = (node) => {
    node.children.sort(inOrder);
    if (!node.children.length) {
      node.x = leaves;
      leaves += 1;
      return;
    }
    node.children.forEach(walk);
    node.x = (node.children[0].x + node.children[node.children.length - 1].x) / 2;
  };
  top.forEach(walk);
  return leaves;
}

function legend(nodes) {
  const found = Object.keys(KINDS).filter((kind) => nodes.some((node) => node.kind === kind));
  return element("div", { class: "legend" }, ...found.map((kind) => {
    const mark = svg("svg", { class: "swatch", viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("circle", { class: `node node-${kind}`, cx: 7, cy: 7, r: 5 }));
    const number = nodes.filter((node) => node.kind === kind).length;
    return element("span", {}, mark, `${KINDS[kind]} `, element("b", { text: count(number) }));
  }));
}

function said(node, slate) {
  const parts = [`level ${node.level}, code ${node.code}: ${KINDS[node.kind]}`];
  if (node.round) parts.push(`scored in forward pass ${node.round}`);
  if (node.log_prob !== null) parts.push(`log-probability ${node.log_prob.toFixed(3)}`);
  if (node.sum !== null && node.level) parts.push(`sum ${node.sum.toFixed(3)}`);
  const below = [...node.ranks].sort((one, other) => one - other);
  const items = below.slice(0, 3).map((rank) => `#${rank} ${nameOf(slate[rank - 1])}`);
  if (items.length) parts.push(`${node.rank === null ? "leads to " : ""}${items.join(", ")}${below.length > 3 ? ` and ${below.length - 3} more` : ""}`);
  return parts.join(" · ");
}

/** Returns the picture of a tree, with a legend and a line about the chosen node.
 *
 * @param explanation The field of the response.
 * @param slate The item ids of the slate, best first.
 */
export function treeView(explanation, slate) {
  if (!explanation.tree.length) return empty("The model took no part in this slate, so there is no tree.");
  const nodes = nodesOf(explanation.tree);
  const top = nodes.filter((node) => node.parent === null);
  const leaves = place(top);
  const depth = Math.max(...nodes.map((node) => node.level)) + 1;
  const width = Math.max(leaves * STEP + 76, 300);
  const height = depth * LEVEL + 44;
  const x = (node) => 60 + node.x * STEP;
  const y = (level) => 18 + (level + 1) * LEVEL;
  const rootX = Math.min(60 + ((leaves - 1) * STEP) / 2, Math.max(x(top[0]), 300));
  const label = `Search tree with ${nodes.length} prefixes on ${depth} levels. Arrow keys move between them.`;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (let level = 0; level < depth; level += 1) picture.append(svg("text", { class: "level", x: 0, y: y(level) + 4, text: `level ${level}` }));
  for (const node of nodes) {
    const [fromX, fromY] = node.parent === null ? [rootX, 18] : [x(nodes[node.parent]), y(node.level - 1)];
    const middle = (fromY + y(node.level)) / 2;
    const kind = node.kind === "repair" ? "fixed" : node.ranks.length ? "on" : "";
    picture.append(svg("path", { class: `edge ${kind}`, d: `M${fromX} ${fromY}C${fromX} ${middle} ${x(node)} ${middle} ${x(node)} ${y(node.level)}` }));
  }
  picture.append(svg("circle", { class: "node-root", cx: rootX, cy: 18, r: 4 }));
  const marks = nodes.map((node) => {
    const mark = svg("circle", { class: `node node-${node.kind}`, cx: x(node), cy: y(node.level), r: RADIUS });
    if (node.rank !== null) picture.append(svg("text", { class: "leaf", x: x(node), y: y(node.level) + 19, text: String(node.rank) }));
    return mark;
  });
  picture.append(...marks);

  const detail = element("p", { class: "detail", "aria-live": "polite", text: "Point at a node, or move with the arrow keys. Numbers are ranks in the slate." });
  const scroll = element("div", { class: "tree", tabindex: "0", role: "group", "aria-label": label }, picture);
  let chosen = null;
  const choose = (node) => {
    if (chosen) marks[chosen.index].classList.remove("chosen");
    chosen = node;
    marks[node.index].classList.add("chosen");
    detail.textContent = said(node, slate);
  };
  marks.forEach((mark, index) => {
    mark.addEventListener("pointerenter", () => choose(nodes[index]));
    mark.addEventListener("click", () => choose(nodes[index]));
  });
  scroll.addEventListener("keydown", (event) => {
    const next = moved(event.key, chosen, nodes, top);
    if (!next) return;
    event.preventDefault();
    choose(next);
    const at = x(next) - scroll.clientWidth / 2;
    if (Math.abs(scroll.scrollLeft - at) > scroll.clientWidth / 2 - 40) scroll.scrollLeft = at;
  });
  const parts = [legend(nodes), scroll, detail];
  if (explanation.tree_omitted) parts.push(element("p", { class: "hint", text: `${plural(explanation.tree_omitted, "less likely prefix").replace("prefixs", "prefixes")} are not drawn.` }));
  return element("div", {}, ...parts);
}

function moved(key, from, nodes, top) {
  if (!key.startsWith("Arrow")) return null;
  if (!from) return top[0];
  if (key === "ArrowUp") return from.parent === null ? null : nodes[from.parent];
  if (key === "ArrowDown") return from.children[0] || null;
  const row = nodes.filter((node) => node.level === from.level).sort((one, other) => one.x - other.x);
  return row[row.indexOf(from) + (key === "ArrowRight" ? 1 : -1)] || null;
}
