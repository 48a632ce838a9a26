/** The waves of a plan as intervals, from its story. */

import { duration, isKnown } from "./format.js";

/**
 * @typedef {{rank: number, voted_s: number | null, swapped_s: number | null,
 *   stall_s: number | null}} RankTook seconds since the start of a wave
 * @typedef {{index: number, from: number, to: number | null, committed: boolean,
 *   ranks: RankTook[] | null, numRanks: number | null}} WaveSpan `ranks` is null while the wave
 *   runs, and where no controller saw it from its start to its end
 * @param {object[]} story oldest first
 * @returns {WaveSpan[]} The waves that began, in order; `to` is null while a wave runs.
 */
export function waveSpans(story) {
  const spans = [];
  let committed = 0;
  for (const row of story) {
    const open = spans.find((span) => span.to === null);
    if (row.event === "wave_started") {
      if (open) open.to = row.at;
      const { ranks = null, num_ranks: numRanks = null } = row;
      spans.push({ index: committed, from: row.at, to: null, committed: false, ranks, numRanks });
    } else if (row.event === "wave_committed") {
      committed = row.waves_committed ?? committed + 1;
      if (open) Object.assign(open, { to: row.at, committed: true });
    } else if (row.event === "ended" && open) {
      open.to = row.at;
    }
  }
  return spans;
}

/**
 * @param {object[]} story oldest first
 * @param {number} now Unix seconds; the end of a plan that still runs
 * @param {boolean} ended
 * @returns {[number, number]} First and last moment of the timeline, Unix seconds. The wait for an
 *   approval is left out, and so is the measurement of the gain, which comes long after the end.
 */
export function storyRange(story, now, ended) {
  const shown = story.filter((row) => row.event !== "measured");
  const moments = shown.map((row) => row.at);
  const first = shown.find((row) => row.phase !== "proposed")?.at ?? moments[0];
  const last = ended ? Math.max(...moments) : Math.max(now, ...moments);
  return [first, Math.max(last, first + 0.001)];
}

/**
 * @param {RankTook} rank
 * @returns {string} What it took for its part of a wave.
 */
export function tookWords({ voted_s: voted, swapped_s: swapped, stall_s: stall }) {
  const parts = [isKnown(voted) ? `voted after ${duration(voted)}` : "did not vote"];
  if (isKnown(swapped)) parts.push(`swapped after ${duration(swapped)}`);
  if (isKnown(stall)) parts.push(`step waited ${duration(stall)}`);
  return parts.join(", ");
}
