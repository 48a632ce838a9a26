/** The story of a plan as intervals of its waves, and its events in words. */

import { percent, text } from "./format.js";
import { sentence } from "./reasons.js";

const EVENTS = {
  created: "Created",
  approved: "Approved",
  wave_started: "A wave began",
  wave_committed: "A wave was committed",
  paused: "Paused",
  stalled: "Stalled",
  resumed: "Resumed",
  recovered: "Taken over by a new leader",
  cancel_requested: "Cancellation requested",
  ended: "Ended",
  measured: "Gain measured",
};

export const ROLLBACK_WORDS =
  "A rollback returns to an earlier placement as intended, so it may save less.";

/**
 * @param {object} row of a story
 * @param {string} [kind] of the plan
 * @returns {string} The event in words.
 */
export function eventWords(row, kind = "") {
  const words = EVENTS[row.event] ?? row.event;
  if (row.event === "measured") {
    const { promised_gain: promised, delivered_gain: delivered } = row;
    const known = `delivered ${percent(delivered)}`;
    if (kind === "rollback") {
      return `${words}: ${known}${delivered < 0 ? `. ${ROLLBACK_WORDS}` : ""}`;
    }
    return `${words}: promised ${percent(promised)}, ${known}`;
  }
  const by = row.by ? ` by ${row.by}` : "";
  const why = row.event === "ended" || row.event === "stalled" ? `: ${sentence(row.reason)}` : "";
  return `${words}${by}${why}`;
}

/**
 * @typedef {{index: number, from: number, to: number | null, committed: boolean}} WaveSpan
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
      spans.push({ index: committed, from: row.at, to: null, committed: false });
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
 * Ranks tell the state of their wave only when a leader asks for it, so that "idle" or "unknown"
 * says nothing about the wave under way.
 *
 * @param {object} rank of a deployment that carries out a plan
 * @returns {string} What is known of it.
 */
export function rankWords(rank) {
  const told = ["idle", "unknown"].includes(rank.state) ? "" : `${rank.state}, `;
  return `${told}epoch ${text(rank.epoch)}`;
}

/**
 * @param {object} plan with `phase` and `reason`
 * @returns {boolean} True if the plan has ended.
 */
export function hasEnded(plan) {
  return ["committed", "aborted", "cancelled", "expired", "refused"].includes(plan.phase);
}
