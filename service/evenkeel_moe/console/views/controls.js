/** The buttons that change a deployment: freeze, resume, roll back. The token's role decides. */

import { useState } from "../vendor/hooks.js";
import { ago, moment } from "../lib/format.js";
import { allows } from "../lib/problem.js";
import { linkTo } from "../lib/route.js";
import { deploymentPath } from "../net/api.js";
import { ActionButton, Badge, Figures, html, Problem } from "../ui.js";

const FREEZES = [
  [600, "10 minutes"],
  [3600, "1 hour"],
  [8 * 3600, "8 hours"],
  [24 * 3600, "1 day"],
  [7 * 24 * 3600, "1 week"],
];

export function Controls({ api, role, deployment, reload, now }) {
  const [seconds, setSeconds] = useState(3600);
  const path = deploymentPath(deployment.deployment);
  const { frozen_until_unix: until, held, held_text: heldWords } = deployment;
  const post = async (action, body) => {
    await api.change("POST", `${path}/${action}`, body);
    await reload();
  };
  const state = html`${until ? html`<${Badge} kind="warn">frozen, ends ${ago(until, now)}<//>` : ""}
  ${held ? html`<${Badge} kind="warn">automatic plans held<//>` : ""}`;
  if (!allows(role, "operate") || deployment.state === "follower")
    return html`<div class="controls">${state}</div>`;
  return html`<div class="controls">
    ${state}
    ${
      held
        ? html`<${ActionButton}
            id="resume"
            label="Resume automatic plans"
            title="Resume automatic plans"
            kind="primary"
            act=${() => post("resume")}
          >
            <p>
              ${heldWords} After this the controller may start plans by itself in mode auto.
            </p><//
          >`
        : ""
    }
    ${
      until
        ? html`<${ActionButton}
            id="unfreeze"
            label="End the freeze"
            title="End the freeze"
            act=${() => post("freeze", { seconds: 0 })}
          >
            <p>
              The freeze ends by itself at ${moment(until)}. After this, new plans may start at
              once.
            </p><//
          >`
        : html`<${ActionButton}
            id="freeze"
            label="Freeze"
            title="Freeze this deployment"
            confirm="Freeze"
            act=${() => post("freeze", { seconds })}
          >
            <p>No new plan starts while it is frozen. A plan under way continues.</p>
            <label for="freeze-seconds">For how long</label>
            <select
              id="freeze-seconds"
              value=${seconds}
              onChange=${(event) => setSeconds(Number(event.target.value))}
            >
              ${FREEZES.map(([value, label]) => html`<option value=${value}>${label}</option>`)}
            </select><//
          >`
    }
    <${Rollback} api=${api} path=${path} deployment=${deployment} reload=${reload} now=${now} />
  </div>`;
}

function Rollback({ api, path, deployment, reload, now }) {
  const { epoch, rollback_epoch: before } = deployment;
  const [cost, setCost] = useState(null);
  // Without an answer the question names no plan.
  const last = cost?.data?.undoes;
  const ask = () => {
    setCost({ data: null, error: null });
    const told = (data) => setCost({ data, error: null });
    const failed = (error) => setCost({ data: null, error });
    api.get(`${path}/rollback?to_epoch=${before}`).then(told, failed);
  };
  const roll = async () => {
    // The epoch that the dialog names, also if another plan ends meanwhile.
    const plan = await api.change("POST", `${path}/rollback`, { to_epoch: before });
    await reload();
    location.hash = linkTo(deployment.deployment, "plans", plan.plan_id);
  };
  return html`<${ActionButton}
    id="rollback"
    label="Roll back"
    kind="danger"
    title="Roll back the last plan"
    disabled=${before === null}
    confirm="Roll back now"
    act=${roll}
    onOpen=${ask}
  >
    <p>
      ${`This moves weights: the ranks return from epoch ${epoch} to the placement of `}
      ${`epoch ${before}`}
      ${
        last
          ? html`${", which was there before plan "}
              <code>${last.plan_id}</code>${` (made ${ago(last.created_at, now)})`}`
          : ""
      }.
      Automatic plans are then held until somebody resumes them.
      ${` ${cost?.data?.hold_text ?? ""}`}
    </p>
    ${cost ? html`<${RollbackCost} ...${cost} />` : ""}<//
  >`;
}

/** What a rollback moves and costs. */
function RollbackCost({ data, error }) {
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="empty" aria-busy="true">Counting the copies…</p>`;
  return html`<${Figures} rows=${data.figures} />`;
}
