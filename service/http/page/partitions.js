// The GPU's SMs by partition, and the form that replaces the partitions.

const NUM_COLOURS = 8;
const MOST_NAMES = 3; // of layers in a partition
const byId = (id) => document.getElementById(id);

export class PartitionControl {
  #now; // as the server says; null: the device has no SMs
  #isChanged = false;
  #send;

  // send: puts partitions, name -> SMs, and returns the server's answer
  constructor(send) {
    this.#send = send;
    byId("partitions").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("partitions").addEventListener("input", () => {
      this.#isChanged = true;
      this.#sum();
    });
    byId("partition-add").addEventListener("click", () => {
      this.#isChanged = true;
      const row = this.#addRow("", this.#now?.granularity ?? 8);
      row.querySelector("input").focus();
      this.#sum();
    });
    byId("partition-reset").addEventListener("click", () => {
      this.#reset();
      byId("partitions-answer").textContent = "";
    });
  }

  // partitions: as GET /v1/partitions, or { error }; users: partition -> layers that run in it; gpu: its text
  show(partitions, users, device, gpu) {
    const isFirst = this.#now === undefined;
    const isNew = JSON.stringify(partitions) !== JSON.stringify(this.#now);
    this.#now = partitions;
    byId("gpu-text").textContent = [device, gpu].filter(Boolean).join(" · ");
    byId("partitions-note").textContent = partitions?.error ?? (partitions ? "" : "This device has no SMs to partition.");
    byId("partitions").hidden = !partitions?.total_sms;
    if (!isNew) return;
    this.#draw(users);
    if (isFirst || !this.#isChanged) this.#reset();
  }

  #draw(users) {
    const { total_sms: total = 0, partitions = {} } = this.#now ?? {};
    const strip = byId("sms");
    const legend = byId("partition-legend");
    strip.replaceChildren();
    legend.replaceChildren();
    const sizes = Object.entries(partitions).map(([name, { num_sms: granted }]) => [name, granted]);
    const free = total - sizes.reduce((sum, [, granted]) => sum + granted, 0);
    const parts = free > 0 ? [...sizes, [null, free]] : sizes;
    parts.forEach(([name, granted], number) => {
      const kind = name === null ? "" : `c${number % NUM_COLOURS}`;
      for (let sm = 0; sm < granted; sm += 1) {
        const cell = document.createElement("i");
        cell.className = kind;
        strip.append(cell);
      }
      const entry = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = `swatch ${kind}`;
      const { requested_sms: requested } = partitions[name] ?? {};
      const asked = requested && requested !== granted ? ` (${requested} requested)` : "";
      const layers = users[name] ?? [];
      const of = layers.length > MOST_NAMES ? `: ${layers.length} layers` : layers.length ? `: ${layers.join(", ")}` : "";
      entry.append(swatch, `${name ?? "in no partition"} ${granted} SMs${asked}${of}`);
      legend.append(entry);
    });
    const text = parts.map(([name, granted]) => `${granted} in ${name ?? "no partition"}`).join(", ");
    strip.setAttribute("aria-label", total ? `${total} SMs: ${text}` : "no SMs to partition");
    strip.hidden = !total;
  }

  #reset() {
    this.#isChanged = false;
    byId("partition-rows").replaceChildren();
    const partitions = Object.entries(this.#now?.partitions ?? {});
    for (const [name, { requested_sms: requested }] of partitions) this.#addRow(name, requested);
    if (!partitions.length) this.#addRow("compute", this.#now?.granularity ?? 8);
    this.#sum();
  }

  #addRow(name, sms) {
    const row = document.createElement("div");
    row.className = "partition-row";
    const [text, number] = [document.createElement("input"), document.createElement("input")];
    Object.assign(text, { type: "text", value: name, required: true, maxLength: 64 });
    text.setAttribute("aria-label", "partition's name");
    Object.assign(number, { type: "number", value: sms, min: 1, max: this.#now?.total_sms ?? "", required: true });
    number.setAttribute("aria-label", `SMs of the partition`);
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "Remove" });
    remove.addEventListener("click", () => {
      row.remove();
      this.#isChanged = true;
      this.#sum();
      byId("partition-add").focus();
    });
    row.append(text, number, " SMs", remove);
    byId("partition-rows").append(row);
    return row;
  }

  #wanted() {
    const rows = [...byId("partition-rows").children].map((row) => [...row.querySelectorAll("input")]);
    return rows.map(([text, number]) => [text.value, number.valueAsNumber]);
  }

  #sum() {
    const { granularity = 1, total_sms: total } = this.#now ?? {};
    const sum = this.#wanted().reduce((all, [, sms]) => all + Math.ceil(sms / granularity) * granularity, 0);
    const text = total ? `${sum} of ${total} SMs, in units of ${granularity}` : "";
    byId("partition-sum").textContent = text;
  }

  async #submit() {
    const answer = byId("partitions-answer");
    const names = this.#wanted().map(([name]) => name);
    if (new Set(names).size < names.length) {
      answer.className = "bad-text";
      answer.textContent = "Expected different names.";
      return;
    }
    byId("partition-apply").disabled = true;
    answer.className = "quiet";
    answer.textContent = "waiting for the present step";
    try {
      const partitions = await this.#send(Object.fromEntries(this.#wanted()));
      this.#isChanged = false;
      const granted = Object.entries(partitions.partitions).map(([name, { num_sms: sms }]) => `${name} ${sms}`);
      answer.className = "good-text";
      answer.textContent = granted.length ? `Granted: ${granted.join(", ")} SMs.` : "There are no partitions now.";
    } catch (error) {
      answer.className = "bad-text";
      answer.textContent = error.message;
    } finally {
      byId("partition-apply").disabled = false;
    }
  }
}
