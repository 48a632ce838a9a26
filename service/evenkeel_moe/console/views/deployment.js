/** One deployment: its header, the buttons that change it, and the tabs of its views. */

import { useEffect } from "../vendor/hooks.js";
import { counted, isKnown, number, text } from "../lib/format.js";
import { isLoadPast } from "../lib/ranks.js";
import { linkTo, VIEWS } from "../lib/route.js";
import { deploymentPath } from "../net/api.js";
import { usePoll, useWidth } from "../net/poll.js";
import { Badge, Freshness, html, Level, Problem, useTitle } from "../ui.js";
import { Controls } from "./controls.js";
import { Capacity } from "./capacity.js";
import { Load } from "./load.js";
import { PlanView } from "./plan.js";
import { Plans } from "./plans.js";
import { Ranks } from "./ranks.js";
import { Record } from "./record.js";
import { Why } from "./why.js";

const PERIOD_MS = 2000;
const SCREENS = {
  why: Why,
  plans: Plans,
  load: Load,
  capacity: Capacity,
  ranks: Ranks,
  record: Record,
};

export function Deployment({ api, role, route }) {
  const name = route.deployment;
  const poll = usePoll(api, deploymentPath(name), PERIOD_MS);
  const title = VIEWS.find(([view]) => view === route.view)[1];
  useTitle(`${name}: ${title} – Evenkeel`);
  const Screen = route.plan ? PlanView : SCREENS[route.view];
  const [tabs, width] = useWidth();
  useEffect(() => {
    // On a phone the tabs are wider than the window.
    tabs.current.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }, [route.view, width]);
  const shared = { api, role, name, deployment: poll.data, now: api.now(), reload: poll.reload };
  return html`<nav class="crumbs" aria-label="Path">
      <a href="#/">Fleet</a><span aria-hidden="true">›</span><span>${name}</span>
    </nav>
    <${Head} ...${shared} poll=${poll} />
    <nav ref=${tabs} class="tabs" aria-label="Views of ${name}">
      ${VIEWS.map(
        ([view, label]) =>
          html`<a
            key=${view}
            href=${linkTo(name, view)}
            aria-current=${view === route.view ? "page" : undefined}
            >${label}</a
          >`,
      )}
    </nav>
    <${Screen} key=${`${route.view} ${route.plan}`} ...${shared} planId=${route.plan} />`;
}

function Head({ poll, name, deployment, api, role, reload, now }) {
  const health = deployment?.health;
  return html`<div class="page-head">
      <h1>${name}</h1>
      ${health ? html`<${Level} level=${health.level} />` : ""}
      ${deployment?.mode ? html`<${Badge}>mode ${deployment.mode}<//>` : ""}
      <${Freshness} poll=${poll} now=${now} />
      ${deployment ? html`<${Controls} ...${{ api, role, deployment, reload, now }} />` : ""}
    </div>
    <${Problem} error=${poll.error} />
    ${health ? html`<p id="health"><b>${health.text}</b></p>` : ""}
    ${deployment ? html`<p class="note">${facts(deployment)}</p>` : ""}`;
}

function facts(row) {
  const { shape } = row;
  const parts = [`State ${row.state}`, `epoch ${text(row.epoch)}`];
  if (shape) {
    const experts = `${counted(shape.num_layers, "layer")} of ${shape.num_logical_experts} experts`;
    const slots = `${counted(shape.slots_per_rank, "slot")} each`;
    parts.push(`${experts} on ${counted(shape.num_ranks, "rank")} with ${slots}`);
  }
  const balance = (name, value) =>
    `${name} ${number(value)}${isLoadPast(row) && isKnown(value) ? " (last known)" : ""}`;
  if (isKnown(row.time_balance)) parts.push(balance("time balance", row.time_balance));
  parts.push(balance("balancedness", row.balancedness_mean));
  for (const one of row.coverage ?? []) parts.push(one.words);
  return `${parts.join("; ")}.`;
}
