// A figure now, and its line over the last minutes, for each of some quantities.

import { colour, prepared } from "./canvas.js";
import { total } from "./history.js";
import { counted, percent, quantile, scaled, seconds } from "./units.js";

const HEAD = 14; // pixels above the largest value, for the axis' text
const COLOURS = ["--accent", "--second"];
const rate = (count) => (sum) => sum[count] / sum.seconds;
const latency = (part) => (sum, bounds) => quantile(part, bounds, sum.bySeconds);

// lines: what is drawn of each point; now: the text; format: of the axis, whose top is `minTop` or more
const CARDS = [
  { title: "Tokens per second", lines: [rate("tokens")], now: (s) => scaled(rate("tokens")(s), "") },
  { title: "Requests per second", lines: [rate("requests")], now: (s) => scaled(rate("requests")(s), "") },
  {
    title: "Latency, log scale",
    lines: [latency(0.5), latency(0.99)],
    names: ["p50", "p99"],
    now: (s, b) => `${seconds(latency(0.5)(s, b))}, ${seconds(latency(0.99)(s, b))}`,
    format: seconds,
    isLogarithmic: true,
  },
  {
    title: "Time in steps",
    lines: [rate("busySeconds")],
    now: (s) => percent(rate("busySeconds")(s)),
    format: percent,
    minTop: 1,
  },
  { title: "Queued tokens", lines: [(s) => s.queueTokens], now: (s) => counted(s.queueTokens, "token"), format: (n) => scaled(Math.round(n), "") },
  {
    title: "GEMMs, idle time included",
    lines: [rate("flops")],
    now: (s) => scaled(rate("flops")(s), "FLOP/s"),
    more: (s) => scaled(rate("bytes")(s), "B/s"),
  },
];

export class Cards {
  #cards;

  constructor(place) {
    this.#cards = CARDS.map((card) => {
      const box = document.createElement("div");
      box.className = "card";
      const title = document.createElement("h3");
      title.textContent = card.title;
      card.names?.forEach((name, number) => {
        const swatch = document.createElement("span");
        swatch.className = `swatch line-${number}`;
        title.append(" ", swatch, name);
      });
      const text = document.createElement("p");
      const small = document.createElement("small");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      box.append(title, text, canvas);
      place.append(box);
      return { ...card, text, small, canvas };
    });
  }

  show(history, name, bounds) {
    const now = total(history.now, name);
    const each = history.points.map((point) => ({ time: point.time, sum: total([point], name) }));
    for (const card of this.#cards) {
      const text = now.seconds ? card.now(now, bounds) : "–";
      card.text.textContent = text;
      if (card.more && now.seconds) {
        card.small.textContent = `, ${card.more(now)}`;
        card.text.append(card.small);
      }
      const lines = card.lines.map((line) => each.map(({ time, sum }) => [time, line(sum, bounds)]));
      const max = draw(card, lines, history.span);
      card.canvas.setAttribute("aria-label", `${card.title}: now ${text}, at most ${max}`);
    }
  }
}

// Lines of [time, value] up to the latest time; returns the text of the largest value.
function draw({ canvas, minTop = 0, format = (value) => scaled(value, ""), isLogarithmic }, lines, span) {
  const { context, width, height } = prepared(canvas);
  const values = lines.flat().map(([, value]) => value).filter((value) => value > 0);
  const max = Math.max(0, ...values);
  const top = Math.max(max, minTop) || 1;
  const low = isLogarithmic ? Math.min(...values, top / 2) / 2 : 0;
  const bottom = height - 1;
  const part = (value) => (isLogarithmic ? Math.log(value / low) / Math.log(top / low) : value / top);
  const up = (value) => bottom - part(value) * (bottom - HEAD);
  const end = Math.max(...lines.flat().map(([time]) => time));
  const across = (time) => width - ((end - time) / span) * width;
  context.strokeStyle = colour("--line");
  context.strokeRect(-1, HEAD - 0.5, width + 2, height - HEAD);
  context.lineWidth = 1.5;
  lines.forEach((line, number) => {
    context.strokeStyle = colour(COLOURS[number]);
    context.beginPath();
    const isKnown = (at) => Number.isFinite(line[at]?.[1]);
    line.forEach(([time, value], at) => {
      if (!isKnown(at)) return;
      const [x, y] = [across(time), up(value)];
      if (isKnown(at - 1)) context.lineTo(x, y);
      else if (isKnown(at + 1)) context.moveTo(x, y);
      else { // no line would show it
        context.moveTo(x + 1, y);
        context.arc(x, y, 1, 0, 2 * Math.PI);
      }
    });
    context.stroke();
  });
  context.fillStyle = colour("--quiet");
  context.font = "11px system-ui, sans-serif";
  context.fillText(format(top), 0, HEAD - 4);
  return format(max);
}
