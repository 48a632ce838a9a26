/** The colours of load: blue below the mean, grey at the mean, orange to red above it. */

/** Loads, as multiples of the mean, at which a scale is drawn. */
export const SCALE_STOPS = [0, 0.5, 0.75, 1, 1.25, 1.5, 2, 3];

const LIGHT = [
  [20, 60, 130],
  [84, 134, 196],
  [160, 193, 226],
  [233, 233, 228],
  [247, 201, 138],
  [239, 145, 67],
  [208, 72, 38],
  [116, 12, 30],
];
const DARK = [
  [142, 190, 255],
  [76, 130, 206],
  [45, 82, 138],
  [44, 47, 54],
  [122, 78, 28],
  [190, 106, 30],
  [240, 130, 62],
  [255, 214, 165],
];
const UNKNOWN_COLOUR = { light: [255, 255, 255], dark: [16, 18, 22] };

/** Loads from this multiple of the mean on are marked in the drawing, not only coloured. */
export const HOT = 1.5;

/**
 * @param {number | null} load multiple of the mean; null is unknown
 * @param {boolean} dark
 * @returns {[number, number, number]} Red, green, blue, 0..255.
 */
export function colourOf(load, dark) {
  if (load === null || !Number.isFinite(load)) return UNKNOWN_COLOUR[dark ? "dark" : "light"];
  const scale = dark ? DARK : LIGHT;
  const last = SCALE_STOPS.length - 1;
  if (load >= SCALE_STOPS[last]) return scale[last];
  if (load <= 0) return scale[0];
  let i = 0;
  while (load >= SCALE_STOPS[i + 1]) i += 1;
  const part = (load - SCALE_STOPS[i]) / (SCALE_STOPS[i + 1] - SCALE_STOPS[i]);
  return scale[i].map((low, channel) => Math.round(low + part * (scale[i + 1][channel] - low)));
}

/** @param {number[]} rgb @returns {string} For CSS and canvas. */
export function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}

/** @param {number[]} rgb @returns {string} Black or white, whichever can be read on the colour. */
export function inkOn(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#111" : "#fff";
}

/** Entries of a table of colours: loads 0..3 in steps of 1/128. */
const TABLE_STEPS = 384;
const PER_LOAD = TABLE_STEPS / SCALE_STOPS[SCALE_STOPS.length - 1];

/**
 * Paints a matrix, one pixel a cell.
 *
 * @param {(number | null)[][]} rows
 * @param {boolean} dark
 * @returns {{width: number, height: number, pixels: Uint8ClampedArray}} RGBA.
 */
export function paint(rows, dark) {
  const height = rows.length;
  const width = height ? rows[0].length : 0;
  const table = new Uint32Array(TABLE_STEPS + 1);
  for (let i = 0; i <= TABLE_STEPS; i += 1) table[i] = packed(colourOf(i / PER_LOAD, dark));
  const unknown = packed(colourOf(null, dark));
  const cells = new Uint32Array(width * height);
  for (let y = 0, at = 0; y < height; y += 1) {
    const row = rows[y];
    for (let x = 0; x < width; x += 1, at += 1) {
      const load = row[x];
      cells[at] = load === null ? unknown : table[Math.min(TABLE_STEPS, (load * PER_LOAD) | 0)];
    }
  }
  return { width, height, pixels: new Uint8ClampedArray(cells.buffer) };
}

/** Canvas pixels are RGBA in memory; every platform with a browser is little-endian. */
function packed([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/**
 * @param {(number | null)[][]} rows
 * @param {number} most
 * @returns {{row: number, column: number, load: number}[]} The cells with most load, largest first.
 */
export function hottest(rows, most) {
  const found = [];
  rows.forEach((cells, row) => {
    cells.forEach((load, column) => {
      if (load === null || (found.length === most && load <= found[most - 1].load)) return;
      found.push({ row, column, load });
      found.sort((a, b) => b.load - a.load);
      if (found.length > most) found.pop();
    });
  });
  return found;
}
