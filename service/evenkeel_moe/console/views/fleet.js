/** Fleet now: every deployment, the one in the worst state first. */

import { counted, isKnown, number } from "../lib/format.js";
import { isLoadPast, worstFirst } from "../lib/ranks.js";
import { linkTo } from "../lib/route.js";
import { useHistory } from "../net/history.js";
import { usePoll } from "../net/poll.js";
import { BalanceChart, BalanceKey } from "../charts/series.js";
import { Badge, Freshness, html, Level, Loaded, Moment, useTitle } from "../ui.js";

const PERIOD_MS = 3000;

export function Fleet({ api }) {
  const poll = usePoll(api, "deployments?page_size=1000", PERIOD_MS);
  useTitle("Fleet – Evenkeel");
  return html`<div class="page-head">
      <h1>Fleet now</h1>
      <${Freshness} poll=${poll} now=${api.now()} />
    </div>
    <${Loaded} poll=${poll}
      >${({ items }) =>
        items.length
          ? html`<p class="note">${summary(items)}</p>
              <${BalanceKey} time=${items.some(knowsTime)} />
              <ul class="fleet">
                ${worstFirst(items).map(
                  (row) => html`<${Row} key=${row.deployment} api=${api} row=${row} />`,
                )}
              </ul>`
          : html`<p class="empty card">
              No deployment is known yet. A deployment appears when its first rank connects.
            </p>`}<//
    >`;
}

function summary(rows) {
  const times = (level) => rows.filter((row) => row.health.level === level).length;
  const [troubled, attention] = ["bad", "attention"].map(times);
  const parts = [counted(rows.length, "deployment")];
  if (troubled) parts.push(`${troubled} in trouble`);
  if (attention) parts.push(`${attention} to look at`);
  return `${parts.join(", ")}. The worst comes first.`;
}

function Row({ api, row }) {
  const { health } = row;
  const waiting = row.proposals ?? [];
  const history = useHistory(api, row);
  const { last_decision: decision, active_plan: plan } = row;
  const fresh = row.ranks?.filter((rank) => rank.fresh).length;
  return html`<li class="card fleet-row ${health.level}" data-deployment=${row.deployment}>
    <div class="fleet-name">
      <h2><a href=${linkTo(row.deployment)}>${row.deployment}</a></h2>
      <${Level} level=${health.level} />
      ${row.mode ? html`<${Badge}>mode ${row.mode}<//>` : ""}
      ${row.ranks ? html`<${Badge}>${fresh} of ${row.shape.num_ranks} ranks<//>` : ""}
    </div>
    <div>
      <p><b>${health.text}</b></p>
      ${decision ? html`<${Newest} ...${{ decision, now: api.now(), above: health.text }} />` : ""}
      ${waiting.map((each) => html`<${Waiting} key=${each.plan_id} row=${row} plan=${each} />`)}
      ${plan ? html`<${Running} row=${row} plan=${plan} />` : ""}
    </div>
    <div>
      <p class="figures">
        ${knowsTime(row) && html`<${Figure} value=${row.time_balance} name="time balance" />`}
        <${Figure} value=${row.balancedness_mean} name="balancedness" />
      </p>
      ${
        isLoadPast(row) && isKnown(row.balancedness_mean)
          ? html`<p class="hint">Last known, while all ranks were connected.</p>`
          : ""
      }
      <${Loaded} poll=${history}
        >${(points) =>
          points.length
            ? html`<${BalanceChart} points=${points} height=${64} compact />`
            : html`<p class="empty">The last hour has no decision.</p>`}<//
      >
    </div>
  </li>`;
}

const Figure = ({ value, name }) => html`<span><b>${number(value, 2)}</b> ${name}</span>`;

/** Without a cost model, and under one by tokens, there is no time balance. */
const knowsTime = ({ time_balance: time, cost_model: model }) =>
  isKnown(time) || (Boolean(model) && model.unit !== "tokens");

function Newest({ decision, now, above }) {
  const words = decision.reason_text;
  return html`<p class="hint">
    ${"Newest decision, "}<${Moment} unix=${decision.at} now=${now} />
    ${words === above ? "." : `: ${words}`}
  </p>`;
}

function Waiting({ row, plan }) {
  const link = linkTo(row.deployment, "plans", plan.plan_id);
  return html`<p>
    <a class="button small primary" href=${link}
      >Look at the proposal: ${counted(plan.moves, "copy", "copies")}</a
    >
  </p>`;
}

function Running({ row, plan }) {
  const wave = Math.min(plan.waves_committed + 1, plan.waves);
  const link = linkTo(row.deployment, "plans", plan.plan_id);
  return html`<p><a href=${link}>Plan under way: wave ${wave} of ${plan.waves}</a></p>`;
}
