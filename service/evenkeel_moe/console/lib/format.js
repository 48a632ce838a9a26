/** Numbers, times and sizes as text. Null and undefined are unknown, never zero. */

/** The text of an unknown value. */
export const UNKNOWN = "unknown";

/** @param {unknown} value @returns {boolean} True if the value is a finite number. */
export function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** @param {string} text of a number @returns {string} With a real minus, which zero has not. */
export function withMinus(text) {
  return text.replace(/^-(.*)$/, (_, rest) => (/[1-9]/.test(rest) ? `−${rest}` : rest));
}

/**
 * @param {number | null | undefined} value
 * @param {number} [digits] after the point
 * @returns {string}
 */
export function number(value, digits = 3) {
  return isKnown(value) ? withMinus(value.toFixed(digits)) : UNKNOWN;
}

/** @param {number | null | undefined} value @returns {string} A whole number with separators. */
export function count(value) {
  return isKnown(value) ? withMinus(Math.round(value).toLocaleString("en-US")) : UNKNOWN;
}

/**
 * @param {number} value
 * @param {string} one noun for 1
 * @param {string} [many] noun for other numbers
 * @returns {string} Such as `1 wave` or `2 waves`.
 */
export function counted(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/**
 * @param {number | null | undefined} share
 * @param {number} [digits] after the point
 * @returns {string} In percent.
 */
export function percent(share, digits = 1) {
  return isKnown(share) ? `${number(share * 100, digits)} %` : UNKNOWN;
}

/** @param {number | null | undefined} share @returns {string} In percent, always with a sign. */
export function signedPercent(share) {
  return isKnown(share) ? `${signed(share * 100)} %` : UNKNOWN;
}

/** Zero has no sign, also if it is rounded. */
function signed(value) {
  const text = withMinus(value.toFixed(1));
  return value > 0 && text !== "0.0" ? `+${text}` : text;
}

/**
 * @param {number | null | undefined} lower
 * @param {number | null | undefined} upper
 * @returns {string} An interval of changes, in percent, always with signs.
 */
export function signedRange(lower, upper) {
  if (!isKnown(lower) || !isKnown(upper)) return UNKNOWN;
  return `${signed(lower * 100)} to ${signed(upper * 100)} %`;
}

/** @param {string} words of the controller @returns {string} The same with the page's minus. */
export function wordsWithMinus(words) {
  return words.replace(/(^|[\s(])-(?=\d)/g, "$1−");
}

/**
 * @param {number | null | undefined} lower
 * @param {number | null | undefined} upper
 * @returns {string} An interval of shares, in percent.
 */
export function percentRange(lower, upper) {
  if (!isKnown(lower) || !isKnown(upper)) return UNKNOWN;
  return `${number(lower * 100, 1)} to ${number(upper * 100, 1)} %`;
}

/** @param {number | null | undefined} value @returns {string} With a decimal unit: `1.5 MB`. */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  const sign = value < 0 ? "−" : "";
  let size = Math.abs(value);
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${sign}${unit === "B" ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
    size /= 1000;
  }
  return `${sign}${size.toFixed(1)} TB`;
}

/** @param {number | null | undefined} value in seconds @returns {string} Such as `1 min 20 s`. */
export function duration(value) {
  if (!isKnown(value)) return UNKNOWN;
  const s = Math.abs(value);
  if (s < 1e-3) return `${(s * 1e6).toFixed(1)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return pair(Math.round(s), 60, "min", "s");
  if (s < 86400) return pair(Math.round(s / 60), 60, "h", "min");
  return pair(Math.round(s / 3600), 24, "days", "h");
}

const ROUGH_UNITS = [
  ["days", 86400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
  ["ms", 1e-3],
];

/** @param {number} value @returns {number} With two significant digits. */
export function twoDigits(value) {
  return Number(value.toPrecision(2));
}

/**
 * @param {number | null | undefined} value in seconds
 * @returns {string} With two significant digits: `24 ms`, `13 min`.
 */
export function roughDuration(value) {
  if (!isKnown(value)) return UNKNOWN;
  const [unit, size] = ROUGH_UNITS.find(([, least]) => Math.abs(value) >= least) ?? ["µs", 1e-6];
  return `${twoDigits(value / size)} ${unit}`;
}

function pair(total, base, large, small) {
  const rest = total % base;
  return rest
    ? `${Math.floor(total / base)} ${large} ${rest} ${small}`
    : `${total / base} ${large}`;
}

/**
 * @param {number | null | undefined} unix seconds
 * @param {number} now Unix seconds
 * @returns {string} Such as `12 s ago` or `in 5 min`.
 */
export function ago(unix, now) {
  if (!isKnown(unix)) return UNKNOWN;
  const passed = now - unix;
  // The clocks of the controller and of this machine may differ by seconds.
  if (passed > -3 && passed < 1) return "now";
  return passed > 0 ? `${duration(passed)} ago` : `in ${duration(-passed)}`;
}

/** @param {number | null | undefined} unix seconds @returns {string} UTC date and time. */
export function moment(unix) {
  if (!isKnown(unix)) return UNKNOWN;
  return `${new Date(unix * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** @param {number | null | undefined} unix seconds @returns {string} UTC time of day. */
export function timeOfDay(unix) {
  return isKnown(unix) ? new Date(unix * 1000).toISOString().slice(11, 19) : UNKNOWN;
}

/** @param {unknown} value @returns {string} Any value as text. */
export function text(value) {
  return value === null || value === undefined || value === "" ? UNKNOWN : String(value);
}

/**
 * @param {string} digest
 * @returns {string} The first twelve characters: enough to compare by eye.
 */
export function shortDigest(digest) {
  return digest.length > 12 ? digest.slice(0, 12) : digest;
}
