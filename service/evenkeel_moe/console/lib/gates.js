/** The gates of a planning cycle as a checklist, from the newest decision and the policy. */

import { bytes, count, duration, isKnown, number, percent } from "./format.js";
import { doubts } from "./health.js";

/**
 * One gate. `closes` are the reasons with which it ends a cycle, `says` gives what it compares, and
 * `remedy` what would open it. Each gets {numbers, policy, deployment, now}.
 */
const GATES = [
  {
    title: "This replica leads, and the ranks agree about their state",
    closes: ["not_leader", "recovering", "store_unavailable"],
    says: ({ deployment }) => `State ${deployment.state}.`,
    remedy: () => "It ends by itself once the store and all ranks can be reached.",
  },
  {
    title: "Freeze and schedule let plans begin",
    closes: ["frozen", "outside_schedule"],
    says: ({ numbers, policy, deployment, now }) => {
      const left = numbers.frozen_s ?? remaining(deployment.frozen_until_unix, now);
      const { windows, blackouts } = policy.schedule;
      const spans = windows.length + blackouts.length;
      return `${isKnown(left) ? `Frozen for another ${duration(left)}` : "Not frozen"}; ${
        spans ? `the schedule has ${spans} weekly spans` : "plans may start at any time"
      }.`;
    },
    remedy: () => "End the freeze, change the schedule, or wait.",
  },
  {
    title: "The hold lets plans be made",
    closes: ["held_after_rollback", "held_after_data_loss", "gains_not_delivered"],
    says: ({ policy, deployment }) =>
      deployment.held
        ? `Automatic plans are held (${deployment.held_because}). ${holdWords(policy.mode)}`
        : "Automatic plans are not held.",
    remedy: () =>
      "Find out why: the rollback, the lost data or the gain that was missing. Then resume.",
  },
  {
    title: "Earlier plans have ended",
    closes: ["plan_in_progress"],
    says: ({ deployment }) =>
      deployment.active_plan
        ? `Plan ${deployment.active_plan.plan_id} is running.`
        : "No plan is running.",
    remedy: () => "Wait for the plan to end, or cancel it.",
  },
  {
    title: "Earlier proposals have been answered",
    closes: ["plan_proposed"],
    says: ({ numbers }) =>
      isKnown(numbers.expires_in_s)
        ? `The proposal expires in ${duration(numbers.expires_in_s)}.`
        : "In propose mode, one automatic plan waits at a time.",
    remedy: () => "Approve or reject the proposal; it expires by itself otherwise.",
  },
  {
    title: "All ranks are connected",
    closes: ["ranks_missing", "group_stopped"],
    says: ({ numbers, deployment }) => {
      const fresh = numbers.ranks_fresh ?? deployment.ranks?.filter((rank) => rank.fresh).length;
      return `${count(fresh)} of ${count(deployment.shape?.num_ranks)} ranks.`;
    },
    remedy: () => "Look at the missing ranks: their load is unknown until they are back.",
  },
  {
    title: "The last plan ended long enough ago",
    closes: ["cooldown"],
    says: ({ numbers, policy }) =>
      isKnown(numbers.since_plan_s)
        ? `${duration(numbers.since_plan_s)} since the plan, needs ${duration(numbers.cooldown_s)}.`
        : `Needs ${duration(policy.thresholds.cooldown_s)} after a plan.`,
    remedy: () => "Wait. A change of traffic that costs balance does not wait.",
  },
  {
    title: "The counts agree with each other",
    closes: ["implausible_counts"],
    says: ({ policy, deployment: { findings } }) =>
      doubts(findings).join(" ") ||
      `Layers of a step may differ by ${percent(policy.thresholds.max_layer_deviation)}.`,
    remedy: () => "Correct how the engine counts; or set max_layer_deviation or max_idle_experts.",
  },
  {
    title: "There are enough complete steps",
    closes: ["insufficient_data", "no_steps"],
    says: ({ numbers, policy, deployment }) =>
      `${count(numbers.window_steps ?? deployment.window_steps)} steps, needs ${count(
        policy.thresholds.min_window_steps,
      )}.`,
    remedy: () => "Wait for traffic: each step on all ranks counts once.",
  },
  {
    title: "The newest step is recent",
    closes: ["stale_data"],
    says: ({ numbers, policy }) =>
      `${
        isKnown(numbers.newest_step_age_s) ? `${duration(numbers.newest_step_age_s)} old, a` : "A"
      }t most ${duration(policy.thresholds.max_data_age_s)}.`,
    remedy: () => "Find out why steps stopped, or why one rank does not report them.",
  },
  {
    title: "Balance is low, or the traffic changed",
    closes: ["balance_above_threshold"],
    says: saysBalance,
    remedy: ({ policy }) =>
      `Balance below ${number(policy.thresholds.plan_below, 2)}, or a change of traffic.`,
  },
  {
    title: "Balance was low for enough cycles",
    closes: ["waiting_consecutive_windows"],
    says: ({ numbers, policy }) =>
      `${isKnown(numbers.windows_below) ? `${count(numbers.windows_below)} of ` : "Needs "}${count(
        policy.thresholds.consecutive_windows,
      )} cycles in a row.`,
    remedy: () => "Wait for the next cycle.",
  },
  {
    title: "The planner found a better placement",
    closes: ["planner_starting", "planner_failed", "no_change", "policy_changed", "stale_base"],
    says: ({ numbers }) =>
      isKnown(numbers.copies) ? `${count(numbers.copies)} copies of experts.` : "Not known yet.",
    remedy: () => "Nothing, if the placement is the best one; else read the controller's log.",
  },
  {
    title: "The plan keeps within the limits",
    closes: ["limit_exceeded", "memory_exceeded", "pool_exceeded", "staging_too_small"],
    says: ({ numbers, policy }) => {
      const { max_moves, max_bytes, max_layers } = policy.limits;
      const rows = [
        ["copies", numbers.copies, max_moves, count],
        ["bytes", numbers.bytes, max_bytes, bytes],
        ["layers", numbers.layers, max_layers, count],
      ];
      return `${rows.map((row) => limitText(...row)).join("; ")}.`;
    },
    remedy: () => "Raise the limits of the policy (role admin).",
  },
  {
    title: "The gain is large enough and certain",
    closes: ["gain_too_small", "gain_uncertain"],
    says: ({ numbers, policy }) =>
      `${isKnown(numbers.gain) ? `Predicted ${gainText(numbers)}; n` : "N"}eeds ${percent(
        policy.thresholds.min_gain,
      )}, and a lower bound above 1.5 times the price of the copies.`,
    remedy: () => "More steps make the gain more certain; a larger imbalance makes it larger.",
  },
  {
    title: "The copies pay for themselves soon enough",
    closes: ["payback_too_long"],
    says: ({ numbers, policy }) =>
      `${
        isKnown(numbers.payback_steps) ? `After ${count(numbers.payback_steps)} steps, a` : "A"
      }t most ${count(policy.thresholds.max_payback_steps)} steps.`,
    remedy: () => "A larger gain, or fewer copies.",
  },
  {
    title: "The mode lets plans start",
    closes: ["observe_mode"],
    says: ({ policy }) => `Mode ${policy.mode}.`,
    remedy: () => "Set the mode to propose or auto.",
  },
];

/**
 * @param {string} mode of the deployment
 * @returns {string} What the hold on automatic plans stops in this mode.
 */
export function holdWords(mode) {
  return mode === "auto"
    ? "In mode auto no plan is made until somebody resumes automatic plans."
    : `The hold stops plans in mode auto only. ${
        mode === "propose"
          ? "In mode propose proposals are still made, and each waits for approval."
          : "In mode observe the controller starts nothing."
      }`;
}

/** Reasons after which a plan exists: every gate was open. */
const ALL_OPEN = ["plan_started"];

/** Reasons of gates that a cycle meets only after planning, with too few later steps. */
const AFTER_PLANNING = "held_out_steps";

function remaining(until, now) {
  return isKnown(until) && until > now ? until - now : null;
}

function gainText({ gain, gain_lower: lower }) {
  return `${percent(gain)}${isKnown(lower) ? `, at least ${percent(lower)}` : ""}`;
}

function limitText(what, value, most, show) {
  const bound = isKnown(most) ? `at most ${show(most)}` : "no limit";
  return `${what}: ${isKnown(value) ? `${show(value)}, ` : ""}${bound}`;
}

function saysBalance({ numbers, policy, deployment }) {
  const time = numbers.time_balance ?? deployment.time_balance;
  const tokens = numbers.balancedness_mean ?? deployment.balancedness_mean;
  const decides = isKnown(time)
    ? `Time balance ${number(time)} (balancedness ${number(tokens)})`
    : `Balancedness ${number(tokens)}`;
  const below = numbers.starts_below ?? policy.thresholds.plan_below;
  return `${decides}; planning starts below ${number(below, 2)}.`;
}

/**
 * @typedef {{title: string, state: "open" | "closed" | "later" | "unknown", detail: string,
 *   remedy: string | null}} Gate
 * @param {object} deployment as REST returns it
 * @param {object} policy the policy document
 * @param {number} now Unix seconds
 * @returns {Gate[]} In the order in which a cycle meets them. Gates after the closed one were not
 *   reached, so their state is not known; without a decision none is known.
 */
export function gatesOf(deployment, policy, now) {
  const decision = deployment.last_decision;
  const numbers = decision?.numbers ?? {};
  const facts = { numbers, policy, deployment, now };
  const closed = decision ? closedGate(decision.reason, numbers) : null;
  return GATES.map((gate, index) => ({
    title: gate.title,
    state: stateOf(index, closed),
    detail: gate.says(facts),
    remedy: index === closed ? gate.remedy(facts) : null,
  }));
}

/** Returns the index of the gate that closed; GATES.length if all were open; null if unknown. */
function closedGate(reason, numbers) {
  if (ALL_OPEN.includes(reason)) return GATES.length;
  const found = GATES.findIndex((gate) => gate.closes.includes(reason));
  if (reason === "insufficient_data" && AFTER_PLANNING in numbers) {
    return GATES.findIndex((gate) => gate.closes.includes("gain_uncertain"));
  }
  return found >= 0 ? found : null;
}

function stateOf(index, closed) {
  if (closed === null) return "unknown";
  if (index < closed) return "open";
  return index === closed ? "closed" : "later";
}
