/** One plan: what it would change, what it did, its story, and the buttons that decide on it. */

import { useState } from "../vendor/hooks.js";
import {
  bytes,
  count,
  counted,
  duration,
  isKnown,
  number,
  percent,
  percentRange,
  roughDuration,
  shortDigest,
  signedPercent,
  text,
  twoDigits,
  UNKNOWN,
} from "../lib/format.js";
import { changedLayers, movesBetween, sameShape } from "../lib/placement.js";
import { allows } from "../lib/problem.js";
import { sentence } from "../lib/reasons.js";
import { hasEnded, isRejected, pairWords, phaseOf, ROLLBACK_WORDS } from "../lib/timeline.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import { ActionButton, BeforeAfter, Facts, html, Loaded, Moment, Section, Table } from "../ui.js";
import { LayerSlots } from "../charts/slotmap.js";
import { Phase } from "./plans.js";
import { RankStates, Story, Timeline } from "./story.js";
import { Numbers } from "./why.js";

const PERIOD_MS = 2000;
const FEW_MOVES = 50;

export function PlanView({ api, role, name, deployment, planId, now, reload }) {
  const path = `${deploymentPath(name)}/plans/${encodeURIComponent(planId)}`;
  const poll = usePoll(api, path, PERIOD_MS);
  const ended = poll.data ? hasEnded(poll.data) : false;
  // The placement is large and changes only with the epoch.
  const placement = usePoll(
    api,
    poll.data && !ended ? `${deploymentPath(name)}/placement` : null,
    0,
  );
  const act = async (action, headers) => {
    await api.change("POST", `${path}/${action}`, undefined, headers);
    await Promise.all([poll.reload(), reload()]);
  };
  return html`<${Loaded} poll=${poll}
    >${(plan) => {
      const base = baseOf(plan, placement.data);
      const moves = base
        ? movesBetween(
            base,
            plan.target.physical_to_logical,
            plan.target.slots_per_rank,
            plan.wave_list,
          )
        : null;
      return html`
        <${Head} plan=${plan} role=${role} act=${act} now=${now} deployment=${deployment} />
        ${plan.phase === "proposed" ? html`<${Gain} plan=${plan} deployment=${deployment} />` : ""}
        <${Timeline} plan=${plan} now=${now} />
        ${ended ? "" : html`<${RankStates} plan=${plan} deployment=${deployment} />`}
        ${plan.phase === "proposed" ? "" : html`<${Gain} plan=${plan} deployment=${deployment} />`}
        <${Moves} plan=${plan} moves=${moves} base=${base} />
        <${Story} plan=${plan} now=${now} />
      `;
    }}<//
  >`;
}

/** The placement that the plan starts from; null unless it is the committed one. */
function baseOf(plan, placement) {
  if (!placement || placement.epoch !== plan.base_epoch) return null;
  const rows = placement.physical_to_logical;
  return sameShape(rows, plan.target.physical_to_logical) ? rows : null;
}

function Head({ plan, role, act, now, deployment }) {
  const may = allows(role, "operate");
  const proposed = plan.phase === "proposed";
  const digest = plan.target.digest;
  const buttons = may
    ? html`<div class="controls">
        ${
          proposed
            ? html`<${ActionButton}
                  id="approve"
                  label="Approve"
                  kind="primary"
                  title="Approve this plan"
                  confirm="Approve and start"
                  act=${() => act("approve", { "If-Match": `"${digest}"` })}
                >
                  <p>${weightsWords(plan)}</p>
                  <p class="hint">
                    Only the target with digest <code>${shortDigest(digest)}</code>, which this page
                    shows, is started.
                  </p><//
                >
                <${ActionButton}
                  id="reject"
                  label="Reject"
                  title="Reject this proposal"
                  confirm="Reject the proposal"
                  act=${() => act("cancel")}
                >
                  <p>
                    The plan is refused, and nothing moves. The planner may propose again later;
                    Freeze, or mode observe, stops that.
                  </p>
                  <p class="hint">
                    This is <code>evenkeel plan cancel</code>. The plan's phase is then cancelled.
                  </p><//
                >`
            : hasEnded(plan)
              ? ""
              : html`<${ActionButton}
                  id="cancel"
                  label="Cancel"
                  kind="danger"
                  title="Cancel this plan"
                  confirm="Cancel the plan"
                  act=${() => act("cancel")}
                >
                  <p>
                    A wave for which all ranks have voted still commits. Later waves do not start.
                  </p><//
                >`
        }
      </div>`
    : "";
  const stale = proposed && deployment && deployment.epoch !== plan.base_epoch;
  return html`<${Section} title=${proposed ? "Proposal" : "Plan"} actions=${buttons}>
    <p class="answer"><${Phase} plan=${plan} /> ${headline(plan)}</p>
    ${stale ? html`<p class="problem">${staleWords(plan, deployment)}</p>` : ""}
    <${Facts}
      rows=${[
        ["Made because", sentence(plan.planned_because)],
        ["Policy", plan.policy],
        ["Created", html`<${Moment} unix=${plan.created_at} now=${now} />`],
        proposed && [
          "Expires",
          plan.expires_at === null
            ? "never"
            : html`<${Moment} unix=${plan.expires_at} now=${now} />`,
        ],
        plan.approved_by && ["Approved by", plan.approved_by],
        ["Waves", `${plan.waves_committed} of ${plan.waves} committed`],
        ["Copies between ranks", count(plan.moves)],
        ["Bytes", bytes(plan.nbytes)],
        ["Plan", html`<code>${plan.plan_id}</code>`],
        ["Digest of the target", html`<code title=${digest}>${shortDigest(digest)}</code>`],
      ]}
    />
  <//>`;
}

function weightsWords(plan) {
  const copies = counted(plan.moves, "copy", "copies");
  return `This moves weights: ${copies}, ${bytes(plan.nbytes)}, in ${counted(plan.waves, "wave")}.`;
}

function staleWords({ base_epoch: base }, { epoch }) {
  return `It is based on epoch ${base}, but the deployment is at epoch ${text(epoch)}.`;
}

function headline(plan) {
  if (plan.phase === "proposed") return "It waits for approval. Nothing has moved.";
  if (phaseOf(plan) === "superseded") {
    return `It never began, and nothing is wrong with it. ${sentence(plan.reason)}`;
  }
  if (isRejected(plan)) return "An operator rejected it. Nothing has moved.";
  if (plan.error) return `${sentence(plan.reason)} ${plan.error === plan.reason ? "" : plan.error}`;
  return sentence(plan.reason);
}

function Gain({ plan, deployment }) {
  const { numbers, delivered } = plan;
  const after = numbers.gain === undefined || numbers.gain === null ? null : 1 - numbers.gain;
  const model = deployment?.cost_model;
  // A figure must not claim time where none is known.
  const byTokens = model?.source === "tokens" ? " (by tokens)" : "";
  // A rollback returns to a known placement: nothing is predicted for it.
  const predicted = plan.kind !== "rollback";
  const title = delivered && predicted ? "Promised and delivered" : "Before and after";
  return html`<${Section} title=${predicted ? title : "Effect"}>
    ${
      predicted
        ? html`<div class="pairs">
            <${BeforeAfter}
              name=${`Predicted MoE time${byTokens}`}
              words=${pairWords(plan)}
              before=${after === null ? null : 1}
              after=${after}
              show=${(value) => percent(value)}
            />
            <${BeforeAfter}
              name="Balancedness"
              words=${pairWords(plan)}
              before=${numbers.balancedness_mean}
              after=${numbers.balancedness_expected}
              show=${(value) => number(value)}
            />
          </div>`
        : ""
    }
    <${Facts}
      rows=${[
        predicted && [
          `Predicted saving of MoE time${byTokens}`,
          percent(numbers.gain),
          `94 % interval ${percentRange(numbers.gain_lower, numbers.gain_upper)}${
            isKnown(numbers.calibration)
              ? `. ${percent(numbers.gain_modelled)} by the cost model, times ${number(
                  numbers.calibration,
                  2,
                )} as earlier plans delivered`
              : ""
          }`,
        ],
        delivered && [
          "Delivered, by the ranks' seconds",
          signedPercent(delivered.gain),
          delivered.gain === null
            ? text(delivered.unknown_because)
            : `${interval(delivered)}, ${count(delivered.steps)} steps. ${
                plan.kind === "rollback" && delivered.gain < 0 ? ROLLBACK_WORDS : ""
              }`,
        ],
        !delivered &&
          plan.phase === "committed" && [
            "Delivered",
            UNKNOWN,
            "It is measured once enough steps have run on the new placement.",
          ],
        predicted && [
          "Price of the copies",
          percent(numbers.copy_cost_share, 2),
          "of MoE time, over the expected life of the plan",
        ],
        predicted && [
          `Pays for itself after${byTokens}`,
          numbers.payback_steps == null ? UNKNOWN : stepsText(numbers.payback_steps),
          numbers.payback_s == null ? "" : roughDuration(numbers.payback_s),
        ],
        (predicted || numbers.expected_stall_s != null) && [
          "Expected stall",
          numbers.expected_stall_s == null ? UNKNOWN : duration(numbers.expected_stall_s),
          numbers.expected_stall_s == null
            ? "No swap was measured before this plan was made. Copies run beside serving."
            : "of one step for each wave, by the swaps measured here. Copies run beside serving.",
        ],
        [
          "KV cache",
          deployment?.shape?.pool_slots_per_rank == null ? "unchanged" : UNKNOWN,
          deployment?.shape?.pool_slots_per_rank == null
            ? "The number of slots stays the same."
            : "The ranks have pooled slots: memory can move between layers.",
        ],
        predicted && [
          "Scored on",
          numbers.held_out_steps == null ? UNKNOWN : `${count(numbers.held_out_steps)} later steps`,
        ],
        predicted && ["Cost model now", model ? model.words : UNKNOWN],
      ]}
    />
    <details>
      <summary>All numbers of the plan</summary>
      <${Numbers} numbers=${known(numbers)} />
    </details>
  <//>`;
}

function interval({ lower, upper }) {
  return `95 % interval ${percentRange(lower, upper)}`;
}

function stepsText(steps) {
  return steps < 1 ? "less than 1 step" : `${count(twoDigits(steps))} steps`;
}

function known(numbers) {
  return Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== null));
}

function ShowAll({ moves, show }) {
  return html`<button class="button" type="button" onClick=${show}>
    Show all ${count(moves.length)}
  </button>`;
}

function Moves({ plan, moves, base }) {
  const [all, setAll] = useState(false);
  const showAll = () => setAll(true);
  const target = plan.target.physical_to_logical;
  if (moves === null) {
    const rows = plan.wave_list;
    return html`<${Section}
      title="Waves"
      note="Single copies can be shown only while the plan's base is the present placement."
    >
      <${Table}
        caption="Waves"
        rows=${rows}
        keyOf=${(wave) => wave.index}
        columns=${[
          { title: "Wave", numeric: true, of: (wave) => wave.index + 1 },
          { title: "Layers", of: (wave) => wave.layers.join(", ") },
          { title: "Copies", numeric: true, of: (wave) => count(wave.moves) },
          { title: "Bytes", numeric: true, of: (wave) => bytes(wave.nbytes) },
        ]}
    /><//>`;
  }
  const layers = changedLayers(base, target);
  const shown = all ? moves : moves.slice(0, FEW_MOVES);
  return html`<${Section}
      title="Copies between ranks"
      note=${`${counted(moves.length, "copy", "copies")} in ${counted(layers.length, "layer")}.`}
    >
      <${Table}
        caption="Copies"
        rows=${shown}
        keyOf=${(move) => `${move.layer} ${move.slot}`}
        columns=${[
          {
            title: "Wave",
            numeric: true,
            of: (move) => (move.wave === null ? UNKNOWN : move.wave + 1),
          },
          { title: "Layer", numeric: true, of: (move) => move.layer },
          { title: "Expert", numeric: true, of: (move) => move.expert },
          { title: "To rank", numeric: true, of: (move) => move.rank },
          { title: "Slot", numeric: true, of: (move) => move.slot % plan.target.slots_per_rank },
          { title: "Held by ranks", of: (move) => move.holders.join(", ") },
        ]}
      />
      ${shown.length < moves.length ? html`<${ShowAll} moves=${moves} show=${showAll} />` : ""}
    <//>
    ${
      layers.length
        ? html`<${Section} title="Slots of one layer">
            <${LayerSlots}
              layers=${layers}
              before=${base}
              after=${target}
              slotsPerRank=${plan.target.slots_per_rank}
              loads=${null}
            />
          <//>`
        : ""
    }`;
}
