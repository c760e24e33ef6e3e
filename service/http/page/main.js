// Connects the page to the server's events.

import { Cards } from "./cards.js";
import { gpuText } from "./gpus.js";
import { drawScale, Heat } from "./heat.js";
import { History } from "./history.js";
import { PartitionControl } from "./partitions.js";
import { RequestForm } from "./request.js";
import { ask, events, Refused } from "./stream.js";
import { addRefusals, Layers, refusedSinceStart, showRanks } from "./tables.js";

const KEY = "expertd-key"; // in the storage of this tab
const [FIRST_PAUSE, LAST_PAUSE] = [500, 10_000]; // milliseconds before another try
const byId = (id) => document.getElementById(id);

let history = new History();
let server = null; // the first event of the stream
let snapshot = null;
let chosen = ""; // a layer; "": all
let layers = null;
let requests = null;
let stream = new AbortController();
let wake = () => {};

const cards = new Cards(byId("cards"));
const heat = new Heat(byId("heat"), byId("heat-cell"));
const partitions = new PartitionControl(async (sizes) => {
  const options = {
    method: "PUT",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify({ partitions: sizes }),
  };
  return (await ask("v1/partitions", options)).json();
});

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// The layer whose experts are watched.
const watched = () => chosen || Object.keys(server.models)[0];

function show() {
  if (snapshot === null) return;
  const { models } = server;
  layers.show(history, snapshot, server, chosen);
  byId("scope").textContent = chosen || "all layers";
  const span = history.span === 60 ? "minute" : `${history.span / 60} minutes`;
  byId("span").textContent = span;
  byId("heat-begin").textContent = history.span === 60 ? "1 min ago" : `${history.span / 60} min ago`;
  cards.show(history, chosen, server.bounds_seconds);
  const numExperts = models[watched()].num_experts;
  byId("heat-last").textContent = numExperts - 1;
  byId("heat-scope").textContent = `${watched()}: ${heat.show(history, watched(), numExperts)}`;
  drawScale(byId("heat-scale"));
  showRanks(byId("ranks-section"), history, snapshot);
  byId("refusals-total").textContent = refusedSinceStart(snapshot);
  const users = {};
  for (const [name, { partition }] of Object.entries(models)) {
    if (partition !== null) (users[partition] ??= []).push(name);
  }
  const gpu = snapshot.ranks.length ? "" : gpuText(snapshot.gpus[0]); // those of ranks are in their table
  partitions.show(snapshot.partitions, users, snapshot.device, gpu);
  byId("about").textContent = [`${server.version}`, snapshot.backend, snapshot.device].filter(Boolean).join(" · ");
}

function showState(text, kind) {
  const state = byId("state-text");
  if (state.textContent !== text) state.textContent = text; // else it would be read aloud each second
  byId("dot").className = `dot ${kind}`;
}

function choose(name) {
  const before = watched();
  chosen = name;
  requests.choose(watched());
  if (watched() !== before) reconnect();
  show();
}

function reconnect() {
  stream.abort();
  wake();
}

// Links to the pages of a pool's servers; this one is marked.
function showPeers(urls) {
  const links = urls.map((url) => {
    const link = document.createElement("a");
    link.href = url;
    link.textContent = link.host + (link.pathname === "/" ? "" : link.pathname);
    if (link.href === location.href) link.setAttribute("aria-current", "page");
    return link;
  });
  byId("peers").hidden = !links.length;
  byId("peers").replaceChildren("pool:", ...links);
}

function begin(event) {
  showPeers(event.peers);
  if (server !== null && JSON.stringify(event.models) === JSON.stringify(server.models)) {
    server = event;
    return;
  }
  server = event;
  history = new History(server.num_lanes);
  chosen = Object.keys(server.models).length > 1 ? "" : Object.keys(server.models)[0];
  byId("layers").tBodies[0].replaceChildren();
  layers = new Layers(byId("layers").tBodies[0], server, choose);
  requests = new RequestForm(server, headers);
}

function take(event) {
  snapshot = event;
  requests.isRouterHere = !event.ranks.length;
  const last = history.points.at(-1);
  history.add(event);
  if (history.points.at(-1) !== last) addRefusals(byId("refusals").tBodies[0], history.points.at(-1));
  const isReady = event.why_not_ready === null;
  showState(isReady ? "ready" : event.why_not_ready, isReady ? "good" : "");
  show();
}

async function watch() {
  stream = new AbortController();
  const query = server === null ? "" : `?model=${encodeURIComponent(watched())}`;
  for await (const [name, event] of events(`v1/live${query}`, { headers: headers(), signal: stream.signal })) {
    if (name === "server") begin(event);
    else take(event);
  }
}

async function run() {
  let pause = FIRST_PAUSE;
  for (;;) {
    const began = performance.now();
    try {
      await watch();
    } catch (error) {
      if (error instanceof Refused) {
        const isKey = error.status === 401 || error.status === 403;
        byId("key-form").hidden &&= !isKey;
        showState(error.message, "bad");
        if (isKey) pause = LAST_PAUSE;
      } else if (!stream.signal.aborted) showState("no connection: trying again", "bad");
    }
    if (stream.signal.aborted || performance.now() - began > LAST_PAUSE) pause = FIRST_PAUSE;
    if (!stream.signal.aborted) {
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, pause);
      });
      pause = Math.min(2 * pause, LAST_PAUSE);
    }
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  reconnect();
});
byId("key-form").hidden = sessionStorage.getItem(KEY) === null;
window.addEventListener("resize", show);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
run();
