/** The buttons that change a deployment: pause, resume, roll back. The token's role decides. */

import { useState } from "../vendor/hooks.js";
import { ago, moment } from "../lib/format.js";
import { allows } from "../lib/problem.js";
import { linkTo } from "../lib/route.js";
import { deploymentPath } from "../net/api.js";
import { ActionButton, Badge, Figures, html, Problem } from "../ui.js";

const PAUSES = [
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
  const state = html`${until ? html`<${Badge} kind="warn">paused, ends ${ago(until, now)}<//>` : ""}
  ${held ? html`<${Badge} kind="warn">automatic plans held<//>` : ""}`;
  if (!allows(role, "operate") || deployment.state === "follower")
    return html`<div class="controls">${state}</div>`;
  return html`<div class="controls">
    ${state}
    ${
      held || until
        ? html`<${ActionButton}
            id="resume"
            label="Resume"
            title="Let plans start again"
            kind="primary"
            act=${() => post("resume")}
          >
            ${until ? html`<p>The pause ends by itself at ${moment(until)}.</p>` : ""}
            ${held ? html`<p>${heldWords}</p>` : ""}
            <p>After this the controller may start plans by itself in mode auto.</p><//
          >`
        : ""
    }
    ${
      until
        ? ""
        : html`<${ActionButton}
            id="pause"
            label="Pause"
            title="Pause this deployment"
            confirm="Pause"
            act=${() => post("freeze", { seconds })}
          >
            <p>No new plan starts while it is paused. A plan under way continues.</p>
            <label for="pause-seconds">For how long</label>
            <select
              id="pause-seconds"
              value=${seconds}
              onChange=${(event) => setSeconds(Number(event.target.value))}
            >
              ${PAUSES.map(([value, label]) => html`<option value=${value}>${label}</option>`)}
            </select><//
          >`
    }
    <${Rollback} api=${api} path=${path} deployment=${deployment} reload=${reload} now=${now} />
  </div>`;
}

function Rollback({ api, path, deployment, reload, now }) {
  // As the dialog opened: text, cost and request name one epoch, also if a plan ends meanwhile.
  const [asked, setAsked] = useState(null);
  const ask = () => {
    const opened = { epoch: deployment.epoch, before: deployment.rollback_epoch };
    const add = (answer) => setAsked((old) => (old === opened ? { ...opened, ...answer } : old));
    setAsked(opened);
    api.get(`${path}/rollback?to_epoch=${opened.before}`).then(
      (data) => add({ data }),
      (error) => add({ error }),
    );
  };
  const roll = async () => {
    const plan = await api.change("POST", `${path}/rollback`, { to_epoch: asked.before });
    await reload();
    location.hash = linkTo(deployment.deployment, "plans", plan.plan_id);
  };
  return html`<${ActionButton}
    id="rollback"
    label="Roll back"
    kind="danger"
    title="Roll back the last plan"
    disabled=${deployment.rollback_epoch === null}
    confirm="Roll back now"
    act=${roll}
    onOpen=${ask}
  >
    ${asked ? html`<${RollbackQuestion} ...${asked} now=${now} />` : ""}<//
  >`;
}

/** What a rollback moves and costs. */
function RollbackQuestion({ epoch, before, data, error, now }) {
  // Without an answer the question names no plan.
  const last = data?.undoes;
  const counting = html`<p class="empty" aria-busy="true">Counting the copies…</p>`;
  return html`<p>
      ${`This moves weights: the ranks return from epoch ${epoch} to the placement of `}
      ${`epoch ${before}`}
      ${
        last
          ? html`${", which was there before plan "}
              <code>${last.plan_id}</code>${` (made ${ago(last.created_at, now)})`}`
          : ""
      }.
      Automatic plans are then held until somebody resumes them.
      ${` ${data?.hold_text ?? ""}`}
    </p>
    <${Problem} error=${error} />
    ${data ? html`<${Figures} rows=${data.figures} />` : error ? "" : counting}`;
}
