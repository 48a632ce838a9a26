/** Policy and record: the policy, and who changed what. */

import { useState } from "../vendor/hooks.js";
import { formOf, labelOf, policyChanges } from "../lib/changes.js";
import { bytes, count, duration, moment, UNKNOWN } from "../lib/format.js";
import { allows } from "../lib/problem.js";
import { deploymentPath } from "../net/api.js";
import { usePoll } from "../net/poll.js";
import {
  ActionButton,
  Badge,
  Facts,
  html,
  Loaded,
  Moment,
  numeric,
  plain,
  Section,
  Table,
  wordy,
} from "../ui.js";

const PERIOD_MS = 5000;

export function Record({ api, role, name, now, reload }) {
  const path = deploymentPath(name);
  const policy = usePoll(api, `${path}/policy`, PERIOD_MS);
  const audit = usePoll(api, `${path}/audit?page_size=100`, PERIOD_MS);
  const changed = () => Promise.all([policy.reload(), audit.reload(), reload()]);
  const edit = html`<${EditPolicy} ...${{ api, path, role, document: policy.data, changed }} />`;
  return html`<${Section}
      title="Policy"
      actions=${policy.data && allows(role, "operate") ? edit : ""}
    >
      <${Loaded} poll=${policy}>${(document) => html`<${Policy} document=${document} />`}<//>
    <//>
    <${Section}
      title="Requests for changes"
      note="With a known token, also those that were refused; newest first."
    >
      <${Loaded} poll=${audit}
        >${({ items }) =>
          html`<${Table}
            caption="Audit"
            rows=${items}
            keyOf=${(row) => row.id}
            empty="Nobody has asked for a change yet."
            columns=${[
              plain("When", (row) => html`<${Moment} unix=${row.at} now=${now} />`),
              plain("Who", (row) => html`${row.by} <span class="hint">${row.role}</span>`),
              wordy("Request", (row) => html`<${Request} row=${row} base=${`/v1/${path}`} />`),
              plain("Outcome", (row) => html`<${Outcome} status=${row.status} />`),
              plain("UTC", (row) => html`<span class="nowrap">${utc(row.at)}</span>`),
              plain("Trace", (row) => html`<code>${row.trace_id?.slice(0, 12) ?? UNKNOWN}</code>`),
            ]}
          />`}<//
      >
    <//>`;
}

const utc = (unix) => moment(unix).slice(0, 19);

function Request({ row, base }) {
  const request = `${row.method} ${row.path.replace(base, "")}`;
  return html`${row.text}<span class="hint nowrap"><code>${request}</code></span>`;
}

function Outcome({ status }) {
  return status < 400
    ? html`<${Badge} kind="good">✓ ${status}<//>`
    : html`<${Badge} kind="bad">✕ ${status}<//>`;
}

function Policy({ document }) {
  const { limits, schedule, thresholds } = document;
  const bound = (value, show) => (value === null ? "no limit" : show(value));
  return html`<${Facts}
      rows=${[
        ["Mode", document.mode],
        ["Algorithm", document.policy],
        ["Redundant slots per layer", document.replica_budget ?? "all"],
        ["Shadow policies", document.shadow_policies.join(", ") || "none"],
        ["Cost model", document.cost],
        ["Dispatch", document.dispatch ?? "as the ranks tell"],
        [labelOf("cycle_s"), duration(document.cycle_s)],
        [labelOf("proposal_ttl_s"), duration(document.proposal_ttl_s)],
        [labelOf("max_moves"), bound(limits.max_moves, count)],
        [labelOf("max_bytes"), bound(limits.max_bytes, bytes)],
        [labelOf("max_layers"), bound(limits.max_layers, count)],
        ["Plans may start", schedule.windows.join("; ") || "at any time"],
        ["Plans may not start", schedule.blackouts.join("; ") || "no such times"],
      ]}
    />
    <details>
      <summary>Thresholds of the gates</summary>
      <${Table}
        caption="Thresholds"
        rows=${Object.entries(thresholds)}
        keyOf=${([name]) => name}
        columns=${[
          plain("Name", ([name]) => html`<code>${name}</code>`),
          numeric("Value", ([, value]) => value),
        ]}
      />
    </details>`;
}

/** The fields of the form that change with one input. */
function withValue(form, group, name, value) {
  return group ? { [group]: { ...form[group], [name]: value } } : { [name]: value };
}

function EditPolicy({ api, path, role, document, changed }) {
  const [base, setBase] = useState(null);
  const form = base?.form ?? formOf(document);
  const edit = (change) => {
    // What is edited, and what is compared with, stay as they were when the first field changed.
    const start = base ?? { document, tag: api.tagOf(`${path}/policy`), form };
    setBase({ ...start, form: { ...start.form, ...change } });
  };
  const forget = () => setBase(null);
  const changes = policyChanges(base?.document ?? document, form);
  const isChanged = Object.keys(changes).length > 0;
  const act = async () => {
    const tag = base?.tag;
    try {
      await api.change("PATCH", `${path}/policy`, changes, tag ? { "If-Match": tag } : {});
    } finally {
      await changed();
    }
    setBase(null);
  };
  const input = (group, name) =>
    html`<label key=${name}
      >${labelOf(name)}${name.endsWith("_s") && labelOf(name) !== name ? ", in seconds" : ""}
      <input
        type="text"
        inputmode="decimal"
        name=${name}
        value=${group ? form[group][name] : form[name]}
        onInput=${(event) => edit(withValue(form, group, name, event.target.value))}
    /></label>`;
  return html`<${ActionButton}
    id="policy"
    label="Change"
    title="Change the policy"
    confirm="Send the changes"
    act=${act}
    ready=${isChanged}
  >
    <label
      >${"Mode "}
      <select
        name="mode"
        value=${form.mode}
        onChange=${(event) => edit({ mode: event.target.value })}
      >
        <option value="observe">observe: the controller starts nothing</option>
        <option value="propose">propose: plans wait for approval</option>
        <option value="auto">auto: plans start by themselves</option>
      </select></label
    >
    <div class="inputs">${["cycle_s", "proposal_ttl_s"].map((name) => input(null, name))}</div>
    <details>
      <summary>Thresholds</summary>
      <div class="inputs">
        ${Object.keys(form.thresholds).map((name) => input("thresholds", name))}
      </div>
    </details>
    ${
      allows(role, "admin")
        ? html`<details>
            <summary>Limits (empty is none)</summary>
            <div class="inputs">
              ${Object.keys(form.limits).map((name) => input("limits", name))}
            </div>
          </details>`
        : ""
    }
    <p class="hint">
      ${allows(role, "admin") ? "" : "The limits need a token of role admin. "}
      The algorithm, its shadows, the cost model, the dispatch and the schedule are set on the
      command line, with <code>evenkeel policy set</code>.
    </p>
    ${
      isChanged
        ? html`<p>What is sent: <code id="policy-body">${JSON.stringify(changes)}</code></p>`
        : html`<p id="policy-same">Nothing is changed yet.</p>`
    }
    ${
      base
        ? html`<button type="button" class="button" onClick=${forget}>Discard the changes</button>`
        : ""
    }
  <//>`;
}
