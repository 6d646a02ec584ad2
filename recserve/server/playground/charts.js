// Small SVG charts with axes and units: lines over time, bars, and dots with whiskers.

import { count, element, svg } from "./dom.js";

const WIDTH = 460;
const HEIGHT = 170;
const LEFT = 52;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 30;
const wide = WIDTH - LEFT - RIGHT;
const high = HEIGHT - TOP - BOTTOM;

/** Returns a round number at or above a value. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function canvas(label, width = WIDTH, height = HEIGHT) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

function axes(picture, most, bottom) {
  for (const share of [0, 0.5, 1]) {
    const y = TOP + high * (1 - share);
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    picture.append(svg("text", { class: "end", x: LEFT - 6, y: y + 4, text: count(most * share) }));
  }
  for (const [x, text, kind] of bottom) picture.append(svg("text", { class: kind, x, y: HEIGHT - 9, text }));
}

/** Returns a chart of lines over the last minutes.
 *
 * @param samples Objects with `at` in milliseconds, oldest first.
 * @param lines Pairs of a name and a function that reads a sample; a value that is not finite breaks the line.
 * @param unit Unit of the values, for the description.
 */
export function lineChart(samples, lines, unit, minutes = 10) {
  const now = samples.length ? samples[samples.length - 1].at : 0;
  const span = minutes * 60e3;
  const values = samples.flatMap((sample) => lines.map(([, read]) => read(sample))).filter(Number.isFinite);
  const most = ceiling(Math.max(0, ...values));
  const last = lines.map(([name, read]) => {
    const value = samples.length ? read(samples[samples.length - 1]) : NaN;
    return `${name} ${Number.isFinite(value) ? count(value) : "none"} ${unit}`;
  });
  const picture = canvas(`${last.join(", ")} now; the last ${minutes} minutes`);
  axes(picture, most, [[LEFT, `${minutes} min ago`, ""], [WIDTH - RIGHT, "now", "end"]]);
  lines.forEach(([, read], number) => {
    let path = "";
    let run = [];
    const close = () => {
      // A value between two gaps is a point, so that it can be seen.
      if (run.length === 1) picture.append(svg("circle", { class: "point", cx: run[0][0], cy: run[0][1], r: 3 }));
      else if (run.length) path += `M${run.map((place) => place.join(" ")).join("L")}`;
      run = [];
    };
    for (const sample of samples) {
      const value = read(sample);
      const x = LEFT + wide * (1 - (now - sample.at) / span);
      if (Number.isFinite(value) && x >= LEFT) run.push([x.toFixed(1), (TOP + high * (1 - value / most)).toFixed(1)]);
      else close();
    }
    close();
    if (path) picture.append(svg("path", { class: `line-${number}`, "stroke-linecap": "round", d: path }));
  });
  const keys = lines.length > 1 ? element("div", { class: "legend" }, ...lines.map(([name], number) => element("span", {}, element("i", { class: `line-key-${number}` }), name))) : null;
  return element("div", {}, picture, ...(keys ? [keys] : []));
}

/** Returns a bar chart. `pairs` are labels and values. */
export function barChart(pairs, unit, below) {
  const most = ceiling(Math.max(0, ...pairs.map(([, value]) => value)));
  const picture = canvas(`${unit} by ${below}: ${pairs.map(([label, value]) => `${label}: ${count(value)}`).join(", ")}`, WIDTH, HEIGHT + 14);
  axes(picture, most, []);
  const step = wide / Math.max(pairs.length, 6);
  const every = Math.ceil(pairs.length / 16);
  pairs.forEach(([label, value], at) => {
    const height = Math.max((high * value) / most, value ? 1 : 0);
    const bar = svg("rect", { class: "bar", x: LEFT + at * step + step * 0.16, y: TOP + high - height, width: step * 0.68, height, rx: Math.min(3, height / 2) });
    bar.append(svg("title", { text: `${below} ${label}: ${count(value)} ${unit}` }));
    picture.append(bar);
    if (at % every === 0) picture.append(svg("text", { class: "middle", x: LEFT + (at + 0.5) * step, y: HEIGHT - 13, text: label }));
  });
  picture.append(svg("text", { class: "middle", x: LEFT + wide / 2, y: HEIGHT + 8, text: `${below} (bars: ${unit})` }));
  return element("div", { class: "barchart" }, picture);
}

/** Returns dots with whiskers, one row per entry {name, value, low, high, none}.
 *
 * A whisker without an upper end runs to the edge and has no cap there. `none` is shown without a value.
 */
export function whiskerChart(rows, unit) {
  const left = 128;
  const room = WIDTH - left - 22;
  const values = rows.flatMap((row) => [row.value, row.low, row.high]).filter(Number.isFinite);
  const most = ceiling(Math.max(0, ...values) * 1.02);
  const height = 20 + rows.length * 30 + 30;
  const said = rows.map((row) => {
    if (!Number.isFinite(row.value)) return `${row.name}: ${row.none}`;
    return `${row.name} ${count(row.value)} ${unit}, interval from ${count(row.low)}${Number.isFinite(row.high) ? ` to ${count(row.high)}` : ""}`;
  }).join("; ");
  const picture = canvas(said, WIDTH, height);
  const x = (value) => left + (room * value) / most;
  for (const share of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "axis", x1: x(most * share), x2: x(most * share), y1: 8, y2: height - 28 }));
    picture.append(svg("text", { class: share === 1 ? "end" : "middle", x: share === 1 ? WIDTH : x(most * share), y: height - 10, text: `${count(most * share)} ${unit}` }));
  }
  rows.forEach((row, at) => {
    const y = 24 + at * 30;
    const name = String(row.name);
    picture.append(svg("text", { x: 0, y: y + 4, text: name.length > 18 ? `${name.slice(0, 17)}…` : name }));
    if (Number.isFinite(row.low)) {
      picture.append(svg("line", { class: "whisker", x1: x(row.low), x2: x(Number.isFinite(row.high) ? row.high : most), y1: y, y2: y }));
      for (const end of [row.low, row.high].filter(Number.isFinite)) picture.append(svg("line", { class: "whisker", x1: x(end), x2: x(end), y1: y - 4, y2: y + 4 }));
    }
    if (Number.isFinite(row.value)) picture.append(svg("circle", { class: "point", cx: x(row.value), cy: y, r: 4.5 }));
    else picture.append(svg("text", { class: "none", x: left + 8, y: y + 4, text: row.none }));
  });
  return picture;
}
