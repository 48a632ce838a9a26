/** Balance over time, from the decisions that the controller keeps. */

import { isKnown } from "./format.js";
import { isLoadPast } from "./ranks.js";

/**
 * @typedef {{at: number, time: number | null, tokens: number | null, reason: string,
 *   words: string}} Point
 * @param {object} decision a row of `decisions`
 * @param {object | null} [status] the deployment that was read with it. A cycle that ended early
 *   has no balance of its own; the window had this one then, unless it was past.
 * @returns {Point}
 */
export function pointOf(decision, status = null) {
  const numbers = decision.numbers ?? {};
  const present = status && !isLoadPast(status) ? status.balancedness_mean : null;
  return {
    at: decision.at,
    time: numbers.time_balance ?? null,
    tokens: numbers.balancedness_mean ?? present ?? null,
    reason: decision.reason,
    words: decision.reason_text,
  };
}

/**
 * @param {Point[]} known oldest first
 * @param {Point[]} added in any order
 * @param {number} oldest Unix seconds; older points are dropped
 * @returns {Point[]} Oldest first, each moment once: the point whose balance is known. `known`
 *   itself if nothing changes.
 */
export function merge(known, added, oldest) {
  const byMoment = new Map(known.map((point) => [point.at, point]));
  let changed = false;
  for (const point of added) {
    const old = byMoment.get(point.at);
    if (old && (isKnown(old.tokens) || !isKnown(point.tokens))) continue;
    byMoment.set(point.at, point);
    changed = true;
  }
  const kept = [...byMoment.values()].filter((point) => point.at >= oldest);
  if (!changed && kept.length === known.length) return known;
  return kept.sort((a, b) => a.at - b.at);
}

/** @param {Point[]} points @returns {boolean} True if a line of time balance can be drawn. */
export function hasTime(points) {
  return points.some((point) => isKnown(point.time));
}

/** A gap this many times the usual distance is drawn as one. */
const GAP = 5;

/**
 * @param {Point[]} points oldest first
 * @returns {[number[], (number | null)[], (number | null)[]]} Times, time balance, balancedness,
 *   as uPlot takes them. Unknown values, and gaps in time, are null.
 */
export function columns(points) {
  const rows = points.filter((point) => isKnown(point.time) || isKnown(point.tokens));
  const gap = GAP * usualDistance(rows);
  const out = [[], [], []];
  rows.forEach((point, i) => {
    if (i > 0 && point.at - rows[i - 1].at > gap) push(out, (point.at + rows[i - 1].at) / 2);
    push(out, point.at, point.time, point.tokens);
  });
  return out;
}

function push(out, at, time = null, tokens = null) {
  out[0].push(at);
  out[1].push(time);
  out[2].push(tokens);
}

function usualDistance(rows) {
  const distances = rows.slice(1).map((point, i) => point.at - rows[i].at);
  distances.sort((a, b) => a - b);
  return distances.length ? distances[distances.length >> 1] : Infinity;
}

/**
 * @param {Point[]} points oldest first
 * @returns {{reason: string, words: string, count: number, share: number}[]} The ends of cycles,
 *   the most frequent first.
 */
export function reasonCounts(points) {
  const found = new Map();
  for (const { reason, words } of points) {
    const row = found.get(reason) ?? { reason, words, count: 0 };
    found.set(reason, { ...row, count: row.count + 1 });
  }
  return [...found.values()]
    .map((row) => ({ ...row, share: row.count / points.length }))
    .sort((a, b) => b.count - a.count);
}
