/** What the planner waits for: the gates of the newest cycle, and what would change the answer. */

import { count, percent } from "../lib/format.js";
import { hasTime, reasonCounts } from "../lib/history.js";
import { linkTo } from "../lib/route.js";
import { deploymentPath } from "../net/api.js";
import { useHistory } from "../net/history.js";
import { usePoll } from "../net/poll.js";
import { BalanceChart, BalanceKey } from "../charts/series.js";
import { html, Loaded, Moment, numeric, plain, Section, Table, wordy } from "../ui.js";

const SIGNS = {
  open: ["✓", "open"],
  closed: ["✕", "closed"],
  later: ["·", "not reached"],
  unknown: ["?", "unknown"],
};
const GATES_PERIOD_MS = 2000;
const POLICY_PERIOD_MS = 10_000;

export function Why({ api, name, deployment, now }) {
  const gates = usePoll(api, `${deploymentPath(name)}/gates`, GATES_PERIOD_MS);
  const policy = usePoll(api, `${deploymentPath(name)}/policy`, POLICY_PERIOD_MS);
  const history = useHistory(api, deployment);
  const points = history.data;
  if (!deployment) return "";
  const decision = deployment.last_decision;
  const threshold = policy.data?.thresholds.plan_below ?? null;
  return html`<${Section} title="The newest decision">
      ${
        decision
          ? html`<p class="answer">${decision.reason_text}</p>
              <p class="hint">
                ${"Decided "}
                <${Moment} unix=${decision.at} now=${now} />
                ${" ("}<code>${decision.reason}</code>${`)${since(points, decision)}. `}
                ${decision.plan_id ? html`<${PlanLink} name=${name} id=${decision.plan_id} />` : ""}
              </p>`
          : html`<p class="answer">No cycle has ended yet.</p>`
      }
    <//>
    <${Section}
      title="Gates"
      note="A cycle meets these gates in this order. The first that is closed ends it."
    >
      <${Loaded} poll=${gates}
        >${({ items }) =>
          html`<ol class="gates">
            ${items.map((gate) => html`<${Gate} ...${gate} />`)}
          </ol>`}<//
      >
    <//>
    <${Section} title="Balance" note=${spanWords(points)}>
      <${Loaded} poll=${history}
        >${() =>
          points.length
            ? html`<${BalanceKey} time=${hasTime(points)} threshold=${threshold} />
                <${BalanceChart} points=${points} height=${220} threshold=${threshold} />`
            : html`<p class="empty">No decision has a balance yet.</p>`}<//
      >
    <//>
    <${Section} title="How cycles ended" note=${spanWords(points)}>
      <${Loaded} poll=${history}
        >${() =>
          html`<${Table}
            caption="Ends of cycles"
            rows=${reasonCounts(points)}
            keyOf=${(row) => row.reason}
            columns=${[
              wordy("Reason", (row) => html`${row.words} <code>${row.reason}</code>`),
              numeric("Cycles", (row) => count(row.count)),
              numeric("Share", (row) => percent(row.share)),
            ]}
          />`}<//
      >
      <details>
        <summary>All numbers of the newest decision</summary>
        <${Numbers} numbers=${decision?.numbers ?? {}} />
      </details>
    <//>`;
}

function PlanLink({ name, id }) {
  return html`<a href=${linkTo(name, "plans", id)}>Plan ${id}</a>`;
}

function Gate({ title, state, detail, remedy }) {
  const [sign, word] = SIGNS[state];
  return html`<li class="gate ${state}">
    <span class="gate-sign"><span aria-hidden="true">${sign}</span> ${word}</span>
    <span class="gate-title">${title}</span>
    <span class="gate-detail">${detail}</span>
    ${remedy ? html`<span class="gate-remedy"><b>What would change it:</b> ${remedy}</span>` : ""}
  </li>`;
}

function Numbers({ numbers }) {
  const shown = (value) => (Number.isInteger(value) ? count(value) : Number(value).toPrecision(6));
  return html`<${Table}
    caption="Numbers"
    rows=${Object.entries(numbers).sort(([a], [b]) => (a < b ? -1 : 1))}
    keyOf=${([name]) => name}
    empty="It has none."
    columns=${[
      plain("Name", ([name]) => html`<code>${name}</code>`),
      numeric("Value", ([, value]) => shown(value)),
    ]}
  />`;
}

/** Since when every cycle has ended like the newest one. */
function since(points, decision) {
  if (!points?.length) return "";
  let same = 0;
  while (same < points.length && points[points.length - 1 - same].reason === decision.reason)
    same += 1;
  if (same < 2) return "";
  return `, like the ${same - 1} cycles before it`;
}

function spanWords(points) {
  if (!points?.length) return "";
  const minutes = Math.max(1, Math.round((points[points.length - 1].at - points[0].at) / 60));
  const span = minutes === 1 ? "minute" : `${minutes} minutes`;
  return `The last ${span}: at most an hour, as far back as decisions are kept. Times in UTC.`;
}
