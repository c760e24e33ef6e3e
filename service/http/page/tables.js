// The tables of layers, ranks and refusals.

import { gpuText } from "./gpus.js";
import { total } from "./history.js";
import { REASONS } from "./reasons.js";
import { clock, digits, percent, quantile, scaled, seconds } from "./units.js";

const KEPT_REFUSALS = 100;

function cell(text, kind = "") {
  const made = document.createElement("td");
  made.className = kind;
  made.textContent = text;
  return made;
}

// Layers, whose buttons choose what the page shows.
export class Layers {
  #rows = new Map();

  constructor(body, server, choose) {
    const names = Object.keys(server.models);
    for (const name of names.length > 1 ? ["", ...names] : names) {
      const row = body.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name || "all layers";
      button.addEventListener("click", () => choose(name));
      head.append(button);
      row.append(head);
      this.#rows.set(name, { row, button });
    }
  }

  show(history, snapshot, server, chosen) {
    for (const [name, { row, button }] of this.#rows) {
      button.setAttribute("aria-pressed", String(name === chosen));
      const sum = total(history.now, name);
      const { why_not_ready: why, unloaded } = name ? snapshot.models[name] : snapshot;
      const state = unloaded
        ? cell("unloaded", "wait-text")
        : cell(why === null ? "ready" : "not ready", why === null ? "good-text" : "bad-text");
      state.title = why ?? "";
      const { num_experts: experts, top_k: topK } = server.models[name] ?? {};
      const latency = (part) => seconds(quantile(part, server.bounds_seconds, sum.bySeconds));
      const texts = [
        name ? `${topK} of ${experts}` : "",
        scaled(sum.tokens / sum.seconds, ""),
        scaled(sum.requests / sum.seconds, ""),
        latency(0.5),
        latency(0.99),
        sum.steps ? seconds(sum.stepSeconds / sum.steps) : "–",
        digits(sum.tokens / sum.steps),
        percent(sum.busySeconds / sum.seconds),
        scaled(sum.queueTokens, ""),
      ];
      const refused = cell(digits(sum.refusals / sum.seconds), sum.refusals ? "number bad-text" : "number");
      while (row.cells.length > 1) row.deleteCell(-1); // the button stays: if it moved, it would lose the focus
      row.append(state, ...texts.map((text) => cell(text, "number")), refused);
    }
  }
}

export function showRanks(section, history, { ranks, gpus }) {
  section.hidden = !ranks.length;
  const body = section.querySelector("tbody");
  const points = history.now;
  const rates = ranks.map((_, number) => {
    const sum = { tokens: 0, busySeconds: 0, seconds: 0 };
    for (const point of points) {
      sum.seconds += point.seconds;
      sum.tokens += point.ranks[number]?.tokens ?? 0;
      sum.busySeconds += point.ranks[number]?.busySeconds ?? 0;
    }
    return sum;
  });
  const all = rates.reduce((sum, rank) => sum + rank.tokens, 0);
  body.replaceChildren(
    ...ranks.map((rank, number) => {
      const row = document.createElement("tr");
      const { tokens, busySeconds, seconds: span } = rates[number];
      const share = cell("");
      const bar = document.createElement("span");
      bar.className = "bar";
      const filled = document.createElement("i");
      filled.style.width = `${all ? (100 * tokens) / all : 0}%`;
      bar.append(filled);
      share.append(bar, `${scaled(tokens / span, "")}, ${percent(all ? tokens / all : 0)}`);
      const memory = rank.memory_bytes;
      row.append(
        cell(String(number)),
        cell(rank.up ? "up" : "down", rank.up ? "good-text" : "bad-text"),
        share,
        cell(percent(busySeconds / span), "number"),
        cell(String(rank.starts), "number"),
        cell(memory ? `${scaled(memory[0], "B")} of ${scaled(memory[1], "B")}` : "–", "number"),
        cell(gpuText(gpus[number]) || "–"),
      );
      return row;
    }),
  );
}

// The last refusals of each second, the latest one first, and all since the server's start.
export function addRefusals(body, point) {
  for (const [model, refused] of point?.refused ?? []) {
    for (const [reason, number] of Object.entries(refused)) {
      const row = body.insertRow(0);
      const why = cell(reason);
      const text = document.createElement("small");
      text.textContent = `${model || "not served"}: ${REASONS[reason] ?? "a new reason"}`;
      why.append(text);
      row.append(cell(clock(point.time)), why, cell(String(number), "number"));
    }
  }
  while (body.rows.length > KEPT_REFUSALS) body.deleteRow(-1);
}

export function refusedSinceStart(snapshot) {
  const sums = {};
  for (const refused of [...Object.values(snapshot.models).map((model) => model.requests.refused), snapshot.not_served]) {
    for (const [reason, number] of Object.entries(refused)) sums[reason] = (sums[reason] ?? 0) + number;
  }
  const parts = Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([reason, number]) => `${reason} ${number}`);
  return parts.length ? `Since the server's start: ${parts.join(", ")}.` : "None since the server's start.";
}
