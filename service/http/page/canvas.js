// Drawing in device pixels, with the colours of the style sheet.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The context of a canvas whose units are CSS pixels, cleared, and its width and height in them.
export function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

// "#rrggbb" -> [r, g, b]
export const channels = (hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
