/** The story of a plan as intervals of its waves, and its events in words. */

import {
  bytes,
  counted,
  isKnown,
  percent,
  percentRange,
  roughDuration,
  signedPercent,
  text,
} from "./format.js";
import { sentence } from "./reasons.js";

const EVENTS = {
  created: "Created",
  approved: "Approved",
  paused: "Paused",
  stalled: "Stalled",
  resumed: "Continued",
  recovered: "Taken over by a new leader",
  cancel_requested: "Cancellation requested",
  ended: "Ended",
  measured: "Saving of MoE time measured",
};

/** Events whose reason says why they happened. */
const GIVES_REASON = ["created", "paused", "stalled", "ended"];

export const ROLLBACK_WORDS =
  "A rollback returns to an earlier placement, so MoE time may rise.";

const SUPERSEDED = ["stale_base", "generation_changed", "weights_version_changed"];

/**
 * A record is `refused` if the plan breaks a rule, and also if its placement, its group or its
 * weights were replaced before it began. The reason tells the two apart.
 *
 * @param {{phase: string, reason: string}} row a plan or a row of a story
 * @returns {string} The phase as people call it.
 */
export function phaseOf({ phase, reason }) {
  return phase === "refused" && SUPERSEDED.includes(reason) ? "superseded" : (phase ?? "");
}

/**
 * @param {object} row of a story
 * @param {object} [plan] with `kind`, `waves`, `base_epoch` and `wave_list`
 * @param {number} [committed] waves that were committed before it
 * @returns {string} The event in words.
 */
export function eventWords(row, plan = {}, committed = 0) {
  const words = rejects(row) ? "Rejected" : (EVENTS[row.event] ?? row.event.replaceAll("_", " "));
  if (row.event === "measured") return `${words}${measuredWords(row, plan.kind)}`;
  if (row.event === "wave_started") {
    const wave = plan.wave_list?.[committed];
    const size = wave ? `: ${counted(wave.moves, "copy", "copies")}, ${bytes(wave.nbytes)}` : "";
    return `Wave ${committed + 1} of ${plan.waves} began${size}`;
  }
  if (row.event === "wave_committed") {
    const last = row.waves_committed ?? committed + 1;
    const what = last > committed + 1 ? `Waves ${committed + 1} to ${last}` : `Wave ${last}`;
    const end = last > committed + 1 ? "were committed" : "was committed";
    return `${what} of ${plan.waves} ${end}: the ranks are at epoch ${plan.base_epoch + last}`;
  }
  const by = row.by === "auto" ? " in mode auto" : row.by ? ` by ${row.by}` : "";
  const why = GIVES_REASON.includes(row.event) ? `: ${sentence(row.reason)}` : "";
  return `${words}${by}${why}`;
}

function measuredWords(row, kind) {
  const interval =
    isKnown(row.delivered_lower) && isKnown(row.delivered_upper)
      ? ` (95 % interval ${percentRange(row.delivered_lower, row.delivered_upper)})`
      : "";
  const steps = row.steps ? ` on ${counted(row.steps, "step")}` : "";
  const delivered = `delivered ${signedPercent(row.delivered_gain)}${interval}`;
  if (kind === "rollback") {
    return `${steps}: ${delivered}${row.delivered_gain < 0 ? `. ${ROLLBACK_WORDS}` : ""}`;
  }
  const least = isKnown(row.promised_lower) ? ` (at least ${percent(row.promised_lower)})` : "";
  return `${steps}: promised ${percent(row.promised_gain)}${least}, ${delivered}`;
}

/**
 * @param {object} plan with its story
 * @returns {{at: number, words: string, phase: string, detail: string}[]} Oldest first.
 */
export function storyRows(plan) {
  let committed = 0;
  return plan.story.map((row) => {
    const words = eventWords(row, plan, committed);
    committed = row.waves_committed ?? committed;
    // The words about a wave say all that these details say.
    const said = row.event === "wave_started" || /^epoch \d+$/.test(row.detail);
    const detail = said ? "" : (row.detail ?? "");
    return { at: row.at, words, phase: phaseOf(row), detail };
  });
}

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
 * @param {RankTook} rank
 * @returns {string} What it took for its part of a wave.
 */
export function tookWords({ voted_s: voted, swapped_s: swapped, stall_s: stall }) {
  const parts = [isKnown(voted) ? `voted after ${roughDuration(voted)}` : "did not vote"];
  if (isKnown(swapped)) parts.push(`swapped after ${roughDuration(swapped)}`);
  if (isKnown(stall)) parts.push(`step waited ${roughDuration(stall)}`);
  return parts.join(", ");
}

/**
 * @param {object} plan with `phase` and `reason`
 * @returns {boolean} True if the plan has ended.
 */
export function hasEnded(plan) {
  return ["committed", "aborted", "cancelled", "expired", "refused"].includes(plan.phase);
}

/**
 * @param {object} plan with `phase`
 * @returns {[string, string]} The words for the balance that a plan was made on, and for the one
 *   that was predicted for its target. Once a plan was begun, the first one is not that of now.
 */
export function pairWords({ phase }) {
  return phase === "proposed" ? ["now", "then"] : ["before", "predicted after"];
}

/**
 * @param {object} plan with `phase` and `story`
 * @returns {boolean} True if an operator cancelled the plan while it waited for approval.
 */
export function isRejected(plan) {
  return plan.phase === "cancelled" && plan.story.some(rejects);
}

function rejects(row) {
  return row.event === "cancel_requested" && row.phase === "proposed";
}
