// Server-sent events by fetch, because an EventSource cannot send an API key.

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// The response to a call. Throws Refused with the server's sentence.
export async function ask(url, options = {}) {
  const response = await fetch(url, { cache: "no-store", ...options });
  if (response.ok) return response;
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error ?? text;
  } catch {
    // A proxy's answer is no JSON.
  }
  throw new Refused(response.status, text);
}

// [name, data] of each event, until the stream ends.
export async function* events(url, options) {
  const reader = (await ask(url, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      yield [fields.event, JSON.parse(fields.data)];
    }
  }
}
