// Numbers as people read them: three digits, and a prefix of SI.

const LARGE = ["", "k", "M", "G", "T", "P", "E"];

export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 99.95) return String(Math.round(value));
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

// 12345, "token" -> "12345 tokens"
export const counted = (value, what) => `${Math.round(value)} ${what}${Math.round(value) === 1 ? "" : "s"}`;

// 12345, "FLOP/s" -> "12.3 kFLOP/s"
export function scaled(value, unit) {
  let prefix = 0;
  while (Math.abs(value) >= 999.5 && prefix < LARGE.length - 1) {
    value /= 1000;
    prefix += 1;
  }
  return `${digits(value)} ${LARGE[prefix]}${unit}`.trimEnd();
}

export function seconds(value) {
  if (!(value >= 0)) return "–";
  if (value < 999.5e-6) return `${digits(value * 1e6)} µs`;
  return value < 0.9995 ? `${digits(value * 1e3)} ms` : `${digits(value)} s`;
}

export const percent = (part) => (Number.isFinite(part) ? `${digits(part * 100)} %` : "–");

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

// The value below which `part` of the counts lie, linear within a bucket, as Prometheus' histogram_quantile.
export function quantile(part, bounds, counts) {
  let wanted = part * counts.reduce((sum, count) => sum + count, 0);
  if (!wanted) return NaN;
  for (let place = 0; place < counts.length; place += 1) {
    if (wanted <= counts[place]) {
      const low = place ? bounds[place - 1] : 0;
      return place === bounds.length ? low : low + (bounds[place] - low) * (wanted / counts[place]);
    }
    wanted -= counts[place];
  }
  return bounds.at(-1);
}
