/** One plan: what it would change, what it did, its story, and the buttons that decide on it. */

import { useState } from "../vendor/hooks.js";
import {
  bytes,
  count,
  counted,
  isKnown,
  number,
  percent,
  shortDigest,
  text,
  UNKNOWN,
} from "../lib/format.js";
import { changedLayers, movesBetween, sameShape } from "../lib/placement.js";
import { allows } from "../lib/problem.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import {
  ActionButton,
  BeforeAfter,
  Facts,
  Figures,
  html,
  Loaded,
  Moment,
  numeric,
  plain,
  Section,
  Table,
} from "../ui.js";
import { LayerSlots } from "../charts/slotmap.js";
import { Phase } from "./plans.js";
import { RankStates, Story, Timeline } from "./story.js";

const PERIOD_MS = 2000;
const FEW_MOVES = 50;
const NOT_PRESENT =
  "Single copies can be shown only while the plan's base is the present placement.";

export function PlanView({ api, role, name, deployment, planId, now, reload }) {
  const path = `${deploymentPath(name)}/plans/${encodeURIComponent(planId)}`;
  const poll = usePoll(api, path, PERIOD_MS);
  // The placement is large and changes only with the epoch.
  const placement = usePoll(
    api,
    poll.data && !poll.data.ended ? `${deploymentPath(name)}/placement` : null,
    0,
  );
  const act = async (action, headers) => {
    await api.change("POST", `${path}/${action}`, undefined, headers);
    await Promise.all([poll.reload(), reload()]);
  };
  return html`<${Loaded} poll=${poll}
    >${(plan) => {
      const gain = html`<${Gain} plan=${plan} />`;
      const proposed = plan.phase === "proposed";
      return html`
        <${Head} plan=${plan} role=${role} act=${act} now=${now} deployment=${deployment} />
        ${proposed ? gain : ""}
        <${Timeline} plan=${plan} now=${now} />
        <${RankStates} plan=${plan} deployment=${deployment} />
        ${proposed ? "" : gain}
        <${Moves} plan=${plan} placement=${placement} />
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
  const digest = plan.target.digest;
  const proposed = plan.phase === "proposed";
  const stale = proposed && deployment && deployment.epoch !== plan.base_epoch;
  const error = plan.error && plan.error !== plan.reason ? plan.error : "";
  const may = !plan.ended && allows(role, "operate");
  const buttons = may ? html`<${Buttons} plan=${plan} act=${act} />` : "";
  return html`<${Section} title=${proposed ? "Proposal" : "Plan"} actions=${buttons}>
    <p class="answer"><${Phase} plan=${plan} /> ${plan.text} ${error}</p>
    ${stale ? html`<p class="problem">${staleWords(plan, deployment)}</p>` : ""}
    <${Facts}
      rows=${[
        ["Made because", plan.planned_because_text],
        ["Policy", plan.policy],
        ["Created", html`<${Moment} unix=${plan.created_at} now=${now} />`],
        proposed && ["Expires", html`<${Expiry} unix=${plan.expires_at} now=${now} />`],
        plan.approved_by && ["Approved by", plan.approved_by],
        ["Plan", html`<code>${plan.plan_id}</code>`],
        ["Digest of the target", html`<code title=${digest}>${shortDigest(digest)}</code>`],
      ]}
    />
  <//>`;
}

const Expiry = ({ unix, now }) =>
  unix === null ? "never" : html`<${Moment} unix=${unix} now=${now} />`;

function staleWords({ base_epoch: base }, { epoch }) {
  return `It is based on epoch ${base}, but the deployment is at epoch ${text(epoch)}.`;
}

/** Approve and reject for a proposal, cancel for a plan under way. */
function Buttons({ plan, act }) {
  const digest = plan.target.digest;
  if (plan.phase !== "proposed")
    return html`<div class="controls">
      <${ActionButton}
        id="cancel"
        label="Cancel"
        kind="danger"
        title="Cancel this plan"
        confirm="Cancel the plan"
        act=${() => act("cancel")}
      >
        <p>A wave for which all ranks have voted still commits. Later waves do not start.</p><//
      >
    </div>`;
  return html`<div class="controls">
    <${ActionButton}
      id="approve"
      label="Approve"
      kind="primary"
      title="Approve this plan"
      confirm="Approve and start"
      act=${() => act("approve", { "If-Match": `"${digest}"` })}
    >
      <p>${weightsWords(plan)}</p>
      <p class="hint">
        Only the target with digest <code>${shortDigest(digest)}</code>, which this page shows, is
        started.
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
        The plan is refused, and nothing moves. The planner may propose again later; Pause, or mode
        observe, stops that.
      </p>
      <p class="hint">
        This is <code>evenkeel plan cancel</code>. The plan's phase is then cancelled.
      </p><//
    >
  </div>`;
}

function weightsWords(plan) {
  const copies = counted(plan.moves, "copy", "copies");
  const size = isKnown(plan.nbytes) ? `, ${bytes(plan.nbytes)}` : " of unknown size";
  return `This moves weights: ${copies}${size}, in ${counted(plan.waves, "wave")}.`;
}

/** Once a plan was begun, the balance that it was made on is not that of now. */
function Gain({ plan }) {
  const { numbers, figures, details } = plan;
  const words = plan.phase === "proposed" ? ["now", "then"] : ["before", "predicted after"];
  const byTokens = plan.gain_by_tokens ? " (by tokens)" : "";
  // Nothing is predicted for a rollback or an evacuation.
  const predicted = plan.may_cost_text === null;
  const title = plan.delivered ? "Promised and delivered" : "Before and after";
  return html`<${Section} title=${predicted ? title : "Effect"}>
    ${
      predicted
        ? html`<div class="pairs">
            <${BeforeAfter}
              name=${`Predicted MoE time${byTokens}`}
              words=${words}
              before=${isKnown(numbers.gain) ? 1 : null}
              after=${isKnown(numbers.gain) ? 1 - numbers.gain : null}
              show=${(value) => percent(value)}
            />
            <${BeforeAfter}
              name="Balancedness"
              words=${words}
              before=${numbers.balancedness_mean}
              after=${numbers.balancedness_expected}
              show=${(value) => number(value)}
            />
          </div>`
        : ""
    }
    <${Figures} rows=${figures} />
    ${
      details.length
        ? html`<details>
            <summary>The other figures behind the plan</summary>
            <${Table}
              caption="Figures"
              rows=${details}
              keyOf=${(row) => row.name}
              columns=${[plain("Name", (row) => row.name), plain("Value", (row) => row.value)]}
            />
          </details>`
        : ""
    }
  <//>`;
}

function Moves({ plan, placement }) {
  const [all, setAll] = useState(false);
  const base = baseOf(plan, placement.data);
  if (base === null) {
    const isAsked = !plan.ended && !placement.data;
    return html`${isAsked ? html`<${Loaded} poll=${placement} />` : ""}
      <${Waves} rows=${plan.wave_list} note=${isAsked ? "" : NOT_PRESENT} />`;
  }
  const { physical_to_logical: target, slots_per_rank: slotsPerRank } = plan.target;
  const moves = movesBetween(base, target, slotsPerRank, plan.wave_list);
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
          numeric("Wave", (move) => (move.wave === null ? UNKNOWN : move.wave + 1)),
          numeric("Layer", (move) => move.layer),
          numeric("Expert", (move) => move.expert),
          numeric("To rank", (move) => move.rank),
          numeric("Slot", (move) => move.slot % slotsPerRank),
          plain("Held by ranks", (move) => move.holders.join(", ")),
        ]}
      />
      ${
        shown.length < moves.length
          ? html`<button class="button" type="button" onClick=${() => setAll(true)}>
              Show all ${count(moves.length)}
            </button>`
          : ""
      }
    <//>
    ${
      layers.length
        ? html`<${Section} title="Slots of one layer">
            <${LayerSlots}
              layers=${layers}
              before=${base}
              after=${target}
              slotsPerRank=${slotsPerRank}
              loads=${null}
            />
          <//>`
        : ""
    }`;
}

function Waves({ rows, note }) {
  return html`<${Section} title="Waves" note=${note}>
    <${Table}
      caption="Waves"
      rows=${rows}
      keyOf=${(wave) => wave.index}
      columns=${[
        numeric("Wave", (wave) => wave.index + 1),
        plain("Layers", (wave) => wave.layers.join(", ")),
        numeric("Copies", (wave) => count(wave.moves)),
        numeric("Bytes", (wave) => bytes(wave.nbytes)),
      ]}
    />
  <//>`;
}
