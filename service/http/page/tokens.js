// Random tokens of a seed, as the bytes of a datatype.

// Normal numbers, the same for the same seed (mulberry32, Box and Muller).
export function normals(count, seed) {
  const next = uniform(seed);
  return Float32Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - next()));
    return radius * Math.cos(2 * Math.PI * next());
  });
}

// `count` times `size` distinct numbers below `end`, and weights that sum to 1.
export function randomRouting(count, size, end, seed) {
  const next = uniform(seed ^ 0x5bd1e995);
  const ids = [];
  const weights = [];
  for (let token = 0; token < count; token += 1) {
    const chosen = new Set();
    while (chosen.size < size) chosen.add(Math.floor(next() * end));
    const parts = [...chosen].map(() => 0.1 + next());
    const sum = parts.reduce((all, part) => all + part, 0);
    ids.push([...chosen]);
    weights.push(parts.map((part) => part / sum));
  }
  return { topk_ids: ids, topk_weights: weights };
}

export const BYTES = { FP32: 4, BF16: 2, FP16: 2 };

// Float32Array -> bytes, rounded to nearest even.
export function encoded(values, datatype) {
  if (datatype === "FP32") return new Uint8Array(values.buffer);
  const bits = new Uint32Array(values.buffer);
  const round = datatype === "BF16" ? toBf16 : toFp16;
  return new Uint8Array(Uint16Array.from(bits, round).buffer);
}

const toBf16 = (bits) => (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;

// Of values as `normals` has them, which FP16 can hold; the smallest become 0.
function toFp16(bits) {
  const sign = (bits >>> 16) & 0x8000;
  const exponent = ((bits >>> 23) & 0xff) - 112;
  if (exponent <= 0) return sign;
  const rest = (exponent << 23) | (bits & 0x7fffff);
  return sign | ((rest + 0xfff + ((rest >>> 13) & 1)) >>> 13);
}

function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
