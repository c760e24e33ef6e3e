// Load of each expert over time: a row for each expert, a column for each second.

import { channels, colour } from "./canvas.js";
import { clock, counted, digits } from "./units.js";

const MOST_SECONDS = 5; // that a snapshot stands for; a longer time was not watched
const STOPS = [[0, "--heat-0"], [1, "--heat-1"], [2, "--heat-2"], [4, "--heat-4"]]; // times the mean

export class Heat {
  #canvas;
  #cell;
  #columns = []; // of the last seconds: tokens by expert, or null
  #end = 0;
  #at = null; // [column, expert] that is described

  constructor(canvas, cell) {
    this.#canvas = canvas;
    this.#cell = cell;
    canvas.addEventListener("pointermove", (event) => {
      const { left, top, width, height } = canvas.getBoundingClientRect();
      const across = Math.floor(((event.clientX - left) / width) * this.#columns.length);
      this.#describe(across, Math.floor(((event.clientY - top) / height) * canvas.height));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [across, expert] = this.#at ?? [this.#columns.length, 0];
      this.#describe(across + step[0], expert + step[1]);
    });
  }

  show({ points, span }, model, numExperts) {
    this.#columns = new Array(span).fill(null);
    this.#end = points.at(-1)?.time ?? 0;
    const sums = new Array(numExperts).fill(0);
    for (const { time, seconds, experts } of points) {
      if (!experts || experts.model !== model) continue;
      const place = span - 1 - Math.round(this.#end - time);
      if (place < 0) continue;
      this.#columns.fill(experts.tokens, Math.max(0, place + 1 - Math.min(MOST_SECONDS, Math.ceil(seconds))), place + 1);
      experts.tokens.forEach((tokens, expert) => (sums[expert] += tokens));
    }
    this.#draw(numExperts);
    const all = sums.reduce((sum, tokens) => sum + tokens, 0);
    const max = Math.max(...sums);
    const used = sums.filter((tokens) => tokens).length;
    const times = digits((max * numExperts) / all);
    const busiest = `busiest expert ${sums.indexOf(max)} at ${times} × mean, ${used} of ${numExperts} used`;
    this.#canvas.setAttribute("aria-label", all ? `${model}: ${busiest}` : `${model}: no tokens`);
    if (this.#at) this.#describe(...this.#at);
    return all ? busiest : "no tokens";
  }

  #draw(numExperts) {
    const stops = STOPS.map(([times, name]) => [times, channels(colour(name))]);
    const canvas = this.#canvas;
    canvas.width = this.#columns.length;
    canvas.height = numExperts;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, numExperts);
    this.#columns.forEach((tokens, column) => {
      const mean = tokens ? tokens.reduce((sum, each) => sum + each, 0) / tokens.length : 0;
      for (let expert = 0; expert < numExperts; expert += 1) {
        const place = 4 * (expert * canvas.width + column);
        const seen = mapped(stops, mean ? tokens[expert] / mean : 0);
        image.data.set([...seen, tokens ? 255 : 0], place);
      }
    });
    context.putImageData(image, 0, 0);
  }

  #describe(across, expert) {
    const at = [clamp(across, this.#columns.length), clamp(expert, this.#canvas.height)];
    this.#at = at;
    const tokens = this.#columns[at[0]];
    const time = clock(this.#end - (this.#columns.length - 1 - at[0]));
    const all = tokens ? tokens.reduce((sum, each) => sum + each, 0) : 0;
    const ratio = all ? `, ${digits((tokens[at[1]] * tokens.length) / all)} × mean` : "";
    const what = tokens ? `${counted(tokens[at[1]], "token")}${ratio}` : "not watched";
    this.#cell.textContent = `expert ${at[1]} at ${time}: ${what}`;
  }
}

export function drawScale(canvas) {
  const context = canvas.getContext("2d");
  const stops = STOPS.map(([times, name]) => [times, channels(colour(name))]);
  for (let across = 0; across < canvas.width; across += 1) {
    context.fillStyle = `rgb(${mapped(stops, (4 * across) / canvas.width).join(" ")})`;
    context.fillRect(across, 0, 1, canvas.height);
  }
}

const clamp = (value, end) => Math.max(0, Math.min(end - 1, value));

function mapped(stops, times) {
  const next = stops.findIndex(([at]) => times < at);
  if (next < 0) return stops.at(-1)[1];
  const [[from, low], [to, high]] = [stops[next - 1], stops[next]];
  return low.map((value, place) => Math.round(value + ((high[place] - value) * (times - from)) / (to - from)));
}
