// What happened between snapshots, whose counts are sums since the server's start.

export const KEPT_SECONDS = 300;
const FIRST_SECONDS = 60;
const NOW_SECONDS = 5;

const COUNTS = {
  tokens: (model) => model.steps.tokens,
  steps: (model) => model.steps.steps,
  stepSeconds: (model) => model.steps.seconds,
  flops: (model) => model.steps.flops,
  bytes: (model) => model.steps.bytes,
  requests: (model) => model.requests.success + model.requests.failure,
};

export class History {
  points = []; // { time, seconds, models: name -> counts, ranks, experts }, the latest one last
  #last = null;
  #numLanes;

  // numLanes: steps that run at the same time
  constructor(numLanes = 1) {
    this.#numLanes = numLanes;
  }

  add(snapshot) {
    const before = this.#last;
    this.#last = snapshot;
    if (before === null || isOlder(snapshot, before)) return;
    const seconds = snapshot.time - before.time;
    const models = {};
    for (const [name, model] of Object.entries(snapshot.models)) {
      models[name] = between(before.models[name], model);
    }
    const ranks = snapshot.ranks.map((rank, number) => ({
      tokens: rank.expert_tokens - (before.ranks[number]?.expert_tokens ?? 0),
      busySeconds: rank.seconds - (before.ranks[number]?.seconds ?? 0),
    }));
    const refused = [
      ...Object.keys(models).map((name) => [name, models[name].refused]),
      ["", reasons(before.not_served, snapshot.not_served)],
    ];
    const experts = snapshot.experts.model === before.experts.model && {
      model: snapshot.experts.model,
      tokens: snapshot.experts.tokens.map((tokens, expert) => tokens - before.experts.tokens[expert]),
    };
    this.points.push({ time: snapshot.time, seconds, models, ranks, refused, experts });
    spread(this.points, (point) => Object.values(point.models), this.#numLanes);
    ranks.forEach((_, number) => spread(this.points, (point) => point.ranks.slice(number, number + 1), 1));
    while (this.points[0].time <= snapshot.time - KEPT_SECONDS) this.points.shift();
  }

  // The seconds that are drawn: a minute until there is more.
  get span() {
    const seen = this.points.length ? this.points.at(-1).time - this.points[0].time : 0;
    return seen > FIRST_SECONDS ? KEPT_SECONDS : FIRST_SECONDS;
  }

  get now() {
    const end = this.points.at(-1)?.time;
    return this.points.filter((point) => point.time > end - NOW_SECONDS);
  }
}

// The counts of a layer, or of all ("") together, over some points.
export function total(points, name) {
  const sum = { seconds: 0, busySeconds: 0, queueTokens: 0, queueRequests: 0, refusals: 0, bySeconds: [] };
  for (const count of Object.keys(COUNTS)) sum[count] = 0;
  for (const point of points) {
    sum.seconds += point.seconds;
    const models = name ? [point.models[name]] : Object.values(point.models);
    for (const model of models) {
      for (const count of Object.keys(COUNTS)) sum[count] += model[count];
      sum.busySeconds += model.busySeconds;
      sum.refusals += Object.values(model.refused).reduce((all, number) => all + number, 0);
      model.bySeconds.forEach((number, place) => {
        sum.bySeconds[place] = (sum.bySeconds[place] ?? 0) + number;
      });
    }
  }
  for (const model of name ? [points.at(-1)?.models[name]] : Object.values(points.at(-1)?.models ?? {})) {
    sum.queueTokens += model?.queueTokens ?? 0;
    sum.queueRequests += model?.queueRequests ?? 0;
  }
  return sum;
}

// A step is counted at its end: what does not fit into the last point was spent before it.
function spread(points, entriesOf, numLanes) {
  for (let at = points.length - 1; at >= 0; at -= 1) {
    const entries = entriesOf(points[at]);
    const all = entries.reduce((sum, entry) => sum + entry.busySeconds, 0);
    const over = all - numLanes * points[at].seconds;
    if (!(over > 0)) return;
    const before = at ? entriesOf(points[at - 1]) : [];
    entries.forEach((entry, number) => {
      const moved = (over * entry.busySeconds) / all;
      entry.busySeconds -= moved;
      if (before[number]) before[number].busySeconds += moved;
    });
  }
}

function between(before, after) {
  const counts = { queueTokens: after.queue.tokens, queueRequests: after.queue.requests };
  for (const [count, of] of Object.entries(COUNTS)) counts[count] = of(after) - of(before);
  counts.busySeconds = counts.stepSeconds;
  counts.bySeconds = after.requests.by_seconds.map((n, place) => n - before.requests.by_seconds[place]);
  counts.refused = reasons(before.requests.refused, after.requests.refused);
  return counts;
}

function reasons(before, after) {
  const grown = Object.entries(after).map(([reason, number]) => [reason, number - (before[reason] ?? 0)]);
  return Object.fromEntries(grown.filter(([, number]) => number > 0));
}

// Whether counts went back: the server was started again.
function isOlder(snapshot, before) {
  return (
    snapshot.time <= before.time ||
    Object.keys(snapshot.models).some(
      (name) => !before.models[name] || COUNTS.requests(snapshot.models[name]) < COUNTS.requests(before.models[name]) ||
        COUNTS.steps(snapshot.models[name]) < COUNTS.steps(before.models[name]),
    )
  );
}
