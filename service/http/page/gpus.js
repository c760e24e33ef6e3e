// What the driver says of a GPU, as a text.

import { digits, percent, scaled } from "./units.js";

export function gpuText(gpu) {
  if (!gpu) return "";
  const parts = [];
  if (gpu.power_watts) parts.push(`${digits(gpu.power_watts)} of ${digits(gpu.power_limit_watts)} W`);
  if (gpu.sm_clock_hertz) parts.push(scaled(gpu.sm_clock_hertz, "Hz"));
  if (gpu.temperature_celsius) parts.push(`${digits(gpu.temperature_celsius)} °C`);
  if (gpu.busy_ratio !== undefined) parts.push(`busy ${percent(gpu.busy_ratio)}`);
  if (gpu.throttled) parts.push(`held down by ${gpu.throttled.join(", ")}`);
  return parts.join(", ");
}
