/** The plans of a deployment, newest first. */

import { bytes, count, percent } from "../lib/format.js";
import { allows } from "../lib/problem.js";
import { linkTo } from "../lib/route.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import {
  ActionButton,
  Badge,
  html,
  Loaded,
  Moment,
  numeric,
  plain,
  Section,
  Table,
  wordy,
} from "../ui.js";

const PERIOD_MS = 3000;
const OBSERVES = "In observe mode the controller makes no plans of its own.";
const KINDS = {
  proposed: "warn",
  migrating: "info",
  approved: "info",
  stalled: "bad",
  committed: "good",
};

/** Nothing is predicted for a rollback or an evacuation. */
const promised = (plan) => (plan.may_cost_text === null ? percent(plan.numbers.gain) : "");

/** The phase of a plan, as a word in a frame. */
export function Phase({ plan }) {
  return html`<${Badge} kind=${KINDS[plan.phase] ?? "plain"}>${plan.phase_text}<//>`;
}

export function Plans({ api, role, name, deployment, now, reload }) {
  const path = `${deploymentPath(name)}/plans`;
  const poll = usePoll(api, `${path}?page_size=100`, PERIOD_MS);
  const propose = async () => {
    const plan = await api.change("POST", path, {});
    await reload();
    location.hash = linkTo(name, "plans", plan.plan_id);
  };
  const actions = allows(role, "operate")
    ? html`<${ActionButton}
        id="propose"
        label="Propose"
        title="Propose a plan"
        confirm="Plan now"
        act=${propose}
      >
        <p>
          The controller plans on the present window and shows the plan as a proposal. Nothing moves
          before somebody approves it.
        </p><//
      >`
    : "";
  const id = (plan) => html`<a href=${linkTo(name, "plans", plan.plan_id)}>${plan.plan_id}</a>`;
  return html`<${Section} title="Plans" note="The newest hundred, newest first." actions=${actions}>
    <${Loaded} poll=${poll}
      >${({ items }) =>
        html`<${Table}
          caption="Plans"
          rows=${items}
          keyOf=${(plan) => plan.plan_id}
          empty="No plan was made yet."
          columns=${[
            plain("Plan", id),
            plain("Phase", (plan) => html`<${Phase} plan=${plan} />`),
            wordy("Made because", (plan) => plan.planned_because_text),
            plain("Created", (plan) => html`<${Moment} unix=${plan.created_at} now=${now} />`),
            plain("Policy", (plan) => plan.policy),
            numeric("Copies", (plan) => count(plan.moves)),
            numeric("Bytes", (plan) => bytes(plan.nbytes)),
            numeric("Promised", promised),
            numeric("Delivered", (plan) => percent(plan.delivered?.gain)),
          ]}
        />`}<//
    >
    ${deployment?.mode === "observe" ? html`<p class="hint">${OBSERVES}</p>` : ""}
  <//>`;
}
