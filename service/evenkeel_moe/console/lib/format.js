/**
 * Numbers, times and sizes as text, as the controller writes them. Null and undefined are unknown,
 * never zero.
 */

/** The text of an unknown value. */
export const UNKNOWN = "unknown";

/** @param {unknown} value @returns {boolean} True if the value is a finite number. */
export function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/**
 * @param {number | null | undefined} value
 * @param {number} [digits] after the point
 * @returns {string} Zero has no sign, also if it is rounded.
 */
export function number(value, digits = 3) {
  return isKnown(value) ? value.toFixed(digits).replace(/^-(?=[0.]+$)/, "") : UNKNOWN;
}

/** @param {number | null | undefined} value @returns {string} A whole number with separators. */
export function count(value) {
  return isKnown(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
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
  return isKnown(share) ? `${number(share * 100, digits)}%` : UNKNOWN;
}

/** @param {number | null | undefined} share @returns {string} In percent, always with a sign. */
export function signedPercent(share) {
  const text = percent(share);
  return isKnown(share) && share > 0 && text !== "0.0%" ? `+${text}` : text;
}

function rounded(value, digits = 3) {
  return Number(value.toPrecision(digits));
}

const BYTE_UNITS = [
  ["TB", 1e12],
  ["GB", 1e9],
  ["MB", 1e6],
  ["kB", 1e3],
];

/** @param {number | null | undefined} value @returns {string} With a decimal unit: `1.25 MB`. */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  // Compared with what rounding would show: 999,999 bytes are 1 MB, not 1000 kB.
  const found = BYTE_UNITS.find(([, size]) => Math.abs(value) >= 0.9995 * size);
  const [unit, size] = found ?? ["B", 1];
  return `${rounded(value / size)} ${unit}`;
}

/** Units, with the least number of seconds that is shown in each. */
const TIME_UNITS = [
  ["d", 86400, 2 * 86400],
  ["h", 3600, 2 * 3600],
  ["min", 60, 2 * 60],
  ["s", 1, 1],
  ["ms", 1e-3, 1e-3],
];

/**
 * @param {number | null | undefined} value in seconds
 * @param {number} [digits] significant digits
 * @returns {string} Such as `12.5 min`.
 */
export function duration(value, digits = 3) {
  if (!isKnown(value)) return UNKNOWN;
  if (value === 0) return "0 s";
  const found = TIME_UNITS.find(([, , least]) => Math.abs(value) >= least);
  const [unit, size] = found ?? ["µs", 1e-6];
  return `${rounded(value / size, digits)} ${unit}`;
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
  const seconds = Math.abs(Math.round(passed));
  const whole = seconds < 120 ? seconds : 60 * Math.round(seconds / 60);
  const text = duration(whole, whole < 7200 ? 3 : 2);
  return passed > 0 ? `${text} ago` : `in ${text}`;
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
  return digest.slice(0, 12);
}
