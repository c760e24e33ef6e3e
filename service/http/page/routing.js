// Draws which experts the tokens of a request go to.

import { digits } from "./units.js";

const [LEAST_WIDTH, HEIGHT, EDGE, LABEL, NAMES] = [260, 220, 14, 25, 40]; // pixels; NAMES: of the axes

function made(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Tokens above, experts below, and a line for each choice, as strong as its weight.
export function drawRouting(place, { topk_ids: ids, topk_weights: weights }, numExperts) {
  const label = `${ids.length} tokens and the experts, of ${numExperts}, that each goes to`;
  const all = Math.max(LEAST_WIDTH, place.clientWidth);
  const svg = made("svg", { viewBox: `0 0 ${all} ${HEIGHT}`, role: "img", "aria-label": label });
  const across = (number, count) => NAMES + ((number + 0.5) * (all - NAMES - EDGE)) / count;
  const [top, bottom] = [24, HEIGHT - 36];
  const max = Math.max(...weights.flat(), 1e-9);
  const counts = new Array(numExperts).fill(0);
  ids.forEach((row, token) =>
    row.forEach((expert, slot) => {
      if (expert < 0) return;
      counts[expert] += 1;
      const [from, to] = [across(token, ids.length), across(expert, numExperts)];
      const middle = (top + bottom) / 2;
      const d = `M${from} ${top}C${from} ${middle} ${to} ${middle} ${to} ${bottom}`;
      const opacity = (0.12 + 0.88 * Math.max(0, weights[token][slot] / max)).toFixed(2);
      svg.append(made("path", { d, class: "edge", "stroke-opacity": opacity }));
    }),
  );
  const tokenEvery = Math.ceil((ids.length * LABEL) / all);
  ids.forEach((_, token) => {
    const cx = across(token, ids.length);
    svg.append(made("circle", { cx, cy: top, r: 4, class: "token" }));
    if (token % tokenEvery === 0) svg.append(named(String(token), cx, top - 10));
  });
  const width = Math.max(1, Math.min(14, (all - NAMES - EDGE) / numExperts - 1));
  const tallest = Math.max(...counts, 1);
  const expertEvery = Math.ceil((numExperts * LABEL) / all);
  counts.forEach((count, expert) => {
    const x = across(expert, numExperts) - width / 2;
    const height = 3 + (15 * count) / tallest;
    svg.append(made("rect", { x, y: bottom, width, height, class: count ? "expert used" : "expert" }));
    if (expert % expertEvery === 0) svg.append(named(String(expert), x + width / 2, HEIGHT - 4));
  });
  svg.append(named("token", 0, top - 10, "axis-name"), named("expert", 0, HEIGHT - 4, "axis-name"));
  place.replaceChildren(svg);
  return counts;
}

function named(text, x, y, kind = "") {
  const element = made("text", { x, y, class: kind });
  element.textContent = text;
  return element;
}

export function tabulate(body, { topk_ids: ids, topk_weights: weights }) {
  body.replaceChildren();
  ids.forEach((row, token) => {
    const line = body.insertRow();
    line.insertCell().textContent = token;
    line.insertCell().textContent = row.map((expert, slot) => `${expert} (${digits(weights[token][slot])})`).join(", ");
  });
}
