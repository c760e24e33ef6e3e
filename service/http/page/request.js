// The form that sends an infer request and shows the routing of its tokens.

import { drawRouting, tabulate } from "./routing.js";
import { ask } from "./stream.js";
import { BYTES, encoded, normals, randomRouting } from "./tokens.js";
import { counted, seconds } from "./units.js";

const MAX_BYTES = 64 * 1024; // of a call of /v1/models/{model}/routing
const byId = (id) => document.getElementById(id);

export class RequestForm {
  isRouterHere = true; // and not in the processes of several ranks
  #server;
  #headers;

  // headers: returns those with the API key
  constructor(server, headers) {
    this.#server = server;
    this.#headers = headers;
    byId("try-model").replaceChildren(...Object.keys(server.models).map((name) => new Option(name)));
    byId("try-model").onchange = () => this.#limit();
    byId("try").onsubmit = (event) => {
      event.preventDefault();
      this.#submit();
    };
    this.#limit();
  }

  choose(name) {
    byId("try-model").value = name;
    this.#limit();
  }

  #limit() {
    const { hidden_size: hidden, datatype } = this.#server.models[byId("try-model").value];
    const fits = Math.floor(MAX_BYTES / (hidden * BYTES[datatype]));
    const maxTokens = Math.max(1, Math.min(fits, this.#server.max_request_tokens));
    byId("try-tokens").max = maxTokens;
    byId("try-tokens").value = Math.min(byId("try-tokens").valueAsNumber || 1, maxTokens);
  }

  async #submit() {
    const answer = byId("try-answer");
    const button = byId("try").querySelector("button");
    button.disabled = true;
    answer.className = "quiet";
    try {
      answer.textContent = await this.#send();
    } catch (error) {
      answer.className = "bad-text";
      answer.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }

  async #send() {
    const name = byId("try-model").value;
    const model = this.#server.models[name];
    const [count, seed] = [byId("try-tokens").valueAsNumber, byId("try-seed").valueAsNumber];
    const rows = encoded(normals(count * model.hidden_size, seed), model.datatype);
    const isRandom = byId("try-routing").value === "random";
    let routing = isRandom ? randomRouting(count, model.top_k, model.num_experts, seed) : null;
    const { header, body } = isRandom ? withRouting(rows, model, routing) : { header: 0, body: rows };
    const path = encodeURIComponent(name);
    const began = performance.now();
    const answered = await ask(`v2/models/${path}/infer`, {
      method: "POST",
      headers: { ...this.#headers(), "Inference-Header-Content-Length": String(header) },
      body,
    });
    const bytes = (await answered.arrayBuffer()).byteLength;
    const took = (performance.now() - began) / 1e3;
    if (this.isRouterHere) routing ??= await this.#routed(path, rows);
    byId("routing-details").hidden = routing === null;
    byId("routing").replaceChildren();
    let experts = " What its router chose is known to the ranks alone.";
    if (routing !== null) {
      const counts = drawRouting(byId("routing"), routing, model.num_experts);
      tabulate(byId("routing-table").tBodies[0], routing);
      const used = counts.filter((number) => number).length;
      experts = ` ${used} of ${model.num_experts} experts, the busiest with ${Math.max(...counts)} of ${counted(count, "token")}.`;
    }
    return `Answered in ${seconds(took)}, ${counted(bytes, "byte")}.${experts}`;
  }

  async #routed(path, rows) {
    const options = { method: "POST", headers: this.#headers(), body: rows };
    return (await ask(`v1/models/${path}/routing`, options)).json();
  }
}

// A request with binary tensors: its JSON, then hidden states, experts and weights.
function withRouting(rows, { hidden_size: hidden, top_k: topK, datatype }, { topk_ids: ids, topk_weights: weights }) {
  const tensors = [
    ["hidden_states", datatype, hidden, rows],
    ["topk_ids", "INT32", topK, new Uint8Array(Int32Array.from(ids.flat()).buffer)],
    ["topk_weights", "FP32", topK, new Uint8Array(Float32Array.from(weights.flat()).buffer)],
  ];
  const inputs = tensors.map(([name, type, width, data]) => ({
    name, datatype: type, shape: [ids.length, width], parameters: { binary_data_size: data.length },
  }));
  const json = new TextEncoder().encode(JSON.stringify({ inputs, parameters: { binary_data_output: true } }));
  return { header: json.length, body: new Blob([json, ...tensors.map(([, , , data]) => data)]) };
}
